"""Attention in float32 on the tensor cores of Hopper GPUs: the call, its launches and its claims.

The algorithms are in `fa3_float32.cu` and `fa3_float32_backward.cu`, the parts of numbers in `parts.cuh`. Two custom
operators of torch, `flashproof::cuda_fa3_float32_forward` and `flashproof::cuda_fa3_float32_backward`, launch the
kernels. torch.compile supports such operators.

The kernels run on Hopper GPUs. On a machine without a GPU they run on the CPU twin (`twin_hopper.h`).
"""

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows
from flashproof.impls.cuda import fa3, launching
from flashproof.impls.cuda.fa3 import BackwardProblem, Boxes, ForwardProblem, HopperLaunch
from flashproof.impls.cuda.launching import Launch, View, call_of, check_scale, padded_dim, sign_of, vectors
from flashproof.impls.spec import OWN_KERNELS, Arithmetic, Device, Dtype, Implementation

TARGETS = fa3.TARGETS
LARGEST_DIM = 128  # the parts of larger heads do not fit in shared memory
PARTS = 3  # bfloat16 parts of a number
SPLIT_ROWS = 64  # rows that a block of the kernel `split` reads

# ---------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class ForwardTile:
    """The constants of fa3_float32.cu.

    Each of the `workers` warpgroups has 64 queries. Shared memory holds `stages` parts of tiles of keys or values.
    """

    dim: int
    workers: int
    step: int  # keys of a tile
    stages: int

    @property
    def own(self) -> int:
        """The number of queries of a block."""
        return 64 * self.workers

    @property
    def warps(self) -> int:
        """The number of warps of a block: 4 for each worker and 4 for the producer."""
        return 4 * (self.workers + 1)

    @property
    def shared_bytes(self) -> int:
        barriers = 24 * self.workers + 16 * self.stages + 48
        return 2 * self.dim * (PARTS * self.own + self.stages * self.step) + barriers

    @property
    def constants(self) -> dict[str, int | str]:
        return {"DIM": self.dim, "WORKERS": self.workers, "STEP": self.step, "STAGES": self.stages}


@dataclass(frozen=True)
class BackwardTile:
    """The constants of fa3_float32_backward.cu.

    Shared memory holds `stages` parts of tiles of queries or of their output gradients.
    """

    dim: int
    step: int  # queries of a tile
    stages: int
    own: int = 64  # keys of a block
    warps: int = 12  # warps of two workers and the producer

    @property
    def shared_bytes(self) -> int:
        operands = 2 * self.dim * (2 * PARTS * self.own + self.stages * self.step)
        scores = (2 * PARTS + 4) * self.own * self.step  # the parts of dS, and P
        statistics = 2 * 8 * self.step
        return operands + scores + statistics + 8 + 16 * self.stages + 32 + 32

    @property
    def constants(self) -> dict[str, int | str]:
        return {"DIM": self.dim, "STEP": self.step, "STAGES": self.stages}


# The tiles by the padded head dim. docs/fa3_float32.md says how they were chosen.
FORWARD = {64: ForwardTile(64, 3, 64, 18), 128: ForwardTile(128, 2, 64, 8)}
BACKWARD = {64: BackwardTile(64, 96, 9), 128: BackwardTile(128, 48, 8)}


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """The claimed arithmetic: six products of three bfloat16 parts, and sums of tiles in float32.

    Tensor cores sum the terms of a tile or of the head dim. Tiles differ between head dims. The largest tiles have the
    longest sums, and the smallest ones make the most steps, so these are the ones claimed.
    """
    forward, backward = FORWARD.values(), BACKWARD.values()
    steps = [*(tile.step for tile in forward), *(tile.own for tile in backward)]
    query_steps = [tile.step for tile in backward]
    return Arithmetic(
        accumulate="tensor_core",
        tensor_core_terms=max(LARGEST_DIM, *steps, *query_steps),
        products="6xbf16",
        key_tile=min(steps),
        query_tile=min(query_steps),
    )


# ------------------------------------------------------------------------------------------------------------- launches


def parts_of(tensor: Tensor) -> Tensor:
    """Room for the parts of a tensor, with columns up to a multiple of 8: [3 batch, heads, length, dim], bfloat16."""
    batch, heads, length, dim = tensor.shape
    return torch.empty((PARTS * batch, heads, length, dim + -dim % 8), dtype=torch.bfloat16, device=tensor.device)


