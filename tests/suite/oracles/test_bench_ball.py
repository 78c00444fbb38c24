"""Measures the time of an enclosure, beside that of the definition with mpmath.

The command is `pytest tests/suite/oracles --benchmark-only --benchmark-group-by=group`.
"""

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from flashproof.oracles import ball, mp
from flashproof.oracles.problem import Problem
from flashproof.tests.suite.oracles.features import problem_of

LINE = "b1 h1 q64 k64 d64"
FORWARD: dict[str, Callable[[Problem, int], object]] = {"ball": ball.forward, "mpmath": mp.forward}


@pytest.mark.benchmark(group=f"forward, {LINE}")
@pytest.mark.parametrize("oracle", FORWARD)
def test_forward(benchmark: BenchmarkFixture, oracle: str) -> None:
    """Measures the forward. The ball should be at least fifty times faster than mpmath at the same number of bits."""
    benchmark(FORWARD[oracle], problem_of(LINE), ball.BITS)


@pytest.mark.benchmark(group="ball, forward and backward")
@pytest.mark.parametrize("line", [LINE, "b1 h1 q256 k256 d64", "b1 h1 q1024 k1024 d64"])
def test_forward_and_backward(benchmark: BenchmarkFixture, line: str) -> None:
    benchmark.pedantic(ball.attention, (problem_of(line),), rounds=3)


@pytest.mark.benchmark(group="ball, 8 rows or columns of 16384")
@pytest.mark.parametrize("part", ["rows", "columns"])
def test_sampled(benchmark: BenchmarkFixture, part: str) -> None:
    problem = problem_of("b1 h1 q16384 k16384 d64 causal")
    some = torch.tensor([0, 1, 63, 64, 8192, 8193, 16382, 16383])
    benchmark.pedantic(_sampled, (part, problem, some), rounds=3)


def _sampled(part: str, problem: Problem, some: torch.Tensor) -> None:
    if part == "rows":
        ball.rows(problem, 0, 0, some)
    else:  # zeros stand for a whole enclosure: only its size matters for the time
        out, lse = (
            torch.zeros(problem.query.shape, dtype=torch.float64),
            torch.zeros(problem.query.shape[:3], dtype=torch.float64),
        )
        ball.columns(problem, 0, 0, some, ball.Ball(out, out), ball.Ball(lse, lse))
