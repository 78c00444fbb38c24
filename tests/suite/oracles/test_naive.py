"""Tests the float64 oracle against balls: its error must be within its own bound."""

from dataclasses import replace

import pytest
import torch

from flashproof.oracles import ball, bounds, naive, verdict
from flashproof.oracles.ball import Ball
from flashproof.oracles.problem import Problem
from flashproof.tests.suite.oracles.features import FEATURES, TENSORS, problem_of

LARGER = [
    "b1 h2 q100 k130 d16 causal-br",
    "b1 h1 q130 k100 d16 causal-br float16",
    "b1 h2 q70 k110 d32 causal bfloat16",
    "b2 h4/2 q40 k50 d8 causal dropout0.2",
    "b1 h6/1 q30 k30 d24 scale-0.3",
    "b1 h2 q260 k140 d4 blocks0.4",
    "b1 h1 q150 k270 d4 causal-br blocks0.5 dropout0.5",
    "b1 h1 q128 k128 d64 outliers",
    "b1 h1 q100 k100 d64 x64 causal",
    "b1 h1 q64 k64 d128 sharp",
    "b1 h1 q80 k80 d16 spike x30",
    "b1 h1 q80 k80 d16 causal spike x-2.5e5",
    "b1 h1 q100 k100 d8 ties causal",
    "b1 h1 q100 k100 d8 uniform causal",
    "b1 h1 q100 k100 d8 shift-100",
    "b1 h1 q100 k100 d8 shift2.5e5 dropout0.1",
    "b1 h1 q100 k100 d1 x1e9",
    "b1 h1 q50 k50 d16 x1e-9",
]
"""Cases with every feature again, at lengths where rounding errors accumulate."""


def inside(answer: naive.Attention, problem: Problem) -> dict[str, bool]:
    """Whether each tensor differs from the exact result by at most the bound of float64."""
    enclosure, bound = ball.attention(problem), bounds.bounds(problem, bounds.FLOAT64)
    rhos = {
        name: verdict.rho(
            getattr(answer, name), getattr(enclosure, name).mid, getattr(bound, name), getattr(enclosure, name).radius
        )
        for name in TENSORS
    }
    return {name: rho.value <= 1.0 for name, rho in rhos.items()}


@pytest.mark.parametrize("line", FEATURES + LARGER)
def test_float64_is_within_its_own_bound(line: str) -> None:
    problem = problem_of(line)
    assert inside(naive.attention(problem), problem) == dict.fromkeys(TENSORS, True)


@pytest.mark.parametrize("line", LARGER)
def test_a_scale_off_by_a_few_thousand_roundoffs_is_outside(line: str) -> None:
    problem = problem_of(line)
    wrong = naive.attention(
        replace(problem, scale=problem.scale * (1.0 + 4096 * bounds.output_roundoff(torch.float64)))
    )
    # In cases of these two kinds, the scale hardly matters.
    assert not all(inside(wrong, problem).values()) or "uniform" in line or "x1e-9" in line


@pytest.mark.parametrize("line", LARGER)
def test_the_answer_rounded_to_float32_is_outside(line: str) -> None:
    problem = problem_of(line)
    answer = naive.attention(problem)
    single = naive.Attention(*(getattr(answer, name).float().double() for name in TENSORS))
    assert not all(inside(single, problem).values())


@pytest.mark.parametrize("line", LARGER)
@pytest.mark.parametrize("block_scores", [1, 500])
def test_blocks_of_rows_agree_with_the_whole(line: str, block_scores: int) -> None:
    problem = problem_of(line)
    whole, blocked = naive.attention(problem), naive.attention(problem, block_scores)
    assert len(list(naive.row_blocks(problem, block_scores))) > len(list(naive.row_blocks(problem)))
    bound = bounds.bounds(problem, bounds.FLOAT64)
    for name in TENSORS:
        one, other, allowed = getattr(whole, name), getattr(blocked, name), getattr(bound, name)
        # Each of the two is within the bound of the exact result.
        assert torch.where(one == other, 0.0, (one - other).abs()).le(2.0 * allowed).all(), name


def test_the_answer_beside_a_bound_is_the_answer() -> None:
    problem = problem_of(LARGER[3])
    alone, beside = naive.attention(problem), bounds.evaluate(problem, [bounds.FLOAT64]).answer
    assert all(torch.equal(getattr(alone, name), getattr(beside, name)) for name in TENSORS)


@pytest.mark.parametrize("line", ["b1 h2/1 q650 k1000 d16 causal-br", "b1 h1 q700 k600 d8 dropout0.1"])
def test_sampled_rows_and_columns_of_a_long_sequence(line: str) -> None:
    problem = problem_of(line)
    answer, bound = naive.attention(problem), bounds.bounds(problem, bounds.FLOAT64)
    head, positions = problem.query.shape[1] - 1, torch.tensor([0, 1, 63, 64, 333, 598, 599])
    enclosed = ball.rows(problem, 0, head, positions)
    for name in ("out", "lse", "dq"):
        sure = getattr(enclosed, name)
        assert (
            verdict.rho(
                getattr(answer, name)[0, head, positions],
                sure.mid,
                getattr(bound, name)[0, head, positions],
                sure.radius,
            ).value
            <= 1.0
        ), name
    columns = ball.columns(problem, 0, 0, positions, Ball(answer.out, bound.out), Ball(answer.lse, bound.lse))
    for name in ("dk", "dv"):
        sure = getattr(columns, name)
        assert (
            verdict.rho(
                getattr(answer, name)[0, 0, positions], sure.mid, getattr(bound, name)[0, 0, positions], sure.radius
            ).value
            <= 1.0
        ), name
