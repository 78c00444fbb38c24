"""What a quick run asks: the checks and cases that find most wrong kernels, in a few seconds.

A quick run is no verification. It finds a wrong scale, a wrong mask, a tensor that is read by the strides of another
one, gradients of zero, and sums of 16 bit. Of the faults that only one shape, length or call shows, it finds some.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from flashproof.cases import Case
from flashproof.impls.spec import Dtype

SECONDS = 5.0  # from the first check, after which no further case begins
LATE = "the time of a quick run was over"
_ORDINARY = """
b1 h2/1 q33 k33 d16 causal x4 expanded
b1 h2 q33 k33 d18 causal scale2.5
b2 h2 q97 k97 d64 causal transposed
b1 h2 q140 k140 d64 causal x16
b1 h1 q140 k300 d64 spike x12
b1 h1 q60 k700 d64 rising x70
b1 h2 q257 k257 d64 causal sharp
b1 h1 q140 k140 d64 causal shift-100
b1 h4/1 q20 k300 d128 causal-br
b1 h2/1 q150 k40 d16 causal-br
b1 h1 q140 k140 d128 blocks0.5
b1 h1 q150 k150 d16 causal dropout0.3
b1 h2 q40 k33 d32 causal columns
b1 h2 q40 k70 d16 causal-br scale0.3
b1 h1 q20 k192 d16
b1 h1 q63 k64 d72 causal
b1 h1 q20 k512 d16
b2 h2 q65 k65 d64 causal k.columns v.transposed do.sliced
b1 h1 q270 k270 d128 causal
b1 h1 q149 k70 d36 causal
b1 h1 q74 k74 d64 causal scale-0.2
b1 h1 q1 k300 d16 spike x16
b1 h2 q300 k140 d64 blocks0.5
b3 h2/1 q20 k40 d96 dropout0.9
b1 h1 q70 k150 d64 causal-br shift-100
"""
_LANDMARKS = """
b1 h1 q40 k70 d32 causal shift10000.0 seed3
b1 h1 q40 k70 d32 causal shift-10000.0 seed3
b1 h1 q40 k70 d32 causal shift88.73 seed3
"""


class Share(NamedTuple):
    """What a quick run takes of a check: cases of its grid, or all of them, in every dtype or in one dtype each."""

    lines: str = ""  # the cases; all of the grid's if there are none
    in_each: int = 0  # of the cases, the first that every dtype is given; the others are dealt among the dtypes


# In the order in which a run takes them.
CHECKS: dict[str, Share] = {
    "gradients/backward": Share(_ORDINARY, 8),
    "contract/answers": Share(in_each=9),
    "accuracy/forward": Share(_ORDINARY, 8),
    "properties/spread": Share(
        "b1 h1 q32 k700 d128\nb1 h1 q140 k140 d64 v.positive do.positive\nb1 h2 q128 k16 d16 x0.25", 9
    ),
    "masks/hidden_keys_change_nothing": Share("b1 h2 q130 k130 d64 causal\nb1 h1 q130 k70 d64 causal-br"),
    "masks/empty_rows": Share("b1 h1 q130 k130 d64 blocks0 seed6\nb2 h1 q130 k1 d40 causal-br"),
    "stability/shifted_scores": Share(_LANDMARKS, 1),
    "gradients/backward_over_magnitudes": Share("b1 h1 q129 k129 d64 x256 seed2", 1),
    "contract/without_gradients": Share("b1 h1 q20 k40 d16 scale0.3\nb1 h1 q24 k24 d40 causal\nb1 h4/2 q20 k600 d64"),
    "contract/some_gradients": Share("b1 h1 q130 k20 d16\nb1 h1 q24 k24 d40 causal"),
    "properties/zeros": Share("b1 h1 q66 k66 d40 causal\nb1 h2 q40 k70 d64"),
    "contract/call_after_call": Share(),
    "contract/answer_is_its_own": Share(),
    "contract/backward_twice": Share(),
    "contract/two_forwards": Share(),
    "contract/addresses": Share("b1 h1 q40 k140 d64 offset"),
    "contract/backward_of_a_sum": Share(),
    "properties/batch_and_heads": Share(),
    "masks/memory_outside_changes_nothing": Share(
        "b1 h2 q70 k130 d40 contiguous seed8\nb2 h1 q65 k65 d64 causal k.columns v.transposed do.sliced seed8"
    ),
    "properties/uniform": Share("b1 h4/2 q20 k16 d32\nb1 h1 q70 k70 d40 causal"),
    "properties/order_of_keys": Share(),
    "properties/power_of_two": Share("b1 h1 q66 k66 d40 causal"),
    "contract/changed_in_place": Share(),
    "contract/one_memory": Share(),
    "contract/world_stays": Share(),
    "determinism/run_to_run": Share("b2 h1 q70 k70 d64 causal dropout0.2"),
    # The first call of this one imports Inductor, which takes a second.
    "properties/allocated_memory": Share("b1 h2 q65 k65 d64 causal\nb1 h1 q20 k300 d16 causal"),
}


# These run whatever the time is, with one case at least: one check of each layer that finds most faults.
ALWAYS = (
    "gradients/backward",
    "contract/answers",
    "accuracy/forward",
    "properties/spread",
    "masks/hidden_keys_change_nothing",
    "masks/memory_outside_changes_nothing",  # of a kernel without masks too
    "stability/shifted_scores",
)


def cases(check: str, grid: Sequence[Case], dtype: Dtype, among: Sequence[Dtype]) -> list[Case]:
    """The cases of a check in a quick run, of those that its grid has.

    among: the dtypes of the run, of which each is given a share.
    """
    share, start = CHECKS[check], list(CHECKS).index(check)
    lines = [Case.parse(f"{line} {dtype}") for line in share.lines.splitlines() if line]
    if not lines:
        return list(grid) if share.in_each or among[start % len(among)] == dtype else []
    mine = [
        case
        for number, case in enumerate(lines)
        if number < share.in_each or among[(start + number) % len(among)] == dtype
    ]
    return [case for case in mine if case in grid]


def place(check: str) -> int:
    """The place of a check in the order of a quick run."""
    return list(CHECKS).index(check)


class Clock:
    """The time that a quick run has. It begins with the first check of any of its processes.

    What comes before is no time of the kernel's: imports, which take long on a machine that is busy.
    """

    def __init__(self, path: Path) -> None:
        """path: a file that the processes of the run share, for the end of the time."""
        self._path = path
        self._end: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further check, and no further case, is to begin."""
        if self._end is None:
            self._end = self._begin()
        return time.monotonic() > self._end

    def leaves_out(self, check: str) -> bool:
        """Whether a check is not to begin."""
        return self.is_over and check not in ALWAYS

    def limited(self, cases: list[Case]) -> list[Case]:
        """The cases, of which a check is given one at least and no more once the time is over."""
        return _Limited(cases, self)

    def _begin(self) -> float:
        """The end of the time: as the first process has set it."""
        end = time.monotonic() + SECONDS
        with NamedTemporaryFile("w", dir=self._path.parent) as file:
            file.write(repr(end))
            file.flush()
            try:
                os.link(file.name, self._path)  # appears with its content, once
            except FileExistsError:
                return float(self._path.read_text())
        return end


class _Limited(list[Case]):
    def __init__(self, cases: list[Case], clock: Clock) -> None:
        super().__init__(cases)
        self._clock = clock

    def __iter__(self) -> Iterator[Case]:
        for number, case in enumerate(super().__iter__()):
            if number and self._clock.is_over:
                return
            yield case
