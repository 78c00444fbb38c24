"""The bound: the largest error, element by element, that a claimed arithmetic can make on a given input.

A rounding analysis of FlashAttention as it is really computed: exact inputs, scores and sums accumulated in float32, weights and dS cast before
the second product, one rounding at the end. No other file of the project holds a tolerance, and nothing here is fitted to a kernel.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1 (gamma_n, inner products); Blanchard, Higham and Higham, IMA J. Numer.
Anal. 41(4), 2021 (shifted softmax and log-sum-exp); Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019 (sqrt(n) in the probabilistic form);
Fasi et al., PeerJ CS 7:e330, 2021 (tensor cores truncate).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flashproof.impls.spec import Arithmetic
from flashproof.oracles import naive
from flashproof.oracles.naive import Attention, Rows
from flashproof.oracles.problem import Problem

# The analysis is of first order where exp(x) - 1 is not taken as it is; what is left out is below one part in a hundred of what is kept.
SECOND_ORDER = 1.01
# The probabilistic bound holds with a probability of 1 - 2 exp(-lambda^2 / 2) for each sum (Higham and Mary, theorem 2.4).
LAMBDA = 3.0
# Mean signed error that is no lean: a quarter of what a truncating cast makes. Correct kernels reach 0.11 (16 bit, in units of the output's
# roundoff; float32, in units of the bound: less).
BIAS_ALLOWANCE = 0.25
BIAS_STANDARD_ERRORS = 4.0
# Root mean square of the errors over what `oracles.spread` expects of a claim: that is an expectation from above, so 1 but for its higher orders.
RMS_ALLOWANCE = 1.1
RMS_STANDARD_ERRORS = 4.0

_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# Largest absolute error where a result underflows; flush to zero is allowed but to float16, whose subnormal numbers every chip has.
_UNDERFLOW = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
_PRODUCTS = {"exact": 0.0, "3xtf32": 2.0**-21, "tf32": 2.0**-10}
_LARGEST_EXPONENT = 600.0  # keeps exponentials and their products finite in float64; a bound of 1e260 excuses any number

Form = Literal["deterministic", "statistical"]


def output_roundoff(dtype: torch.dtype) -> float:
    """u_o: the relative error of one rounding to this dtype."""
    return _ROUNDOFF[dtype]


@dataclass(frozen=True)
class Claim:
    """A claimed arithmetic, the form of its bound, and the dtype of its results (None: that of the inputs)."""

    arithmetic: Arithmetic
    form: Form = "deterministic"
    dtype: torch.dtype | None = None


def without_casts(claim: Claim) -> Claim:
    """The claim as if nothing were rounded to 16 bit: what is left is what float32 sums, scores and exponentials make, statistically."""
    return Claim(replace(claim.arithmetic, weights="float32"), "statistical", torch.float32)


FLOAT64 = Claim(Arithmetic(accumulate="float64", weights="float32"), dtype=torch.float64)  # the working oracle, `naive.attention`


@dataclass(frozen=True)
class Units:
    """What one claim, dtype and problem put into the formulas."""

    form: Form
    u_a: float  # one operation of the accumulator
    u_p: float  # the cast of P and dS before a product
    u_o: float  # the output's rounding
    u_l: float  # the rounding of the LSE to float32, where that is not one of the accumulator's own
    product: float  # rounding of the operands of a product (TF32)
    eps_e: float  # the exponential
    eta: float  # underflow of a weight
    tiny: float  # underflow of the output
    tiles: int  # n_b, steps of the online softmax
    row_sum: int  # length of the longest chain of additions in a row's sum
    by_lse: bool  # the forward's weights are divided by exp(lse), not by their sum
    sixteen_bit_steps: int  # additions into a 16-bit gradient, for each query head

    def gamma(self, n: int) -> float:
        """Relative error of a sum of n terms, in units of the sum of their absolute values."""
        if self.form == "statistical":
            return LAMBDA * math.sqrt(n) * self.u_a
        return n * self.u_a / (1.0 - n * self.u_a)

    def of_lse(self, lse_abs: Tensor) -> Tensor:
        """Relative error, [rows, 1], of what is divided by exp(lse) and not by a sum: an LSE's own roundings, u_a (2 |L| + 4) (Blanchard, Higham and
        Higham, as in the bound of the LSE), once for a part and once for the whole, and an exponential. It may be large: half an ulp of 1e10 is 512.
        """
        return torch.expm1((self.u_a * (4.0 * lse_abs + 8.0) + self.eps_e).clamp(max=_LARGEST_EXPONENT)) if self.by_lse else torch.zeros_like(lse_abs)

    @property
    def rescaling(self) -> float:
        """Of a running sum over all tiles: each step multiplies by one exponential and makes at most six roundings (FA1 makes six, FA2 two)."""
        steps = LAMBDA * math.sqrt(self.tiles) if self.form == "statistical" else self.tiles
        return steps * (self.eps_e + 6.0 * self.u_a)


def _sixteen_bit_steps(problem: Problem, arithmetic: Arithmetic) -> int:
    """Additions into a 16-bit gradient, for each query head."""
    if arithmetic.gradients == "input":
        return math.ceil(max(problem.query.shape[2], problem.key.shape[2]) / (arithmetic.query_tile or 16))
    return 1 if arithmetic.gradients == "heads" and problem.groups > 1 else 0


def units_of(problem: Problem, claim: "Claim") -> Units:
    arithmetic, dtype, keys = claim.arithmetic, claim.dtype or problem.query.dtype, problem.key.shape[2]
    roundoff = {"fma": 2.0**-24, "tensor_core": 2.0 * 2.0**-24, "float64": 2.0**-53}[arithmetic.accumulate]
    elementary = 2.0**-53 if arithmetic.accumulate == "float64" else 2.0**-24
    sixteen_bit = dtype in (torch.float16, torch.bfloat16)
    cast = arithmetic.weights == "input" and sixteen_bit
    # An unknown tile is taken at its worst: as small as 16 for the number of steps, all keys for the length of a sum.
    tiles = math.ceil(keys / (arithmetic.key_tile or 16))
    return Units(
        form=claim.form,
        u_a=roundoff,
        u_p=_ROUNDOFF[dtype] if cast else 0.0,
        u_o=_ROUNDOFF[dtype],
        u_l=_ROUNDOFF[torch.float32] if arithmetic.accumulate == "float64" and dtype != torch.float64 else 0.0,
        product=_PRODUCTS[arithmetic.products],
        eps_e=2.0 * arithmetic.exp_ulps * elementary,
        eta=(_UNDERFLOW[torch.float64] if arithmetic.accumulate == "float64" else _UNDERFLOW[torch.float32]) + (_UNDERFLOW[dtype] if cast else 0.0),
        tiny=_UNDERFLOW[dtype],
        tiles=tiles,
        row_sum=min(keys, arithmetic.key_tile + tiles) if arithmetic.key_tile else keys,
        by_lse=arithmetic.normaliser == "lse",
        sixteen_bit_steps=_sixteen_bit_steps(problem, arithmetic) if sixteen_bit else 0,
    )


def has_statistical_gate(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Whether the probabilistic bound gates too: float32 whose roundings have mean zero, where the deterministic bound is 20 to 100 times loose.

    Not for tensor cores, which truncate: their errors do not cancel. In 16 bit the casts dominate both forms.
    """
    return problem.query.dtype == torch.float32 and arithmetic.accumulate == "fma" and arithmetic.products == "exact"


