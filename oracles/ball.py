"""Rigorous enclosures of attention in ball arithmetic (python-flint).

A ball is a midpoint and a radius. Every operation computes both, so the exact result always lies inside its ball.

The module processes one query head at a time. Its inputs are the queries Q [rows, dim], the keys K and the values V
[keys, dim], the output gradients dO [rows, dim] and the scale tau. All inputs are exact. The formulas are:

    U  = exp(tau Q K^T - c)          0 where masked
    l  = U 1                         L = c + log l
    O  = (Z o U) V / l               Z = 1 / (1 - p) where dropout keeps the weight, else 0
    dV = (Z o U)^T (dO / l)
    dS = U o (Z o (dO / l) V^T - delta / l),   delta = rowsum(dO o O)
    dQ = tau dS K,  dK = tau dS^T Q

The shift c may be any number for each row. Here it is the row maximum or the known LSE, in float64.

The division by l is applied to the matrices that have `dim` columns. An entry of [rows, keys] then costs one
exponential, one product and its share of the matrix products of `arb_mat`. The radii of these matrix products stay
near 2^-bits times the product of the absolute values, entry by entry.

The exponential turns the absolute error of a score into a relative error of the weight. For this reason, the working
precision grows with the size of the largest score. Every weight is correct to about `bits` bits, at scores of 8 and
at scores of 1e9. A query that sees no key has out = 0 and lse = -inf, both exact.

python-flint keeps its precision and its number of threads in one global context. Do not call this module from several
Python threads at the same time.
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

BITS = 100  # precision of a weight
_PART = 256  # mask rows that are computed at once
_ZERO = arb(0)


class Ball(NamedTuple):
    """An enclosure of a tensor: |exact - mid| <= radius for every element.

    The radius includes the rounding of the midpoint to float64. Both tensors are float64, are on the CPU and have the
    same shape.
    """

    mid: Tensor
    radius: Tensor


@dataclass(frozen=True, eq=False)
class Enclosure:
    """Enclosures of the output, the log-sum-exp and the gradients.

    out, dq: [batch, heads, queries, dim].
    lse: [batch, heads, queries], the natural logarithm of the sum of exp(scaled score).
    dk, dv: [batch, kv_heads, keys, dim].
    """

    out: Ball
    lse: Ball
    dq: Ball
    dk: Ball
    dv: Ball


class Forward(NamedTuple):
    """Enclosures of out [batch, heads, queries, dim] and lse [batch, heads, queries]."""

    out: Ball
    lse: Ball


class Rows(NamedTuple):
    """Enclosures for some queries of one head: out and dq [rows, dim], lse [rows]."""

    out: Ball
    lse: Ball
    dq: Ball


class Columns(NamedTuple):
    """Enclosures for some keys of one key head: dk and dv [keys, dim]."""

    dk: Ball
    dv: Ball


def attention(problem: Problem, bits: int = BITS) -> Enclosure:
    """Encloses the output, the log-sum-exp and the gradients.

    A head of 1024 queries, 1024 keys and dim 64 takes 3 to 4 s on two cores. The matrix products use as many threads as
    torch does.

    Raises ValueError if a query sees a NaN or an infinity, and ArithmeticError if a radius is not finite. The other
    functions of this module raise the same errors.
    """
    passes = []
    for head in _every_head(problem, bits):  # one at a time, because a head holds queries x keys balls
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
    """Encloses the output and the log-sum-exp only. The values of dout do not matter.

    64 queries, 64 keys and dim 64 take about 10 ms.
    """
    passes = [(head.out, head.lse) for head in _every_head(problem, bits)]
    return Forward(
        _balls([out for out, _ in passes], problem.query.shape),
        _balls([lse for _, lse in passes], problem.query.shape[:3]),
    )


def rows(problem: Problem, batch: int, head: int, queries: Int[Tensor, " rows"], bits: int = BITS) -> Rows:
    """Encloses out, lse and dq for some queries of one head, at a cost proportional to rows x keys.

    queries: positions [rows]. 8 queries with 16384 keys and dim 64 take about a second.
    """
    one = Head(problem, batch, head, queries, bits=bits)
    shape = torch.Size((len(queries), problem.query.shape[3]))
    return Rows(_balls([one.out], shape), _balls([one.lse], shape[:1]), _balls([one.dq(one.dscores())], shape))


def columns(
    problem: Problem, batch: int, kv_head: int, keys: Int[Tensor, " columns"], out: Ball, lse: Ball, bits: int = BITS
) -> Columns:
    """Encloses dk and dv for some keys of one key head, given enclosures of the forward results.

    keys: positions [columns]. out, lse: enclosures for every query of the problem, with the shapes of `Forward`.

    The gradients of a key depend on the normalisation of every query that sees the key. Without `out` and `lse`, that
    normalisation costs queries x keys x dim; `attention` computes it. Where that is too expensive, `out` and `lse` may
    come from the float64 oracle, with the bound of that oracle as the radius. The radii that result are then as certain
    as that bound. Nothing else from the float64 oracle is used.

    8 keys with 16384 queries and dim 64 take a few seconds.
    """
    first = kv_head * problem.groups
    heads = [
        Head(problem, batch, head, keys=keys, known=Forward(out, lse), bits=bits)
        for head in range(first, first + problem.groups)
    ]
    shape = torch.Size((len(keys), problem.key.shape[3]))
    dk = _over_groups([head.dk(head.dscores()) for head in heads], problem, bits)
    return Columns(_balls(dk, shape), _balls(_over_groups([head.dv() for head in heads], problem, bits), shape))


class Head:
    """Some queries and some keys of one query head, at full precision.

    The constructor computes out [rows, dim] and lse [rows, 1]. The methods compute the gradients on request.

    queries, keys: positions; None means all of them. A subset of the keys makes sense only together with `known`.
    known: enclosures of out and lse for the whole problem.
    A key that none of the queries sees is read as 0, whatever it holds. The same applies to a query that sees none of
    the keys. Raises ValueError if another query, key or value is not finite.
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
            self._kept = (
                torch.cat([problem.dropout.kept(batch, head, part, key_count)[:, keys] for part in parts])
                .flatten()
                .tolist()
            )

        # Every |score| is below 2^score_bits, so at most score_bits of its bits are before the binary point.
        factors = (problem.scale, query.shape[1], query.abs().max().item(), key.abs().max().item())
        score_bits = sum(math.frexp(factor)[1] for factor in factors)
        self.bits = bits + max(0, score_bits)

        shape = tuple(visible.shape)
        # Any shift is correct. A shift near the maximum or the LSE of the row keeps the weights of all rows at the
        # same magnitude.
        likely = (
            known.lse.mid[batch, head].cpu()[queries]
            if known
            else (problem.scale * (query @ key.T)).masked_fill(~visible, -math.inf).amax(dim=1)
        )
        shifts = torch.where(likely.isfinite(), likely, 0.0).tolist()
        with _precision(self.bits):
            self._scale, survivor = arb(problem.scale), 1 / (1 - arb(problem.dropout.p))
            self._key, self._value = _matrix(key), _matrix(value)
            self._scaled_query = _matrix(query) * self._scale
            scores = self._scaled_query * self._key.transpose() - _across(shifts, shape[1])
            self._weights = [
                score.exp() if seen else _ZERO
                for score, seen in zip(scores.entries(), visible.flatten().tolist(), strict=True)
            ]
            weights = arb_mat(*shape, self._weights)
            self._dropped = (
                weights
                if self._kept is None
                else arb_mat(*shape, [u if kept else _ZERO for u, kept in zip(self._weights, self._kept, strict=True)])
            )
            if known:
                lse = _arbs(known.lse, batch, head, queries)
                totals = [(exact - shift).exp() for exact, shift in zip(lse, shifts, strict=True)]
            else:
                totals = (weights * _down(shape[1])).entries()
                lse = [
                    shift + total.log() if any_key else arb.neg_inf()
                    for total, shift, any_key in zip(totals, shifts, sees.tolist(), strict=True)
                ]
            # 1 / l
            self._inverse = [
                1 / total if any_key else _ZERO for total, any_key in zip(totals, sees.tolist(), strict=True)
            ]
            self._gain = [survivor * inverse for inverse in self._inverse]  # of a kept weight: 1 / ((1 - p) l)
            self.lse = arb_mat(shape[0], 1, lse)
            self.out = (
                arb_mat(*query.shape, _arbs(known.out, batch, head, queries))
                if known
                else _times_rows(self._gain, self._dropped * self._value)
            )

    def dscores(self) -> arb_mat:
        """Computes dS [rows, keys]. Raises ValueError if dout is not finite in a row that sees a key."""
        with _precision(self.bits):
            dout = self._dout_matrix()
            deltas = [
                inverse * sum(map(mul, dout_row, out_row), _ZERO)
                for inverse, dout_row, out_row in zip(self._inverse, dout.tolist(), self.out.tolist(), strict=True)
            ]
            dweights = _times_rows(self._gain, dout) * self._value.transpose()
            shape = dweights.nrows(), dweights.ncols()
            if self._kept is not None:
                dweights = arb_mat(
                    *shape,
                    [dweight if kept else _ZERO for dweight, kept in zip(dweights.entries(), self._kept, strict=True)],
                )
            slopes = dweights - _across(deltas, shape[1])
            return arb_mat(*shape, list(map(mul, self._weights, slopes.entries())))

    def dq(self, dscores: arb_mat) -> arb_mat:
        """Computes dQ [rows, dim] from dS."""
        with _precision(self.bits):
            return dscores * self._key * self._scale

    def dk(self, dscores: arb_mat) -> arb_mat:
        """Computes the contribution of these rows to dK [keys, dim] from dS."""
        with _precision(self.bits):
            return (self._scaled_query.transpose() * dscores).transpose()

    def dv(self) -> arb_mat:
        """Computes the contribution of these rows to dV [keys, dim]. Raises ValueError like `dscores`."""
        with _precision(self.bits):
            return (_times_rows(self._gain, self._dout_matrix()).transpose() * self._dropped).transpose()

    def _dout_matrix(self) -> arb_mat:
        return _matrix(_exact("dout", *self._dout))


