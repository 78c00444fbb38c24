"""FlashAttention-1 in Triton (Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", NeurIPS 2022; Algorithms 1 and 4).

The paper shows how to compute attention without ever writing the queries x keys matrix to device memory. This file
follows its method:

- One program owns one (batch, head). Its outer loop loads a tile of keys and values on chip. Its inner loop passes over
  all query tiles.
- The softmax is computed piece by piece. The state of a query tile is its output O, its running maximum m and its
  running sum l. This state is in device memory. Each step reads it, rescales it, adds the contribution of one tile and
  writes it back. O is normalised at every step, so it is always a true weighted average of the values seen so far.
- The backward recomputes the weights from m and l, in the same loop order. dK and dV of the outer tile are accumulated
  on chip. dQ is read, increased and written back.

The output therefore crosses to device memory once per key tile. FlashAttention-2 exchanges the two loops to avoid this.
`tests/suite/kernels/test_traffic.py` counts this traffic.

Two things differ from the paper:

- O and dQ are rewritten at each step. They are float32 in device memory for 16-bit inputs too, and are rounded once, at
  the end. If every step rounded them, each key tile would add an error, and the arithmetic that this file claims would
  be untrue.
- The program that owns a key head sums its gradients over the query heads that share it. No atomics are needed, and
  every run gives the same result, bit for bit.

Arithmetic. The raw score q k is computed without the scale, and all scaling happens in the exponent. A weight is
2^((q k - m) c), where m is the largest raw score and c = |scale| log2(e). The subtraction comes first. Equal scores
therefore cancel exactly, however large they are, and a compiler that fuses a multiplication and an addition cannot
change a weight. The sign of the scale is applied to q k, which is exact.

A masked score is -inf and its weight is exactly 0, whatever its key holds. A maximum of -inf means that the row has
seen no key yet. It is replaced by 0 where it is subtracted, but not where it is stored.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows, opaque
from flashproof.impls.spec import OWN_KERNELS, Arithmetic, Device, Dtype, Implementation, arithmetic_of_flash
from flashproof.impls.triton.launching import Launch, launch
from flashproof.impls.triton.primitives import (
    INFINITY,
    INTERPRETED,
    Scale,
    call_arguments,
    contiguous_tile_at,
    cropped,
    device_function,
    dot,
    head_dim,
    kept,
    kernel,
    load_tile,
    missing,
    padded_dim,
    room_for,
    rounded,
    seen_keys,
    slow,
    store_tile,
    this_program,
    tile_at,
    wide,
    with_strides,
)

# ---------------------------------------------------------------------------------------------------------------- tiles


class Tiles(NamedTuple):
    """The numbers of queries and keys in a tile: B_r and B_c of the paper."""

    query: int
    key: int


def tiles(dtype: torch.dtype, dim: int, resident: int, *, interpreted: bool = INTERPRETED.value) -> Tiles:
    """Returns the tile sizes of the paper, B_c = ceil(M / 4d) and B_r = min(B_c, d), as powers of two from 16 to 64.

    16 is the smallest size that Triton multiplies. M is 40 KB, counted in numbers of the dtype of the inputs. This is a
    quarter of the memory that an A100 gives one program. The scores and sums of a step are in registers, and with
    larger tiles they spill.

    resident: the number of tiles that share M. It is 4 in the forward (Q, K, V and O, the 4 of the paper) and 8 in the
    backward (also dO, dQ, dK and dV).

    In the interpreter, a step takes the same time whatever its size, so one large tile serves every call.
    """
    if interpreted:
        return Tiles(query=64, key=128)
    key = math.ceil(40 * 1024 / dtype.itemsize / (resident * dim))
    key = min(64, max(16, 1 << (key.bit_length() - 1)))
    return Tiles(query=min(key, padded_dim(dim)), key=key)


# -------------------------------------------------------------------------------------------------------------- kernels


@device_function
def seen_pairs(rows, columns, queries, keys, offset):
    """Returns [rows, columns]: whether the query of a row sees the key of a column. False past the end of either."""
    return (rows < queries)[:, None] & (columns[None, :] < seen_keys(rows, keys, offset)[:, None])


@device_function
def finite(maximum):
    """Returns a maximum that can be subtracted.

    It is 0 for a row that has seen no key. All scores of such a row are -inf, and they stay -inf.
    """
    return tl.where(maximum == -INFINITY, 0.0, maximum)


@kernel
def forward_kernel(
    query, key, value, query_strides, key_strides, value_strides,
    out, row_max, row_sum,  # contiguous, float32; the host fills them with 0, -inf, 0
    heads, groups, queries, keys, dim, offset,
    sign, exponent_scale,
    seed: tl.uint64, last_dropped: tl.uint32, kept_scale,  # dropout: seed, largest word that drops, 1 / (1 - p)
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 for one batch and one query head.

    query [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] are `loadable`.
    out [batch, heads, queries, dim], row_max and row_sum [batch, heads, queries] hold the state of the rows.
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    program = this_program()  # batch * heads + head
    batch, head = program // heads, program % heads
    first_row = wide(program) * queries
    out += first_row * dim
    row_max += first_row
    row_sum += first_row

    # The last query sees the most keys.
    for first_key in range(0, seen_keys(queries - 1, keys, offset), KEY_TILE):
        columns = first_key + tl.arange(0, KEY_TILE)
        k_tile = tile_at(key, key_strides, batch, head // groups, first_key, KEY_TILE, PADDED_DIM, WIDE)
        v_tile = tile_at(value, value_strides, batch, head // groups, first_key, KEY_TILE, PADDED_DIM, WIDE)
        k = load_tile(k_tile, first_key, keys, dim, KEY_TILE, PADDED_DIM, PADDED, True)  # [keys, dim]
        v = load_tile(v_tile, first_key, keys, dim, KEY_TILE, PADDED_DIM, PADDED, True)

        # Queries before `first_seeing` see no key of this tile.
        first_seeing = tl.maximum(first_key - offset, 0) // QUERY_TILE * QUERY_TILE
        for first_query in range(first_seeing, queries, QUERY_TILE):
            rows = first_query + tl.arange(0, QUERY_TILE)
            q_tile = tile_at(query, query_strides, batch, head, first_query, QUERY_TILE, PADDED_DIM, WIDE)
            q = load_tile(q_tile, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED, True)  # [queries, dim]
            old_max = tl.load(row_max + rows, mask=rows < queries, other=-INFINITY)  # [queries]
            old_sum = tl.load(row_sum + rows, mask=rows < queries, other=0.0)

            # The softmax of this tile, with the maximum of the tile itself.
            raw = sign * dot(q, tl.trans(k))  # [queries, keys]
            raw = tl.where(seen_pairs(rows, columns, queries, keys, offset), raw, -INFINITY)
            tile_max = tl.max(raw, 1)
            weights = tl.exp2((raw - finite(tile_max)[:, None]) * exponent_scale)
            tile_sum = tl.sum(weights, 1)
            if DROPOUT:
                weights = tl.where(kept(seed, last_dropped, batch, head, rows[:, None], columns[None, :]), weights, 0.0)
            tile_out = dot(rounded(weights, v.dtype), v)  # [queries, dim]

            # Merge the tile with the state of the rows.
            new_max = tl.maximum(old_max, tile_max)
            old_share = old_sum * tl.exp2((old_max - finite(new_max)) * exponent_scale)
            tile_rescale = tl.exp2((tile_max - finite(new_max)) * exponent_scale)
            new_sum = old_share + tile_sum * tile_rescale
            divisor = tl.where(new_sum == 0.0, 1.0, new_sum)  # the output of a row that has seen no key stays 0
            out_tile = contiguous_tile_at(out, first_query, dim, QUERY_TILE, PADDED_DIM)
            old_out = load_tile(out_tile, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED, True)
            new_out = (
                old_out * tl.div_rn(old_share, divisor)[:, None]
                + tile_out * tl.div_rn(tile_rescale * kept_scale, divisor)[:, None]
            )

            tl.debug_barrier()  # every thread reads before any thread writes
            store_tile(out_tile, new_out, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED)
            tl.store(row_max + rows, new_max, mask=rows < queries)
            tl.store(row_sum + rows, new_sum, mask=rows < queries)
        tl.debug_barrier()  # the next key tile reads what other threads of this program wrote


@kernel
def backward_kernel(
    query, key, value, dout, query_strides, key_strides, value_strides, dout_strides,
    out, row_max, row_sum,  # contiguous, from the forward; out in the dtype of the inputs
    dquery,  # contiguous, float32; the host fills it with 0
    dkey, dvalue,  # contiguous
    kv_heads, groups, queries, keys, dim, offset,
    scale, sign, exponent_scale,
    seed: tl.uint64, last_dropped: tl.uint32, kept_scale,  # dropout: seed, largest word that drops, 1 / (1 - p)
    DROPOUT: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Algorithm 4 for one batch and one key head.

    query, dout [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] are `loadable`.
    out, dquery [batch, heads, queries, dim], row_max, row_sum [batch, heads, queries].
    dkey, dvalue [batch, kv_heads, keys, dim].
    """
    dim = head_dim(dim, PADDED_DIM, PADDED)
    program = this_program()  # batch * kv_heads + kv_head
    batch, kv_head = program // kv_heads, program % kv_heads
    dkey += wide(program) * keys * dim
    dvalue += wide(program) * keys * dim

    for first_key in range(0, keys, KEY_TILE):
        columns = first_key + tl.arange(0, KEY_TILE)
        k_tile = tile_at(key, key_strides, batch, kv_head, first_key, KEY_TILE, PADDED_DIM, WIDE)
        v_tile = tile_at(value, value_strides, batch, kv_head, first_key, KEY_TILE, PADDED_DIM, WIDE)
        k = load_tile(k_tile, first_key, keys, dim, KEY_TILE, PADDED_DIM, PADDED, True)  # [keys, dim]
        v = load_tile(v_tile, first_key, keys, dim, KEY_TILE, PADDED_DIM, PADDED, True)
        dk = tl.zeros([KEY_TILE, PADDED_DIM], tl.float32)
        dv = tl.zeros([KEY_TILE, PADDED_DIM], tl.float32)

        first_seeing = tl.maximum(first_key - offset, 0) // QUERY_TILE * QUERY_TILE
        for member in range(groups):  # the query heads that share this key head
            head = kv_head * groups + member
            first_row = (wide(program) * groups + member) * queries
            for first_query in range(first_seeing, queries, QUERY_TILE):
                rows = first_query + tl.arange(0, QUERY_TILE)
                q_tile = tile_at(query, query_strides, batch, head, first_query, QUERY_TILE, PADDED_DIM, WIDE)
                do_tile = tile_at(dout, dout_strides, batch, head, first_query, QUERY_TILE, PADDED_DIM, WIDE)
                o_tile = contiguous_tile_at(out + first_row * dim, first_query, dim, QUERY_TILE, PADDED_DIM)
                q = load_tile(q_tile, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED, True)  # [queries, dim]
                do = load_tile(do_tile, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED, True)
                o = load_tile(o_tile, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED, True)
                # delta [queries] is sum_j P_ij dP_ij, which is equal to sum_d dO_id O_id.
                delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
                maximum = tl.load(row_max + first_row + rows, mask=rows < queries, other=-INFINITY)  # [queries]
                total = tl.load(row_sum + first_row + rows, mask=rows < queries, other=0.0)

                # Recompute the weights, this time normalised.
                seen = seen_pairs(rows, columns, queries, keys, offset)
                raw = tl.where(seen, sign * dot(q, tl.trans(k)), -INFINITY)  # [queries, keys]
                p = (
                    tl.exp2((raw - finite(maximum)[:, None]) * exponent_scale)
                    * tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total))[:, None]
                )

                dp = dot(do, tl.trans(v))  # [queries, keys]
                dropped_p = p
                if DROPOUT:
                    keep = kept(seed, last_dropped, batch, head, rows[:, None], columns[None, :])
                    dropped_p = tl.where(keep, p, 0.0)
                    dp = tl.where(keep, dp * kept_scale, 0.0)
                dv = dot(tl.trans(rounded(dropped_p, do.dtype)), do, dv)

                # dS is masked too, because a masked value can make dP infinite, and 0 inf is NaN.
                ds = rounded(tl.where(seen, p * (dp - delta[:, None]), 0.0), q.dtype)
                dk = dot(tl.trans(ds), q, dk)

                dq_tile = contiguous_tile_at(dquery + first_row * dim, first_query, dim, QUERY_TILE, PADDED_DIM)
                dq = load_tile(dq_tile, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED, True)
                dq += scale * dot(ds, k)  # [queries, dim]
                tl.debug_barrier()  # every thread reads before any thread writes
                store_tile(dq_tile, dq, first_query, queries, dim, QUERY_TILE, PADDED_DIM, PADDED)

        dk_tile = contiguous_tile_at(dkey, first_key, dim, KEY_TILE, PADDED_DIM)
        dv_tile = contiguous_tile_at(dvalue, first_key, dim, KEY_TILE, PADDED_DIM)
        store_tile(dk_tile, scale * dk, first_key, keys, dim, KEY_TILE, PADDED_DIM, PADDED)
        store_tile(dv_tile, kept_scale * dv, first_key, keys, dim, KEY_TILE, PADDED_DIM, PADDED)
        tl.debug_barrier()  # the next key tile reads the dQ that other threads of this program wrote


