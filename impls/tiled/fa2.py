"""FlashAttention-2 (Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023, arXiv 2307.08691).

What changed against FlashAttention-1: the outer loop runs over tiles of queries, so that the output, the running maximum and the running sum of a tile stay
on chip (here: local variables) until they are done; one division at the end instead of one a step; only the log-sum-exp is kept for the backward
pass. The backward pass recomputes the weights twice: once by tiles of keys for dK and dV, once by tiles of queries for dQ. Each gradient has one writer, so
there are no atomics and the sums have a fixed order.

Shapes: Br = QUERY_TILE queries, Bc = KEY_TILE keys, d = head dim; the last tile of a length is as short as it is.
"""

from collections.abc import Iterator
from itertools import product

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from impls.call import Call, check_call
from impls.spec import Alignment, Arithmetic, Device, Dtype, Implementation, Supports
from impls.tiled.ieee import ieee_products
from impls.tiled.philox import kept

QUERY_TILE = 128
KEY_TILE = 128


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
) -> Float[Tensor, "batch heads queries dim"] | tuple[Float[Tensor, "batch heads queries dim"], Float32[Tensor, "batch heads queries"]]:
    """softmax(scale query key^T) value, and with `return_lse` the natural logarithm of the sums of exp(scale query key^T), in float32.

    is_causal lets query i see key j when j <= i ("top_left") or j <= i + keys - queries ("bottom_right"). scale defaults to 1/sqrt(dim). Gradients
    flow to query, key and value, not through the LSE. A query that sees no key gets 0, LSE -inf and no gradient. Errors: see `impls.call.check_call`.
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
    out, lse = _FlashAttention2.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


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
        with ieee_products():
            query, key, value, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
            return *backward(query, key, value, out, lse, dout, ctx.call), None  # type: ignore[attr-defined]


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Algorithm 1: out [batch, heads, queries, dim] in the input dtype, lse [batch, heads, queries] in float32."""
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    sharpness = abs(call.scale)
    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, QUERY_TILE):
            q = oriented(query[b, h, rows], call)  # [Br, d]
            maximum = q.new_full((len(q), 1), -torch.inf)
            total = q.new_zeros((len(q), 1))
            acc = torch.zeros_like(q)
            for cols in tiles(call.keys, KEY_TILE):
                if hidden(rows, cols, call):
                    break
                k, v = on_chip(key[b, h // call.groups, cols]), on_chip(value[b, h // call.groups, cols])  # [Bc, d]
                scores = q @ k.T  # [Br, Bc], before the scale: subtracting first keeps equal scores equal
                seen = visible(rows, cols, call, q.device)
                scores = scores if seen is None else torch.where(seen, scores, -torch.inf)
                # A row that has seen nothing keeps the maximum -inf; every weight that would come of -inf - -inf is replaced by 0.
                new_maximum = torch.maximum(maximum, scores.amax(dim=1, keepdim=True))
                weights = torch.exp((scores - new_maximum) * sharpness)
                weights = weights if seen is None else torch.where(seen, weights, 0.0)
                rescale = torch.where(maximum > -torch.inf, torch.exp((maximum - new_maximum) * sharpness), 0.0)
                total = rescale * total + weights.sum(dim=1, keepdim=True)
                acc = rescale * acc + as_operand(dropped(weights, b, h, rows, cols, call), query.dtype) @ v
                maximum = new_maximum
            some = total > 0
            out[b, h, rows] = torch.where(some, acc / (total * (1.0 - call.dropout_p)), 0.0)
            lse[b, h, rows] = torch.where(some, maximum * sharpness + torch.log(total), -torch.inf)[:, 0]
    return out, lse


def backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dout: Tensor, call: Call
) -> tuple[Float[Tensor, "batch heads queries dim"], Float[Tensor, "batch kv_heads keys dim"], Float[Tensor, "batch kv_heads keys dim"]]:
    """Algorithm 2: the gradients, each summed in float32 and rounded once to the input dtype."""
    dquery, dkey, dvalue = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    delta = torch.empty_like(lse)  # rowsum(dO o O) = rowsum(P o dP), the derivative of the softmax's normalisation
    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, QUERY_TILE):
            delta[b, h, rows] = (on_chip(dout[b, h, rows]) * on_chip(out[b, h, rows])).sum(dim=1)

    def step(b: int, h: int, rows: slice, cols: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Weights as the output saw them, gradient of the scores, and the tiles that both are multiplied with."""
        q, do = on_chip(query[b, h, rows]), on_chip(dout[b, h, rows])  # [Br, d]
        k, v = on_chip(key[b, h // call.groups, cols]), on_chip(value[b, h // call.groups, cols])  # [Bc, d]
        weights = torch.exp((q @ k.T) * call.scale - lse[b, h, rows, None])  # [Br, Bc]
        seen = visible(rows, cols, call, q.device)
        dweights = dropped(do @ v.T, b, h, rows, cols, call) / (1.0 - call.dropout_p)
        dscores = weights * (dweights - delta[b, h, rows, None])
        if seen is not None:  # both: a hidden value may be so large that dweights is infinite, and 0 times that is NaN
            weights, dscores = torch.where(seen, weights, 0.0), torch.where(seen, dscores, 0.0)
        return as_operand(dropped(weights, b, h, rows, cols, call), query.dtype), as_operand(dscores, query.dtype), q, do, k

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


def tiles(length: int, size: int) -> Iterator[slice]:
    """[0, length) in pieces of `size`, the last one shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def hidden(rows: slice, cols: slice, call: Call) -> bool:
    """Whether no query of the tile sees any key of it; then it is skipped. Tiles of keys further right are hidden too."""
    return call.is_causal and cols.start > rows.stop - 1 + call.offset


def visible(rows: slice, cols: slice, call: Call, device: torch.device) -> Bool[Tensor, "Br Bc"] | None:
    """Which keys of a tile each query of it sees; None: all of them."""
    if not call.is_causal or cols.stop - 1 <= rows.start + call.offset:
        return None
    return torch.arange(cols.start, cols.stop, device=device) <= torch.arange(rows.start, rows.stop, device=device)[:, None] + call.offset


def on_chip(tile: Float[Tensor, "length d"]) -> Float32[Tensor, "length d"]:
    """A tile in float32, in memory of its own: the caller's strides and alignment end here."""
    return tile.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def oriented(tile: Float[Tensor, "Br d"], call: Call) -> Float32[Tensor, "Br d"]:
    """Queries with the sign of the scale, so that the largest product is the largest score."""
    return on_chip(tile) if call.scale >= 0 else -on_chip(tile)


def as_operand(weights: Float32[Tensor, "Br Bc"], dtype: torch.dtype) -> Float32[Tensor, "Br Bc"]:
    """Rounded to the input dtype, as an operand of a tensor core is; products of such numbers are exact in float32."""
    return weights.to(dtype).to(torch.float32)


def dropped(weights: Float32[Tensor, "Br Bc"], b: int, h: int, rows: slice, cols: slice, call: Call) -> Float32[Tensor, "Br Bc"]:
    """Weights with the dropped ones set to 0; the division by 1 - p is left to the caller, who does it once."""
    if call.dropout_p == 0.0:
        return weights
    return torch.where(kept(call.dropout_seed, call.dropout_threshold, b, h, rows, cols, weights.device), weights, 0.0)


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """Operands are cast to float32 and multiplied there, on every device: products of 16-bit numbers are exact, sums are float32 with one rounding a step."""
    return Arithmetic(accumulate="fma", weights="input", key_tile=KEY_TILE, query_tile=QUERY_TILE)


implementation = Implementation(
    name="tiled.fa2",
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
    arithmetic=arithmetic,
    summary="FlashAttention-2 in plain PyTorch: query tiles outside, one division at the end.",
)
