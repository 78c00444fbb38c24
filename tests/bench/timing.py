"""The clock of the benchmarks, and two calls that are timed in turn.

On a GPU, the device measures each call between two events. On a CPU, it is the time of this process.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from flashproof.impls.spec import Device

Call = Callable[[], object]
FLUSHED_BYTES = 2**31  # written before each timed call: more than any L2 cache holds, and half a millisecond of work
FEWEST, MOST = 3, 50  # rounds of a benchmark


class Clock:
    """A timer for pytest-benchmark. It advances only by the seconds that are added to it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


def report(benchmark: BenchmarkFixture, measured: list[float]) -> None:
    """Makes measured seconds the rounds of a benchmark, whose timer must be `CLOCK`."""
    left: Iterator[float] = iter(measured)

    def advance() -> None:
        CLOCK.now += next(left)

    benchmark.pedantic(advance, rounds=len(measured))


@lru_cache(maxsize=1)
def _flushed() -> Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")


def seconds(call: Call, device: Device) -> float:
    """Measures one call.

    On a GPU, it first writes a buffer. This empties the L2 cache, and keeps the GPU busy while the call is launched.
    With a smaller buffer, the GPU waits for the host, and a call of less than a millisecond measures Python.
    """
    if device == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    _flushed().zero_()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def in_turn(call: Call, beside: Call, device: Device, budget: float) -> tuple[list[float], list[float]]:
    """Measures two calls in turn, so that the machine is in the same state for both. Returns the seconds of each round.

    The first round is not counted. budget: the seconds that the other rounds may take, within `FEWEST` and `MOST`.
    """
    first = seconds(beside, device) + seconds(call, device)
    rounds = max(FEWEST, min(MOST, int(budget / max(first, 1e-9))))
    pairs = [(seconds(beside, device), seconds(call, device)) for _ in range(rounds)]
    return [own for _, own in pairs], [other for other, _ in pairs]
