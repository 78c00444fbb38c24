"""The launches of the FlashAttention-2 kernels, forward and backward: tiles, grids and arguments.

The launches are the same whichever tiles the loops visit. `fa2.py` and `block_sparse.py` pass in their three kernels,
the table of their tiles, and `visits`, the further tensors that tell the loop of a kernel which tiles to visit.

A function describes the launches of each direction. `launching.launch` calls it once for all calls that are alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashproof.impls.call import MAX_DIM, Call, Keys, Queries, Rows
from flashproof.impls.spec import Arithmetic, Device, Dtype, arithmetic_of_flash
from flashproof.impls.triton.launching import Launch, launch
from flashproof.impls.triton.primitives import (
    INTERPRETED,
    Chip,
    Scale,
    as_argument,
    call_arguments,
    chip_of,
    cropped,
    padded_dim,
    room_for,
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

    On GPUs, products of float32 are six products of bfloat16 parts, which tensor cores sum over a tile or over the head
    dim.

    The tiles differ between head dims and chips. The smallest tiles make the most steps, and the largest ones have the
    longest sums, so these are the ones claimed.
    """

    def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
        chips: tuple[Chip, ...] = ("interpreter",) if device == "cpu" else ("hopper", "other")
        chosen = [
            tables(getattr(torch, dtype), dim, dropout, chip)
            for dim in (64, 128, MAX_DIM)
            for dropout in (False, True)
            for chip in chips
        ]
        keys = {tile.keys for each in chosen for tile in (each.forward, each.dquery)}
        queries = {each.dkey_dvalue.queries for each in chosen}
        claimed = replace(arithmetic_of_flash(dtype, device), key_tile=min(keys), query_tile=min(queries))
        if (dtype, device) != ("float32", "cuda"):
            return claimed
        terms = max(MAX_DIM, *keys, *queries)
        return replace(claimed, products="6xbf16", accumulate="tensor_core", tensor_core_terms=terms)

    return arithmetic


# ------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True, eq=False)
class Kernels:
    """The three kernels of an implementation that have a loop."""

    forward: Any
    dkey_dvalue: Any
    dquery: Any


