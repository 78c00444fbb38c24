"""FlashAttention-2 in Triton.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024; Algorithms 1
and 2.

What changed against FlashAttention-1:

- The two loops are exchanged. One program owns a tile of queries and loops over the keys. The output, the running
  maximum m and the running sum l therefore stay on chip. The output is divided by l once, at the end, and it is written
  once.
- Query tiles run in parallel.
- Of the statistics, only the LSE, L = m + log l, is stored.
- The backward has no atomics, so it is deterministic. In one kernel, a program owns a tile of keys and sums dK and dV
  over the queries. In another kernel, a program owns a tile of queries and sums dQ over the keys. Both kernels
  recompute the weights P = exp(S - L). Both read delta = rowsum(dO o O), which a third, small kernel computes.

The loops never visit a tile that the causal mask hides completely. The other tiles are of two kinds. A full tile is
visible to every query, and is computed without masks. A few tiles are cut by the diagonal or by the end of the tensor.
A branch of the loop masks them.

This file contains the loops: what is kept on chip, and which tiles meet. `steps.py` contains the computation for two
tiles that meet, and its arithmetic. `flash.py` contains the grids and the arguments of the launches. Block-sparse
attention shares both.
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
from flashproof.impls.triton.flash import Kernels, Tile, Tiles
from flashproof.impls.triton.primitives import (
    INFINITY,
    device_function,
    head_dim,
    head_of,
    in_fours,
    kernel,
    load_rows,
    missing,
    numbers_of,
    place,
    seen_keys,
    slow,
    store_rows,
    wide,
)
from flashproof.impls.triton.steps import attend, attended, gradients_of_keys, gradients_of_queries

# ---------------------------------------------------------------------------------------------------------------- tiles

# The tiles on a GPU, by (bits of the dtype, largest head dim). Up to head dim 128, no register is spilled on sm_80,
# sm_90 and sm_100, and the shared memory is within the 163 KB of sm_80. float32 operands are split into parts in
# registers, of which up to 112 bytes are spilled on sm_100.
TILES = {
    (16, 64): Tiles(forward=Tile(128, 64, 8, 3), dkey_dvalue=Tile(32, 64, 8, 2), dquery=Tile(128, 64, 8, 2)),
    (16, 128): Tiles(forward=Tile(128, 64, 8, 3), dkey_dvalue=Tile(64, 64, 8, 2), dquery=Tile(128, 32, 8, 2)),
    (16, 256): Tiles(forward=Tile(64, 32, 4, 2), dkey_dvalue=Tile(32, 32, 8, 2), dquery=Tile(64, 32, 8, 2)),
    (32, 64): Tiles(forward=Tile(32, 16, 8, 1), dkey_dvalue=Tile(16, 16, 8, 1), dquery=Tile(32, 16, 8, 1)),
    (32, 128): Tiles(forward=Tile(16, 32, 8, 1), dkey_dvalue=Tile(32, 16, 8, 1), dquery=Tile(16, 32, 8, 1)),
    (32, 256): Tiles(forward=Tile(16, 16, 8, 1), dkey_dvalue=Tile(16, 16, 8, 1), dquery=Tile(16, 16, 8, 1)),
}


# The tiles on sm_90 in place of these, chosen by measurement. 16-bit operands come through descriptors, and programs of
# one warpgroup share a multiprocessor: the weights of one program are computed while another multiplies. In float32,
# most of these kernels spill registers, and are still faster than with tiles that fit.
HOPPER = {
    (16, 64): Tiles(forward=Tile(64, 64, 4, 3), dkey_dvalue=Tile(64, 64, 4, 4), dquery=Tile(64, 64, 4, 3)),
    (16, 128): Tiles(forward=Tile(64, 64, 4, 3), dkey_dvalue=Tile(64, 64, 4, 2), dquery=Tile(128, 64, 8, 3)),
    (16, 256): Tiles(forward=Tile(128, 64, 8, 2), dkey_dvalue=Tile(64, 64, 8, 2), dquery=Tile(128, 64, 8, 1)),
    (32, 64): Tiles(forward=Tile(128, 64, 8, 1), dkey_dvalue=Tile(64, 128, 8, 1), dquery=Tile(128, 64, 8, 1)),
    (32, 128): Tiles(forward=Tile(128, 64, 8, 1), dkey_dvalue=Tile(32, 128, 8, 1), dquery=Tile(128, 32, 8, 1)),
    (32, 256): Tiles(forward=Tile(64, 64, 8, 1), dkey_dvalue=Tile(16, 64, 4, 1), dquery=Tile(64, 16, 4, 1)),
}
tiles = flash.Tables(TILES, HOPPER)


# -------------------------------------------------------------------------------------------------------------- forward


@device_function
def range_of_keys(first_query, keys, offset, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Returns (full, end), which keys a tile of queries visits.

    The keys before `full` are whole tiles of keys that every query of the tile sees. The keys from `full` to `end` are
    in tiles that need a mask, up to the last key that any query of the tile sees.
    """
    full = seen_keys(first_query, keys, offset)
    end = seen_keys(first_query + QUERIES - 1, keys, offset)
    return full // KEYS * KEYS, tl.maximum(end, 1)


