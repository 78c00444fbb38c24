"""What a quick run asks: the checks that find most wrong kernels, with the first of their cases, in a few seconds.

A quick run is no verification. It finds a wrong scale, a wrong mask, a tensor that is read by the strides of another
one, gradients of zero, and sums of 16 bit. Of the faults that only one shape, length or call shows, it finds some.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

from flashproof.cases import Case

SECONDS = 5.0  # from the first check, after which no further case begins
LATE = "the time of a quick run was over"

# How many cases of each check, of each dtype; in the order in which a run takes the checks.
CHECKS: dict[str, int] = {
    "gradients/backward": 6,
    "contract/answers": 2,
    "accuracy/forward": 4,
    "properties/spread": 1,
    "masks/hidden_keys_change_nothing": 2,
    "stability/shifted_scores": 2,
    "contract/no_grad": 2,
    "contract/two_forwards": 2,
    "contract/twice": 2,
    "contract/after_another": 2,
    "contract/renewed": 2,
    "contract/readdressed": 2,
    "masks/memory_outside_changes_nothing": 2,
    "properties/uniform": 1,
    "properties/zeros": 1,
    "properties/power_of_two": 1,
    "properties/batch_and_heads": 1,
    "properties/order_of_keys": 1,
    "contract/changed_in_place": 1,
    "contract/inference": 2,
    "contract/accumulated": 2,
    "contract/threads": 1,
    "determinism/run_to_run": 1,
    # The first call of this one imports Inductor, which takes a second.
    "properties/allocated_memory": 1,
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
