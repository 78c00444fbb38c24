"""Tests the claim of e4m3 products and its bound, by an emulated kernel and by kernels with a fault.

The emulation rounds query, key and value to e4m3 in blocks, adds as Hopper's tensor cores do, and casts the weights to
e4m3, tile by tile. It must pass. Kernels with a fault must fail.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flashproof.calling import TensorName
from flashproof.impls.fields import UnreadableClaim
from flashproof.impls.spec import Arithmetic
from flashproof.judging import Judged, exact_of, judge_tensor
from flashproof.oracles import bounds, e4m3, naive
from flashproof.oracles.bounds import Claim
from flashproof.oracles.problem import Problem
from flashproof.subject import FORWARD
from flashproof.tests.suite.oracles import tensor_core
from flashproof.tests.suite.oracles.features import problem_of

TILE = 128  # keys of a tile, and rows that share a scale
CLAIM = Arithmetic(
    accumulate="tensor_core", tensor_core_terms=TILE, products="e4m3", scale_rows=TILE, weights="e4m3", key_tile=TILE
)


@dataclass(frozen=True)
class Kernel:
    """An emulated kernel. The fields name its faults; by default it has none."""

    keys_of_the_next_block: bool = False  # the scale of a block of keys is that of the next one
    no_value_scale: bool = False  # values are multiplied by the scale of the first block
    weights: torch.dtype = torch.float8_e4m3fn  # the dtype of the weights before the second product
    truncates: bool = False  # the weights are truncated

    def __call__(self, problem: Problem) -> dict[TensorName, Tensor]:
        """Computes the output, in the dtype of the problem, and the LSE."""
        out, lse = torch.zeros_like(problem.query), torch.zeros(problem.query.shape[:3])
        for batch, head in naive.heads_of(problem):
            out[batch, head], lse[batch, head] = self._head(problem, batch, head)
        return {"out": out, "lse": lse}

    def _head(self, problem: Problem, batch: int, head: int) -> tuple[Tensor, Tensor]:
        places = ((problem.query, head), (problem.key, head // problem.groups), (problem.value, head // problem.groups))
        units, scales = [], []
        for tensor, index in places:
            one = tensor[batch : batch + 1, index : index + 1]
            scale = torch.exp2(e4m3.exponents(one, TILE))[0, 0, :, None]
            units.append((e4m3.rounded(one, TILE)[0, 0] / scale).float())
            scales.append(scale.float())
        (query, key, value), (of_query, of_key, of_value) = units, scales
        if self.keys_of_the_next_block:
            of_key = of_key.roll(-TILE, dims=0)
        visible = problem.mask.visible(batch, head, torch.arange(len(query)))
        maximum = torch.full((len(query), 1), -math.inf)
        total, out = torch.zeros(len(query), 1), torch.zeros(query.shape)
        for first in range(0, len(key), TILE):
            some = slice(first, first + TILE)
            scores = tensor_core.product_of_e4m3(query, key[some].T) * (of_query * of_key[some].T) * problem.scale
            scores = scores.masked_fill(~visible[:, some], -math.inf)
            larger = torch.maximum(maximum, scores.amax(dim=1, keepdim=True))
            base = larger.masked_fill(larger == -math.inf, 0.0)
            rescale, weights = torch.exp(maximum - base), torch.exp(scores - base)
            maximum, total = larger, total * rescale + weights.sum(dim=1, keepdim=True)
            tile = tensor_core.product_of_e4m3(self._cast(weights), value[some])
            out = out * rescale + tile * of_value[0 if self.no_value_scale else first] / 256.0
        empty = maximum == -math.inf
        lse = (maximum + total.log()).masked_fill(empty, -math.inf)
        return (out / total.masked_fill(empty, 1.0)).to(problem.query.dtype), lse[:, 0]

    def _cast(self, weights: Tensor) -> Tensor:
        cast = (256.0 * weights).to(self.weights).float()
        if self.truncates:
            one_less = (cast.view(torch.int32) - (1 << 20)).view(torch.float32)
            return torch.where(cast > 256.0 * weights, one_less.clamp(min=0.0), cast)
        return cast


def judged(problem: Problem, kernel: Kernel) -> dict[TensorName, Judged]:
    answer, truth = kernel(problem), exact_of(problem, CLAIM, backward=False)
    return {name: judge_tensor(answer[name], name, truth) for name in FORWARD}


LINES = [
    "b1 h1 q100 k300 d64 float16",
    "b1 h2/1 q140 k140 d128 causal bfloat16",
    "b1 h1 q150 k40 d64 causal-br float16",  # the first rows see no key
    "b1 h1 q20 k5 d16 float16",
    "b1 h1 q20 k1 d64 bfloat16",
    "b1 h1 q70 k200 d128 outliers float16",
    "b1 h1 q70 k200 d64 v.positive bfloat16",
    "b1 h1 q60 k150 d64 x8 float16",
    "b1 h1 q60 k150 d64 spike x30 float16",
    "b1 h1 q60 k150 d40 shift-100 bfloat16",
    "b1 h1 q60 k150 d40 ties scale-0.3 float16",
    "b1 h1 q60 k150 d40 uniform v.small float16",
    "b1 h1 q60 k150 d40 scale0 bfloat16",
]


@pytest.mark.parametrize("line", LINES)
def test_the_kernel_is_inside_its_bound(line: str) -> None:
    verdicts = judged(problem_of(line), Kernel())
    assert all(verdict.passed for verdict in verdicts.values()), verdicts


def test_the_bound_is_near_the_error() -> None:
    """The bound is less than ten times the error, since it computes the effect of the rounding of the inputs."""
    for line in LINES[:4]:
        assert 10.0 * judged(problem_of(line), Kernel())["out"].rho.value > 1.0, line


def with_blocks(line: str) -> Problem:
    """The problem of a line, with keys and values that are 8 times as large from the second block on."""
    problem = problem_of(line)
    problem.key[:, :, TILE:] *= 8.0
    problem.value[:, :, TILE:] *= 8.0
    return problem


FAULTS = {
    "keys of the next block": Kernel(keys_of_the_next_block=True),
    "no scale of the values": Kernel(no_value_scale=True),
    "weights in e5m2": Kernel(weights=torch.float8_e5m2),
    "weights truncated": Kernel(truncates=True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_outside_the_bound(fault: str) -> None:
    """The first problem shows faults of scales. In the second one, only the first of three keys has a value, so the
    output shows how its weight is rounded.
    """
    problems = with_blocks("b1 h1 q100 k200 d64 float16"), problem_of("b1 h1 q100 k3 d16 float16")
    problems[1].value[:, :, 1:] = 0.0
    assert all(judged(problem, Kernel())["out"].passed for problem in problems)
    assert any(not judged(problem, FAULTS[fault])["out"].passed for problem in problems)


def test_other_scales_are_outside_the_bound_where_they_are_worse() -> None:
    """One scale for all keys and values loses small numbers. Here, these are the numbers of the first block."""
    problem = problem_of("b1 h1 q100 k256 d64 causal bfloat16")
    problem.key[:, :, TILE:] *= 2.0**12
    problem.value[:, :, TILE:] *= 2.0**12
    key, value = (e4m3.rounded(tensor, 256).bfloat16() for tensor in (problem.key, problem.value))
    one_scale = replace(problem, key=key, value=value)
    assert judged(problem, Kernel())["out"].passed
    answer, truth = Kernel()(one_scale), exact_of(problem, CLAIM, backward=False)
    assert not judge_tensor(answer["out"], "out", truth).passed


def test_a_kernel_without_these_roundings_passes() -> None:
    """The bound limits errors. A kernel that makes fewer errors is inside the bound."""
    for line in LINES:
        problem = problem_of(line)
        truth, exact = exact_of(problem, CLAIM, backward=False), naive.attention(problem)
        assert judge_tensor(exact.out.to(problem.query.dtype), "out", truth).passed, line
        assert judge_tensor(exact.lse.float(), "lse", truth).passed, line


def test_gradients_are_not_claimed() -> None:
    problem = problem_of("b1 h1 q20 k20 d16 float16")
    bound = bounds.bounds(problem, Claim(CLAIM))
    assert not any(getattr(bound, name).any() for name in ("dq", "dk", "dv"))


def test_weights_in_e4m3_need_products_in_e4m3() -> None:
    with pytest.raises(UnreadableClaim, match=r"^Arithmetic\.weights: 'e4m3' will not do; give 'input' or 'float32'"):
        Arithmetic(weights="e4m3")


# ------------------------------------------------------------------------------------------------------- inputs in e4m3


def test_a_block_has_the_smallest_scale_that_holds_it() -> None:
    """448 is the largest number of e4m3. A zero or tiny block has a scale whose inverse is a float32."""
    largest = torch.tensor([448.0, 449.0, 224.0, 225.0, 1.0, 0.0, 2.0**-133])
    x = torch.zeros(1, 1, 2 * len(largest), 3)
    x[0, 0, ::2, 1] = -largest
    found = e4m3.exponents(x, 2)[0, 0]
    assert found[::2].tolist() == [0.0, 1.0, -1.0, 0.0, -8.0, -9.0, -126.0]
    assert torch.equal(found[::2], found[1::2])


def test_rows_after_the_last_whole_block_have_a_scale_of_their_own() -> None:
    x = torch.ones(1, 1, 5, 2)
    x[0, 0, 4] = 64.0
    assert e4m3.exponents(x, 4)[0, 0].tolist() == [-8.0, -8.0, -8.0, -8.0, -2.0]


def test_numbers_are_rounded_to_four_bits_and_below_that_to_a_multiple() -> None:
    """The scale of a block with 448 is 1. Then the smallest normal number is 2^-6, and the smallest number 2^-9."""
    x = torch.tensor([448.0, 17.0, 19.0, 1.0625, 1.1875, 2.0**-6, 2.0**-10, 1.5 * 2.0**-9, 2.5 * 2.0**-9])
    expected = [448.0, 16.0, 20.0, 1.0, 1.25, 2.0**-6, 0.0, 2.0**-8, 2.0**-8]
    assert e4m3.rounded(x[None, None, :, None], len(x)).flatten().tolist() == expected


def test_a_step_of_e4m3_cuts_off_after_14_bits() -> None:
    """Each product is cut off 13 bits below the largest one, and the sum after 14 bits, both toward 0."""
    ones, total = torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for sign in (1.0, -1.0):
        found = [
            tensor_core.step(sign * ones, term * ones.T, sign * total, tensor_core.OF_E4M3).item()
            for term in (2.0**-13, 2.0**-14)
        ]
        assert found == [sign * (1.0 + 2.0**-11), sign]
