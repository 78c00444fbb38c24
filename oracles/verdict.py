"""The verdict on one tensor: rho, bias, root mean square, the worst element. Pure functions of what a kernel answered, the exact answer and the bound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles import bounds

BIAS_BLOCKS = 64  # blocks of rows, or of columns, over which the standard error of the bias is taken, at most
BIAS_FEWEST_VALUES = 8  # different results; sixteen of a normal distribution count as ten
BIAS_SAMPLE = 4096  # elements of which is seen how many of them differ
BIAS_FEWEST_BLOCKS = 16  # with fewer rows or columns, a standard error says too little and bias is not judged


@dataclass(frozen=True)
class Worst:
    """The element with the largest error over its bound."""

    index: tuple[int, ...]
    got: float
    exact: float
    error: float
    bound: float


@dataclass(frozen=True)
class Rho:
    """Largest error over bound of a tensor; inf where nothing can excuse it (NaN, inf, a value where exactly 0 is due)."""

    value: float
    worst: Worst


@dataclass(frozen=True)
class Bias:
    """Mean signed error beyond that of the correctly rounded exact result.

    Of the two weightings, with the sign of the exact result and with 1, the one that leans more. value and standard_error in units of the mean
    of u_o |exact| (16 bit) or of the mean bound (float32).
    """

    value: float
    standard_error: float
    allowance: float

    @property
    def leans(self) -> bool:
        """Whether the bias is beyond its allowance with four standard errors to spare."""
        return abs(self.value) - bounds.BIAS_STANDARD_ERRORS * self.standard_error > self.allowance


@dataclass(frozen=True)
class Rms:
    """Root mean square of the errors over what is expected of the claimed arithmetic (`oracles.spread`); inf where an answer is not finite.

    square: of that value. standard_error: of the square, over rows.
    """

    value: float
    square: float
    standard_error: float

    @property
    def too_large(self) -> bool:
        """Whether it is beyond its allowance with four standard errors to spare."""
        return not self.square - bounds.RMS_STANDARD_ERRORS * self.standard_error <= bounds.RMS_ALLOWANCE**2


def ratios(actual: Tensor, exact: Float[Tensor, "..."], bound: Float[Tensor, "..."], oracle_error: Float[Tensor, "..."] | None = None) -> Tensor:
    """Error over bound for each element. 0/0 is 0. A result that should be infinite must be so exactly; NaN is never excused.

    An infinity is right where the exact result, with its bound, is beyond what the dtype rounds to its largest number.
    """
    got = actual.to(torch.float64)
    allowed = bound if oracle_error is None else bound + oracle_error
    error = (got - exact).abs()
    ratio = torch.where(error == 0.0, 0.0, error / allowed)
    ratio = torch.where(allowed.isinf() & got.isfinite(), 0.0, ratio)
    ratio = torch.where(exact.isinf(), torch.where(got == exact, 0.0, math.inf), ratio)
    overflows = (got.sign() * exact + allowed >= bounds.overflow_threshold(actual.dtype)) & allowed.isfinite()
    ratio = torch.where(got.isfinite() | exact.isinf(), ratio, math.inf)
    return torch.where(got.isinf() & exact.isfinite() & overflows, 0.0, ratio)


def rho(actual: Tensor, exact: Float[Tensor, "..."], bound: Float[Tensor, "..."], oracle_error: Float[Tensor, "..."] | None = None) -> Rho:
    """The largest error over bound, and where. `oracle_error` is what the exact result itself may be off by; it is allowed on top."""
    if actual.shape != exact.shape:
        raise ValueError(f"actual: shape {list(actual.shape)} differs from the exact result's {list(exact.shape)}")
    ratio = ratios(actual, exact, bound, oracle_error)
    place = ratio.flatten().argmax()
    found = [tensor.reshape(-1)[place].to(torch.float64) for tensor in (ratio, actual, exact, bound)]
    where, value, got, true, allowed = torch.stack([place.to(torch.float64), *found]).tolist()  # one answer of a GPU to wait for
    index = tuple(int(i) for i in np.unravel_index(int(where), tuple(ratio.shape)))
    return Rho(value, Worst(index, got, true, abs(got - true), allowed))


def missed(actual: Tensor, exact: Float[Tensor, "..."], before: Float[Tensor, "..."]) -> Tensor:
    """Elements that are not the exact result, although the last rounding must bring them there. before: the bound ahead of that rounding."""
    return bounds.rounds_to(exact, before, actual.dtype) & (actual.to(torch.float64) != exact)


def bias(actual: Tensor, exact: Float[Tensor, "..."], float32_bound: Float[Tensor, "..."], casts: Sequence[Float[Tensor, "..."]] = ()) -> Bias | None:
    """Whether the errors lean to one side. None where there are too few rows or columns to tell, or nothing to weigh.

    actual: in the kernel's dtype; in 16 bit its roundoff is the unit. float32_bound: the statistical bound without casts; for float32 it is the unit, in 16 bit
    what it explains is allowed on top, since the error of one row's maximum or lse has one sign for the whole row. casts: the errors that rounding the
    weights to nearest makes on this input; what they lean is allowed on top.
    """
    rows = exact.reshape(-1, exact.shape[-1])
    if min(rows.shape) < BIAS_FEWEST_BLOCKS:
        return None
    got = actual.to(torch.float64).reshape(rows.shape)
    in_ulps = actual.dtype in (torch.float16, torch.bfloat16)
    unit = (bounds.worst_unit(rows, actual.dtype) if in_ulps else float32_bound.reshape(rows.shape)).sum()
    beyond = got - rows.to(actual.dtype).to(torch.float64)  # the error less that of the correctly rounded result
    finite = (got.isfinite() & rows.isfinite()).all()
    figures = [unit, float32_bound.sum(), (finite & (_distinct(rows) >= BIAS_FEWEST_VALUES)).to(torch.float64)]
    for sign in (rows.sign(), None):
        weighted = beyond if sign is None else beyond * sign
        own = [(cast.reshape(rows.shape) if sign is None else cast.reshape(rows.shape) * sign).sum().abs() for cast in casts]
        figures += [weighted.sum(), _standard_error(weighted.sum(dim=1)), _standard_error(weighted.sum(dim=0)), *own]
    total, explained, finite, *signed = torch.stack(figures).tolist()  # one answer of a GPU to wait for
    if not finite or total == 0.0 or not math.isfinite(total):
        return None
    explained = explained / total if in_ulps else 0.0
    if explained > 1.0:
        return None  # float32 alone may be off by more than an output's rounding, and to either side: a lean of a fraction of it says nothing
    leans = []
    for lean, by_row, by_column, *of_casts in (signed[: len(signed) // 2], signed[len(signed) // 2 :]):
        allowance = bounds.BIAS_ALLOWANCE + explained + max(of_casts, default=0.0) / total
        leans.append(Bias(lean / total, max(by_row, by_column) / total, allowance))
    return max(leans, key=lambda lean: abs(lean.value) - bounds.BIAS_STANDARD_ERRORS * lean.standard_error - lean.allowance)


def _distinct(exact: Float[Tensor, "rows columns"]) -> Tensor:
    """How many different numbers the exact results are, each counted by its share of their sum.

    Equal results have one rounding, however many there are: with equal weights and output gradients that repeat, dV is a few numbers.
    """
    flat = exact.flatten()
    step = len(flat) // BIAS_SAMPLE | 1  # odd, so that it does not stay in a few columns
    values, counts = torch.unique(flat[::step].abs(), return_counts=True)
    shares = values * counts
    return shares.sum().square() / shares.square().sum()


def _standard_error(errors: Float[Tensor, " n"]) -> Tensor:
    """Of their sum, from its blocks. Errors of one row are shared where its maximum or lse is off, those of one column where equal weights make rows equal:
    of the two ways to sum a tensor the one that varies more tells.
    """
    blocks = min(BIAS_BLOCKS, len(errors))
    size, longer = divmod(len(errors), blocks)  # so many blocks have one error more, as of torch.tensor_split
    split = longer * (size + 1)
    sums = torch.cat([errors[:split].reshape(longer, size + 1).sum(dim=1), errors[split:].reshape(blocks - longer, size).sum(dim=1)])
    return torch.sqrt(blocks / max(1, blocks - 1) * (sums - sums.mean()).square().sum())


def rms(actual: Tensor, exact: Float[Tensor, "..."], variance: Float[Tensor, "..."]) -> Rms | None:
    """The errors of a tensor all together: for each row the sum of squares over the sum of the variances, and the mean of these.

    Rows count alike, large or small. None where there are too few to tell; a row of which no error is expected is left to `rho`.
    """
    width = exact.shape[-1] if exact.ndim == 4 else 1  # the lse has one number a row
    squares, expected = (tensor.reshape(-1, width).sum(dim=1) for tensor in ((actual.to(torch.float64) - exact).square(), variance))
    some = expected > 0.0
    rows = squares[some] / expected[some]
    if len(rows) < BIAS_FEWEST_BLOCKS:
        return None
    if not bool(rows.isfinite().all()):
        return Rms(math.inf, math.inf, 0.0)
    return Rms(float(rows.mean().sqrt()), float(rows.mean()), float(rows.std() / math.sqrt(len(rows))))


def ulps(actual: Tensor, exact: Float[Tensor, "..."]) -> Tensor:
    """Distance of each element from the exact result, in units in the last place of its own dtype at the exact result."""
    info = torch.finfo(actual.dtype)
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=info.smallest_normal)))
    return (actual.to(torch.float64) - exact).abs() / (info.eps * torch.exp2(exponent))
