"""Tests the expected spread of errors.

An answer with the claimed arithmetic must pass. An answer with a slightly less accurate arithmetic must not pass.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashproof.impls.spec import Arithmetic
from flashproof.oracles import bounds, naive, spread, verdict
from flashproof.oracles.problem import Problem
from flashproof.tests.suite.oracles.features import TENSORS, problem_of
from flashproof.tests.suite.oracles.test_bounds import Roundings, emulated, kept

LINES = [
    "b1 h2 q140 k140 d64",
    "b1 h2 q100 k140 d64 causal-br",
    "b2 h4/2 q60 k60 d32 causal",
    "b1 h1 q128 k128 d64 outliers",
    "b1 h1 q140 k140 d64 v.positive",
    "b1 h1 q140 k140 d64 causal sharp",
    "b1 h2 q128 k16 d16 x0.25",
    "b1 h2 q500 k2 d8",
]
FLOAT32 = Arithmetic()


def found(problem: Problem, answer: dict[str, Tensor], arithmetic: Arithmetic) -> dict[str, verdict.Rms]:
    """Computes the relative root mean square of the errors, for every tensor with enough rows."""
    exact, variances = naive.attention(problem), spread.variances(problem, arithmetic).elements
    every = {name: verdict.rms(answer[name], getattr(exact, name), getattr(variances, name)) for name in TENSORS}
    return {name: rms for name, rms in every.items() if rms is not None}


@pytest.mark.parametrize("line", LINES)
def test_float32_is_inside_its_spread(line: str) -> None:
    every = found(problem_of(line), emulated(problem_of(line), Roundings()), FLOAT32)
    assert not any(rms.too_large for rms in every.values())
    assert max(rms.value for rms in every.values()) > 0.2  # the expectation is not much too large


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("line", LINES)
def test_sixteen_bit_is_inside_its_spread(line: str, dtype: torch.dtype) -> None:
    problem = problem_of(f"{line} {str(dtype).removeprefix('torch.')}")
    every = found(problem, emulated(problem, Roundings(weights=dtype, result=dtype)), Arithmetic())
    assert not any(rms.too_large for rms in every.values())
    assert every["out"].value > 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("line", LINES)
def test_the_rounded_exact_result_has_the_spread_of_one_rounding(line: str, dtype: torch.dtype) -> None:
    problem = problem_of(f"{line} {str(dtype).removeprefix('torch.')}")
    exact = naive.attention(problem)
    rounded = {name: getattr(exact, name).to(torch.float32 if name == "lse" else dtype) for name in TENSORS}
    out = found(problem, rounded, Arithmetic(accumulate="float64", weights="float32"))["out"]
    assert abs(out.square - 1.0) <= bounds.RMS_STANDARD_ERRORS * out.standard_error


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("bits", [11, 17])
def test_operands_of_fewer_digits_are_outside(line: str, bits: int) -> None:
    assert found(problem_of(line), emulated(problem_of(line), Roundings(operands=bits)), FLOAT32)["out"].too_large


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_sixteen_bit_are_outside_that_of_float32(line: str, dtype: torch.dtype) -> None:
    every = found(problem_of(line), emulated(problem_of(line), Roundings(weights=dtype)), FLOAT32)
    assert all(every[name].too_large for name in ("out", "dq"))


def with_exponential(problem: Problem, exponential: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes the output of a float32 kernel with this exponential."""
    out = torch.empty_like(problem.query)
    for batch, head in naive.heads_of(problem):
        query, key, value, _ = (tensor.float() for tensor in naive.head_tensors(problem, batch, head))
        scores = problem.scale * (query @ key.T)
        weights = exponential(scores - scores.amax(dim=1, keepdim=True))
        out[batch, head] = weights @ value / weights.sum(dim=1, keepdim=True)
    return out


