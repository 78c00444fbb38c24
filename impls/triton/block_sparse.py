"""Block-sparse FlashAttention in Triton: FlashAttention-2 over a block mask (Dao et al., "FlashAttention", NeurIPS 2022, section 3.3 and Algorithm 5).

What changed against FlashAttention-2: a mask has one entry for each block of 128 x 128 scores, and the loops run over lists of blocks instead of a range.
For each row of blocks there is a list: first the blocks that are seen whole, which are computed without a mask, then the partial ones, which the diagonal
or the tensor's end cuts. Blocks that are hidden, by the block mask or by the causal one, are on no list. dK and dV go over the transposed lists. Lists are
made on the device, without waiting for it. Tiles divide 128, so a tile lies in one row and one column of blocks.

The rest is FlashAttention-2's: statistics on chip, one division, LSE = m + log l, a deterministic backward of two kernels that recompute the weights. So is the
arithmetic: 2^((s - m) c) in the forward, one explicit fma for S - L in the backward.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from impls.call import BLOCK, Call, check_call
from impls.spec import Alignment, Arithmetic, Device, Dtype, Implementation, Supports
from impls.triton.primitives import (
    INFINITY,
    INTERPRETED,
    LOG2_E,
    Launch,
    Scale,
    device_function,
    dot,
    head_of,
    kept,
    kernel,
    load_tile,
    missing,
    padded_dim,
    rounded,
    store_tile,
    tile_at,
    times_sign,
    with_strides,
)

SIDE = tl.constexpr(BLOCK)  # of a block: 128 queries by 128 keys

# ------------------------------------------------------------------------------------------------------------------------------ tiles


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one step, and how the kernel that takes such steps is compiled."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels that have a loop."""

    forward: Tile
    dkey_dvalue: Tile
    dquery: Tile


# On a GPU, by the bits of the dtype and the largest head dim: no register spilled up to dim 128 on sm_80, sm_90 and sm_100, shared memory within the
# 163 KB of sm_80. float32 products run on the plain units, whose operands pass through registers.
TILES = {
    (16, 64): Tiles(forward=Tile(128, 64, 8, 3), dkey_dvalue=Tile(64, 64, 8, 2), dquery=Tile(128, 32, 8, 2)),
    (16, 128): Tiles(forward=Tile(128, 32, 8, 2), dkey_dvalue=Tile(32, 64, 8, 2), dquery=Tile(128, 32, 8, 2)),
    (16, 256): Tiles(forward=Tile(64, 32, 4, 2), dkey_dvalue=Tile(32, 32, 8, 2), dquery=Tile(64, 32, 8, 2)),
    (32, 64): Tiles(forward=Tile(64, 32, 8, 2), dkey_dvalue=Tile(32, 32, 8, 2), dquery=Tile(64, 32, 8, 2)),
    (32, 128): Tiles(forward=Tile(32, 32, 8, 1), dkey_dvalue=Tile(16, 32, 8, 2), dquery=Tile(32, 16, 8, 2)),
    (32, 256): Tiles(forward=Tile(16, 16, 8, 1), dkey_dvalue=Tile(16, 16, 8, 1), dquery=Tile(16, 16, 8, 1)),
}
# With dropout in 16 bit, up to dim 128: the ten rounds of Philox need registers of their own.
DROPOUT_TILES = Tiles(forward=Tile(128, 32, 8, 3), dkey_dvalue=Tile(32, 64, 8, 2), dquery=Tile(64, 32, 8, 2))
# Interpreted, a step takes as long whatever its size, so one large tile serves all. Its sides differ, so that the diagonal cuts it in more ways than one.
INTERPRETED_TILES = Tiles(forward=Tile(128, 64, 4, 1), dkey_dvalue=Tile(64, 128, 4, 1), dquery=Tile(128, 64, 4, 1))


def tiles(dtype: torch.dtype, dim: int, dropout: bool, interpreted: bool = INTERPRETED.value) -> Tiles:
    """The tiles for a dtype and head dim. The batch and the lengths have no say, so a slice of a batch is computed as it is in the batch."""
    if interpreted:
        return INTERPRETED_TILES
    if dropout and dtype.itemsize == 2 and dim <= 128:
        return DROPOUT_TILES
    return TILES[8 * dtype.itemsize, max(64, padded_dim(dim))]


