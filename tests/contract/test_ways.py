"""These checks call a kernel in the ways in which training and inference call it.

The way of calling does not change the verdict: every answer must be inside its bound. Each way has a share of the cases
in the covering array, so it meets every mask, layout, head dim and length.
"""

from flashproof.registry import check
from flashproof.subject import Subject


def _judge_all(subject: Subject) -> None:
    for case in subject.cases:
        subject.judge(case)


@check("contract", call="no_grad")
def test_no_grad(subject: Subject) -> None:
    """Under torch.no_grad, output and LSE are inside the bound."""
    _judge_all(subject)


@check("contract", call="inference")
def test_inference(subject: Subject) -> None:
    """Under torch.inference_mode, output and LSE are inside the bound."""
    _judge_all(subject)


@check("contract", call="accumulated", claims=("backward",))
def test_accumulated(subject: Subject) -> None:
    """A backward adds to the gradients that are already there."""
    _judge_all(subject)


@check("contract", call="projected", claims=("backward",))
def test_projected(subject: Subject) -> None:
    """The call does not change inputs that are results of other operations, as the inputs of a layer are."""
    _judge_all(subject)


@check("contract", call="twice", claims=("backward",))
def test_twice(subject: Subject) -> None:
    """Two backwards of one forward are both right, and the first gradients stay as they were."""
    _judge_all(subject)


@check("contract", call="two-forwards")
def test_two_forwards(subject: Subject) -> None:
    """If another call runs between the forward and the backward of a call, both are right."""
    _judge_all(subject)


@check("contract", call="after-another")
def test_after_another(subject: Subject) -> None:
    """A call after one with other values and options is right. The answer of the first call stays as it was."""
    _judge_all(subject)


@check("contract", call="renewed")
def test_renewed(subject: Subject) -> None:
    """A call with other values in the same tensors is right. The replay of a captured graph makes such calls."""
    _judge_all(subject)


@check("contract", call="readdressed")
def test_readdressed(subject: Subject) -> None:
    """A call with other tensors at the same addresses is right."""
    _judge_all(subject)


@check("contract", call="grown")
def test_grown(subject: Subject) -> None:
    """After a call with fewer keys in the same memory, output and LSE are inside the bound, as a cache grows."""
    _judge_all(subject)


@check("contract", call="checkpointed", claims=("backward",))
def test_checkpointed(subject: Subject) -> None:
    """Under torch.utils.checkpoint, whose backward runs the forward again, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="compiled")
def test_compiled(subject: Subject) -> None:
    """Under torch.compile, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="thread")
def test_thread(subject: Subject) -> None:
    """In another thread than the main one, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="threads")
def test_threads(subject: Subject) -> None:
    """In two threads at once, each call gets its own answer."""
    _judge_all(subject)


@check("contract", call="parallel")
def test_parallel(subject: Subject) -> None:
    """With several threads for PyTorch's own loops, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="default64")
def test_default_dtype(subject: Subject) -> None:
    """Under a default dtype of float64, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="default16")
def test_default_16_bit(subject: Subject) -> None:
    """Under a default dtype of bfloat16, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="deterministic")
def test_deterministic_mode(subject: Subject) -> None:
    """Under torch.use_deterministic_algorithms, the answer is inside the bound."""
    _judge_all(subject)


@check("contract", call="autocast")
def test_autocast(subject: Subject) -> None:
    """Under torch.autocast, the answer is inside the bound of products in the input dtype."""
    _judge_all(subject)
