"""Tests each way of calling: the kernel sees what the name says, and a correct kernel passes."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from flashproof import judging, ways
from flashproof.calling import UNOBSERVED, Fault, Refused
from flashproof.cases import Call, Case
from flashproof.impls.spec import Implementation
from flashproof.tests.suite.mutants.combinations import Mutant, Spy, kernel

# For each way of calling, a property and its level that at least one of its calls shows to the kernel.
SHOWS: dict[Call, tuple[str, str]] = {
    "plain": ("wanted", "dq dk dv"),
    "forward": ("wanted", ""),
    "no_grad": ("gradients", "False"),
    "inference": ("gradients", "inference"),
    "accumulated": ("output gradient", "zero"),
    "projected": ("inputs", "results of operations"),
    "twice": ("backward", "again"),
    "two-forwards": ("between", "another forward"),
    "after-another": ("scale", "given"),
    "renewed": ("wanted", "dq dk dv"),
    "readdressed": ("wanted", "dq dk dv"),
    "grown": ("keys' rest", "of 1"),
    "checkpointed": ("recomputed", "True"),
    "compiled": ("wanted", "dq dk dv"),
    "thread": ("thread", "another"),
    "threads": ("thread", "another"),
    "parallel": ("threads of loops", "several"),
    "default64": ("default dtype", "torch.float64"),
    "default16": ("default dtype", "torch.bfloat16"),
    "deterministic": ("deterministic", "True"),
    "autocast": ("autocast", "True"),
}


@pytest.mark.parametrize("call", get_args(Call))
def test_a_way_of_calling(call: Call) -> None:
    spy = Spy(watches=True)
    case = Case.parse(f"b1 h2/1 q20 k24 d16 bfloat16 causal {call} seed4")
    found = list(ways.computed(kernel(spy), case, "cpu", UNOBSERVED))
    assert SHOWS[call] in {item for shown, _ in spy.seen for item in shown.items()}
    for one in found:
        names = tuple(name for name in one.answer.tensors if name in ("out", "lse", *ways.wanted(one.case)))
        claim = kernel(spy).arithmetic(case.dtype, "cpu")
        assert all(judged.passed for judged in judging.judge(one.answer, one.case, claim, names, one.given))
    assert {"out", "lse", *ways.wanted(case)} == set(found[-1].answer.tensors) or call == "threads"


OF_INFERENCE = ("compiled", "thread", "threads", "parallel", "default64", "default16", "deterministic", "autocast")


@pytest.mark.parametrize("call", OF_INFERENCE)
def test_without_gradients_a_way_of_calling_is_that_of_inference(call: Call) -> None:
    spy = Spy(watches=True)
    case = Case.parse(f"b1 h2/1 q20 k24 d16 bfloat16 causal {call} detached seed4")
    assert list(ways.computed(kernel(spy), case, "cpu", UNOBSERVED))
    assert {shown["gradients"] for shown, _ in spy.seen} == {"inference"}
    assert all(SHOWS[call] in shown.items() for shown, _ in spy.seen) or call == "compiled"


def backwards(line: str) -> list[int]:
    """The forwards of a case with small tensors in the order of their backwards, each by its number."""
    spy, ended = Spy(watches=True), list[int]()
    right = kernel(spy).attention

    def attention(*tensors: torch.Tensor, **keywords: object) -> object:
        found = right(*tensors, **keywords)
        number = spy.forwards
        if isinstance(found, tuple) and found[0].requires_grad:
            found[0].register_hook(lambda gradient: ended.append(number))
        return found

    implementation = replace(kernel(spy), attention=attention)
    case = Case.parse(f"{line} float32 causal two-forwards")
    assert len(list(ways.computed(implementation, case, "cpu", UNOBSERVED))) == 3
    return ended


def test_backwards_follow_many_forwards_in_the_order_of_a_network_or_of_a_pipeline() -> None:
    for line, calls in (("b1 h2 q20 k24 d16", 32), ("b1 h1 q16 k16 d16", 128)):
        # The third call is without gradients.
        assert backwards(f"{line} seed1") == [*range(calls + 3, 3, -1), 2, 1]
        assert backwards(f"{line} seed2") == [1, 2]


# Two ways cannot show a fault: a backward of zeros has none, and autograd had saved what a checkpoint computes again.
@pytest.mark.parametrize(
    "call",
    [call for call, shown in SHOWS.items() if shown != SHOWS["plain"] and call not in ("accumulated", "checkpointed")],
)
def test_a_fault_of_one_way_shows_there_alone(call: Call) -> None:
    """The kernel is wrong where a call shows the property of this way."""
    gradients = call in ("twice", "two-forwards")
    mutant = Mutant("pair", (SHOWS[call],), None, "dv" if gradients else "out", "factor")
    for way, wrong in ((call, True), ("plain", False)):
        case = Case.parse(f"b1 h2 q20 k24 d16 bfloat16 {way} seed4")
        implementation = kernel(Spy(mutant))
        claim = implementation.arithmetic(case.dtype, "cpu")
        found = [
            judged.passed
            for one in ways.computed(implementation, case, "cpu", UNOBSERVED)
            for judged in judging.judge(one.answer, one.case, claim, tuple(one.answer.tensors), one.given)
        ]
        assert all(found) != wrong


@pytest.mark.parametrize(("seed", "queries"), [(8, 3), (9, 39)])
def test_generation_may_follow_a_prompt(seed: int, queries: int) -> None:
    """The keys of both calls are in the same memory, and a right kernel passes in both."""
    spy = Spy(watches=True)
    case = Case.parse(f"b1 h2/1 q3 k40 d16 bfloat16 causal-br k.cropped v.cropped grown seed{seed}")
    found = list(ways.computed(kernel(spy), case, "cpu", UNOBSERVED))
    assert [one.case.queries for one in found] == [queries, 3]
    assert [one.case.keys for one in found] == [39, 40]
    for one in found:
        claim = kernel(spy).arithmetic(case.dtype, "cpu")
        assert all(judged.passed for judged in judging.judge(one.answer, one.case, claim, ("out", "lse"), one.given))


@pytest.mark.parametrize(("seed", "is_wrong"), [(4, False), (5, True)])
def test_what_a_call_saves_may_be_copied(seed: int, is_wrong: bool) -> None:
    """A kernel that finds its LSE by the address of the saved output is wrong after a copy."""
    kept: dict[int, torch.Tensor] = {}

    class ByAddress(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
            out = weights @ value
            kept[out.data_ptr()] = weights
            ctx.save_for_backward(query, key, value, out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            query, key, value, out = ctx.saved_tensors
            weights, (dout,) = kept.get(out.data_ptr(), torch.zeros(query.shape[2], key.shape[2])), gradients
            dscores = weights * (dout @ value.mT - (dout * out).sum(dim=-1, keepdim=True)) / math.sqrt(query.shape[-1])
            return dscores @ key, dscores.mT @ query, weights.mT @ dout

    call: Any = ByAddress.apply
    implementation = replace(kernel(Spy()), attention=lambda query, key, value, **_: call(query, key, value))
    case = Case.parse(f"b1 h2 q20 k24 d16 float32 projected nolse seed{seed}")
    (one,) = ways.computed(implementation, case, "cpu", UNOBSERVED)
    claim = implementation.arithmetic(case.dtype, "cpu")
    found = judging.judge(one.answer, one.case, claim, ("out", "dq", "dk", "dv"), one.given)
    assert all(judged.passed for judged in found) != is_wrong


def test_a_kernel_may_not_change_what_other_operations_returned() -> None:
    """Autograd allows it, and the gradients of this call are right. Other uses of the query get the wrong numbers."""
    right = kernel(Spy()).attention

    def changes(query: torch.Tensor, *others: torch.Tensor, **keywords: object) -> object:
        return right(query if query.is_leaf else query.mul_(1.25).mul_(0.5), *others, **keywords)

    implementation = Implementation(name="changes", attention=changes, bare=True)
    case = Case.parse("b1 h1 q4 k4 d8 float32 projected")
    with pytest.raises(Fault, match="changed its query in place"):
        list(ways.computed(implementation, case, "cpu", UNOBSERVED))


def test_only_what_is_wanted_is_answered() -> None:
    case = Case.parse("b1 h2 q20 k24 d16 float32 only-dq-dv seed4")
    (found,) = ways.computed(kernel(Spy()), case, "cpu", UNOBSERVED)
    assert set(found.answer.tensors) == {"out", "lse", "dq", "dv"}


def test_a_call_that_raises_in_a_checkpoint_leaves_no_hooks_behind() -> None:
    """The checkpoint of PyTorch 2.11 leaves hooks behind while the exception is kept.

    With these hooks, each backward would run the call again.
    """

    def raises(*tensors: torch.Tensor, **keywords: object) -> torch.Tensor:
        raise NotImplementedError("no such case")

    implementation = Implementation(name="raises", attention=raises, bare=True)
    case = Case.parse("b1 h1 q4 k4 d8 float32 checkpointed")
    with pytest.raises(Refused) as held:
        list(ways.computed(implementation, case, "cpu", UNOBSERVED))
    leaf = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
    assert gradient.tolist() == [2.0, 2.0, 2.0]
    assert "no such case" in str(held.value)