# ------------------------------------------------------------------------------------------------------------------------------ lists


def visible_blocks(call: Call, block_mask: Tensor | None, device: torch.device) -> Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"]:
    """The blocks in which some query may see some key, by the block mask and by the causal one."""
    first_query, first_key = _corners(call, device)
    last_query = torch.clamp(first_query + BLOCK, max=call.queries) - 1
    reached = first_key <= last_query + call.offset
    if not call.is_causal:
        reached = torch.ones_like(reached)
    return reached[None, None] if block_mask is None else block_mask & reached


def lists_of_keys(call: Call, visible: Tensor) -> Int[Tensor, "batch_or_1 heads_or_1 query_blocks 2+key_blocks"]:
    """For each block of queries, the blocks of keys that it sees. Partial: cut by the diagonal or by the end of the keys."""
    first_query, first_key = _corners(call, visible.device)
    whole = first_key + BLOCK <= call.keys
    if call.is_causal:
        whole = whole & (first_key + BLOCK - 1 <= first_query + call.offset)
    return _lists(visible, visible & whole)


def lists_of_queries(call: Call, visible: Tensor) -> Int[Tensor, "batch_or_1 heads_or_1 key_blocks 2+query_blocks"]:
    """For each block of keys, the blocks of queries that see it. Partial: cut by the diagonal or by the end of the queries."""
    first_query, first_key = _corners(call, visible.device)
    whole = first_query + BLOCK <= call.queries
    if call.is_causal:
        whole = whole & (first_key + BLOCK - 1 <= first_query + call.offset)
    return _lists(visible.mT, (visible & whole).mT)


def _corners(call: Call, device: torch.device) -> tuple[Int[Tensor, "query_blocks 1"], Int[Tensor, "1 key_blocks"]]:
    """The first query and the first key of each block."""
    first_query = torch.arange(0, call.queries, BLOCK, device=device)
    first_key = torch.arange(0, call.keys, BLOCK, device=device)
    return first_query[:, None], first_key[None, :]


def _lists(visible: Tensor, whole: Tensor) -> Tensor:
    """Along the last dimension: how many blocks are seen whole, how many are seen at all, then their numbers, the whole ones first."""
    rank = 2 - visible.to(torch.int32) - whole.to(torch.int32)
    order = torch.argsort(rank, dim=-1, stable=True)
    return torch.cat((whole.sum(-1, keepdim=True), visible.sum(-1, keepdim=True), order), dim=-1).to(torch.int32)


def list_arguments(lists: Tensor) -> dict[str, Any]:
    """A kernel's arguments for lists [1 or batch, 1 or heads, rows, 2 + blocks]; a size of 1 is read by every batch or head."""
    strides = [stride if size > 1 else 0 for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)]
    return {"lists": lists, "lists_strides": (*strides, lists.stride(2))}


