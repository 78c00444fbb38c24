"""Tests the definition in mpmath: against sums by hand, difference quotients and automatic differentiation."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from flint import arb, ctx
from mpmath import mpf, workprec
from torch import Tensor

from flashproof.oracles import ball, bounds, mp
from flashproof.oracles.masks import Dropout, Mask
from flashproof.oracles.problem import Problem
from flashproof.tests.suite.oracles.features import FEATURES, flat, problem_of


def fractions(numbers: object) -> list[Fraction]:
    """Converts numbers that float64 holds exactly."""
    assert all(number == float(number) for number in flat(numbers))
    return [Fraction(float(number)) for number in flat(numbers)]


def by_hand(
    query: list[list[float]],
    key: list[list[float]],
    value: list[list[float]],
    dout: list[list[float]],
    mask: Mask,
    heads: int = 1,
) -> Problem:
    """Makes a problem with scale 1 and one key head. All heads have the same query and output gradient."""
    query_, key_, value_, dout_ = (torch.tensor([[rows]], dtype=torch.float64) for rows in (query, key, value, dout))
    return Problem(query_.expand(1, heads, -1, -1), key_, value_, dout_.expand(1, heads, -1, -1), scale=1.0, mask=mask)


def test_equal_scores_take_the_mean() -> None:
    problem = by_hand([[0.0]], [[1.0], [2.0], [3.0], [6.0]], [[1.0], [2.0], [4.0], [9.0]], [[1.0]], Mask(1, 4))
    dq, dk, dv = mp.gradients(problem)
    assert fractions(mp.forward(problem).out) == [4]
    assert fractions(dv) == [Fraction(1, 4)] * 4
    # dS = (V - 4) / 4 = (-3, -2, 0, 5) / 4, dQ = dS K, dK = dS^T Q
    assert fractions(dq) == [Fraction(-3 * 1 - 2 * 2 + 0 * 3 + 5 * 6, 4)]
    assert fractions(dk) == [0, 0, 0, 0]


def test_scale_zero_is_equal_scores() -> None:
    problem = replace(by_hand([[3.0]], [[1.0], [2.0]], [[1.0], [2.0]], [[1.0]], Mask(1, 2)), scale=0.0)
    assert fractions(mp.forward(problem).out) == [Fraction(3, 2)]
    assert fractions(mp.gradients(problem).dq) == [0]


@pytest.mark.parametrize(
    ("causal", "out", "dv"),
    [("top_left", [8, 12, 12], [2, 1]), ("bottom_right", [0, 8, 12], [Fraction(3, 2), Fraction(1, 2)])],
)
def test_causal_rows_take_the_means_of_what_they_see(causal: str, out: list[int], dv: list[Fraction]) -> None:
    problem = by_hand(
        [[0.0]] * 3,
        [[5.0], [7.0]],
        [[8.0], [16.0]],
        [[1.0]] * 3,
        Mask(3, 2, causal),  # type: ignore[arg-type]
    )
    assert fractions(mp.forward(problem).out) == out
    assert fractions(mp.gradients(problem).dv) == dv


def test_a_query_that_sees_no_key() -> None:
    problem = by_hand([[1.0]] * 3, [[5.0], [7.0]], [[8.0], [16.0]], [[1.0]] * 3, Mask(3, 2, "bottom_right"))
    out, lse = mp.forward(problem)
    assert (flat(out)[0], flat(lse)[0], flat(mp.gradients(problem).dq)[0]) == (0, -math.inf, 0)


def test_heads_that_share_a_key_head_add_their_gradients() -> None:
    problem = by_hand([[0.0]], [[1.0], [2.0]], [[1.0], [2.0]], [[1.0]], Mask(1, 2), heads=3)
    assert fractions(mp.gradients(problem).dv) == [Fraction(3, 2)] * 2


def test_dropout_acts_on_normalised_weights() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    problem = replace(
        by_hand([[0.0]], [[0.0]] * 8, [[v] for v in values], [[1.0]], Mask(1, 8)), dropout=Dropout(0.5, 7)
    )
    kept = problem.dropout.kept(0, 0, torch.tensor([0]), 8)[0].tolist()
    assert 0 < sum(kept) < 8
    # Dropout doubles each kept weight of 1/8. It does not renormalise the softmax over the kept weights.
    assert fractions(mp.forward(problem).out) == [
        sum(Fraction(2 * v) / 8 for v, keep in zip(map(int, values), kept, strict=True) if keep)
    ]
    assert fractions(mp.gradients(problem).dv) == [Fraction(2, 8) if keep else 0 for keep in kept]


@pytest.mark.parametrize("score", [-700.0, -2.0, 0.25, 88.75])
def test_two_keys_are_the_logistic_function(score: float) -> None:
    """Compares with balls of FLINT for one query 1, keys s and 0, and values 1 and 0.

    Then out = 1 / (1 + exp(-s)), lse = log(1 + exp s) and dq = s out (1 - out).
    """
    problem = by_hand([[1.0]], [[score], [0.0]], [[1.0], [0.0]], [[1.0]], Mask(1, 2))
    bits = 16 * ball.BITS  # 1 + exp(-700) needs a thousand bits
    out, lse = mp.forward(problem, bits)
    dq = mp.gradients(problem, bits).dq
    with ctx.workprec(2 * ball.BITS):
        logistic = 1 / (1 + (-arb(score)).exp())
        assert logistic.contains(arb(flat(out)[0]))
        assert arb(score).exp().log1p().contains(arb(flat(lse)[0]))
        assert (score * logistic / (1 + arb(score).exp())).contains(arb(flat(dq)[0]))


STEP = 2.0**-20  # after one extrapolation, the error of a difference quotient is about the fourth power of the step


@pytest.mark.parametrize(
    "line",
    [
        "b1 h1 q3 k4 d2 causal",
        "b1 h2/1 q2 k3 d2",
        "b1 h2 q4 k3 d1 causal-br dropout0.3",
        "b1 h1 q3 k3 d2 scale-0.7 float16",
        "b1 h1 q2 k3 d2 sharp dropout0.25",
    ],
)
def test_gradients_are_limits_of_difference_quotients(line: str) -> None:
    problem = problem_of(line)
    problem = replace(
        problem,
        query=problem.query.double(),
        key=problem.key.double(),
        value=problem.value.double(),
        dout=problem.dout.double(),
    )
    allowed = bounds.bounds(problem, bounds.FLOAT64)
    for name, gradient in zip(("query", "key", "value"), mp.gradients(problem), strict=True):
        for place, (derivative, bound) in enumerate(
            zip(flat(gradient), getattr(allowed, "d" + name[0]).flatten().tolist(), strict=True)
        ):
            wide, narrow = (_quotient(problem, name, place, step) for step in (STEP, STEP / 2))
            assert abs((4 * narrow - wide) / 3 - derivative) <= bound, (name, place)


def _quotient(problem: Problem, name: str, place: int, step: float) -> mpf:
    changed: list[dict[str, Any]] = [{name: _nudged(getattr(problem, name), place, by)} for by in (step, -step)]
    above, below = (_loss(replace(problem, **change)) for change in changed)
    with workprec(mp.BITS):
        return (above - below) / (2 * step)


def _nudged(tensor: Tensor, place: int, by: float) -> Tensor:
    nudged = tensor.clone()
    nudged.view(-1)[place] += by
    assert Fraction(float(nudged.view(-1)[place])) - Fraction(float(tensor.view(-1)[place])) == Fraction(by)
    return nudged


def _loss(problem: Problem) -> mpf:
    with workprec(mp.BITS):
        return sum(
            x * mpf(y) for x, y in zip(flat(mp.forward(problem).out), problem.dout.flatten().tolist(), strict=True)
        )


@pytest.mark.parametrize("line", [line for line in FEATURES if "q129" not in line])
def test_automatic_differentiation_in_float64_is_within_the_float64_bound(line: str) -> None:
    problem = problem_of(line)
    allowed = bounds.bounds(problem, bounds.FLOAT64)
    out, lse = mp.forward(problem)
    answers = zip(
        by_autograd(problem),
        (out, lse, *mp.gradients(problem)),
        (allowed.out, allowed.lse, allowed.dq, allowed.dk, allowed.dv),
        strict=True,
    )
    for got, numbers, bound in answers:
        exact = mp.as_tensor(numbers)
        assert torch.where(got == exact, 0.0, (got - exact).abs()).le(bound).all()


def by_autograd(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes attention in float64 with torch's logsumexp, softmax and autograd."""
    query, key, value = (
        tensor.double().clone().requires_grad_() for tensor in (problem.query, problem.key, problem.value)
    )
    batches, heads, queries, _ = query.shape
    rows = torch.arange(queries)
    visible = torch.stack(
        [torch.stack([problem.mask.visible(b, h, rows) for h in range(heads)]) for b in range(batches)]
    )
    kept = torch.stack(
        [torch.stack([problem.dropout.kept(b, h, rows, key.shape[2]) for h in range(heads)]) for b in range(batches)]
    )
    keys, values = (tensor.repeat_interleave(problem.groups, dim=1) for tensor in (key, value))
    scores = problem.scale * torch.einsum("bhid,bhjd->bhij", query, keys)
    lse = scores.detach().masked_fill(~visible, -math.inf).logsumexp(dim=-1)
    # For a row that sees no key, the softmax runs over all keys, and the result is multiplied by 0. This avoids NaN.
    seen = visible.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~visible & seen, -math.inf), dim=-1) * seen
    out = torch.einsum("bhij,bhjd->bhid", weights * kept.double() / (1.0 - problem.dropout.p), values)
    dq, dk, dv = torch.autograd.grad(out, (query, key, value), problem.dout.double())
    return out.detach(), lse, dq, dk, dv
