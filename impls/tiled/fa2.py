"""FlashAttention-2.

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023, arXiv 2307.08691.

Changes from FlashAttention-1: the outer loop runs over tiles of queries. So the output, the running maximum and the
running sum of a tile stay on chip (here: local variables) until they are complete. One division at the end replaces one
division per step. The forward pass keeps only the log-sum-exp of a row for the backward pass, not its maximum and its
sum. The backward pass recomputes the weights twice: by tiles of keys for dK and dV, and by tiles of queries for dQ.
Each gradient has one writer, so there are no atomics, and the order of the sums is fixed.

Shapes: Br = QUERY_TILE queries, Bc = KEY_TILE keys, d = head dim. The last tile of a length may be shorter.
"""

from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows, opaque
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

QUERY_TILE = 128
KEY_TILE = 128


@Attention
@opaque
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-2. Returns (out, lse), with gradients for query, key and value."""
    out, lse = _FlashAttention2.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out, lse


class _FlashAttention2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        with ieee_products():
            out, lse = forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.call = call  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        with ieee_products():
            return *backward(query, key, value, out, lse, dout, ctx.call), None  # type: ignore[attr-defined]


def forward(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """Algorithm 1: the forward pass.

    Returns out [batch, heads, queries, dim] in the input dtype, and lse [batch, heads, queries] in float32.
    """
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    sharpness = abs(call.scale)
    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, QUERY_TILE):
            q = oriented(on_chip(query[b, h, rows]), call)  # [Br, d]
            maximum = q.new_full((len(q), 1), -torch.inf)
            total = q.new_zeros((len(q), 1))
            acc = torch.zeros_like(q)
            for cols in tiles(call.keys, KEY_TILE):
                if hidden(rows, cols, call):
                    break
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
    query: Queries, key: Keys, value: Keys, out: Queries, lse: Rows, dout: Queries, call: Call
) -> tuple[Queries, Keys, Keys]:
    """Algorithm 2: the backward pass.

    Returns the gradients of query, key and value. Each is summed in float32 and rounded once to the input dtype.
    """
    dquery, dkey, dvalue = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    delta = deltas(out, dout, call, QUERY_TILE)
    # step(b, h, rows, cols) returns P after dropout and dS [Br, Bc],
    # and the tiles that they multiply: q, dO [Br, d] and k [Bc, d].
    step = partial(recomputed, query, key, value, dout, lse, delta, call)

    for b, g in product(range(call.batch), range(call.kv_heads)):
        for cols in tiles(call.keys, KEY_TILE):
            dk = key.new_zeros((cols.stop - cols.start, call.dim), dtype=torch.float32)
            dv = torch.zeros_like(dk)
            for h, rows in product(range(g * call.groups, (g + 1) * call.groups), tiles(call.queries, QUERY_TILE)):
                if not hidden(rows, cols, call):
                    weights, dscores, q, do, _ = step(b, h, rows, cols)
                    dv += weights.T @ do
                    dk += dscores.T @ q
            dkey[b, g, cols] = dk * call.scale
            dvalue[b, g, cols] = dv / (1.0 - call.dropout_p)

    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, QUERY_TILE):
            dq = query.new_zeros((rows.stop - rows.start, call.dim), dtype=torch.float32)
            for cols in tiles(call.keys, KEY_TILE):
                if hidden(rows, cols, call):
                    break
                _, dscores, _, _, k = step(b, h, rows, cols)
                dq += dscores @ k
            dquery[b, h, rows] = dq * call.scale
    return dquery, dkey, dvalue


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """On every device, tiles are cast to float32 and multiplied in float32.

    Products of 16-bit numbers are exact, and sums are float32 with one rounding per step.
    """
    return Arithmetic(accumulate="fma", weights="input", key_tile=KEY_TILE, query_tile=QUERY_TILE)


implementation = Implementation(
    name="tiled.fa2",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=arithmetic,
    slow=lambda device: "tile",
    summary="FlashAttention-2 in plain PyTorch: query tiles outside, one division at the end.",
)
