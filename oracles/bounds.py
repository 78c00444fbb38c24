"""The bound: the largest error, element by element, that a claimed arithmetic can make on a given input.

The bound comes from a rounding analysis of FlashAttention as kernels really compute it. The inputs are exact. Scores
and sums are accumulated in float32. The weights and dS are cast before the second product. One rounding ends the
computation. No other file of the project holds a tolerance, and no tolerance here is fitted to a kernel.

Sources:
- Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1: gamma_n and inner products.
- Blanchard, Higham and Higham, IMA J. Numer. Anal. 41(4), 2021: shifted softmax and log-sum-exp.
- Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019: sqrt(n) in the probabilistic form.
- Fasi et al., PeerJ CS 7:e330, 2021: tensor cores truncate.
- Khattak and Mikaitis, arXiv 2512.07004, 2025, and Xie et al., arXiv 2511.10909, 2025: how Hopper's tensor cores add.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.impls.spec import Arithmetic
from flashproof.oracles import e4m3, naive
from flashproof.oracles.naive import Attention, Rows, Slopes
from flashproof.oracles.problem import Problem

# The analysis is of first order, except where it evaluates exp(x) - 1 itself. The omitted terms are below 1 % of the
# terms that are kept.
SECOND_ORDER = 1.01
# For each sum, the probabilistic bound holds with probability 1 - 2 exp(-lambda^2 / 2) (Higham and Mary, theorem 2.4).
LAMBDA = 3.0
# A mean signed error up to this allowance is acceptable. It is a quarter of the mean signed error of a truncating cast.
# Correct kernels reach 0.11 in 16 bit, in units of the output's roundoff. In float32 they reach less, in units of the
# bound.
BIAS_ALLOWANCE = 0.25
BIAS_STANDARD_ERRORS = 4.0
# The root mean square of the errors, relative to the expectation of `oracles.spread`. The expectation is an upper
# estimate, so the ratio would be at most 1 without terms of higher order.
RMS_ALLOWANCE = 1.1
RMS_STANDARD_ERRORS = 4.0

_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# The largest absolute error of a result that underflows. Flush to zero is allowed, except in float16: every chip
# supports the subnormal numbers of float16.
_UNDERFLOW = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
# "6xbf16": the parts of x are at most |x| (1 + 2^-8), 2^-8 |x| and 2^-17 |x|. Three products of parts are left out.
_PRODUCTS = {"exact": 0.0, "6xbf16": 2.0 * 2.0**-8 * 2.0**-17 + 2.0**-34, "3xtf32": 2.0**-21, "tf32": 2.0**-10}
# The largest absolute error of an operand whose third part underflows: half of the smallest number of bfloat16.
_OPERAND_UNDERFLOW = {"6xbf16": 2.0**-134}
# The products that a tensor core of Hopper adds to a sum in one step, and what the step loses, relative to the sum of
# the absolute values. It cuts each of 17 numbers off 25 bits below the exponent of the largest one, and cuts their sum
# off after 24 bits. Of e4m3 numbers it adds 32 products, cuts each of 33 numbers off 13 bits below the exponent of the
# largest one, and cuts their sum off after 14 bits.
_STEP = 16, 17 * 2.0**-25 + 2.0**-23
_STEP_OF_E4M3 = 32, 33 * 2.0**-13 + 2.0**-13
# The sum of all partial sums after which the six products of parts truncate, relative to the whole sum: the five small
# products come first, and what they add to 1 is 2^-7 twice, 2^-8 three times, and less.
_SMALL_PRODUCTS_FIRST = 1.04
# A weight in e4m3 is 2^8 exp(S - m). It is rounded to 4 bits. Below 2^-6 it is off by at most 2^-10, half of the
# smallest number of e4m3.
_E4M3_WEIGHT = 2.0**-4
_E4M3_WEIGHT_UNDERFLOW = 2.0**-10 / 2.0**8
# This limit keeps exponentials and the products of two of them finite in float64. A bound of 1e130 excuses any number.
_LARGEST_EXPONENT = 300.0

Form = Literal["deterministic", "statistical"]


def output_roundoff(dtype: torch.dtype) -> float:
    """u_o: the largest relative error of one rounding to this dtype."""
    return _ROUNDOFF[dtype]


def overflow_threshold(dtype: torch.dtype) -> float:
    """The smallest number that rounds to infinity.

    It is half a unit in the last place above the largest finite number of the dtype.
    """
    info = torch.finfo(dtype)
    return info.max * (1.0 + info.eps / (2.0 * (2.0 - info.eps)))


@dataclass(frozen=True)
class Claim:
    """A claimed arithmetic, the form of its bound, and the dtype of its results (None: the dtype of the inputs)."""

    arithmetic: Arithmetic
    form: Form = "deterministic"
    dtype: torch.dtype | None = None


def without_casts(claim: Claim) -> Claim:
    """The claim without any rounding to 16 bit, in the statistical form.

    Only the errors of float32 sums, scores and exponentials remain.
    """
    return Claim(replace(claim.arithmetic, weights="float32"), "statistical", torch.float32)


# The claim of the working oracle, `naive.attention`.
FLOAT64 = Claim(Arithmetic(accumulate="float64", weights="float32"), dtype=torch.float64)


@dataclass(frozen=True)
class Units:
    """The units of error that one claim, dtype and problem put into the formulas.

    operand, product_tiny, eta and tiny are absolute errors. The other float fields are relative errors.
    """

    form: Form
    u_a: float  # one operation of the accumulator, or of the float32 units where only products use tensor cores
    terms: int | None  # the most terms that a tensor core adds up; None: all sums are made in the same way
    step_terms: int  # with `terms`: the products that a tensor core adds in one step
    step_error: float  # with `terms`: what one step of a tensor core truncates
    tile: int  # with `terms`: the fewest terms in each sum of a tensor core, apart from the last one
    u_p: float  # the cast of P or dS before a product
    u_s: float  # the cast of P before dS is computed from it
    u_o: float  # the rounding of the output
    u_l: float  # the rounding of the LSE to float32; 0 if the accumulator's own roundings include it
    u_n: float  # one operation of the LSE that normalises: as u_a, or of the input dtype as under torch.autocast
    product: float  # the rounding of the operands of a product (TF32, parts)
    operand: float  # the underflow of an operand of a product
    product_tiny: float  # the underflow of a product that is rounded to the input dtype, as under torch.autocast
    eps_e: float  # the exponential
    eta: float  # the underflow of a weight
    lost: float  # the underflow of a weight, relative to the largest weight of its row
    is_coarse: bool  # e4m3: terms of second order count
    tiny: float  # the underflow of the output
    tiles: int  # n_b, the number of steps of the online softmax
    query_tiles: int  # the number of steps of the backward over the queries of a head
    row_sum: int  # the length of the longest chain of additions in a row's sum
    by_lse: bool  # whether the forward divides its weights by exp(lse) instead of by their sum
    sixteen_bit_steps: int  # the number of additions into a 16-bit gradient, for each query head

    def gamma(self, n: int) -> float:
        """The relative error of a sum of n products, in units of the sum of their absolute values.

        With `terms`, tensor cores sum the products of each tile, and the sums of tiles are added like other numbers.
        The truncation always counts at its worst, because its errors share a sign.
        """
        if self.terms is None:
            return self.added(n)
        steps = math.ceil(min(n, self.terms) / self.step_terms)
        truncated = math.expm1(steps * math.log1p(self.step_error)) if self.is_coarse else steps * self.step_error
        return truncated + self.added(math.ceil(n / self.tile))

    def added(self, n: int) -> float:
        """The relative error of a sum of n numbers that are not products, in the same units.

        Deterministic: n u_a / (1 - n u_a) (Higham, 3.1). Statistical: lambda sqrt(n) u_a (Higham and Mary).
        """
        if self.form == "statistical":
            return LAMBDA * math.sqrt(n) * self.u_a
        return n * self.u_a / (1.0 - n * self.u_a)

    def of_lse(self, lse_abs: Tensor) -> Tensor:
        """The relative error of a result that is divided by exp(lse) instead of by a sum, shaped like lse_abs = |L|.

        The roundings of an LSE are u_n (2 |L| + 4) (Blanchard, Higham and Higham, as in the bound of the LSE). They
        count twice: once for a part and once for the whole. One exponential is added. The error may be large, because
        half an ulp of 1e10 is 512. It is 0 unless `by_lse`.
        """
        return (
            torch.expm1((self.u_n * (4.0 * lse_abs + 8.0) + self.eps_e).clamp(max=_LARGEST_EXPONENT))
            if self.by_lse
            else torch.zeros_like(lse_abs)
        )

    @property
    def rescaling(self) -> float:
        """The relative error that rescaling adds to a running sum over all tiles.

        Each step multiplies by one exponential and makes at most six roundings (FA1 makes six, FA2 makes two).
        """
        steps = LAMBDA * math.sqrt(self.tiles) if self.form == "statistical" else self.tiles
        return steps * (self.eps_e + 6.0 * self.u_a)


def _sixteen_bit_steps(problem: Problem, arithmetic: Arithmetic) -> int:
    """The number of additions into a 16-bit gradient, for each query head."""
    if arithmetic.gradients == "input":
        return math.ceil(max(problem.query.shape[2], problem.key.shape[2]) / (arithmetic.query_tile or 16))
    return 1 if arithmetic.gradients == "heads" and problem.groups > 1 else 0


def units_of(problem: Problem, claim: "Claim") -> Units:
    """Computes the units of error of a claim on a problem."""
    arithmetic, dtype, keys = claim.arithmetic, claim.dtype or problem.query.dtype, problem.key.shape[2]
    of_e4m3 = arithmetic.products == "e4m3"
    terms = arithmetic.tensor_core_terms if arithmetic.accumulate == "tensor_core" else None
    if of_e4m3 and arithmetic.accumulate == "tensor_core":
        terms = terms or max(keys, problem.query.shape[3])
    step_terms, step_error = _STEP_OF_E4M3 if of_e4m3 else _STEP
    roundoff = {"fma": 2.0**-24, "tensor_core": 2.0 * 2.0**-24, "float64": 2.0**-53}[
        "fma" if terms else arithmetic.accumulate
    ]
    elementary = 2.0**-53 if arithmetic.accumulate == "float64" else 2.0**-24
    sixteen_bit = dtype in (torch.float16, torch.bfloat16)
    cast = arithmetic.weights == "input" and sixteen_bit
    u_p = _E4M3_WEIGHT if arithmetic.weights == "e4m3" else _ROUNDOFF[dtype] if cast else 0.0
    # If the tile is unknown, assume the worst case: a tile of 16 keys for the number of steps, and a tile of all keys
    # for the length of a sum.
    tiles = math.ceil(keys / (arithmetic.key_tile or 16))
    return Units(
        form=claim.form,
        u_a=roundoff,
        terms=terms,
        step_terms=step_terms,
        step_error=step_error * (_SMALL_PRODUCTS_FIRST if arithmetic.products == "6xbf16" else 1.0),
        tile=min(arithmetic.key_tile or 16, arithmetic.query_tile or 16),
        u_p=u_p,
        u_s=u_p if arithmetic.dscores_from == "cast" else 0.0,
        u_o=_ROUNDOFF[dtype],
        u_l=_ROUNDOFF[torch.float32] if arithmetic.accumulate == "float64" and dtype != torch.float64 else 0.0,
        u_n=_ROUNDOFF[dtype] if arithmetic.products == "input" else roundoff,
        # With "input", both operands of a product and the product itself are rounded to the input dtype.
        product=3.0 * _ROUNDOFF[dtype] if arithmetic.products == "input" else _PRODUCTS.get(arithmetic.products, 0.0),
        operand=_OPERAND_UNDERFLOW.get(arithmetic.products, 0.0),
        product_tiny=_UNDERFLOW[dtype] if arithmetic.products == "input" else 0.0,
        eps_e=2.0 * arithmetic.exp_ulps * elementary,
        eta=(_UNDERFLOW[torch.float64] if arithmetic.accumulate == "float64" else arithmetic.exp_smallest)
        + (_UNDERFLOW[dtype] if cast else 0.0),
        lost=_E4M3_WEIGHT_UNDERFLOW if arithmetic.weights == "e4m3" else 0.0,
        is_coarse=of_e4m3,
        tiny=_UNDERFLOW[dtype],
        tiles=tiles,
        query_tiles=math.ceil(problem.query.shape[2] / (arithmetic.query_tile or 16)),
        row_sum=min(keys, arithmetic.key_tile + tiles) if arithmetic.key_tile else keys,
        by_lse=arithmetic.normaliser == "lse",
        sixteen_bit_steps=_sixteen_bit_steps(problem, arithmetic) if sixteen_bit else 0,
    )


def has_statistical_gate(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Whether the probabilistic bound is a second gate.

    It is a second gate in float32 with exact products or products of three parts, if the roundings have mean zero. The
    deterministic bound is 20 to 100 times too large there. The probabilistic bound is not a gate in three cases:
    - Tensor cores truncate, so their errors do not cancel. If they sum a limited number of terms, then the
      probabilistic bound contains this error at its worst, and is a gate.
    - In 16 bit, the casts dominate both forms of the bound.
    - Sums of equal terms make roundings that are not random.
    """
    rounds = arithmetic.accumulate == "fma" or (
        arithmetic.accumulate == "tensor_core" and arithmetic.tensor_core_terms is not None
    )
    is_float32 = problem.query.dtype == torch.float32 and arithmetic.products in ("exact", "6xbf16")
    return is_float32 and rounds and not any(sums_equal_terms(problem))


