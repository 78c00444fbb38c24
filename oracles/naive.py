"""The working oracle: textbook attention in float64, with the forward and the closed-form backward.

The code processes one block of query rows at a time. Its memory is then block x keys, and never queries x keys. The
gradients of keys and values are summed over the blocks. The error of this oracle has a bound like that of any other
implementation, with the claim `bounds.FLOAT64`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashproof.impls.shapes import Bool, Float, Int
from flashproof.oracles.problem import Problem

# The number of scores in each matrix of a block. On a CPU, a matrix of 2 MiB stays in the cache from one step to the
# next. A GPU needs many scores to be busy.
BLOCK_SCORES = {"cpu": 2**18, "cuda": 2**24}
FEWEST_ROWS = 128  # in a block, for any number of keys: products with fewer rows are slow


@dataclass(frozen=True, eq=False)
class Attention:
    """The five result tensors of a kernel, in float64.

    lse is the natural logarithm of the sum of the exponentials of the scaled scores.
    """

    out: Float[Tensor, "batch heads queries dim"]
    lse: Float[Tensor, "batch heads queries"]
    dq: Float[Tensor, "batch heads queries dim"]
    dk: Float[Tensor, "batch kv_heads keys dim"]
    dv: Float[Tensor, "batch kv_heads keys dim"]


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of query rows, with every intermediate result of attention. P is 0 at hidden keys.

    The block covers `kv_heads` key heads of the problem, numbered through the batch. For each key head it holds the
    same rows of `groups` query heads, one head after another. One product with a key head then serves all these query
    heads, and a sum over rows is also a sum over these heads. The block omits the keys after the last key that any of
    its rows sees.
    """

    heads: slice  # the query heads, numbered through the batch
    kv_heads: slice  # the key heads, numbered through the batch
    groups: int  # query heads of each key head in this block
    start: int  # the first row of each head
    stop: int  # one past the last row of each head
    all_keys: int  # the number of keys of the problem, at least `keys`
    query: Float[Tensor, "kv_heads rows dim"]
    key: Float[Tensor, "kv_heads keys dim"]
    value: Float[Tensor, "kv_heads keys dim"]
    value_max: Float[Tensor, "kv_heads 1 dim"]  # the largest |V| over all keys
    scale: float
    visible: Bool[Tensor, "kv_heads_or_1 rows keys"] | None  # None: every row sees every key
    gain: Float[Tensor, "kv_heads rows keys"] | None  # dropout's factor of a weight, 0 or 1/(1-p); None without dropout
    largest_gain: float  # 1/(1-p)
    scores: Float[Tensor, "kv_heads rows keys"]  # S, scaled; 0 at hidden keys
    maximum: Float[Tensor, "kv_heads rows 1"]  # over the visible keys; 0 in a row that sees no key
    weights: Float[Tensor, "kv_heads rows keys"]  # P
    lse: Float[Tensor, "kv_heads rows 1"]  # L
    out: Float[Tensor, "kv_heads rows dim"]
    dout: Float[Tensor, "kv_heads rows dim"]

    @property
    def dropped_weights(self) -> Float[Tensor, "kv_heads rows keys"]:
        """P after dropout."""
        return self.weights if self.gain is None else self.weights * self.gain

    @cached_property
    def sees(self) -> Bool[Tensor, "kv_heads rows 1"]:
        """Whether a row sees at least one key."""
        return self.lse != -math.inf

    @cached_property
    def all_see(self) -> bool:
        """Whether every row sees at least one key."""
        return self.visible is None or bool(self.sees.all())

    def if_sees(self, of_rows: Float[Tensor, "kv_heads rows dim"]) -> Float[Tensor, "kv_heads rows dim"]:
        """These numbers, but 0 in a row that sees no key."""
        return of_rows if self.all_see else torch.where(self.sees, of_rows, 0.0)

    @cached_property
    def finite_lse(self) -> Float[Tensor, "kv_heads rows 1"]:
        """L, but 0 in a row that sees no key."""
        return self.if_sees(self.lse)

    def slopes(self) -> "Slopes":
        """Computes the backward matrices of these rows."""
        dweights = self.dout @ self.value.mT
        if self.gain is not None:
            dweights *= self.gain
        delta = (self.dout * self.out).sum(dim=-1, keepdim=True)
        slope = dweights - delta
        return Slopes(dweights, delta, slope, self.weights * slope)

    def write(
        self, whole: Float[Tensor, "batches all_heads queries *width"], part: Float[Tensor, "kv_heads rows dim"]
    ) -> None:
        """Writes the results of these rows to their place in a tensor of all queries."""
        part = part.reshape(self.heads.stop - self.heads.start, self.stop - self.start, part.shape[-1])
        of_heads = whole.flatten(0, 1)[self.heads, self.start : self.stop]
        of_heads.copy_(part if of_heads.ndim == part.ndim else part.squeeze(-1))

    def add(
        self,
        whole: Float[Tensor, "batches all_kv_heads all_keys dim"],
        of_scores: Float[Tensor, "kv_heads rows keys"],
        of_rows: Float[Tensor, "kv_heads rows dim"],
        factor: float = 1.0,
    ) -> None:
        """Adds factor (of_scores^T of_rows) to a tensor of all keys.

        The code computes the transpose of this product, because BLAS then takes half as long. BLAS also adds it.
        """
        of_keys = whole.flatten(0, 1)[self.kv_heads, : self.key.shape[1]]
        of_keys.mT.baddbmm_(of_rows.mT, of_scores, alpha=factor)


