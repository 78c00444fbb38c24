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

from flashproof.impls.shapes import Float
from flashproof.impls.spec import Arithmetic
from flashproof.oracles import naive
from flashproof.oracles.naive import Attention, Rows, Slopes
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


def overflow_threshold(dtype: torch.dtype) -> float:
    """The smallest number that is rounded to infinity: half a unit in the last place above the largest number."""
    info = torch.finfo(dtype)
    return info.max * (1.0 + info.eps / (2.0 * (2.0 - info.eps)))


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
        # The operands of a product are rounded to the input dtype, and so is the product.
        product=3.0 * _ROUNDOFF[dtype] if arithmetic.products == "input" else _PRODUCTS[arithmetic.products],
        eps_e=2.0 * arithmetic.exp_ulps * elementary,
        eta=(_UNDERFLOW[torch.float64] if arithmetic.accumulate == "float64" else arithmetic.exp_smallest) + (_UNDERFLOW[dtype] if cast else 0.0),
        tiny=_UNDERFLOW[dtype],
        tiles=tiles,
        row_sum=min(keys, arithmetic.key_tile + tiles) if arithmetic.key_tile else keys,
        by_lse=arithmetic.normaliser == "lse",
        sixteen_bit_steps=_sixteen_bit_steps(problem, arithmetic) if sixteen_bit else 0,
    )


