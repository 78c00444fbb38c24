"""Textbook attention in float64, forward and closed-form backward: the working oracle.

Long sequences are taken a block of query rows at a time, so that memory is block x keys and never queries x keys; the gradients of keys and
values are summed over the blocks. Its own error is bounded like any other implementation's, with the claim `bounds.FLOAT64`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flashproof.oracles.problem import Problem

BLOCK_SCORES = 2**22  # scores held at once: 32 MiB in float64


@dataclass(frozen=True, eq=False)
class Attention:
    """The five tensors that a kernel answers with, in float64. lse is the natural logarithm of the sum of the exponentials of the scaled scores."""

    out: Float[Tensor, "batch heads queries dim"]
    lse: Float[Tensor, "batch heads queries"]
    dq: Float[Tensor, "batch heads queries dim"]
    dk: Float[Tensor, "batch kv_heads keys dim"]
    dv: Float[Tensor, "batch kv_heads keys dim"]


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of query rows of one batch and head, with everything that attention computes on the way. P and dS are 0 at hidden keys."""

    batch: int
    head: int
    start: int
    query: Float[Tensor, "rows dim"]
    key: Float[Tensor, "keys dim"]
    value: Float[Tensor, "keys dim"]
    dout: Float[Tensor, "rows dim"]
    scale: float
    visible: Bool[Tensor, "rows keys"]
    gain: Float[Tensor, "rows keys"] | None  # what dropout multiplies a weight by: 0 or 1/(1-p); None without dropout
    scores: Float[Tensor, "rows keys"]  # S, scaled; 0 at hidden keys
    maximum: Float[Tensor, "rows 1"]  # over visible keys; 0 in a row that sees none
    weights: Float[Tensor, "rows keys"]  # P
    lse: Float[Tensor, " rows"]  # L
    out: Float[Tensor, "rows dim"]
    dweights: Float[Tensor, "rows keys"]  # dP, with dropout's gain
    delta: Float[Tensor, "rows 1"]
    dscores: Float[Tensor, "rows keys"]  # dS

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + len(self.query)

    @property
    def dropped_weights(self) -> Float[Tensor, "rows keys"]:
        """P after dropout."""
        return self.weights if self.gain is None else self.weights * self.gain


def row_blocks(problem: Problem, block_scores: int = BLOCK_SCORES) -> Iterator[Rows]:
    """Every block of rows of every batch and head, in order."""
    for batch, head in heads_of(problem):
        query, key, value, dout = head_tensors(problem, batch, head)
        size = max(1, min(len(query), block_scores // len(key)))
        for start in range(0, len(query), size):
            yield _rows(problem, batch, head, start, query[start : start + size], key, value, dout[start : start + size])


def heads_of(problem: Problem) -> Iterator[tuple[int, int]]:
    """Every (batch, query head)."""
    batches, heads = problem.query.shape[:2]
    return ((batch, head) for batch in range(batches) for head in range(heads))


def head_tensors(problem: Problem, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and dout of one batch and query head, in float64."""
    kv_head = head // problem.groups
    pairs = ((problem.query, head), (problem.key, kv_head), (problem.value, kv_head), (problem.dout, head))
    query, key, value, dout = (tensor[batch, index].to(torch.float64) for tensor, index in pairs)
    return query, key, value, dout


def _rows(problem: Problem, batch: int, head: int, start: int, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Rows:
    positions = torch.arange(start, start + len(query), device=query.device)
    visible = problem.mask.visible(batch, head, positions)
    gain = None
    if problem.dropout.p:
        gain = problem.dropout.kept(batch, head, positions, len(key)).to(torch.float64) / (1.0 - problem.dropout.p)

    scores = problem.scale * (query @ key.T)
    maximum = scores.masked_fill(~visible, -math.inf).amax(dim=1, keepdim=True)
    empty = maximum == -math.inf
    maximum = maximum.masked_fill(empty, 0.0)
    exponentials = torch.exp(scores - maximum).masked_fill(~visible, 0.0)
    total = exponentials.sum(dim=1, keepdim=True)
    weights = exponentials / total.masked_fill(empty, 1.0)
    lse = (maximum + torch.log(total)).squeeze(1)
    out = (weights if gain is None else weights * gain) @ value

    dweights = dout @ value.T
    if gain is not None:
        dweights = dweights * gain
    delta = (dout * out).sum(dim=1, keepdim=True)
    return Rows(
        batch=batch,
        head=head,
        start=start,
        query=query,
        key=key,
        value=value,
        dout=dout,
        scale=problem.scale,
        visible=visible,
        gain=gain,
        scores=scores.masked_fill(~visible, 0.0),
        maximum=maximum,
        weights=weights,
        lse=lse,
        out=out,
        dweights=dweights,
        delta=delta,
        dscores=weights * (dweights - delta),
    )


def attention(problem: Problem, block_scores: int = BLOCK_SCORES) -> Attention:
    """Attention and its gradients in float64, on the device of the problem. The worst-case error is `bounds.bounds(problem, FLOAT64)`."""
    answer = empty_answer(problem)
    for rows in row_blocks(problem, block_scores):
        add_rows(answer, rows, problem.groups)
    return answer


def empty_answer(problem: Problem) -> Attention:
    """Zeros in the shape of an answer, for `add_rows` to fill."""

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=torch.float64, device=like.device)

    return Attention(zeros(problem.query), zeros(problem.query[..., 0]), zeros(problem.query), zeros(problem.key), zeros(problem.key))


def add_rows(answer: Attention, rows: Rows, groups: int) -> None:
    """Writes a block of rows into the answer, and adds its share of dK and dV: grouped heads sum theirs."""
    here = (rows.batch, rows.head, slice(rows.start, rows.stop))
    there = (rows.batch, rows.head // groups)
    answer.out[here] = rows.out
    answer.lse[here] = rows.lse
    answer.dq[here] = rows.scale * (rows.dscores @ rows.key)
    answer.dk[there] += rows.scale * (rows.dscores.T @ rows.query)
    answer.dv[there] += rows.dropped_weights.T @ rows.dout
