"""The parts that the algorithms of this folder share: tiles, masks of tiles, and the arithmetic of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from flashproof.impls.call import Call, Keys, Queries, Rows
from flashproof.impls.shapes import Bool, Float, Float32
from flashproof.impls.tiled.philox import kept


def tiles(length: int, size: int) -> Iterator[slice]:
    """Splits [0, length) into slices of `size` elements. The last slice may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def hidden(rows: slice, cols: slice, call: Call) -> bool:
    """Whether the causal mask hides every key of a tile from every query of the tile.

    The algorithms skip such a tile. All tiles to the right of it are hidden too.
    """
    return call.is_causal and cols.start > rows.stop - 1 + call.offset


def visible(rows: slice, cols: slice, call: Call, device: torch.device) -> Bool[Tensor, "Br Bc"] | None:
    """Which keys of a tile each query of the tile sees. None means all keys."""
    if not call.is_causal or cols.stop - 1 <= rows.start + call.offset:
        return None
    return (
        torch.arange(cols.start, cols.stop, device=device)
        <= torch.arange(rows.start, rows.stop, device=device)[:, None] + call.offset
    )


def only(
    seen: Bool[Tensor, "Br Bc"] | None, tile: Float32[Tensor, "Br Bc"], otherwise: float
) -> Float32[Tensor, "Br Bc"]:
    """The visible elements of a tile, with `otherwise` at the hidden positions.

    Hidden elements may be infinite. So they are replaced, and not multiplied by 0.
    """
    return tile if seen is None else torch.where(seen, tile, otherwise)


def finite(maximum: Float32[Tensor, "Br 1"]) -> Float32[Tensor, "Br 1"]:
    """A maximum that can be subtracted from the scores of its row.

    If all scores of a row are -inf, the maximum becomes 0, so that the scores stay -inf.
    """
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def on_chip(tile: Float[Tensor, "length d"]) -> Float32[Tensor, "length d"]:
    """Copies a tile to fresh contiguous memory, in float32.

    After the copy, the caller's strides and alignment have no effect.
    """
    return tile.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def oriented(query: Float32[Tensor, "Br d"], call: Call) -> Float32[Tensor, "Br d"]:
    """Negates queries if the scale is negative, so that the largest product is the largest score."""
    return query if call.scale >= 0 else -query


def as_operand(weights: Float32[Tensor, "Br Bc"], dtype: torch.dtype) -> Float32[Tensor, "Br Bc"]:
    """Rounds P or dS to the input dtype, like an operand of a tensor core.

    Products of 16-bit numbers are exact in float32.
    """
    return weights.to(dtype).to(torch.float32)


def dropped(
    weights: Float32[Tensor, "Br Bc"], b: int, h: int, rows: slice, cols: slice, call: Call
) -> Float32[Tensor, "Br Bc"]:
    """Sets the dropped weights to 0. The caller divides its result by 1 - p, once."""
    if call.dropout_p == 0.0:
        return weights
    return torch.where(kept(call.dropout_seed, call.dropout_threshold, b, h, rows, cols, weights.device), weights, 0.0)


def deltas(out: Queries, dout: Queries, call: Call, query_tile: int) -> Rows:
    """rowsum(dO o O) = rowsum(P o dP), for each query.

    The gradient of the softmax subtracts it from the gradient of each weight.
    """
    delta = out.new_empty(out.shape[:3], dtype=torch.float32)
    for b, h in product(range(call.batch), range(call.heads)):
        for rows in tiles(call.queries, query_tile):
            delta[b, h, rows] = (on_chip(dout[b, h, rows]) * on_chip(out[b, h, rows])).sum(dim=1)
    return delta


def recomputed(
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    call: Call,
    b: int,
    h: int,
    rows: slice,
    cols: slice,
) -> tuple[
    Float32[Tensor, "Br Bc"],
    Float32[Tensor, "Br Bc"],
    Float32[Tensor, "Br d"],
    Float32[Tensor, "Br d"],
    Float32[Tensor, "Bc d"],
]:
    """One step of FlashAttention-2's backward pass. Recomputes P = exp(S - LSE), and computes dS = P o (dP - delta).

    Returns P after dropout, dS, and the tiles q, dO and k. P and dS are [Br, Bc], q and dO [Br, d], and k [Bc, d].
    """
    q, do = on_chip(query[b, h, rows]), on_chip(dout[b, h, rows])
    k, v = on_chip(key[b, h // call.groups, cols]), on_chip(value[b, h // call.groups, cols])
    seen = visible(rows, cols, call, q.device)
    weights = only(seen, torch.exp((q @ k.T) * call.scale - lse[b, h, rows, None]), 0.0)
    dweights = dropped(do @ v.T, b, h, rows, cols, call) / (1.0 - call.dropout_p)
    dscores = only(seen, weights * (dweights - delta[b, h, rows, None]), 0.0)
    return as_operand(dropped(weights, b, h, rows, cols, call), query.dtype), as_operand(dscores, query.dtype), q, do, k


@contextmanager
def ieee_products() -> Iterator[None]:
    """Inside this context, operands of float32 matrix products are not rounded to TF32 or bfloat16.

    PyTorch keeps this setting per process, not per call. The context sets it on entry and restores it on exit.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    chosen = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, chosen, strict=True):
            backend.fp32_precision = precision
