"""The gradients of query, key and value, inside the bound and without bias."""

from flashproof import grids
from flashproof.registry import check
from flashproof.subject import BACKWARD, Subject


@check("gradients", grid=grids.ordinary, claims=("backward",))
def test_backward(subject: Subject) -> None:
    """Every feature and family of the grid. The output is judged too, of a call that wants gradients and no LSE: a kernel may have paths of its own there."""
    for case in subject.cases:
        subject.judge(case, ("out", *BACKWARD), called=subject.without_lse)


@check("gradients", grid=grids.lengths, claims=("backward",), single=False)
def test_backward_over_lengths(subject: Subject) -> None:
    """One shape over sequence lengths, up to one that takes an implementation long."""
    for case in subject.cases:
        subject.judge(case, BACKWARD, axes={"queries": case.queries})
        if case is not subject.cases[-1] and subject.is_slow(case, backward=True):
            break


@check("gradients", grid=grids.magnitudes, claims=("backward",), single=False)
def test_backward_over_magnitudes(subject: Subject) -> None:
    """One shape over the magnitude of the scores."""
    for case in subject.cases:
        subject.judge(case, BACKWARD, axes={"magnitude": case.magnitude})


@check("gradients", grid=grids.small, claims=("backward",), single=False)
def test_backward_search(subject: Subject) -> None:
    """Cases that Hypothesis draws, climbing on rho."""
    subject.search(BACKWARD, grids.drawn(subject.implementation.supports, subject.dtype))
