"""Tests what only `cuda.fa3_fp8` has: inputs in e4m3, its refusals, and the compilation of its other calls.

Without a Hopper GPU, the CPU twin computes. test_cuda_twin_e4m3.py tests the twin, and mutants of these kernels.
"""

import pytest
import torch
from torch import Tensor

from flashproof.impls.cuda import fa3, fa3_fp8, launching
from flashproof.impls.cuda.fa3_fp8 import Rounded
from flashproof.impls.cuda.launching import call_of
from flashproof.impls.spec import Device
from flashproof.oracles import e4m3
from flashproof.tests.suite.kernels.compiling import SHARED_LIMIT
from flashproof.tests.suite.kernels.test_cuda_compile import taken
from flashproof.tests.suite.oracles import tensor_core

hopper = pytest.mark.skipif(fa3.missing("cuda") is not None, reason=fa3.missing("cuda") or "")
DEVICE: Device = "cpu" if fa3.missing("cuda") else "cuda"
computes = pytest.mark.skipif(fa3.missing(DEVICE) is not None, reason=fa3.missing(DEVICE) or "")


def some(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------------- compilations


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("scale", "causal"), [(-1.0, True), (0.0, False)])
def test_other_compilations_spill_nothing_and_fit(dim: int, scale: float, causal: bool) -> None:
    """Compiles the other signs of the scale."""
    if reason := launching.no_nvrtc():
        pytest.skip(reason)
    x = some(1, 1, 128, dim).half()
    call = call_of(x, x, scale, causal, 0, 0.0, 0)
    rounded = Rounded.of(x), Rounded.of(x), Rounded.of(x, transposed=True)
    numbers = torch.empty(1, 1, 128), torch.zeros(2, dtype=torch.int32)
    launch = fa3_fp8.forward_launch(call, *rounded, x, *numbers)
    registers, spilled_bytes = taken(launch, fa3.TARGETS[0])
    assert spilled_bytes == 0
    assert registers * 32 * launch.warps <= 65536
    assert launch.shared_bytes <= SHARED_LIMIT["sm_90"]


# ------------------------------------------------------------------------------------------------------------- rounding


def test_rows_that_are_no_vectors_are_read_one_by_one() -> None:
    """Vectors are eight columns. Rows of Q and K are written up to a multiple of 16 columns, those of V to one of 8."""
    tensors = {f"dim {dim}": some(1, 2, 5, dim).half() for dim in (12, 16, 24)}
    tensors["row of 17"] = some(1, 2, 5, 17).half()[..., :16]
    found = {name: fa3_fp8.Source.of(x, Rounded.of(x)).vectors for name, x in tensors.items()}
    assert found == {"dim 12": 0, "dim 16": 1, "dim 24": 0, "row of 17": 0}
    x = tensors["dim 24"]
    assert fa3_fp8.Source.of(x, Rounded.of(x, transposed=True)).vectors == 1


def test_room_for_rounded_tensors() -> None:
    """The last size is a multiple of 16, which the copy engine needs. The scales are those of blocks of 128 rows."""
    x = some(2, 3, 130, 20).half()
    plain, transposed = Rounded.of(x), Rounded.of(x, transposed=True)
    assert plain.numbers.shape == (2, 3, 130, 32)
    assert transposed.numbers.shape == (2, 3, 24, 144)
    assert plain.scales.shape == transposed.scales.shape == (2, 3, 2)


def in_order(transposed: Tensor) -> Tensor:
    """Undoes the order of keys and the transposition of a rounded V: returns [batch, heads, keys, dim]."""
    place = torch.arange(transposed.shape[3])
    quad, eight, odd = place % 16 // 4, place % 4 // 2, place % 2
    keys = torch.empty_like(transposed)
    keys[..., place // 16 * 16 + 8 * eight + 2 * quad + odd] = transposed
    return keys.mT


@computes
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 77, 72, 64, 8, 3])
def test_the_kernel_rounds_as_the_oracle(dim: int) -> None:
    """All numbers and scales have the same bits as those of the oracle, and what is beyond the tensor is 0."""
    powers = torch.exp2(torch.linspace(-14.0, 13.0, 300))[:, None]
    tensors = [(some(2, 3, 300, dim, seed=seed) * powers).half() for seed in (1, 2, 3)]
    given = [x.to(DEVICE) for x in tensors]
    given[0] = given[0].transpose(1, 2).contiguous().transpose(1, 2)
    rounded = [Rounded.of(x, transposed=i == 2) for i, x in enumerate(given)]
    for each in rounded:
        each.numbers.fill_(0x7F)  # NaN
    fa3_fp8.quantise_launch(*zip(given, rounded, strict=True)).run()
    for tensor, each in zip(tensors, rounded, strict=True):
        numbers = each.numbers.cpu().view(torch.float8_e4m3fn).double()
        numbers = in_order(numbers) if each.transposed else numbers
        scales = torch.exp2(e4m3.exponents(tensor, fa3_fp8.BLOCK))
        inside = numbers[:, :, :300, :dim]
        assert torch.equal(inside * scales[..., None], e4m3.rounded(tensor, fa3_fp8.BLOCK))
        assert torch.equal(each.scales.cpu().double(), scales[:, :, :: fa3_fp8.BLOCK])
        assert numbers.abs().sum() == inside.abs().sum()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("terms", [32, 64, 128])
def test_a_tensor_core_adds_as_the_emulation(terms: int) -> None:
    """The bound rests on how a tensor core adds. A product of e4m3 numbers has the bits of the emulation."""
    powers = torch.exp2(torch.linspace(-4.0, 4.0, terms).round())
    a, b = ((some(64, terms, seed=seed) * powers.roll(7 * seed)).to(torch.float8_e4m3fn) for seed in (1, 2))
    one = torch.ones((), device="cuda")
    found = torch._scaled_mm(a.cuda(), b.cuda().T, one, one, out_dtype=torch.float32, use_fast_accum=True)
    assert torch.equal(found.cpu(), tensor_core.product_of_e4m3(a.float(), b.float().T, terms))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_repeated_calls_have_the_same_bits(dim: int) -> None:
    """A race would change bits."""
    query, key, value = some(3, 2, 4, 777, dim).half().cuda().unbind()
    expected = fa3_fp8.attention(query, key, value, is_causal=True, return_lse=True)
    for _ in range(100):
        found = fa3_fp8.attention(query, key, value, is_causal=True, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_not_claimed_is_refused() -> None:
    """Float32, dropout and large heads are refused. Each message says what would be accepted."""
    x = some(1, 1, 4, 8).half()
    with pytest.raises(TypeError, match=r"^query: dtype torch\.float32 is not taken by cuda\.fa3_fp8; give float16 or"):
        fa3_fp8.attention(x.float(), x.float(), x.float())
    with pytest.raises(NotImplementedError, match=r"^dropout_p: 0\.5 is not taken by .*, which has no dropout; give 0"):
        fa3_fp8.attention(x, x, x, dropout_p=0.5)
    large = some(1, 1, 4, 136).half()
    with pytest.raises(NotImplementedError, match=r"^query: head dim 136 is not taken by .*; give at most 128"):
        fa3_fp8.attention(large, large, large)
