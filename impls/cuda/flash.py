"""The launches of the kernels in `fa2.cu`, for every mask.

This file chooses the tiles, the grids and the bytes of shared memory. It combines the launches into the forward and the
backward.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashproof.impls.call import Call, Keys, Queries, Rows
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.launching import ELEMENTS, Chip, Launch, Problem, Tile, View, padded_dim, vectors
from flashproof.impls.spec import Arithmetic, Device, Dtype, arithmetic_of_flash

# ---------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels that loop over tiles. The fourth kernel, `delta`, has no such loop."""

    forward: Tile
    dkey_dvalue: Tile
    dquery: Tile


# The tiles on a GPU, by the bits of the dtype and the padded head dim.
TILES = {
    (16, 64): Tiles(forward=Tile(4, 32, 64, hold=True), dkey_dvalue=Tile(4, 16, 64), dquery=Tile(4, 32, 32)),
    (16, 128): Tiles(forward=Tile(4, 16, 64, hold=True), dkey_dvalue=Tile(4, 16, 32), dquery=Tile(4, 16, 64)),
    (16, 256): Tiles(forward=Tile(4, 16, 32), dkey_dvalue=Tile(8, 16, 16, split=2), dquery=Tile(4, 16, 16)),
    (32, 64): Tiles(forward=Tile(4, 32, 32), dkey_dvalue=Tile(4, 32, 16), dquery=Tile(4, 32, 32)),
    (32, 128): Tiles(forward=Tile(4, 32, 16), dkey_dvalue=Tile(4, 16, 16), dquery=Tile(4, 32, 16)),
    (32, 256): Tiles(forward=Tile(4, 16, 16), dkey_dvalue=Tile(4, 16, 16, split=2), dquery=Tile(2, 16, 16)),
}
# The tiles on sm_90, for calls without dropout whose rows are vectors. A warp has 32 rows, so that a fragment of the
# right operand serves more products. Other chips would have to keep a few registers of these kernels in memory.
# docs/fa2.md has the measurements.
SM_90_TILES = {
    (16, 64): Tiles(forward=Tile(4, 32, 128), dkey_dvalue=Tile(4, 32, 32), dquery=Tile(4, 32, 64)),
    (16, 128): Tiles(forward=Tile(4, 32, 64), dkey_dvalue=Tile(4, 32, 64, split=2, blocks=2), dquery=Tile(4, 32, 32)),
}
# The tiles with dropout. Where the dropout bits do not fit in the registers beside the scores of a whole step, the step
# is half as long.
DROPOUT_TILES = TILES | {
    (16, 64): replace(TILES[16, 64], forward=Tile(4, 32, 32, hold=True), dkey_dvalue=Tile(4, 16, 32)),
    (16, 128): replace(TILES[16, 128], dkey_dvalue=Tile(4, 16, 16)),
}
# The tiles that change if rows are not vectors (`launching.vectors`). Copies of such rows need registers of their own,
# so a warp has half of the rows. The steps stay the same, so every bit of the result stays the same.
STRIDED_TILES = {(32, 128): {"dquery": Tile(4, 16, 16)}}
# The tiles on the twin, by the padded head dim. The kernels of a file are compiled together there, so they share one
# tile. Together these tiles cover the properties of the GPU's tiles: 16 or 32 rows for a warp, more rows than columns
# and fewer, operands that are held in registers and operands that are read again, rows that are split between warps.
# The twin takes turns between the threads of a block, so blocks with few threads are fast.
TWIN_TILES = {64: Tile(2, 16, 32, hold=True), 128: Tile(4, 32, 64, split=2), 256: Tile(2, 32, 32)}
# 16-bit calls of one padded head dim hand dS over to `dquery_of_scores`, which has this tile, on the twin and on sm_90.
# At head dim 64, dS has as many bytes but saves half as many products, so little is gained: docs/fa2.md.
HANDING: tuple[Chip, ...] = (None, (9, 0))
HANDED_DIM, OF_SCORES = 128, Tile(4, 32, 64, blocks=2)
# dS of so many keys is in device memory at once. The twin has fewer, so that short sequences have several chunks.
CHUNK, TWIN_CHUNK = 1024, 128
PIECE = 32  # queries, and keys, of a piece of dS


