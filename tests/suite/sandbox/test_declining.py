"""Refusals: which exceptions of a bare callable mean that it does not take an input.

After a callable has answered such an input, the same exception is a fault.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashproof import diagnosis
from flashproof.calling import Fault, Refused, answered_before, attend
from flashproof.cases import Case
from flashproof.signatures import of_callable
from flashproof.tensors import inputs
from flashproof.tests.suite.sandbox.kernels import attention as innocent

CASE = Case.parse("b1 h1 q8 k8 d16 float32")


class TritonError(Exception):
    """Stands for the class of Triton, as do the classes below, so that this test does not need Triton."""


class CompilationError(TritonError):
    """The kernel could not be compiled."""


class CompileTimeAssertionFailure(CompilationError):
    """A static assertion failed."""


class OutOfResources(TritonError):
    """The kernel needs more shared memory than there is."""


for kind in (TritonError, CompilationError, CompileTimeAssertionFailure, OutOfResources):
    kind.__module__ = "triton.compiler.errors"


class MineOutOfResources(Exception):
    """An exception of another library that has the name of Triton's."""


MineOutOfResources.__name__ = "OutOfResources"


def kernel(error: BaseException, *, after: int = 0) -> Callable[..., Tensor]:
    """Returns a kernel that gives `after` right answers and then raises an exception in each call."""
    calls = 0

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return innocent(query, key, value)

    return attention


@pytest.mark.parametrize(
    ("error", "declines"),
    [
        (ValueError("dim 16"), True),
        (AssertionError("dim 16"), True),
        (CompilationError("at 3:0"), True),
        (CompileTimeAssertionFailure("at 3:0"), True),
        (OutOfResources("shared memory"), True),
        (TritonError("something else"), False),
        (MineOutOfResources("shared memory"), False),
        (KeyError("dim"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_declines(error: Exception, declines: bool) -> None:
    """Some exceptions of a bare callable are a refusal. All others are a fault."""
    implementation = of_callable(kernel(error), f"declining {error!r}")
    with pytest.raises(Refused if declines else Fault, match=str(error.args[0])):
        attend(implementation, CASE, inputs(CASE), backward=False)


@pytest.mark.parametrize(
    "error", [AssertionError("dim 16"), OutOfResources("shared memory")], ids=["assertion", "triton"]
)
def test_what_was_answered_is_not_declined(error: Exception) -> None:
    """A callable that has answered a case cannot refuse it later."""
    implementation = of_callable(kernel(error, after=1), f"answering, then {error!r}")
    attend(implementation, CASE, inputs(CASE), backward=False)
    with pytest.raises(Fault, match="refused a case that it had answered before"):
        attend(implementation, CASE, inputs(CASE), backward=False)


@pytest.mark.parametrize("seed", range(8))
def test_the_answered_case_can_be_asked_again(seed: int) -> None:
    """A form of a layout depends on the seed. The case that is asked again has the same strides."""
    case = Case.parse(f"b2 h2 q33 k33 d16 float32 transposed seed{seed}")
    error = RuntimeError("already in use")
    implementation = of_callable(kernel(error, after=1), f"answering seed {seed} once")
    attend(implementation, case, inputs(case), backward=False)
    again = answered_before(implementation)
    assert again is not None
    with pytest.raises(Fault, match="refused a case that it had answered before"):
        attend(implementation, again, inputs(again), backward=False)


def test_an_assertion_without_words() -> None:
    """An assertion without a message is reported by its source line."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query.shape[-1] % 64 == 0
        return query

    with pytest.raises(Refused, match=r"AssertionError"):
        attend(of_callable(attention, "asserting"), CASE, inputs(CASE), backward=False)
    with pytest.raises(AssertionError) as raised:
        exec(compile("assert 1 > 2", __file__, "exec"))
    assert diagnosis.said(raised.value).startswith("AssertionError: ")


def test_a_kernel_that_exits_is_not_called_again() -> None:
    """Only after an ordinary exception may a function be called again, to see whether it works on NumPy arrays."""
    calls: list[object] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.append(query)
        raise SystemExit(3)

    with pytest.raises(Fault, match="SystemExit: 3"):
        attend(of_callable(attention, "exiting"), CASE, inputs(CASE), backward=False)
    assert len(calls) == 1
    assert isinstance(calls[0], torch.Tensor)