def _every_head(problem: Problem, bits: int) -> Iterator[Head]:
    batches, heads, _, _ = problem.query.shape
    return (Head(problem, batch, head, bits=bits) for batch in range(batches) for head in range(heads))


def _over_groups(gradients: list[arb_mat], problem: Problem, bits: int) -> list[arb_mat]:
    """Sums the gradients of the query heads that share a key head."""
    with _precision(bits):
        return [
            reduce(add, gradients[first : first + problem.groups]) for first in range(0, len(gradients), problem.groups)
        ]


@contextmanager
def _precision(bits: int) -> Iterator[None]:
    before = ctx.prec, ctx.threads
    ctx.prec, ctx.threads = bits, torch.get_num_threads()
    try:
        yield
    finally:
        ctx.prec, ctx.threads = before


def _exact(name: str, matrix: Tensor, used: Tensor) -> Tensor:
    """Converts a matrix to float64, which holds every dtype exactly, and sets unused rows to 0.

    Raises ValueError if a used row is not finite.
    """
    matrix = matrix.cpu().to(torch.float64).masked_fill(~used[:, None], 0.0)
    if not matrix.isfinite().all():
        raise ValueError(
            f"{name}: not finite at {matrix.isfinite().logical_not().nonzero()[0].tolist()}, "
            "where it is seen; an enclosure needs finite numbers"
        )
    return matrix