def has_equal_weights(problem: Problem) -> bool:
    """Whether all scores are 0, or there is one key: every visible key of a row has the same weight."""
    query, key = problem.query, problem.key
    return problem.scale == 0.0 or key.shape[2] == 1 or not bool(query.any()) or not bool(key.any())


def sums_equal_terms(problem: Problem) -> tuple[bool, bool]:
    """Whether sums over keys (out, dq), and sums over queries (dk, dv), add the same number again and again.

    The roundings of such a sum are not random. While the partial sum stays between two powers of two, each addition
    makes the same error. For example, the error of torch's dV over 4192 equal rows is 4 times the probabilistic bound,
    but it is inside the deterministic bound. Such errors also have a bias, because equal sums make equal errors.
    """

    def is_constant(tensor: Tensor) -> bool:
        first, last = tensor[:, :, :1], tensor[:, :, -1:]
        return tensor.shape[2] > 1 and torch.equal(first, last) and bool((tensor == first).all())

    query, key, flat = problem.query, problem.key, has_equal_weights(problem)
    over_keys = is_constant(problem.value) and (flat or is_constant(key))
    return over_keys, is_constant(problem.dout) and (flat or is_constant(query))


def bounds(problem: Problem, claim: Claim) -> Attention:
    """Computes the bound of every element of out, lse, dq, dk and dv, in float64, in the shapes of these tensors."""
    return evaluate(problem, [claim]).bounds[0]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The float64 answer, and the bound of each claim."""

    answer: Attention
    bounds: list[Attention]


@dataclass(frozen=True, eq=False)
class Shared:
    """What the bounds of all claims on one problem share. It takes about 150 bytes for each score."""

    answer: Attention  # in float64
    blocks: "Sequence[tuple[Rows, _Parts]]"


def shared(problem: Problem, *, backward: bool = True) -> Shared:
    """Computes what the bounds of all claims on a problem share. backward: as in `evaluate`."""
    answer = naive.empty_answer(problem)
    return Shared(answer, list(_blocks(problem, answer, None, backward=backward)))


def evaluate(
    problem: Problem,
    claims: Sequence[Claim],
    block_scores: int | None = None,
    *,
    backward: bool = True,
    known: Shared | None = None,
) -> Evaluation:
    """Computes the float64 answer and the bounds of some claims.

    claims: the result has one bound for each of them. block_scores: see `naive.row_blocks`.
    backward: whether to compute the gradients. Otherwise the gradients of the answer are 0. known: `shared(problem)`,
    with the same `backward`, if it is known.
    """
    exact = [claim for claim in claims if claim.arithmetic.products != "e4m3"]
    evaluation = _evaluate(problem, exact, block_scores, backward=backward, known=known)
    others = iter(evaluation.bounds)
    return Evaluation(
        evaluation.answer,
        [
            _around(evaluation.answer, problem, claim, block_scores)
            if claim.arithmetic.products == "e4m3"
            else next(others)
            for claim in claims
        ],
    )


def _around(answer: Attention, problem: Problem, claim: Claim, block_scores: int | None) -> Attention:
    """The bound of a claim of e4m3 inputs: what their rounding changes, and the bound of the claim on rounded inputs.

    The rounding is a function of the inputs. So its effect is computed, and no bound of it is needed. No gradient is
    claimed, so the bounds of gradients are 0.
    """
    rounded = e4m3.rounded_inputs(problem, claim.arithmetic.scale_rows)
    claim = replace(claim, dtype=claim.dtype or problem.query.dtype)
    found = _evaluate(rounded, [claim], block_scores, backward=False)
    (bound,) = found.bounds

    def moved(name: str) -> Tensor:
        exact, changed = getattr(answer, name), getattr(found.answer, name)
        return torch.where(exact == changed, 0.0, (changed - exact).abs())  # the LSE of a row without keys is -inf

    return replace(naive.empty_answer(problem), out=bound.out + moved("out"), lse=bound.lse + moved("lse"))


def _evaluate(
    problem: Problem,
    claims: Sequence[Claim],
    block_scores: int | None,
    *,
    backward: bool,
    known: Shared | None = None,
) -> Evaluation:
    """As `evaluate`, in one pass over the rows, and for claims of exact inputs."""
    answer = known.answer if known else naive.empty_answer(problem)
    blocks: Iterable[tuple[Rows, _Parts]]
    blocks = known.blocks if known else _blocks(problem, answer, block_scores, backward=backward)
    largest = largest_score(problem)
    sums = [_Sums(problem, units_of(problem, claim), largest) for claim in claims]
    for rows, parts in blocks:
        for one in sums:
            one.add(rows, parts)
    return Evaluation(answer, [one.finish(answer) for one in sums])


def _blocks(
    problem: Problem, answer: Attention, block_scores: int | None, *, backward: bool
) -> "Iterator[tuple[Rows, _Parts]]":
    """Each block of rows, with what the bounds of all claims share. The results of the block are added to the answer.

    backward, block_scores: as in `evaluate`.
    """
    for rows in naive.row_blocks(problem, block_scores):
        slopes = rows.slopes() if backward else None
        naive.add_rows(answer, rows, slopes)
        yield rows, _Parts(rows, slopes)


def casts(problem: Problem, arithmetic: Arithmetic, *, backward: bool = True) -> list[Attention]:
    """The errors that correct roundings to the dtype of the inputs make, for each way to round that a claim allows.

    `_Casts` lists the ways. A claim that keeps its weights in float32 casts only the output, and a kernel may compute
    delta from that output. The errors have one sign where weights repeat (ties, scores near 0) and where all keys of a
    row share one error. A correct kernel then has a bias of the same size. The list is empty for float32. backward: as
    in `evaluate`.
    """
    if problem.query.dtype == torch.float32 or arithmetic.products == "e4m3":
        return []
    found = _Casts(problem)
    for rows in naive.row_blocks(problem):
        found.add(rows, rows.slopes() if backward else None)
    return found.answers() if arithmetic.weights == "input" else found.answers()[-1:]


def largest_score(problem: Problem) -> float:
    """An upper bound of every |score|, and of every sum of the absolute values of its terms (Cauchy-Schwarz).

    It is NaN or inf if the inputs are not finite.
    """
    longest = [
        torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float64).amax() for tensor in (problem.query, problem.key)
    ]
    return abs(problem.scale) * float(longest[0] * longest[1])


# Bounds are of first order if at most this share of the weight of a row may move. Neither a maximum nor the hull of the
# values then limits them.
FEW = 0.1


def share(problem: Problem, claim: Claim, of: Claim) -> float | None:
    """A factor t such that the bound of `claim` is at most t times the bound of `of`, element by element.

    Returns None if no t below 2^-20 is known. The factor spares the float64 oracle the evaluation of its own bound. The
    units of that oracle are 2^-29 of those of float32.

    Derivation: Let every unit of `claim` be at most t times the same unit of `of`. Where no limit cuts a bound off, the
    bound is a sum of two kinds of terms. The first kind is a product of units, of expm1 and of -log1p(-x). Each of
    these factors is convex and 0 at 0, so f(t x) <= t f(x). The second kind is a square root of two factors, each at
    most t times as large. Each term, and thus the bound, is therefore at most t times as large.
    """
    if "e4m3" in (claim.arithmetic.products, of.arithmetic.products):
        return None  # such a bound is evaluated on other inputs
    small, large = units_of(problem, claim), units_of(problem, of)
    if not _largest_error(problem, large, largest_score(problem)) < FEW or (small.by_lse and not large.by_lse):
        return None
    lengths = (problem.query.shape[3], problem.key.shape[2], problem.query.shape[2] * problem.groups)
    pairs = [(small.gamma(length), large.gamma(length)) for length in lengths]
    pairs += [(small.added(length), large.added(length)) for length in lengths]
    pairs += [(small.added(small.row_sum), large.added(large.row_sum)), (small.rescaling, large.rescaling)]
    pairs += [
        (getattr(small, unit), getattr(large, unit))
        for unit in ("u_a", "u_p", "u_s", "u_o", "u_l", "u_n", "product", "operand", "eps_e", "eta", "lost", "tiny")
    ]
    pairs += [(small.sixteen_bit_steps * small.u_o, large.sixteen_bit_steps * large.u_o)]
    pairs += [((1 + small.sixteen_bit_steps) * small.tiny, (1 + large.sixteen_bit_steps) * large.tiny)]
    largest = max((less / more if more else math.inf for less, more in pairs if less), default=0.0)
    return largest if largest < 2.0**-20 else None


class _Casts:
    """The errors of seven kernels that round correctly, and with dropout of four more.

    1. P and dS are cast, with normalised weights.
    2. P and dS are cast, with unnormalised weights.
    3. As 1, and delta is computed from the rounded output.
    4. As 2, and delta is computed from the rounded output.
    5. As 1, and dS is computed from the cast P. PyTorch's memory-efficient attention reads P back so.
    6. As 5, and delta is computed from the rounded output.
    7. Only delta is computed from the rounded output, without any other cast.
    With dropout, 1 to 4 also for a kernel that casts the weights before it multiplies by 1 / (1 - p).

    A kernel that reads its output back computes delta with the error e_i = sum_d dO_id (stored O_id - O_id). The stored
    output has the error of the cast and one more rounding. The error of dS_ij is then -P_ij e_i, with one e_i for all
    keys of the row. The error of dK_j is -tau sum_i P_ij e_i q_i, which is nearly the same for all j. As a result,
    blocks of keys are not independent, and their standard error cannot show this. For example, with dim 1 and 17 keys
    in bfloat16, a correct kernel had a bias of 3.4 ulps of dK, which is six standard errors. Another way to cast has a
    bias of 9 there. For this reason, the bias of tensors with so few columns is no longer judged at all.

    All errors are linear in a few products. They contain the casts of P (two or four ways), the cast of dS, that of P
    times dP - delta, and P itself times the e_i of each way.
    """

    def __init__(self, problem: Problem) -> None:
        self.dtype = problem.query.dtype
        self.nothing = naive.empty_answer(problem)
        out, dim = self.nothing.out, problem.key.shape[3]
        self.ways = 4 if problem.dropout.p else 2  # normalised and unnormalised weights; both without 1 / (1 - p)
        self.out = [torch.zeros_like(out) for _ in range(self.ways)]
        self.dv = [naive.zeros_of_keys(problem, dim) for _ in range(self.ways)]
        self.dq, self.dk = torch.zeros_like(out), naive.zeros_of_keys(problem, dim)  # the cast of dS
        self.dq_by_cast, self.dk_by_cast = torch.zeros_like(out), naive.zeros_of_keys(problem, dim)  # dS from cast P
        self.dq_by_delta = [torch.zeros_like(out) for _ in range(self.ways + 1)]  # the last one is of no cast
        self.dk_by_delta = naive.zeros_of_keys(problem, (self.ways + 1) * dim)

    def add(self, rows: Rows, slopes: Slopes | None) -> None:
        """Adds the contribution of one block of rows."""

        def off(weights: Tensor) -> Tensor:
            """The error of the cast."""
            return weights.to(self.dtype).to(torch.float64).sub_(weights)

        total = torch.exp(rows.lse - rows.maximum)  # l: the weights relative to the row maximum are P l
        dropped = rows.dropped_weights
        errors = [off(dropped), off(dropped * total).div_(total.clamp(min=1.0))]
        if rows.gain is not None:
            before = [off(rows.weights), off(rows.weights * total).div_(total.clamp(min=1.0))]
            errors += [error.mul_(rows.gain) for error in before]
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
        by_cast = off(rows.weights).mul_(slopes.slope)
        rows.write(self.dq_by_cast, rows.scale * (by_cast @ rows.key))
        rows.add(self.dk_by_cast, by_cast, rows.query, rows.scale)
        for by_delta, delta in zip(self.dq_by_delta, deltas, strict=True):
            rows.write(by_delta, delta * mean_key)
        moved = torch.cat([delta * rows.query for delta in deltas], dim=-1)
        rows.add(self.dk_by_delta, rows.weights, moved, rows.scale)

    def answers(self) -> list[Attention]:
        """The errors of the kernels. The last one is of the kernel without any other cast."""
        none, dk_by_delta = self.nothing, self.dk_by_delta.chunk(self.ways + 1, dim=-1)
        cast = [Attention(out, none.lse, self.dq, self.dk, dv) for out, dv in zip(self.out, self.dv, strict=True)]
        read = [
            Attention(each.out, none.lse, self.dq - dq, self.dk - dk, each.dv)
            for each, dq, dk in zip(cast, self.dq_by_delta, dk_by_delta, strict=False)
        ]
        from_cast = [
            replace(each, dq=each.dq + self.dq_by_cast, dk=each.dk + self.dk_by_cast) for each in (cast[0], read[0])
        ]
        by_delta = Attention(none.out, none.lse, -self.dq_by_delta[-1], -dk_by_delta[-1], none.dv)
        return [*cast, *read, *from_cast, by_delta]


class _Parts:
    """The intermediate results of a block of rows that the bounds of all claims share."""

    def __init__(self, rows: Rows, slopes: Slopes | None) -> None:
        self.scale = rows.scale
        self.query_abs, self.key_abs, self.value_abs = rows.query.abs(), rows.key.abs(), rows.value.abs()
        self.score_mass = (self.query_abs @ self.key_abs.mT).mul_(abs(rows.scale))  # |tau| |Q||K|^T
        # 2 (m - S) + 3 |S|; -inf at hidden keys
        self.roundings = rows.scores.abs().mul_(3.0).sub_(rows.scores, alpha=2.0).add_(2.0 * rows.maximum)
        self.hidden = None if rows.visible is None else ~rows.visible
        if self.hidden is not None:
            self.roundings.masked_fill_(self.hidden, -math.inf)
        self.dropped = rows.dropped_weights  # P', the weights after dropout
        self.weighted_abs = self.dropped @ self.value_abs  # P'|V|
        # |V|, V^2 and V side by side, so that one product with P o theta serves all three
        self.values = torch.cat([self.value_abs, rows.value.square(), rows.value], dim=-1)
        # colsum |V| over the visible keys
        self.visible_abs = (
            self.value_abs.sum(dim=1, keepdim=True)
            if rows.visible is None
            else rows.visible.to(torch.float64) @ self.value_abs
        )
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
        self.one_and_slope = self.slope + 1.0  # 1 + |dP - delta| at visible keys, else 0
        if self.hidden is not None:
            self.one_and_slope.masked_fill_(self.hidden, 0.0)

    def log_error(self, u: Units, dim: int) -> Float[Tensor, "kv_heads rows keys"]:
        """theta, the relative error of an unnormalised weight; -inf at hidden keys.

        It is the sum of the errors of the score, of the subtraction of the maximum and of the exponential.
        """
        known = (u.u_a, u.eps_e)
        if known not in self._errors:
            self._errors[known] = (self.roundings * u.u_a).add_(u.eps_e)
        error = torch.add(self._errors[known], self.score_mass, alpha=u.gamma(dim) + u.product)
        if u.operand:
            error.add_(_sums_of_both(self.query_abs, self.key_abs), alpha=u.operand * abs(self.scale))
        if u.product_tiny:
            error.add_(u.product_tiny * abs(self.scale))
        return error


def _small_expm1(x: Tensor) -> Tensor:
    """An upper bound of exp(x) - 1 for 0 <= x < 1, and 0 at -inf: x + x^2 / 2 + x^3 / 4. Overwrites x.

    The rest of the series after x^2 / 2 is at most (e - 5/2) x^3. For small x this is much faster than expm1.
    """
    x.clamp_(min=0.0)
    return x.addcmul_(x, (x * 0.25).add_(0.5).mul_(x))


def _moved(rows: Rows, log_error: Tensor) -> Tensor:
    """P (exp(log_error) - 1): the largest amount by which each weight may be too large.

    The result also covers an error so large that a weight of 0 may not be 0 in a kernel.
    """
    log_weight = rows.scores - rows.finite_lse
    small = rows.weights * torch.expm1(log_error.clamp(max=1.0))
    large = torch.exp((log_weight + log_error).clamp(max=_LARGEST_EXPONENT)) - rows.weights
    moved = torch.where(log_error < 1.0, small, large)
    return moved if rows.visible is None else moved.masked_fill_(~rows.visible, 0.0)


def _sums_of_both(rows: Tensor, columns: Tensor) -> Float[Tensor, "kv_heads rows keys"]:
    """The sum of a row of `rows` plus the sum of a row of `columns`, for each pair.

    Times the absolute error of an operand, it is the error of an inner product.
    """
    return rows.sum(dim=-1, keepdim=True) + columns.sum(dim=-1)[:, None]


def _row_sums(one: Tensor, other: Tensor) -> Float[Tensor, "kv_heads rows 1"]:
    """The sum over the keys of one o other. On a CPU, the code does not store the matrix of these products."""
    return (one * other).sum(dim=-1, keepdim=True) if one.is_cuda else torch.linalg.vecdot(one, other)[..., None]


class _Sums:
    """Accumulates the bound of one claim: each block of rows writes its own elements and adds to those of the keys."""

    def __init__(self, problem: Problem, units: Units, largest: float) -> None:
        self.problem = problem
        self.units = units
        self.bound = naive.empty_answer(problem)
        self.is_small = _largest_error(problem, units, largest) < 1.0

    def add(self, rows: Rows, parts: _Parts) -> None:
        """Adds the contribution of one block of rows."""
        u = self.units
        log_error = parts.log_error(u, rows.query.shape[-1])
        furthest = log_error.amax(dim=-1, keepdim=True).clamp_(min=0.0)
        # P o theta, the largest amount by which each weight may move; 0 at hidden keys
        moved = _small_expm1(log_error).mul_(rows.weights) if self.is_small else _moved(rows, log_error)
        total = moved.sum(dim=-1, keepdim=True)
        out = self._out(rows, parts, moved, total)
        lse = torch.where(total < 1.0, torch.minimum(-torch.log1p(-total.clamp(max=1.0)), furthest), furthest)
        roundings = 2.0 if u.by_lse else 1.0  # by_lse: the LSE of a part and the LSE of the whole
        lse = (
            lse
            + u.added(u.row_sum)
            + u.rescaling
            + roundings * u.u_a * (2.0 * parts.lse_abs + 4.0)
            + u.u_l * parts.lse_abs
        )
        # In a row that sees no key, out is exactly 0 and lse is exactly -inf.
        rows.write(self.bound.out, rows.if_sees(out))
        rows.write(self.bound.lse, rows.if_sees(lse))
        if not parts.backward:
            return
        # --- backward: a kernel recomputes the weights as exp(S - L), with the error P (exp(log_error + lse) - 1)
        if self.is_small:
            back = torch.expm1(lse)
            moved = moved.mul_(1.0 + back).addcmul_(rows.weights, back)
        else:
            moved = _moved(rows, parts.log_error(u, rows.query.shape[-1]) + lse)
        self._backward(rows, parts, moved, out)

    def _out(self, rows: Rows, parts: _Parts, moved: Tensor, total: Tensor) -> Float[Tensor, "kv_heads rows dim"]:
        """The bound of out, without the factor SECOND_ORDER.

        Weights with the relative errors theta move a weighted mean by at most sum_j P_j theta_j |V_j - O|. The code
        bounds this sum in two ways (triangle inequality, Cauchy-Schwarz) and takes the smaller one; with dropout, it
        uses only the first. The weighted mean never leaves the hull of the values.
        """
        u = self.units
        if rows.gain is None:
            by_abs, by_square, by_value = (moved @ parts.values).chunk(3, dim=-1)
            spread = (by_square - 2.0 * rows.out * by_value + rows.out.square() * total).clamp_(min=0.0)
            apart = torch.minimum(by_abs + parts.out_abs * total, torch.sqrt(total * spread))
        else:
            by_abs = (moved * rows.gain) @ parts.value_abs
            apart = by_abs + parts.out_abs * total
        hull = parts.out_abs + rows.largest_gain * rows.value_max
        apart = self._over_rest(apart, total, hull)
        mass, cast = parts.weighted_abs, u.u_p
        underflow = u.lost * torch.exp(rows.maximum - rows.finite_lse)
        if u.is_coarse:  # the weights that are cast and summed are those that have moved
            largest = rows.largest_gain * rows.value_max
            mass = self._over_rest(mass + by_abs, total, largest)
            cast *= 1.0 + u.gamma(rows.all_keys)
            underflow = torch.where(total < 1.0, underflow / (1.0 - total), u.lost)
        return (
            apart
            + (cast + u.product + u.gamma(rows.all_keys) + u.rescaling + 2.0 * u.u_a + u.of_lse(parts.lse_abs)) * mass
            + underflow * rows.largest_gain * parts.visible_abs
            + (u.added(u.row_sum) + u.rescaling + 3.0 * u.u_a + u.u_o) * parts.out_abs
            + u.eta * rows.largest_gain * parts.visible_abs
            # A kernel may round the product of each tile before it divides by the sum and by 1 - p.
            + ((u.operand + u.product_tiny * u.tiles) * rows.largest_gain + u.tiny)
        )

    def _over_rest(self, of_rows: Tensor, total: Tensor, limit: Tensor) -> Tensor:
        """of_rows / (1 - total), at most the limit. Where weights move by less than a half, total is below 1."""
        if self.is_small:
            return torch.minimum(of_rows / (1.0 - total), limit)
        return torch.where(total < 1.0, torch.minimum(of_rows / (1.0 - total), limit), limit)

    def _backward(self, rows: Rows, parts: _Parts, moved: Tensor, out: Tensor) -> None:
        """Adds the contribution of one block of rows to the bounds of dq, dk and dv.

        moved: the largest amount by which each recomputed weight may be too large. The method overwrites it.
        out: the bound of out for these rows.
        """
        u, weights = self.units, rows.weights
        # columns: the number of rows that are summed into one element of dK or dV
        dim, columns = rows.query.shape[-1], self.problem.query.shape[2] * self.problem.groups
        out_mass = (parts.dout_abs * parts.out_abs).sum(dim=-1, keepdim=True)
        from_output = (parts.dout_abs * out).sum(dim=-1, keepdim=True) + u.added(dim) * out_mass
        dweights_error = u.gamma(dim) + u.product + 2.0 * u.u_a  # in units of |dO||V|^T
        from_weights = (
            (1.0 + u.added(rows.all_keys)) * _row_sums(moved, parts.dweights_abs)
            + u.added(rows.all_keys) * _row_sums(weights, parts.dweights_abs)
            + dweights_error
            * (_row_sums(moved, parts.dweights_mass) + (parts.dout_abs * parts.weighted_abs).sum(dim=-1, keepdim=True))
        )
        # A kernel computes delta from its output or from sum_j P_j dP_j. No claim says which, so take the larger error.
        delta = torch.maximum(from_output, from_weights)
        # E is the error of dS, with the error of the sum over keys. A kernel may multiply dS by a scale below 1 before
        # the cast. The scale then does not reduce the underflow of the cast.
        scaled_before = max(1.0, 1.0 / abs(rows.scale)) if rows.scale else 1.0
        in_sixteen_bit = u.sixteen_bit_steps * u.u_o
        over_keys = u.gamma(rows.all_keys) + u.product + in_sixteen_bit
        over_queries = u.gamma(columns) + u.product + in_sixteen_bit * self.problem.groups
        dscores = torch.add(delta, parts.dweights_mass, alpha=dweights_error)
        if u.operand:
            both = _sums_of_both(parts.dout_abs, parts.value_abs)
            dscores.add_(both, alpha=2.0 * u.operand * rows.largest_gain)  # dP, and delta as a mean of dP
        if u.product_tiny:
            dscores.add_(2.0 * u.product_tiny * rows.largest_gain)  # the same
        dscores.mul_(weights + moved)
        dscores.addcmul_(moved, parts.slope)
        dscores.add_(parts.dscores_abs, alpha=3.0 * u.u_a + u.u_p + u.u_s + over_keys)
        dscores.add_(parts.one_and_slope, alpha=u.eta * scaled_before)
        dq = (dscores @ parts.key_abs).mul_(abs(rows.scale))
        if u.operand:
            dq += u.operand * abs(rows.scale) * parts.dscores_abs.sum(dim=-1, keepdim=True)
        dscores.add_(parts.dscores_abs, alpha=over_queries - over_keys)
        dropped = moved if rows.gain is None else moved.mul_(rows.gain)
        dropped.add_(
            parts.dropped,
            alpha=u.u_p + u.product + 2.0 * u.u_a + u.gamma(columns) + in_sixteen_bit * self.problem.groups,
        )
        dropped.add_(u.eta * rows.largest_gain)
        if parts.hidden is not None:
            dropped.masked_fill_(parts.hidden, 0.0)
        rows.write(self.bound.dq, rows.if_sees(dq))
        rows.add(self.bound.dk, dscores, parts.query_abs, abs(rows.scale))
        rows.add(self.bound.dv, dropped, parts.dout_abs)
        if u.operand:  # the underflow of Q and dO; that of dS and P is in eta
            everywhere = torch.full_like(parts.query_abs, u.operand)
            rows.add(self.bound.dk, parts.dscores_abs, everywhere, abs(rows.scale))
            rows.add(self.bound.dv, parts.dropped, everywhere)

    def finish(self, answer: Attention) -> Attention:
        """Computes the final bound: adds the last roundings and underflows, and applies the factor SECOND_ORDER."""
        u, bound, groups = self.units, self.bound, self.problem.groups
        seen = (answer.lse != -math.inf)[..., None]
        # The products of the tiles that are added to one element. The scale, or 1/(1-p), may come after the rounding.
        scaled, gain = max(1.0, abs(self.problem.scale)), 1.0 / (1.0 - self.problem.dropout.p)
        over_keys, over_queries = u.product_tiny * u.tiles, u.product_tiny * u.query_tiles * groups
        of_dq = (1 + u.sixteen_bit_steps) * u.tiny + over_keys * scaled
        of_keys = (1 + u.sixteen_bit_steps * groups) * u.tiny
        of_size = u.u_o + 2.0 * u.u_a
        # In place, because these tensors are large and needed no more.
        last_of_dq = answer.dq.abs().mul_(of_size).add_(of_dq)
        bound.dq.add_(last_of_dq if bool(seen.all()) else torch.where(seen, last_of_dq, 0.0))
        bound.dk.add_(answer.dk.abs().mul_(of_size)).add_(of_keys).add_(over_queries * scaled)
        bound.dv.add_(answer.dv.abs().mul_(u.u_o)).add_(of_keys).add_(over_queries * gain)
        for tensor in (bound.out, bound.lse, bound.dq, bound.dk, bound.dv):
            tensor.mul_(SECOND_ORDER)
        return bound


def _largest_error(problem: Problem, u: Units, largest: float) -> float:
    """An upper bound of the relative error of every weight, including the error of the LSE.

    largest: an upper bound of every |score|. If it is not finite, the result is NaN or inf.
    """
    dim, lse = problem.query.shape[3], largest + math.log(problem.key.shape[2])
    weight = (u.gamma(dim) + u.product + 7.0 * u.u_a) * largest + u.eps_e
    if u.operand:
        sums = dim * float(problem.query.abs().amax().to(torch.float64) + problem.key.abs().amax().to(torch.float64))
        weight += u.operand * abs(problem.scale) * sums
    weight += u.product_tiny * abs(problem.scale)
    return 2.0 * weight + u.gamma(u.row_sum) + u.rescaling + 2.0 * u.u_a * (2.0 * lse + 4.0) + u.u_l * lse


def worst_unit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """u_o |tensor|: an upper bound of half a unit in the last place of each element."""
    return _ROUNDOFF[dtype] * tensor.abs()


def before_rounding(problem: Problem, arithmetic: Arithmetic) -> Attention:
    """The bound of float32 results before they are rounded to 16 bit, for problems in which no cast of a weight errs.

    The weights of such a problem are 0 and 1, or they are all the same power of two. If float32 has such a weight wrong
    in its last places, the cast still rounds it to the correct power of two.
    """
    return bounds(problem, Claim(replace(arithmetic, weights="float32", gradients="float32"), dtype=torch.float32))


def rounds_to(exact: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
    """Where every number within `before` of the exact result rounds to the exact result.

    The exact result must be a number of this dtype, and no other number of the dtype may be as near. Below a power of
    two, the next number is half a unit away. A number closer than a quarter of a unit then rounds up to the power of
    two.
    """
    return (exact.to(dtype).to(torch.float64) == exact) & (before < half_unit(exact, dtype) / 2.0)


def half_unit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of each element, in this dtype.

    It is the largest error of rounding a number with the exponent of the element to this dtype.
    """
    exponent = torch.floor(torch.log2(tensor.abs().clamp(min=torch.finfo(dtype).smallest_normal)))
    return _ROUNDOFF[dtype] * torch.exp2(exponent)
