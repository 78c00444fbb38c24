"""Tests what only `cuda.fa3_float32` has: parts of numbers, its refusals, and the compilation of its other calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashproof.impls.cuda import fa3, fa3_float32, launching
from flashproof.impls.cuda.launching import Launch, call_of
from flashproof.impls.spec import Device
from flashproof.tests.suite.kernels.compiling import SHARED_LIMIT
from flashproof.tests.suite.kernels.test_cuda_compile import taken
from flashproof.tests.suite.oracles import tensor_core

hopper = pytest.mark.skipif(fa3.missing("cuda") is not None, reason=fa3.missing("cuda") or "")
DEVICE: Device = "cpu" if fa3.missing("cuda") else "cuda"
computes = pytest.mark.skipif(fa3.missing(DEVICE) is not None, reason=fa3.missing(DEVICE) or "")


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


# --------------------------------------------------------------------------------------------------------- compilations


def launches(dim: int, scale: float, causal: bool) -> list[Launch]:
    """Returns the launch of a forward, and does not run it."""
    query = some(1, 1, 128, dim)
    parts = fa3_float32.parts_of(query)
    call = call_of(query, query, scale, causal, 0, 0.0, 0)
    numbers = torch.empty(1, 1, 128), torch.zeros(2, dtype=torch.int32)
    return [fa3_float32.forward_launch(call, parts, parts, parts, query, *numbers)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("scale", "causal"), [(-1.0, True), (0.0, False)])
def test_other_compilations_spill_nothing_and_fit(dim: int, scale: float, causal: bool) -> None:
    """Compiles the forward for a negative scale and for a scale of 0. Other tests compile it for a positive one."""
    if reason := launching.no_nvrtc():
        pytest.skip(reason)
    for launch in launches(dim, scale, causal):
        registers, spilled_bytes = taken(launch, fa3.TARGETS[0])
        assert spilled_bytes == 0
        assert registers * 32 * launch.warps <= 65536
        assert launch.shared_bytes <= SHARED_LIMIT["sm_90"]


# ---------------------------------------------------------------------------------------------------------------- parts


def test_rows_that_are_no_vectors_are_read_one_by_one() -> None:
    forms = {"whole": some(1, 2, 5, 16), "row of 17": some(1, 2, 5, 17)[..., :16], "dim 12": some(1, 2, 5, 12)}
    found = {name: fa3_float32.Source.of(x, fa3_float32.parts_of(x)).vectors for name, x in forms.items()}
    assert found == {"whole": 1, "row of 17": 0, "dim 12": 0}


@computes
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 77, 64, 8, 3])
def test_the_kernel_splits_as_the_emulation(dim: int) -> None:
    """All parts have the same bits as those of the emulation, also for numbers near the ends of the range."""
    x = some(2, 3, 70, dim) * torch.exp2(torch.linspace(-140.0, 127.0, 70))[:, None]
    x = x.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    x[0, 0, 0, 0] = torch.finfo(torch.float32).max
    first, other = x.to(DEVICE), x.to(DEVICE).transpose(0, 1)[:, :, ::3]
    pairs = [(tensor, fa3_float32.parts_of(tensor)) for tensor in (first, other)]
    fa3_float32.split_launch(*pairs).run()
    for tensor, parts in pairs:
        assert torch.equal(parts[..., :dim].float().cpu(), torch.cat(tensor_core.parts(tensor.cpu())))
        assert not parts[..., dim:].any()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("terms", [16, 32, 64])
def test_a_tensor_core_adds_as_the_emulation(terms: int) -> None:
    """The bound assumes how a tensor core adds. A tensor core and the emulation give the same bits."""
    generator = torch.Generator().manual_seed(terms)

    def numbers(*shape: int) -> Tensor:
        powers = torch.randint(-6, 7, shape, generator=generator).float()
        return (torch.randn(shape, generator=generator) * torch.exp2(powers)).bfloat16()

    a, b = numbers(64, terms), numbers(terms, 64)
    total = torch.zeros(64, 64, dtype=torch.float64)
    for first in range(0, terms, tensor_core.STEP):
        step = slice(first, first + tensor_core.STEP)
        total = tensor_core.step(a[:, step].double(), b[step].double(), total)
    assert torch.equal(torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32).cpu(), total.float())


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_repeated_calls_have_the_same_bits(dim: int) -> None:
    """A race would change bits. dQ is left out, because atomic additions sum it."""
    query, key, value, dout = some(4, 2, 4, 777, dim).cuda().unbind()
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    expected: list[Tensor] = []
    for _ in range(100):
        out, lse = fa3_float32.attention(*leaves, is_causal=True, return_lse=True)
        found: list[Any] = [out, lse, *torch.autograd.grad(out, leaves, dout)[1:]]
        expected = expected or found
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_not_claimed_is_refused() -> None:
    """Numbers of 16 bit, dropout and large heads are refused. Each message says what would be accepted."""
    x = some(1, 1, 4, 8)
    with pytest.raises(
        TypeError, match=r"^query: dtype torch\.float16 is not taken by cuda\.fa3_float32; give float32"
    ):
        fa3_float32.attention(x.half(), x.half(), x.half())
    with pytest.raises(NotImplementedError, match=r"^dropout_p: 0\.5 is not taken by .*, which has no dropout; give 0"):
        fa3_float32.attention(x, x, x, dropout_p=0.5)
    large = some(1, 1, 4, 136)
    with pytest.raises(NotImplementedError, match=r"^query: head dim 136 is not taken by .*; give at most 128"):
        fa3_float32.attention(large, large, large)
