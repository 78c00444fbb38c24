"""Block-sparse FlashAttention: FlashAttention-2 over a block mask (Dao et al., "FlashAttention", 2022, arXiv 2205.14135, section 3.3 and Algorithm 5).

What changed against FlashAttention-2: a mask has one entry for each block of 128 x 128 scores, and steps are made for visible blocks alone, forward and
backward. They are found before the work begins: a row of the table lists a query tile's key tiles, for out and dQ, a column a key tile's query tiles, for
dK and dV. Only blocks that the causal mask cuts are masked inside. The work is proportional to the visible share.

Shapes: Br = Bc = BLOCK = 128 queries and keys, d = head dim; the last tile of a length is as short as it is.
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
from flashproof.impls.tiled.primitives import as_operand, deltas, dropped, finite, hidden, ieee_products, on_chip, only, oriented, recomputed, tiles, visible

# Which blocks of 128 x 128 scores are visible.
Blocks = Bool[Tensor, "batch heads query_blocks key_blocks"]


@BlockSparseAttention
@opaque
def attention(query: Queries, key: Keys, value: Keys, block_mask: BlockMask | None, call: Call) -> tuple[Queries, Rows]:
    """Block-sparse FlashAttention-2: (out, lse), with gradients for query, key and value."""
    out, lse = _BlockSparse.apply(query, key, value, block_mask, call)  # type: ignore[no-untyped-call]
    return out, lse


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
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
            return *backward(query, key, value, out, lse, dout, blocks, ctx.call), None, None  # type: ignore[attr-defined]


def visible_blocks(block_mask: BlockMask | None, call: Call) -> Blocks:
    """The blocks of which some score is visible, by the block mask and by the causal one; in host memory, where the loops over them run.

    A row of it lists a query tile's key tiles, a column a key tile's query tiles.
    """
    reached = torch.tensor([[not hidden(rows, cols, call) for cols in tiles(call.keys, BLOCK)] for rows in tiles(call.queries, BLOCK)])
    blocks = reached if block_mask is None else reached & block_mask.cpu()
    return blocks.expand(call.batch, call.heads, *reached.shape)


def forward(query: Queries, key: Keys, value: Keys, blocks: Blocks, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-2's forward pass over the visible blocks: out [batch, heads, queries, dim] in the input dtype, lse [batch, heads, queries] in float32."""
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
                # Scores wait for their scale until the maximum is subtracted, so that equal scores have a difference of exactly 0.
                scores = only(seen, q @ k.T, -torch.inf)  # [Br, Bc]
                # A row that has seen nothing keeps the maximum -inf; what would come of -inf - -inf is replaced by 0.
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


def backward(query: Queries, key: Keys, value: Keys, out: Queries, lse: Rows, dout: Queries, blocks: Blocks, call: Call) -> tuple[Queries, Keys, Keys]:
    """FlashAttention-2's backward pass over the visible blocks: the gradients, each summed in float32 and rounded once to the input dtype."""
    dquery, dkey, dvalue = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    delta = deltas(out, dout, call, BLOCK)
    # step(b, h, rows, cols): P after dropout and dS [Br, Bc], and the tiles that they are multiplied with: q, dO [Br, d], k [Bc, d].
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
    """Tiles are cast to float32 and multiplied there, on every device: products of 16-bit numbers are exact, sums are float32 with one rounding a step."""
    return Arithmetic(accumulate="fma", weights="input", key_tile=BLOCK, query_tile=BLOCK)


implementation = Implementation(
    name="tiled.block_sparse",
    attention=attention,
    supports=replace(OWN_KERNELS, block_mask=True),
    arithmetic=arithmetic,
    slow=lambda device: "tile",
    summary="FlashAttention-2 over a block mask in plain PyTorch: empty blocks are skipped, partial ones masked.",
)
