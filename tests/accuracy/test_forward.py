"""Answers are inside the bound and have no bias: for a forward alone, along single axes, and in a search."""

from flashproof import grids
from flashproof.registry import check
from flashproof.search import drawn
from flashproof.subject import Subject


@check("accuracy", call="forward")
def test_forward(subject: Subject) -> None:
    """If no gradient is wanted, output and LSE are inside the bound for every feature and every kind of numbers."""
    for case in subject.cases:
        subject.judge(case)


@check("accuracy", grid=grids.lengths, single=False, every=False)
def test_over_lengths(subject: Subject) -> None:
    """Answers are inside the bound at growing sequence lengths, until a call takes a tenth of a second."""
    for case in subject.cases:
        subject.judge(case, axes={"queries": case.queries})
        if case is not subject.cases[-1] and subject.is_slow(case):
            break


@check("accuracy", grid=grids.magnitudes, single=False)
def test_over_magnitudes(subject: Subject) -> None:
    """Answers are inside the bound for small and for large scores."""
    for case in subject.cases:
        subject.judge(case, axes={"magnitude": case.magnitude})


@check("accuracy", grid=grids.lines("b1 h1 q16 k16 d16"), single=False, every=False)
def test_search(subject: Subject) -> None:
    """Answers are inside the bound in cases that Hypothesis draws. It looks for a larger rho, and makes a failing case
    small."""
    subject.search(drawn(subject.space, subject.dtype))
