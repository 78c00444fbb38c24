"""How long Hypothesis searches: by default ten cases, always the same ones; four where a case takes seconds.

`--hypothesis-profile dev | ci | thorough` names a profile. `--search 5000`, `30s`, `10m` or `8h` sets the cases or the
time of each search, and searches thoroughly. The first Ctrl-C then ends the searches in every process of the run, with
what they have found. The second one ends the run.
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

from flashproof.cases import Case
from flashproof.impls.spec import Dtype
from flashproof.space import Space

EXAMPLES = 10  # per search, implementation and dtype
FEW_EXAMPLES = 4  # where each takes seconds, as in an interpreter, or where it is compiled
THOROUGH_EXAMPLES = 5000
ROUND = 300  # cases of one Hypothesis run, of which a search by time makes as many as fit

settings.register_profile("dev", max_examples=EXAMPLES)
settings.register_profile("thorough", max_examples=THOROUGH_EXAMPLES)

PHASES = (
    Phase.generate,
    Phase.target,
    Phase.shrink,
)  # to find out only whether there is a case that fails, the last is left out

Test = TypeVar("Test", bound=Callable[..., None])

_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """What one search may take: so many cases, or so many seconds."""

    examples: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Reads "5000", "30s", "10m" or "8h". Raises ValueError for anything else, and for nothing at all."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
        if not found or not float(found[1]) or (not found[2] and "." in found[1]):
            raise ValueError(f"{text!r} is no budget; give a number of cases like 5000, or a time like 30s, 10m or 8h")
        return cls(seconds=float(found[1]) * _SECONDS[found[2]]) if found[2] else cls(examples=int(found[1]))


_asked: Budget | None = None
_stop: Path | None = None  # all processes of a run see this file; once it is there, their searches end
_is_main = True  # and the process that takes it away


def begin(budget: Budget, run: str, *, is_main: bool) -> None:
    """Sets what each search of this run may take. In the main process, the first Ctrl-C ends the searches."""
    global _asked, _stop, _is_main
    _asked, _stop, _is_main = budget, Path(tempfile.gettempdir()) / f"flashproof-{run}.stop", is_main
    signal.signal(signal.SIGINT, _end if is_main else signal.SIG_IGN)


def end() -> None:
    """Takes back what `begin` did."""
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
    """Whether the searches of this run are to end."""
    return _stop is not None and _stop.exists()


def is_thorough() -> bool:
    """Whether this run searches new cases, and longer ones, each time."""
    return _asked is not None or settings.get_current_profile_name() == "thorough"


def search(test: Test) -> Test:
    """Applies the profile of this run to a test over drawn cases."""
    return Search().decorated(test)


@st.composite
def drawn(draw: st.DrawFn, space: Space, dtype: Dtype) -> Case:
    """A case of the space. Its plain levels come first, so that a failure shrinks towards a plain case."""
    row = space.drawn(lambda levels: draw(st.sampled_from(levels)), dtype=dtype)
    hypothesis.assume(row is not None)
    assert row is not None
    return space.case(row, draw(st.integers(0, 99)))


class Search:
    """One search: as many runs of Hypothesis as its budget allows."""

    def __init__(self, *, is_slow: bool = False) -> None:
        few = FEW_EXAMPLES if is_slow else EXAMPLES
        budget = _asked or Budget(examples=THOROUGH_EXAMPLES if is_thorough() else few)
        self.examples = budget.examples
        self.deadline = None if budget.seconds is None else time.monotonic() + budget.seconds

    @property
    def is_over(self) -> bool:
        """Whether no further case is to be tried."""
        return is_stopped() or (self.deadline is not None and time.monotonic() > self.deadline)

    def decorated(self, test: Test) -> Test:
        """One run of Hypothesis.

        It has no deadlines, since a first call may compile a kernel. It has no database, since an example of one kernel
        would be replayed on the next; what is found is pinned as a line of a grid.
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
        """As many runs as the budget allows: one, or one after the other until the time is over."""
        yield
        while self.examples is None and not self.is_over:
            yield
