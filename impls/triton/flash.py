"""The launches of the FlashAttention-2 kernels, forward and backward: tiles, grids and arguments.

The launches are the same whichever tiles the loops visit. `fa2.py` and `block_sparse.py` pass in their three kernels,
the table of their tiles, and `visits`, the further tensors that tell the loop of a kernel which tiles to visit.

Each of the four launches has a function that describes it. `launching.launch` calls the function once for all calls
that are alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashproof.impls.call import Call, Keys, Queries, Rows
from flashproof.impls.spec import Arithmetic, Device, Dtype, arithmetic_of_flash
from flashproof.impls.triton.launching import Given, Launch, launch
from flashproof.impls.triton.primitives import (
    INTERPRETED,
    Chip,
    Scale,
    as_argument,
    call_arguments,
    chip_of,
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
Choose = Callable[[torch.dtype, int, bool, Chip], Tiles]  # chooses tiles by dtype, head dim, dropout and chip
Visits = dict[str, Tensor]  # what tells the loop of a kernel which tiles to visit, by the names of its arguments


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class Kernels:
    """The three kernels of an implementation that have a loop."""

    forward: Any
    dkey_dvalue: Any
    dquery: Any


def forward(
    kernels: Kernels, choose: Choose, call: Call, visits: Visits, query: Queries, key: Keys, value: Keys
) -> tuple[Queries, Rows]:
    """Runs the forward and returns (out, lse).

    query, out: [batch, heads, queries, dim]. key, value: [batch, kv_heads, keys, dim].
    lse: [batch, heads, queries], float32, natural logarithm.
    Raises ValueError if the scale is beyond float32.

    The kernel has no sign of the scale. Few calls need one, and even a product by 1 makes the kernel slower: on sm_90,
    it keeps the queries in registers. For these calls, the kernel gets queries that are multiplied by the sign here.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    sign = Scale.of(call.scale).sign
    signed = query if sign == 1 else query * sign
    read: dict[str, Given] = {"query": signed, "key": key, "value": value, "seed": call.dropout_seed}
    launch(forward_launch, kernels, choose, call.unseeded, **read, out=out, lse=lse, **visits)
    return out, lse


def forward_launch(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    *,
    query: Queries,
    key: Keys,
    value: Keys,
    seed: int,
    out: Queries,
    lse: Rows,
    **visits: Tensor,
) -> Launch:
    """Describes the launch that fills out and lse. One program computes one tile of queries of one head."""
    tile = _tiles(choose, call, query).forward
    scale = Scale.of(call.scale)
    scales = {"magnitude": scale.magnitude, "exponent_scale": scale.exponent}
    arguments = with_strides(query=query, key=key, value=value, out=out) | {"lse": lse, "heads": call.heads} | scales
    programs = triton.cdiv(call.queries, tile.queries) * call.heads * call.batch
    return _launch(kernels.forward, tile, call, programs, arguments, seed, visits)


def backward(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    visits_of_keys: Visits,
    visits_of_queries: Visits,
    needed: Sequence[bool],
    dout: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
) -> tuple[Queries | None, Keys | None, Keys | None]:
    """Runs the backward and returns (dquery, dkey, dvalue). A gradient that is not needed may be None.

    visits_of_keys: what tells the loop of dK and dV which tiles of queries to visit.
    visits_of_queries: what tells the loop of dQ which tiles of keys to visit.
    needed: whether the gradients of query, key and value are needed. dkey and dvalue are always computed together.
    dout, query, out, dquery: [batch, heads, queries, dim]. lse: [batch, heads, queries].
    key, value, dkey, dvalue: [batch, kv_heads, keys, dim].
    """
    delta = torch.empty_like(lse)
    launch(delta_launch, call.unseeded, out=out, dout=dout, delta=delta)
    dquery = dkey = dvalue = None
    read = {"query": query, "key": key, "value": value, "dout": dout, "lse": lse, "delta": delta}
    options = kernels, choose, call.unseeded
    if needed[1] or needed[2]:
        dkey, dvalue = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
        written = {"dkey": dkey, "dvalue": dvalue}
        launch(dkey_dvalue_launch, *options, **read, seed=call.dropout_seed, **written, **visits_of_keys)
    if needed[0]:
        dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        launch(dquery_launch, *options, **read, seed=call.dropout_seed, dquery=dquery, **visits_of_queries)
    return dquery, dkey, dvalue


def delta_launch(call: Call, *, out: Queries, dout: Queries, delta: Rows) -> Launch:
    """Describes the launch that fills delta [batch, heads, queries] from out and dout.

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


def dkey_dvalue_launch(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    *,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    seed: int,
    dkey: Keys,
    dvalue: Keys,
    **visits: Tensor,
) -> Launch:
    """Describes the launch that fills dkey and dvalue. One program computes one tile of keys of one key head."""
    tile = _tiles(choose, call, query).dkey_dvalue
    arguments = with_strides(query=query, key=key, value=value, dout=dout, dkey=dkey, dvalue=dvalue)
    arguments |= {"lse": lse, "delta": delta, "scale": call.scale, "kv_heads": call.kv_heads}
    programs = triton.cdiv(call.keys, tile.keys) * call.kv_heads * call.batch
    return _launch(kernels.dkey_dvalue, tile, call, programs, arguments, seed, visits, numbers=("lse", "delta"))


def dquery_launch(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    *,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    seed: int,
    dquery: Queries,
    **visits: Tensor,
) -> Launch:
    """Describes the launch that fills dquery. One program computes one tile of queries of one head."""
    tile = _tiles(choose, call, query).dquery
    arguments = with_strides(query=query, key=key, value=value, dout=dout, dquery=dquery)
    arguments |= {"lse": lse, "delta": delta, "scale": call.scale, "heads": call.heads}
    programs = triton.cdiv(call.queries, tile.queries) * call.heads * call.batch
    return _launch(kernels.dquery, tile, call, programs, arguments, seed, visits)


def _tiles(choose: Choose, call: Call, query: Queries) -> Tiles:
    return choose(query.dtype, call.dim, call.dropout_p > 0.0, chip_of(query))


def _launch(
    kernel: Any,
    tile: Tile,
    call: Call,
    programs: int,
    arguments: dict[str, Any],
    seed: int,
    visits: Visits,
    numbers: Sequence[str] = (),
) -> Launch:
    """Returns the launch of a kernel with a loop. Adds the arguments that all three of these kernels take.

    visits: each tensor is passed with its strides, without the last one, which is 1.
    numbers: the names of the arguments [batch, heads, queries] that the loop reads.
    """
    rows = {"query": tile.queries, "key": tile.keys, "value": tile.keys, "dout": tile.queries}
    read = {name: length for name, length in rows.items() if name in arguments} | dict.fromkeys(numbers, tile.queries)
    strides = {f"{name}_strides": tuple(map(as_argument, tensor.stride()[:-1])) for name, tensor in visits.items()}
    alike = {"seed": seed, "QUERIES": tile.queries, "KEYS": tile.keys}
    return Launch(
        kernel,
        (programs,),
        with_descriptors(arguments, read) | visits | strides | call_arguments(call) | alike,
        tile.num_warps,
        tile.num_stages,
    )
