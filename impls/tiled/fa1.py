"""FlashAttention-1: the algorithm of the first paper, in its order.

Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention: fast and memory-efficient exact attention with IO-awareness",
2022, arXiv 2205.14135.

The outer loop runs over tiles of keys and values, and the inner loop runs over tiles of queries. So each tile of keys
is read once. At every step, the output is read, rescaled, normalised and written back, together with its running
maximum m and its running sum ell. They live in device memory (here: tensors of a whole head), but the scores never do.
The backward pass recomputes the weights from m and ell, in the same order. dK and dV of a tile of keys stay on chip,
and dQ is accumulated in device memory.

Shapes: Bc = ceil(M / 4d) keys and Br = min(Bc, d) queries, where the chip holds M numbers and d = head dim. Here Br is
at least 16, because the paper's Br is 1 for d = 1. The last tile of a length may be shorter.
"""

from itertools import product

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows, opaque
from flashproof.impls.spec import OWN_KERNELS, Arithmetic, Device, Dtype, Implementation
from flashproof.impls.tiled.primitives import (
    as_operand,
    dropped,
    finite,
    hidden,
    ieee_products,
    on_chip,
    only,
    oriented,
    tiles,
    visible,
)

ON_CHIP = 32 * 1024  # M: how many float32 numbers fit in 128 KiB, the shared memory of one multiprocessor


def tile_sizes(dim: int) -> tuple[int, int]:
    """Br and Bc (Algorithm 1, line 1).

    Each tile of queries, keys, values or outputs takes at most about a quarter of the chip.
    """
    key_tile = -(-ON_CHIP // (4 * dim))
    return min(key_tile, max(dim, 16)), key_tile


@Attention
@opaque
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-1. Returns (out, lse), with gradients for query, key and value."""
    out, lse = _FlashAttention1.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out, lse


class _FlashAttention1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        with ieee_products():
            out, maximum, total = forward(query, key, value, call)
        lse = torch.where(total == 0, -torch.inf, maximum * abs(call.scale) + torch.log(total))
        ctx.save_for_backward(query, key, value, out, maximum, total)
        ctx.mark_non_differentiable(lse)
        ctx.call = call  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, maximum, total = ctx.saved_tensors  # type: ignore[attr-defined]
        with ieee_products():
            return *backward(query, key, value, out, maximum, total, dout, ctx.call), None  # type: ignore[attr-defined]


def forward(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows, Rows]:
    """Algorithm 2: the forward pass.

    Returns out [batch, heads, queries, dim] in the input dtype, and m and ell [batch, heads, queries] in float32. m is
    the maximum of the products before the scale.
    """
    out = query.new_empty(query.shape)
    maximum = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    total = query.new_zeros(query.shape[:3], dtype=torch.float32)
    sharpness = abs(call.scale)
    query_tile, key_tile = tile_sizes(call.dim)
    for b, h in product(range(call.batch), range(call.heads)):
        o = query.new_zeros((call.queries, call.dim), dtype=torch.float32)
        m, ell = maximum[b, h, :, None], total[b, h, :, None]  # views: [queries, 1]
        for cols in tiles(call.keys, key_tile):
            k, v = on_chip(key[b, h // call.groups, cols]), on_chip(value[b, h // call.groups, cols])  # [Bc, d]
            for rows in tiles(call.queries, query_tile):
                if hidden(rows, cols, call):
                    continue
                q = oriented(on_chip(query[b, h, rows]), call)  # [Br, d]
                seen = visible(rows, cols, call, q.device)
                # The scale is applied after the maximum is subtracted, so that equal scores differ by exactly 0.
                scores = only(seen, q @ k.T, -torch.inf)  # [Br, Bc]
                tile_m = scores.amax(dim=1, keepdim=True)
                weights = only(seen, torch.exp((scores - finite(tile_m)) * sharpness), 0.0)
                tile_ell = weights.sum(dim=1, keepdim=True)
                # A row that has seen no key keeps the maximum -inf. The result of -inf - -inf is replaced by 0.
                new_m = torch.maximum(m[rows], tile_m)
                keep = torch.where(m[rows] > -torch.inf, torch.exp((m[rows] - new_m) * sharpness), 0.0)
                add = torch.where(tile_m > -torch.inf, torch.exp((tile_m - new_m) * sharpness), 0.0)
                new_ell = keep * ell[rows] + add * tile_ell
                new_o = as_operand(dropped(weights, b, h, rows, cols, call), query.dtype) @ v / (1.0 - call.dropout_p)
                o[rows] = torch.where(new_ell == 0, 0.0, (ell[rows] * keep * o[rows] + add * new_o) / new_ell)
                m[rows], ell[rows] = new_m, new_ell
        out[b, h] = o
    return out, maximum, total


def backward(
    query: Queries, key: Keys, value: Keys, out: Queries, maximum: Rows, total: Rows, dout: Queries, call: Call
) -> tuple[Queries, Keys, Keys]:
    """Algorithm 4: the backward pass.

    Returns the gradients of query, key and value. Each is summed in float32 and rounded once to the input dtype.
    """
    dquery, dkey, dvalue = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    sharpness = abs(call.scale)
    query_tile, key_tile = tile_sizes(call.dim)
    for b, g in product(range(call.batch), range(call.kv_heads)):
        heads = slice(g * call.groups, (g + 1) * call.groups)
        dq = query.new_zeros((call.groups, call.queries, call.dim), dtype=torch.float32)
        for cols in tiles(call.keys, key_tile):
            k, v = on_chip(key[b, g, cols]), on_chip(value[b, g, cols])  # [Bc, d]
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for h, rows in product(range(heads.start, heads.stop), tiles(call.queries, query_tile)):
                if hidden(rows, cols, call):
                    continue
                q, o, do = on_chip(query[b, h, rows]), on_chip(out[b, h, rows]), on_chip(dout[b, h, rows])  # [Br, d]
                m, ell = maximum[b, h, rows, None], total[b, h, rows, None]  # [Br, 1]
                seen = visible(rows, cols, call, q.device)
                weights = only(seen, torch.exp((oriented(q, call) @ k.T - m) * sharpness) / ell, 0.0)  # [Br, Bc]
                dv += as_operand(dropped(weights, b, h, rows, cols, call), query.dtype).T @ do
                dweights = dropped(do @ v.T, b, h, rows, cols, call) / (1.0 - call.dropout_p)
                # delta = rowsum(P o dP). The normalisation subtracts it from the gradient of each weight.
                delta = (do * o).sum(dim=1, keepdim=True)
                dscores = as_operand(only(seen, weights * (dweights - delta), 0.0), query.dtype)
                dq[h - heads.start, rows] += dscores @ k
                dk += dscores.T @ q
            dkey[b, g, cols] = dk * call.scale
            dvalue[b, g, cols] = dv / (1.0 - call.dropout_p)
        dquery[b, heads] = dq * call.scale
    return dquery, dkey, dvalue


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """On every device, tiles are cast to float32 and multiplied in float32.

    Products of 16-bit numbers are exact, and sums are float32 with one rounding per step. The claim gives no tile
    sizes, because they depend on the head dim.
    """
    return Arithmetic(accumulate="fma", weights="input")


implementation = Implementation(
    name="tiled.fa1",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=arithmetic,
    slow=lambda device: "tile",
    summary="FlashAttention-1 in plain PyTorch: key tiles outside, the output rescaled at each step.",
)