class Source(ctypes.Structure):
    """A tensor and room for its parts, as `Source` of fa3_float32_split.cu."""

    _fields_ = (
        *(("from", View), ("to", ctypes.c_void_p), ("all", ctypes.c_longlong)),
        *((name, ctypes.c_int) for name in ("heads", "rows", "dim", "pieces", "vectors", "blocks")),
    )

    @classmethod
    def of(cls, tensor: Tensor, parts: Tensor) -> "Source":
        batch, heads, length, dim = tensor.shape
        pieces = parts.shape[3] // 8
        return cls(
            *(View.of(tensor), parts.data_ptr(), batch * heads * length * pieces, heads, length, dim, pieces),
            *(int(dim % 8 == 0 and vectors(tensor)), batch * heads * -(-length // SPLIT_ROWS)),
        )


class Sources(ctypes.Structure):
    """Up to four tensors, as `Sources` of fa3_float32_split.cu."""

    _fields_ = (("of", Source * 4),)


def split_launch(*pairs: tuple[Tensor, Tensor]) -> Launch:
    """The kernel `split`: for up to four pairs, it fills the second tensor with the parts of the first.

    The first tensors are of any strides.
    """
    sources = [Source.of(*pair) for pair in pairs]
    blocks = sum(source.blocks for source in sources)
    launch = HopperLaunch(
        *("fa3_float32_split.cu", "split", blocks, 8, 0, {}),
        tensors=tuple(tensor for pair in pairs for tensor in pair),
        arguments=(Sources((Source * 4)(*sources)),),
    )
    return fa3.counted(launch, blocks)


def _split(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The parts of up to four tensors."""
    parts = tuple(parts_of(tensor) for tensor in tensors)
    split_launch(*zip(tensors, parts, strict=True)).run()
    return parts


def _result(tensor: Tensor) -> Tensor:
    """Room for a result with the shape of a tensor, and columns up to a multiple of 8."""
    *sizes, dim = tensor.shape
    return torch.empty((*sizes, dim + -dim % 8), dtype=torch.float32, device=tensor.device)


def forward(call: Call, query: Queries, key: Keys, value: Keys) -> tuple[Queries, Rows]:
    """Runs the forward and returns (out, lse)."""
    out = _result(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    queries, keys, values = _split(query, key, value)
    forward_launch(call, queries, keys, values, out, lse, fa3.counters(query.device)).run()
    return out[..., : call.dim].contiguous(), lse


def backward(
    call: Call, dout: Queries, query: Queries, key: Keys, value: Keys, out: Queries, lse: Rows
) -> tuple[Queries, Keys, Keys]:
    """Runs the backward and returns (dquery, dkey, dvalue)."""
    tile = BACKWARD[padded_dim(call.dim)]
    dquery, dkey, dvalue = (_result(x) for x in (query, key, value))
    tiles = call.batch * call.heads * -(-call.queries // tile.step)
    statistics = torch.empty((tiles, 2, tile.step), dtype=torch.float32, device=query.device)
    sums = torch.empty((tiles, tile.dim, tile.step), dtype=torch.float32, device=query.device)
    douts, queries, keys, values = _split(dout, query, key, value)
    for launch in backward_launches(
        call, dout, douts, queries, keys, values, out, lse.contiguous(), statistics, sums, dquery, dkey, dvalue
    ):
        launch.run()
    return (
        dquery[..., : call.dim].contiguous(),
        dkey[..., : call.dim].contiguous(),
        dvalue[..., : call.dim].contiguous(),
    )


def forward_launch(
    call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, counter: Tensor
) -> Launch:
    """The forward: at most one block for each multiprocessor. It fills out and lse. query, key and value are parts."""
    tile = FORWARD[padded_dim(call.dim)]
    tiles = -(-call.queries // tile.own)
    work = call.batch * call.heads * tiles
    # The number of heads whose parts of keys and values fit in the cache together.
    kept = max(1, fa3.L2_BYTES // (4 * PARTS * call.keys * query.shape[3])) * call.groups
    sign = sign_of(call)
    # With a scale of 0 every score is 0. With magnitude 1, -inf times the magnitude is -inf.
    magnitude = abs(call.scale) if sign else 1.0
    problem = ForwardProblem(
        *(call.batch, call.heads, call.groups, call.queries, call.keys, query.shape[3], call.offset),
        *(tiles, min(kept, call.batch * call.heads), magnitude, magnitude * math.log2(math.e)),
    )
    blocks = fa3.TWIN_BLOCKS if launching.on_twin(query) else fa3.processors(query.device)
    launch = HopperLaunch(
        *("fa3_float32.cu", "forward", min(blocks, work), tile.warps, tile.shared_bytes),
        constants={"CAUSAL": int(call.is_causal), "SIGN": sign} | tile.constants,
        tensors=(query, key, value, out, lse, counter),
        arguments=(
            *(Boxes(query, 64), Boxes(key, tile.step), Boxes(value, tile.step)),
            *(View.of(out), ctypes.c_void_p(lse.data_ptr()), problem, ctypes.c_void_p(counter.data_ptr())),
        ),
    )
    return fa3.counted(launch, work)


def backward_launches(
    call: Call,
    dout: Tensor,
    dout_parts: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    sums: Tensor,
    dquery: Tensor,
    dkey: Tensor,
    dvalue: Tensor,
) -> tuple[Launch, Launch, Launch]:
    """The three kernels of the backward, in their order. They fill dquery, dkey and dvalue.

    dout_parts, query, key and value are parts. statistics and sums are scratch, both float32. statistics is [batch *
    heads * query tiles, 2, step], and sums is [batch * heads * query tiles, padded dim, step].
    """
    tile = BACKWARD[padded_dim(call.dim)]
    query_tiles, key_tiles = -(-call.queries // tile.step), -(-call.keys // tile.own)
    # The number of key heads whose parts of queries and output gradients and sums of dQ fit in the cache together.
    kept = max(1, fa3.L2_BYTES // ((4 * PARTS + 4) * call.queries * query.shape[3] * call.groups))

    def problem(dim: int) -> BackwardProblem:
        return BackwardProblem(
            *(call.batch, call.heads, call.groups, call.queries, call.keys, dim, call.offset),
            *(query_tiles, key_tiles, min(kept, call.batch * call.kv_heads), call.scale),
        )

    to_lse, to_statistics, to_sums = (ctypes.c_void_p(x.data_ptr()) for x in (lse, statistics, sums))
    work = call.batch * call.heads * query_tiles
    prepare = HopperLaunch(
        *("fa3_float32_backward.cu", "prepare", work, 8, 0, tile.constants | {"CAUSAL": 0}),
        tensors=(out, dout, lse, statistics, sums),
        arguments=(View.of(out), View.of(dout), to_lse, to_statistics, to_sums, problem(call.dim)),
    )
    boxes = (Boxes(query, tile.step), Boxes(key, tile.own), Boxes(value, tile.own), Boxes(dout_parts, tile.step))
    main = HopperLaunch(
        *("fa3_float32_backward.cu", "backward", call.batch * call.kv_heads * key_tiles, tile.warps),
        shared_bytes=tile.shared_bytes,
        constants=tile.constants | {"CAUSAL": int(call.is_causal)},
        tensors=(query, key, value, dout_parts, statistics, sums, dkey, dvalue),
        arguments=(*boxes, to_statistics, to_sums, View.of(dkey), View.of(dvalue), problem(dkey.shape[3])),
    )
    finish = HopperLaunch(
        *("fa3_float32_backward.cu", "finish", work, 8, 0, tile.constants | {"CAUSAL": 0}),
        tensors=(sums, dquery),
        arguments=(to_sums, View.of(dquery), problem(dquery.shape[3])),
    )
    return fa3.counted(prepare, work), fa3.counted(main, main.blocks), fa3.counted(finish, work)


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("flashproof::cuda_fa3_float32_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, offset: int
) -> tuple[Tensor, Tensor]:
    """The forward: returns (out, lse)."""
    return forward(call_of(query, key, scale, is_causal, offset, 0.0, 0), query, key, value)


@torch.library.custom_op("flashproof::cuda_fa3_float32_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward: returns (dquery, dkey, dvalue)."""
    return backward(call_of(query, key, scale, is_causal, offset, 0.0, 0), dout, query, key, value, out, lse)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(query.shape[:3], dtype=torch.float32, device=query.device),
    )


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

# ------------------------------------------------------------------------------------------------------------- the call


@Attention
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-3 in float32: returns (out, lse), with gradients for query, key and value.

    A kernel writes the bfloat16 parts of the tensors to scratch, 1.5 times their size. It reads tensors of any strides.

    Raises TypeError for 16-bit tensors, NotImplementedError for dropout and for head dims above 128, ValueError if the
    scale is beyond float32, and CudaError if a kernel cannot be compiled or launched.
    """
    if query.dtype != torch.float32:
        raise TypeError(f"query: dtype {query.dtype} is not taken by cuda.fa3_float32; give float32")
    if call.dropout_p > 0.0:
        raise NotImplementedError(
            f"dropout_p: {call.dropout_p} is not taken by cuda.fa3_float32, which has no dropout; give 0.0"
        )
    if call.dim > LARGEST_DIM:
        raise NotImplementedError(
            f"query: head dim {call.dim} is not taken by cuda.fa3_float32; give at most {LARGEST_DIM}"
        )
    check_scale(call)
    out, lse = _forward(query, key, value, call.scale, call.is_causal, call.offset)
    return out, lse


implementation = Implementation(
    name="cuda.fa3_float32",
    attention=attention,
    # The kernels are not deterministic, because atomic additions sum dQ. For the same reason dQ of a slice of a batch
    # may differ from dQ in the batch.
    supports=replace(
        OWN_KERNELS,
        dtypes=("float32",),
        dims=(1, LARGEST_DIM),
        dropout=False,
        deterministic=False,
        batch_invariant=False,
    ),
    arithmetic=arithmetic,
    missing=fa3.missing,
    slow=launching.slow,
    summary=(
        "FlashAttention-3 in float32 in CUDA C++ for Hopper: six products of bfloat16 parts on tensor cores, "
        "tiles summed afresh and added in float32, dQ by atomics."
    ),
)