# ------------------------------------------------------------------------------------------------------------- launches


class Forward(NamedTuple):
    """The results of the forward. A query that sees no key has out 0, row_max -inf and row_sum 0."""

    out: Queries  # in the dtype of the inputs
    row_max: Rows  # largest sign(scale) q k, without |scale|
    row_sum: Rows  # sum of exp(score - largest score)


def forward(query: Queries, key: Keys, value: Keys, call: Call, tile: Tiles) -> Forward:
    """Runs Algorithm 1 with tiles of the given sizes. Raises ValueError if the scale is beyond float32."""
    rows = (call.batch, call.heads, call.queries)
    out = room_for(query, torch.float32).zero_()
    row_max = torch.full(rows, -math.inf, dtype=torch.float32, device=query.device)
    row_sum = torch.zeros(rows, dtype=torch.float32, device=query.device)
    state = {"out": out, "row_max": row_max, "row_sum": row_sum}
    seed = call.dropout_seed
    launch(forward_launches, call.unseeded, tile, query=query, key=key, value=value, seed=seed, **state)
    return Forward(cropped(out, call.dim).to(query.dtype), row_max, row_sum)


def forward_launches(
    call: Call, tile: Tiles, *, query: Queries, key: Keys, value: Keys, seed: int, **state: Tensor
) -> Iterator[Launch]:
    """Describes the launch of Algorithm 1. One program computes one head. state: out, row_max and row_sum."""
    arguments = with_strides(query=query, key=key, value=value) | state | {"heads": call.heads, "seed": seed}
    grid = (call.batch * call.heads,)
    yield Launch(forward_kernel, grid, arguments | _arguments(call, tile), **options(query.dtype))


