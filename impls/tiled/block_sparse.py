"""Block-sparse FlashAttention: FlashAttention-2 over a block mask.

Source: Dao et al., "FlashAttention", 2022, arXiv 2205.14135, section 3.3 and Algorithm 5.

Changes from FlashAttention-2: a mask has one entry for each block of 128 x 128 scores. The forward and the backward
pass make steps only for visible blocks. A table of these blocks is computed before a pass begins. A row of the table
lists the key tiles of a query tile, for out and dQ. A column lists the query tiles of a key tile, for dK and dV. Only
blocks that the causal mask cuts are masked inside. The work is proportional to the share of visible blocks.

Shapes: Br = Bc = BLOCK = 128 queries and keys, d = head dim. The last tile of a length may be shorter.
"""

from dataclasses import replace
from functools import partial
from itertools import compress, product

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from flashproof.impls.call import BLOCK, BlockMask, BlockSparseAttention, Call, Keys, Queries, Rows, opaque
from flashproof.impls.shapes import Bool
from flashproof.impls.spec import OWN_KERNELS, Arithmetic, Device, Dtype, Implementation
from flashproof.impls.tiled.primitives import (
    as_operand,
    deltas,
    dropped,
    finite,
    hidden,
    ieee_products,
    on_chip,
    only,
    oriented,
    recomputed,
    tiles,
    visible,
)

# True for each visible block of 128 x 128 scores.
Blocks = Bool[Tensor, "batch heads query_blocks key_blocks"]


@BlockSparseAttention
@opaque
def attention(query: Queries, key: Keys, value: Keys, block_mask: BlockMask | None, call: Call) -> tuple[Queries, Rows]:
    """Block-sparse FlashAttention-2. Returns (out, lse), with gradients for query, key and value."""
    out, lse = _BlockSparse.apply(query, key, value, block_mask, call)  # type: ignore[no-untyped-call]
    return out, lse


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        blocks = visible_blocks(block_mask, call)
        with ieee_products():
            out, lse = forward(query, key, value, blocks, call)
        ctx.save_for_backward(query, key, value, out, lse, blocks)
        ctx.mark_non_differentiable(lse)
        ctx.call = call  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse, blocks = ctx.saved_tensors  # type: ignore[attr-defined]
        with ieee_products():
            return (
                *backward(query, key, value, out, lse, dout, blocks, ctx.call),  # type: ignore[attr-defined]
                None,
                None,
            )


def visible_blocks(block_mask: BlockMask | None, call: Call) -> Blocks:
    """The blocks in which at least one score is visible, under the block mask and the causal mask.

    The table is in host memory, where the loops over the blocks run. A row lists the key tiles of a query tile. A
    column lists the query tiles of a key tile.
    """
    reached = torch.tensor(
        [[not hidden(rows, cols, call) for cols in tiles(call.keys, BLOCK)] for rows in tiles(call.queries, BLOCK)]
    )
    blocks = reached if block_mask is None else reached & block_mask.cpu()
    return blocks.expand(call.batch, call.heads, *reached.shape)


def forward(query: Queries, key: Keys, value: Keys, blocks: Blocks, call: Call) -> tuple[Queries, Rows]:
    """The forward pass of FlashAttention-2 over the visible blocks.

    Returns out [batch, heads, queries, dim] in the input dtype, and lse [batch, heads, queries] in float32.
    """
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    sharpness = abs(call.scale)
    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, BLOCK):
            q = oriented(on_chip(query[b, h, rows]), call)  # [Br, d]
            maximum = q.new_full((len(q), 1), -torch.inf)
            total = q.new_zeros((len(q), 1))
            acc = torch.zeros_like(q)
            for cols in compress(tiles(call.keys, BLOCK), blocks[b, h, rows.start // BLOCK].tolist()):
                k, v = on_chip(key[b, h // call.groups, cols]), on_chip(value[b, h // call.groups, cols])  # [Bc, d]
                seen = visible(rows, cols, call, q.device)
                # The scale is applied after the maximum is subtracted, so that equal scores differ by exactly 0.
                scores = only(seen, q @ k.T, -torch.inf)  # [Br, Bc]
                # A row that has seen no key keeps the maximum -inf. The result of -inf - -inf is replaced by 0.
                new_maximum = torch.maximum(maximum, scores.amax(dim=1, keepdim=True))
                weights = only(seen, torch.exp((scores - finite(new_maximum)) * sharpness), 0.0)
                rescale = torch.where(maximum > -torch.inf, torch.exp((maximum - new_maximum) * sharpness), 0.0)
                total = rescale * total + weights.sum(dim=1, keepdim=True)
                acc = rescale * acc + as_operand(dropped(weights, b, h, rows, cols, call), query.dtype) @ v
                maximum = new_maximum
            empty = total == 0
            out[b, h, rows] = torch.where(empty, 0.0, acc / (total * (1.0 - call.dropout_p)))
            lse[b, h, rows] = torch.where(empty, -torch.inf, maximum * sharpness + torch.log(total))[:, 0]
    return out, lse


def backward(
    query: Queries, key: Keys, value: Keys, out: Queries, lse: Rows, dout: Queries, blocks: Blocks, call: Call
) -> tuple[Queries, Keys, Keys]:
    """The backward pass of FlashAttention-2 over the visible blocks.

    Returns the gradients of query, key and value. Each is summed in float32 and rounded once to the input dtype.
    """
    dquery, dkey, dvalue = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    delta = deltas(out, dout, call, BLOCK)
    # step(b, h, rows, cols) returns P after dropout and dS [Br, Bc],
    # and the tiles that they multiply: q, dO [Br, d] and k [Bc, d].
    step = partial(recomputed, query, key, value, dout, lse, delta, call)

    for b, g in product(range(call.batch), range(call.kv_heads)):
        for cols in tiles(call.keys, BLOCK):
            dk = key.new_zeros((cols.stop - cols.start, call.dim), dtype=torch.float32)
            dv = torch.zeros_like(dk)
            for h in range(g * call.groups, (g + 1) * call.groups):
                for rows in compress(tiles(call.queries, BLOCK), blocks[b, h, :, cols.start // BLOCK].tolist()):
                    weights, dscores, q, do, _ = step(b, h, rows, cols)
                    dv += weights.T @ do
                    dk += dscores.T @ q
            dkey[b, g, cols] = dk * call.scale
            dvalue[b, g, cols] = dv / (1.0 - call.dropout_p)

    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, BLOCK):
            dq = query.new_zeros((rows.stop - rows.start, call.dim), dtype=torch.float32)
            for cols in compress(tiles(call.keys, BLOCK), blocks[b, h, rows.start // BLOCK].tolist()):
                _, dscores, _, _, k = step(b, h, rows, cols)
                dq += dscores @ k
            dquery[b, h, rows] = dq * call.scale
    return dquery, dkey, dvalue


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """On every device, tiles are cast to float32 and multiplied in float32.

    Products of 16-bit numbers are exact, and sums are float32 with one rounding per step.
    """
    return Arithmetic(accumulate="fma", weights="input", key_tile=BLOCK, query_tile=BLOCK)


implementation = Implementation(
    name="tiled.block_sparse",
    attention=attention,
    supports=replace(OWN_KERNELS, block_mask=True),
    arithmetic=arithmetic,
    slow=lambda device: "tile",
    summary="FlashAttention-2 over a block mask in plain PyTorch: empty blocks are skipped, partial ones masked.",
)