@kernel
def forward_kernel(
    query, key, value, out, lse,
    query_strides, key_strides, value_strides, out_strides,
    heads, groups, queries, keys, dim, offset,
    magnitude, exponent_scale,  # |scale|, |scale| log2 e
    seed: tl.uint64, last_dropped: tl.uint32, kept_scale,  # dropout: seed, largest word that drops, 1 / (1 - p)
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes the output and the LSE of one tile of QUERIES queries of one head.

    query, out [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] are `loadable`.
    lse [batch, heads, queries] is contiguous, in float32.
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    # The last query tile runs first, because with a causal mask it has the most work.
    first_query, head, batch = place(queries, heads, QUERIES, True)
    query_at = first_query + tl.arange(0, QUERIES)
    key = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE)
    value = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE)
    # The shape of q is [QUERIES, PADDED_DIM].
    q = load_rows(query, query_strides, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE)

    full, end = range_of_keys(first_query, keys, offset, QUERIES, KEYS)
    maximum = tl.full([QUERIES], -INFINITY, tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    accumulator = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    for first_key in tl.range(0, end, KEYS):
        accumulator, maximum, total = attend(
            accumulator, maximum, total, q, first_query, key, value, first_key, keys, offset,
            exponent_scale, seed, last_dropped, batch, head, first_key >= full, DROPOUT, dim, PADDED_DIM, PADDED, KEYS,
        )  # fmt: skip

    o, row_lse = attended(accumulator, maximum, total, magnitude, kept_scale)
    lse += (wide(batch) * heads + head) * queries
    tl.store(lse + query_at, row_lse, mask=query_at < queries)
    store_rows(out, out_strides, o, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE)


# ------------------------------------------------------------------------------------------------------------- backward


@partial(kernel, and_for=("groups",))  # groups = 1 saves a loop, and the spills that the loop causes
def dkey_dvalue_kernel(
    query, key, value, dout, lse, delta, dkey, dvalue,
    query_strides, key_strides, value_strides, dout_strides, dkey_strides, dvalue_strides,
    kv_heads, groups, queries, keys, dim, offset,
    scale, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of one tile of KEYS keys of one key head.

    The gradients are summed over the queries of all query heads that share the key head.

    query, dout [batch, heads, queries, dim] are `loadable`.
    key, value, dkey, dvalue [batch, kv_heads, keys, dim] are `loadable`.
    lse and delta [batch, heads, queries] have heads that are `in_fours` apart, in float32.
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    first_key, kv_head, batch = place(keys, kv_heads, KEYS, False)
    # The shape of k and v is [KEYS, PADDED_DIM].
    k = load_rows(key, key_strides, batch, kv_head, first_key, keys, dim, KEYS, PADDED_DIM, PADDED, WIDE)
    v = load_rows(value, value_strides, batch, kv_head, first_key, keys, dim, KEYS, PADDED_DIM, PADDED, WIDE)

    # The loop visits the query tiles from `start`, the first tile in which a query sees a key of this tile. The tiles
    # from `full` to `full_end` are full. The diagonal cuts the tiles before them. The last tile, after them, is ragged.
    start = tl.maximum(first_key - offset, 0) // QUERIES * QUERIES
    full = (tl.maximum(first_key + KEYS - 1 - offset, 0) + QUERIES - 1) // QUERIES * QUERIES
    full_end = queries // QUERIES * QUERIES
    steps = tl.maximum((queries - start + QUERIES - 1) // QUERIES, 1)

    dk = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    dv = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    for member in tl.range(groups):
        head = kv_head * groups + member
        q_head = head_of(query, query_strides, batch, head, QUERIES, PADDED_DIM, WIDE)
        do_head = head_of(dout, dout_strides, batch, head, QUERIES, PADDED_DIM, WIDE)
        row_lse = numbers_of(lse, batch * (kv_heads * groups) + head, queries)
        row_delta = numbers_of(delta, batch * (kv_heads * groups) + head, queries)
        for step in tl.range(0, steps):
            first_query = start + step * QUERIES
            dk, dv = gradients_of_keys(
                dk, dv, k, v, first_key, q_head, do_head, row_lse, row_delta, first_query, queries, offset,
                scale, seed, last_dropped, kept_scale, batch, head, (first_query < full) | (first_query >= full_end),
                DROPOUT, dim, PADDED_DIM, PADDED, QUERIES,
            )  # fmt: skip
    store_rows(
        dkey, dkey_strides, dk * scale,
        batch, kv_head, first_key, keys, dim, KEYS, PADDED_DIM, PADDED, WIDE,
    )  # fmt: skip
    store_rows(
        dvalue, dvalue_strides, dv * kept_scale,
        batch, kv_head, first_key, keys, dim, KEYS, PADDED_DIM, PADDED, WIDE,
    )  # fmt: skip


@kernel
def dquery_kernel(
    query, key, value, dout, lse, delta, dquery,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides,
    heads, groups, queries, keys, dim, offset,
    scale, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dQ of one tile of QUERIES queries of one head. The loops are those of the forward.

    query, dout, dquery [batch, heads, queries, dim] and key, value [batch, kv_heads, keys, dim] are `loadable`.
    lse and delta [batch, heads, queries] have heads that are `in_fours` apart, in float32.
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    first_query, head, batch = place(queries, heads, QUERIES, True)
    query_at = first_query + tl.arange(0, QUERIES)
    key = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE)
    value = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE)
    # The shape of q and do is [QUERIES, PADDED_DIM].
    q = load_rows(query, query_strides, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE)
    do = load_rows(dout, dout_strides, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE)
    first_row = (wide(batch) * heads + head) * in_fours(queries)
    row_lse = tl.load(lse + first_row + query_at, mask=query_at < queries, other=INFINITY)
    row_delta = tl.load(delta + first_row + query_at, mask=query_at < queries, other=0.0)

    full, end = range_of_keys(first_query, keys, offset, QUERIES, KEYS)
    dq = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    for first_key in tl.range(0, end, KEYS):
        dq = gradients_of_queries(
            dq, q, do, row_lse, row_delta, first_query, key, value, first_key, keys, offset, scale, seed, last_dropped,
            kept_scale, batch, head, first_key >= full, DROPOUT, dim, PADDED_DIM, PADDED, KEYS,
        )  # fmt: skip
    store_rows(
        dquery, dquery_strides, dq * scale,
        batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the call


KERNELS = Kernels(forward_kernel, dkey_dvalue_kernel, dquery_kernel)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = flash.forward(KERNELS, tiles, call, query, key, value)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        return *flash.backward(KERNELS, tiles, ctx.call, needed, dout, *ctx.saved_tensors), None


@Attention
@opaque
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-2. Returns (out, lse), with gradients for query, key and value."""
    out, lse = _Attention.apply(query, key, value, call)
    return out, lse


implementation = Implementation(
    name="triton.fa2",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=flash.arithmetic_of(tiles),
    missing=missing,
    slow=slow,
    summary=(
        "FlashAttention-2 in Triton: query tiles in parallel, statistics on chip, "
        "a backward of two kernels without atomics."
    ),
)
