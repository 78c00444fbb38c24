"""How long a search lasts, and that the first Ctrl-C ends it."""

import os
import signal
import time
from collections.abc import Generator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from flashproof import search
from flashproof.cases import Case
from flashproof.impls.spec import DTYPES, OWN_KERNELS, Dtype
from flashproof.search import Budget, Search
from flashproof.space import Space
from flashproof.tensors import inputs

SPACE = Space(replace(OWN_KERNELS, block_mask=True))


@pytest.fixture
def begun() -> Generator[None]:
    """Begins a run whose searches take ten seconds each. Restores the settings of the surrounding run afterwards."""
    before = search._asked, search._stop, search._is_main, signal.getsignal(signal.SIGINT)
    search.begin(Budget(seconds=10.0), f"test-{os.getpid()}", is_main=True)
    yield
    search.end()
    search._asked, search._stop, search._is_main = before[:3]
    signal.signal(signal.SIGINT, before[3])


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("5000", Budget(examples=5000)),
        ("30s", Budget(seconds=30.0)),
        ("1.5m", Budget(seconds=90.0)),
        ("8h", Budget(seconds=28800.0)),
    ],
)
def test_a_budget_is_cases_or_time(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "0", "0s", "1.5", "-3", "10 m", "soon"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="is not a budget; give a number of cases like 5000, or a time like 30s, 10m or 8h"
    ):
        Budget.parse(text)


def test_a_search_by_time_goes_on_until_it_is_over(begun: None) -> None:
    search = Search()
    runs = search.runs()
    assert [next(runs), next(runs), next(runs)] == [None] * 3
    search.deadline = time.monotonic()
    assert search.is_over
    assert list(runs) == []


def test_the_first_interrupt_ends_the_searches_of_every_process(begun: None) -> None:
    assert not Search().is_over
    os.kill(os.getpid(), signal.SIGINT)
    assert Search().is_over
    child = os.fork()  # stands for another process of the run
    if not child:
        os._exit(0 if search.is_stopped() else 1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_that_is_drawn_can_be_built(begun: None, dtype: Dtype) -> None:
    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(search.drawn(SPACE, dtype))
    def build(case: Case) -> None:
        assert Case.parse(str(case)) == case
        assert inputs(case).query.isfinite().all()

    build()


@settings(max_examples=100, derandomize=True, database=None)
@given(search.drawn(Space(replace(OWN_KERNELS, backward=False)), "float16"))
def test_a_search_asks_a_kernel_without_a_backward_for_no_gradient(case: Case) -> None:
    assert not case.backward
