import math

import numpy as np
import pytest
import torch

from flashproof import judging
from flashproof.calling import TensorName
from flashproof.cases import Case
from flashproof.impls.spec import arithmetic_of_callables
from flashproof.oracles import bounds, naive, stagnation, verdict
from flashproof.oracles.bounds import Claim
from flashproof.oracles.masks import Mask
from flashproof.oracles.problem import Problem
from flashproof.tensors import inputs

KEYS = 4001


def with_one_heavy_key(gap: float) -> Problem:
    """One query and many keys. Before the division, the first weight is 1 and each of the others is exp(-gap)."""
    key = torch.full((1, 1, KEYS, 1), -gap)
    key[:, :, 0] = 0.0
    return Problem(torch.ones(1, 1, 1, 1), key, torch.ones(1, 1, KEYS, 1), torch.ones(1, 1, 1, 1), 1.0, Mask(1, KEYS))


def summed_in_order(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, where a float32 sum takes one key after the other."""
    weights = torch.exp(problem.key[0, 0, :, 0])
    total = torch.zeros(())
    for weight in weights:
        total = total + weight
    return torch.ones(1, 1, 1, 1), total.log().reshape(1, 1, 1)


@pytest.mark.parametrize("gap", [17.4, 18.0, 20.0])
def test_a_sum_that_stagnates_loses_at_most_what_is_allowed(gap: float) -> None:
    problem = with_one_heavy_key(gap)
    exact = bounds.evaluate(problem, [], backward=False).answer.lse
    error = (summed_in_order(problem)[1] - exact).abs()
    assert error > 0.9 * (KEYS - 1) * math.exp(-gap)  # it lost all but the heavy key
    assert error <= 1.01 * stagnation.lost(problem).lse


def test_different_terms_that_a_sum_can_hold_are_not_lost() -> None:
    problem = inputs(case := Case.parse("b2 h4/2 q700 k900 d3 causal-br seed1")).problem(case)
    statistical = bounds.bounds(problem, Claim(arithmetic_of_callables("float32", "cpu"), "statistical"))
    lost = stagnation.lost(problem)
    assert not lost.out.median()
    assert not lost.lse.median()
    for name in ("out", "lse", "dq", "dk", "dv"):  # by chance, the terms of some sums agree a little
        assert (getattr(lost, name) <= getattr(statistical, name)).all(), name


def test_nearly_equal_terms_are_rounded_in_one_direction() -> None:
    """4608 rows give nearly all of their weight to one key, and each has a weight of about 0.9998."""
    claim = arithmetic_of_callables("float32", "cpu")
    problem = inputs(case := Case.parse("b1 h5/1 q4608 k28 d2 spike x12 scale0.3 do.summed seed668")).problem(case)
    truth = judging.exact_of(problem, claim)
    sums = torch.zeros(1, 1, case.keys, case.dim)
    for rows in naive.row_blocks(problem):
        for weights, dout in zip(rows.weights[0].float(), rows.dout[0].float(), strict=True):
            sums[0, 0] += weights[:, None] * dout
    right, wrong = (judging.judge_tensor(factor * sums, "dv", truth) for factor in (1.0, 1.0005))
    statistical = bounds.bounds(problem, Claim(claim, "statistical")).dv
    assert ((sums - truth.answer.dv).abs() / statistical).max() > 2.0  # without the term, this right kernel would fail
    assert right.passed
    assert not wrong.passed


def test_a_right_sum_that_stagnates_passes_and_a_wrong_one_fails() -> None:
    claim = arithmetic_of_callables("float32", "cpu")
    problem = with_one_heavy_key(17.4)
    truth = judging.exact_of(problem, claim, backward=False)
    lse = summed_in_order(problem)[1]
    statistical = bounds.bounds(problem, Claim(claim, "statistical")).lse
    assert (lse - truth.answer.lse).abs() > statistical  # without the term, this right kernel would fail
    right, wrong = judging.judge_tensor(lse, "lse", truth), judging.judge_tensor(lse - 3.0 * statistical, "lse", truth)
    assert right.statistical is not None
    assert right.passed
    assert stagnation.lost(problem).lse < 2 * (lse - truth.answer.lse).abs()  # the allowance is of the size of the loss
    assert wrong.rho.value < 1.0  # the deterministic bound does not tell
    assert not wrong.passed


def test_the_loss_of_grouped_heads_is_that_of_each_head() -> None:
    """The sums of a key head run over the rows of all its query heads."""
    case = Case.parse("b1 h4/2 q300 k90 d3 causal rising x12 seed1")
    problem = inputs(case).problem(case)
    lost = stagnation.lost(problem)
    u = bounds.output_roundoff(torch.float64)
    rounding = (problem.query.shape[2] + problem.key.shape[2] + problem.query.shape[3]) * 2.0 * u  # of float64 sums
    for head in range(4):
        one = Problem(
            problem.query[:, head : head + 1],
            problem.key[:, head // 2 : head // 2 + 1],
            problem.value[:, head // 2 : head // 2 + 1],
            problem.dout[:, head : head + 1],
            problem.scale,
            problem.mask,
        )
        alone = stagnation.lost(one)
        for name in ("out", "lse", "dq"):
            own, of_all = getattr(alone, name)[:, 0], getattr(lost, name)[:, head]
            assert ((own - of_all).abs() <= rounding * own).all()
        assert (lost.dv[:, head // 2] >= alone.dv[:, 0] * (1.0 - rounding)).all()


@pytest.mark.parametrize(
    "line", ["b2 h4/2 q60 k90 d3 causal rising x12 seed1", "b1 h2 q60 k90 d2 rising x12 dropout0.2"]
)
def test_the_loss_of_one_element(line: str) -> None:
    """It is that of the element among all. Of keys that no query sees, it is 0."""
    problem = inputs(case := Case.parse(line)).problem(case)
    whole = stagnation.lost(problem)
    u = bounds.output_roundoff(torch.float64)
    rounding = (problem.query.shape[2] + problem.key.shape[2] + problem.query.shape[3]) * 2.0 * u  # of float64 sums
    assert bool(whole.dq.any() or whole.dv.any())
    for name in ("out", "lse", "dq", "dk", "dv"):
        tensor = getattr(whole, name)
        for flat in range(3, tensor.numel(), tensor.numel() // 20):
            index = tuple(map(int, np.unravel_index(flat, tuple(tensor.shape))))
            apart = abs(stagnation.lost_at(problem, name, index) - float(tensor[index]))
            assert apart <= rounding * float(tensor.max()), name


@pytest.mark.parametrize(("name", "index"), [("out", (1, 3, 200, 2)), ("dk", (0, 1, 100, 1))])
def test_a_wrong_result_is_told_by_one_element(
    monkeypatch: pytest.MonkeyPatch, name: TensorName, index: tuple[int, ...]
) -> None:
    """If the worst element is outside the bound with its losses, the losses of the others are not computed."""
    problem = inputs(case := Case.parse("b2 h4/2 q300 k300 d3 seed1")).problem(case)
    truth = judging.exact_of(problem, arithmetic_of_callables("float32", "cpu"))
    wrong = getattr(truth.answer, name).clone()
    wrong[index] += 0.9 * getattr(truth.bound, name)[index]
    monkeypatch.delattr(stagnation, "lost")
    judged = judging.judge_tensor(wrong, name, truth)
    assert judged.rho.value < 1.0
    assert not judged.passed
    assert judged.worst.index == index


def test_a_sum_of_equal_terms_has_a_bias_and_passes() -> None:
    """Equal weights and equal output gradients: dV of each key is a running sum of equal numbers, which float32 rounds
    in one direction again and again.
    """
    claim = arithmetic_of_callables("float32", "cpu")
    problem = inputs(case := Case.parse("b1 h1 q1279 k257 d64 nokeys do.summed dropout0.15 seed152")).problem(case)
    truth = judging.exact_of(problem, claim)
    dv = torch.zeros(case.keys, case.dim)
    for rows in naive.row_blocks(problem):
        for weights, dout in zip(rows.dropped_weights[0].float(), rows.dout[0].float(), strict=True):
            dv += weights[:, None] * dout
    dv = dv[None, None]
    bias = verdict.bias(dv, truth.answer.dv, truth.statistical().dv)
    assert bias is not None
    assert bias.leans  # so this right kernel would fail
    assert judging.judge_tensor(dv, "dv", truth).passed
    assert not judging.judge_tensor(1.001 * dv, "dv", truth).passed
    others = inputs(case := Case.parse("b1 h1 q300 k257 d64 nokeys dropout0.15")).problem(case)
    assert "dv" in judging.exact_of(others, claim).even  # with other output gradients, a bias is a fault


def test_a_loss_below_every_number_is_finite() -> None:
    """The scores differ by hundreds, so some products of the backward are smaller than the smallest float64 number."""
    case = Case.parse("b1 h4 q5 k5 d136 float32 full sharp x64 shift100 scale2int seed58")
    lost = stagnation.lost(inputs(case).problem(case))
    assert bool((lost.dk == 0.0).any())
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert bool(getattr(lost, name).isfinite().all()), name