def truncated(tensor: Tensor, bits: int) -> Tensor:
    """Truncates a float32 to this number of significant bits."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits), exponent - bits)


def test_an_exponential_of_fewer_digits_is_outside() -> None:
    """An exponential with an error of at most two units in the last place passes, truncated or not.

    An exponential with an error of 2^-20 does not pass. The input has hardly any other rounding.
    """
    problem = problem_of("b1 h2 q500 k2 d8 x0.25")
    exact, variance = naive.attention(problem).out, spread.variances(problem, FLOAT32).elements.out

    def is_too_large(exponential: Callable[[Tensor], Tensor]) -> bool:
        rms = verdict.rms(with_exponential(problem, exponential), exact, variance)
        assert rms is not None
        return rms.too_large

    assert not is_too_large(torch.exp)
    assert not is_too_large(lambda x: truncated(torch.exp(x), 23))  # an error of 2^-22: two units in the last place
    assert is_too_large(lambda x: kept(torch.exp(x), 20))
    assert is_too_large(lambda x: truncated(torch.exp(x), 21))
    assert is_too_large(lambda x: truncated(torch.exp(x), 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", [32, 64])
def test_a_gradient_summed_in_sixteen_bit_is_outside_unless_it_is_claimed(dtype: torch.dtype, tile: int) -> None:
    problem = problem_of(f"b1 h1 q40 k1100 d32 {str(dtype).removeprefix('torch.')}")
    correct = emulated(problem, Roundings(weights=dtype, result=dtype))
    assert not found(problem, correct, Arithmetic())["dq"].too_large
    rows = next(naive.row_blocks(problem))
    dscores = rows.slopes().dscores[0].to(dtype).float()
    dq = torch.zeros(40, 32)
    for start in range(0, 1100, tile):
        dq = (
            (dq + problem.scale * (dscores[:, start : start + tile] @ rows.key[0, start : start + tile].float()))
            .to(dtype)
            .float()
        )
    summed = {**correct, "dq": dq.to(dtype)[None, None]}
    assert found(problem, summed, Arithmetic())["dq"].too_large
    assert not found(problem, summed, Arithmetic(gradients="input", query_tile=tile))["dq"].too_large


@pytest.mark.parametrize("line", LINES)
def test_sums_over_keys_of_a_correct_kernel_are_inside(line: str) -> None:
    problem = problem_of(f"{line} bfloat16")
    answer = emulated(problem, Roundings(weights=torch.bfloat16, result=torch.bfloat16))
    exact, variances = naive.attention(problem), spread.variances(problem, Arithmetic())
    for name, variance in (("dk", variances.dk_sums), ("dv", variances.dv_sums)):
        rms = verdict.rms(
            answer[name].double().sum(dim=2).flatten(), getattr(exact, name).sum(dim=2).flatten(), variance.flatten()
        )
        assert rms is None or not rms.too_large, name


def test_a_weaker_claim_spreads_further() -> None:
    problem = problem_of("b1 h2 q100 k140 d64 causal-br bfloat16")
    for finer, looser in (
        (Arithmetic(), Arithmetic(accumulate="tensor_core")),
        (Arithmetic(accumulate="float64"), Arithmetic()),
        (Arithmetic(weights="float32"), Arithmetic()),
        (Arithmetic(), Arithmetic(gradients="input")),
        (Arithmetic(exp_ulps=1.0), Arithmetic(exp_ulps=4.0)),
        (Arithmetic(key_tile=64), Arithmetic()),
    ):
        small, large = spread.variances(problem, finer).elements, spread.variances(problem, looser).elements
        assert all((getattr(small, name) <= getattr(large, name)).all() for name in TENSORS)
        assert any((getattr(small, name) < getattr(large, name)).any() for name in TENSORS)


def test_what_is_not_modelled_is_refused() -> None:
    for line, arithmetic in (
        ("b1 h1 q20 k20 d8", Arithmetic(products="tf32")),
        ("b1 h1 q20 k20 d8", Arithmetic(accumulate="tensor_core")),
        ("b1 h1 q20 k20 d8 dropout0.2", Arithmetic()),
    ):
        assert not spread.is_modelled(problem_of(line), arithmetic)
        with pytest.raises(ValueError, match="is not modelled"):
            spread.variances(problem_of(line), arithmetic)


def test_a_row_that_sees_no_key_has_no_spread() -> None:
    variances = spread.variances(problem_of("b1 h2 q20 k8 d16 causal-br"), Arithmetic()).elements
    for name in ("out", "lse", "dq"):
        rows = getattr(variances, name)[:, :, :12]
        assert torch.equal(rows, torch.zeros_like(rows)), name
    assert all(getattr(variances, name).isfinite().all() for name in TENSORS)


# ---------------------------------------------------------------------------------------------------------- the verdict


def test_errors_as_large_as_expected_have_a_root_mean_square_of_one() -> None:
    exact = torch.zeros(1, 1, 64, 8, dtype=torch.float64)
    even = verdict.rms(exact + 0.5, exact, torch.full_like(exact, 0.25))
    assert even == verdict.Rms(1.0, 1.0, 0.0)
    assert not even.too_large
    beyond = verdict.rms(exact + 0.56, exact, torch.full_like(exact, 0.25))
    assert beyond is not None
    assert beyond.too_large


def test_one_wild_row_does_not_fail_the_tensor() -> None:
    exact = torch.zeros(1, 1, 64, 8, dtype=torch.float64)
    got = exact + 0.1
    got[0, 0, 17] = 10.0
    rms = verdict.rms(got, exact, torch.full_like(exact, 0.25))
    assert rms is not None
    assert rms.value > bounds.RMS_ALLOWANCE
    assert not rms.too_large


def test_nothing_that_is_not_finite_passes() -> None:
    exact, variance = torch.zeros(1, 1, 64, 8, dtype=torch.float64), torch.ones(1, 1, 64, 8, dtype=torch.float64)
    for wrong in (math.nan, math.inf):
        got = exact.clone()
        got[0, 0, 3, 3] = wrong
        rms = verdict.rms(got, exact, variance)
        assert rms is not None
        assert rms.too_large


def test_where_it_is_not_judged() -> None:
    exact = torch.zeros(1, 1, verdict.BIAS_FEWEST_BLOCKS - 1, 8, dtype=torch.float64)
    assert verdict.rms(exact, exact, torch.ones_like(exact)) is None
    assert (
        verdict.rms(
            torch.zeros(1, 1, 64),
            torch.zeros(1, 1, 64, dtype=torch.float64),
            torch.zeros(1, 1, 64, dtype=torch.float64),
        )
        is None
    )
