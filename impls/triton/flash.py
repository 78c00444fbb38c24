"""The launches of the FlashAttention-2 kernels, forward and backward: tiles, grids and arguments.

The launches are the same whichever tiles the loops visit. `fa2.py` and `block_sparse.py` pass in their three kernels
and `visits`, the further arguments that tell the loop of a kernel which tiles to visit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from flashproof.impls.call import Call, Keys, Queries, Rows
from flashproof.impls.spec import Arithmetic, Device, Dtype, arithmetic_of_flash
from flashproof.impls.triton.primitives import (
    INTERPRETED,
    Chip,
    Launch,
    Scale,
    call_arguments,
    padded_dim,
    with_descriptors,
    with_strides,
)
from flashproof.impls.triton.steps import delta_kernel

# ---------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tile:
    """The queries and keys of one step, and the compile options of the kernel that takes such steps."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels that have a loop."""

    forward: Tile
    dkey_dvalue: Tile
    dquery: Tile


# Tiles for dropout in 16 bit, up to head dim 128. The ten rounds of Philox need registers of their own.
DROPOUT_TILES = Tiles(forward=Tile(128, 32, 8, 3), dkey_dvalue=Tile(32, 64, 8, 2), dquery=Tile(64, 32, 8, 2))
# In the interpreter, a step takes the same time whatever its size, so one set of large tiles serves every call. The two
# sides of a tile differ, so that the diagonal of a causal mask cuts it in more than one way.
INTERPRETED_TILES = Tiles(forward=Tile(128, 64, 4, 1), dkey_dvalue=Tile(64, 128, 4, 1), dquery=Tile(128, 64, 4, 1))


Table = Mapping[tuple[int, int], Tiles]  # tiles by (bits of the dtype, largest head dim that the entry serves)


@dataclass(frozen=True)
class Tables:
    """The tiles of an implementation: `anywhere` on GPUs, and `hopper` in place of some of its entries on sm_90."""

    anywhere: Table
    hopper: Table

    def __call__(self, dtype: torch.dtype, dim: int, dropout: bool, chip: Chip) -> Tiles:
        """Returns the tiles for a dtype and a head dim.

        The batch size and the lengths do not influence the choice. A slice of a batch is therefore computed in the same
        way as in the whole batch.
        """
        if chip == "interpreter":
            return INTERPRETED_TILES
        if dropout and dtype.itemsize == 2 and dim <= 128:
            return DROPOUT_TILES
        key = 8 * dtype.itemsize, max(64, padded_dim(dim))
        return self.hopper.get(key, self.anywhere[key]) if chip == "hopper" else self.anywhere[key]


def arithmetic_of(tables: Tables) -> Callable[[Dtype, Device], Arithmetic]:
    """Returns the function that states the arithmetic of kernels with these tiles.

    The tiles differ between head dims and chips. The smallest tiles make the most steps, so the claim states the
    smallest tiles.
    """

    def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
        chips: tuple[Chip, ...] = ("interpreter",) if device == "cpu" else ("hopper", "other")
        chosen = [
            tables(getattr(torch, dtype), dim, dropout, chip)
            for dim in (64, 128, 256)
            for dropout in (False, True)
            for chip in chips
        ]
        return replace(
            arithmetic_of_flash(dtype, device),
            key_tile=min(tile.keys for each in chosen for tile in (each.forward, each.dquery)),
            query_tile=min(each.dkey_dvalue.queries for each in chosen),
        )

    return arithmetic


# ------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Loop:
    """A kernel that has a loop, its tile, and the further arguments that tell the loop which tiles to visit."""

    kernel: Any
    tile: Tile
    visits: Mapping[str, Any] = field(default_factory=dict)


