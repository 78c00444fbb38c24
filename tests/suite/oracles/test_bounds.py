"""Tests the bound of a claim.

One arithmetic does what is claimed and must pass. Another is slightly less accurate and must not pass.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flashproof import judging
from flashproof.impls.peers import sdpa
from flashproof.impls.spec import Arithmetic
from flashproof.oracles import ball, bounds, naive, verdict
from flashproof.oracles.bounds import Claim
from flashproof.oracles.problem import Problem
from flashproof.tests.suite.oracles.features import TENSORS, problem_of

LINES = [
    "b1 h2 q100 k140 d64 causal-br",
    "b1 h4/2 q60 k60 d32 causal dropout0.2",
    "b1 h1 q128 k128 d64 outliers",
    "b1 h1 q70 k70 d128 v.positive causal",
    "b1 h1 q80 k80 d16 spike x30",
    "b1 h1 q100 k100 d40 shift-100",
    "b1 h1 q100 k100 d40 ties scale-0.3",
    "b1 h1 q60 k60 d64 x16",
]


@dataclass(frozen=True)
class Roundings:
    """The roundings of an emulated kernel, in addition to those of its float32 sums."""

    operands: int = 24  # significant bits kept of query, key, value and dout before a product
    weights: torch.dtype = torch.float32  # dtype of P and dS before a product
    result: torch.dtype = torch.float32  # dtype of the results, except the LSE


def kept(tensor: Tensor, bits: int) -> Tensor:
    """Rounds a float32 to nearest, to this number of significant bits."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits)


