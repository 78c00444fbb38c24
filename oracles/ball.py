"""Rigorous enclosures of attention: python-flint balls, a midpoint and a radius that every operation carries along.

One query head at a time, with queries Q [rows, dim], keys K and values V [keys, dim], output gradients dO [rows, dim] and the scale tau, all exact:

    U  = exp(tau Q K^T - c)          0 where masked; c is any number for each row, here the row's maximum in float64
    l  = U 1                         L = c + log l
    O  = (Z o U) V / l               Z = 1 / (1 - p) where dropout keeps the weight, else 0
    dV = (Z o U)^T (dO / l)
    dS = U o (Z o (dO / l) V^T - delta / l),   delta = rowsum(dO o O)
    dQ = tau dS K,  dK = tau dS^T Q

Dividing by l is left to the matrices that have `dim` columns: an entry of [rows, keys] costs one exponential, one product, and what `arb_mat` takes
for its matrix products, whose radii stay near 2^-bits times the product of the absolute values, entry by entry.

The exponential turns the absolute error of a score into a relative one, so the number of bits grows with the size of the largest score: every
weight is right to about `bits` bits, at scores of 8 as at 1e9. A query that sees no key has out 0 and lse -inf, exactly.

python-flint keeps its precision and its threads in one global context: do not call this from several Python threads at once.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add, mul
from typing import NamedTuple

import torch
from flint import arb, arb_mat, ctx
from torch import Tensor

from flashproof.impls.shapes import Int
from flashproof.oracles.problem import Problem

BITS = 100  # of a weight
_PART = 256  # rows of a mask drawn at once
_ZERO = arb(0)


class Ball(NamedTuple):
    """|exact - mid| <= radius for every element, the rounding of the midpoint to float64 included. float64, on the CPU, of one shape."""

    mid: Tensor
    radius: Tensor


@dataclass(frozen=True, eq=False)
class Enclosure:
    """out, dq [batch, heads, queries, dim]; lse [batch, heads, queries], natural log, of the scaled scores; dk, dv [batch, kv_heads, keys, dim]."""

    out: Ball
    lse: Ball
    dq: Ball
    dk: Ball
    dv: Ball


class Forward(NamedTuple):
    """out [batch, heads, queries, dim], lse [batch, heads, queries]."""

    out: Ball
    lse: Ball


class Rows(NamedTuple):
    """Of some queries of one head: out and dq [rows, dim], lse [rows]."""

    out: Ball
    lse: Ball
    dq: Ball


class Columns(NamedTuple):
    """Of some keys of one key head: dk and dv [keys, dim]."""

    dk: Ball
    dv: Ball


def attention(problem: Problem, bits: int = BITS) -> Enclosure:
    """Encloses output, log-sum-exp and gradients.

    A head of 1024 queries, 1024 keys and dim 64 takes 3 to 4 s on two cores (matrix products use as many threads as torch does).
    Raises ValueError where a query sees a NaN or an infinity.
    """
    passes = []
    for head in _every_head(problem, bits):  # one at a time: a head holds queries x keys balls
        dscores = head.dscores()
        passes.append((head.out, head.lse, head.dq(dscores), head.dk(dscores), head.dv()))
    out, lse, dq, dk, dv = (list(matrices) for matrices in zip(*passes, strict=True))
    return Enclosure(
        out=_balls(out, problem.query.shape),
        lse=_balls(lse, problem.query.shape[:3]),
        dq=_balls(dq, problem.query.shape),
        dk=_balls(_over_groups(dk, problem, bits), problem.key.shape),
        dv=_balls(_over_groups(dv, problem, bits), problem.key.shape),
    )


def forward(problem: Problem, bits: int = BITS) -> Forward:
    """Encloses output and log-sum-exp alone; dout is not looked at. 64 queries, 64 keys and dim 64 take about 10 ms."""
    passes = [(head.out, head.lse) for head in _every_head(problem, bits)]
    return Forward(_balls([out for out, _ in passes], problem.query.shape), _balls([lse for _, lse in passes], problem.query.shape[:3]))


def rows(problem: Problem, batch: int, head: int, queries: Int[Tensor, " rows"], bits: int = BITS) -> Rows:
    """Encloses what belongs to some queries of one head, at a cost of rows x keys: 8 of them at 16384 keys and dim 64 take about a second."""
    one = Head(problem, batch, head, queries, bits=bits)
    shape = torch.Size((len(queries), problem.query.shape[3]))
    return Rows(_balls([one.out], shape), _balls([one.lse], shape[:1]), _balls([one.dq(one.dscores())], shape))


def columns(problem: Problem, batch: int, kv_head: int, keys: Int[Tensor, " columns"], out: Ball, lse: Ball, bits: int = BITS) -> Columns:
    """Encloses what belongs to some keys of one key head, given enclosures `out` and `lse` of every query of the problem, shaped as in `Forward`.

    A key's gradients depend on the normalisation of every query that sees it, which costs queries x keys x dim to enclose from nothing: `attention`
    does that. Where it is too dear, `out` and `lse` may come from the float64 oracle, with its bound for a radius. The answer is then as sure as
    that bound, and a radius follows from it; nothing else of that oracle enters. 8 keys of 16384 queries and dim 64 take a few seconds.
    """
    first = kv_head * problem.groups
    heads = [Head(problem, batch, head, keys=keys, known=Forward(out, lse), bits=bits) for head in range(first, first + problem.groups)]
    shape = torch.Size((len(keys), problem.key.shape[3]))
    dk = _over_groups([head.dk(head.dscores()) for head in heads], problem, bits)
    return Columns(_balls(dk, shape), _balls(_over_groups([head.dv() for head in heads], problem, bits), shape))


class Head:
    """Some queries and some keys of one query head, at full precision: out [rows, dim] and lse [rows, 1] at once, gradients on request.

    queries, keys: their positions; all of them if None. Fewer keys than all make sense only with `known`, the enclosures of out and lse of the whole problem.
    A key that none of the queries sees, and a query that sees none of the keys, is read as 0, whatever it holds.
    """

    def __init__(
        self,
        problem: Problem,
        batch: int,
        head: int,
        queries: Int[Tensor, " rows"] | None = None,
        keys: Int[Tensor, " columns"] | None = None,
        known: Forward | None = None,
        bits: int = BITS,
    ) -> None:
        kv_head, key_count = head // problem.groups, problem.key.shape[2]
        queries = torch.arange(problem.query.shape[2]) if queries is None else queries.cpu()
        keys = torch.arange(key_count) if keys is None else keys.cpu()
        parts = torch.split(queries, _PART)
        visible = torch.cat([problem.mask.visible(batch, head, part)[:, keys] for part in parts])
        sees, is_seen = visible.any(dim=1), visible.any(dim=0)
        query = _exact("query", problem.query[batch, head].cpu()[queries], sees)
        key = _exact("key", problem.key[batch, kv_head].cpu()[keys], is_seen)
        value = _exact("value", problem.value[batch, kv_head].cpu()[keys], is_seen)
        self._dout = problem.dout[batch, head].cpu()[queries], sees
        self._kept: list[bool] | None = None
        if problem.dropout.p:
            self._kept = torch.cat([problem.dropout.kept(batch, head, part, key_count)[:, keys] for part in parts]).flatten().tolist()

        # Every |score| is below 2^score_bits: so many of its bits stand before the binary point.
        factors = (problem.scale, query.shape[1], query.abs().max().item(), key.abs().max().item())
        score_bits = sum(math.frexp(factor)[1] for factor in factors)
        self.bits = bits + max(0, score_bits)

        shape = tuple(visible.shape)
        # Any shift is right; one near the row's maximum, or its lse, keeps the weights of all rows at one magnitude.
        likely = known.lse.mid[batch, head].cpu()[queries] if known else (problem.scale * (query @ key.T)).masked_fill(~visible, -math.inf).amax(dim=1)
        shifts = torch.where(likely.isfinite(), likely, 0.0).tolist()
        with _precision(self.bits):
            self._scale, survivor = arb(problem.scale), 1 / (1 - arb(problem.dropout.p))
            self._key, self._value = _matrix(key), _matrix(value)
            self._scaled_query = _matrix(query) * self._scale
            scores = self._scaled_query * self._key.transpose() - _across(shifts, shape[1])
            self._weights = [score.exp() if seen else _ZERO for score, seen in zip(scores.entries(), visible.flatten().tolist(), strict=True)]
            weights = arb_mat(*shape, self._weights)
            self._dropped = (
                weights if self._kept is None else arb_mat(*shape, [u if kept else _ZERO for u, kept in zip(self._weights, self._kept, strict=True)])
            )
            if known:
                lse = _arbs(known.lse, batch, head, queries)
                totals = [(exact - shift).exp() for exact, shift in zip(lse, shifts, strict=True)]
            else:
                totals = (weights * _down(shape[1])).entries()
                lse = [shift + total.log() if any_key else arb.neg_inf() for total, shift, any_key in zip(totals, shifts, sees.tolist(), strict=True)]
            self._inverse = [1 / total if any_key else _ZERO for total, any_key in zip(totals, sees.tolist(), strict=True)]  # 1 / l
            self._gain = [survivor * inverse for inverse in self._inverse]  # of a kept weight: 1 / ((1 - p) l)
            self.lse = arb_mat(shape[0], 1, lse)
            self.out = arb_mat(*query.shape, _arbs(known.out, batch, head, queries)) if known else _times_rows(self._gain, self._dropped * self._value)

    def dscores(self) -> arb_mat:
        """dS [rows, keys]. Raises ValueError where dout is not finite."""
        with _precision(self.bits):
            dout = self._dout_matrix()
            deltas = [
                inverse * sum(map(mul, dout_row, out_row), _ZERO)
                for inverse, dout_row, out_row in zip(self._inverse, dout.tolist(), self.out.tolist(), strict=True)
            ]
            dweights = _times_rows(self._gain, dout) * self._value.transpose()
            shape = dweights.nrows(), dweights.ncols()
            if self._kept is not None:
                dweights = arb_mat(*shape, [dweight if kept else _ZERO for dweight, kept in zip(dweights.entries(), self._kept, strict=True)])
            slopes = dweights - _across(deltas, shape[1])
            return arb_mat(*shape, list(map(mul, self._weights, slopes.entries())))

    def dq(self, dscores: arb_mat) -> arb_mat:
        """dQ [rows, dim]."""
        with _precision(self.bits):
            return dscores * self._key * self._scale

    def dk(self, dscores: arb_mat) -> arb_mat:
        """What these rows add to dK [keys, dim]."""
        with _precision(self.bits):
            return (self._scaled_query.transpose() * dscores).transpose()

    def dv(self) -> arb_mat:
        """What these rows add to dV [keys, dim]."""
        with _precision(self.bits):
            return (_times_rows(self._gain, self._dout_matrix()).transpose() * self._dropped).transpose()

    def _dout_matrix(self) -> arb_mat:
        return _matrix(_exact("dout", *self._dout))


def _every_head(problem: Problem, bits: int) -> Iterator[Head]:
    batches, heads, _, _ = problem.query.shape
    return (Head(problem, batch, head, bits=bits) for batch in range(batches) for head in range(heads))


def _over_groups(gradients: list[arb_mat], problem: Problem, bits: int) -> list[arb_mat]:
    """Sums over the query heads that share a key head."""
    with _precision(bits):
        return [reduce(add, gradients[first : first + problem.groups]) for first in range(0, len(gradients), problem.groups)]


@contextmanager
def _precision(bits: int) -> Iterator[None]:
    before = ctx.prec, ctx.threads
    ctx.prec, ctx.threads = bits, torch.get_num_threads()
    try:
        yield
    finally:
        ctx.prec, ctx.threads = before


def _exact(name: str, matrix: Tensor, used: Tensor) -> Tensor:
    """In float64, which holds every dtype exactly; 0 in rows that are not used."""
    matrix = matrix.cpu().to(torch.float64).masked_fill(~used[:, None], 0.0)
    if not matrix.isfinite().all():
        raise ValueError(f"{name}: not finite at {matrix.isfinite().logical_not().nonzero()[0].tolist()}, where it is seen; an enclosure needs finite numbers")
    return matrix


def _matrix(tensor: Tensor) -> arb_mat:
    return arb_mat(*tensor.shape, tensor.flatten().tolist())


def _arbs(ball: Ball, batch: int, head: int, queries: Tensor) -> list[arb]:
    mid, radius = (part[batch, head].cpu()[queries].flatten().tolist() for part in ball)
    return list(map(arb, mid, radius))


def _down(length: int) -> arb_mat:
    """A column of ones."""
    return arb_mat(length, 1, [1] * length)


def _across(column: list[arb] | list[float], length: int) -> arb_mat:
    """[rows, length]: each number all along its row."""
    return arb_mat(len(column), 1, column) * _down(length).transpose()


def _times_rows(factors: list[arb], matrix: arb_mat) -> arb_mat:
    """diag(factors) matrix"""
    return arb_mat(matrix.nrows(), matrix.ncols(), [factor * entry for factor, row in zip(factors, matrix.tolist(), strict=True) for entry in row])


def _balls(matrices: list[arb_mat], shape: torch.Size) -> Ball:
    """The matrices, one after another, as a tensor of this shape."""
    entries = list(chain.from_iterable(matrix.entries() for matrix in matrices))
    mids = [float(entry) for entry in entries]
    with _precision(BITS):
        distances = [(entry - mid).abs_upper() if mid != -math.inf else _ZERO for entry, mid in zip(entries, mids, strict=True)]
    # float() rounds to nearest: the next float up is an upper bound.
    radii = [math.nextafter(float(distance), math.inf) if not distance.is_zero() else 0.0 for distance in distances]
    radius = torch.tensor(radii, dtype=torch.float64).reshape(shape)
    if not radius.isfinite().all():
        raise ArithmeticError(f"ball: {int((~radius.isfinite()).sum())} of {radius.numel()} radii are not finite; such an enclosure would excuse any result")
    return Ball(torch.tensor(mids, dtype=torch.float64).reshape(shape), radius)
