"""Tests what only `cuda.fa3` has.

These are the copies for its copy engine, the counters of its grid, its deterministic mode, its refusals, and the
compilation of its other calls. Without a Hopper GPU, the CPU twin computes.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashproof.impls.cuda import fa3, launching
from flashproof.impls.cuda.launching import CudaError, Launch, call_of
from flashproof.impls.spec import Device
from flashproof.tests.suite.kernels.compiling import SHARED_LIMIT
from flashproof.tests.suite.kernels.test_cuda_compile import taken

hopper = pytest.mark.skipif(fa3.missing("cuda") is not None, reason=fa3.missing("cuda") or "")
DEVICE: Device = "cpu" if fa3.missing("cuda") else "cuda"
computes = pytest.mark.skipif(fa3.missing(DEVICE) is not None, reason=fa3.missing(DEVICE) or "")


def some(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def launches(dim: int, keys: int, scale: float, causal: bool) -> list[Launch]:
    """Returns what a forward launches. Nothing is computed."""
    query, key = some(1, 1, 128, dim), some(1, 1, 1, dim).expand(1, 1, keys, dim)
    call = call_of(query, key, scale, causal, 0, 0.0, 0)
    return [fa3.forward_launch(call, query, key, key, query, torch.empty(1, 1, 128), torch.zeros(2, dtype=torch.int32))]


# --------------------------------------------------------------------------------------------------------- compilations


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("keys", "scale", "causal"), [(128, -1.0, True), (128, 0.0, False), (fa3.LONG, 1.0, False)])
def test_other_compilations_spill_nothing_and_fit(dim: int, keys: int, scale: float, causal: bool) -> None:
    """Compiles the other signs of the scale, and the tile for many keys."""
    if reason := launching.no_nvrtc():
        pytest.skip(reason)
    for launch in launches(dim, keys, scale, causal):
        registers, spilled_bytes = taken(launch, fa3.TARGETS[0])
        assert spilled_bytes == 0
        assert registers * 32 * launch.warps <= 65536
        assert launch.shared_bytes <= SHARED_LIMIT["sm_90"]


def test_many_keys_have_a_tile_of_their_own() -> None:
    """Shows that the gate above compiles the tile for many keys."""
    steps = [
        launches(128, keys, 1.0, causal)[0].constants["STEP"]
        for keys, causal in ((fa3.LONG - 1, False), (fa3.LONG, False), (fa3.LONG, True))
    ]
    assert steps == [128, 176, 128]


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7512", "C7514", "C7515"])
def test_slow_code_is_an_error(code: str) -> None:
    """If ptxas reports that it serialises products or ignores setmaxnreg, the compilation fails."""
    said = (
        "ptxas info    : Used 168 registers\n"
        f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    )
    with pytest.raises(CudaError, match=rf"(?s)^NVRTC: fa3\.cu forward is compiled to slow code.*\({code}\) Potential"):
        fa3.check_assembled(said, "fa3.cu forward")
    fa3.check_assembled("ptxas info    : Used 168 registers, used 1 barriers, 75108 bytes smem\n", "fa3.cu forward")


def test_a_silent_assembler_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC has a cache of compiled code, and prints nothing about code from this cache.

    Slow code must not pass for this reason.
    """
    given: list[set[str]] = []

    def compile_cubin(_source: str, _kernel: str, constants: dict[str, int], _target: str) -> tuple[bytes, str]:
        given.append(set(constants))
        return b"code", "" if len(given) == 1 else "ptxas info : Used 9 registers\n(C7510) Potential Performance Loss"

    monkeypatch.setattr(launching, "compile_cubin", compile_cubin)
    with pytest.raises(CudaError, match="slow code"):
        fa3.compile_cubin("fa3.cu", "forward", {"DIM": 64})
    assert given == [{"DIM"}, {"DIM", "ANEW"}]


# ------------------------------------------------------------------------------------------- what the copy engine takes

FORMS: dict[str, tuple[Any, bool]] = {
    "contiguous": (lambda x: x, True),
    "transposed": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "sliced": (lambda x: torch.cat([x, x], 3)[..., : x.shape[3]], True),
    "one head for all": (lambda x: x[:, :1].expand(x.shape), True),
    "one row for all": (lambda x: x[:, :, :1].expand(x.shape), False),
    "columns apart": (lambda x: torch.stack([x, x], 4)[..., 0], False),
    "columns of a transpose": (lambda x: x.mT.contiguous().mT, False),
    "rows of 41": (lambda x: torch.cat([x, x[..., :1]], 3)[..., : x.shape[3]], False),
    "from an odd address": (lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), False),
    "dim 36": (lambda x: x[..., :36].contiguous(), False),
    "dim 3": (lambda x: x[..., :3], False),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_taken_is_copied(form: str) -> None:
    """A tensor that the copy engine can read is not copied. A copy has the same elements, then columns of zeros."""
    make, is_taken = FORMS[form]
    tensor = make(some(2, 3, 5, 40))
    assert fa3.is_taken(tensor) == is_taken
    copy = fa3.fitted(tensor)
    assert fa3.is_taken(copy)
    assert (copy is tensor) == is_taken
    dim = tensor.shape[3]
    assert torch.equal(copy[..., :dim], tensor)
    assert not copy[..., dim:].any()


