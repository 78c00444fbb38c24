"""FlashAttention-2 in Triton (Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024; Algorithms 1 and 2).

What changed against FlashAttention-1: the loops are exchanged. One program owns a tile of queries and runs over the keys, so the output, the running maximum m
and the running sum l stay on chip; the output is divided by l once, at the end, and written once. Query tiles run in parallel. Of the statistics only
L = m + log l, the LSE, is stored. The backward has no atomics, so it is deterministic: one kernel owns a tile of keys and sums dK and dV over the queries,
another owns a tile of queries and sums dQ over the keys; both recompute the weights P = exp(S - L), and read delta = rowsum(dO o O) from a third, small one.

Whole tiles that the causal mask hides are never visited. The rest come in two kinds: those that every query sees whole, in a loop without masks, and the few
that the diagonal or the tensor's end cuts.

This file is the loops: what is kept on chip, and which tiles meet. What two tiles make of each other, and the arithmetic of it, is in `steps.py`; grids and
arguments of the launches are in `flash.py`. Block-sparse attention shares both.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows, opaque
from flashproof.impls.spec import OWN_KERNELS, Implementation
from flashproof.impls.triton import flash
from flashproof.impls.triton.flash import Loop, Tile, Tiles
from flashproof.impls.triton.primitives import (
    INFINITY,
    INTERPRETED,
    device_function,
    head_of,
    kernel,
    load_rows,
    missing,
    place,
    slow,
    store_rows,
    times_sign,
    wide,
)
from flashproof.impls.triton.steps import attend, attended, gradients_of_keys, gradients_of_queries

# ------------------------------------------------------------------------------------------------------------------------------ tiles

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


def tiles(dtype: torch.dtype, dim: int, dropout: bool, interpreted: bool = INTERPRETED.value) -> Tiles:
    """The tiles for a dtype and head dim."""
    return flash.tiles_of(TILES, dtype, dim, dropout, interpreted)


# ---------------------------------------------------------------------------------------------------------------------------- forward


@device_function
def range_of_keys(first_query, keys, offset, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Where the loops of a tile of queries end: over whole tiles of keys that every query of it sees, then over the keys that any of them sees."""
    full = keys
    end = keys
    if CAUSAL:
        full = tl.minimum(keys, tl.maximum(first_query + offset + 1, 0))
        end = tl.minimum(keys, tl.maximum(first_query + offset + QUERIES, 0))
    return full // KEYS * KEYS, end


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
    first_query, head, batch = place(queries, heads, QUERIES, True)  # the last query tile first: with a causal mask it has the most to do
    query_at = first_query + tl.arange(0, QUERIES)
    key = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    value = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    q = times_sign(load_rows(query, query_strides, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT), SIGN)  # [QUERIES, PADDED_DIM]

    full, end = range_of_keys(first_query, keys, offset, CAUSAL, QUERIES, KEYS)
    maximum = tl.full([QUERIES], -INFINITY, tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    accumulator = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    for first_key in tl.range(0, full, KEYS):
        accumulator, maximum, total = attend(
            accumulator, maximum, total, q, query_at, key, value, first_key, keys, offset, exponent_scale, seed, last_dropped, batch, head,
            False, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
        )  # fmt: skip
    for first_key in tl.range(full, end, KEYS):
        accumulator, maximum, total = attend(
            accumulator, maximum, total, q, query_at, key, value, first_key, keys, offset, exponent_scale, seed, last_dropped, batch, head,
            True, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
        )  # fmt: skip

    o, row_lse = attended(accumulator, maximum, total, magnitude, kept_scale)
    lse += (wide(batch) * heads + head) * queries
    tl.store(lse + query_at, row_lse, mask=query_at < queries)
    store_rows(out, out_strides, o, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT)


# --------------------------------------------------------------------------------------------------------------------------- backward


@partial(kernel, and_for=("groups",))  # that it is 1 saves a loop, and the registers that would be spilled
def dkey_dvalue_kernel(
    query, key, value, dout, lse, delta, dkey, dvalue,
    query_strides, key_strides, value_strides, dout_strides, dkey_strides, dvalue_strides,
    kv_heads, groups, queries, keys, offset,
    scale, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of KEYS keys of one key head, summed over the queries of all query heads that share it."""
    first_key, kv_head, batch = place(keys, kv_heads, KEYS, False)
    key_at = first_key + tl.arange(0, KEYS)
    k = load_rows(key, key_strides, batch, kv_head, first_key, keys, DIM, KEYS, PADDED_DIM, WIDE, UNIT)  # [KEYS, PADDED_DIM]
    v = load_rows(value, value_strides, batch, kv_head, first_key, keys, DIM, KEYS, PADDED_DIM, WIDE, UNIT)

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
        q_head = head_of(query, query_strides, batch, head, QUERIES, PADDED_DIM, WIDE, UNIT)
        do_head = head_of(dout, dout_strides, batch, head, QUERIES, PADDED_DIM, WIDE, UNIT)
        first_row = (wide(batch) * (kv_heads * groups) + head) * queries
        for first_query in tl.range(full, full_end, QUERIES):
            dk, dv = gradients_of_keys(
                dk, dv, k, v, key_at, q_head, do_head, lse + first_row, delta + first_row, first_query, queries, offset,
                scale, seed, last_dropped, kept_scale, batch, head, False, CAUSAL, DROPOUT, DIM, PADDED_DIM, QUERIES,
            )  # fmt: skip
        for step in tl.range(0, diagonal_tiles + ragged_tiles):
            first_query = tl.where(step < diagonal_tiles, start + step * QUERIES, full_end)
            dk, dv = gradients_of_keys(
                dk, dv, k, v, key_at, q_head, do_head, lse + first_row, delta + first_row, first_query, queries, offset,
                scale, seed, last_dropped, kept_scale, batch, head, True, CAUSAL, DROPOUT, DIM, PADDED_DIM, QUERIES,
            )  # fmt: skip
    store_rows(dkey, dkey_strides, dk * scale, batch, kv_head, first_key, keys, DIM, KEYS, PADDED_DIM, WIDE, UNIT)
    store_rows(dvalue, dvalue_strides, dv * kept_scale, batch, kv_head, first_key, keys, DIM, KEYS, PADDED_DIM, WIDE, UNIT)


@kernel
def dquery_kernel(
    query, key, value, dout, lse, delta, dquery,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides,
    heads, groups, queries, keys, offset,
    scale, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of QUERIES queries of one head; the loops are the forward's."""
    first_query, head, batch = place(queries, heads, QUERIES, True)
    query_at = first_query + tl.arange(0, QUERIES)
    key = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    value = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE, UNIT)
    q = load_rows(query, query_strides, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT)  # [QUERIES, PADDED_DIM]
    do = load_rows(dout, dout_strides, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT)
    first_row = (wide(batch) * heads + head) * queries
    row_lse = tl.load(lse + first_row + query_at, mask=query_at < queries, other=INFINITY)
    row_delta = tl.load(delta + first_row + query_at, mask=query_at < queries, other=0.0)

    full, end = range_of_keys(first_query, keys, offset, CAUSAL, QUERIES, KEYS)
    dq = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    for first_key in tl.range(0, full, KEYS):
        dq = gradients_of_queries(
            dq, q, do, row_lse, row_delta, query_at, key, value, first_key, keys, offset,
            scale, seed, last_dropped, kept_scale, batch, head, False, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
        )  # fmt: skip
    for first_key in tl.range(full, end, KEYS):
        dq = gradients_of_queries(
            dq, q, do, row_lse, row_delta, query_at, key, value, first_key, keys, offset,
            scale, seed, last_dropped, kept_scale, batch, head, True, CAUSAL, DROPOUT, DIM, PADDED_DIM, KEYS,
        )  # fmt: skip
    store_rows(dquery, dquery_strides, dq * scale, batch, head, first_query, queries, DIM, QUERIES, PADDED_DIM, WIDE, UNIT)


# --------------------------------------------------------------------------------------------------------------------------- the call


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        loop = Loop(forward_kernel, tiles(query.dtype, call.dim, call.dropout_p > 0.0).forward)
        out, lse = flash.forward(loop, call, query, key, value)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        chosen = tiles(dout.dtype, ctx.call.dim, ctx.call.dropout_p > 0.0)
        of_keys, of_queries = Loop(dkey_dvalue_kernel, chosen.dkey_dvalue), Loop(dquery_kernel, chosen.dquery)
        return *flash.backward(of_keys, of_queries, ctx.call, ctx.needs_input_grad, dout, *ctx.saved_tensors), None


@Attention
@opaque
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-2: (out, lse), with gradients for query, key and value."""
    out, lse = _Attention.apply(query, key, value, call)
    return out, lse


implementation = Implementation(
    name="triton.fa2",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=flash.arithmetic_of(tiles),
    missing=missing,
    slow=slow,
    summary="FlashAttention-2 in Triton: query tiles in parallel, statistics on chip, a backward of two kernels without atomics.",
)