def backward(
    query: Queries, key: Keys, value: Keys, dout: Queries, saved: Forward, call: Call, tile: Tiles
) -> tuple[Queries, Keys, Keys]:
    """Runs Algorithm 4 with tiles of the given sizes. Returns the gradients of query, key and value, in their dtype."""
    dquery = room_for(query, torch.float32).zero_()
    dkey, dvalue = room_for(key), room_for(value)
    read = {"query": query, "key": key, "value": value, "dout": dout, **saved._asdict()}
    written = {"dquery": dquery, "dkey": dkey, "dvalue": dvalue}
    launch(backward_launches, call.unseeded, tile, **read, **written, seed=call.dropout_seed)
    dquery, dkey, dvalue = (cropped(gradient, call.dim) for gradient in (dquery, dkey, dvalue))
    return dquery.to(query.dtype), dkey, dvalue


def backward_launches(
    call: Call, tile: Tiles, *, query: Queries, key: Keys, value: Keys, dout: Queries, seed: int, **others: Tensor
) -> Iterator[Launch]:
    """Describes the launch of Algorithm 4. One program computes one key head.

    others: out, row_max, row_sum, dquery, dkey and dvalue, which are contiguous.
    """
    arguments = with_strides(query=query, key=key, value=value, dout=dout) | others
    arguments |= {"kv_heads": call.kv_heads, "scale": call.scale, "seed": seed}
    grid = (call.batch * call.kv_heads,)
    yield Launch(backward_kernel, grid, arguments | _arguments(call, tile), **options(query.dtype))


