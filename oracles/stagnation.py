"""What float32 sums lose because their roundings share a sign.

The probabilistic bound (`bounds`) takes the roundings of a sum for independent. This is wrong in two places:
- A term below half a unit in the last place of the running sum. The addition loses the whole term, and the next one,
  always with the same sign. A key with one large weight and thousands of tiny ones has such sums. No addition loses
  more than its term. So a sum loses at most the sum of those of its terms that are at most u times the sum of the
  absolute values of all terms.
- Terms that are nearly equal, such as thousands of weights of 0.9998. The running sum is a multiple of its last place.
  These multiples are a grid, with the step g. The error of an addition is the distance of the term from the nearest
  multiple of g, so equal terms have equal errors. Put each term t on a circle, at the angle 2 pi t / g. The mean of
  these points is near 0 for terms that are spread out, and has the length 1 for equal ones. n additions lose at most
  n g / 2. The length of the mean is the share of this loss that cannot cancel. Independent terms have a length of about
  1 / sqrt(n) by chance. The probabilistic bound allows `bounds.LAMBDA` times as much, so only what is above counts
  here.

These errors are far inside the deterministic bound, but may exceed the probabilistic one. So both amounts are added to
the probabilistic bound.

The amounts take some passes over all scores for each column of the head dim. Only a result outside the probabilistic
bound and inside the deterministic one needs them. A wrong kernel has many such results. So `lost_at` computes the
amount of the worst element alone: if that element fails, the others do not matter.

Source: Croci, Fasi, Higham, Mary and Mikaitis, Royal Society Open Science 9:211631, 2022 (stagnation); Higham and Mary,
SIAM J. Sci. Comput. 41(5), 2019 (the assumptions of the probabilistic bound).
"""

import math

import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles import bounds, naive
from flashproof.oracles.naive import Attention, Rows
from flashproof.oracles.problem import Problem

U = bounds.output_roundoff(torch.float32)
# The grid becomes coarser as the running sum grows. This is its last step, as a share of the sum of the absolute values
# of all terms, and the number of coarser grids before it: each has half the step of the next. While the grid is finer,
# few terms are added, and the probabilistic bound holds their roundings.
STEP, HALVINGS = 2.0 * U, 3


def lost(problem: Problem, *, backward: bool = True) -> Attention:
    """The most that each element may lose, in float64, to first order.

    backward: whether to compute it for the gradients too. Otherwise theirs are 0.
    """
    found = naive.empty_answer(problem)
    whole_heads = problem.groups * problem.query.shape[2] * problem.key.shape[2]
    for rows in naive.row_blocks(problem, whole_heads):
        _add(found, rows, backward=backward)
    return found


def lost_at(problem: Problem, name: str, index: tuple[int, ...]) -> float:
    """The most that one element of a tensor may lose: the same number as in `lost`, up to roundings of float64.

    Of `out`, `lse` and `dq`, only the row of the element is computed. Of `dk` and `dv`, all rows that see the key.
    """
    batch, head, place = index[:3]
    if name not in ("dk", "dv"):
        found = naive.empty_answer(problem)
        _add(
            found, naive.rows_of(problem, batch, slice(head, head + 1), slice(place, place + 1)), backward=name == "dq"
        )
        return float(getattr(found, name)[index])
    first = head * problem.groups
    rows = naive.rows_of(problem, batch, slice(first, first + problem.groups), slice(0, problem.query.shape[2]))
    if place >= rows.key.shape[1]:
        return 0.0  # no row sees the key
    of_sum = _of_sum(rows)
    moved = _moved(rows, of_sum) if name == "dk" else None
    terms, off, of_rows, factor = _sums_of_keys(rows, of_sum, moved)
    own = off[..., [place]].mT @ of_rows.abs() + _of_product(terms[..., [place]].mT, of_rows, rows.groups)
    return factor * float(own[0, 0, index[3]])