def bounds(problem: Problem, claim: Claim) -> Attention:
    """The bound of every element of out, lse, dq, dk and dv, in float64, shaped like them."""
    return evaluate(problem, [claim]).bounds[0]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The float64 answer, the bound of each claim, and what rounding the weights to nearest does to the answer.

    casts: the errors that correct roundings to the inputs' dtype make here, one for each way to round (`_add_casts`); empty for float32.
    Where weights repeat (ties, scores near 0), and where all keys of a row share one error, these have one sign, so a correct kernel leans by as much.
    """

    answer: Attention
    bounds: list[Attention]
    casts: list[Attention]

    def casts_of(self, arithmetic: Arithmetic) -> list[Attention]:
        """Those that a claim allows for: one that keeps its weights in float32 casts nothing but the output, which delta may be taken from."""
        return self.casts if arithmetic.weights == "input" else self.casts[-1:]


def evaluate(problem: Problem, claims: Sequence[Claim], block_scores: int = naive.BLOCK_SCORES) -> Evaluation:
    """The float64 answer and everything that it is judged by, in one pass over the rows."""
    answer = naive.empty_answer(problem)
    sums = [_Sums(problem, units_of(problem, claim)) for claim in claims]
    sixteen_bit = problem.query.dtype in (torch.float16, torch.bfloat16)
    casts = [naive.empty_answer(problem) for _ in range(5)] if sixteen_bit else []
    for rows in naive.row_blocks(problem, block_scores):
        naive.add_rows(answer, rows, problem.groups)
        parts = _Parts(rows)
        for one in sums:
            one.add(rows, parts)
        if casts:
            _add_casts(casts, rows, parts, problem)
    return Evaluation(answer, [one.finish(answer) for one in sums], casts)


def _add_casts(casts: list[Attention], rows: Rows, parts: "_Parts", problem: Problem) -> None:
    """Five kernels: P and dS cast, of normalised and of unnormalised weights; the same with delta from the rounded output; and that delta alone.

    A kernel that reads its output back has delta off by e_i = sum_d dO_id (stored O_id - O_id); the stored output has the cast's error and one rounding.
    So dS_ij is off by -P_ij e_i: one error for all keys of the row, and dK_j by -tau sum_i P_ij e_i q_i, which is much the same for all j.
    Blocks of keys are then not independent, and their standard error cannot know of it: with dim 1 and 17 keys in bfloat16 a correct kernel leant
    by 3.4 ulps of dK, six standard errors. (A sixth way to cast leans by 9 there; tensors of so few columns are no longer judged for bias at all.)
    """

    def off(weights: Tensor) -> Tensor:
        return weights.to(problem.query.dtype).to(torch.float64) - weights

    total = torch.exp(rows.lse[:, None] - rows.maximum)  # l: weights relative to the row's maximum are P l
    dscores = off(rows.dscores)
    normalised, unnormalised, none = off(parts.dropped), off(parts.dropped * total) / total.clamp(min=1.0), torch.zeros_like(dscores)
    kernels = [(normalised, dscores, False), (unnormalised, dscores, False), (normalised, dscores, True), (unnormalised, dscores, True), (none, none, True)]
    for cast, (error, dscores_error, reads_output) in zip(casts, kernels, strict=True):
        out = error @ rows.value
        if reads_output:
            delta = (rows.dout * (out + off(rows.out + out))).sum(dim=1, keepdim=True)
            dscores_error = dscores_error - rows.weights * delta  # noqa: PLW2901
        cast.out[rows.batch, rows.head, rows.start : rows.stop] = out
        cast.dv[rows.batch, rows.head // problem.groups] += error.T @ rows.dout
        cast.dq[rows.batch, rows.head, rows.start : rows.stop] = rows.scale * (dscores_error @ rows.key)
        cast.dk[rows.batch, rows.head // problem.groups] += rows.scale * (dscores_error.T @ rows.query)


class _Parts:
    """What the bounds of all claims share for a block of rows."""

    def __init__(self, rows: Rows) -> None:
        self.score_mass = abs(rows.scale) * (rows.query.abs() @ rows.key.abs().T)  # |tau| |Q||K|^T
        self.value_abs = rows.value.abs()
        self.dropped = rows.dropped_weights  # P', the weights after dropout
        self.weighted_abs = self.dropped @ self.value_abs  # P'|V|
        self.dweights_abs = rows.dout.abs() @ self.value_abs.T  # |dO||V|^T
        if rows.gain is not None:
            self.dweights_abs = self.dweights_abs * rows.gain
        self.gain_max = 1.0 if rows.gain is None else rows.gain.amax().item()
        self.visible = rows.visible.to(torch.float64)
        self.visible_abs = self.visible @ self.value_abs  # colsum |V| over the visible keys
        self.lse_abs = torch.where(rows.lse.isfinite(), rows.lse.abs(), 0.0)[:, None]
        self.value_max = self.value_abs.amax(dim=0, keepdim=True)


def _moved(rows: Rows, log_error: Tensor) -> Tensor:
    """P (exp(log_error) - 1), by which each weight may be too large; also where the error is so large that a weight that is 0 may not be."""
    log_weight = rows.scores - torch.where(rows.lse.isfinite(), rows.lse, 0.0)[:, None]
    small = rows.weights * torch.expm1(log_error.clamp(max=1.0))
    large = torch.exp((log_weight + log_error).clamp(max=_LARGEST_EXPONENT)) - rows.weights
    return torch.where(rows.visible, torch.where(log_error < 1.0, small, large), 0.0)


class _Sums:
    """The bound under way: rows write theirs, keys and values add up."""

    def __init__(self, problem: Problem, units: Units) -> None:
        self.problem = problem
        self.units = units
        self.bound = naive.empty_answer(problem)

    def add(self, rows: Rows, parts: _Parts) -> None:
        u, weights = self.units, rows.weights
        dim, keys = rows.query.shape[1], len(rows.key)
        columns = self.problem.query.shape[2] * self.problem.groups  # rows summed into one element of dK or dV

        # Relative error of an unnormalised weight: its score, the subtraction of the maximum, the exponential.
        log_error = (u.gamma(dim) + u.product) * parts.score_mass + u.u_a * (2.0 * (rows.maximum - rows.scores) + 3.0 * rows.scores.abs()) + u.eps_e
        moved = _moved(rows, log_error)  # P o theta, the largest shift of each weight; 0 at hidden keys
        total = moved.sum(dim=1, keepdim=True)

        # --- out. Weights off by theta move a weighted mean by sum_j P_j theta_j |V_j - O|, bounded in two ways; it never leaves the hull of the values.
        moved_dropped = moved if rows.gain is None else moved * rows.gain
        apart = moved_dropped @ parts.value_abs + rows.out.abs() * total
        if rows.gain is None:
            spread = (moved @ rows.value.square() - 2.0 * rows.out * (moved @ rows.value) + rows.out.square() * total).clamp(min=0.0)
            apart = torch.minimum(apart, torch.sqrt(total * spread))
        hull = rows.out.abs() + parts.gain_max * parts.value_max
        apart = torch.where(total < 1.0, torch.minimum(apart / (1.0 - total), hull), hull)
        out = (
            apart
            + (u.u_p + u.product + u.gamma(keys) + u.rescaling + 2.0 * u.u_a + u.of_lse(parts.lse_abs)) * parts.weighted_abs
            + (u.gamma(u.row_sum) + u.rescaling + 3.0 * u.u_a + u.u_o) * rows.out.abs()
            + u.eta * parts.gain_max * parts.visible_abs
            + u.tiny
        )
        # --- lse
        furthest = (log_error * parts.visible).amax(dim=1, keepdim=True)
        lse = torch.where(total < 1.0, torch.minimum(-torch.log1p(-total.clamp(max=1.0)), furthest), furthest)
        roundings = 2.0 if u.by_lse else 1.0  # of a part's, and of the whole's
        lse = lse + u.gamma(u.row_sum) + u.rescaling + roundings * u.u_a * (2.0 * parts.lse_abs + 4.0) + u.u_l * parts.lse_abs

        # --- backward: the weights come back as exp(S - L)
        moved_back = _moved(rows, log_error + lse)
        out_mass = rows.dout.abs() * rows.out.abs()
        from_output = (rows.dout.abs() * out).sum(dim=1, keepdim=True) + u.gamma(dim) * out_mass.sum(dim=1, keepdim=True)
        dweights_error = (u.gamma(dim) + u.product + 2.0 * u.u_a) * parts.dweights_abs
        dweights_abs = rows.dweights.abs()
        from_weights = (moved_back * dweights_abs + (weights + moved_back) * (u.gamma(keys) * dweights_abs + dweights_error)).sum(dim=1, keepdim=True)
        delta = torch.maximum(from_output, from_weights)  # of the output it was stored as, or of sum_j P_j dP_j: which, no claim says
        slope = (rows.dweights - rows.delta).abs()
        # E, the error of dS. A kernel may multiply dS by a scale below 1 before it casts: the cast's underflow is then not scaled down.
        scaled_before = max(1.0, 1.0 / abs(rows.scale)) if rows.scale else 1.0
        dscores = (
            slope * (moved_back + weights * (3.0 * u.u_a + u.u_p))
            + (weights + moved_back) * (dweights_error + delta)
            + u.eta * scaled_before * (1.0 + slope) * parts.visible
        )
        dscores_abs = rows.dscores.abs()
        in_sixteen_bit = u.sixteen_bit_steps * u.u_o
        dq = dscores @ rows.key.abs() + (u.gamma(keys) + u.product + in_sixteen_bit) * (dscores_abs @ rows.key.abs())
        dk = dscores.T @ rows.query.abs() + (u.gamma(columns) + u.product + in_sixteen_bit * self.problem.groups) * (dscores_abs.T @ rows.query.abs())
        dropped_moved = moved_back if rows.gain is None else moved_back * rows.gain
        dropped_back = dropped_moved + parts.dropped * (u.u_p + u.product + 2.0 * u.u_a + u.gamma(columns) + in_sixteen_bit * self.problem.groups)
        dv = (dropped_back + u.eta * parts.gain_max * parts.visible).T @ rows.dout.abs()

        here = (rows.batch, rows.head, slice(rows.start, rows.stop))
        there = (rows.batch, rows.head // self.problem.groups)
        seen = rows.visible.any(dim=1, keepdim=True)  # a row that sees no key is exactly 0, its lse exactly -inf
        self.bound.out[here] = torch.where(seen, out, 0.0)
        self.bound.lse[here] = torch.where(seen, lse, 0.0).squeeze(1)
        self.bound.dq[here] = torch.where(seen, abs(rows.scale) * dq, 0.0)
        self.bound.dk[there] += abs(rows.scale) * dk
        self.bound.dv[there] += dv

    def finish(self, answer: Attention) -> Attention:
        u, bound = self.units, self.bound
        seen = (answer.lse != -math.inf)[..., None]
        final = {
            "out": bound.out,
            "lse": bound.lse,
            "dq": bound.dq + torch.where(seen, (u.u_o + 2.0 * u.u_a) * answer.dq.abs() + (1 + u.sixteen_bit_steps) * u.tiny, 0.0),
            "dk": bound.dk + (u.u_o + 2.0 * u.u_a) * answer.dk.abs() + (1 + u.sixteen_bit_steps * self.problem.groups) * u.tiny,
            "dv": bound.dv + u.u_o * answer.dv.abs() + (1 + u.sixteen_bit_steps * self.problem.groups) * u.tiny,
        }
        return Attention(**{name: SECOND_ORDER * tensor for name, tensor in final.items()})


def worst_unit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """u_o |tensor|: half a unit in the last place, at most, of each element."""
    return _ROUNDOFF[dtype] * tensor.abs()


def before_rounding(problem: Problem, arithmetic: Arithmetic) -> Attention:
    """The bound of results in float32, before they are rounded to 16 bit, where no cast of a weight errs: weights of 0 and 1, or all one power of two.

    A weight that float32 has wrong in its last places is cast to the power of two that it should be.
    """
    return bounds(problem, Claim(replace(arithmetic, weights="float32", gradients="float32"), dtype=torch.float32))


def rounds_to(exact: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
    """Where whatever lies within `before` of the exact result is rounded to it: it is a number of this dtype, and no other is as near.

    Below a power of two the next number is half a unit away, and what is nearer than a quarter is rounded up.
    """
    return (exact.to(dtype).to(torch.float64) == exact) & (before < half_unit(exact, dtype) / 2.0)


def half_unit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of each element: the largest error of rounding it to this dtype, whose exponent it has."""
    exponent = torch.floor(torch.log2(tensor.abs().clamp(min=torch.finfo(dtype).smallest_normal)))
    return _ROUNDOFF[dtype] * torch.exp2(exponent)
