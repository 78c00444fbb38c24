"""The clock of the benchmarks, and two calls that are timed in turn.

On a GPU, the device measures each call between two events. On a CPU, it is the time of this process.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from flashproof.impls.spec import Device

Call = Callable[[], object]
COLD_BYTES = 2**28  # written before each timed call: more than any L2 cache holds
HIDING_BYTES = 2**31  # half a millisecond of work: enough for the host to launch a call meanwhile
FEWEST, MOST = 3, 50  # rounds of a benchmark
LAUNCHES = 3  # calls that tell how long the host takes to launch one


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
def _buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _launches_slowly(call: Call) -> bool:
    """Whether the host takes more than half of a call's time to launch it.

    The least share of several calls counts: a first call may compile, and the host may be busy with other work.
    """
    shares = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        shares.append((launched - started) / (time.perf_counter() - started))
    return min(shares) > 0.5


def seconds(timed: Sequence[Call], device: Device, rounds: int = 1) -> list[list[float]]:
    """Measures calls in turn, so that the machine is in the same state for all. Returns the seconds of each round.

    On a GPU, all calls are launched before the first result is waited for, so that the GPU never idles. A buffer is
    written before each call, which empties the L2 cache. It is small, as in `triton.testing.do_bench`: after a large
    buffer, an H200 was up to 10 % faster, probably because the tensor cores rest meanwhile. But where the host takes
    longer than the call, only a large buffer keeps the GPU busy until the call is launched.
    """
    if device == "cpu":
        return [list(times) for times in zip(*([_on_cpu(call) for call in timed] for _ in range(rounds)), strict=True)]
    is_slow = any(_launches_slowly(call) for call in timed)
    cold = _buffer(HIDING_BYTES if is_slow else COLD_BYTES)
    events = []
    for _ in range(rounds):
        for call in timed:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            cold.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    measured = [start.elapsed_time(end) / 1e3 for start, end in events]
    return [measured[place :: len(timed)] for place in range(len(timed))]


def _on_cpu(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_turn(call: Call, beside: Call, device: Device, budget: float) -> tuple[list[float], list[float]]:
    """Measures two calls in turn. Returns the seconds of each round.

    A first round is not counted. budget: the seconds that the other rounds may take, within `FEWEST` and `MOST`.
    """
    first = sum(times[-1] for times in seconds((beside, call), device))
    rounds = max(FEWEST, min(MOST, int(budget / max(first, 1e-9))))
    other, own = seconds((beside, call), device, rounds)
    return own, other
