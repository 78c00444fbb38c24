"""The gradients of query, key and value are inside the bound and have no bias."""

from flashproof.registry import check
from flashproof.subject import Subject


@check("gradients", call="plain", claims=("backward",), early=True)
def test_backward(subject: Subject) -> None:
    """Gradients, output and LSE of one call are inside the bound for every feature and every kind of numbers."""
    for case in subject.cases:
        subject.judge(case)