def _add(found: Attention, rows: Rows, *, backward: bool) -> None:
    """Adds what the sums of some heads lose. The rows are all rows of these heads."""
    of_sum = _of_sum(rows)
    rows.write(found.out, _of_out(rows, of_sum))
    rows.write(found.lse, of_sum)
    if not backward:
        return
    dscores, moved = rows.slopes().dscores, _moved(rows, of_sum)
    rows.write(found.dq, abs(rows.scale) * (_of_product(dscores, rows.key) + moved @ rows.key.abs()))
    for whole, error in ((found.dk, moved), (found.dv, None)):
        terms, off, of_rows, factor = _sums_of_keys(rows, of_sum, error)
        rows.add(whole, off, of_rows.abs(), factor)
        mine = whole.flatten(0, 1)[rows.kv_heads, : terms.shape[-1]]
        mine.add_(_of_product(terms.mT, of_rows, rows.groups), alpha=factor)


def _of_sum(rows: Rows) -> Float[Tensor, "kv_heads rows 1"]:
    """What the sum of the weights may lose. The LSE and every weight are off by this share."""
    return _of_terms(rows.weights, rows.weights.sum(dim=-1))[..., None]


def _of_out(rows: Rows, of_sum: Tensor) -> Float[Tensor, "kv_heads rows dim"]:
    return _of_product(rows.dropped_weights, rows.value) + of_sum * rows.out.abs()


def _moved(rows: Rows, of_sum: Tensor) -> Float[Tensor, "kv_heads rows keys"]:
    """The errors of dS that follow from the losses of the weights and of delta.

    A kernel sums delta over the head dim of its output, or over the keys.
    """
    slopes = rows.slopes()
    weighted = rows.weights * slopes.dweights
    mass = weighted.abs().sum(dim=-1)
    of_keys = (_of_terms(weighted, mass) + of_sum[..., 0] * mass)[..., None]
    of_dims = (rows.dout.abs() * _of_out(rows, of_sum)).sum(dim=-1, keepdim=True)
    return of_sum * slopes.dscores.abs() + rows.weights * torch.maximum(of_dims, of_keys)


def _sums_of_keys(rows: Rows, of_sum: Tensor, moved: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """A sum over the rows: its terms, their errors, what they are multiplied by, and a factor.

    It is dk if the errors of dS are given, and dv otherwise.
    """
    if moved is not None:
        return rows.slopes().dscores, moved, rows.query, abs(rows.scale)
    return rows.dropped_weights, of_sum * rows.dropped_weights, rows.dout, 1.0


def _of_terms(
    terms: Float[Tensor, "heads sums terms"], total: Float[Tensor, "heads sums"], parts: int = 1
) -> Float[Tensor, "heads sums"]:
    """The most that each sum may lose.

    total: the sums of the absolute values of their terms. parts: the number of query heads whose terms a sum takes, one
    head after another. The grid may change from head to head, so the losses of two heads do not cancel.
    """
    size = terms.abs()
    is_large = size > U * total[..., None]
    of_small = torch.where(is_large, 0.0, size).sum(dim=-1)
    by_chance = bounds.LAMBDA * is_large.sum(dim=-1).sqrt()
    of_equal = torch.zeros_like(total)
    angles = 2.0 * math.pi * (terms / (STEP * total)[..., None])
    # A step that float64 cannot hold is far below the smallest float32 number, and loses nothing.
    counts = is_large & (angles * 2.0**HALVINGS).isfinite()
    points = torch.where(counts, torch.polar(torch.ones_like(angles), angles), 0.0)
    for halved in range(HALVINGS + 1):
        points = points.square() if halved else points  # half a step doubles the angles
        lengths = points.reshape(*total.shape, parts, -1).sum(dim=-1).abs()
        step = STEP * 2.0**-halved * total
        of_equal = torch.maximum(of_equal, step / 2.0 * (lengths.sum(dim=-1) - by_chance))
    return of_small + of_equal


def _of_product(
    left: Float[Tensor, "heads rows length"], right: Float[Tensor, "heads length dim"], parts: int = 1
) -> Float[Tensor, "heads rows dim"]:
    """The most that each sum of left @ right may lose. parts: see `_of_terms`."""
    totals = left.abs() @ right.abs()
    columns = [
        _of_terms(left * right[:, None, :, column], totals[..., column], parts) for column in range(right.shape[-1])
    ]
    return torch.stack(columns, dim=-1)
