"""Tests the plans of Triton launches: which calls share one, and that it keeps nothing of a call.

That a call with a plan gives the right result is what all other checks test, because each launch goes through a plan.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton: not installed")

from flashproof.impls import catalogue  # noqa: E402
from flashproof.impls.triton import launching  # noqa: E402
from flashproof.impls.triton.primitives import INTERPRETED  # noqa: E402

DEVICE = "cpu" if INTERPRETED.value else "cuda"
SHAPE = (1, 2, 16, 24)
NAMES = [name for name in catalogue.names(["triton.*"]) if DEVICE in catalogue.load(name).supports.devices]
EVERY = pytest.mark.parametrize("name", NAMES)
WITH_DROPOUT = [name for name in NAMES if catalogue.load(name).supports.dropout]


@pytest.fixture(autouse=True)
def plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begins each test without plans."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if reason := catalogue.load(parameters.get("name", "triton.fa2")).missing("cuda" if DEVICE == "cuda" else "cpu"):
        pytest.skip(reason)
    with mock.patch.dict(launching._PLANS, clear=True):
        yield


def tensors(seed: int = 0, dtype: torch.dtype = torch.float16, offset: int = 0) -> list[Tensor]:
    """Returns query, key, value and dout, which begin `offset` elements after an address that 64 divides."""
    numbers = torch.randn((4, *SHAPE), generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    room = [torch.empty(number.numel() + offset, dtype=dtype, device=DEVICE) for number in numbers]
    return [each[offset:].view(SHAPE).copy_(number) for each, number in zip(room, numbers, strict=True)]


def answer(name: str, given: list[Tensor], **options: Any) -> list[Tensor]:
    """Returns the output and the gradients."""
    *leaves, dout = (tensor.detach() for tensor in given)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out: Any = catalogue.load(name).attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@EVERY
def test_calls_of_one_form_share_plans(name: str) -> None:
    """The second call describes no launch. Its result is bitwise that of new plans."""
    answer(name, tensors(0))
    with mock.patch.object(launching.Launch, "run", side_effect=AssertionError("described again")):
        found = answer(name, tensors(1))
    launching._PLANS.clear()
    assert all(map(torch.equal, found, answer(name, tensors(1))))


OTHERS: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "address": (tensors(offset=1), {}),
    "address of one": ([*tensors()[:3], tensors(offset=1)[3]], {}),
    "strides": ([tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors()], {}),
    "dtype": (tensors(dtype=torch.bfloat16), {}),
    "mask": (tensors(), {"is_causal": True}),
    "scale": (tensors(), {"scale": 0.5}),
    "shared heads": ([each[:, :1] if place in (1, 2) else each for place, each in enumerate(tensors())], {}),
    "length": ([each[:, :, :9] if place in (1, 2) else each for place, each in enumerate(tensors())], {}),
}


@EVERY
@pytest.mark.parametrize("other", OTHERS)
def test_calls_of_another_form_do_not(name: str, other: str) -> None:
    """A call of another form, between two of the first, has its own plans. No result depends on the others."""
    given, options = OTHERS[other]
    found = [answer(name, each, enable_gqa=True, **kind) for each, kind in ((tensors(), {}), (given, options))]
    launching._PLANS.clear()
    alone = answer(name, given, enable_gqa=True, **options)
    again = answer(name, tensors(), enable_gqa=True)
    assert all(map(torch.equal, found[1], alone))
    assert all(map(torch.equal, found[0], again))


@EVERY
@pytest.mark.parametrize("other", ["address", "address of one", "strides", "mask", "scale", "length"])
def test_calls_of_another_form_use_the_same_kernels(name: str, other: str) -> None:
    """A kernel is compiled for constants, dtypes and kinds of arguments. None of them depends on these forms."""
    given, options = OTHERS[other]
    assert kernels(name, given, **options) == kernels(name, tensors())


@EVERY
def test_tensors_of_one_memory_use_the_same_kernels(name: str) -> None:
    """Heads that share their memory have a stride of 0, and so have the output gradients of a sum."""
    query, key, value, dout = tensors()
    shared = [query, key[:, :1].expand(SHAPE), value[:, :1].expand(SHAPE), dout[0, 0, 0, 0].expand(SHAPE)]
    assert kernels(name, shared) == kernels(name, tensors())


def kernels(name: str, given: list[Tensor], **options: Any) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Returns the kernels of a call, with what they are compiled for. The kernels do not run."""
    launches: list[launching.Launch] = []
    launching._PLANS.clear()
    with mock.patch.object(launching.Launch, "run", autospec=True, side_effect=launches.append):
        answer(name, given, **options)
    launching._PLANS.clear()
    return [
        (
            launch.kernel,
            {name: value if name.isupper() else type(value) for name, value in launch.arguments.items()},
            launch.options,
        )
        for launch in launches
    ]


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_plan_holds_no_seed(name: str) -> None:
    """Calls with other seeds share plans, and drop other weights."""
    seeds = (1, 2**63 + 1)
    found = []
    for seed in seeds:
        found.append(answer(name, tensors(), dropout_p=0.5, dropout_seed=seed))
        known = len(launching._PLANS)
    assert not any(map(torch.equal, *found))
    launching._PLANS.clear()
    assert all(map(torch.equal, found[1], answer(name, tensors(), dropout_p=0.5, dropout_seed=seeds[1])))
    assert len(launching._PLANS) == known


@EVERY
def test_a_plan_holds_no_tensor(name: str) -> None:
    """The memory of a call is free when its tensors are."""
    given = tensors()
    answers = answer(name, given)
    references = [weakref.ref(tensor) for tensor in (*given, *answers)]
    assert launching._PLANS
    given.clear()
    answers.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_plans_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST", 3)
    attention: Any = catalogue.load("triton.fa2").attention
    for length in range(1, 6):
        query, key, value, _ = (tensor[:, :, :length] for tensor in tensors())
        attention(query, key, value)
        assert len(launching._PLANS) <= 3


def test_a_tensor_that_is_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel would read an address of the host as one of the GPU."""
    monkeypatch.setattr(launching, "INTERPRETED", triton.language.constexpr(False))
    with pytest.raises(RuntimeError, match="not for a tensor on cpu; set TRITON_INTERPRET=1"):
        catalogue.load("triton.fa2").attention(*(tensor.cpu() for tensor in tensors()[:3]))