def tiles(dtype: torch.dtype, dim: int, dropout: bool, strided: bool, chip: Chip) -> Tiles:
    """The tiles for a dtype, head dim, call and chip.

    They do not depend on the batch or on the lengths. So a slice of a batch gives the same bits as the whole batch.
    """
    if chip is None:
        return Tiles(*(TWIN_TILES[padded_dim(dim)],) * 3)
    size = (8 * dtype.itemsize, padded_dim(dim))
    if chip == (9, 0) and size in SM_90_TILES and not dropout and not strided:
        return SM_90_TILES[size]
    chosen = (DROPOUT_TILES if dropout else TILES)[size]
    return replace(chosen, **STRIDED_TILES.get(size, {})) if strided else chosen


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """The claimed arithmetic: exact products, sums in float32, and weights cast to the input dtype.

    Tiles differ between head dims and chips. The smallest tiles make the most steps, so they are the ones claimed.
    """
    chips: tuple[Chip, ...] = (None,) if device == "cpu" else ((8, 0), (9, 0))
    chosen = [
        tiles(getattr(torch, dtype), dim, dropout, False, chip)
        for dim in (64, 128, 256)
        for dropout in (False, True)
        for chip in chips
    ]
    return replace(
        arithmetic_of_flash(dtype, device),
        key_tile=min(tile.step for each in chosen for tile in (each.forward, each.dquery)),
        query_tile=min(each.dkey_dvalue.step for each in chosen),
    )


# ------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Masking:
    """A mask: the source file of its type `Mask`, the kernels' argument of that type, and the tensors that it reads."""

    source: str
    mask: ctypes.Structure
    tensors: tuple[Tensor, ...] = ()


def forward(call: Call, masking: Masking, query: Queries, key: Keys, value: Keys) -> tuple[Queries, Rows]:
    """Runs the forward and returns (out, lse)."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    forward_launch(call, masking, query, key, value, out, lse).run()
    return out, lse


def backward(
    call: Call,
    by_query: Masking,
    by_key: Masking,
    dout: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
) -> tuple[Queries, Keys, Keys]:
    """Runs the backward and returns (dquery, dkey, dvalue).

    `by_query` says which keys a tile of queries sees. `by_key` says which queries see a tile of keys.
    """
    delta = torch.empty_like(lse)
    delta_launch(call, by_query.source, out, dout, delta).run()
    dquery, dkey, dvalue = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    if _hands_over(call, by_key, query, key, value, dout):
        for launch in handing_over(call, by_key, query, key, value, dout, lse, delta, dquery, dkey, dvalue):
            launch.run()
        return dquery, dkey, dvalue
    dkey_dvalue_launch(call, by_key, query, key, value, dout, lse, delta, dkey, dvalue).run()
    dquery_launch(call, by_query, query, key, value, dout, lse, delta, dquery).run()
    return dquery, dkey, dvalue


def forward_launch(
    call: Call, masking: Masking, query: Queries, key: Keys, value: Keys, out: Queries, lse: Rows
) -> Launch:
    """The forward: one block for each tile of queries of each head. It fills out and lse."""
    tile = _tiles_of(call, query, key, value).forward
    blocks = -(-call.queries // tile.own) * call.heads * call.batch
    return _launch("forward", call, masking, tile, blocks, tile.own + 4 * tile.step, (query, key, value), (out, lse))


def delta_launch(call: Call, source: str, out: Queries, dout: Queries, delta: Rows) -> Launch:
    """The kernel `delta`: one block for a few queries of a head, and a few lanes for each query. It fills delta."""
    tile = _tiles_of(call, out).dquery
    at_once = 32 * tile.warps // min(padded_dim(call.dim) * out.itemsize // 16, 32)  # rows of a block
    blocks = -(-call.queries // at_once) * call.heads * call.batch
    sizes = (ctypes.c_int(call.heads), ctypes.c_int(call.queries), ctypes.c_int(call.dim))
    arguments = (View.of(out), View.of(dout), ctypes.c_void_p(delta.data_ptr()), *sizes)
    constants = _constants(call, out, tile) | {"VECTOR": int(vectors(out, dout)), "CAUSAL": 0, "DROPOUT": 0}
    return Launch(source, "delta", blocks, tile.warps, 0, constants, (out, dout, delta), arguments)


def dkey_dvalue_launch(
    call: Call,
    masking: Masking,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    dkey: Keys,
    dvalue: Keys,
) -> Launch:
    """The kernel `dkey_dvalue`: one block for each tile of keys of each key head. It fills dkey and dvalue."""
    tile = _tiles_of(call, query, key, value, dout).dkey_dvalue
    blocks = -(-call.keys // tile.own) * call.kv_heads * call.batch
    others = (lse, delta, dkey, dvalue)
    # The LSE and delta of two tiles of queries, and the weights that warps exchange (`EXCHANGE` of fa2.cu).
    exchange = query.itemsize == 2 and tile.split > 1 and tile.step % (16 * tile.split) == 0
    numbers = 4 * tile.step + (tile.warps * tile.rows * tile.step // tile.split if exchange else 0)
    launch = _launch(
        "dkey_dvalue",
        call,
        masking,
        tile,
        blocks,
        2 * tile.own + 4 * tile.step,
        (query, key, value, dout),
        others,
        numbers,
    )
    return replace(launch, arguments=(*launch.arguments, Handed()))  # nothing is handed over


class Handed(ctypes.Structure):
    """dS of a chunk of keys in device memory. It has the layout of the `Handed` of fa2.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pieces", "sums")),
        *((name, ctypes.c_int) for name in ("first_key", "length", "rows", "columns", "own", "step")),
    )


