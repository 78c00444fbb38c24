"""Tests the verdict on tensors that are small enough to check by eye."""

import math

import pytest
import torch
from torch import Tensor

from flashproof.oracles import bounds, verdict

INF, NAN = math.inf, math.nan


def just_above(number: float) -> float:
    """Returns the next larger float64."""
    return math.nextafter(number, INF)


def just_below(number: float) -> float:
    """Returns the next smaller float64."""
    return math.nextafter(number, -INF)


def of(*numbers: float) -> Tensor:
    """Makes a float64 tensor."""
    return torch.tensor(numbers, dtype=torch.float64)


# (got, exact, bound, ratio). The numbers are sums of few powers of two, so every quotient is exact.
RATIOS = [
    (1.25, 1.0, 0.25, 1.0),
    (0.75, 1.0, 0.25, 1.0),
    (1.0, 1.0, 0.25, 0.0),
    (1.0, -1.0, 0.5, 4.0),
    (0.0, 0.0, 0.0, 0.0),  # 0/0 passes
    (5.0, 5.0, 0.0, 0.0),
    (5e-324, 0.0, 0.0, INF),  # the result must be exactly 0
    (NAN, 1.0, 0.25, INF),
    (NAN, 0.0, 0.0, INF),
    (NAN, 1.0, INF, INF),
    (NAN, -INF, 0.0, INF),
    (NAN, -INF, INF, INF),
    (INF, 1.0, 1e300, INF),
    (INF, 1.0, INF, INF),
    (-INF, 1.0, 0.25, INF),
    (-INF, -INF, 0.0, 0.0),  # the LSE of a row that sees no key
    (INF, -INF, 0.0, INF),
    (-1e30, -INF, 0.0, INF),
    (-1e30, -INF, INF, INF),
    (1e300, 1.0, INF, 0.0),  # an infinite bound excuses any finite number
]


@pytest.mark.parametrize(("got", "exact", "bound", "ratio"), RATIOS)
def test_ratios(got: float, exact: float, bound: float, ratio: float) -> None:
    assert verdict.ratios(of(got), of(exact), of(bound)).tolist() == [ratio]


