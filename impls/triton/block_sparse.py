"""Block-sparse FlashAttention in Triton: FlashAttention-2 with a block mask.

Source: Dao et al., "FlashAttention", NeurIPS 2022, section 3.3 and Algorithm 5.

What changed against FlashAttention-2: the mask has one entry for each block of 128 x 128 scores, and the loops run over
lists of blocks instead of a range.

- Each row of blocks has a list. The list first gives the blocks that are seen whole, which are computed without a mask.
  Then it gives the partial blocks, which the diagonal or the end of the tensor cuts.
- The loops never visit a block that the block mask or the causal mask hides. A loop with an empty list takes one step,
  in which everything is hidden.
- The kernel of dK and dV uses the transposed lists.
- The lists are computed on the device, and the host does not wait for them.
- The tile sizes divide 128, so a tile is in one row and one column of blocks.

The rest is the same as in FlashAttention-2: statistics on chip, one division, LSE = m + log l, and a deterministic
backward of two kernels that recompute the weights. `steps.py` contains the computation for two tiles that meet, and its
arithmetic. `flash.py` contains the grids and the arguments of the launches.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashproof.impls.call import BLOCK, BlockMask, BlockSparseAttention, Call, Keys, Queries, Rows, opaque
from flashproof.impls.shapes import Int
from flashproof.impls.spec import OWN_KERNELS, Implementation
from flashproof.impls.triton import flash
from flashproof.impls.triton.flash import Kernels, Tile, Tiles
from flashproof.impls.triton.launching import Launch, launch
from flashproof.impls.triton.primitives import (
    INFINITY,
    as_argument,
    call_arguments,
    device_function,
    head_dim,
    head_of,
    in_fours,
    kernel,
    load_rows,
    missing,
    numbers_of,
    place,
    slow,
    store_rows,
    stride_of,
    this_program,
    wide,
)
from flashproof.impls.triton.steps import attend, attended, gradients_of_keys, gradients_of_queries

SIDE = tl.constexpr(BLOCK)  # a block is 128 queries by 128 keys

# ---------------------------------------------------------------------------------------------------------------- tiles

# The tiles on a GPU, by (bits of the dtype, largest head dim). Up to head dim 128, no register is spilled on sm_80,
# sm_90 and sm_100, and the shared memory is within the 163 KB of sm_80. float32 operands are split into parts in
# registers, of which up to 112 bytes are spilled on sm_100.
TILES = {
    (16, 64): Tiles(forward=Tile(128, 64, 8, 3), dkey_dvalue=Tile(32, 64, 8, 2), dquery=Tile(128, 32, 8, 2)),
    (16, 128): Tiles(forward=Tile(128, 32, 8, 2), dkey_dvalue=Tile(32, 64, 8, 2), dquery=Tile(128, 32, 8, 2)),
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


# ---------------------------------------------------------------------------------------------------------------- lists

Lists = Int[Tensor, "batch heads rows 2+blocks"]  # one list for each row of blocks; `lists_kernel` fills them


def lists_of_keys(call: Call, block_mask: BlockMask | None, device: torch.device) -> Lists:
    """Returns, for each block of queries, the list of the blocks of keys that it sees.

    A block is partial if the diagonal or the end of the keys cuts it.
    """
    return _lists(call, block_mask, device, of_keys=True)


def lists_of_queries(call: Call, block_mask: BlockMask | None, device: torch.device) -> Lists:
    """Returns, for each block of keys, the list of the blocks of queries that see it.

    A block is partial if the diagonal or the end of the queries cuts it.
    """
    return _lists(call, block_mask, device, of_keys=False)


def _lists(call: Call, block_mask: BlockMask | None, device: torch.device, of_keys: bool) -> Lists:
    """Fills the lists on the device. If block_mask is None, every block is visible, and all heads share one list.

    Shared lists are in memory once, with a stride of 0.
    """
    blocks = triton.cdiv(call.queries, BLOCK), triton.cdiv(call.keys, BLOCK)
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device).expand(1, 1, *blocks)
    mask = (mask if block_mask is None else block_mask).view(torch.uint8)
    rows, columns = blocks if of_keys else blocks[::-1]
    lists = torch.empty((*mask.shape[:2], rows, 2 + columns), dtype=torch.int32, device=device)
    launch(lists_launches, call.unseeded, of_keys, mask=mask, lists=lists)
    return lists.expand(call.batch, call.heads, -1, -1)


def lists_launches(call: Call, of_keys: bool, *, mask: Tensor, lists: Lists) -> Iterator[Launch]:
    """Describes the launch that fills lists. One program fills one list. mask: the block mask as bytes."""
    sizes = {name: value for name, value in call_arguments(call).items() if name in ("queries", "keys", "offset")}
    arguments = {
        "mask": mask,
        "lists": lists,
        "mask_strides": tuple(map(as_argument, mask.stride() if of_keys else mask.mT.stride())),
        "heads": mask.shape[1],
        "block_rows": lists.shape[2],
        "blocks": lists.shape[3] - 2,
    }
    constants = {"OF_KEYS": of_keys, "CHUNK": 128}
    programs = lists.shape[:3].numel()
    yield Launch(lists_kernel, (programs,), arguments | sizes | constants, num_warps=4, num_stages=1)


@device_function
def seen_blocks(
    mask, stride, row, first, blocks, queries, keys, offset, OF_KEYS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Returns (whole, visible, inside), each [CHUNK] of 0 or 1, for the blocks from `first` on of a row of blocks.

    mask: the entries of the row in the block mask, `stride` apart. inside: the row has this block.
    visible: the block mask and the causal mask both show the block: in it, some query may see some key.
    whole: the block is visible, and neither the diagonal nor the end of what the list is about cuts it.
    """
    block = first + tl.arange(0, CHUNK)
    inside = block < blocks
    shown = tl.load(mask + block.to(tl.int64) * stride, mask=inside, other=0) != 0
    if OF_KEYS:
        first_query = row * SIDE + tl.full([CHUNK], 0, tl.int32)
        first_key = block * SIDE
        uncut = first_key + SIDE <= keys
    else:
        first_query = block * SIDE
        first_key = row * SIDE + tl.full([CHUNK], 0, tl.int32)
        uncut = first_query + SIDE <= queries
    last_query = tl.minimum(first_query + SIDE, queries) - 1
    visible = shown & (first_key - offset <= last_query)
    whole = visible & uncut & (first_key - offset + (SIDE - 1) <= first_query)
    return whole.to(tl.int32), visible.to(tl.int32), inside.to(tl.int32)


