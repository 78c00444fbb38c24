"""Measures the training of GPT-2 on a GPU, with each implementation and with standard attention (a score matrix).

The command is `pytest tests/bench/test_training_speed.py --benchmark-only`; `--impl` narrows it. A run of all
benchmarks includes it with `--thorough`.

A step is a forward, a backward and a step of AdamW, under autocast to bfloat16 with float32 weights. A batch holds
16384 tokens, or one sequence if that is longer. Where it does not fit into memory, it is halved until it does, and the
figures are for the tokens of that batch. The tables group implementations by model and length. `extra_info` in the JSON
holds tokens per second, the peak memory, both beside standard attention, and the share of the step that is attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn import functional

from flashproof import loading
from flashproof.cases import Case, not_claimed
from flashproof.impls.catalogue import STANDARD
from flashproof.impls.spec import Implementation
from flashproof.nn import GPT, GPT2, Configuration
from flashproof.session import STATE, Session
from flashproof.tests.bench import settings
from flashproof.tests.bench.timing import CLOCK, report

MODELS = ("124M", "350M", "774M", "1.5B", "2.7B")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """What the steps of a training cost."""

    seconds: list[float]  # of each step
    attention_seconds: list[float]  # of the calls of attention in each step, forward and backward
    peak_bytes: int  # of all memory, with weights and optimizer
    batch: int

    def tokens_per_second(self, length: int) -> float:
        """The tokens of a batch over the median time of a step."""
        return self.batch * length / median(self.seconds)

    @property
    def share(self) -> float:
        """The share of attention in the time of a step."""
        return median(self.attention_seconds) / median(self.seconds)


class Stopwatch:
    """Adds up the time between starts and stops: GPU events on a GPU, else none."""

    def __init__(self, device: str) -> None:
        self.is_gpu = device == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def measured(self, call: Callable[[], Any]) -> Any:
        """Runs a call, and adds its time."""
        if not self.is_gpu:
            return call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = call()
        end.record()
        self._spans.append((start, end))
        return result

    def read(self) -> float:
        """The seconds since the last reading."""
        if not self.is_gpu:
            return 0.0
        torch.cuda.synchronize()
        seconds = sum(start.elapsed_time(end) for start, end in self._spans) / 1e3
        self._spans.clear()
        return seconds


class _Timed(torch.autograd.Function):
    """Attention whose forward and backward are timed apart from the rest of the step."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, implementation: Implementation, watch: Stopwatch
    ) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

        def call() -> Tensor:
            with torch.enable_grad():
                out = implementation.attention(*leaves, is_causal=True)
            assert isinstance(out, Tensor)
            return out

        ctx.out, ctx.leaves, ctx.watch = watch.measured(call), leaves, watch
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> tuple[Tensor | None, ...]:
        gradients = ctx.watch.measured(lambda: torch.autograd.grad(ctx.out, ctx.leaves, douts[0]))
        del ctx.out, ctx.leaves  # the graph of the inner call holds its tensors
        return *gradients, None, None


def training(
    configuration: Configuration, implementation: Implementation, batch: int, rounds: int, device: str
) -> Measured:
    """Trains for some steps on random tokens, and measures them. Raises torch.OutOfMemoryError.

    The first two steps are not counted: kernels are compiled, and memory is allocated.
    """
    whole, inner = Stopwatch(device), Stopwatch(device)

    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
        assert is_causal
        out: Tensor = _Timed.apply(query, key, value, implementation, inner)  # type: ignore[no-untyped-call]
        return out

    with torch.device(device):
        model = GPT(configuration, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    numbers = torch.randint(configuration.vocabulary, (batch, configuration.context + 1), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(numbers[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), numbers[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()

    seconds, of_attention = [], []
    for number in range(2 + rounds):
        if number == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        whole.measured(step)
        spent = whole.read(), inner.read()
        if number >= 2:
            seconds.append(spent[0])
            of_attention.append(spent[1])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Measured(seconds, of_attention, peak, batch)


def fitting(configuration: Configuration, implementation: Implementation, rounds: int, device: str) -> Measured | None:
    """The measurement with the largest batch that fits into memory. None if not even one sequence does."""
    batch = max(1, TOKENS // configuration.context)
    while batch:
        try:
            return training(configuration, implementation, batch, rounds, device)
        except torch.OutOfMemoryError:
            batch //= 2
        if device == "cuda":  # outside of the handler, which keeps the tensors of the training alive
            torch.cuda.empty_cache()
    return None


def sized(model: str, length: int) -> Configuration:
    """A configuration of GPT-2 with the context of a measurement."""
    return replace(GPT2[model], context=length)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a benchmark for each model, length and implementation on the GPU that claims it in bfloat16."""
    if "model" not in metafunc.fixturenames:
        return
    session = metafunc.config.stash[STATE]
    found = [
        (target.name, model, length)
        for model in MODELS
        for length in LENGTHS
        for target in session.selection.targets
        if target.device == "cuda" and target.dtype == "bfloat16" and not target.missing
        if target.implementation and _claims(target.implementation, sized(model, length))
    ]
    reason = _left_out(metafunc.config, session)
    if not found and not reason:
        reason = "nothing that was asked for claims a training" if torch.cuda.is_available() else "CUDA: no device"
    parameters = [pytest.param(*each, marks=pytest.mark.gpu) for each in found]
    if reason:
        parameters = [pytest.param("", "", 0, marks=pytest.mark.skip(reason=reason), id="none")]
    metafunc.parametrize(("name", "model", "length"), parameters)


def _left_out(config: pytest.Config, session: Session) -> str:
    """Why a run times no training. Empty if it does."""
    if not session.times:
        return settings.NOT_ASKED
    is_named = any(Path(str(word).partition("::")[0]).resolve() == Path(__file__).resolve() for word in config.args)
    return "" if is_named or session.selection.thorough else "timed with --thorough, or if the command names this file"


def _claims(implementation: Implementation, configuration: Configuration) -> bool:
    dim = configuration.width // configuration.heads
    case = Case(heads=configuration.heads, queries=configuration.context, dim=dim, dtype="bfloat16", mask="causal")
    return implementation.supports.backward and not_claimed(case, implementation.supports) is None


_standard: dict[tuple[str, int], Measured | None] = {}


@pytest.mark.benchmark(timer=CLOCK)
def test_training_speed(benchmark: BenchmarkFixture, name: str, model: str, length: int) -> None:
    """Measures the seconds of a step of training."""
    configuration = sized(model, length)
    found = fitting(configuration, loading.load(name), ROUNDS, "cuda")
    if found is None:
        pytest.skip(f"memory: a training of {model} on one sequence of {length} tokens does not fit")
    if (model, length) not in _standard:
        _standard[model, length] = fitting(configuration, loading.load(STANDARD), ROUNDS, "cuda")
    standard = _standard[model, length]
    benchmark.group = f"training, {model}, {length} tokens"
    report(benchmark, found.seconds)
    benchmark.extra_info |= {
        "implementation": name,
        "model": model,
        "length": length,
        "batch": found.batch,
        "tokens_per_second": found.tokens_per_second(length),
        "peak_bytes": found.peak_bytes,
        "attention_share": found.share,
        "standard": STANDARD,
        "standard_batch": standard and standard.batch,
        "standard_tokens_per_second": standard and standard.tokens_per_second(length),
        "standard_peak_bytes": standard and standard.peak_bytes,
        "gpu": torch.cuda.get_device_name(),
    }
