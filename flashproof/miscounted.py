"""Finds the keys, or the dims of the scores, that count more or less than they should in a wrong output.

A kernel that treats the end of a tile, or the dims beyond a power of two, in another way makes such errors. To first
order, the error is a number times what these keys or dims contribute. The number is fitted. Most of the error must be
explained, in many rows, so that an error of another origin is not explained by chance.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashproof.coarser import ROWS, visible_keys
from flashproof.oracles.problem import Problem

LEFT = 0.1  # the share of the mean square error that an explanation may leave
KEYS, DIMS = 16, 8  # the size of the parts that are tried, alone and joined to their neighbours
PRODUCTS = 2**25  # heads x queries x keys x dim: a larger problem takes too long


class _Fit(NamedTuple):
    """Parts that count `factor` times. left: the share of the mean square error that this leaves."""

    left: float
    factor: float
    first: int  # of the parts
    last: int


def errors_of(problem: Problem, out: Tensor, exact: Tensor, bound: Tensor) -> str:
    """What counts too much or too little in a wrong output, in words. Empty if nothing explains the errors.

    If nothing explains all rows, it may explain those that are outside the bound: a kernel may be wrong in these alone,
    as one that rescales its sums only where the maximum has grown.

    problem: of one key head; nothing is explained if it has dropout. out, exact, bound: the output of the kernel, the
    exact one and the largest errors that are allowed, [1, query heads, queries, dim].
    """
    if problem.dropout.p or math.prod(problem.query.shape) * problem.key.shape[2] > PRODUCTS:
        return ""
    error = out.to(exact.device, torch.float64) - exact
    if not bool(error.isfinite().all()) or int(error.any(dim=-1).count_nonzero()) < ROWS:
        return ""
    keys, dims = (KEYS, problem.key.shape[2]), (DIMS, problem.key.shape[3])
    wrong = (error.abs() > bound.to(error.device)).any(dim=-1)
    contributions = list(_contributions(problem, exact))
    for rows in (torch.ones_like(wrong), wrong):
        count = int(rows.count_nonzero())
        found = [
            (fit, f"{what} {_range(fit, *(dims if 'dims' in what else keys))} count {_number(fit.factor)} times")
            for parts, what in contributions
            if count >= ROWS and (fit := _fitted(error[rows], [part[rows] for part in parts]))
        ]
        if found:
            of = f", in {count:,} of {rows.numel():,} rows" if count < rows.numel() else ""
            return min(found)[1] + of
    return ""


def _number(factor: float) -> str:
    """A factor whose distance from 1 has two digits: the fit is of first order, and knows no more."""
    return f"{1.0 + float(f'{factor - 1.0:.2g}'):.6g}"


def _range(fit: _Fit, size: int, count: int) -> str:
    """The numbers of a fit's keys or dims, in words: "from 1,024 on", "64 to 127". size: of a part. count: of all."""
    start, stop = fit.first * size, (fit.last + 1) * size
    if stop >= count:
        return f"from {start:,} on"
    return f"up to {stop - 1:,}" if start == 0 else f"{start:,} to {stop - 1:,}"


def _contributions(problem: Problem, exact: Tensor) -> Iterator[tuple[list[Tensor], str]]:
    """For each part of the keys, or of the dims, the derivative of the output by its factor. Second, what they are."""
    query, key, value = (tensor.to(torch.float64) for tensor in (problem.query, problem.key, problem.value))
    scores = (problem.scale * (query @ key.mT)).masked_fill(~visible_keys(problem), -math.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    of_keys = [
        (weight @ own, weight.sum(dim=-1, keepdim=True))
        for weight, own in zip(torch.split(weights, KEYS, dim=3), torch.split(value, KEYS, dim=2), strict=True)
    ]
    yield [product for product, _ in of_keys], "a sum in which the values of keys"
    yield [product - total * exact for product, total in of_keys], "a softmax in which the weights of keys"
    of_dims = []
    for left, right in zip(torch.split(query, DIMS, dim=3), torch.split(key, DIMS, dim=3), strict=True):
        moved = weights * (problem.scale * (left @ right.mT))
        of_dims.append(moved @ value - moved.sum(dim=-1, keepdim=True) * exact)
    yield of_dims, "scores in which dims"


def _fitted(error: Tensor, parts: Sequence[Tensor]) -> _Fit | None:
    """The neighbouring parts that explain most of an error. None if it is too little, or if the others are nearly 0.

    error, parts: [rows, dim].
    """
    size = float(error.square().sum())

    def share(part: Tensor) -> float:
        """The share of the mean square error that a multiple of this part explains."""
        norm = float(part.square().sum())
        return float((error * part).sum()) ** 2 / (norm * size) if norm > 0.0 else 0.0

    first = last = max(range(len(parts)), key=lambda at: share(parts[at]))
    joined, best = parts[first], share(parts[first])
    while True:
        wider = [(share(joined + parts[at]), at) for at in (first - 1, last + 1) if 0 <= at < len(parts)]
        more, at = max(wider, default=(0.0, 0))
        if more <= best:
            break
        joined, best, first, last = joined + parts[at], more, min(first, at), max(last, at)
    others = sum((part for at, part in enumerate(parts) if not first <= at <= last), torch.zeros_like(joined))
    if best < 1.0 - LEFT or float(others.square().sum()) < LEFT * float(joined.square().sum()):
        return None
    factor = 1.0 + float((error * joined).sum() / joined.square().sum())
    return _Fit(1.0 - best, factor, first, last)
