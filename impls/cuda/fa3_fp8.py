"""FlashAttention-3 in FP8 on Hopper GPUs, forward only: the call, its launches and its claims.

The kernels are in `fa3_fp8.cu`, the products of e4m3 numbers in `e4m3.cuh`. The custom operator of torch
`flashproof::cuda_fa3_fp8` launches them. torch.compile supports such operators.

The kernels run on Hopper GPUs, and on the CPU twin (`twin_hopper.h`) if they get tensors of the CPU.
"""

import ctypes
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows
from flashproof.impls.cuda import fa3, launching
from flashproof.impls.cuda.fa3 import Boxes, ForwardProblem, HopperLaunch
from flashproof.impls.cuda.launching import Launch, call_of, check_scale, padded_dim, sign_of, vectors
from flashproof.impls.spec import OWN_KERNELS, SIXTEEN_BIT, Arithmetic, Device, Dtype, Implementation

TARGETS = fa3.TARGETS
LARGEST_DIM = 128  # the sums of larger heads do not fit in registers
BLOCK = 128  # rows that share a scale, and keys of a tile

# ---------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tile:
    """The constants of fa3_fp8.cu.

    Each of the `workers` warpgroups has 64 queries. Shared memory holds `stages` tiles of keys or values.
    """

    dim: int
    workers: int
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
        barriers = 16 * self.workers + 16 * self.stages + 40
        return 128 * (self.own + self.stages * BLOCK) + barriers + 4 * self.stages

    @property
    def constants(self) -> dict[str, int | str]:
        return {"DIM": self.dim, "WORKERS": self.workers, "STAGES": self.stages}


# The tiles by the padded head dim. docs/fa3_fp8.md says how they were chosen.
TILES = {64: Tile(64, 2, 6), 128: Tile(128, 2, 6)}


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """The claimed arithmetic: inputs and weights in e4m3, and sums of tiles in float32.

    Tensor cores sum the terms of a tile or of the head dim.
    """
    return Arithmetic(
        accumulate="tensor_core",
        tensor_core_terms=max(BLOCK, LARGEST_DIM),
        products="e4m3",
        scale_rows=BLOCK,
        weights="e4m3",
        key_tile=BLOCK,
    )