@pytest.mark.parametrize("exact", [0.0, 1.0, -3.0, 1e-300])
@pytest.mark.parametrize("bound", [0.25, 2.0**-40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_error_just_above_the_bound_fails_and_just_below_passes(exact: float, bound: float, sign: float) -> None:
    at = exact + sign * bound
    beyond, within = (just_above(at), just_below(at)) if sign > 0 else (just_below(at), just_above(at))
    assert verdict.rho(of(within), of(exact), of(bound)).value <= 1.0
    assert verdict.rho(of(at), of(exact), of(bound)).value <= 1.0
    if abs(beyond - exact) > bound:  # otherwise the float64 error of the next number is no larger
        assert verdict.rho(of(beyond), of(exact), of(bound)).value > 1.0
    assert verdict.rho(of(beyond + sign * bound), of(exact), of(bound)).value > 1.0


def test_nothing_passes_by_a_nan() -> None:
    for exact, bound in ((NAN, 1.0), (1.0, NAN), (NAN, NAN)):
        assert not verdict.rho(of(2.0), of(exact), of(bound)).value <= 1.0


def test_what_the_oracle_may_be_off_by_is_allowed_on_top() -> None:
    assert verdict.rho(of(1.5), of(1.0), of(0.25)).value == 2.0
    assert verdict.rho(of(1.5), of(1.0), of(0.25), of(0.25)).value == 1.0
    assert verdict.rho(of(NAN), of(1.0), of(0.25), of(0.25)).value == INF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_answer_is_read_as_the_numbers_it_holds(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    answer = torch.tensor([1.0 + step, 1.0], dtype=dtype)
    assert verdict.ratios(answer, of(1.0, 1.0 + step / 2), of(step, step)).tolist() == [1.0, 0.5]


def test_rho_is_that_of_the_worst_element() -> None:
    exact = torch.zeros(2, 3, dtype=torch.float64)
    bound = torch.full((2, 3), 0.5, dtype=torch.float64)
    bound[1, 2] = 4.0
    got = exact.clone()
    got[1, 2], got[0, 1] = 1.0, -0.75  # the larger error has the larger bound
    found = verdict.rho(got, exact, bound)
    assert found == verdict.Rho(1.5, verdict.Worst((0, 1), -0.75, 0.0, 0.75, 0.5))
    got[1, 0] = NAN
    found = verdict.rho(got, exact, bound)
    assert (found.value, found.worst.index) == (INF, (1, 0))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"actual: shape \[2, 1\] differs from the exact result's \[2, 3\]"):
        verdict.rho(torch.zeros(2, 1), torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64))


# ----------------------------------------------------------------------------------------------------------------- bias

SIXTEEN_BIT = [torch.float16, torch.bfloat16]


def exact_rows(rows: int = 256, dim: int = 32) -> Tensor:
    """Makes numbers of both signs that use all digits of float64."""
    return torch.randn(rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def cast(exact: Tensor, dtype: torch.dtype, towards: str) -> Tensor:
    """Rounds to nearest, toward zero or down ("below")."""
    nearest = exact.to(dtype)
    too_far = {
        "nearest": torch.zeros_like(exact, dtype=torch.bool),
        "zero": nearest.double().abs() > exact.abs(),
        "below": nearest.double() > exact,
    }[towards]
    step_back = torch.nextafter(
        nearest, torch.zeros_like(nearest) if towards == "zero" else torch.full_like(nearest, -INF)
    )
    return torch.where(too_far, step_back, nearest)


def found(
    got: Tensor, exact: Tensor, casts: tuple[Tensor, ...] = (), float32_bound: Tensor | None = None
) -> verdict.Bias:
    """Computes the bias of an answer in 16 bit. Without `float32_bound`, the errors of float32 explain none of it."""
    bias = verdict.bias(got, exact, torch.zeros_like(exact) if float32_bound is None else float32_bound, casts)
    assert bias is not None
    return bias


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_correct_rounding_has_no_bias(dtype: torch.dtype) -> None:
    exact = exact_rows()
    bias = found(cast(exact, dtype, "nearest"), exact)
    assert (bias.value, bias.standard_error, bias.leans) == (0.0, 0.0, False)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("towards", ["zero", "below"])
def test_directed_rounding_leans_down(dtype: torch.dtype, towards: str) -> None:
    exact = exact_rows()
    bias = found(cast(exact, dtype, towards), exact)
    assert bias.leans
    assert bias.value < 0.0


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_errors_as_large_that_cancel_do_not_lean(dtype: torch.dtype) -> None:
    exact = exact_rows()
    coin = torch.rand(exact.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    nearest = exact.to(dtype)
    up, down = (
        torch.nextafter(nearest, torch.full_like(nearest, INF)),
        torch.nextafter(nearest, torch.full_like(nearest, -INF)),
    )
    assert not found(torch.where(coin, up, down), exact).leans
    assert found(up, exact).leans


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_a_lean_that_rounding_the_weights_explains_is_allowed(dtype: torch.dtype) -> None:
    exact = exact_rows()
    got = cast(exact, dtype, "zero")
    explained = got.double() - exact.to(dtype).double()
    assert not found(got, exact, (torch.zeros_like(exact), explained)).leans
    assert found(got, exact, (torch.zeros_like(exact), explained / 16.0)).leans


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_a_lean_that_float32_explains_is_allowed(dtype: torch.dtype) -> None:
    exact = exact_rows()
    got = cast(exact, dtype, "zero")
    unit = bounds.worst_unit(exact, dtype)
    assert not found(got, exact, float32_bound=unit).leans
    assert found(got, exact, float32_bound=unit / 16.0).leans


def test_float32_leans_in_units_of_the_bound() -> None:
    exact = exact_rows()
    bound = 2.0**-10 * exact.abs()
    got = (exact * (1.0 - 2.0**-11)).float()  # an error of half the bound, always toward zero
    assert verdict.rho(got, exact, bound).value <= 1.0
    lean, small = verdict.bias(got, exact, bound), verdict.bias(got, exact, 64.0 * bound)
    assert lean is not None
    assert small is not None
    assert lean.leans
    assert not small.leans


def test_one_wild_row_is_not_a_lean() -> None:
    exact = exact_rows()
    got = exact.to(torch.bfloat16)
    got[17] *= 300.0
    bias = found(got, exact)
    assert abs(bias.value) > bias.allowance
    assert not bias.leans  # it is within four standard errors over blocks of rows


def test_equal_rows_are_one_sample() -> None:
    """Rows can be equal: the gradients of the keys are, if all weights are equal.

    Then there are only sixteen different errors, although many rows repeat them.
    """
    exact = exact_rows(rows=1, dim=16)
    nearest = exact.half()
    one_in_four_up = torch.where(
        torch.arange(16) % 4 == 0, torch.nextafter(nearest, torch.full_like(nearest, INF)), nearest
    )
    bias = found(one_in_four_up.expand(64, 16), exact.expand(64, 16))
    assert abs(bias.value) > bias.allowance
    assert not bias.leans
    up = torch.nextafter(nearest, torch.full_like(nearest, INF))
    assert found(up.expand(64, 16), exact.expand(64, 16)).leans


def test_where_bias_is_not_judged() -> None:
    exact = exact_rows()
    few = exact[: verdict.BIAS_FEWEST_BLOCKS - 1]
    assert verdict.bias(few.half(), few, torch.ones_like(few)) is None
    enough = exact[: verdict.BIAS_FEWEST_BLOCKS]
    assert verdict.bias(enough.half(), enough, 2.0**-12 * enough.abs()) is not None
    # The errors of float32 alone may exceed the rounding of the output.
    assert verdict.bias(enough.half(), enough, 2.0**-10 * enough.abs()) is None
    broken = exact.half()
    broken[3, 3] = NAN
    assert verdict.bias(broken, exact, torch.ones_like(exact)) is None
    nothing = torch.zeros_like(exact)
    assert verdict.bias(nothing.half(), nothing, torch.ones_like(exact)) is None


# ---------------------------------------------------------------------------------------------------------------- exact

# (exact result, bound before the last rounding, whether the rounding must hit the exact result), in bfloat16. The
# numbers of bfloat16 are 2^-8 apart just below 1, and 2^-7 apart just above 1.
MISSES = [
    (1.0, 2.0**-10, True),
    (1.0, 2.0**-9, False),  # halfway to the number below
    (1.5, 2.0**-10, True),
    (1.0 + 2.0**-9, 2.0**-20, False),  # not a number of the dtype
    (0.0, 2.0**-20, False),
    (0.0, 0.0, True),
]


@pytest.mark.parametrize(("exact", "before", "must"), MISSES)
def test_what_the_last_rounding_must_hit(exact: float, before: float, must: bool) -> None:
    hit, near = (torch.tensor([number], dtype=torch.bfloat16) for number in (exact, exact + 2.0**-7))
    if hit.double().item() == exact:
        assert not verdict.missed(hit, of(exact), of(before)).any()
    assert verdict.missed(near, of(exact), of(before)).tolist() == [must]
    assert verdict.missed(torch.full_like(hit, NAN), of(exact), of(before)).tolist() == [must]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_whatever_is_that_near_is_rounded_to_it(dtype: torch.dtype) -> None:
    exact = exact_rows().to(dtype).double()
    before = 0.49 * bounds.half_unit(exact, dtype)
    assert bounds.rounds_to(exact, before, dtype).all()
    for sign in (1.0, -1.0):
        assert torch.equal((exact + sign * before).to(dtype).double(), exact)


# ----------------------------------------------------------------------------------------------------------------- ulps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exact", [1.0, -1.5, 3.0, 96.0])
def test_the_next_number_is_one_unit_away(dtype: torch.dtype, exact: float) -> None:
    number = torch.tensor([exact], dtype=dtype)
    beyond = torch.nextafter(number, number * 2)
    assert verdict.ulps(number, of(exact)).tolist() == [0.0]
    assert verdict.ulps(beyond, of(exact)).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_correct_rounding_is_within_half_a_unit(dtype: torch.dtype) -> None:
    exact = exact_rows() * torch.logspace(-4, 4, 32, base=2.0, dtype=torch.float64)
    assert verdict.ulps(exact.to(dtype), exact).max() <= 0.5
    assert verdict.ulps(cast(exact, dtype, "zero"), exact).max() > 0.5


def test_around_zero_a_unit_is_the_smallest_step() -> None:
    smallest = torch.tensor([2.0**-149])
    assert verdict.ulps(smallest, of(0.0)).tolist() == [1.0]
    assert bounds.output_roundoff(torch.float32) == torch.finfo(torch.float32).eps / 2


def test_results_that_repeat_are_one_sample_of_a_bias() -> None:
    """Equal results are all rounded in the same direction. Of different results, only half are."""
    step = 2.0**-10
    repeated = torch.full((64, 64), 1.0 + 0.4 * step, dtype=torch.float64)
    rounded_up = torch.full((64, 64), 1.0 + step, dtype=torch.float16)
    assert verdict.bias(rounded_up, repeated, torch.full_like(repeated, 1e-9)) is None
    spread_out = 1.0 + torch.rand(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = verdict.bias((spread_out + 0.9 * step).to(torch.float16), spread_out, torch.full_like(spread_out, 1e-9))
    assert found
    assert found.leans


def test_equal_results_that_the_dtype_holds_have_a_bias() -> None:
    """If every value is 1, the output is 1. A kernel whose weights sum to less returns less."""
    ones = torch.ones(64, 64, dtype=torch.float64)
    found = verdict.bias(torch.full((64, 64), 1.0 - 2.0**-11, dtype=torch.float16), ones, torch.full_like(ones, 1e-9))
    assert found
    assert found.leans


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_an_overflow_is_right_where_the_exact_result_overflows(sign: float) -> None:
    """The largest finite float16 is 65504. From 65520 on, float16 rounds to infinity."""
    infinite = torch.tensor([sign * math.inf], dtype=torch.float16)
    for exact, rho in ((65600.0, 0.0), (65500.0, 0.0), (60000.0, math.inf), (-70000.0, math.inf)):
        assert (
            verdict.rho(
                infinite, torch.tensor([sign * exact], dtype=torch.float64), torch.tensor([30.0], dtype=torch.float64)
            ).value
            == rho
        )


def test_the_largest_error_is_in_units_of_the_largest_number() -> None:
    exact = of(2.0**-40, 1.5)
    bound = torch.full_like(exact, 1e-6)  # above the first number
    assert verdict.largest_ulps((exact + of(3 * 2.0**-23, 0.0)).float(), exact, bound) == 3.0
    assert verdict.largest_ulps(torch.tensor([INF, 1.5]), exact, bound) == INF
    assert math.isnan(verdict.largest_ulps(torch.tensor([NAN, 1.5]), exact, bound) or 0.0)


@pytest.mark.parametrize("allowed", [1.5, INF])
def test_ulps_say_nothing_if_the_bound_allows_no_digit(allowed: float) -> None:
    assert verdict.largest_ulps(torch.tensor([1.0, 0.0]), of(1.5, 2.0**-40), of(allowed, 0.0)) is None
