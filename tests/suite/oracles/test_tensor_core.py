"""Tests the bound of six products of bfloat16 parts, which tensor cores sum with truncation, by an emulation.

The emulation is attention in float32, and `tensor_core` computes its five products. It must pass by the claim of this
arithmetic. Less accurate products must fail.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from flashproof.calling import TENSORS, TensorName
from flashproof.impls.spec import Arithmetic
from flashproof.judging import Judged, exact_of, judge_tensor
from flashproof.oracles.problem import Problem
from flashproof.tests.suite.oracles import tensor_core
from flashproof.tests.suite.oracles.features import problem_of

CLAIM = Arithmetic(accumulate="tensor_core", tensor_core_terms=64, products="6xbf16", key_tile=64, query_tile=64)

Product = Callable[[Tensor, Tensor], Tensor]


def judged(problem: Problem, product: Product, arithmetic: Arithmetic) -> dict[TensorName, Judged]:
    """Judges attention in float32 of one head without a mask, whose products are computed by `product`."""
    query, key, value, dout = (x[0, 0] for x in (problem.query, problem.key, problem.value, problem.dout))
    scores = product(query, key.T)
    maximum = scores.amax(dim=1, keepdim=True)
    exponentials = torch.exp((scores - maximum) * problem.scale)
    total = exponentials.sum(dim=1, keepdim=True)
    out, lse = product(exponentials, value) / total, maximum * problem.scale + total.log()
    weights = torch.exp(scores * problem.scale - lse)
    dscores = weights * (product(dout, value.T) - (dout * out).sum(dim=1, keepdim=True))
    answer = {
        "out": out,
        "lse": lse[:, 0],
        "dq": problem.scale * product(dscores, key),
        "dk": problem.scale * product(dscores.T, query),
        "dv": product(weights.T, dout),
    }
    truth = exact_of(problem, arithmetic)
    return {name: judge_tensor(answer[name][None, None], name, truth) for name in TENSORS}


@pytest.mark.parametrize(
    "line",
    [
        "b1 h1 q64 k130 d64",
        "b1 h1 q64 k64 d64 v.positive do.positive",
        "b1 h1 q20 k600 d16",
        "b1 h1 q40 k40 d128 x8",
        "b1 h1 q50 k70 d32 spike x30",
        "b1 h1 q50 k70 d32 shift-100",
    ],
)
def test_six_products_pass(line: str) -> None:
    """The truncation of tensor cores is inside both forms of the bound, and passes the test for bias."""
    problem = problem_of(line)
    verdicts = judged(problem, tensor_core.product, CLAIM)
    assert all(verdict.passed and verdict.statistical for verdict in verdicts.values()), verdicts


def exact_sums(pairs: Sequence[tuple[int, int]], a: Tensor, b: Tensor) -> Tensor:
    """The sum of some products of parts, rounded once."""
    of_a, of_b = ([part.double() for part in tensor_core.parts(x)] for x in (a, b))
    return torch.stack([of_a[i] @ of_b[j] for i, j in pairs]).sum(dim=0).float()


def test_three_products_are_outside_the_bound_of_six() -> None:
    """Six products of three parts pass. Three products of two parts hold only 16 bits. One key is enough to show it."""
    problem = problem_of("b1 h1 q20 k1 d64")
    six, three = (
        judged(problem, partial(exact_sums, pairs), CLAIM) for pairs in (tensor_core.PAIRS, ((0, 1), (1, 0), (0, 0)))
    )
    assert all(verdict.passed for verdict in six.values())
    assert three["out"].rho.value > 1.0


def test_parts_of_a_number() -> None:
    """Three parts hold every bit of a float32 number, also of the largest, if bfloat16 can hold its last bit."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * torch.logspace(-30, 38, 4096)
    x = torch.cat([x.clamp(-3e38, 3e38), torch.tensor([torch.finfo(torch.float32).max, 0.0, 1.0 + 2.0**-8 - 2.0**-17])])
    first, second, third = (part.double() for part in tensor_core.parts(x))
    assert torch.equal(first + second + third, x.double())
    # The nearest bfloat16 of the largest numbers is infinite. Their first part is the largest finite number instead.
    almost = 1.0 + 2.0**-20
    assert (second.abs() <= almost * 2.0**-8 * x.abs()).all()
    assert (third.abs() <= almost * 2.0**-17 * x.abs()).all()
    tiny = torch.tensor([1.2345678e-37, 1e-40, 2.0**-149])
    assert (sum(part.double() for part in tensor_core.parts(tiny)) - tiny.double()).abs().max() <= 2.0**-134


def test_a_step_is_that_of_hopper() -> None:
    """Each term is cut off 25 bits below the largest one, and the sum after 24 bits, both toward 0."""
    total, four = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    for sign in (1.0, -1.0):
        found = [
            tensor_core.step(sign * four, term * four.T, sign * total).item() for term in (2.0**-25, 2.0**-26, 2.0**-24)
        ]
        assert found == [sign * (1.0 + 2.0**-23), sign, sign * (1.0 + 2.0**-22)]
        assert tensor_core.step(-sign * four, 2.0**-26 * four.T, sign * total).item() == sign
        assert tensor_core.step(-sign * four, 2.0**-25 * four.T, sign * total).item() == sign * (1.0 - 2.0**-23)
