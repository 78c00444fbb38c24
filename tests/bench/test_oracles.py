"""Measures the references: balls, the definition with mpmath, float64, and the derivation of the bound.

The command is `pytest --benchmark-only` on a machine without a GPU, or with `--device cpu`.
"""

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from flashproof.impls.spec import Arithmetic
from flashproof.oracles import ball, bounds, mp, naive
from flashproof.oracles.problem import Problem
from flashproof.session import STATE
from flashproof.tests.bench import settings
from flashproof.tests.suite.oracles.features import problem_of

# Each computes output, LSE and gradients, or the bound on each of them.
ORACLES: dict[str, Callable[[Problem], object]] = {
    "mpmath": lambda problem: (mp.forward(problem, ball.BITS), mp.gradients(problem, ball.BITS)),
    "ball": ball.attention,
    "float64": naive.attention,
    "bound": lambda problem: bounds.bounds(problem, bounds.Claim(Arithmetic())),
}
LENGTHS = {"mpmath": (64,), "ball": (64, 256, 1024), "float64": (64, 256, 1024, 4096), "bound": (64, 256, 1024, 4096)}
ROWS = (0, 1, 63, 64, 8192, 8193, 16382, 16383)  # of 16384 queries or keys


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes the benchmarks of a run that times the CPU, and all of whose implementations are those of the catalogue."""
    names, found = FOUND[metafunc.function.__name__]
    session = metafunc.config.stash[STATE]
    reason = settings.NOT_ASKED
    if session.times:
        reason = "--impl names what is timed" if session.asked else "the GPU is timed; --device cpu times the oracles"
        if settings.device_of(session.selection) == "cpu" and not session.asked:
            metafunc.parametrize(names, found)
            return
    metafunc.parametrize(names, [pytest.param(*(None,) * len(names), marks=pytest.mark.skip(reason=reason), id="none")])


FOUND: dict[str, tuple[tuple[str, ...], list[tuple[object, ...]]]] = {
    "test_oracle": (("oracle", "length"), [(oracle, length) for oracle in LENGTHS for length in LENGTHS[oracle]]),
    "test_sampled": (("part",), [("rows",), ("columns",)]),
}


@pytest.mark.benchmark(min_rounds=2, max_time=0.3)
def test_oracle(benchmark: BenchmarkFixture, oracle: str, length: int) -> None:
    """Measures output, LSE and gradients of one head with head dim 64. mpmath follows the definition, term by term."""
    benchmark.group = f"oracles, forward and backward, {length} tokens"
    problem = problem_of(f"b1 h1 q{length} k{length} d64")
    benchmark(ORACLES[oracle], problem)


@pytest.mark.benchmark(min_rounds=2, max_time=0.3)
def test_sampled(benchmark: BenchmarkFixture, part: str) -> None:
    """Measures the balls of some rows or columns, by which a figure of a long case is checked."""
    benchmark.group = f"balls, {len(ROWS)} rows or columns of 16384"
    problem = problem_of("b1 h1 q16384 k16384 d64 causal")
    benchmark(_sampled, part, problem, torch.tensor(ROWS))


def _sampled(part: str, problem: Problem, some: torch.Tensor) -> None:
    if part == "rows":
        ball.rows(problem, 0, 0, some)
    else:  # zeros stand for a whole enclosure: only its size matters for the time
        out = torch.zeros(problem.query.shape, dtype=torch.float64)
        lse = torch.zeros(problem.query.shape[:3], dtype=torch.float64)
        ball.columns(problem, 0, 0, some, ball.Ball(out, out), ball.Ball(lse, lse))
