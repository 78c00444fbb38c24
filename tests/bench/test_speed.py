"""Measures speed on a GPU, beside a kernel of PyTorch on the same tensors.

The command is `pytest tests/bench --benchmark-only`; `--impl` and `--dtype` narrow it.

Every implementation is first judged on the same shape with one batch entry and one head. An implementation that fails
is not timed. Then each round times PyTorch's fused kernel (flash in 16 bit, efficient in float32) and the
implementation in turn, so that the chip is in the same state for both. The GPU measures each time between two events,
with a cold L2 cache. The table groups implementations by shape. `extra_info` in the JSON holds the throughput and the
ratio to PyTorch's kernel.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from statistics import median

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from flashproof import judging, loading
from flashproof.calling import TENSORS, Answer, Fault, Refused, arguments, attend
from flashproof.cases import Case, not_claimed
from flashproof.impls.spec import Dtype, Implementation
from flashproof.session import STATE
from flashproof.tensors import inputs

# A batch holds 16384 tokens, and the width (heads x head dim) is 2048, as in the FlashAttention papers.
SHAPES = (
    "b16 h16 q1024 k1024 d128 causal",
    "b4 h16 q4096 k4096 d128",
    "b4 h16 q4096 k4096 d128 causal",
    "b4 h32 q4096 k4096 d64 causal",
)
BASELINE: dict[Dtype, str] = {"float32": "sdpa.efficient", "float16": "sdpa.flash", "bfloat16": "sdpa.flash"}
SECONDS = 1.0  # for all rounds of a benchmark, within the limits of ROUNDS
ROUNDS = (3, 50)  # the fewest and the most
FLUSHED_BYTES = 2**31  # written before each timed call: more than any L2 cache holds, and half a millisecond of work

Call = Callable[[], object]


class Clock:
    """A timer for pytest-benchmark that only advances when the seconds of the GPU are added to it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a benchmark for each shape, direction and implementation on the GPU that claims the shape."""
    session = metafunc.config.stash[STATE]
    claimed = [
        t
        for t in session.selection.targets
        if session.times and t.device == "cuda" and t.implementation and not t.missing
    ]
    found = [
        (t.name, t.dtype, direction, line)
        for line in SHAPES
        for direction in ("forward", "backward")
        for t in claimed
        if t.implementation and not_claimed(Case.parse(f"{line} {t.dtype}"), t.implementation.supports) is None
    ]
    parameters = [pytest.param(*each, marks=pytest.mark.gpu) for each in found]
    if not found:
        here = "nothing that was asked for claims a shape" if torch.cuda.is_available() else "CUDA: no device"
        reason = here if session.times else "timed when asked for: --benchmark-only"
        parameters = [pytest.param("", "", "", "", marks=pytest.mark.skip(reason=reason), id="none")]
    metafunc.parametrize(("name", "dtype", "direction", "line"), parameters)


@pytest.mark.benchmark(timer=CLOCK)
def test_speed(benchmark: BenchmarkFixture, name: str, dtype: Dtype, direction: str, line: str) -> None:
    """Measures the seconds of one call. For the backward, only the computation of the gradients is timed."""
    case = Case.parse(f"{line} {dtype}")
    implementation, baseline = loading.load(name), loading.load(BASELINE[dtype])
    _judge(name, replace(case, batch=1, heads=1, kv_heads=1))
    tensors = [
        torch.randn((case.batch, case.heads, case.queries, case.dim), device="cuda", dtype=getattr(torch, dtype))
        for _ in range(4)
    ]
    call, beside = (_call(each, case, tensors, direction) for each in (implementation, baseline))
    # The first of the two calls compiles.
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(SECONDS / min(_seconds(call) for _ in range(2)))))
    besides: list[float] = []

    def target() -> None:
        CLOCK.now += _seconds(call)

    benchmark.group = f"{direction}, {line} {dtype}"
    benchmark.pedantic(target, setup=lambda: besides.append(_seconds(beside)), rounds=rounds, warmup_rounds=2)
    seconds, operations = benchmark.stats.stats.median, _operations(case, direction)
    benchmark.extra_info |= {
        "implementation": name,
        "baseline": BASELINE[dtype],
        "tflops": operations / seconds / 1e12,
        "baseline_tflops": operations / median(besides) / 1e12,
        "ratio": median(besides) / seconds,
        "gpu": torch.cuda.get_device_name(),
        "l2": "cold",
    }


@lru_cache
def _judge(name: str, case: Case) -> None:
    """Fails if the implementation is outside its bound on the case, forward or backward."""
    implementation = loading.load(name)
    answer = _answer(implementation, case)
    judged = judging.judge(answer, case, implementation.arithmetic(case.dtype, "cuda"), TENSORS)
    wrong = [f"{each.tensor} rho {each.worst_rho:.3g}" for each in judged if not each.passed]
    if wrong:
        pytest.fail(f"not timed, because it is wrong: {', '.join(wrong)} in '{case}'", pytrace=False)


def _answer(implementation: Implementation, case: Case) -> Answer:
    try:
        return attend(implementation, case, inputs(case, "cuda"), backward=True)
    except Refused as refusal:
        pytest.skip(f"refused: {refusal}")
    except Fault as fault:
        pytest.fail(f"not timed, because it is wrong: {fault}", pytrace=False)


def _call(implementation: Implementation, case: Case, tensors: list[Tensor], direction: str) -> Call:
    """Returns a function that makes one call in a direction. It raises only what the implementation raises."""
    query, key, value, dout = tensors
    leaves = [tensor.detach().requires_grad_(direction == "backward") for tensor in (query, key, value)]
    supports = replace(implementation.supports, lse=False)  # as in practice, without the LSE
    keywords = arguments(case, supports, inputs(replace(case, batch=1, heads=1, kv_heads=1, queries=1, keys=1)))

    def forward() -> Tensor:
        out: Tensor = implementation.attention(*leaves, **keywords)  # type: ignore[assignment]
        return out

    if direction == "forward":
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


@lru_cache(maxsize=1)
def _flushing() -> Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")


def _seconds(call: Call) -> float:
    """Measures the GPU seconds of one call.

    It first writes a buffer. This empties the L2 cache, and keeps the GPU busy while the call is launched. With a
    smaller buffer, the GPU waits for the host, and a call of less than a millisecond measures Python.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    _flushing().zero_()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _operations(case: Case, direction: str) -> float:
    """Counts the operations of a call, as section 4.1 of the FlashAttention-2 paper (Dao) does.

    A forward has 4 B H N M D operations, and half as many with a causal mask. A backward has 2.5 times as many.
    """
    operations = (
        4.0 * case.batch * case.heads * case.queries * case.keys * case.dim * (0.5 if case.mask != "full" else 1.0)
    )
    return operations * (2.5 if direction == "backward" else 1.0)
