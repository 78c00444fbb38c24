"""The verdict on one tensor: rho, bias, root mean square and the worst element.

All functions are pure. They depend on the answer of the kernel, the exact answer and the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles import bounds

BIAS_BLOCKS = 64  # at most this many blocks of rows, or of columns, give the standard error of the bias
# The smallest effective number of different results (`_distinct`). Sixteen normally distributed results count as ten.
BIAS_FEWEST_VALUES = 8
BIAS_SAMPLE = 1024  # about this many elements show how many results are different
LAST_PLACE = torch.finfo(torch.float32).eps  # times a number of float32: one or two units in its last place
BIAS_FEWEST_BLOCKS = 16  # with fewer rows or columns, the standard error says too little to judge the bias


@dataclass(frozen=True)
class Worst:
    """The element with the largest ratio of error to bound."""

    index: tuple[int, ...]  # [batch, head, row, dim], or [batch, head, query] of the LSE
    got: float  # what the kernel answered
    exact: float  # the exact result
    error: float  # the absolute difference of the two
    bound: float  # the largest error that the claimed arithmetic allows


@dataclass(frozen=True)
class Rho:
    """The largest ratio of error to bound in a tensor.

    The value is inf if no bound can excuse a result: a NaN, an infinity, or a nonzero number where the result must be
    exactly 0.
    """

    value: float
    worst: Worst


@dataclass(frozen=True)
class Bias:
    """The mean signed error beyond that of the correctly rounded exact result.

    The error is weighted in two ways: with the sign of the exact result, and with 1. The fields describe the weighting
    with the stronger bias: the one with the larger |value| - 4 standard_error - allowance.

    The unit of all three fields is the mean of u_o |exact| (16 bit) or the mean bound (float32).
    """

    value: float  # the mean signed error
    standard_error: float  # how uncertain the mean is
    allowance: float  # how large the mean may be for the claimed arithmetic

    @property
    def leans(self) -> bool:
        """Whether |value| exceeds the allowance by more than four standard errors."""
        return abs(self.value) - bounds.BIAS_STANDARD_ERRORS * self.standard_error > self.allowance


@dataclass(frozen=True)
class Rms:
    """The root mean square of the errors, relative to the expectation for the claimed arithmetic (`oracles.spread`).

    value: the ratio; inf if an answer is not finite.
    square: the square of value.
    standard_error: the standard error of square, over the rows.
    """

    value: float
    square: float
    standard_error: float

    @property
    def too_large(self) -> bool:
        """Whether the square exceeds the square of the allowance by more than four standard errors."""
        return not self.square - bounds.RMS_STANDARD_ERRORS * self.standard_error <= bounds.RMS_ALLOWANCE**2


def ratios(
    actual: Tensor,
    exact: Float[Tensor, "..."],
    bound: Float[Tensor, "..."],
    oracle_error: Float[Tensor, "..."] | None = None,
) -> Tensor:
    """The ratio of error to bound of each element.

    0/0 counts as 0. A NaN never passes. An infinite exact result requires exactly the same infinity. For a finite exact
    result, an infinity passes if the exact result plus its bound reaches the numbers that the dtype rounds to infinity.
    oracle_error: the possible error of the exact result, which is added to the bound.
    """
    got = actual.to(torch.float64)
    allowed = bound if oracle_error is None else bound + oracle_error
    error = (got - exact).abs_()
    ratio = error / allowed
    if ratio.sum().isfinite():  # so are all ratios, the answer and the exact result, and no bound is 0
        return ratio
    ratio = torch.where(error == 0.0, 0.0, ratio)
    if ratio.sum().isfinite():
        return ratio
    ratio = torch.where(allowed.isinf() & got.isfinite(), 0.0, ratio)
    ratio = torch.where(exact.isinf(), torch.where(got == exact, 0.0, math.inf), ratio)
    overflows = (got.sign() * exact + allowed >= bounds.overflow_threshold(actual.dtype)) & allowed.isfinite()
    ratio = torch.where(got.isfinite() | exact.isinf(), ratio, math.inf)
    return torch.where(got.isinf() & exact.isfinite() & overflows, 0.0, ratio)


def rho(
    actual: Tensor,
    exact: Float[Tensor, "..."],
    bound: Float[Tensor, "..."],
    oracle_error: Float[Tensor, "..."] | None = None,
) -> Rho:
    """The largest ratio of error to bound, and its element.

    oracle_error: the possible error of the exact result, which is added to the bound.
    Raises ValueError if the shapes of actual and exact differ.
    """
    if actual.shape != exact.shape:
        raise ValueError(f"actual: shape {list(actual.shape)} differs from the exact result's {list(exact.shape)}")
    ratio = ratios(actual, exact, bound, oracle_error)
    place = _place_of_largest(ratio)
    found = [tensor.reshape(-1)[place].to(torch.float64) for tensor in (ratio, actual, exact, bound)]
    # One transfer for all figures, so that the CPU waits for the GPU only once.
    where, value, got, true, allowed = torch.stack([place.to(torch.float64), *found]).tolist()
    index = tuple(int(i) for i in np.unravel_index(int(where), tuple(ratio.shape)))
    return Rho(value, Worst(index, got, true, abs(got - true), allowed))


def _place_of_largest(tensor: Tensor) -> Tensor:
    """Where the flattened tensor has its largest number, or its first NaN. On a CPU, NumPy is six times as fast."""
    flat = tensor.flatten()
    return flat.argmax() if flat.is_cuda else torch.tensor(flat.numpy().argmax(), device="cpu")


def missed(actual: Tensor, exact: Float[Tensor, "..."], before: Float[Tensor, "..."]) -> Tensor:
    """The elements that differ from the exact result although the last rounding must produce exactly that result.

    before: the bound of the error before the last rounding.
    """
    return bounds.rounds_to(exact, before, actual.dtype) & (actual.to(torch.float64) != exact)


def bias(
    actual: Tensor,
    exact: Float[Tensor, "..."],
    float32_bound: Float[Tensor, "..."] | None = None,
    casts: Sequence[Float[Tensor, "..."]] = (),
) -> Bias | None:
    """The bias of the errors, or None if the tensor does not allow a judgement.

    None means that there are too few rows, columns or different results, that a number is not finite, that there is
    nothing to weigh, or that the errors of float32 alone may exceed the rounding of the output.

    actual: in the dtype of the kernel. In 16 bit, the roundoff of this dtype is the unit.
    float32_bound: the statistical bound without casts. For float32, it is the unit. In 16 bit, the allowance grows by
        this bound, because the error of a row's maximum or LSE has one sign for the whole row. Without it, the
        allowance is too small: a bias inside it needs no further judgement.
    casts: the errors that rounding the weights to nearest makes on this input. The allowance grows by their bias, which
        may be larger after the last rounding than before it. Example: with equal weights, and output gradients of 0 and
        1, all dV are multiples of one number. If this number is nearly a multiple of a unit in the last place, a small
        error moves most dV across the middle between two numbers, or none.
    """
    rows = exact.reshape(-1, exact.shape[-1])
    if min(rows.shape) < BIAS_FEWEST_BLOCKS:
        return None
    got = actual.to(torch.float64).reshape(rows.shape)
    is_finite = (got.sum() + rows.sum()).isfinite()  # a NaN or an infinity remains in a sum
    says_something = is_finite & (_distinct(rows, actual.dtype) >= BIAS_FEWEST_VALUES)
    if not rows.is_cuda and not bool(says_something):  # on a GPU, this test would be one more transfer
        return None
    in_ulps = actual.dtype in (torch.float16, torch.bfloat16)
    of_float32 = got.new_zeros(()) if float32_bound is None else float32_bound.sum()
    unit = bounds.worst_unit(rows, actual.dtype).sum() if in_ulps else of_float32
    nearest = rows.to(actual.dtype).to(torch.float64)
    beyond = got - nearest  # the error minus that of the correctly rounded result
    errors = [cast.reshape(rows.shape) for cast in casts]
    errors += [(rows + error).to(actual.dtype).to(torch.float64) - nearest for error in errors]
    if in_ulps:
        # Many exact results may lie in the middle between two numbers (equal weights, few different values). There, the
        # last place of float32 decides which of the two is nearest, and may do so in one direction.
        single = rows.to(torch.float32)
        lower, upper = ((single * (1.0 + step)).to(actual.dtype) for step in (-LAST_PLACE, LAST_PLACE))
        beyond, *errors = (torch.where(lower == upper, each, 0.0) for each in (beyond, *errors))
    figures = [unit, of_float32, says_something.to(torch.float64)]
    for sign in (rows.sign(), None):
        weighted, *of_casts = (each if sign is None else each * sign for each in (beyond, *errors))
        by_row, by_column = weighted.sum(dim=1), weighted.sum(dim=0)
        figures += [by_row.sum(), _standard_error(by_row), _standard_error(by_column)]
        figures += [error.sum().abs() for error in of_casts]
    # One transfer for all figures, so that the CPU waits for the GPU only once.
    total, explained, is_judged, *signed = torch.stack(figures).tolist()
    if not is_judged or total == 0.0 or not math.isfinite(total):
        return None
    explained = explained / total if in_ulps else 0.0
    if explained > 1.0:
        # The errors of float32 alone may exceed the rounding of the output, in either direction. A bias of a fraction
        # of that rounding then says nothing.
        return None
    leans = []
    for lean, of_rows, of_columns, *explaining in (signed[: len(signed) // 2], signed[len(signed) // 2 :]):
        allowance = bounds.BIAS_ALLOWANCE + explained + max(explaining, default=0.0) / total
        leans.append(Bias(lean / total, max(of_rows, of_columns) / total, allowance))
    return max(
        leans, key=lambda lean: abs(lean.value) - bounds.BIAS_STANDARD_ERRORS * lean.standard_error - lean.allowance
    )


def _distinct(exact: Float[Tensor, "rows columns"], dtype: torch.dtype) -> Tensor:
    """The effective number of different exact results. Each number counts by its share of their sum.

    Equal results have the same rounding error, however many of them there are. For example, dV consists of a few
    numbers if all weights are equal and the output gradients repeat. A result that the dtype holds exactly has no such
    error, so it counts by itself.
    """
    flat = exact.flatten()
    flat = flat[:: len(flat) // BIAS_SAMPLE | 1]  # an odd step, so that the sample does not stay in a few columns
    is_held = flat == flat.to(dtype).to(torch.float64)
    values, counts = torch.unique(flat[~is_held].abs(), return_counts=True)
    shares = torch.cat([values * counts, flat[is_held].abs()])
    total, squares = shares.sum(), shares.square().sum()
    return torch.where(squares > 0.0, total.square() / squares, float(len(flat)))


def _standard_error(errors: Float[Tensor, " n"]) -> Tensor:
    """The standard error of the sum of the errors, estimated from the sums of blocks.

    The errors of one row are correlated where its maximum or LSE is off. The errors of one column are correlated where
    equal weights make rows equal. A tensor can be summed by rows or by columns. The caller uses the larger standard
    error.
    """
    blocks = min(BIAS_BLOCKS, len(errors))
    size, longer = divmod(len(errors), blocks)  # `longer` blocks have one error more (torch.tensor_split)
    split = longer * (size + 1)
    sums = torch.cat(
        [errors[:split].reshape(longer, size + 1).sum(dim=1), errors[split:].reshape(blocks - longer, size).sum(dim=1)]
    )
    return torch.sqrt(blocks / max(1, blocks - 1) * (sums - sums.mean()).square().sum())


def rms(actual: Tensor, exact: Float[Tensor, "..."], variance: Float[Tensor, "..."]) -> Rms | None:
    """The root mean square of all errors of a tensor, relative to their expectation.

    Each row gives one ratio: the sum of its squared errors over the sum of its variances. The result is the root of the
    mean ratio, so large and small rows count alike. None means that there are too few rows. Rows with an expected error
    of 0 are left out; `rho` judges them.
    """
    width = exact.shape[-1] if exact.ndim == 4 else 1  # lse has one number for each row
    squares, expected = (
        tensor.reshape(-1, width).sum(dim=1) for tensor in ((actual.to(torch.float64) - exact).square(), variance)
    )
    some = expected > 0.0
    rows = squares[some] / expected[some]
    if len(rows) < BIAS_FEWEST_BLOCKS:
        return None
    if not bool(rows.isfinite().all()):
        return Rms(math.inf, math.inf, 0.0)
    return Rms(float(rows.mean().sqrt()), float(rows.mean()), float(rows.std() / math.sqrt(len(rows))))


def ulps(actual: Tensor, exact: Float[Tensor, "..."]) -> Tensor:
    """The distance of each element from the exact result, in units in the last place.

    The unit is that of the dtype of `actual`, at the exact result.
    """
    return (actual.to(torch.float64) - exact).abs() / _last_place(exact.abs(), actual.dtype)


def largest_ulps(actual: Tensor, exact: Float[Tensor, "..."], bound: Float[Tensor, "..."]) -> float | None:
    """The largest error of a tensor, in units in the last place of its largest exact number.

    In its own units, an element that cancels to nearly 0 has a large error in a right kernel, too. A whole tensor may
    cancel: with equal values, dQ and dK are 0. Then a count of ulps says nothing either. The result is None if the
    bound reaches the largest exact number, so that no digit of this number is certain. It is NaN or inf if a number of
    the answer is not finite.
    """
    size = exact.abs()
    place = _place_of_largest(size)
    largest, allowed = size.flatten()[place], bound.flatten()[place]
    error = (actual.to(torch.float64) - exact).abs_().max()
    ulps = error / _last_place(largest, actual.dtype)
    return float(ulps) if bool(allowed < largest) else None


def _last_place(size: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of numbers of this size."""
    info = torch.finfo(dtype)
    return info.eps * torch.exp2(torch.floor(torch.log2(size.clamp(min=info.smallest_normal))))