def options(dtype: torch.dtype) -> dict[str, int]:
    """Returns the compile options of both kernels.

    There is nothing to pipeline, because the loops contain barriers. In float32 the operands of the products pass
    through registers, so the kernels use more warps.

    With only one program per head, the chip has room, so a thread may use the maximum number of registers. Without this
    setting, the compiler spills a few bytes to fit in more programs.
    """
    return {"num_warps": 8 if dtype == torch.float32 else 4, "num_stages": 1, "max_registers": 255}


def _arguments(call: Call, tile: Tiles) -> dict[str, Any]:
    """Returns the arguments that both kernels take."""
    scale = Scale.of(call.scale)
    return call_arguments(call) | {
        "sign": float(scale.sign),
        "exponent_scale": scale.exponent,
        "QUERY_TILE": tile.query,
        "KEY_TILE": tile.key,
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        saved = forward(query, key, value, call, tiles(query.dtype, call.dim, resident=4))
        ctx.save_for_backward(query, key, value, *saved)
        ctx.call = call
        # The LSE is the natural log of the sum of exp(score). It is -inf for a row that saw no key, like its maximum.
        lse = torch.where(saved.row_sum == 0.0, -math.inf, saved.row_max * abs(call.scale) + saved.row_sum.log())
        ctx.mark_non_differentiable(lse)
        return saved.out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *saved = ctx.saved_tensors
        return *backward(
            query, key, value, dout, Forward(*saved), ctx.call, tiles(query.dtype, ctx.call.dim, resident=8)
        ), None


@Attention
@opaque
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-1. Returns (out, lse), with gradients for query, key and value."""
    out, lse = _Attention.apply(query, key, value, call)
    return out, lse


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """Exact products, sums in float32, weights cast to the input dtype.

    16-bit products use tensor cores where there are any.

    Tiles become narrower as the head dim grows. The claim states the narrowest tiles, which make the most steps. In
    wider tiles, sums are trees whose depth is at most the length of the narrowest tile.
    """
    narrowest = tiles(getattr(torch, dtype), 256, resident=4, interpreted=device == "cpu")
    return replace(arithmetic_of_flash(dtype, device), key_tile=narrowest.key, query_tile=narrowest.query)


implementation = Implementation(
    name="triton.fa1",
    attention=attention,
    summary="FlashAttention-1 in Triton: outer loop over keys, the output rescaled in device memory at every step.",
    supports=OWN_KERNELS,
    arithmetic=arithmetic,
    missing=missing,
    slow=slow,
)