@device_function
def list_at(lists, strides, batch, head, row, LENGTH: tl.constexpr):
    """The list of the row of blocks in which row `row` of the tensor lies: where it starts, and its steps of LENGTH in whole blocks and in all."""
    counts = lists + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + tl.cast(row // SIDE, tl.int64) * strides[2]
    return counts + 2, tl.load(counts) * (SIDE // LENGTH), tl.load(counts + 1) * (SIDE // LENGTH)


@device_function
def tile_of_list(blocks, step, LENGTH: tl.constexpr):
    """The first row of the tile of LENGTH rows that is taken at a step: each block of the list makes 128 / LENGTH steps."""
    place = step // (SIDE // LENGTH)
    return (tl.load(blocks + place) - place) * SIDE + step * LENGTH


# ---------------------------------------------------------------------------------------------------------------------------- forward


@device_function
def attend(
    accumulator, maximum, total,  # [QUERIES, PADDED_DIM], [QUERIES], [QUERIES]: the output so far, undivided; the largest score; the sum of weights
    q, query_at, key, key_tile, key_row, value, value_tile, value_row, blocks,
    first, last, keys, offset, exponent_scale, seed, last_dropped, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Takes the steps from `first` to `last` of a list of key blocks into the running output, maximum and sum.

    MASKED: some keys of these blocks may be hidden, or lie past the end.
    """
    for step in tl.range(first, last):
        first_key = tile_of_list(blocks, step, KEYS)
        k = load_tile(key + first_key * key_row + key_tile, first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
        scores = dot(q, tl.trans(k))  # [QUERIES, KEYS]
        if MASKED:
            key_at = first_key + tl.arange(0, KEYS)
            visible = (key_at < keys)[None, :]
            if CAUSAL:
                visible = visible & (key_at[None, :] <= query_at[:, None] + offset)
            scores = tl.where(visible, scores, -INFINITY)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet: -inf stays its maximum, but is not subtracted from -inf.
        subtracted = tl.where(new_maximum == -INFINITY, 0.0, new_maximum) if MASKED else new_maximum
        weights = tl.exp2((scores - subtracted[:, None]) * exponent_scale)
        rescale = tl.exp2((maximum - subtracted) * exponent_scale)
        maximum = new_maximum
        total = total * rescale + tl.sum(weights, 1)
        if DROPOUT:
            key_at = first_key + tl.arange(0, KEYS)
            weights = tl.where(kept(seed, last_dropped, batch, head, query_at[:, None], key_at[None, :]), weights, 0.0)
        v = load_tile(value + first_key * value_row + value_tile, first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
        accumulator = dot(rounded(weights, v.dtype), v, accumulator * rescale[:, None])
    return accumulator, maximum, total


@kernel
def forward_kernel(
    query, key, value, out, lse, lists,
    query_strides, key_strides, value_strides, out_strides, lists_strides,
    heads, groups, queries, keys, offset,
    magnitude, exponent_scale,  # |scale|, |scale| log2 e
    seed: tl.uint64, last_dropped: tl.uint32, kept_scale,  # dropout: the seed, the largest word that drops a weight, 1 / (1 - p)
    SIGN: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of QUERIES queries of one head: its output and LSE."""
    tiles = (queries + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    first_query = (tiles - 1 - program % tiles) * QUERIES  # the last query tile first: with a causal mask it has the most to do
    head = program // tiles % heads
    batch = program // tiles // heads
    query_at = first_query + tl.arange(0, QUERIES)

    query = tile_at(query, query_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    key, key_tile, key_row = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    value, value_tile, value_row = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    q = load_tile(query, first_query, queries, DIM, QUERIES, PADDED_DIM, True)
    q = times_sign(q, SIGN)  # [QUERIES, PADDED_DIM]

    blocks, full, end = list_at(lists, lists_strides, batch, head, first_query, KEYS)

    maximum = tl.full([QUERIES], -INFINITY, tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    accumulator = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    accumulator, maximum, total = attend(
        accumulator, maximum, total, q, query_at, key, key_tile, key_row, value, value_tile, value_row, blocks,
        0, full, keys, offset, exponent_scale, seed, last_dropped, batch, head,
        False, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip
    accumulator, maximum, total = attend(
        accumulator, maximum, total, q, query_at, key, key_tile, key_row, value, value_tile, value_row, blocks,
        full, end, keys, offset, exponent_scale, seed, last_dropped, batch, head,
        True, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip

    # A row that saw no key has maximum -inf and total 0: its LSE is -inf by itself, and its output 0 / 1.
    lse += (batch.to(tl.int64) * heads + head) * queries
    tl.store(lse + query_at, tl.fma(maximum, magnitude, tl.log(total)), mask=query_at < queries)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = tile_at(out, out_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    store_tile(out, tl.div_rn(accumulator, divisor[:, None]) * kept_scale, first_query, queries, DIM, QUERIES, PADDED_DIM)


# --------------------------------------------------------------------------------------------------------------------------- backward


@kernel
def delta_kernel(
    out, dout, delta,
    out_strides, dout_strides,
    heads, queries,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO o O) for QUERIES queries of one head, in float32. dO has strides of its own."""
    tiles = (queries + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    first_query = program % tiles * QUERIES
    head = program // tiles % heads
    batch = program // tiles // heads
    query_at = first_query + tl.arange(0, QUERIES)
    out = tile_at(out, out_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    dout = tile_at(dout, dout_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    o = load_tile(out, first_query, queries, DIM, QUERIES, PADDED_DIM, True).to(tl.float32)
    do = load_tile(dout, first_query, queries, DIM, QUERIES, PADDED_DIM, True).to(tl.float32)
    delta += (batch.to(tl.int64) * heads + head) * queries
    tl.store(delta + query_at, tl.sum(o * do, 1), mask=query_at < queries)


@device_function
def exponential(scores, lse, magnitude):
    """P = exp(magnitude scores - lse), in which an lse of -inf means an empty row, all of whose weights are 0.

    No weight is above 1. For huge scores the rounding of the stored LSE may say otherwise (half an ulp of 1e10 is 512): the minimum keeps it from overflowing.
    """
    lse = tl.where(lse == -INFINITY, INFINITY, lse)
    return tl.exp2(tl.minimum(tl.fma(scores, magnitude, -lse), 0.0) * LOG2_E)


@device_function
def gradients_of_keys(
    dk, dv, k, v, key_at, query, query_tile, query_row, dout, dout_tile, dout_row, lse, delta,
    first_query, queries, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Adds what one tile of queries gives to dK / scale and to dV / kept_scale. Scores stand transposed here, [KEYS, QUERIES]: P^T and dS^T are left operands.

    MASKED: some queries may lie before the diagonal, or past the end, where lse = inf makes P zero. Keys past the end need no mask: they have rows of
    their own, finite and never stored.
    """
    query_at = first_query + tl.arange(0, QUERIES)
    q = load_tile(query + first_query * query_row + query_tile, first_query, queries, DIM, QUERIES, PADDED_DIM, MASKED)
    do = load_tile(dout + first_query * dout_row + dout_tile, first_query, queries, DIM, QUERIES, PADDED_DIM, MASKED)
    if MASKED:
        row_lse = tl.load(lse + query_at, mask=query_at < queries, other=INFINITY)
        row_delta = tl.load(delta + query_at, mask=query_at < queries, other=0.0)
    else:
        row_lse = tl.load(lse + query_at)
        row_delta = tl.load(delta + query_at)

    scores = dot(k, tl.trans(q))  # [KEYS, QUERIES]
    if MASKED and CAUSAL:
        visible = key_at[:, None] <= query_at[None, :] + offset
        scores = tl.where(visible, scores, -INFINITY)
    p = exponential(scores, row_lse[None, :], magnitude)
    dp = dot(v, tl.trans(do))
    if DROPOUT:
        keeps = kept(seed, last_dropped, batch, head, query_at[None, :], key_at[:, None])
        dv = dot(rounded(tl.where(keeps, p, 0.0), do.dtype), do, dv)
        dp = tl.where(keeps, dp * kept_scale, 0.0)
    else:
        dv = dot(rounded(p, do.dtype), do, dv)
    ds = p * (dp - row_delta[None, :])
    if MASKED and CAUSAL:
        ds = tl.where(visible, ds, 0.0)  # where a hidden value is so large that dP is infinite, 0 inf is not 0
    dk = dot(rounded(ds, q.dtype), q, dk)
    return dk, dv


@kernel
def dkey_dvalue_kernel(
    query, key, value, dout, lse, delta, dkey, dvalue, lists,
    query_strides, key_strides, value_strides, dout_strides, dkey_strides, dvalue_strides, lists_strides,
    kv_heads, groups, queries, keys, offset,
    scale, magnitude, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    SIGN: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of KEYS keys of one key head, summed over the queries of all query heads that share it."""
    tiles = (keys + KEYS - 1) // KEYS
    program = tl.program_id(0)
    first_key = program % tiles * KEYS
    kv_head = program // tiles % kv_heads
    batch = program // tiles // kv_heads
    key_at = first_key + tl.arange(0, KEYS)

    key = tile_at(key, key_strides, batch, kv_head, first_key, KEYS, PADDED_DIM, WIDE, UNIT)
    value = tile_at(value, value_strides, batch, kv_head, first_key, KEYS, PADDED_DIM, WIDE, UNIT)
    k = times_sign(load_tile(key, first_key, keys, DIM, KEYS, PADDED_DIM, True), SIGN)  # [KEYS, PADDED_DIM]
    v = load_tile(value, first_key, keys, DIM, KEYS, PADDED_DIM, True)

    dk = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    dv = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    for member in tl.range(groups):
        head = kv_head * groups + member
        q_head, q_tile, q_row = head_of(query, query_strides, batch, head, QUERIES, PADDED_DIM, WIDE, UNIT)
        do_head, do_tile, do_row = head_of(dout, dout_strides, batch, head, QUERIES, PADDED_DIM, WIDE, UNIT)
        first_row = (batch.to(tl.int64) * (kv_heads * groups) + head) * queries
        blocks, full, end = list_at(lists, lists_strides, batch, head, first_key, QUERIES)
        for step in tl.range(0, full):
            first_query = tile_of_list(blocks, step, QUERIES)
            dk, dv = gradients_of_keys(
                dk, dv, k, v, key_at, q_head, q_tile, q_row, do_head, do_tile, do_row, lse + first_row, delta + first_row,
                first_query, queries, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
                False, CAUSAL, DROPOUT, DIM, PADDED_DIM, QUERIES,
            )  # fmt: skip
        for step in tl.range(full, end):
            first_query = tile_of_list(blocks, step, QUERIES)
            dk, dv = gradients_of_keys(
                dk, dv, k, v, key_at, q_head, q_tile, q_row, do_head, do_tile, do_row, lse + first_row, delta + first_row,
                first_query, queries, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
                True, CAUSAL, DROPOUT, DIM, PADDED_DIM, QUERIES,
            )  # fmt: skip
    dkey = tile_at(dkey, dkey_strides, batch, kv_head, first_key, KEYS, PADDED_DIM, WIDE, UNIT)
    dvalue = tile_at(dvalue, dvalue_strides, batch, kv_head, first_key, KEYS, PADDED_DIM, WIDE, UNIT)
    store_tile(dkey, dk * scale, first_key, keys, DIM, KEYS, PADDED_DIM)
    store_tile(dvalue, dv * kept_scale, first_key, keys, DIM, KEYS, PADDED_DIM)


@device_function
def gradients_of_queries(
    dq, q, do, row_lse, row_delta, query_at, key, key_tile, key_row, value, value_tile, value_row, blocks,
    first, last, keys, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds what the steps from `first` to `last` of a list of key blocks give to dQ / scale. MASKED: some of these keys may be hidden, or lie past the end.

    A key past the end is loaded as 0 and would score 0, which is far above an LSE of -100: its weight has to be masked, not only its key.
    """
    for step in tl.range(first, last):
        first_key = tile_of_list(blocks, step, KEYS)
        k = load_tile(key + first_key * key_row + key_tile, first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
        v = load_tile(value + first_key * value_row + value_tile, first_key, keys, DIM, KEYS, PADDED_DIM, MASKED)
        key_at = first_key + tl.arange(0, KEYS)
        scores = dot(q, tl.trans(k))  # [QUERIES, KEYS]
        if MASKED:
            visible = (key_at < keys)[None, :]
            if CAUSAL:
                visible = visible & (key_at[None, :] <= query_at[:, None] + offset)
            scores = tl.where(visible, scores, -INFINITY)
        p = exponential(scores, row_lse[:, None], magnitude)
        dp = dot(do, tl.trans(v))
        if DROPOUT:
            dp = tl.where(kept(seed, last_dropped, batch, head, query_at[:, None], key_at[None, :]), dp * kept_scale, 0.0)
        ds = p * (dp - row_delta[:, None])
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        dq = dot(rounded(ds, k.dtype), k, dq)
    return dq


@kernel
def dquery_kernel(
    query, key, value, dout, lse, delta, dquery, lists,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides, lists_strides,
    heads, groups, queries, keys, offset,
    scale, magnitude, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    SIGN: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of QUERIES queries of one head; the loops are the forward's."""
    tiles = (queries + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    first_query = (tiles - 1 - program % tiles) * QUERIES
    head = program // tiles % heads
    batch = program // tiles // heads
    query_at = first_query + tl.arange(0, QUERIES)

    query = tile_at(query, query_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    dout = tile_at(dout, dout_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    key, key_tile, key_row = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    value, value_tile, value_row = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    q = times_sign(load_tile(query, first_query, queries, DIM, QUERIES, PADDED_DIM, True), SIGN)  # [QUERIES, PADDED_DIM]
    do = load_tile(dout, first_query, queries, DIM, QUERIES, PADDED_DIM, True)
    first_row = (batch.to(tl.int64) * heads + head) * queries
    row_lse = tl.load(lse + first_row + query_at, mask=query_at < queries, other=INFINITY)
    row_delta = tl.load(delta + first_row + query_at, mask=query_at < queries, other=0.0)

    blocks, full, end = list_at(lists, lists_strides, batch, head, first_query, KEYS)

    dq = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    dq = gradients_of_queries(
        dq, q, do, row_lse, row_delta, query_at, key, key_tile, key_row, value, value_tile, value_row, blocks,
        0, full, keys, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
        False, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip
    dq = gradients_of_queries(
        dq, q, do, row_lse, row_delta, query_at, key, key_tile, key_row, value, value_tile, value_row, blocks,
        full, end, keys, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
        True, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip
    dquery = tile_at(dquery, dquery_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    store_tile(dquery, dq * scale, first_query, queries, DIM, QUERIES, PADDED_DIM)


# --------------------------------------------------------------------------------------------------------------------------- launches


def forward_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, lists: Tensor) -> Launch:
    """One program for each tile of queries of each head. Fills out and lse."""
    tile = tiles(query.dtype, call.dim, call.dropout_p > 0.0).forward
    arguments = with_strides(query=query, key=key, value=value, out=out) | list_arguments(lists)
    arguments |= {"lse": lse, "heads": call.heads, "exponent_scale": Scale.of(call.scale).exponent}
    return _launch(forward_kernel, call, tile, triton.cdiv(call.queries, tile.queries) * call.heads * call.batch, arguments)


def delta_launch(call: Call, out: Tensor, dout: Tensor, delta: Tensor) -> Launch:
    """One program for each 16 queries of each head. Fills delta."""
    arguments = with_strides(out=out, dout=dout) | {"delta": delta, "heads": call.heads, "queries": call.queries}
    constants = {"DIM": call.dim, "PADDED_DIM": padded_dim(call.dim), "QUERIES": 16}
    return Launch(delta_kernel, (triton.cdiv(call.queries, 16) * call.heads * call.batch,), arguments | constants, num_warps=4, num_stages=1)


def dkey_dvalue_launch(
    call: Call, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dkey: Tensor, dvalue: Tensor, lists: Tensor
) -> Launch:
    """One program for each tile of keys of each key head. Fills dkey and dvalue."""
    tile = tiles(query.dtype, call.dim, call.dropout_p > 0.0).dkey_dvalue
    arguments = with_strides(query=query, key=key, value=value, dout=dout, dkey=dkey, dvalue=dvalue) | list_arguments(lists)
    arguments |= {"lse": lse, "delta": delta, "kv_heads": call.kv_heads, "scale": call.scale}
    return _launch(dkey_dvalue_kernel, call, tile, triton.cdiv(call.keys, tile.keys) * call.kv_heads * call.batch, arguments)


def dquery_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dquery: Tensor, lists: Tensor) -> Launch:
    """One program for each tile of queries of each head. Fills dquery."""
    tile = tiles(query.dtype, call.dim, call.dropout_p > 0.0).dquery
    arguments = with_strides(query=query, key=key, value=value, dout=dout, dquery=dquery) | list_arguments(lists)
    arguments |= {"lse": lse, "delta": delta, "heads": call.heads, "scale": call.scale}
    return _launch(dquery_kernel, call, tile, triton.cdiv(call.queries, tile.queries) * call.heads * call.batch, arguments)


def _launch(kernel: Any, call: Call, tile: Tile, programs: int, arguments: dict[str, Any]) -> Launch:
    """Adds what the three kernels that recompute or compute weights take alike."""
    scale = Scale.of(call.scale)
    shared = {
        "groups": call.groups,
        "queries": call.queries,
        "keys": call.keys,
        "offset": call.offset,
        "magnitude": scale.magnitude,
        "seed": call.dropout_seed,
        "last_dropped": max(call.dropout_threshold - 1, 0),
        "kept_scale": 1.0 / (1.0 - call.dropout_p),
        "SIGN": scale.sign,
        "CAUSAL": call.is_causal,
        "DROPOUT": call.dropout_p > 0.0,
        "DIM": call.dim,
        "PADDED_DIM": padded_dim(call.dim),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
    }
    return Launch(kernel, (programs,), arguments | shared, tile.num_warps, tile.num_stages)


# --------------------------------------------------------------------------------------------------------------------------- the call


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, block_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        lists = lists_of_keys(call, visible_blocks(call, block_mask, query.device))
        forward_launch(call, query, key, value, out, lse, lists).run()
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse, block_mask)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, block_mask = ctx.saved_tensors
        visible = visible_blocks(ctx.call, block_mask, query.device)
        delta = torch.empty_like(lse)
        delta_launch(ctx.call, out, dout, delta).run()
        dquery = dkey = dvalue = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dkey, dvalue = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
            dkey_dvalue_launch(ctx.call, query, key, value, dout, lse, delta, dkey, dvalue, lists_of_queries(ctx.call, visible)).run()
        if ctx.needs_input_grad[0]:
            dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            dquery_launch(ctx.call, query, key, value, dout, lse, delta, dquery, lists_of_keys(ctx.call, visible)).run()
        return dquery, dkey, dvalue, None, None


def attention(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
) -> Float[Tensor, "batch heads queries dim"] | tuple[Float[Tensor, "batch heads queries dim"], Float[Tensor, "batch heads queries"]]:
    """softmax(scale query key^T) value over the visible blocks, with gradients for query, key and value.

    block_mask: False hides a block of 128 queries by 128 keys; a size of 1 stands for all batches or heads. None: every block is visible.

    scale is 1/sqrt(dim) unless given. With is_causal, query i sees key j when j <= i ("top_left") or j <= i + keys - queries ("bottom_right"). With enable_gqa,
    heads is a multiple of kv_heads. dropout_p of the normalised weights are zeroed and the others divided by 1 - dropout_p, as drawn from dropout_seed. With
    return_lse also the natural log of the sum of the exponentials of each query's scores, float32, which carries no gradient. A query that sees no key has
    output 0, LSE -inf and zero gradients.

    Raises TypeError or ValueError naming the argument that is wrong.
    """
    call = check_call(
        query,
        key,
        value,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        block_mask=block_mask,
    )
    out, lse = _Attention.apply(query, key, value, call, block_mask)
    return (out, lse) if return_lse else out


def _arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """Tiles differ between head dims; the smallest make the most steps, so they are the ones claimed."""
    chosen = [tiles(getattr(torch, dtype), dim, dropout, interpreted=device == "cpu") for dim in (64, 128, 256) for dropout in (False, True)]
    return Arithmetic(
        accumulate="tensor_core" if device == "cuda" and dtype != "float32" else "fma",
        key_tile=min(tile.keys for each in chosen for tile in (each.forward, each.dquery)),
        query_tile=min(each.dkey_dvalue.queries for each in chosen),
    )


implementation = Implementation(
    name="triton.block_sparse",
    attention=attention,
    supports=Supports(
        causal=("top_left", "bottom_right"),
        scale="finite",
        grouped_heads=True,
        block_mask=True,
        cross_lengths=True,
        strided=True,
        dropout=True,
        lse=True,
        deterministic=True,
        batch_invariant=True,
    ),
    arithmetic=_arithmetic,
    missing=missing,
    summary="FlashAttention-2 over a block mask in Triton: empty blocks are skipped, only partial ones are masked, forward and backward.",
)
