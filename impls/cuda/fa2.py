"""FlashAttention-2 in CUDA C++: the call, its launches and its claims. The algorithm is in `fa2.cu`.

The kernels are reached through custom operators of torch (`flashproof::cuda_fa2_forward`, `flashproof::cuda_fa2_backward`), which torch.compile takes.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from impls.call import Call, check_call
from impls.cuda import launching
from impls.cuda.launching import ELEMENTS, Launch, Problem, Tile, View, check_scale, missing, packed_seed, padded_dim, sign_of, unpacked_seed, vectors
from impls.spec import Alignment, Arithmetic, Device, Dtype, Implementation, Supports

# ------------------------------------------------------------------------------------------------------------------------------ tiles


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels that have a loop."""

    forward: Tile
    dkey_dvalue: Tile
    dquery: Tile


# On a GPU, by the bits of the dtype and the padded head dim.
TILES = {
    (16, 64): Tiles(forward=Tile(4, 32, 64, hold=True), dkey_dvalue=Tile(4, 16, 64), dquery=Tile(4, 32, 32)),
    (16, 128): Tiles(forward=Tile(4, 16, 64, hold=True), dkey_dvalue=Tile(4, 16, 32), dquery=Tile(4, 16, 64)),
    (16, 256): Tiles(forward=Tile(4, 16, 32), dkey_dvalue=Tile(8, 16, 16, split=2), dquery=Tile(4, 16, 16)),
    (32, 64): Tiles(forward=Tile(4, 32, 32), dkey_dvalue=Tile(4, 16, 32), dquery=Tile(4, 32, 32)),
    (32, 128): Tiles(forward=Tile(4, 32, 16), dkey_dvalue=Tile(4, 16, 16), dquery=Tile(4, 32, 16)),
    (32, 256): Tiles(forward=Tile(4, 16, 16), dkey_dvalue=Tile(4, 16, 16, split=2), dquery=Tile(2, 16, 16)),
}
# On the twin one tile serves the kernels of a file, which are compiled together. Between them they have all that a GPU's have: 16 rows to a warp or 32, more
# rows than columns and fewer, operands held and read again, rows split between warps.
TWIN_TILES = {64: Tile(4, 16, 32, hold=True), 128: Tile(2, 32, 64), 256: Tile(4, 16, 16, split=2)}


def tiles(dtype: torch.dtype, dim: int, twin: bool) -> Tiles:
    """The tiles for a dtype and head dim. The batch and the lengths have no say, so a slice of a batch is computed as it is in the batch."""
    if twin:
        return Tiles(*(TWIN_TILES[padded_dim(dim)],) * 3)
    return TILES[8 * dtype.itemsize, padded_dim(dim)]


# --------------------------------------------------------------------------------------------------------------------------- launches


class Mask(ctypes.Structure):
    """`Mask` of fa2.cu."""

    _fields_ = (("offset", ctypes.c_int),)


