"""Compares the clock of the benchmarks with `triton.testing.do_bench`, on a GPU.

    python -m flashproof.tests.bench.compare_clocks [NAME...]

For each implementation and direction, it prints the median of both clocks in milliseconds, and their difference. Both
measure between two events, with a cold L2 cache. The exit status is 1 if a difference is above 3 %, or if there is no
GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from flashproof import loading
from flashproof.cases import Case
from flashproof.tests.bench import calls, settings, timing
from flashproof.tests.bench.calls import DIRECTIONS, Calls, Direction

NAMES = ("sdpa.flash", "sdpa.cudnn", "triton.fa2", "cuda.fa2")
LINE = f"{settings.line(4096, 128, 'causal')} float16"
AGREEMENT = 0.03  # the largest difference, as a share of do_bench's time
ROUNDS = 50  # in each turn
TURNS = 12  # with 4, they differed by up to 3 %


class Compared(NamedTuple):
    """The seconds of both clocks for one call."""

    name: str
    direction: Direction
    ours: float
    theirs: float

    @property
    def difference(self) -> float:
        """The difference as a share of the time by do_bench."""
        return self.ours / self.theirs - 1

    def __str__(self) -> str:
        mark = "" if abs(self.difference) <= AGREEMENT else "  not within 3 %"
        times = f"{1e3 * self.ours:8.4f} ms by events, {1e3 * self.theirs:8.4f} ms by do_bench"
        return f"{self.name:20} {self.direction:8} {times}, {100 * self.difference:+.1f} %{mark}"


def compare(call: timing.Call) -> tuple[float, float]:
    """The median seconds of a call by the clock of the benchmarks, and by do_bench.

    Both measure several times, in turn, because the speed of the chip changes. On an H200, two measurements of one call
    by do_bench differed by up to 7 %.
    """
    from triton.testing import do_bench

    ours, theirs = list[float](), list[float]()
    for _ in range(TURNS):
        ours += timing.seconds([call], "cuda", ROUNDS)[0]
        theirs += do_bench(call, return_mode="all")
    return median(ours), median(theirs) / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each call. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Compares the clock of the benchmarks with triton.testing.do_bench.")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"implementations; by default {', '.join(NAMES)}")
    names = parser.parse_args(arguments).names
    if not torch.cuda.is_available():
        print("CUDA: no device, so there is no clock to compare", file=sys.stderr)
        return 1
    given = calls.given(Case.parse(LINE), "cuda")
    print(f"{torch.cuda.get_device_name()}, {LINE}")
    found = []
    for name in names:
        for direction in DIRECTIONS:
            found.append(Compared(name, direction, *compare(Calls(loading.load(name), given).of(direction))))
            print(found[-1], flush=True)
    return int(any(abs(one.difference) > AGREEMENT for one in found))


if __name__ == "__main__":
    sys.exit(main())
