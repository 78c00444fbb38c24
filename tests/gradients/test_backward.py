"""The gradients of query, key and value are inside the bound, and without bias."""

from flashproof import grids
from flashproof.registry import check
from flashproof.subject import BACKWARD, Subject


@check("gradients", grid=grids.ordinary, claims=("backward",))
def test_backward(subject: Subject) -> None:
    """Gradients, and the output of the same call, are inside the bound for every feature and every kind of numbers."""
    for case in subject.cases:
        subject.judge(case, ("out", *BACKWARD), called=subject.without_lse)


@check("gradients", grid=grids.lengths, claims=("backward",), single=False)
def test_backward_over_lengths(subject: Subject) -> None:
    """Gradients are inside the bound at growing sequence lengths, until a call takes a tenth of a second."""
    for case in subject.cases:
        subject.judge(case, BACKWARD, axes={"queries": case.queries})
        if case is not subject.cases[-1] and subject.is_slow(case, backward=True):
            break


@check("gradients", grid=grids.magnitudes, claims=("backward",), single=False)
def test_backward_over_magnitudes(subject: Subject) -> None:
    """Gradients are inside the bound for small and for large scores."""
    for case in subject.cases:
        subject.judge(case, BACKWARD, axes={"magnitude": case.magnitude})


@check("gradients", grid=grids.small, claims=("backward",), single=False)
def test_backward_search(subject: Subject) -> None:
    """Gradients are inside the bound in cases that Hypothesis draws. It looks for a larger rho, and makes a failing case small."""
    subject.search(BACKWARD, grids.drawn(subject.implementation.supports, subject.dtype))
