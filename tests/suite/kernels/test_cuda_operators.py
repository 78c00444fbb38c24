"""Tests the CUDA implementations as operators of torch.

opcheck must accept them, torch.compile must compile a function around them without a break, and they must load on any
machine. On a machine without a GPU, the CPU twin computes. The registration of the operators is the same.
"""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from flashproof.impls import catalogue
from flashproof.impls.cuda import launching
from flashproof.oracles.masks import Dropout

NAMES = catalogue.names(["cuda.*"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def possible(request: pytest.FixtureRequest) -> None:
    """Skips with the reason if the kernels cannot run on this machine."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    missing = catalogue.load(parameters["name"]).missing if "name" in parameters else launching.missing
    if (reason := missing("cuda" if DEVICE == "cuda" else "cpu")) and "without" not in request.node.name:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off the checks of shapes (`shapes.py`), because torch.compile cannot trace them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def tensors(name: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Makes tensors for an implementation: in float16, or in float32 if it takes nothing else."""
    supports = catalogue.load(name).supports
    dtype = torch.float16 if "float16" in supports.dtypes else torch.float32
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [tensor.requires_grad_(supports.backward) for tensor in made]


def operator_of(name: str) -> str:
    """The name of the operator that computes the forward of an implementation."""
    has_backward = catalogue.load(name).supports.backward
    return f"{name.removesuffix('_deterministic').replace('.', '_')}{'_forward' if has_backward else ''}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    """Torch's own checker tests schema, fake tensors, autograd registration and tracing."""
    supports = catalogue.load(name).supports  # loading registers the operator
    operator = getattr(torch.ops.flashproof, operator_of(name))
    query, key, value = tensors(name, (1, 2, 20, 24), (1, 1, 30, 24), (1, 1, 30, 24))
    mask: tuple[Any, ...] = (torch.tensor([[[[True]]]], device=DEVICE),) if "block" in name else ()
    for is_causal, dropout in ((True, 0.0), (False, 0.25)):
        last = (dropout, -3) if supports.dropout else (True,) if "deterministic" in name else ()
        torch.library.opcheck(operator, (query, key, value, *mask, 0.2, is_causal, 10, *last))


@pytest.mark.timeout(300)
# Torch raises this warning when it imports its compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_compiled_whole(name: str) -> None:
    """torch.compile captures a function around the call without a break, forward and backward, and changes no bit."""
    implementation = catalogue.load(name)
    attention: Any = implementation.attention
    dropout: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 2**64 - 1} if implementation.supports.dropout else {}

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = attention(query * 2, key, value, is_causal=True, enable_gqa=True, **dropout)
        return out.float().square().sum()

    inputs = tensors(name, (2, 2, 40, 64), (2, 1, 33, 64), (2, 1, 33, 64))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    if not implementation.supports.backward:
        assert torch.equal(compiled(*inputs), layer(*inputs))
        return
    found, expected = (torch.autograd.grad(each(*inputs), inputs) for each in (compiled, layer))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_compiled_whole_with_other_arguments(name: str) -> None:
    """torch.compile makes scale, dropout or a length a variable after it has seen a second value.

    It must capture the call without a break in this case, too.
    """
    implementation = catalogue.load(name)
    attention: Any = implementation.attention
    torch.compiler.reset()
    compiled: Any = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for length, dim, others in (
        (12, 16, {"scale": 0.25}),
        (12, 16, {"scale": 0.3}),
        (12, 16, {"scale": -0.3, "dropout_p": 0.1, "dropout_seed": 1}),
        (40, 16, {"scale": 0.5, "dropout_p": 0.2, "dropout_seed": 2}),
        (40, 24, {"scale": 0.7}),
        (13, 40, {}),
    ):
        if "dropout_p" in others and not implementation.supports.dropout:
            continue
        query, key, value = tensors(name, (1, 2, length, dim), (1, 2, length + 3, dim), (1, 2, length + 3, dim))
        assert torch.equal(compiled(query, key, value, **others), attention(query, key, value, **others)), (
            length,
            dim,
            others,
        )


def _kept(name: str, seed: int, p: float, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Returns the dropout mask that an implementation draws: boolean [batch, heads, queries, keys], True if kept.

    All scores are 0 and the values are the unit matrix, so the output is the weights after dropout.
    """
    implementation = catalogue.load(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    zero = torch.zeros((batch, heads, queries, keys), device=device)
    key = torch.zeros((batch, heads, keys, keys), device=device)
    out: Any = implementation.attention(
        zero, key, torch.eye(keys, device=device).expand_as(key), dropout_p=p, dropout_seed=seed
    )
    return torch.as_tensor(out).cpu() != 0.0


@pytest.mark.timeout(300)
def test_dropout_masks_agree_bit_for_bit() -> None:
    """tiled, Triton, CUDA and the oracle draw the same mask.

    The masks cover several tiles, batch entries and heads, and seeds that use one word or both.
    """
    names = [
        name for name in catalogue.names(["tiled.*", "triton.*", "cuda.*"]) if catalogue.load(name).supports.dropout
    ]
    batch, heads, queries, keys = 2, 2, 70, 100
    for seed, p in ((0, 0.5), (2**64 - 1, 0.1), (0x9E3779B97F4A7C15, 0.9)):
        rows = torch.arange(queries)
        of_heads = [Dropout(p, seed).kept(b, h, rows, keys) for b, h in itertools.product(range(batch), range(heads))]
        expected = torch.stack(of_heads).view(batch, heads, queries, keys)
        assert 0.5 * (1 - p) < expected.float().mean() < 1.5 * (1 - p) + 0.05
        for name in names:
            assert torch.equal(_kept(name, seed, p, batch, heads, queries, keys), expected), name


ABSENT = 'import sys; sys.modules["cuda"] = None\n'  # with this, an import of cuda fails as if it were absent


def test_loading_without_cuda_core() -> None:
    """Without cuda-core, the kernels load and name what a GPU would need."""
    assert (
        _python(ABSENT + 'from flashproof.impls import catalogue; print(catalogue.load("cuda.fa2").missing("cuda"))')
        == "cuda-core: not installed\n"
    )


def test_collecting_without_cuda_core() -> None:
    """Without cuda-core, pytest still collects the checks of the kernels."""
    options = (
        '"--collect-only", "-q", "-p", "no:cacheprovider", "tests/accuracy", "--impl", "cuda.fa2", "--device", "cpu"'
    )
    assert "[cuda.fa2-float32-cpu]" in _python(ABSENT + f"import pytest; raise SystemExit(pytest.main([{options}]))")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_gpu_is_said_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason begins with the name of what is missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launching, "no_nvrtc", lambda: None)
    assert launching.missing("cuda") == "CUDA: no device"
    monkeypatch.setattr(launching, "no_nvrtc", lambda: "NVRTC: not found")
    assert launching.missing("cuda") == "NVRTC: not found"


def test_a_gpu_that_is_too_old_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_75 has no asynchronous copies. sm_80 has everything that the kernels need."""
    monkeypatch.setattr(launching, "no_nvrtc", lambda: None)
    for name, answer in (
        ("is_available", True),
        ("current_device", 0),
        ("get_device_name", "NVIDIA T4"),
        ("get_device_capability", (7, 5)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert launching.missing("cuda") == "CUDA: NVIDIA T4 is sm_75, and the kernels need sm_80 or later"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert launching.missing("cuda") is None