def forward(loop: Loop, call: Call, query: Queries, key: Keys, value: Keys) -> tuple[Queries, Rows]:
    """Runs the forward and returns (out, lse). One program computes one tile of queries of one head.

    query, out: [batch, heads, queries, dim]. key, value: [batch, kv_heads, keys, dim].
    lse: [batch, heads, queries], float32, natural logarithm.
    Raises ValueError if the scale is beyond float32.

    The kernel has no sign of the scale. Few calls need one, and even a product by 1 makes the kernel slower: on sm_90,
    it keeps the queries in registers. For these calls, the kernel gets queries that are multiplied by the sign here.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    scale = Scale.of(call.scale)
    scales = {"magnitude": scale.magnitude, "exponent_scale": scale.exponent}
    signed = query if scale.sign == 1 else query * scale.sign
    arguments = with_strides(query=signed, key=key, value=value, out=out) | {"lse": lse, "heads": call.heads} | scales
    _launch(loop, call, triton.cdiv(call.queries, loop.tile.queries) * call.heads * call.batch, arguments).run()
    return out, lse


def backward(
    of_keys: Loop,
    of_queries: Loop,
    call: Call,
    needed: Sequence[bool],
    dout: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
) -> tuple[Queries | None, Keys | None, Keys | None]:
    """Runs the backward and returns (dquery, dkey, dvalue). A gradient that is not needed may be None.

    needed: whether the gradients of query, key and value are needed. dkey and dvalue are always computed together.
    dout, query, out, dquery: [batch, heads, queries, dim]. lse: [batch, heads, queries].
    key, value, dkey, dvalue: [batch, kv_heads, keys, dim].

    The first launch computes delta. The second computes dK and dV: one program computes one tile of keys of one key
    head. The third computes dQ: one program computes one tile of queries of one head.
    """
    delta = torch.empty_like(lse)
    delta_launch(call, out, dout, delta).run()
    dquery = dkey = dvalue = None
    shared = {"lse": lse, "delta": delta, "scale": call.scale}
    if needed[1] or needed[2]:
        dkey, dvalue = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
        arguments = (
            with_strides(query=query, key=key, value=value, dout=dout, dkey=dkey, dvalue=dvalue)
            | shared
            | {"kv_heads": call.kv_heads}
        )
        programs = triton.cdiv(call.keys, of_keys.tile.keys) * call.kv_heads * call.batch
        _launch(of_keys, call, programs, arguments, numbers=("lse", "delta")).run()
    if needed[0]:
        dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        arguments = (
            with_strides(query=query, key=key, value=value, dout=dout, dquery=dquery) | shared | {"heads": call.heads}
        )
        _launch(
            of_queries, call, triton.cdiv(call.queries, of_queries.tile.queries) * call.heads * call.batch, arguments
        ).run()
    return dquery, dkey, dvalue


def delta_launch(call: Call, out: Queries, dout: Queries, delta: Rows) -> Launch:
    """Returns the launch that fills delta [batch, heads, queries] from out and dout.

    One program computes 16 queries of one head. In the interpreter it computes 128 queries, because there a program
    takes the same time whatever its size.
    """
    tile = 128 if INTERPRETED.value else 16
    arguments = with_strides(out=out, dout=dout) | {"delta": delta, "heads": call.heads, "queries": call.queries}
    return Launch(
        delta_kernel,
        (triton.cdiv(call.queries, tile) * call.heads * call.batch,),
        arguments | {"QUERIES": tile},
        num_warps=4,
        num_stages=1,
    )


def _launch(loop: Loop, call: Call, programs: int, arguments: dict[str, Any], numbers: Sequence[str] = ()) -> Launch:
    """Returns the launch of a kernel with a loop. Adds the arguments that all three of these kernels take.

    numbers: the names of the arguments [batch, heads, queries] that the loop reads.
    """
    tile = loop.tile
    alike = {"QUERIES": tile.queries, "KEYS": tile.keys}
    rows = {"query": tile.queries, "key": tile.keys, "value": tile.keys, "dout": tile.queries}
    read = {name: length for name, length in rows.items() if name in arguments} | dict.fromkeys(numbers, tile.queries)
    return Launch(
        loop.kernel,
        (programs,),
        with_descriptors(arguments, read) | dict(loop.visits) | call_arguments(call) | alike,
        tile.num_warps,
        tile.num_stages,
    )