@kernel
def lists_kernel(
    mask, lists, mask_strides, heads, block_rows, blocks, queries, keys, offset,
    OF_KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fills the list of one row of blocks.

    mask: the block mask, with strides in the order batch, head, row, block.
    lists: [batch, heads, block_rows, 2 + blocks].
    A list contains the number of blocks that are seen whole, the number of blocks that are seen at all, and then the
    indices of all blocks: first the whole ones, then the partial ones, then the hidden ones, which are never visited.
    """
    program = this_program()
    row, head, batch = program % block_rows, program // block_rows % heads, program // block_rows // heads
    mask += wide(batch) * stride_of(mask_strides[0]) + wide(head) * stride_of(mask_strides[1])
    mask += wide(row) * stride_of(mask_strides[2])
    stride = wide(stride_of(mask_strides[3]))
    lists += wide(program) * (2 + blocks)

    wholes, visibles = 0, 0
    for first in tl.range(0, blocks, CHUNK):
        whole, visible, _ = seen_blocks(mask, stride, row, first, blocks, queries, keys, offset, OF_KEYS, CHUNK)
        wholes += tl.sum(whole, 0)
        visibles += tl.sum(visible, 0)
    tl.store(lists, wholes)
    tl.store(lists + 1, visibles)

    next_whole, next_partial, next_hidden = 0, wholes, visibles
    for first in tl.range(0, blocks, CHUNK):
        whole, visible, inside = seen_blocks(mask, stride, row, first, blocks, queries, keys, offset, OF_KEYS, CHUNK)
        partial, hidden = visible - whole, inside - visible
        place = tl.where(
            whole != 0,
            next_whole + tl.cumsum(whole, 0),
            tl.where(partial != 0, next_partial + tl.cumsum(partial, 0), next_hidden + tl.cumsum(hidden, 0)),
        )
        tl.store(lists + 1 + place, first + tl.arange(0, CHUNK), mask=inside != 0)
        next_whole += tl.sum(whole, 0)
        next_partial += tl.sum(partial, 0)
        next_hidden += tl.sum(hidden, 0)


@device_function
def list_at(lists, strides, batch, head, row, LENGTH: tl.constexpr):
    """Returns the list for the row of blocks that contains row `row` of the tensor.

    The result is a pointer to the first block index, the number of steps of LENGTH in the whole blocks, and the number
    of such steps in all visible blocks.
    """
    of_batch, of_head, of_row = stride_of(strides[0]), stride_of(strides[1]), stride_of(strides[2])
    counts = lists + (wide(batch) * of_batch + wide(head) * of_head + wide(row // SIDE) * of_row)
    return counts + 2, tl.load(counts) * (SIDE // LENGTH), tl.load(counts + 1) * (SIDE // LENGTH)


@device_function
def tile_of_list(blocks, step, LENGTH: tl.constexpr):
    """Returns the first row of the tile of LENGTH rows that a loop visits at a step.

    Each block of the list takes 128 / LENGTH steps.
    """
    place = step // (SIDE // LENGTH)
    return (tl.load(blocks + place) - place) * SIDE + step * LENGTH


# -------------------------------------------------------------------------------------------------------------- forward


@kernel
def forward_kernel(
    query, key, value, out, lse, lists,
    query_strides, key_strides, value_strides, out_strides, lists_strides,
    heads, groups, queries, keys, dim, offset,
    magnitude, exponent_scale,  # |scale|, |scale| log2 e
    seed: tl.uint64, last_dropped: tl.uint32, kept_scale,  # dropout: seed, largest word that drops, 1 / (1 - p)
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes the output and the LSE of one tile of QUERIES queries of one head.

    query, out [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] are `loadable`.
    lse [batch, heads, queries] is contiguous, in float32.
    lists: the result of `lists_of_keys`.
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    # The last query tile runs first, because with a causal mask it has the most work.
    first_query, head, batch = place(queries, heads, QUERIES, True)
    query_at = first_query + tl.arange(0, QUERIES)
    key = head_of(key, key_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE)
    value = head_of(value, value_strides, batch, head // groups, KEYS, PADDED_DIM, WIDE)
    # The shape of q is [QUERIES, PADDED_DIM].
    q = load_rows(query, query_strides, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE)

    blocks, full, end = list_at(lists, lists_strides, batch, head, first_query, KEYS)
    maximum = tl.full([QUERIES], -INFINITY, tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    accumulator = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    for step in tl.range(0, tl.maximum(end, 1)):
        first_key = tile_of_list(blocks, step, KEYS)
        accumulator, maximum, total = attend(
            accumulator, maximum, total, q, first_query, key, value, first_key, tl.where(step < end, keys, 0), offset,
            exponent_scale, seed, last_dropped, batch, head, step >= full, DROPOUT, dim, PADDED_DIM, PADDED, KEYS,
        )  # fmt: skip

    o, row_lse = attended(accumulator, maximum, total, magnitude, kept_scale)
    lse += (wide(batch) * heads + head) * queries
    tl.store(lse + query_at, row_lse, mask=query_at < queries)
    store_rows(out, out_strides, o, batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE)


# ------------------------------------------------------------------------------------------------------------- backward


@partial(kernel, and_for=("groups",))  # groups = 1 saves a loop, and the spills that the loop causes
def dkey_dvalue_kernel(
    query, key, value, dout, lse, delta, dkey, dvalue, transposed,
    query_strides, key_strides, value_strides, dout_strides, dkey_strides, dvalue_strides, transposed_strides,
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
    transposed: the result of `lists_of_queries`.
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    first_key, kv_head, batch = place(keys, kv_heads, KEYS, False)
    # The shape of k and v is [KEYS, PADDED_DIM].
    k = load_rows(key, key_strides, batch, kv_head, first_key, keys, dim, KEYS, PADDED_DIM, PADDED, WIDE)
    v = load_rows(value, value_strides, batch, kv_head, first_key, keys, dim, KEYS, PADDED_DIM, PADDED, WIDE)

    dk = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    dv = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    for member in tl.range(groups):
        head = kv_head * groups + member
        q_head = head_of(query, query_strides, batch, head, QUERIES, PADDED_DIM, WIDE)
        do_head = head_of(dout, dout_strides, batch, head, QUERIES, PADDED_DIM, WIDE)
        row_lse = numbers_of(lse, batch * (kv_heads * groups) + head, queries)
        row_delta = numbers_of(delta, batch * (kv_heads * groups) + head, queries)
        blocks, full, end = list_at(transposed, transposed_strides, batch, head, first_key, QUERIES)
        for step in tl.range(0, tl.maximum(end, 1)):
            dk, dv = gradients_of_keys(
                dk, dv, k, v, first_key, q_head, do_head, row_lse, row_delta, tile_of_list(blocks, step, QUERIES),
                tl.where(step < end, queries, 0), offset, scale, seed, last_dropped, kept_scale, batch, head,
                step >= full, DROPOUT, dim, PADDED_DIM, PADDED, QUERIES,
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
    query, key, value, dout, lse, delta, dquery, lists,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides, lists_strides,
    heads, groups, queries, keys, dim, offset,
    scale, seed: tl.uint64, last_dropped: tl.uint32, kept_scale,
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes dQ of one tile of QUERIES queries of one head. The loops are those of the forward.

    query, dout, dquery [batch, heads, queries, dim] and key, value [batch, kv_heads, keys, dim] are `loadable`.
    lse and delta [batch, heads, queries] have heads that are `in_fours` apart, in float32.
    lists: the result of `lists_of_keys`.
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

    blocks, full, end = list_at(lists, lists_strides, batch, head, first_query, KEYS)
    dq = tl.full([QUERIES, PADDED_DIM], 0.0, tl.float32)
    for step in tl.range(0, tl.maximum(end, 1)):
        dq = gradients_of_queries(
            dq, q, do, row_lse, row_delta, first_query, key, value, tile_of_list(blocks, step, KEYS),
            tl.where(step < end, keys, 0), offset, scale, seed, last_dropped, kept_scale, batch, head,
            step >= full, DROPOUT, dim, PADDED_DIM, PADDED, KEYS,
        )  # fmt: skip
    store_rows(
        dquery, dquery_strides, dq * scale,
        batch, head, first_query, queries, dim, QUERIES, PADDED_DIM, PADDED, WIDE,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the call


KERNELS = Kernels(forward_kernel, dkey_dvalue_kernel, dquery_kernel)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, block_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        lists = lists_of_keys(call, block_mask, query.device)
        out, lse = flash.forward(KERNELS, tiles, call, query, key, value, lists=lists)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse, lists, block_mask)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lists, block_mask = ctx.saved_tensors
        visits = {"lists": lists, "transposed": lists_of_queries(ctx.call, block_mask, dout.device)}
        return *flash.backward(KERNELS, tiles, ctx.call, ctx.needs_input_grad, dout, *saved, **visits), None, None


@BlockSparseAttention
@opaque
def attention(query: Queries, key: Keys, value: Keys, block_mask: BlockMask | None, call: Call) -> tuple[Queries, Rows]:
    """Block-sparse FlashAttention-2. Returns (out, lse), with gradients for query, key and value."""
    out, lse = _Attention.apply(query, key, value, call, block_mask)
    return out, lse


implementation = Implementation(
    name="triton.block_sparse",
    attention=attention,
    supports=replace(OWN_KERNELS, block_mask=True, linear_memory=False),
    arithmetic=flash.arithmetic_of(tiles),
    missing=missing,
    slow=slow,
    summary=(
        "FlashAttention-2 over a block mask in Triton: empty blocks are skipped, only partial ones are masked, "
        "forward and backward."
    ),
)
