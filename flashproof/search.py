"""The length of searches by Hypothesis: by default ten cases, always the same ones, or four if a case takes seconds.

`--hypothesis-profile dev | ci | thorough` selects a profile. `--search 5000`, `30s`, `10m` or `8h` sets the number of
cases or the time of each search, and selects new cases each time. The first Ctrl-C then ends the searches in every
process of the run, and keeps what they found. The second Ctrl-C ends the run.
"""

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from flashproof.cases import Case, without_backward
from flashproof.impls.spec import Dtype
from flashproof.space import Space

EXAMPLES = 10  # for each search, implementation and dtype
FEW_EXAMPLES = 4  # if a case takes seconds, as in an interpreter or with a compiler
THOROUGH_EXAMPLES = 5000
ROUND = 300  # cases of one Hypothesis run; a search by time makes as many runs as fit

settings.register_profile("dev", max_examples=EXAMPLES)
settings.register_profile("thorough", max_examples=THOROUGH_EXAMPLES)

PHASES = (
    Phase.generate,
    Phase.target,
    Phase.shrink,
)  # without the last phase, a search tells only whether some case fails

Test = TypeVar("Test", bound=Callable[..., None])

_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """The limit of one search: a number of cases, or a number of seconds."""

    examples: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parses "5000", "30s", "10m" or "8h". Raises ValueError for anything else, and for zero."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
        if not found or not float(found[1]) or (not found[2] and "." in found[1]):
            raise ValueError(
                f"{text!r} is not a budget; give a number of cases like 5000, or a time like 30s, 10m or 8h"
            )
        return cls(seconds=float(found[1]) * _SECONDS[found[2]]) if found[2] else cls(examples=int(found[1]))


_asked: Budget | None = None
_stop: Path | None = None  # a file that all processes of a run see; once it exists, their searches end
_is_main = True  # whether this process removes that file


def begin(budget: Budget, run: str, *, is_main: bool) -> None:
    """Sets the limit of each search of this run. In the main process, the first Ctrl-C ends the searches."""
    global _asked, _stop, _is_main
    _asked, _stop, _is_main = budget, Path(tempfile.gettempdir()) / f"flashproof-{run}.stop", is_main
    signal.signal(signal.SIGINT, _end if is_main else signal.SIG_IGN)


def end() -> None:
    """Undoes what `begin` did."""
    global _asked, _stop  # noqa: PLW0603
    if _stop is not None and _is_main:
        _stop.unlink(missing_ok=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _asked = _stop = None


def _end(number: int, frame: object) -> None:
    assert _stop is not None
    _stop.touch()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_stopped() -> bool:
    """Whether the searches of this run must end."""
    return _stop is not None and _stop.exists()


def is_thorough() -> bool:
    """Whether the searches of this run try new cases each time, and more of them."""
    return _asked is not None or settings.get_current_profile_name() == "thorough"


def search(test: Test) -> Test:
    """Applies the profile of this run to a test over drawn cases."""
    return Search().decorated(test)


@st.composite
def drawn(draw: st.DrawFn, space: Space, dtype: Dtype) -> Case:
    """Draws a case of the space. Plain levels come first, so that a failure shrinks towards a plain case.

    If the space has no backward, the case asks for no gradient.
    """
    row = space.drawn(lambda levels: draw(st.sampled_from(levels)), dtype=dtype)
    hypothesis.assume(row is not None)
    assert row is not None
    case = space.case(row, draw(st.integers(0, 99)))
    return case if space.supports.backward else without_backward(case)


class Search:
    """One search: as many runs of Hypothesis as its limit allows."""

    def __init__(self, *, is_slow: bool = False) -> None:
        few = FEW_EXAMPLES if is_slow else EXAMPLES
        budget = _asked or Budget(examples=THOROUGH_EXAMPLES if is_thorough() else few)
        self.examples = budget.examples
        self.deadline = None if budget.seconds is None else time.monotonic() + budget.seconds

    @property
    def is_over(self) -> bool:
        """Whether no further case may be tried."""
        return is_stopped() or (self.deadline is not None and time.monotonic() > self.deadline)

    def decorated(self, test: Test) -> Test:
        """One run of Hypothesis.

        The run has no deadline, since a first call may compile a kernel. It has no database, since Hypothesis would
        replay an example of one kernel on the next kernel. A failing case is pinned as a line of a grid instead.
        """
        return settings(
            max_examples=self.examples or ROUND,
            derandomize=not is_thorough(),
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            phases=PHASES,
        )(test)

    def runs(self) -> Iterator[None]:
        """Yields once for each run that the limit allows: one run, or one after another until the end of the time."""
        yield
        while self.examples is None and not self.is_over:
            yield