def forward_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """One block for each tile of queries of each head. Fills out and lse."""
    tile = tiles(query.dtype, call.dim, launching.on_twin(query)).forward
    blocks = -(-call.queries // tile.own) * call.heads * call.batch
    return _launch("forward", call, tile, blocks, tile.own + 4 * tile.step, (query, key, value), (out, lse))


def delta_launch(call: Call, out: Tensor, dout: Tensor, delta: Tensor) -> Launch:
    """One block for a few queries of a head, a warp to each. Fills delta."""
    tile = tiles(out.dtype, call.dim, launching.on_twin(out)).dquery
    blocks = -(-call.queries // tile.warps) * call.heads * call.batch
    sizes = (ctypes.c_int(call.heads), ctypes.c_int(call.queries), ctypes.c_int(call.dim))
    arguments = (View.of(out), View.of(dout), ctypes.c_void_p(delta.data_ptr()), *sizes)
    constants = _constants(call, out, tile) | {"VECTOR": 0, "CAUSAL": 0, "DROPOUT": 0, "SIGN": 1}
    return Launch("fa2.cu", "delta", blocks, tile.warps, 0, constants, (out, dout, delta), arguments)


def dkey_dvalue_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dkey: Tensor, dvalue: Tensor) -> Launch:
    """One block for each tile of keys of each key head. Fills dkey and dvalue."""
    tile = tiles(query.dtype, call.dim, launching.on_twin(query)).dkey_dvalue
    blocks = -(-call.keys // tile.own) * call.kv_heads * call.batch
    return _launch("dkey_dvalue", call, tile, blocks, 2 * tile.own + 4 * tile.step, (query, key, value, dout), (lse, delta, dkey, dvalue), 4 * tile.step)


def dquery_launch(call: Call, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dquery: Tensor) -> Launch:
    """One block for each tile of queries of each head. Fills dquery."""
    tile = tiles(query.dtype, call.dim, launching.on_twin(query)).dquery
    blocks = -(-call.queries // tile.own) * call.heads * call.batch
    return _launch("dquery", call, tile, blocks, 2 * tile.own + 4 * tile.step, (query, key, value, dout), (lse, delta, dquery))


def _launch(
    kernel: str, call: Call, tile: Tile, blocks: int, tile_rows: int, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...], numbers: int = 0
) -> Launch:
    """A launch that has room for tile_rows rows of tiles and for some float32 numbers in shared memory. Tensors of float32 rows are passed by pointer alone."""
    shared_bytes = tile_rows * padded_dim(call.dim) * inputs[0].itemsize + 4 * numbers
    tensors = inputs + others
    arguments = [ctypes.c_void_p(x.data_ptr()) if x.ndim == 3 else View.of(x) for x in tensors]
    constants = _constants(call, inputs[0], tile) | {"VECTOR": int(vectors(*inputs))}
    return Launch("fa2.cu", kernel, blocks, tile.warps, shared_bytes, constants, tensors, (*arguments, Problem.of(call), Mask(call.offset)))


def _constants(call: Call, query: Tensor, tile: Tile) -> dict[str, int | str]:
    kind: dict[str, int | str] = {"Element": ELEMENTS[query.dtype], "DIM": padded_dim(call.dim), "SIGN": sign_of(call)}
    return kind | {"CAUSAL": int(call.is_causal), "DROPOUT": int(call.dropout_p > 0.0)} | tile.constants


# ------------------------------------------------------------------------------------------------------------------------- operators


def _call(query: Tensor, key: Tensor, scale: float, is_causal: bool, offset: int, dropout_p: float, dropout_seed: int) -> Call:
    """What was checked before the operator was called."""
    (batch, heads, queries, dim), (kv_heads, keys) = query.shape, key.shape[1:3]
    return Call(batch, heads, kv_heads, heads // kv_heads, queries, keys, dim, scale, is_causal, offset, dropout_p, unpacked_seed(dropout_seed))


@torch.library.custom_op("flashproof::cuda_fa2_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, offset: int, dropout_p: float, dropout_seed: int
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    call = _call(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    forward_launch(call, query, key, value, out, lse).run()
    return out, lse


@torch.library.custom_op("flashproof::cuda_fa2_backward", mutates_args=())
def _backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue)."""
    call = _call(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    delta = torch.empty_like(lse)
    delta_launch(call, out, dout, delta).run()
    dquery, dkey, dvalue = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    dkey_dvalue_launch(call, query, key, value, dout, lse, delta, dkey, dvalue).run()
    dquery_launch(call, query, key, value, dout, lse, delta, dquery).run()
    return dquery, dkey, dvalue


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


@_backward.register_fake
def _(_dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)


_forward.register_autograd(_differentiate, setup_context=_keep)

# --------------------------------------------------------------------------------------------------------------------------- the call


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
) -> Float[Tensor, "batch heads queries dim"] | tuple[Float[Tensor, "batch heads queries dim"], Float[Tensor, "batch heads queries"]]:
    """softmax(scale query key^T) value, with gradients for query, key and value.

    scale is 1/sqrt(dim) unless given. With is_causal, query i sees key j when j <= i ("top_left") or j <= i + keys - queries ("bottom_right"). With enable_gqa,
    heads is a multiple of kv_heads. dropout_p of the normalised weights are zeroed and the others divided by 1 - dropout_p, as drawn from dropout_seed. With
    return_lse also the natural log of the sum of the exponentials of each query's scores, float32, which carries no gradient. A query that sees no key has
    output 0, LSE -inf and zero gradients.

    Raises TypeError or ValueError naming the argument that is wrong, and CudaError where a kernel cannot be compiled or launched.
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
    check_scale(call)
    out, lse = _forward(query, key, value, call.scale, call.is_causal, call.offset, call.dropout_p, packed_seed(call.dropout_seed))
    return (out, lse) if return_lse else out


def _arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """Tiles differ between head dims; the smallest make the most steps, so they are the ones claimed."""
    chosen = [tiles(getattr(torch, dtype), dim, device == "cpu") for dim in (64, 128, 256)]
    return Arithmetic(
        accumulate="tensor_core" if device == "cuda" and dtype != "float32" else "fma",
        key_tile=min(tile.step for each in chosen for tile in (each.forward, each.dquery)),
        query_tile=min(each.dkey_dvalue.step for each in chosen),
    )


implementation = Implementation(
    name="cuda.fa2",
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
    ),
    arithmetic=_arithmetic,
    missing=missing,
    summary="FlashAttention-2 in CUDA C++: query tiles in parallel, statistics and weights in registers, a backward of two kernels without atomics.",
)
