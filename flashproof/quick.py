"""A quick run: the checks that find most wrong kernels, with their first cases, in a few seconds.

A quick run is not a verification. It finds a wrong scale, a wrong mask, a tensor that is read with the strides of
another tensor, gradients of zero, and 16-bit sums. It finds some of the faults that only one shape, length or call
shows.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

from flashproof.cases import Case

SECONDS = 5.0  # seconds from the first check; then no further case begins
SIMPLIFYING = 1.0  # seconds in which a failure's case is made simpler
LATE = "the time of a quick run was over"

# The number of cases of each check in each dtype, in the order in which a run takes the checks.
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
    # The first call of this check imports Inductor, which takes a second.
    "properties/allocated_memory": 1,
}


# These checks run even after the end of the time, with at least one case. They find most faults of their layers.
ALWAYS = (
    "gradients/backward",
    "contract/answers",
    "accuracy/forward",
    "properties/spread",
    "masks/hidden_keys_change_nothing",
    "masks/memory_outside_changes_nothing",  # also for a kernel without masks
    "stability/shifted_scores",
)


def place(check: str) -> int:
    """The position of a check in the order of a quick run."""
    return list(CHECKS).index(check)


class Clock:
    """The time of a quick run. It starts with the first check of any of the run's processes.

    It excludes the time before the first check, such as imports, which take long on a busy machine.
    """

    def __init__(self, path: Path) -> None:
        """path: a file in which the processes of the run share the end of the time."""
        self._path = path
        self._end: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further check, and no further case, may start."""
        if self._end is None:
            self._end = self._begin()
        return time.monotonic() > self._end

    def leaves_out(self, check: str) -> bool:
        """Whether a check may not start."""
        return self.is_over and check not in ALWAYS

    def limited(self, cases: list[Case]) -> list[Case]:
        """The cases of a check: at least one, and no further one after the end of the time."""
        return _Limited(cases, self)

    def _begin(self) -> float:
        """The end of the time, as the first process has set it."""
        end = time.monotonic() + SECONDS
        with NamedTemporaryFile("w", dir=self._path.parent) as file:
            file.write(repr(end))
            file.flush()
            try:
                os.link(file.name, self._path)  # the file appears once, with its content
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