def forward(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    query: Queries,
    key: Keys,
    value: Keys,
    *,
    describe: Callable[..., Iterator[Launch]] | None = None,
    **visits: Tensor,
) -> tuple[Queries, Rows]:
    """Runs the forward and returns (out, lse).

    query, out: [batch, heads, queries, dim]. key, value: [batch, kv_heads, keys, dim].
    lse: [batch, heads, queries], float32, natural logarithm.
    describe: describes the launches in place of `forward_launches`, with the same arguments.
    Raises ValueError if the scale is beyond float32.

    The kernel has no sign of the scale. Few calls need one, and even a product by 1 makes the kernel slower: on sm_90,
    it keeps the queries in registers. For these calls, the kernel gets queries that are multiplied by the sign here.
    """
    sign = Scale.of(call.scale).sign
    out, lse = room_for(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    launch(
        describe or forward_launches,
        *(kernels, choose, call.unseeded),
        query=query if sign == 1 else query * sign,
        key=key,
        value=value,
        out=out,
        lse=lse,
        seed=call.dropout_seed,
        **visits,
    )
    return cropped(out, call.dim), lse


def forward_launches(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    *,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
    seed: int,
    **visits: Tensor,
) -> Iterator[Launch]:
    """Describes the forward. One program computes one tile of queries of one head. It fills out and lse."""
    tile = choose(query.dtype, call.dim, call.dropout_p > 0.0, chip_of(query)).forward
    scale = Scale.of(call.scale)
    scales = {"magnitude": scale.magnitude, "exponent_scale": scale.exponent}
    arguments = _with_strides(query=query, key=key, value=value, out=out) | {"lse": lse, "heads": call.heads} | scales
    programs = triton.cdiv(call.queries, tile.queries) * call.heads * call.batch
    yield _launch(kernels.forward, tile, call, programs, arguments | {"seed": seed}, visits)


def backward(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    needed: Sequence[bool],
    dout: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
    **visits: Tensor,
) -> tuple[Queries | None, Keys | None, Keys | None]:
    """Runs the backward and returns (dquery, dkey, dvalue). A gradient that is not needed may be None.

    needed: whether the gradients of query, key and value are needed. dkey and dvalue are always computed together.
    dout, query, out, dquery: [batch, heads, queries, dim]. lse: [batch, heads, queries].
    key, value, dkey, dvalue: [batch, kv_heads, keys, dim].

    The kernels get the LSE and delta with heads that are a multiple of four rows apart, because a copy unit takes rows
    of 16 bytes.
    """
    delta = torch.empty_like(lse)
    if rest := -call.queries % 4:
        lse, delta = (torch.nn.functional.pad(rows, (0, rest))[:, :, : call.queries] for rows in (lse, delta))
    of_query, of_key = {}, {}
    if needed[0]:
        of_query = {"dquery": room_for(query)}
    if needed[1] or needed[2]:
        of_key = {"dkey": room_for(key), "dvalue": room_for(value)}
    launch(
        backward_launches,
        *(kernels, choose, call.unseeded),
        query=query,
        key=key,
        value=value,
        dout=dout,
        out=out,
        lse=lse,
        delta=delta,
        seed=call.dropout_seed,
        **(of_query | of_key | visits),
    )
    gradients = {name: cropped(gradient, call.dim) for name, gradient in (of_query | of_key).items()}
    return gradients.get("dquery"), gradients.get("dkey"), gradients.get("dvalue")


def backward_launches(
    kernels: Kernels,
    choose: Choose,
    call: Call,
    *,
    query: Queries,
    key: Keys,
    value: Keys,
    dout: Queries,
    out: Queries,
    lse: Rows,
    delta: Rows,
    seed: int,
    dquery: Queries | None = None,
    dkey: Keys | None = None,
    dvalue: Keys | None = None,
    **visits: Tensor,
) -> Iterator[Launch]:
    """Describes the backward: three launches. The last two have a loop, and each runs if its results are wanted.

    The first fills delta. In the second, one program computes one tile of keys of one key head, and fills dkey and
    dvalue. In the third, one program computes one tile of queries of one head, and fills dquery.
    """
    # In the interpreter, a program takes the same time whatever its size.
    rows = 128 if INTERPRETED.value else 16
    arguments = _with_strides(out=out, dout=dout) | {"delta": delta, "heads": call.heads, "queries": call.queries}
    programs = triton.cdiv(call.queries, rows) * call.heads * call.batch
    yield Launch(delta_kernel, (programs,), arguments | {"QUERIES": rows}, num_warps=4, num_stages=1)

    tiles = choose(query.dtype, call.dim, call.dropout_p > 0.0, chip_of(query))
    read = {"query": query, "key": key, "value": value, "dout": dout}
    alike = {"lse": lse, "delta": delta, "scale": call.scale, "seed": seed}
    if dkey is not None and dvalue is not None:
        arguments = _with_strides(**read, dkey=dkey, dvalue=dvalue) | alike | {"kv_heads": call.kv_heads}
        programs = triton.cdiv(call.keys, tiles.dkey_dvalue.keys) * call.kv_heads * call.batch
        numbers = ("lse", "delta")
        yield _launch(kernels.dkey_dvalue, tiles.dkey_dvalue, call, programs, arguments, visits, numbers)
    if dquery is not None:
        arguments = _with_strides(**read, dquery=dquery) | alike | {"heads": call.heads}
        programs = triton.cdiv(call.queries, tiles.dquery.queries) * call.heads * call.batch
        yield _launch(kernels.dquery, tiles.dquery, call, programs, arguments, visits)


def _with_strides(**tensors: Tensor) -> dict[str, Any]:
    """Returns what `with_strides` returns. On a GPU, PADDED is always true: a kernel serves all head dims of its tiles.

    To compare columns with the head dim takes no time there. In the interpreter it does, and nothing is compiled.
    """
    return with_strides(**tensors) | ({} if INTERPRETED.value else {"PADDED": True})


def _launch(
    kernel: Any,
    tile: Tile,
    call: Call,
    programs: int,
    arguments: dict[str, Any],
    visits: Mapping[str, Tensor],
    numbers: Sequence[str] = (),
) -> Launch:
    """Returns the launch of a kernel with a loop. Adds the arguments that all three of these kernels take.

    visits: tensors that tell loops which tiles to visit. The kernel gets those that it takes, with their strides except
    the last one, which is 1.
    numbers: the names of the arguments [batch, heads, queries] that the loop reads.
    """
    rows = {"query": tile.queries, "key": tile.keys, "value": tile.keys, "dout": tile.queries}
    read = {name: length for name, length in rows.items() if name in arguments} | dict.fromkeys(numbers, tile.queries)
    own = {name: tensor for name, tensor in visits.items() if name in kernel.arg_names}
    strides = {f"{name}_strides": tuple(map(as_argument, tensor.stride()[:-1])) for name, tensor in own.items()}
    return Launch(
        kernel,
        (programs,),
        with_descriptors(arguments, read)
        | own
        | strides
        | call_arguments(call)
        | {"QUERIES": tile.queries, "KEYS": tile.keys},
        tile.num_warps,
        tile.num_stages,
    )