def _hands_over(call: Call, masking: Masking, *inputs: Tensor) -> bool:
    """Whether `dkey_dvalue` leaves dS in device memory, and `dquery_of_scores` computes dQ from it."""
    fits = inputs[0].itemsize == 2 and padded_dim(call.dim) == HANDED_DIM and launching.chip_of(inputs[0]) in HANDING
    return fits and masking.source == "fa2.cu" and call.dropout_p == 0.0 and vectors(*inputs)


def handing_over(
    call: Call,
    masking: Masking,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    dquery: Queries,
    dkey: Keys,
    dvalue: Keys,
) -> list[Launch]:
    """The kernels `dkey_dvalue` and `dquery_of_scores` for each chunk of keys. They fill dquery, dkey and dvalue.

    Their scratch is dS of a chunk and dQ in float32. Its size does not depend on the number of keys.
    """
    own, heads = _tiles_of(call, query, key, value, dout).dkey_dvalue, call.batch * call.heads
    chunk = TWIN_CHUNK if launching.on_twin(query) else CHUNK
    rows, columns = -(-call.queries // own.step) * own.step // PIECE, chunk // PIECE
    pieces = torch.empty(heads * rows * columns * PIECE * PIECE // 2, dtype=torch.int32, device=query.device)
    blocks = -(-call.queries // OF_SCORES.own) * heads
    sums = torch.empty(blocks * OF_SCORES.own * HANDED_DIM, dtype=torch.float32, device=query.device)
    of_keys = dkey_dvalue_launch(call, masking, query, key, value, dout, lse, delta, dkey, dvalue)
    of_scores = _launch(
        "dquery_of_scores", call, masking, OF_SCORES, blocks, 2 * OF_SCORES.step, (key,), (dquery,), early=True
    )

    launches = []
    for first in range(0, call.keys, chunk):
        handed = Handed(pieces.data_ptr(), sums.data_ptr(), first, chunk, rows, columns, own.own, own.step)
        blocks_of_keys = -(-min(chunk, call.keys - first) // own.own) * call.batch * call.kv_heads
        for launch, arguments in (
            (replace(of_keys, blocks=blocks_of_keys), of_keys.arguments[:-1]),
            (of_scores, of_scores.arguments),
        ):
            launches.append(
                replace(
                    launch,
                    constants={**launch.constants, "HAND_OVER": 1},
                    tensors=(*launch.tensors, pieces, sums),
                    arguments=(*arguments, handed),
                )
            )
    return launches


def dquery_launch(
    call: Call,
    masking: Masking,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    dquery: Queries,
) -> Launch:
    """The kernel `dquery`: one block for each tile of queries of each head. It fills dquery.

    Its blocks may run beside the last blocks of `dkey_dvalue`.
    """
    tile = _tiles_of(call, query, key, value, dout).dquery
    blocks = -(-call.queries // tile.own) * call.heads * call.batch
    return _launch(
        "dquery",
        call,
        masking,
        tile,
        blocks,
        2 * tile.own + 4 * tile.step,
        (query, key, value, dout),
        (lse, delta, dquery),
        early=True,
    )


def _tiles_of(call: Call, *inputs: Tensor) -> Tiles:
    return tiles(inputs[0].dtype, call.dim, call.dropout_p > 0.0, not vectors(*inputs), launching.chip_of(inputs[0]))


def _launch(
    kernel: str,
    call: Call,
    masking: Masking,
    tile: Tile,
    blocks: int,
    rows: int,
    inputs: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    numbers: int = 0,
    early: bool = False,
) -> Launch:
    """A launch with shared memory for `rows` rows of tiles and `numbers` float32 numbers.

    A tensor with one number for each row [batch, heads, length] is passed as a pointer. Other tensors are passed as a
    `View`.
    """
    shared_bytes = rows * padded_dim(call.dim) * inputs[0].itemsize + 4 * numbers
    tensors = inputs + others
    arguments = [ctypes.c_void_p(x.data_ptr()) if x.ndim == 3 else View.of(x) for x in tensors]
    constants = _constants(call, inputs[0], tile) | {"VECTOR": int(vectors(*inputs))}
    whole = (*arguments, Problem.of(call), masking.mask)
    return Launch(
        masking.source, kernel, blocks, tile.warps, shared_bytes, constants, tensors + masking.tensors, whole, early
    )


def _constants(call: Call, query: Tensor, tile: Tile) -> dict[str, int | str]:
    kind: dict[str, int | str] = {"Element": ELEMENTS[query.dtype], "DIM": padded_dim(call.dim)}
    return kind | {"CAUSAL": int(call.is_causal), "DROPOUT": int(call.dropout_p > 0.0)} | tile.constants
