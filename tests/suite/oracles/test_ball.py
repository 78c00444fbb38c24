"""Tests that balls contain the exact result, are small, and do not contain the result of a different problem."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashproof.cases import Case, Family, Masking
from flashproof.impls.spec import DTYPES
from flashproof.oracles import ball, bounds, naive
from flashproof.oracles.ball import Ball
from flashproof.oracles.masks import Mask
from flashproof.oracles.problem import Problem
from flashproof.search import search
from flashproof.tensors import inputs
from flashproof.tests.suite.oracles.features import (
    FEATURES,
    TENSORS,
    by_definition,
    definition_of,
    in_balls,
    problem_of,
)

NOWHERE: dict[str, list[int]] = {name: [] for name in TENSORS}
FINER = 2.0**-ball.BITS / bounds.output_roundoff(torch.float64)  # the roundoff of a ball relative to that of float64

every_feature = pytest.mark.parametrize("line", FEATURES)


def outside(enclosed: list[arb], exact: list[arb]) -> list[int]:
    """Returns the elements whose ball does not overlap the exact number."""
    assert len(enclosed) == len(exact)
    return [i for i, (x, y) in enumerate(zip(enclosed, exact, strict=True)) if not x.overlaps(y)]


def outside_in_float64(enclosed: Ball, exact: list[arb]) -> list[int]:
    """Returns the same for midpoints and radii in float64, compared without rounding."""
    with ctx.workprec(4 * ball.BITS):
        return outside(
            [
                arb(mid, radius)
                for mid, radius in zip(enclosed.mid.flatten().tolist(), enclosed.radius.flatten().tolist(), strict=True)
            ],
            exact,
        )


@every_feature
def test_balls_hold_what_mpmath_finds(line: str) -> None:
    exact, enclosed = definition_of(line), in_balls(problem_of(line))
    assert {name: outside(enclosed[name], exact[name]) for name in TENSORS} == NOWHERE


@every_feature
def test_float64_midpoints_and_radii_hold_what_mpmath_finds(line: str) -> None:
    problem, exact = problem_of(line), definition_of(line)
    enclosure = ball.attention(problem)
    assert {name: outside_in_float64(getattr(enclosure, name), exact[name]) for name in TENSORS} == NOWHERE
    forward = ball.forward(problem)
    assert torch.equal(forward.out.mid, enclosure.out.mid)
    assert torch.equal(forward.lse.radius, enclosure.lse.radius)


@every_feature
def test_radii_are_as_much_below_the_float64_bound_as_the_bits_are_above_float64s(line: str) -> None:
    problem = problem_of(line)
    allowed = bounds.bounds(problem, bounds.FLOAT64)
    enclosed = in_balls(problem)
    for name in TENSORS:
        radii = [float(x.rad()) if x.is_finite() else 0.0 for x in enclosed[name]]
        assert all(
            radius <= FINER * bound
            for radius, bound in zip(radii, getattr(allowed, name).flatten().tolist(), strict=True)
        ), name


@every_feature
def test_float64_radii_are_half_a_unit_in_the_last_place(line: str) -> None:
    problem = problem_of(line)
    enclosure, allowed = ball.attention(problem), bounds.bounds(problem, bounds.FLOAT64)
    for name in TENSORS:
        mid, radius = getattr(enclosure, name)
        half_unit = torch.where(mid.isfinite(), bounds.worst_unit(mid, torch.float64), 0.0)
        assert (radius <= half_unit + FINER * getattr(allowed, name)).all(), name


def test_rows_without_keys_are_exact() -> None:
    enclosure = ball.attention(problem_of("b1 h2 q8 k5 d3 causal-br"))
    assert torch.equal(enclosure.lse.mid[:, :, :3], torch.full((1, 2, 3), -torch.inf, dtype=torch.float64))
    for part in (
        enclosure.out.mid[:, :, :3],
        enclosure.dq.mid[:, :, :3],
        enclosure.out.radius[:, :, :3],
        enclosure.dq.radius[:, :, :3],
        enclosure.lse.radius[:, :, :3],
    ):
        assert torch.equal(part, torch.zeros_like(part))


@st.composite
def tiny(draw: st.DrawFn) -> Case:
    """Draws a case that mpmath computes in milliseconds."""
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Case(
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        queries=draw(st.integers(1, 6)),
        keys=draw(st.integers(1, 6)),
        dim=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(st.sampled_from(get_args(Masking))),
        family=draw(st.sampled_from(get_args(Family))),
        magnitude=draw(st.sampled_from([1.0, 0.001, 8.0, 100.0, -3000.0])),
        shift=draw(st.sampled_from([0.0, -100.0, 88.7, 1e4])),
        scale=draw(st.sampled_from([None, 0.3, -0.3, 0.0])),
        dropout=draw(st.sampled_from([0.0, 0.25, 0.9])),
        seed=draw(st.integers(0, 99)),
    )


@search
@given(tiny())
def test_balls_hold_what_mpmath_finds_in_any_tiny_case(case: Case) -> None:
    problem = inputs(case).problem(case)
    exact, enclosed = by_definition(problem), in_balls(problem)
    assert {name: outside(enclosed[name], exact[name]) for name in TENSORS} == NOWHERE


@pytest.mark.parametrize("line", ["b1 h1 q6 k6 d3 causal", "b1 h2 q5 k7 d2 dropout0.25", "b1 h1 q5 k6 d3 scale-0.7"])
@pytest.mark.parametrize("shift", [-300.0, 88.7, 2.5e5])
def test_a_common_shift_of_all_scores_moves_the_lse_alone(line: str, shift: float) -> None:
    problem = problem_of(f"{line} shift{shift}")
    key = problem.key.clone()
    key[..., 0] = 0.0  # the coordinate that adds the shift
    shifted, plain = in_balls(problem), in_balls(replace(problem, key=key))
    with ctx.workprec(4 * ball.BITS):
        by = arb(problem.scale) * arb(problem.query[0, 0, 0, 0].item()) * arb(problem.key[0, 0, 0, 0].item())
        plain["lse"] = [lse + by for lse in plain["lse"]]
    assert {name: outside(shifted[name], plain[name]) for name in TENSORS} == NOWHERE


# ---------------------------------------------------------------------------------------------- some rows, some columns


@every_feature
def test_rows_alone_are_the_rows_of_the_whole(line: str) -> None:
    problem = problem_of(line)
    batch, head, last = problem.query.shape[0] - 1, problem.query.shape[1] - 1, problem.query.shape[2] - 1
    chosen = torch.tensor([last, 0, last // 2])
    some, whole = ball.rows(problem, batch, head, chosen), ball.attention(problem)
    for name in ("out", "lse", "dq"):
        here, there = getattr(some, name), getattr(whole, name)
        there = Ball(there.mid[batch, head, chosen], there.radius[batch, head, chosen])
        assert here.mid.shape == there.mid.shape
        assert meet(here, there), name
        assert not meet(moved(here, 3.0 * (here.radius + there.radius)), there), name


@every_feature
def test_columns_are_those_of_the_whole(line: str) -> None:
    problem = problem_of(line)
    batch, kv_head, last = problem.key.shape[0] - 1, problem.key.shape[1] - 1, problem.key.shape[2] - 1
    chosen = torch.tensor([last, 0, last // 2])
    whole = ball.attention(problem)
    some = ball.columns(problem, batch, kv_head, chosen, whole.out, whole.lse)
    for name in ("dk", "dv"):
        here, there = getattr(some, name), getattr(whole, name)
        assert meet(here, Ball(there.mid[batch, kv_head, chosen], there.radius[batch, kv_head, chosen])), name


@every_feature
def test_columns_from_the_float64_oracle_are_inside_its_bound(line: str) -> None:
    problem = problem_of(line)
    batch, kv_head = problem.key.shape[0] - 1, problem.key.shape[1] - 1
    float64, allowed = naive.attention(problem), bounds.bounds(problem, bounds.FLOAT64)
    some = ball.columns(
        problem,
        batch,
        kv_head,
        torch.arange(problem.key.shape[2]),
        Ball(float64.out, allowed.out),
        Ball(float64.lse, allowed.lse),
    )
    for name in ("dk", "dv"):
        mid, radius = getattr(some, name)
        assert (
            (getattr(float64, name)[batch, kv_head] - mid).abs() <= getattr(allowed, name)[batch, kv_head] + radius
        ).all(), name
        exact = definition_of(line)[name]
        mine = len(exact) // (problem.key.shape[0] * problem.key.shape[1])
        assert outside_in_float64(Ball(mid, radius), exact[-mine:]) == [], name


def moved(enclosed: Ball, by: Tensor) -> Ball:
    """Moves the midpoints up by a distance, and at least to the next float64."""
    return Ball(torch.nextafter(enclosed.mid + by, torch.tensor(torch.inf, dtype=torch.float64)), enclosed.radius)


def meet(one: Ball, other: Ball) -> bool:
    """Whether two balls share a point in every element. Two enclosures of the same numbers must do so."""
    apart = torch.where(one.mid == other.mid, 0.0, (one.mid - other.mid).abs())
    return bool((apart <= one.radius + other.radius).all())


# --------------------------------------------------------------------------------------------------- what is not finite


def test_what_no_query_sees_may_hold_anything() -> None:
    problem = problem_of("b1 h2 q5 k8 d3 causal")  # aligned top left: no query sees the last three keys
    poisoned = replace(problem, key=problem.key.clone(), value=problem.value.clone())
    poisoned.key[:, :, 5:], poisoned.value[:, :, 5:] = torch.nan, torch.inf
    clean, enclosure = ball.attention(problem), ball.attention(poisoned)
    for name in TENSORS:
        assert torch.equal(getattr(clean, name).mid, getattr(enclosure, name).mid), name


@pytest.mark.parametrize("tensor", ["query", "key", "value", "dout"])
def test_what_is_seen_must_be_finite(tensor: str) -> None:
    problem = problem_of("b1 h2 q5 k6 d3")
    poisoned = getattr(problem, tensor).clone()
    poisoned[0, 1, 3, 2] = torch.nan
    with pytest.raises(ValueError, match=rf"{tensor}: not finite at \[3, 2\]"):
        ball.attention(replace(problem, **{tensor: poisoned}))


def test_an_enclosure_that_says_nothing_is_not_given() -> None:
    problem = problem_of("b1 h1 q4 k4 d2")
    out, lse = ball.forward(problem)
    with pytest.raises(ArithmeticError, match="radii are not finite"):
        ball.columns(problem, 0, 0, torch.tensor([1]), out, Ball(lse.mid, torch.full_like(lse.radius, torch.inf)))
    with pytest.raises(ArithmeticError, match="radii are not finite"):  # the scores exceed the range of float64
        ball.forward(replace(problem, scale=1e300, query=problem.query.double() * 1e200))


# -------------------------------------------------------------------------------------------- what a ball must not hold


def one_bit_off(tensor: Tensor) -> Tensor:
    """Moves the last element up by one unit in its last place."""
    moved = tensor.contiguous().clone()
    moved[(-1,) * moved.ndim] = torch.nextafter(moved[(-1,) * moved.ndim], torch.tensor(torch.inf, dtype=moved.dtype))
    return moved


WRONG: dict[str, tuple[Callable[[Problem], Problem], set[str]]] = {
    "scale": (lambda p: replace(p, scale=p.scale * (1.0 + 2.0**-52)), {"out", "lse", "dq", "dk", "dv"}),
    "query": (lambda p: replace(p, query=one_bit_off(p.query)), {"out", "lse", "dq", "dk", "dv"}),
    "key": (lambda p: replace(p, key=one_bit_off(p.key)), {"out", "lse", "dq", "dk", "dv"}),
    "value": (lambda p: replace(p, value=one_bit_off(p.value)), {"out", "dq", "dk"}),
    "dout": (lambda p: replace(p, dout=one_bit_off(p.dout)), {"dq", "dk", "dv"}),
    "alignment": (lambda p: replace(p, mask=replace(p.mask, causal="top_left")), {"out", "lse", "dq", "dk", "dv"}),
    "no mask": (lambda p: replace(p, mask=Mask(p.mask.queries, p.mask.keys)), {"out", "lse", "dq", "dk", "dv"}),
    "dropout seed": (
        lambda p: replace(p, dropout=replace(p.dropout, seed=p.dropout.seed + 1)),
        {"out", "dq", "dk", "dv"},
    ),
    "dropout p": (
        lambda p: replace(p, dropout=replace(p.dropout, p=p.dropout.p + 2.0**-54)),
        {"out", "dq", "dk", "dv"},
    ),
    "grouping": (lambda p: replace(p, query=p.query[:, [0, 2, 1, 3]]), {"out", "lse", "dq", "dk", "dv"}),
    "heads": (lambda p: replace(p, key=p.key.flip(1)), {"out", "lse", "dq", "dk", "dv"}),
}
"""Problems with one small change each, and the tensors whose balls must show it."""


@pytest.mark.parametrize("wrong", WRONG)
def test_balls_of_a_slightly_different_problem_do_not_hold_the_result(wrong: str) -> None:
    line = "b1 h4/2 q5 k6 d3 causal-br dropout0.25 seed1"
    change, told_by = WRONG[wrong]
    exact, enclosed = definition_of(line), in_balls(change(problem_of(line)))
    assert {name for name in TENSORS if outside(enclosed[name], exact[name])} == told_by


@every_feature
def test_midpoints_moved_by_two_radii_do_not_hold_the_result(line: str) -> None:
    enclosure, exact = ball.attention(problem_of(line)), definition_of(line)
    for name in TENSORS:
        mid, radius = getattr(enclosure, name)
        elements = mid.isfinite().flatten()
        assert (
            outside_in_float64(moved(Ball(mid, radius), 2.0 * radius), exact[name])
            == elements.nonzero().flatten().tolist()
        ), name
