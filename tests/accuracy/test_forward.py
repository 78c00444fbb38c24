"""Output and LSE are inside the bound, and without bias."""

from flashproof import grids
from flashproof.registry import check
from flashproof.subject import FORWARD, Subject


@check("accuracy", grid=grids.ordinary)
def test_forward(subject: Subject) -> None:
    """Output and LSE are inside the bound for every feature and every kind of numbers."""
    for case in subject.cases:
        subject.judge(case, FORWARD)


@check("accuracy", grid=grids.lengths, single=False)
def test_forward_over_lengths(subject: Subject) -> None:
    """Output and LSE are inside the bound at growing sequence lengths, until a call takes a tenth of a second."""
    for case in subject.cases:
        subject.judge(case, FORWARD, axes={"queries": case.queries})
        if case is not subject.cases[-1] and subject.is_slow(case, backward=False):
            break


@check("accuracy", grid=grids.magnitudes, single=False)
def test_forward_over_magnitudes(subject: Subject) -> None:
    """Output and LSE are inside the bound for small and for large scores."""
    for case in subject.cases:
        subject.judge(case, FORWARD, axes={"magnitude": case.magnitude})


@check("accuracy", grid=grids.small, single=False)
def test_forward_search(subject: Subject) -> None:
    """Output and LSE are inside the bound in cases that Hypothesis draws. It looks for a larger rho, and makes a failing case small."""
    subject.search(FORWARD, grids.drawn(subject.implementation.supports, subject.dtype))
