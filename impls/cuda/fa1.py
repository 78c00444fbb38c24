"""FlashAttention-1 in CUDA C++: the call, its launches and its claims. The algorithm is in `fa1.cu`.

Two custom operators of torch, `flashproof::cuda_fa1_forward` and `flashproof::cuda_fa1_backward`, launch the kernels.
torch.compile supports such operators.
"""

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.launching import (
    ELEMENTS,
    Launch,
    Problem,
    Tile,
    View,
    call_of,
    check_scale,
    missing,
    packed_seed,
    padded_dim,
    slow,
    vectors,
)
from flashproof.impls.spec import OWN_KERNELS, Arithmetic, Device, Dtype, Implementation, arithmetic_of_flash

# ---------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tiles:
    """The tiles of the two kernels. The queries of a tile are B_r of the paper, and the keys of a step are B_c."""

    forward: Tile
    backward: Tile


# The tiles by the bits of the dtype and the padded head dim. As in the paper, tiles shrink as the head dim grows,
# because on-chip memory is limited.
TILES = {
    (16, 64): Tiles(forward=Tile(4, 16, 64), backward=Tile(4, 16, 32)),
    (16, 128): Tiles(forward=Tile(4, 16, 64), backward=Tile(4, 16, 16)),
    (16, 256): Tiles(forward=Tile(4, 16, 32), backward=Tile(4, 16, 16)),
    (32, 64): Tiles(forward=Tile(4, 16, 32), backward=Tile(4, 16, 32)),
    (32, 128): Tiles(forward=Tile(4, 16, 32), backward=Tile(4, 16, 16)),
    (32, 256): Tiles(forward=Tile(4, 16, 16), backward=Tile(2, 16, 16)),
}
# The tiles on the twin, by the padded head dim. Both kernels are compiled together there, so they share one tile.
TWIN_TILES = {64: Tile(2, 16, 32), 128: Tile(2, 32, 64), 256: Tile(2, 32, 32)}


def tiles(dtype: torch.dtype, dim: int, twin: bool) -> Tiles:
    """The tiles for a dtype and head dim.

    They do not depend on the batch or on the lengths. So a slice of a batch gives the same bits as the whole batch.
    """
    if twin:
        return Tiles(*(TWIN_TILES[padded_dim(dim)],) * 2)
    return TILES[8 * dtype.itemsize, padded_dim(dim)]


# ------------------------------------------------------------------------------------------------------------- launches


def forward_launch(
    call: Call, query: Queries, key: Keys, value: Keys, out: Queries, row_max: Rows, row_sum: Rows, lse: Rows
) -> Launch:
    """The forward: one block for each head.

    out, row_max and row_sum are float32. The caller sets them to 0, -inf and 0, and the kernel updates them. The kernel
    also fills lse.
    """
    tile = tiles(query.dtype, call.dim, launching.on_twin(query)).forward
    shared_bytes = (tile.own + 2 * tile.step) * padded_dim(call.dim) * query.itemsize
    views = (
        View.of(query),
        View.of(key),
        View.of(value),
        *(ctypes.c_void_p(x.data_ptr()) for x in (out, row_max, row_sum, lse)),
    )
    constants = _constants(call, tile, query, key, value)
    arguments = (*views, Problem.of(call), ctypes.c_int(call.offset))
    return Launch(
        "fa1.cu",
        "forward",
        call.batch * call.heads,
        tile.warps,
        shared_bytes,
        constants,
        (query, key, value, out, row_max, row_sum, lse),
        arguments,
    )


def backward_launch(
    call: Call,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    out: Queries,
    row_max: Rows,
    row_sum: Rows,
    dquery: Queries,
    dkey: Keys,
    dvalue: Keys,
) -> Launch:
    """The backward: one block for each key head.

    dquery is float32. The caller sets it to 0, and the kernel adds to it. The kernel also fills dkey and dvalue.
    """
    tile = tiles(query.dtype, call.dim, launching.on_twin(query)).backward
    shared_bytes = (2 * (tile.own + tile.step) * padded_dim(call.dim) + 2 * tile.own * tile.step) * query.itemsize
    views = (
        *map(View.of, (query, key, value, dout, out)),
        *(ctypes.c_void_p(x.data_ptr()) for x in (row_max, row_sum, dquery)),
        View.of(dkey),
        View.of(dvalue),
    )
    constants = _constants(call, tile, query, key, value, dout)
    tensors = (query, key, value, dout, out, row_max, row_sum, dquery, dkey, dvalue)
    arguments = (*views, Problem.of(call), ctypes.c_int(call.offset))
    return Launch(
        "fa1.cu", "backward", call.batch * call.kv_heads, tile.warps, shared_bytes, constants, tensors, arguments
    )


def _constants(call: Call, tile: Tile, *inputs: Tensor) -> dict[str, int | str]:
    kind: dict[str, int | str] = {
        "Element": ELEMENTS[inputs[0].dtype],
        "DIM": padded_dim(call.dim),
        "VECTOR": int(vectors(*inputs)),
    }
    return kind | {"CAUSAL": int(call.is_causal), "DROPOUT": int(call.dropout_p > 0.0)} | tile.constants


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("flashproof::cuda_fa1_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward: returns (out, lse, row_max, row_sum)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    rows = query.shape[:3]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    row_max = torch.full(rows, -math.inf, dtype=torch.float32, device=query.device)
    row_sum = torch.zeros(rows, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, dtype=torch.float32, device=query.device)
    forward_launch(call, query, key, value, out, row_max, row_sum, lse).run()
    return out.to(query.dtype), lse, row_max, row_sum


@torch.library.custom_op("flashproof::cuda_fa1_backward", mutates_args=())
def _backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward: returns (dquery, dkey, dvalue)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    dquery = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    dkey, dvalue = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value))
    backward_launch(call, query, key, value, dout, out, row_max, row_sum, dquery, dkey, dvalue).run()
    return dquery.to(query.dtype), dkey, dvalue


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    rows = (torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) for _ in range(3))
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), *rows


@_backward.register_fake
def _(_dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, *ctx.options = inputs
    out, *statistics = output
    ctx.save_for_backward(query, key, value, out, *statistics[1:])
    ctx.mark_non_differentiable(*statistics)


def _differentiate(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)


_forward.register_autograd(_differentiate, setup_context=_keep)

# ------------------------------------------------------------------------------------------------------------- the call


@Attention
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-1: returns (out, lse), with gradients for query, key and value.

    Raises ValueError if the scale is beyond float32, and CudaError if a kernel cannot be compiled or launched.
    """
    check_scale(call)
    options = (call.scale, call.is_causal, call.offset, call.dropout_p, packed_seed(call.dropout_seed))
    out, lse, *_ = _forward(query, key, value, *options)
    return out, lse


def _arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """The claimed arithmetic.

    Tiles differ between head dims. The claim has the smallest tiles, because they make the most steps.
    """
    chosen = [tiles(getattr(torch, dtype), dim, device == "cpu") for dim in (64, 128, 256)]
    return replace(
        arithmetic_of_flash(dtype, device),
        key_tile=min(tile.step for each in chosen for tile in (each.forward, each.backward)),
        query_tile=min(each.backward.own for each in chosen),
    )


implementation = Implementation(
    name="cuda.fa1",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=_arithmetic,
    missing=missing,
    slow=slow,
    summary="FlashAttention-1 in CUDA C++: outer loop over keys, the output rescaled in device memory at every step.",
)