# ------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Rounded:
    """Room for a tensor [batch, heads, length, dim] in e4m3.

    numbers: uint8, [batch, heads, length, dim] or, if `transposed`, [batch, heads, dim, length]. The last size is
    rounded up to a multiple of 16, and dim to a multiple of 8. scales: float32, [batch, heads, blocks of 128 rows].
    """

    numbers: Tensor
    scales: Tensor
    transposed: bool

    @classmethod
    def of(cls, tensor: Tensor, *, transposed: bool = False) -> "Rounded":
        batch, heads, length, dim = tensor.shape
        rows, columns = (dim + -dim % 8, length) if transposed else (length, dim)
        numbers = torch.empty((batch, heads, rows, columns + -columns % 16), dtype=torch.uint8, device=tensor.device)
        scales = torch.empty((batch, heads, -(-length // BLOCK)), dtype=torch.float32, device=tensor.device)
        return cls(numbers, scales, transposed)


class Source(ctypes.Structure):
    """A tensor and room for its e4m3 numbers, as `Source` of fa3_fp8.cu."""

    _fields_ = (
        *(("from", launching.View), ("to", ctypes.c_void_p), ("scales", ctypes.c_void_p)),
        *((name, ctypes.c_int) for name in ("heads", "rows", "dim", "pieces", "pitch", "transposed", "vectors")),
        *((name, ctypes.c_int) for name in ("tiles", "blocks")),
    )

    @classmethod
    def of(cls, tensor: Tensor, rounded: Rounded) -> "Source":
        batch, heads, length, dim = tensor.shape
        pitch, tiles = rounded.numbers.shape[3], rounded.scales.shape[2]
        # Rows of Q and K are written up to their pitch. A transposed tensor has 8 rows for each piece.
        pieces = rounded.numbers.shape[2] // 8 if rounded.transposed else pitch // 8
        return cls(
            *(launching.View.of(tensor), rounded.numbers.data_ptr(), rounded.scales.data_ptr()),
            *(heads, length, dim, pieces, pitch, int(rounded.transposed), int(dim == 8 * pieces and vectors(tensor))),
            *(tiles, batch * heads * tiles),
        )


class Sources(ctypes.Structure):
    """Three tensors, as `Sources` of fa3_fp8.cu."""

    _fields_ = (("of", Source * 3),)


class Scales(ctypes.Structure):
    """The scales of query, key and value, as `Scales` of fa3_fp8.cu."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("query", "key", "value"))


def quantise_launch(*pairs: tuple[Tensor, Rounded]) -> Launch:
    """The kernel `quantise`, for three tensors of any strides."""
    sources = [Source.of(*pair) for pair in pairs]
    blocks = sum(source.blocks for source in sources)
    tensors = (x for tensor, rounded in pairs for x in (tensor, rounded.numbers, rounded.scales))
    launch = HopperLaunch(
        *("fa3_fp8.cu", "quantise", blocks, 16, 0, {"BF16": int(pairs[0][0].dtype == torch.bfloat16)}),
        tensors=tuple(tensors),
        arguments=(Sources((Source * 3)(*sources)),),
    )
    return fa3.counted(launch, blocks)


def forward_launch(
    call: Call, query: Rounded, key: Rounded, value: Rounded, out: Tensor, lse: Tensor, counter: Tensor
) -> Launch:
    """The forward: at most one block for each multiprocessor. It fills out and lse. value is transposed."""
    tile = TILES[padded_dim(call.dim)]
    tiles = -(-call.queries // tile.own)
    work = call.batch * call.heads * tiles
    # The number of heads whose keys and values fit in the cache together.
    kept = max(1, fa3.L2_BYTES // (2 * call.keys * query.numbers.shape[3])) * call.groups
    processors = fa3.TWIN_BLOCKS if launching.on_twin(out) else fa3.processors(out.device)
    sign = sign_of(call)
    # With a scale of 0 every score is 0. With magnitude 1, -inf times the magnitude is -inf.
    magnitude = abs(call.scale) if sign else 1.0
    problem = ForwardProblem(
        *(call.batch, call.heads, call.groups, call.queries, call.keys, out.shape[3], call.offset),
        *(tiles, min(kept, call.batch * call.heads), magnitude, magnitude * math.log2(math.e)),
    )
    launch = HopperLaunch(
        *("fa3_fp8.cu", "forward", min(processors, work), tile.warps, tile.shared_bytes),
        constants={"BF16": int(out.dtype == torch.bfloat16), "CAUSAL": int(call.is_causal), "SIGN": sign}
        | tile.constants,
        tensors=(*(x for each in (query, key, value) for x in (each.numbers, each.scales)), out, lse, counter),
        arguments=(
            *(Boxes(query.numbers, 64), Boxes(key.numbers, BLOCK), Boxes(value.numbers, tile.dim)),
            Scales(*(each.scales.data_ptr() for each in (query, key, value))),
            *(fa3.View.of(out), ctypes.c_void_p(lse.data_ptr()), problem, ctypes.c_void_p(counter.data_ptr())),
        ),
    )
    return fa3.counted(launch, work)


def forward(call: Call, query: Queries, key: Keys, value: Keys) -> tuple[Queries, Rows]:
    """Runs the two kernels and returns (out, lse)."""
    *sizes, dim = query.shape
    out = torch.empty((*sizes, dim + -dim % 8), dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    queries, keys, values = Rounded.of(query), Rounded.of(key), Rounded.of(value, transposed=True)
    quantise_launch((query, queries), (key, keys), (value, values)).run()
    forward_launch(call, queries, keys, values, out, lse, fa3.counters(query.device)).run()
    return out[..., :dim].contiguous(), lse


# ------------------------------------------------------------------------------------------------------------- the call


@torch.library.custom_op("flashproof::cuda_fa3_fp8", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, offset: int
) -> tuple[Tensor, Tensor]:
    """The forward: returns (out, lse)."""
    return forward(call_of(query, key, scale, is_causal, offset, 0.0, 0), query, key, value)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(query.shape[:3], dtype=torch.float32, device=query.device),
    )


@Attention
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-3 in FP8: returns (out, lse), without gradients.

    The tensors are rounded to e4m3. 128 rows of a head share a scale. A kernel writes the rounded tensors to scratch of
    half of their size. It reads tensors of any strides.

    Raises TypeError for float32, NotImplementedError for dropout and for head dims above 128, ValueError if the scale
    is beyond float32, and CudaError if a kernel cannot be compiled or launched.
    """
    if query.dtype == torch.float32:
        raise TypeError("query: dtype torch.float32 is not taken by cuda.fa3_fp8; give float16 or bfloat16")
    if call.dropout_p > 0.0:
        raise NotImplementedError(
            f"dropout_p: {call.dropout_p} is not taken by cuda.fa3_fp8, which has no dropout; give 0.0"
        )
    if call.dim > LARGEST_DIM:
        raise NotImplementedError(
            f"query: head dim {call.dim} is not taken by cuda.fa3_fp8; give at most {LARGEST_DIM}"
        )
    check_scale(call)
    out, lse = _forward(query, key, value, call.scale, call.is_causal, call.offset)
    return out, lse


# The kernels also run on the CPU twin, where tests judge a few cases. The claim leaves the CPU out, because all checks
# take twenty seconds of a processor there. With devices=("cpu", "cuda") and slow=launching.slow, a run makes them.
implementation = Implementation(
    name="cuda.fa3_fp8",
    attention=attention,
    supports=replace(
        OWN_KERNELS, dtypes=SIXTEEN_BIT, devices=("cuda",), dims=(1, LARGEST_DIM), dropout=False, backward=False
    ),
    arithmetic=arithmetic,
    missing=fa3.missing,
    summary=(
        "FlashAttention-3 in FP8 in CUDA C++ for Hopper, forward only: e4m3 products with a scale for each block of "
        "128 rows, tiles summed afresh and added in float32."
    ),
)