def emulated(problem: Problem, rounding: Roundings) -> dict[str, Tensor]:
    """Computes textbook attention in float32 with these roundings, one head at a time."""
    groups = problem.groups
    shapes = problem.query.shape, problem.query.shape[:3], problem.query.shape, problem.key.shape, problem.key.shape
    answer = {name: torch.zeros(shape) for name, shape in zip(TENSORS, shapes, strict=True)}
    rows = torch.arange(problem.query.shape[2])
    for batch, head in naive.heads_of(problem):
        query, key, value, dout = (
            kept(tensor.float(), rounding.operands) for tensor in naive.head_tensors(problem, batch, head)
        )
        visible = problem.mask.visible(batch, head, rows)
        gain = problem.dropout.kept(batch, head, rows, len(key)).float() / (1.0 - problem.dropout.p)
        scores = (problem.scale * (query @ key.T)).masked_fill(~visible, -math.inf)
        maximum = scores.amax(dim=1, keepdim=True)
        maximum = torch.where(maximum.isfinite(), maximum, 0.0)  # where a row sees no key
        exponentials = torch.exp(scores - maximum)
        total = exponentials.sum(dim=1, keepdim=True)
        out = ((exponentials * gain).to(rounding.weights).float() @ value / total).nan_to_num()
        lse = (maximum + total.log()).squeeze(1)
        weights = torch.exp(scores - lse[:, None]).nan_to_num()
        delta = (dout * out).sum(dim=1, keepdim=True)
        dscores = (weights * (gain * (dout @ value.T) - delta)).to(rounding.weights).float()
        answer["out"][batch, head], answer["lse"][batch, head] = out, lse
        answer["dq"][batch, head] = problem.scale * (dscores @ key)
        answer["dk"][batch, head // groups] += problem.scale * (dscores.T @ query)
        answer["dv"][batch, head // groups] += (weights * gain).to(rounding.weights).float().T @ dout
    return {name: tensor if name == "lse" else tensor.to(rounding.result) for name, tensor in answer.items()}


def rhos(line: str, rounding: Roundings, arithmetic: Arithmetic) -> dict[str, float]:
    """Computes rho, the largest ratio of error to bound, of each tensor of an emulated kernel."""
    problem = problem_of(line)
    enclosure, bound = ball.attention(problem), bounds.bounds(problem, Claim(arithmetic))
    answer = emulated(problem, rounding)
    return {
        name: verdict.rho(
            answer[name], getattr(enclosure, name).mid, getattr(bound, name), getattr(enclosure, name).radius
        ).value
        for name in TENSORS
    }


@pytest.mark.parametrize("line", LINES)
def test_float32_is_inside_its_bound(line: str) -> None:
    assert max(rhos(line, Roundings(), Arithmetic()).values()) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("line", LINES)
def test_sixteen_bit_is_inside_its_bound(line: str, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert max(rhos(f"{line} {name}", Roundings(weights=dtype, result=dtype), Arithmetic()).values()) <= 1.0


@pytest.mark.parametrize("line", LINES)
def test_operands_of_eleven_bits_are_inside_the_bound_of_tf32_alone(line: str) -> None:
    tf32 = Roundings(operands=11)
    assert max(rhos(line, tf32, Arithmetic(products="tf32")).values()) <= 1.0
    assert max(rhos(line, tf32, Arithmetic(products="3xtf32")).values()) > 1.0
    assert max(rhos(line, tf32, Arithmetic()).values()) > 1.0


@pytest.mark.parametrize("line", LINES)
def test_weights_in_sixteen_bit_are_outside_the_bound_of_float32(line: str) -> None:
    assert max(rhos(line, Roundings(weights=torch.bfloat16), Arithmetic()).values()) > 1.0


@pytest.mark.parametrize("line", LINES)
def test_a_result_in_bfloat16_is_outside_the_bound_of_float16(line: str) -> None:
    assert (
        max(rhos(f"{line} float16", Roundings(weights=torch.float16, result=torch.bfloat16), Arithmetic()).values())
        > 1.0
    )


@pytest.mark.parametrize(
    "line", ["b1 h1 q31 k17 d16 bfloat16", "b1 h1 q40 k40 d16 float16", "b1 h1 q40 k40 d16 bfloat16 seed1"]
)
def test_a_delta_from_the_rounded_output_is_no_lean(line: str) -> None:
    """All keys of a row share the error of delta.

    A kernel that rounds nothing else is more accurate than its claim, so it must not be judged as biased.
    """
    problem = problem_of(line)
    dtype = problem.query.dtype
    evaluation = bounds.evaluate(problem, [bounds.without_casts(Claim(Arithmetic()))])
    wrong = naive.empty_answer(problem)
    for rows in naive.row_blocks(problem):
        delta = (rows.dout * rows.out.to(dtype).double()).sum(dim=-1, keepdim=True)
        rows.add(wrong.dk, rows.weights * (rows.slopes().dweights - delta), rows.query, rows.scale)
    casts = [cast.dk for cast in bounds.casts(problem, Arithmetic())]
    bias = verdict.bias(wrong.dk.to(dtype), evaluation.answer.dk, evaluation.bounds[0].dk, casts)
    assert bias is not None
    assert not bias.leans


@pytest.mark.parametrize("seed", [0, 1, 370])
def test_slopes_from_cast_weights_are_no_lean(seed: int) -> None:
    """PyTorch's memory-efficient attention computes dS from the cast P. Equal weights then have one error for all."""
    problem = problem_of(f"b1 h4 q15 k15 d64 bfloat16 uniform seed{seed}")
    dtype = problem.query.dtype
    evaluation = bounds.evaluate(problem, [bounds.without_casts(Claim(Arithmetic()))])
    got = torch.zeros_like(evaluation.answer.dq)
    for rows in naive.row_blocks(problem):
        dscores = (rows.weights.to(dtype).double() * rows.slopes().slope).to(dtype).double()
        rows.write(got, rows.scale * (dscores @ rows.key))
    casts = [cast.dq for cast in bounds.casts(problem, Arithmetic())]
    others = casts[:4] + casts[6:]
    bias, with_others = (
        verdict.bias(got.to(dtype), evaluation.answer.dq, evaluation.bounds[0].dq, allowed)
        for allowed in (casts, others)
    )
    assert bias is not None
    assert with_others is not None
    assert (bias.leans, with_others.leans) == (False, True)


def test_a_cast_may_move_most_results_across_a_middle() -> None:
    """All dV are near multiples of 1/16.2, which is nearly 4/64. The cast of equal weights has half of this bias before
    the last rounding, and all of it after it. So an allowance from before the rounding rejects a right kernel. A kernel
    whose dV are one more unit too large must fail.
    """
    problem = problem_of("b3 h2 q2049 k18 d33 bfloat16 causal nokeys scale0 dropout0.1 do.onehot seed159")
    truth = judging.exact_of(problem, Arithmetic(weights="input"))
    exact, cast = truth.answer.dv, max((each.dv for each in truth.casts()), key=lambda each: float(each.sum()))
    right = (exact + cast).to(torch.bfloat16)
    wrong = (exact + cast + 2.0 * bounds.half_unit(exact, torch.bfloat16)).to(torch.bfloat16)
    bias = verdict.bias(right, exact, truth.statistical().dv)
    assert bias is not None
    before_rounding = float(cast.sum() / bounds.worst_unit(exact, torch.bfloat16).sum())
    assert replace(bias, allowance=bias.allowance + before_rounding).leans
    assert judging.judge_tensor(right, "dv", truth).passed
    assert not judging.judge_tensor(wrong, "dv", truth).passed


def test_results_in_the_middle_of_two_numbers_are_no_lean() -> None:
    """Equal weights and subnormal values: many exact results lie in the middle. float32 may decide them in one
    direction. An error at every result is still a bias.
    """
    problem = problem_of("b1 h32 q16 k16 d248 float16 full uniform v.small seed0")
    evaluation = bounds.evaluate(problem, [bounds.without_casts(Claim(Arithmetic()))], backward=False)
    exact, bound = evaluation.answer.out, evaluation.bounds[0].out
    decided = (exact + bound * exact.sign()).to(torch.float16)
    truncated = torch.where(decided.abs() > exact.abs(), decided * 0.0, decided)
    biases = [verdict.bias(got, exact, bound) for got in (decided, truncated)]
    assert (decided != exact.to(torch.float16)).any()
    assert [bias is not None and bias.leans for bias in biases] == [False, True]


def test_products_of_tiles_underflow_under_autocast() -> None:
    """Each of two tiles may lose half of the smallest float16, before the division by 1 - p makes the loss larger."""
    problem = problem_of("b1 h1 q16 k234 d16 float16 sharp dropout0.6 v.small")
    half = 2.0**-25
    found = bounds.bounds(problem, Claim(Arithmetic(products="input", key_tile=128, query_tile=16)))
    assert bool((found.out >= 2 * half / 0.4 + half).all())
    assert bool((found.dv >= half / 0.4 + half).all())
    assert bool((found.dq >= 2 * half + half).all())


def test_a_bound_that_says_nothing_is_finite() -> None:
    """Scores of 10000 are rounded to 16 bits, so weights may be wrong by a factor of exp(400)."""
    problem = problem_of("b1 h1 q16 k16 d136 bfloat16 rising x12 shift10000 scale0.02 one-qkv")
    found = bounds.bounds(problem, Claim(Arithmetic(products="input")))
    assert all(bool(getattr(found, name).isfinite().all()) for name in ("out", "lse", "dq", "dk", "dv"))
    assert found.dq.max() > 1e38


# A tensor core sums tiles of 64 terms, and float32 additions add up these sums.
TILED = Arithmetic(accumulate="tensor_core", tensor_core_terms=64, key_tile=64, query_tile=64)
EIGHT_BIT = replace(TILED, products="e4m3", weights="e4m3")

LOOSER = {
    "tensor cores truncate": (Arithmetic(), Arithmetic(accumulate="tensor_core")),
    "float64 is finer": (Arithmetic(accumulate="float64"), Arithmetic()),
    "casts of the weights": (Arithmetic(weights="float32"), Arithmetic(weights="input")),
    "tensor cores that sum all terms": (TILED, replace(TILED, tensor_core_terms=None)),
    "more terms in a tensor core": (TILED, replace(TILED, tensor_core_terms=128)),
    "more sums of tensor cores": (TILED, replace(TILED, query_tile=16)),
    "six products": (TILED, replace(TILED, products="6xbf16")),
    "tensor cores that sum more e4m3 products": (EIGHT_BIT, replace(EIGHT_BIT, tensor_core_terms=128)),
    "weights in e4m3": (replace(EIGHT_BIT, weights="input"), EIGHT_BIT),
    "three products": (Arithmetic(), Arithmetic(products="3xtf32")),
    "one product": (Arithmetic(products="3xtf32"), Arithmetic(products="tf32")),
    "gradients in 16 bit": (Arithmetic(), Arithmetic(gradients="input")),
    "smaller query tiles for them": (
        Arithmetic(gradients="input", query_tile=64),
        Arithmetic(gradients="input", query_tile=32),
    ),
    "a worse exponential": (Arithmetic(exp_ulps=1.0), Arithmetic(exp_ulps=4.0)),
    "weights divided by an LSE": (Arithmetic(), Arithmetic(normaliser="lse")),
    "dS from cast weights": (Arithmetic(), Arithmetic(dscores_from="cast")),
    "tiles unknown": (Arithmetic(key_tile=64), Arithmetic()),
}


@pytest.mark.parametrize("claim", LOOSER)
def test_a_weaker_claim_has_a_larger_bound(claim: str) -> None:
    finer, looser = LOOSER[claim]
    problem = problem_of("b1 h2 q100 k140 d64 causal-br bfloat16")
    small, large = bounds.bounds(problem, Claim(finer)), bounds.bounds(problem, Claim(looser))
    assert all((getattr(small, name) <= getattr(large, name)).all() for name in TENSORS)
    assert any((getattr(small, name) < getattr(large, name)).any() for name in TENSORS)


@pytest.mark.parametrize("line", LINES)
def test_the_probabilistic_form_is_the_tighter_one_on_long_sums(line: str) -> None:
    problem = problem_of(line)
    probable, certain = (
        bounds.bounds(problem, Claim(Arithmetic(), "statistical")),
        bounds.bounds(problem, Claim(Arithmetic())),
    )
    assert (probable.dv.sum() / certain.dv.sum()).item() < 1.0
    assert (probable.dv > 0.0).all()


def test_a_kernel_that_computes_ds_from_cast_weights_needs_that_claim() -> None:
    """A search found this row: sdpa.efficient returned 1.4305e-06 for an element of dQ, where 1.4433e-06 is exact."""
    whole = problem_of("b16 h1 q1280 k23 d8 bfloat16 full padded x16 scale0.3 v.sink do.summed packed-kv seed61")
    query, dout = (tensor[13:14, :, 239:240] for tensor in (whole.query, whole.dout))
    problem = replace(whole, query=query, key=whole.key[13:14], value=whole.value[13:14], dout=dout)
    q, k, v, do = (tensor[0, 0].double() for tensor in (problem.query, problem.key, problem.value, problem.dout))
    weights = torch.softmax(problem.scale * (q @ k.T), dim=1).bfloat16().double()
    delta = (do * (weights @ v).bfloat16()).sum()
    ds = (problem.scale * weights * (do @ v.T - delta)).bfloat16().double()
    found, exact = (ds @ k).bfloat16(), naive.attention(problem).dq
    assert f"{found[0, 3].item():.4e}" == "1.4305e-06"
    default, cast = (
        verdict.rho(found[None, None], exact, bounds.bounds(problem, Claim(claim)).dq).value
        for claim in (Arithmetic(accumulate="tensor_core"), sdpa.arithmetic_of_efficient("bfloat16", "cuda"))
    )
    assert cast <= 1.0 < default


def test_a_row_that_sees_no_key_has_no_error() -> None:
    problem = problem_of("b1 h2 q20 k8 d16 causal-br")
    bound = bounds.bounds(problem, Claim(Arithmetic()))
    for name in ("out", "lse", "dq"):
        rows = getattr(bound, name)[:, :, :12]
        assert torch.equal(rows, torch.zeros_like(rows)), name
        assert (getattr(bound, name)[:, :, 12:] > 0.0).all(), name


def test_bounds_do_not_depend_on_the_blocks_of_rows() -> None:
    problem = problem_of("b1 h2 q60 k50 d16 causal dropout0.2")
    whole = bounds.evaluate(problem, [Claim(Arithmetic())]).bounds[0]
    blocked = bounds.evaluate(problem, [Claim(Arithmetic())], block_scores=500).bounds[0]
    own = bounds.bounds(problem, bounds.FLOAT64)  # the computation of a bound rounds in float64 too
    for name in TENSORS:
        assert ((getattr(whole, name) - getattr(blocked, name)).abs() <= getattr(own, name)).all(), name


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("line", ["b1 h2 q60 k50 d16 causal dropout0.2", "b2 h4/2 q20 k8 d16 causal-br x40 bfloat16"])
def test_a_claim_leaves_what_the_claims_share_unchanged(line: str, backward: bool) -> None:
    problem = problem_of(line)
    claims = [Claim(Arithmetic()), Claim(Arithmetic(normaliser="lse", key_tile=16, gradients="input")), bounds.FLOAT64]
    known = bounds.shared(problem, backward=backward)
    for claim in [*claims, *claims]:
        alone = bounds.evaluate(problem, [claim], backward=backward)
        after_others = bounds.evaluate(problem, [claim], backward=backward, known=known)
        for name in TENSORS:
            assert torch.equal(getattr(alone.answer, name), getattr(after_others.answer, name)), name
            assert torch.equal(getattr(alone.bounds[0], name), getattr(after_others.bounds[0], name)), name


@pytest.mark.parametrize("line", [*LINES, "b1 h1 q60 k60 d64 x16 bfloat16", "b2 h4/2 q50 k40 d16 causal float16"])
@pytest.mark.parametrize(
    "arithmetic", [Arithmetic(), Arithmetic(normaliser="lse", key_tile=16, gradients="input")], ids=str
)
def test_the_bound_of_float64_is_below_its_share_of_that_of_float32(line: str, arithmetic: Arithmetic) -> None:
    problem, float32 = problem_of(line), bounds.without_casts(Claim(arithmetic))
    share = bounds.share(problem, bounds.FLOAT64, float32)
    assert share is not None
    own, of = bounds.bounds(problem, bounds.FLOAT64), bounds.bounds(problem, float32)
    for name in TENSORS:
        assert (getattr(own, name) <= share * getattr(of, name)).all(), name


def test_no_share_is_known_where_a_bound_may_be_cut_off_or_is_no_smaller() -> None:
    problem, float32 = problem_of(LINES[0]), bounds.without_casts(Claim(Arithmetic()))
    assert bounds.share(problem_of("b1 h1 q50 k50 d16 shift2.5e5"), bounds.FLOAT64, float32) is None
    assert bounds.share(problem, bounds.FLOAT64, bounds.without_casts(Claim(Arithmetic(accumulate="float64")))) is None
    assert bounds.share(problem, bounds.FLOAT64, bounds.without_casts(Claim(Arithmetic(exp_ulps=0.0)))) is None


def test_every_bound_is_finite() -> None:
    for line in (
        *LINES,
        "b1 h1 q100 k100 d8 x1e7",
        "b1 h1 q50 k50 d16 shift2.5e5",
        "b1 h1 q30 k30 d8 x64 causal bfloat16",
    ):
        bound = bounds.bounds(problem_of(line), Claim(Arithmetic()))
        assert all(getattr(bound, name).isfinite().all() for name in TENSORS), line


def test_an_exponential_that_underflows_early_may_lose_as_much() -> None:
    """One key has the weight 2^-125.7, and a value so large that the output depends on this weight."""
    problem = problem_of("b1 h1 q20 k20 d8 uniform")
    problem.query[..., 0], problem.key[..., 0] = 1.0, -1000.0
    problem.key[0, 0, 0, 0], problem.key[0, 0, 1, 0] = 0.0, -125.7 * math.log(2.0) / problem.scale
    problem.value[:], problem.value[0, 0, 1] = 0.0, 2.0**100
    exact = naive.attention(problem).out
    assert (exact > bounds.bounds(problem, Claim(Arithmetic())).out).all()
    assert (exact < bounds.bounds(problem, Claim(Arithmetic(exp_smallest=2.0**-125.5))).out).all()


def test_a_masked_key_has_no_part_in_the_bound() -> None:
    problem = problem_of("b1 h1 q40 k60 d16 causal")  # no query sees the last 20 keys
    loud = replace(problem, key=problem.key.clone(), value=problem.value.clone())
    loud.key[:, :, 40:], loud.value[:, :, 40:] = 1e4, -1e4
    quiet_bound, loud_bound = bounds.bounds(problem, Claim(Arithmetic())), bounds.bounds(loud, Claim(Arithmetic()))
    for name in TENSORS:
        assert torch.equal(getattr(quiet_bound, name), getattr(loud_bound, name)), name


def test_sums_of_equal_terms_have_no_probabilistic_bound() -> None:
    """Sums of equal terms have errors that do not cancel.

    Each addition of the same number makes the same error until the sum reaches the next power of two.
    """
    equal, usual = (problem_of(f"b1 h1 q4192 k3 d8 scale0 {word}") for word in ("do.pooled", ""))
    claim = Arithmetic()
    assert not bounds.has_statistical_gate(equal, claim)
    assert bounds.has_statistical_gate(usual, claim)
    term = (equal.dout[0, 0, 0] / 3.0).float().numpy()  # the term that each query adds to dV of each key
    total = np.cumsum(np.tile(term, (4192, 1)), axis=0, dtype=np.float32)[-1]  # added one after the other
    error = (torch.from_numpy(total).double() - naive.attention(equal).dv[0, 0, 0]).abs()
    probabilistic = bounds.bounds(equal, Claim(claim, "statistical")).dv[0, 0, 0]
    assert (error > probabilistic).any()
    assert (error <= bounds.bounds(equal, Claim(claim)).dv[0, 0, 0]).all()
