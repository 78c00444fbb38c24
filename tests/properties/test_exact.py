"""Probes: inputs whose exact answer is known without an oracle.

Every element must be inside its bound. In addition, an element must be bitwise exact where the claimed arithmetic
leaves no other result. In 16 bit, this holds for an element whose exact value is a number of the dtype, if the errors
in float32 cannot bring the result near the midpoint to a neighbouring number (`bounds.rounds_to`).

In float32, only the bound applies, since legitimate roundings fill the last place. For example, exp(0) may be an ulp
off. A kernel that normalises at each step, or merges splits, divides by counts like 192.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashproof import grids
from flashproof.cases import Case
from flashproof.registry import check
from flashproof.subject import Subject
from flashproof.tensors import inputs
from flashproof.tests.properties.probing import (
    answer_to,
    before_rounding,
    by_query_head,
    expect_exact,
    expect_inside_bound,
    in_float64,
    over_groups,
)

# There are few keys, or they do not fill a tile. So one key too many or too few moves the mean far outside its bound.
FEW = "b1 h4/2 q20 k16 d32\nb1 h1 q40 k64 d64\nb1 h1 q70 k70 d40 causal"


@check("properties", grid=grids.lines(FEW))
def test_uniform(subject: Subject) -> None:
    """If Q = 0, the output is the mean of the visible values. A key that is lost, counted twice or padded changes it.

    All scores are 0, in any order and any precision. If the number of keys is a power of two and there is no mask, each
    weight is a power of two, which every cast keeps. The elements of the output and of dV are then integers over the
    number of keys.

    A kernel that normalises at every step, or in each of several splits, has weights like 1/192 in between. A cast
    changes these. So bitwise equality is asked only if all keys fit in the tile that the kernel claims, or if it claims
    to keep its weights in float32.
    """
    for case in subject.cases:
        given = inputs(case, subject.device)
        counts = [tensor.round().clamp(-1.0, 1.0) for tensor in (given.value, given.dout)]
        given = replace(given, query=torch.zeros_like(given.query), value=counts[0], dout=counts[1])
        answer = answer_to(subject, case, given)
        if answer is None:
            continue
        expect_inside_bound(subject, case, answer, given, "queries are 0, values and output gradients -1, 0 or 1")
        arithmetic = subject.implementation.arithmetic(subject.dtype, subject.device)
        one_step = case.keys <= (arithmetic.key_tile or 0) or arithmetic.weights == "float32"
        plain = case.mask == "full" and case.blocks is None and not case.dropout
        if not (plain and one_step and math.log2(case.keys).is_integer()):
            continue
        before, what = before_rounding(subject, case, given), "the mean of equally weighted values"
        mean = by_query_head(in_float64(given.value).mean(dim=2, keepdim=True), case).expand(given.query.shape)
        expect_exact(subject, case, "out", answer["out"], mean, before.out, what)
        if "dv" in answer:
            share = over_groups(in_float64(given.dout), case).sum(dim=2, keepdim=True) / case.keys
            expect_exact(subject, case, "dv", answer["dv"], share.expand(given.value.shape), before.dv, what)


# With these head dims, the codes are distinct and far apart.
CODES = "b2 h1 q70 k70 d64\nb1 h4/2 q40 k66 d64\nb1 h1 q70 k70 d64 causal"


@check("properties", grid=grids.lines(CODES))
def test_one_hot(subject: Subject) -> None:
    """If each query selects one key, the output is the value of that key, and dV of that key is the output gradient.

    The keys are codes of +-1, and each query is a multiple of one of them. All other scores are so much smaller that
    their weights are 0 in float32. The one remaining weight is exp(0), or 1 up to the roundings of a large score, and
    is cast to 1. This probe finds values that are mixed up, heads or rows that are written to the wrong place, stale
    sums, and operands with fewer digits.
    """
    for case in subject.cases:
        given = inputs(case, subject.device)
        codes = torch.where(given.key < 0, -1.0, 1.0).to(given.key.dtype)
        target = _targets(case).to(given.query.device)
        factor = _sharpness(codes, case)
        if case.mask == "causal-br" or case.blocks is not None or case.dropout or factor is None:
            continue  # the selected key may be hidden or dropped, or two codes are equal
        where = target[..., None].expand(given.query.shape)
        given = replace(given, key=codes, query=factor * by_query_head(codes, case).gather(2, where))
        answer = answer_to(subject, case, given)
        if answer is None:
            continue
        expect_inside_bound(subject, case, answer, given, "each query selects one key")
        before, what = before_rounding(subject, case, given), "the value of the one key that a query selects"
        expect_exact(
            subject,
            case,
            "out",
            answer["out"],
            in_float64(by_query_head(given.value, case).gather(2, where)),
            before.out,
            what,
        )
        if "dv" in answer:
            found = torch.zeros_like(in_float64(by_query_head(given.value, case))).scatter_add_(
                2, where, in_float64(given.dout)
            )
            expect_exact(subject, case, "dv", answer["dv"], over_groups(found, case), before.dv, what)


def _targets(case: Case) -> Tensor:
    """Returns the index of the key that each query selects: [batch, heads, queries].

    The queries of a head take the keys in turn, at a stride. Each head starts at another key. With a causal mask, each
    query takes one of the keys that it sees.
    """
    stride = next(
        step for step in range(max(1, case.keys * 3 // 8), 2 * case.keys + 2) if math.gcd(step, case.keys) == 1
    )
    heads = torch.arange(case.batch * case.heads).view(case.batch, case.heads, 1)
    walk = torch.arange(case.queries) * stride + 5 * heads
    seen = torch.arange(case.queries).clamp(max=case.keys - 1) + 1
    return walk % (seen if case.mask == "causal" else torch.tensor(case.keys))


GAP = 110.0  # between scores: exp(-104) is already 0 in float32, even with subnormal numbers


def _sharpness(codes: Tensor, case: Case) -> float | None:
    """Returns the power of two by which queries are multiplied, or None if two codes are equal.

    With this factor, the score of a query's own code is at least GAP above all its other scores.
    """
    scale = 1.0 / math.sqrt(case.dim) if case.scale is None else case.scale
    overlap = codes.float() @ codes.float().transpose(2, 3)
    overlap.diagonal(dim1=2, dim2=3).fill_(-case.dim)
    apart = scale * (case.dim - overlap.amax().item()) if case.keys > 1 else scale * case.dim
    return 2.0 ** math.ceil(math.log2(GAP / apart)) if apart > 0.0 else None


@check("properties", grid=grids.lines("b1 h2 q40 k70 d64\nb1 h1 q66 k66 d40 causal"))
def test_zeros(subject: Subject) -> None:
    """If V, dO or all tensors are 0, so are the products with them, and nothing is NaN.

    A layer that is initialised with zeros has such tensors, and so has a loss that ignores a head. A kernel that
    divides by the largest element of a tensor returns NaN.
    """
    for case in subject.cases:
        given = inputs(case, subject.device)
        query, key, value, dout = (
            torch.zeros_like(tensor) for tensor in (given.query, given.key, given.value, given.dout)
        )
        for words, zero in (
            ("every value is 0", replace(given, value=value)),
            ("the output gradient is 0", replace(given, dout=dout)),
            ("every input is 0", replace(given, query=query, key=key, value=value, dout=dout)),
        ):
            answer = answer_to(subject, case, zero)
            if answer is not None:
                expect_inside_bound(subject, case, answer, zero, words)


# The first two lines have ordinary rows. The third has rows with a sink: one score is 8 above the others. The last has
# several tiles of scores that are so large that every rounding of a maximum has a visible effect.
ROWS = """
b1 h2/1 q64 k80 d32
b1 h1 q140 k140 d64 causal
b1 h1 q70 k140 d64 spike x8
b1 h1 q128 k319 d64 x16 shift60000
"""


@check("properties", grid=grids.lines(ROWS))
def test_unity(subject: Subject) -> None:
    """If V = 1, the output and its mean are 1, and dQ and dK are 0, also if one key has most of the weight of each row.

    The equality need not be bitwise, since the weights are cast only in the numerator. The mean shows what every row
    loses by a truncating cast, by lost mass, or by a denominator that sums other weights than the numerator.
    """
    for case in subject.cases:
        given = inputs(case, subject.device)
        given = replace(given, value=torch.ones_like(given.value))
        answer = answer_to(subject, case, given)
        if answer is not None:
            expect_inside_bound(subject, case, answer, given, "every value is 1")
