"""FlashAttention-2 in Triton (Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024; Algorithms 1 and 2).

What changed against FlashAttention-1: the loops are exchanged. One program owns a tile of queries and runs over the keys, so the output, the running maximum m
and the running sum l stay on chip; the output is divided by l once, at the end, and written once. Query tiles run in parallel. Of the statistics only
L = m + log l, the LSE, is stored. The backward has no atomics, so it is deterministic: one kernel owns a tile of keys and sums dK and dV over the queries,
another owns a tile of queries and sums dQ over the keys; both recompute the weights P = exp(S - L), and read delta = rowsum(dO o O) from a third, small one.

Whole tiles that the causal mask hides are never visited. The rest come in two kinds: those that every query sees whole, in a loop without masks, and the few
that the diagonal or the tensor's end cuts.

Arithmetic. A weight is 2^((s - m) c) with s = q k, m the largest s, and c = |scale| log2 e: subtract, then multiply. Equal scores then weigh exactly 1 however
large they are; 2^(s c - m c), which a compiler may fuse into an fma, leaves a residue of half an ulp of m c. In the backward S - L is one explicit fma.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from impls.call import Call, check_call
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
    (16, 64): Tiles(forward=Tile(128, 64, 4, 3), dkey_dvalue=Tile(64, 128, 8, 2), dquery=Tile(128, 64, 8, 2)),
    (16, 128): Tiles(forward=Tile(128, 64, 8, 3), dkey_dvalue=Tile(64, 64, 8, 2), dquery=Tile(128, 32, 8, 2)),
    (16, 256): Tiles(forward=Tile(64, 32, 4, 2), dkey_dvalue=Tile(32, 32, 8, 2), dquery=Tile(64, 32, 8, 2)),
    (32, 64): Tiles(forward=Tile(64, 32, 8, 2), dkey_dvalue=Tile(32, 32, 8, 2), dquery=Tile(64, 32, 8, 2)),
    (32, 128): Tiles(forward=Tile(32, 32, 8, 1), dkey_dvalue=Tile(16, 32, 8, 2), dquery=Tile(32, 16, 8, 1)),
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


# ---------------------------------------------------------------------------------------------------------------------------- forward


@device_function
def attend(
    accumulator, maximum, total,  # [QUERIES, PADDED_DIM], [QUERIES], [QUERIES]: the output so far, undivided; the largest score; the sum of weights
    q, query_at, key, key_tile, key_row, value, value_tile, value_row,
    first, last, keys, offset, exponent_scale, seed, last_dropped, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `first` to `last` into the running output, maximum and sum. MASKED: some of them may be hidden, or lie past the end."""
    for first_key in tl.range(first, last, KEYS):
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
    query, key, value, out, lse,
    query_strides, key_strides, value_strides, out_strides,
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

    # Whole tiles of keys that every query here sees, then the keys that any of them sees.
    full = keys
    end = keys
    if CAUSAL:
        full = tl.minimum(keys, tl.maximum(first_query + offset + 1, 0))
        end = tl.minimum(keys, tl.maximum(first_query + offset + QUERIES, 0))
    full = full // KEYS * KEYS

    maximum = tl.full([QUERIES], -INFINITY, tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    accumulator = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    accumulator, maximum, total = attend(
        accumulator, maximum, total, q, query_at, key, key_tile, key_row, value, value_tile, value_row,
        0, full, keys, offset, exponent_scale, seed, last_dropped, batch, head,
        False, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip
    accumulator, maximum, total = attend(
        accumulator, maximum, total, q, query_at, key, key_tile, key_row, value, value_tile, value_row,
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
    query, key, value, dout, lse, delta, dkey, dvalue,
    query_strides, key_strides, value_strides, dout_strides, dkey_strides, dvalue_strides,
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

    # The query tiles are those from `start`, where the first query sees a key of this tile. The full ones lie between `full` and `full_end`; before them the
    # diagonal cuts, after them the last tile may be ragged, and these two kinds share one loop.
    start = 0
    full = 0
    full_end = queries // QUERIES * QUERIES
    if CAUSAL:
        start = tl.maximum(first_key - offset, 0) // QUERIES * QUERIES
        full = (tl.maximum(first_key + KEYS - 1 - offset, 0) + QUERIES - 1) // QUERIES * QUERIES
        full = tl.minimum(full, full_end)
    diagonal_tiles = tl.maximum(full - start, 0) // QUERIES
    ragged_tiles = (tl.maximum(queries - tl.maximum(full_end, start), 0) + QUERIES - 1) // QUERIES

    dk = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    dv = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    for member in tl.range(groups):
        head = kv_head * groups + member
        q_head, q_tile, q_row = head_of(query, query_strides, batch, head, QUERIES, PADDED_DIM, WIDE, UNIT)
        do_head, do_tile, do_row = head_of(dout, dout_strides, batch, head, QUERIES, PADDED_DIM, WIDE, UNIT)
        first_row = (batch.to(tl.int64) * (kv_heads * groups) + head) * queries
        for first_query in tl.range(full, full_end, QUERIES):
            dk, dv = gradients_of_keys(
                dk, dv, k, v, key_at, q_head, q_tile, q_row, do_head, do_tile, do_row, lse + first_row, delta + first_row,
                first_query, queries, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
                False, CAUSAL, DROPOUT, DIM, PADDED_DIM, QUERIES,
            )  # fmt: skip
        for step in tl.range(0, diagonal_tiles + ragged_tiles):
            first_query = tl.where(step < diagonal_tiles, start + step * QUERIES, full_end)
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
    dq, q, do, row_lse, row_delta, query_at, key, key_tile, key_row, value, value_tile, value_row,
    first, last, keys, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from `first` to `last` give to dQ / scale. MASKED: some of them may be hidden, or lie past the end.

    A key past the end is loaded as 0 and would score 0, which is far above an LSE of -100: its weight has to be masked, not only its key.
    """
    for first_key in tl.range(first, last, KEYS):
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
    query, key, value, dout, lse, delta, dquery,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides,
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

    full = keys
    end = keys
    if CAUSAL:
        full = tl.minimum(keys, tl.maximum(first_query + offset + 1, 0))
        end = tl.minimum(keys, tl.maximum(first_query + offset + QUERIES, 0))
    full = full // KEYS * KEYS

    dq = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    dq = gradients_of_queries(
        dq, q, do, row_lse, row_delta, query_at, key, key_tile, key_row, value, value_tile, value_row,
        0, full, keys, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
        False, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip
    dq = gradients_of_queries(
        dq, q, do, row_lse, row_delta, query_at, key, key_tile, key_row, value, value_tile, value_row,
        full, end, keys, offset, magnitude, seed, last_dropped, kept_scale, batch, head,
        True, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
    )  # fmt: skip
    dquery = tile_at(dquery, dquery_strides, batch, head, first_query, QUERIES, PADDED_DIM, WIDE, UNIT)
    store_tile(dquery, dq * scale, first_query, queries, DIM, QUERIES, PADDED_DIM)


# --------------------------------------------------------------------------------------------------------------------------- launches


def forward_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """One program for each tile of queries of each head. Fills out and lse."""
    tile = tiles(query.dtype, call.dim, call.dropout_p > 0.0).forward
    arguments = with_strides(query=query, key=key, value=value, out=out) | {"lse": lse, "heads": call.heads, "exponent_scale": Scale.of(call.scale).exponent}
    return _launch(forward_kernel, call, tile, triton.cdiv(call.queries, tile.queries) * call.heads * call.batch, arguments)


def delta_launch(call: Call, out: Tensor, dout: Tensor, delta: Tensor) -> Launch:
    """One program for each 16 queries of each head. Fills delta."""
    arguments = with_strides(out=out, dout=dout) | {"delta": delta, "heads": call.heads, "queries": call.queries}
    constants = {"DIM": call.dim, "PADDED_DIM": padded_dim(call.dim), "QUERIES": 16}
    return Launch(delta_kernel, (triton.cdiv(call.queries, 16) * call.heads * call.batch,), arguments | constants, num_warps=4, num_stages=1)


def dkey_dvalue_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dkey: Tensor, dvalue: Tensor) -> Launch:
    """One program for each tile of keys of each key head. Fills dkey and dvalue."""
    tile = tiles(query.dtype, call.dim, call.dropout_p > 0.0).dkey_dvalue
    arguments = with_strides(query=query, key=key, value=value, dout=dout, dkey=dkey, dvalue=dvalue)
    arguments |= {"lse": lse, "delta": delta, "kv_heads": call.kv_heads, "scale": call.scale}
    return _launch(dkey_dvalue_kernel, call, tile, triton.cdiv(call.keys, tile.keys) * call.kv_heads * call.batch, arguments)


def dquery_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dquery: Tensor) -> Launch:
    """One program for each tile of queries of each head. Fills dquery."""
    tile = tiles(query.dtype, call.dim, call.dropout_p > 0.0).dquery
    arguments = with_strides(query=query, key=key, value=value, dout=dout, dquery=dquery)
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
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        forward_launch(call, query, key, value, out, lse).run()
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        delta_launch(ctx.call, out, dout, delta).run()
        dquery = dkey = dvalue = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dkey, dvalue = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
            dkey_dvalue_launch(ctx.call, query, key, value, dout, lse, delta, dkey, dvalue).run()
        if ctx.needs_input_grad[0]:
            dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            dquery_launch(ctx.call, query, key, value, dout, lse, delta, dquery).run()
        return dquery, dkey, dvalue, None


def attention(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
) -> Float[Tensor, "batch heads queries dim"] | tuple[Float[Tensor, "batch heads queries dim"], Float[Tensor, "batch heads queries"]]:
    """softmax(scale query key^T) value, with gradients for query, key and value.

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
    )
    out, lse = _Attention.apply(query, key, value, call)
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
    name="triton.fa2",
    attention=attention,
    supports=Supports(
        causal=("top_left", "bottom_right"),
        scale="finite",
        grouped_heads=True,
        cross_lengths=True,
        strided=True,
        dropout=True,
        lse=True,
        deterministic=True,
        batch_invariant=True,
        linear_memory=True,
    ),
    arithmetic=_arithmetic,
    missing=missing,
    summary="FlashAttention-2 in Triton: query tiles in parallel, statistics on chip, a backward of two kernels without atomics.",
)