@computes
@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_changes_no_bit(form: str) -> None:
    """The results for tensors in any form have the same bits as those for their contiguous copies.

    Two blocks add to dQ in any order. The order does not change the sum of two numbers.
    """
    query, key, value, dout = (FORMS[form][0](x) for x in some(4, 2, 3, 150, 40).to(DEVICE).unbind())

    def answers(*tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = fa3.attention(*leaves, is_causal=True, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    for one, other in zip(
        answers(query, key, value), answers(*(x.contiguous() for x in (query, key, value))), strict=True
    ):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------------------- counters


@hopper
@pytest.mark.gpu
def test_streams_have_counters_of_their_own() -> None:
    """Launches on several streams overlap. Each gives the answer of a single launch, and the counters end at 0."""
    inputs = [torch.randn(2, 8, 1500, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    expected: Any = fa3.attention(*inputs, is_causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    found: list[Any] = []
    for _, stream in product(range(20), streams):
        with torch.cuda.stream(stream):
            found.append(fa3.attention(*inputs, is_causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
    assert len({fa3._counters[0, stream.cuda_stream].data_ptr() for stream in streams}) == 3
    assert not any(counter.any() for counter in fa3._counters.values())


@hopper
@pytest.mark.gpu
def test_a_graph_can_be_replayed_beside_other_calls() -> None:
    """A captured call is replayed on one stream while another stream runs calls. All answers are the same."""
    x = torch.randn(2, 8, 1500, 64, device="cuda", dtype=torch.float16)
    expected: Any = fa3.attention(x, x, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured: Any = fa3.attention(x, x, x)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    found = []
    for _ in range(10):
        with torch.cuda.stream(stream):
            graph.replay()
        answer: Any = fa3.attention(x, x, x)
        found.append(answer)
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert all(torch.equal(out, expected) for out in found)


@computes
@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_magnitude_of_others() -> None:
    """A row with huge scores subtracts before it multiplies. The other rows do not, and keep their bits."""
    query, key, value = (torch.randn(1, 2, 200, 64, device=DEVICE).half() for _ in range(3))
    expected: Any = fa3.attention(query, key, value, return_lse=True)
    query[:, :, 5::16] *= 1000.0
    found: Any = fa3.attention(query, key, value, return_lse=True)
    kept = torch.arange(200, device=DEVICE) % 16 != 5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[:, :, kept], other[:, :, kept])


# --------------------------------------------------------------------------------------------------- deterministic mode


@pytest.fixture
def deterministic_mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Sets torch's deterministic mode, as the test asks, until the test ends."""
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic_mode", [False, True], indirect=True)
@pytest.mark.parametrize("attention", [fa3.attention, fa3.deterministic_attention], ids=lambda one: one.__name__)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_who_asks_for_the_same_bits_gets_no_atomics(dim: int, attention: Any, deterministic_mode: bool) -> None:
    """Torch's mode and the implementation each choose the kernel of dQ. Head dim 256 has no other one."""
    found: list[Launch] = []
    leaves = [some(1, 1, 8, dim).requires_grad_() for _ in range(3)]
    with mock.patch.object(fa3.HopperLaunch, "run", autospec=True, side_effect=found.append):
        torch.autograd.grad(attention(*leaves), leaves, some(1, 1, 8, dim))
    by_atomics = dim < 256 and attention is fa3.attention and not deterministic_mode
    assert [launch.kernel for launch in found[1:]] == ["prepare", "backward", "finish" if by_atomics else "dquery"]
    assert all(launch.constants["ATOMIC"] == by_atomics for launch in found[1:3])


@hopper
@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_thousand_backwards_agree(dim: int) -> None:
    """Dozens of blocks run at the same time in an order that varies, and every gradient has the same bits."""
    query, dout = (torch.randn(2, 8, 1500, dim, device="cuda").half() for _ in range(2))
    key, value = (torch.randn(2, 2, 1500, dim, device="cuda").half() for _ in range(2))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out: Any = fa3.deterministic_attention(*leaves, is_causal=True, enable_gqa=True)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    differ = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        differ += torch.stack([(one != other).any() for one, other in zip(first, again, strict=True)])
    assert differ.tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_not_claimed_is_refused() -> None:
    """Float32 and dropout are refused. Each message says what would be accepted."""
    x = some(1, 1, 4, 8)
    with pytest.raises(
        TypeError, match=r"^query: dtype torch\.float32 is not taken by cuda\.fa3; give float16 or bfloat16"
    ):
        fa3.attention(x.float(), x.float(), x.float())
    with pytest.raises(
        NotImplementedError, match=r"^dropout_p: 0\.5 is not taken by cuda\.fa3, which has no dropout; give 0\.0"
    ):
        fa3.attention(x, x, x, dropout_p=0.5)
    with pytest.raises(TypeError, match=r"is not taken by cuda\.fa3_deterministic; give float16 or bfloat16"):
        fa3.deterministic_attention(x.float(), x.float(), x.float())


def test_more_work_than_a_kernel_counts_is_refused() -> None:
    """The refusal comes before any launch."""
    x = torch.empty(1, dtype=torch.float16).expand(2**24, 128, 1, 8)
    call = call_of(x, x, 1.0, False, 0, 0.0, 0)
    with pytest.raises(CudaError, match=r"fewer batch entries, heads or rows would do, of fa3\.cu forward"):
        fa3.forward_launch(call, x, x, x, x, x, x)


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before and after Hopper are refused, because they have no wgmma."""
    monkeypatch.setattr(launching, "no_nvrtc", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fa3.missing("cuda") == "CUDA: no device"
    for name, answer in (("is_available", True), ("current_device", 0), ("get_device_name", "NVIDIA B200")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for capability, code in (((10, 0), "sm_100"), ((8, 0), "sm_80")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert fa3.missing("cuda") == f"CUDA: NVIDIA B200 is {code}, and wgmma needs a Hopper GPU (sm_90)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fa3.missing("cuda") is None
    monkeypatch.setattr(launching, "no_nvrtc", lambda: "cuda-core: not installed")
    assert fa3.missing("cuda") == "cuda-core: not installed"
