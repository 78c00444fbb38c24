"""The gradients of query, key and value are inside the bound, and without bias."""

from flashproof import grids
from flashproof.registry import check
from flashproof.subject import BACKWARD, Subject


@check("gradients", grid=grids.ordinary, claims=("backward",))
def test_backward(subject: Subject) -> None:
    """Gradients, and the output of the same call, are inside the bound on every feature and every family of numbers."""
    for case in subject.cases:
        subject.judge(case, ("out", *BACKWARD), called=subject.without_lse)


@check("gradients", grid=grids.lengths, claims=("backward",), single=False)
def test_backward_over_lengths(subject: Subject) -> None:
    """The same over sequence lengths, up to a length that takes the implementation long."""
    for case in subject.cases:
        subject.judge(case, BACKWARD, axes={"queries": case.queries})
        if case is not subject.cases[-1] and subject.is_slow(case, backward=True):
            break


@check("gradients", grid=grids.magnitudes, claims=("backward",), single=False)
def test_backward_over_magnitudes(subject: Subject) -> None:
    """The same over the magnitude of the scores."""
    for case in subject.cases:
        subject.judge(case, BACKWARD, axes={"magnitude": case.magnitude})


@check("gradients", grid=grids.small, claims=("backward",), single=False)
def test_backward_search(subject: Subject) -> None:
    """The same on cases that Hypothesis draws; it climbs on rho and shrinks what fails."""
    subject.search(BACKWARD, grids.drawn(subject.implementation.supports, subject.dtype))