@dataclass(frozen=True, eq=False)
class Slopes:
    """The backward matrices of a block of rows. dS is 0 at hidden keys."""

    dweights: Float[Tensor, "kv_heads rows keys"]  # dP, with dropout's gain
    delta: Float[Tensor, "kv_heads rows 1"]
    slope: Float[Tensor, "kv_heads rows keys"]  # dP - delta
    dscores: Float[Tensor, "kv_heads rows keys"]  # dS


def row_blocks(problem: Problem, block_scores: int | None = None) -> Iterator[Rows]:
    """Yields every block of rows of every head, in order.

    block_scores: the largest number of scores in a block. A block holds at least one whole row, even if the row exceeds
        this number. None chooses a number that suits the device.
    """
    batches, heads, queries, _ = problem.query.shape
    groups, all_keys = problem.groups, problem.key.shape[2]
    if block_scores is None:
        at_once = BLOCK_SCORES["cuda" if problem.query.is_cuda else "cpu"]
        rows_at_once = max(FEWEST_ROWS, at_once // all_keys)
    else:
        at_once, rows_at_once = block_scores, max(1, block_scores // all_keys)
    together = at_once // (groups * queries * all_keys)  # key heads that fit, with all rows of their query heads
    step = groups * together if together else 1
    for first in range(0, batches * heads, step):
        of_heads = slice(first, min(first + step, batches * heads))
        of_kv_heads = slice(first // groups, (of_heads.stop - 1) // groups + 1)
        key, value, value_max = _keys_of(problem, of_kv_heads)
        for start in range(0, queries, rows_at_once):
            stop = min(start + rows_at_once, queries)
            seen = problem.mask.last_seen(stop)
            yield _rows(problem, of_heads, of_kv_heads, slice(start, stop), key[:, :seen], value[:, :seen], value_max)


def rows_of(problem: Problem, batch: int, heads: slice, of_head: slice) -> Rows:
    """Some rows of query heads of one batch entry. The heads share one key head."""
    first = batch * problem.query.shape[1]
    of_heads = slice(first + heads.start, first + heads.stop)
    of_kv_heads = slice(of_heads.start // problem.groups, of_heads.start // problem.groups + 1)
    key, value, value_max = _keys_of(problem, of_kv_heads)
    seen = problem.mask.last_seen(of_head.stop)
    return _rows(problem, of_heads, of_kv_heads, of_head, key[:, :seen], value[:, :seen], value_max)


def _keys_of(problem: Problem, kv_heads: slice) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values of key heads, in float64, and the largest size of a value in each of its columns."""
    key, value = (tensor.flatten(0, 1)[kv_heads].to(torch.float64) for tensor in (problem.key, problem.value))
    return key, value, value.abs().amax(dim=1, keepdim=True)


def heads_of(problem: Problem) -> Iterator[tuple[int, int]]:
    """Every pair of a batch entry and a query head."""
    batches, heads = problem.query.shape[:2]
    return ((batch, head) for batch in range(batches) for head in range(heads))


def head_tensors(problem: Problem, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and dout of one batch entry and one query head, in float64."""
    kv_head = head // problem.groups
    pairs = ((problem.query, head), (problem.key, kv_head), (problem.value, kv_head), (problem.dout, head))
    query, key, value, dout = (tensor[batch, index].to(torch.float64) for tensor, index in pairs)
    return query, key, value, dout


def _rows(
    problem: Problem, heads: slice, kv_heads: slice, of_head: slice, key: Tensor, value: Tensor, value_max: Tensor
) -> Rows:
    """Computes the rows `of_head` of the query heads `heads`, with the keys and values that they may see."""
    count = kv_heads.stop - kv_heads.start

    def grouped(tensor: Tensor) -> Tensor:
        """Reshapes [heads, rows, ...] to [kv_heads, groups x rows, ...]."""
        return tensor.reshape(count, -1, tensor.shape[-1])

    query, dout = (
        grouped(tensor.flatten(0, 1)[heads, of_head].to(torch.float64)) for tensor in (problem.query, problem.dout)
    )
    visible, gain = _visible(problem, heads, of_head, key.shape[1]), None
    if visible is not None:
        # A mask that all heads share is repeated only for the query heads of one group.
        visible = grouped(visible) if len(visible) > 1 else visible.repeat(1, (heads.stop - heads.start) // count, 1)
    largest_gain = 1.0 / (1.0 - problem.dropout.p)
    if problem.dropout.p:
        gain = grouped(_kept(problem, heads, of_head, key.shape[1])).to(torch.float64) * largest_gain

    scores = (query @ key.mT).mul_(problem.scale)
    hidden = None if visible is None else ~visible
    shown = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    maximum = shown.amax(dim=-1, keepdim=True)
    empty = maximum == -math.inf
    maximum = maximum.masked_fill(empty, 0.0)
    weights = (shown - maximum).exp_()
    if hidden is not None:
        scores.masked_fill_(hidden, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    weights /= total.masked_fill(empty, 1.0)
    return Rows(
        heads=heads,
        kv_heads=kv_heads,
        groups=(heads.stop - heads.start) // count,
        start=of_head.start,
        stop=of_head.stop,
        all_keys=problem.key.shape[2],
        query=query,
        key=key,
        value=value,
        value_max=value_max,
        scale=problem.scale,
        visible=visible,
        gain=gain,
        largest_gain=largest_gain,
        scores=scores,
        maximum=maximum,
        weights=weights,
        lse=maximum + torch.log(total),
        out=(weights if gain is None else weights * gain) @ value,
        dout=dout,
    )


def _visible(problem: Problem, heads: slice, of_head: slice, keys: int) -> Bool[Tensor, "heads_or_1 rows keys"] | None:
    """Which of the first `keys` keys the rows of some heads see. None: every key."""
    mask, device = problem.mask, problem.query.device
    if mask.causal is None and mask.blocks is None:
        return None
    positions = torch.arange(of_head.start, of_head.stop, device=device)
    if mask.is_one_for_all_heads:
        return mask.visible(0, 0, positions, keys)[None]
    return mask.visible(*_batches_and_heads(problem, heads), positions, keys).expand(heads.stop - heads.start, -1, -1)


def _kept(problem: Problem, heads: slice, of_head: slice, keys: int) -> Bool[Tensor, "heads rows keys"]:
    """Which weights of the rows of some heads dropout keeps."""
    positions = torch.arange(of_head.start, of_head.stop, device=problem.query.device)
    return problem.dropout.kept(*_batches_and_heads(problem, heads), positions, keys)


def _batches_and_heads(problem: Problem, heads: slice) -> tuple[Int[Tensor, " heads"], Int[Tensor, " heads"]]:
    """The batch entry and the query head of each of `heads`, which are numbered through the batch."""
    numbers = torch.arange(heads.start, heads.stop, device=problem.query.device)
    return numbers // problem.query.shape[1], numbers % problem.query.shape[1]


def attention(problem: Problem, block_scores: int | None = None) -> Attention:
    """Computes attention and its gradients in float64, on the device of the problem.

    `bounds.bounds(problem, bounds.FLOAT64)` bounds the error of each element.
    """
    answer = empty_answer(problem)
    for rows in row_blocks(problem, block_scores):
        add_rows(answer, rows, rows.slopes())
    return answer


def empty_answer(problem: Problem) -> Attention:
    """Zeros in the shapes of an answer, for `add_rows` to fill."""

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=torch.float64, device=like.device)

    of_keys = [zeros_of_keys(problem, problem.key.shape[3]) for _ in range(2)]
    return Attention(zeros(problem.query), zeros(problem.query[..., 0]), zeros(problem.query), *of_keys)


def zeros_of_keys(problem: Problem, width: int) -> Float[Tensor, "batches all_kv_heads all_keys width"]:
    """Zeros for `Rows.add`, in the memory layout of the product that it adds.

    The elements of neighbouring keys are neighbours in memory.
    """
    batches, kv_heads, keys, _ = problem.key.shape
    return torch.zeros((batches, kv_heads, width, keys), dtype=torch.float64, device=problem.key.device).mT


def add_rows(answer: Attention, rows: Rows, slopes: Slopes | None) -> None:
    """Writes a block of rows to the answer, and adds the contribution of the block to dK and dV.

    The contributions of grouped heads are summed. slopes: None for the forward only.
    """
    rows.write(answer.out, rows.out)
    rows.write(answer.lse, rows.lse)
    if slopes is None:
        return
    rows.write(answer.dq, rows.scale * (slopes.dscores @ rows.key))
    rows.add(answer.dk, slopes.dscores, rows.query, rows.scale)
    rows.add(answer.dv, rows.dropped_weights, rows.dout)