def has_statistical_gate(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Whether the probabilistic bound gates too: float32 whose roundings have mean zero, where the deterministic bound is 20 to 100 times loose.

    Not for tensor cores, which truncate: their errors do not cancel. In 16 bit the casts dominate both forms. Nor for sums of equal terms.
    """
    is_fma = problem.query.dtype == torch.float32 and arithmetic.accumulate == "fma" and arithmetic.products == "exact"
    return is_fma and not _sums_equal_terms(problem)


def _sums_equal_terms(problem: Problem) -> bool:
    """Whether some sum over keys, or over queries, is of one number again and again.

    The roundings of such a sum are no random numbers: while it stays between two powers of two, each addition makes the same error. torch's
    dV of 4192 equal rows is 4 probabilistic bounds off, and inside the deterministic one.
    """

    def is_constant(tensor: Tensor) -> bool:
        return tensor.shape[2] > 1 and bool((tensor == tensor[:, :, :1]).all())

    query, key = problem.query, problem.key
    flat = problem.scale == 0.0 or key.shape[2] == 1 or not bool(query.any()) or not bool(key.any())
    over_keys = is_constant(problem.value) and (flat or is_constant(key))
    return over_keys or (is_constant(problem.dout) and (flat or is_constant(query)))


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


def evaluate(problem: Problem, claims: Sequence[Claim], block_scores: int | None = None, *, backward: bool = True) -> Evaluation:
    """The float64 answer and everything that it is judged by, in one pass over the rows. backward: whether gradients are asked for; else they are 0."""
    answer = naive.empty_answer(problem)
    largest = largest_score(problem)
    sums = [_Sums(problem, units_of(problem, claim), largest) for claim in claims]
    casts = _Casts(problem) if problem.query.dtype in (torch.float16, torch.bfloat16) else None
    for rows in naive.row_blocks(problem, block_scores):
        slopes = rows.slopes() if backward else None
        naive.add_rows(answer, rows, slopes)
        parts = _Parts(rows, slopes)
        for one in sums:
            one.add(rows, parts)
        if casts:
            casts.add(rows, slopes, parts)
    return Evaluation(answer, [one.finish(answer) for one in sums], casts.answers() if casts else [])


def largest_score(problem: Problem) -> float:
    """What no |score| exceeds, nor any sum of the absolute values of its terms (Cauchy and Schwarz). NaN or inf where the inputs are not finite."""
    longest = [torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float64).amax() for tensor in (problem.query, problem.key)]
    return abs(problem.scale) * float(longest[0] * longest[1])


FEW = 0.1  # of the weight of a row may be moved where bounds are of first order: no maximum, no hull of values limits them


def share(problem: Problem, claim: Claim, of: Claim) -> float | None:
    """t so that the bound of a claim is at most t times that of another one, element by element; None where no t below 2^-20 is known.

    Let every unit of the claim be at most t times the other's. Where no limit cuts a bound off, it is a sum of products of units, of expm1 and of
    -log1p(-x), each convex and 0 at 0, so that f(t x) <= t f(x); and of square roots of two factors that are both t times smaller. So it is t times
    smaller. It spares the float64 oracle, whose units are 2^-29 of float32's, the evaluation of its own bound.
    """
    small, large = units_of(problem, claim), units_of(problem, of)
    if not _largest_error(problem, large, largest_score(problem)) < FEW or (small.by_lse and not large.by_lse):
        return None
    lengths = (problem.query.shape[3], problem.key.shape[2], problem.query.shape[2] * problem.groups)
    pairs = [(small.gamma(length), large.gamma(length)) for length in lengths]
    pairs += [(small.gamma(small.row_sum), large.gamma(large.row_sum)), (small.rescaling, large.rescaling)]
    pairs += [(getattr(small, unit), getattr(large, unit)) for unit in ("u_a", "u_p", "u_o", "u_l", "product", "eps_e", "eta", "tiny")]
    pairs += [(small.sixteen_bit_steps * small.u_o, large.sixteen_bit_steps * large.u_o)]
    pairs += [((1 + small.sixteen_bit_steps) * small.tiny, (1 + large.sixteen_bit_steps) * large.tiny)]
    largest = max((less / more if more else math.inf for less, more in pairs if less), default=0.0)
    return largest if largest < 2.0**-20 else None


class _Casts:
    """Five kernels: P and dS cast, of normalised and of unnormalised weights; the same with delta from the rounded output; and that delta alone.

    A kernel that reads its output back has delta off by e_i = sum_d dO_id (stored O_id - O_id); the stored output has the cast's error and one rounding.
    So dS_ij is off by -P_ij e_i: one error for all keys of the row, and dK_j by -tau sum_i P_ij e_i q_i, which is much the same for all j.
    Blocks of keys are then not independent, and their standard error cannot know of it: with dim 1 and 17 keys in bfloat16 a correct kernel leant
    by 3.4 ulps of dK, six standard errors. (A sixth way to cast leans by 9 there; tensors of so few columns are no longer judged for bias at all.)

    All errors are linear in a few products: of the casts of P (two ways) and of dS, and of P itself by each way's e_i.
    """

    def __init__(self, problem: Problem) -> None:
        self.dtype = problem.query.dtype
        self.nothing = naive.empty_answer(problem)
        out, dim = self.nothing.out, problem.key.shape[3]
        self.out = [torch.zeros_like(out) for _ in range(2)]  # of the normalised and of the unnormalised weights' casts
        self.dv = [naive.zeros_of_keys(problem, dim) for _ in range(2)]
        self.dq, self.dk = torch.zeros_like(out), naive.zeros_of_keys(problem, dim)  # of dS's cast
        self.dq_by_delta = [torch.zeros_like(out) for _ in range(3)]  # normalised, unnormalised, none
        self.dk_by_delta = naive.zeros_of_keys(problem, 3 * dim)

    def add(self, rows: Rows, slopes: Slopes | None, parts: "_Parts") -> None:
        """The share of one block of rows."""

        def off(weights: Tensor) -> Tensor:
            return weights.to(self.dtype).to(torch.float64).sub_(weights)

        total = torch.exp(rows.lse - rows.maximum)  # l: weights relative to the row's maximum are P l
        errors = [off(parts.dropped), off(parts.dropped * total).div_(total.clamp(min=1.0))]
        outs = [error @ rows.value for error in errors]
        for whole, part in zip(self.out, outs, strict=True):
            rows.write(whole, part)
        if slopes is None:
            return
        for whole, error in zip(self.dv, errors, strict=True):
            rows.add(whole, error, rows.dout)
        outs.append(torch.zeros_like(rows.out))
        deltas = [(rows.dout * (out + off(rows.out + out))).sum(dim=-1, keepdim=True) for out in outs]
        of_dscores, mean_key = off(slopes.dscores), rows.scale * (rows.weights @ rows.key)
        rows.write(self.dq, rows.scale * (of_dscores @ rows.key))
        rows.add(self.dk, of_dscores, rows.query, rows.scale)
        for by_delta, delta in zip(self.dq_by_delta, deltas, strict=True):
            rows.write(by_delta, delta * mean_key)
        moved = torch.cat([delta * rows.query for delta in deltas], dim=-1)
        rows.add(self.dk_by_delta, rows.weights, moved, rows.scale)

    def answers(self) -> list[Attention]:
        """The errors of the five, in the order named."""
        none, dk_by_delta = self.nothing, self.dk_by_delta.chunk(3, dim=-1)
        cast = [Attention(out, none.lse, self.dq, self.dk, dv) for out, dv in zip(self.out, self.dv, strict=True)]
        read = [Attention(each.out, none.lse, self.dq - dq, self.dk - dk, each.dv) for each, dq, dk in zip(cast, self.dq_by_delta, dk_by_delta, strict=False)]
        return [*cast, *read, Attention(none.out, none.lse, -self.dq_by_delta[2], -dk_by_delta[2], none.dv)]


class _Parts:
    """What the bounds of all claims share for a block of rows."""

    def __init__(self, rows: Rows, slopes: Slopes | None) -> None:
        self.query_abs, self.key_abs, self.value_abs = rows.query.abs(), rows.key.abs(), rows.value.abs()
        self.score_mass = (self.query_abs @ self.key_abs.mT).mul_(abs(rows.scale))  # |tau| |Q||K|^T
        self.roundings = rows.scores.abs().mul_(3.0).sub_(rows.scores, alpha=2.0).add_(2.0 * rows.maximum)  # 2 (m - S) + 3 |S|; -inf at hidden keys
        self.hidden = None if rows.visible is None else ~rows.visible
        if self.hidden is not None:
            self.roundings.masked_fill_(self.hidden, -math.inf)
        self.dropped = rows.dropped_weights  # P', the weights after dropout
        self.weighted_abs = self.dropped @ self.value_abs  # P'|V|
        # |V|, V^2 and V side by side: one product with P o theta
        self.values = torch.cat([self.value_abs, rows.value.square(), rows.value], dim=-1)
        # colsum |V| over the visible keys
        self.visible_abs = self.value_abs.sum(dim=1, keepdim=True) if rows.visible is None else rows.visible.to(torch.float64) @ self.value_abs
        self.lse_abs = rows.finite_lse.abs()
        self.out_abs, self.dout_abs = rows.out.abs(), rows.dout.abs()
        self._errors: dict[tuple[float, float], Tensor] = {}
        self.backward = slopes is not None
        if slopes is None:
            return
        self.dweights_abs = slopes.dweights.abs()
        self.dweights_mass = self.dout_abs @ self.value_abs.mT  # |dO||V|^T
        if rows.gain is not None:
            self.dweights_mass *= rows.gain
        self.slope, self.dscores_abs = slopes.slope.abs(), slopes.dscores.abs()
        self.one_and_slope = self.slope + 1.0  # at visible keys, else 0
        if self.hidden is not None:
            self.one_and_slope.masked_fill_(self.hidden, 0.0)

    def log_error(self, u: Units, dim: int) -> Float[Tensor, "kv_heads rows keys"]:
        """Relative error of an unnormalised weight: its score, the subtraction of the maximum, the exponential. -inf at hidden keys."""
        known = (u.u_a, u.eps_e)
        if known not in self._errors:
            self._errors[known] = (self.roundings * u.u_a).add_(u.eps_e)
        return torch.add(self._errors[known], self.score_mass, alpha=u.gamma(dim) + u.product)


def _moved(rows: Rows, log_error: Tensor) -> Tensor:
    """P (exp(log_error) - 1), by which each weight may be too large; also where the error is so large that a weight that is 0 may not be."""
    log_weight = rows.scores - rows.finite_lse
    small = rows.weights * torch.expm1(log_error.clamp(max=1.0))
    large = torch.exp((log_weight + log_error).clamp(max=_LARGEST_EXPONENT)) - rows.weights
    moved = torch.where(log_error < 1.0, small, large)
    return moved if rows.visible is None else moved.masked_fill_(~rows.visible, 0.0)


def _row_sums(one: Tensor, other: Tensor) -> Float[Tensor, "kv_heads rows 1"]:
    """sum over keys of their products. On a CPU, without a matrix of these."""
    return (one * other).sum(dim=-1, keepdim=True) if one.is_cuda else torch.linalg.vecdot(one, other)[..., None]


class _Sums:
    """The bound under way: rows write theirs, keys and values add up."""

    def __init__(self, problem: Problem, units: Units, largest: float) -> None:
        self.problem = problem
        self.units = units
        self.bound = naive.empty_answer(problem)
        self.is_small = _largest_error(problem, units, largest) < 1.0

    def add(self, rows: Rows, parts: _Parts) -> None:
        """The share of one block of rows."""
        u = self.units
        log_error = parts.log_error(u, rows.query.shape[-1])
        furthest = log_error.amax(dim=-1, keepdim=True).clamp_(min=0.0)
        # P o theta, the largest shift of each weight; 0 at hidden keys
        moved = log_error.expm1_().mul_(rows.weights) if self.is_small else _moved(rows, log_error)
        total = moved.sum(dim=-1, keepdim=True)
        out = self._out(rows, parts, moved, total)
        lse = torch.where(total < 1.0, torch.minimum(-torch.log1p(-total.clamp(max=1.0)), furthest), furthest)
        roundings = 2.0 if u.by_lse else 1.0  # of a part's, and of the whole's
        lse = lse + u.gamma(u.row_sum) + u.rescaling + roundings * u.u_a * (2.0 * parts.lse_abs + 4.0) + u.u_l * parts.lse_abs
        rows.write(self.bound.out, torch.where(rows.sees, out, 0.0))  # a row that sees no key is exactly 0, its lse exactly -inf
        rows.write(self.bound.lse, torch.where(rows.sees, lse, 0.0))
        if not parts.backward:
            return
        # --- backward: the weights come back as exp(S - L), off by P (exp(log_error + lse) - 1)
        if self.is_small:
            back = torch.expm1(lse)
            moved = moved.mul_(1.0 + back).addcmul_(rows.weights, back)
        else:
            moved = _moved(rows, parts.log_error(u, rows.query.shape[-1]) + lse)
        self._backward(rows, parts, moved, out)

    def _out(self, rows: Rows, parts: _Parts, moved: Tensor, total: Tensor) -> Float[Tensor, "kv_heads rows dim"]:
        """Weights off by theta move a weighted mean by sum_j P_j theta_j |V_j - O|, bounded in two ways; it never leaves the hull of the values."""
        u = self.units
        if rows.gain is None:
            by_abs, by_square, by_value = (moved @ parts.values).chunk(3, dim=-1)
            spread = (by_square - 2.0 * rows.out * by_value + rows.out.square() * total).clamp_(min=0.0)
            apart = torch.minimum(by_abs + parts.out_abs * total, torch.sqrt(total * spread))
        else:
            apart = (moved * rows.gain) @ parts.value_abs + parts.out_abs * total
        hull = parts.out_abs + rows.largest_gain * rows.value_max
        apart = torch.where(total < 1.0, torch.minimum(apart / (1.0 - total), hull), hull)
        return (
            apart
            + (u.u_p + u.product + u.gamma(rows.all_keys) + u.rescaling + 2.0 * u.u_a + u.of_lse(parts.lse_abs)) * parts.weighted_abs
            + (u.gamma(u.row_sum) + u.rescaling + 3.0 * u.u_a + u.u_o) * parts.out_abs
            + u.eta * rows.largest_gain * parts.visible_abs
            + u.tiny
        )

    def _backward(self, rows: Rows, parts: _Parts, moved: Tensor, out: Tensor) -> None:
        """moved: by how much each weight may come back too large. It is used up."""
        u, weights = self.units, rows.weights
        dim, columns = rows.query.shape[-1], self.problem.query.shape[2] * self.problem.groups  # rows summed into one element of dK or dV
        out_mass = (parts.dout_abs * parts.out_abs).sum(dim=-1, keepdim=True)
        from_output = (parts.dout_abs * out).sum(dim=-1, keepdim=True) + u.gamma(dim) * out_mass
        dweights_error = u.gamma(dim) + u.product + 2.0 * u.u_a  # times |dO||V|^T
        from_weights = (
            (1.0 + u.gamma(rows.all_keys)) * _row_sums(moved, parts.dweights_abs)
            + u.gamma(rows.all_keys) * _row_sums(weights, parts.dweights_abs)
            + dweights_error * (_row_sums(moved, parts.dweights_mass) + (parts.dout_abs * parts.weighted_abs).sum(dim=-1, keepdim=True))
        )
        delta = torch.maximum(from_output, from_weights)  # of the output it was stored as, or of sum_j P_j dP_j: which, no claim says
        # E, the error of dS, with that of the sum over keys. A kernel may multiply dS by a scale below 1 before it casts: the cast's underflow is then not
        # scaled down.
        scaled_before = max(1.0, 1.0 / abs(rows.scale)) if rows.scale else 1.0
        in_sixteen_bit = u.sixteen_bit_steps * u.u_o
        over_keys = u.gamma(rows.all_keys) + u.product + in_sixteen_bit
        over_queries = u.gamma(columns) + u.product + in_sixteen_bit * self.problem.groups
        dscores = torch.add(delta, parts.dweights_mass, alpha=dweights_error).mul_(weights + moved)
        dscores.addcmul_(moved, parts.slope)
        dscores.add_(parts.dscores_abs, alpha=3.0 * u.u_a + u.u_p + over_keys)
        dscores.add_(parts.one_and_slope, alpha=u.eta * scaled_before)
        dq = (dscores @ parts.key_abs).mul_(abs(rows.scale))
        dscores.add_(parts.dscores_abs, alpha=over_queries - over_keys)
        dropped = moved if rows.gain is None else moved.mul_(rows.gain)
        dropped.add_(parts.dropped, alpha=u.u_p + u.product + 2.0 * u.u_a + u.gamma(columns) + in_sixteen_bit * self.problem.groups)
        dropped.add_(u.eta * rows.largest_gain)
        if parts.hidden is not None:
            dropped.masked_fill_(parts.hidden, 0.0)
        rows.write(self.bound.dq, torch.where(rows.sees, dq, 0.0))
        rows.add(self.bound.dk, dscores, parts.query_abs, abs(rows.scale))
        rows.add(self.bound.dv, dropped, parts.dout_abs)

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


def _largest_error(problem: Problem, u: Units, largest: float) -> float:
    """What no relative error of a weight exceeds, that of the LSE included, given what no |score| exceeds. NaN where that is not finite."""
    dim, lse = problem.query.shape[3], largest + math.log(problem.key.shape[2])
    weight = (u.gamma(dim) + u.product + 7.0 * u.u_a) * largest + u.eps_e
    return 2.0 * weight + u.gamma(u.row_sum) + u.rescaling + 2.0 * u.u_a * (2.0 * lse + 4.0) + u.u_l * lse


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