def _matrix(tensor: Tensor) -> arb_mat:
    return arb_mat(*tensor.shape, tensor.flatten().tolist())


def _arbs(ball: Ball, batch: int, head: int, queries: Tensor) -> list[arb]:
    mid, radius = (part[batch, head].cpu()[queries].flatten().tolist() for part in ball)
    return list(map(arb, mid, radius))


def _down(length: int) -> arb_mat:
    """A column of `length` ones."""
    return arb_mat(length, 1, [1] * length)


def _across(column: list[arb] | list[float], length: int) -> arb_mat:
    """A matrix [rows, length] that repeats each number of the column along its row."""
    return arb_mat(len(column), 1, column) * _down(length).transpose()


def _times_rows(factors: list[arb], matrix: arb_mat) -> arb_mat:
    """Computes diag(factors) matrix."""
    return arb_mat(
        matrix.nrows(),
        matrix.ncols(),
        [factor * entry for factor, row in zip(factors, matrix.tolist(), strict=True) for entry in row],
    )


def _balls(matrices: list[arb_mat], shape: torch.Size) -> Ball:
    """Joins the entries of the matrices, in order, into one ball tensor of this shape.

    Raises ArithmeticError if a radius is not finite.
    """
    entries = list(chain.from_iterable(matrix.entries() for matrix in matrices))
    mids = [float(entry) for entry in entries]
    with _precision(BITS):
        distances = [
            (entry - mid).abs_upper() if mid != -math.inf else _ZERO for entry, mid in zip(entries, mids, strict=True)
        ]
    # float() rounds to nearest, so the next larger float is an upper bound.
    radii = [math.nextafter(float(distance), math.inf) if not distance.is_zero() else 0.0 for distance in distances]
    radius = torch.tensor(radii, dtype=torch.float64).reshape(shape)
    if not radius.isfinite().all():
        raise ArithmeticError(
            f"ball: {int((~radius.isfinite()).sum())} of {radius.numel()} radii are not finite; "
            "such an enclosure would excuse any result"
        )
    return Ball(torch.tensor(mids, dtype=torch.float64).reshape(shape), radius)
