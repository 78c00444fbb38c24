"""What float32 sums lose because some of their terms are too small.

The probabilistic bound (`bounds`) takes the roundings of a sum for independent. This is wrong for a term below half a
unit in the last place of the running sum: the addition loses the whole term, and the next one, always with the same
sign. A key with one large weight and thousands of tiny ones has such sums. Their error is far inside the deterministic
bound, but may exceed the probabilistic one.

No addition loses more than its term. So a sum loses at most the sum of those of its terms that are at most u times the
sum of the absolute values of all terms. This amount is added to the probabilistic bound.

The amounts take a pass over all scores for each column of the head dim. Only a result outside the probabilistic bound
and inside the deterministic one needs them.

Source: Croci, Fasi, Higham, Mary and Mikaitis, Royal Society Open Science 9:211631, 2022 (stagnation); Higham and Mary,
SIAM J. Sci. Comput. 41(5), 2019 (the assumptions of the probabilistic bound).
"""

import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles import bounds, naive
from flashproof.oracles.naive import Attention, Rows
from flashproof.oracles.problem import Problem

U = bounds.output_roundoff(torch.float32)


def lost(problem: Problem, *, backward: bool = True) -> Attention:
    """The most that each element may lose to terms that are too small, in float64, to first order.

    backward: whether to compute it for the gradients too. Otherwise theirs are 0.
    """
    found = naive.empty_answer(problem)
    whole_heads = problem.groups * problem.query.shape[2] * problem.key.shape[2]
    for rows in naive.row_blocks(problem, whole_heads):
        _add(found, rows, backward=backward)
    return found


def _add(found: Attention, rows: Rows, *, backward: bool) -> None:
    """Adds what the sums of some heads lose. The rows are all rows of these heads."""
    dropped, value, dout = rows.dropped_weights, rows.value.abs(), rows.dout.abs()
    # The sum of the weights loses `of_sum`. The LSE and every weight are off by this share.
    of_sum = _small(rows.weights, rows.weights.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True)
    out = _of_product(dropped, value) + of_sum * rows.out.abs()
    rows.write(found.out, out)
    rows.write(found.lse, of_sum)
    if not backward:
        return
    slopes = rows.slopes()
    weighted = (rows.weights * slopes.dweights).abs_()
    mass = weighted.sum(dim=-1, keepdim=True)
    # A kernel sums delta over the head dim of its output, or over the keys.
    delta = torch.maximum(
        (dout * out).sum(dim=-1, keepdim=True), _small(weighted, mass).sum(dim=-1, keepdim=True) + of_sum * mass
    )
    dscores, query, key = slopes.dscores.abs(), rows.query.abs(), rows.key.abs()
    moved = of_sum * dscores + rows.weights * delta
    scale = abs(rows.scale)
    rows.write(found.dq, scale * (_of_product(dscores, key) + moved @ key))
    of_keys = ((found.dk, scale, dscores, moved, query), (found.dv, 1.0, dropped, of_sum * dropped, dout))
    for whole, factor, terms, off, of_rows in of_keys:
        rows.add(whole, off, of_rows, factor)
        mine = whole.flatten(0, 1)[rows.kv_heads, : terms.shape[-1]]
        mine.add_(_of_product(terms.mT, of_rows), alpha=factor)


def _small(terms: Tensor, total: Tensor) -> Tensor:
    """The terms that a sum may lose; 0 in place of the others."""
    return torch.where(terms <= U * total, terms, 0.0)


def _of_product(
    left: Float[Tensor, "heads rows length"], right: Float[Tensor, "heads length dim"]
) -> Float[Tensor, "heads rows dim"]:
    """What the sums of left @ right may lose. Both are absolute values."""
    totals = left @ right
    columns = []
    for column in range(right.shape[-1]):
        terms = left * right[:, None, :, column]
        columns.append(_small(terms, totals[..., column, None]).sum(dim=-1))
    return torch.stack(columns, dim=-1)
