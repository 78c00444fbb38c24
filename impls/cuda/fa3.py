"""FlashAttention-3 in CUDA C++ for Hopper GPUs: the call, its launches and its claims.

The algorithms are in `fa3.cu`, `fa3_backward.cu` and `fa3_dquery.cu`. Their primitives are in `hopper.cuh`. Two custom
operators of torch, `flashproof::cuda_fa3_forward` and `flashproof::cuda_fa3_backward`, launch the kernels.
torch.compile supports such operators.

Atomic additions sum dQ, in an order that varies. The deterministic backward has a kernel of its own for dQ instead. It
runs under `torch.use_deterministic_algorithms(True)`, and always in `cuda.fa3_deterministic`.

The kernels run on Hopper GPUs. On a machine without a GPU they run on the CPU twin (`twin_hopper.h`).
"""

import ctypes
import functools
import math
import re
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.launching import IMPORTING, CudaError, Launch, call_of, check_scale, padded_dim, sign_of
from flashproof.impls.spec import (
    OWN_KERNELS,
    SIXTEEN_BIT,
    Arithmetic,
    Device,
    Dtype,
    Implementation,
    arithmetic_of_flash,
)

TARGETS = ("sm_90a",)  # the targets of the compilation; "a" adds wgmma and setmaxnreg
L2_BYTES = 32 << 20  # bytes of the tensors that blocks read at the same time: two thirds of the L2 cache
PROCESSORS = 132  # the assumed number of multiprocessors if there is no GPU: that of an H200
TWIN_BLOCKS = (
    2  # the blocks of a forward on the twin. The first does nearly all work, so its rings go round many times.
)

# ---------------------------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class ForwardTile:
    """The constants of fa3.cu.

    Each of the `workers` warpgroups has 64 queries. Shared memory holds `stages` tiles of keys or values.
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
        barriers = 16 * self.workers + 16 * self.stages + 48
        return 2 * self.dim * (self.own + self.stages * self.step) + barriers

    @property
    def constants(self) -> dict[str, int | str]:
        return {"DIM": self.dim, "WORKERS": self.workers, "STEP": self.step, "STAGES": self.stages}


@dataclass(frozen=True)
class BackwardTile:
    """The constants of fa3_backward.cu.

    Shared memory holds `stages` tiles of queries and `stages` tiles of their output gradients.
    """

    dim: int
    step: int  # queries of a tile
    stages: int
    atomic: bool = True  # whether the kernel computes dQ, by atomic additions
    warps: int = 12  # warps of two workers and the producer

    @property
    def own(self) -> int:
        """The number of keys of a block."""
        return 64 if self.dim == 256 else 128

    @property
    def shared_bytes(self) -> int:
        # dS for 128 keys, or P and dS for 64 keys, twice. Without dQ, the workers exchange scores at head dim 256 only.
        scores = 2 * 128 * 128 * -(-self.step // 64) if self.atomic or self.dim == 256 else 0
        barriers = 8 + 32 * self.stages + 16
        return 4 * self.dim * (self.own + self.stages * self.step) + scores + 8 * self.stages * self.step + barriers

    @property
    def constants(self) -> dict[str, int | str]:
        return {"DIM": self.dim, "STEP": self.step, "STAGES": self.stages, "ATOMIC": int(self.atomic)}


@dataclass(frozen=True)
class QueryTile:
    """The constants of fa3_dquery.cu.

    Shared memory holds `key_stages` tiles of keys and `value_stages` tiles of values.
    """

    dim: int
    step: int  # keys of a tile
    key_stages: int
    value_stages: int
    own: int = 128  # queries of a block
    warps: int = 12  # warps of two workers and the producer

    @property
    def shared_bytes(self) -> int:
        stages = self.key_stages + self.value_stages
        return 2 * self.dim * (2 * self.own + stages * self.step) + 16 + 16 * stages

    @property
    def constants(self) -> dict[str, int | str]:
        return {
            "DIM": self.dim,
            "STEP": self.step,
            "KEY_STAGES": self.key_stages,
            "VALUE_STAGES": self.value_stages,
        }


# The tiles by the padded head dim. docs/fa3.md says how they were chosen.
FORWARD = {64: ForwardTile(64, 3, 128, 6), 128: ForwardTile(128, 2, 128, 4), 256: ForwardTile(256, 2, 80, 4)}
FORWARD_LONG = {128: ForwardTile(128, 2, 176, 4)}  # without a causal mask and with at least LONG keys
LONG = 8192
BACKWARD = {64: BackwardTile(64, 128, 2), 128: BackwardTile(128, 80, 2), 256: BackwardTile(256, 64, 2, atomic=False)}
DQUERY = {64: QueryTile(64, 128, 3, 3), 128: QueryTile(128, 80, 4, 4), 256: QueryTile(256, 48, 3, 1)}


def forward_tile(call: Call) -> ForwardTile:
    """The tile of the forward. It does not depend on the batch."""
    dim = padded_dim(call.dim)
    return FORWARD_LONG.get(dim, FORWARD[dim]) if call.keys >= LONG and not call.is_causal else FORWARD[dim]


def arithmetic(dtype: Dtype, device: Device) -> Arithmetic:
    """The claimed arithmetic: exact products, sums in float32 on tensor cores, and weights cast to the input dtype.

    The parts of dQ are added in float32, too. Tiles differ between head dims. The smallest tiles make the most steps,
    so they are the ones claimed. The sums of the deterministic dQ stay on the tensor cores and need no tile.
    """
    steps = [
        *(tile.step for tile in (*FORWARD.values(), *FORWARD_LONG.values())),
        *(tile.own for tile in BACKWARD.values()),
    ]
    query_tile = min(tile.step for tile in BACKWARD.values())
    return replace(arithmetic_of_flash(dtype, device), key_tile=min(steps), query_tile=query_tile)


# ---------------------------------------------------------------------------------------------------- what kernels take


class View(ctypes.Structure):
    """A tensor [batch, heads, length, dim] with contiguous columns. Strides are in elements.

    It is `Output` of fa3.cu and `View` of fa3_backward.cu and fa3_dquery.cu.
    """

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("batch", "head", "row")))

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.data_ptr(), *tensor.stride()[:3])


class ForwardProblem(ctypes.Structure):
    """The sizes and the scale of a call, as `Problem` of fa3.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("batches", "heads", "groups", "queries", "keys", "dim", "offset", "tiles", "band")
        ),
        *((name, ctypes.c_float) for name in ("magnitude", "exponent_scale")),
    )


class BackwardProblem(ctypes.Structure):
    """The sizes and the scale of a call, as `Problem` of fa3_backward.cu and fa3_dquery.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                "batches",
                "heads",
                "groups",
                "queries",
                "keys",
                "dim",
                "offset",
                "query_tiles",
                "key_tiles",
                "band",
            )
        ),
        ("scale", ctypes.c_float),
    )


class TensorMap(ctypes.Structure):
    """The description of a tensor for the copy engine (CUtensorMap), as `TensorMap` of hopper.cuh."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


@dataclass(frozen=True)
class Boxes:
    """A tensor [batch, heads, length, dim] that the copy engine reads in boxes of `rows` rows of 128 bytes.

    Its elements take 16 bits, or 8 bits if its dtype is uint8.

    The driver encodes it as a TensorMap when the kernel is launched, and not earlier, because a machine without a GPU
    may have no driver.
    """

    tensor: Tensor
    rows: int

    def encoded(self) -> TensorMap:
        """The TensorMap. Raises CudaError if the driver refuses the tensor."""
        tensor = self.tensor
        if launching.on_twin(tensor):
            return self._described()
        return _encoded(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, self.rows)

    def _described(self) -> TensorMap:
        """The same for the twin: `Description` of twin_hopper.h."""
        strides = [self.tensor.itemsize * stride for stride in self.tensor.stride()]
        sizes = reversed(self.tensor.shape)
        box = (self.rows, self.tensor.itemsize)
        described = struct.pack("=Q3q6i", self.tensor.data_ptr(), *reversed(strides[:3]), *sizes, *box)
        return TensorMap.from_buffer_copy(described.ljust(128, b"\0"))


@functools.lru_cache(maxsize=4096)
def _encoded(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int
) -> TensorMap:
    """The TensorMap of a tensor.

    It depends only on these arguments, so a cached map is right for every tensor with the same arguments.
    """
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType
    element = {
        torch.float16: kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.uint8: kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    # torch allows any stride for a dimension of size 1. The copy engine asks for a multiple of 16 bytes.
    steps = [dtype.itemsize * strides[i] if shape[i] > 1 else 16 for i in (2, 1, 0)]
    status, made = driver.cuTensorMapEncodeTiled(
        element,
        4,
        pointer,
        [driver.cuuint64_t(size) for size in reversed(shape)],
        [driver.cuuint64_t(step) for step in steps],
        [driver.cuuint32_t(size) for size in (128 // dtype.itemsize, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise CudaError(
            f"CUDA: {status.name} when describing a tensor of shape {list(shape)} "
            f"and strides {list(strides)} to the copy engine"
        )
    return TensorMap.from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


def is_taken(tensor: Tensor) -> bool:
    """Whether the kernels can read the tensor where it is.

    If they can, its columns are contiguous, and their number is a multiple of 8. Its address and its other strides are
    multiples of 16 bytes. A stride may be 0, except that of the rows.
    """
    *sizes, dim = tensor.shape
    *strides, column = tensor.stride()
    if column != 1 or dim % 8 or tensor.data_ptr() % 16 or (sizes[2] > 1 and strides[2] == 0):
        return False
    return all(size == 1 or (stride % 8 == 0 and stride < 2**39) for size, stride in zip(sizes, strides, strict=True))


def fitted(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that the kernels can read: contiguous, with columns of zeros up to a multiple of 8.

    Columns of zeros add 0 to every score, and their results are dropped. So the copy changes no bit of the result.
    """
    if is_taken(tensor):
        return tensor
    dim = tensor.shape[3]
    copy = torch.empty((*tensor.shape[:3], dim + -dim % 8), dtype=tensor.dtype, device=tensor.device)
    copy[..., :dim] = tensor
    copy[..., dim:] = 0
    return copy


# ------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class HopperLaunch(Launch):
    """A launch for sm_90a. Its arguments may hold `Boxes`."""

    def run(self) -> None:
        """Starts the kernel on the device of its tensors, on torch's current stream. Raises CudaError."""
        device = self.tensors[0].device
        if launching.on_twin(self.tensors[0]):
            Launch.run(replace(self, arguments=self._encoded()))
            return
        from cuda.bindings import driver

        with torch.cuda.device(device):
            try:
                launching._make_current(device.index)
                kernel = _kernel_on_gpu(
                    self.source, self.kernel, tuple(self.constants.items()), self.shared_bytes, device.index
                )
                arguments = self._encoded()
            except CudaError as error:
                raise CudaError(f"{error}\nwhen loading {self}") from error
            parameters = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
            stream = torch.cuda.current_stream(device).cuda_stream
            block = (32 * self.warps, 1, 1)
            (status,) = driver.cuLaunchKernel(
                kernel, self.blocks, 1, 1, *block, self.shared_bytes, stream, ctypes.addressof(parameters), 0
            )
        if status:
            raise CudaError(f"CUDA: {status.name} when launching {self}")

    def _encoded(self) -> tuple[Any, ...]:
        return tuple(argument.encoded() if isinstance(argument, Boxes) else argument for argument in self.arguments)


@functools.cache
def _kernel_on_gpu(
    source: str, kernel: str, constants: tuple[tuple[str, int | str], ...], shared_bytes: int, device: int
) -> Any:
    """A kernel that can be launched, from the disk or from NVRTC."""
    from cuda.bindings import driver

    with IMPORTING:
        from cuda.core import ObjectCode

    if reason := _not_hopper(device):
        raise CudaError(reason)

    def compile_to(path: Any) -> None:
        path.write_bytes(compile_cubin(source, kernel, dict(constants)))

    place, code = launching._compiled(".cubin", compile_to, source, *launching._key(kernel, constants, TARGETS[0]))
    try:
        loaded = ObjectCode.from_cubin(code).get_kernel(kernel)
    except Exception as error:
        raise CudaError(f"CUDA: {source} {kernel} cannot be loaded from {place}: {error}") from error
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(
        attribute, shared_bytes, driver.CUkernel(int(loaded.handle)), driver.CUdevice(device)
    )
    if status:
        raise CudaError(f"CUDA: {status.name} when asking for {shared_bytes} bytes of shared memory")
    launching._kept.append(loaded)
    return driver.CUfunction(int(loaded.handle))


def compile_cubin(source: str, kernel: str, constants: Mapping[str, int | str]) -> bytes:
    """A kernel's machine code. Needs no GPU. Raises CudaError, also if the code is slow: see `check_assembled`."""
    code, log = launching.compile_cubin(source, kernel, constants, TARGETS[0])
    if "registers" not in log:  # the code came from NVRTC's own cache, without the assembler's messages
        code, log = launching.compile_cubin(source, kernel, {**constants, "ANEW": time.time_ns()}, TARGETS[0])
    check_assembled(log, f"{source} {kernel} ({' '.join(f'{name}={value}' for name, value in constants.items())})")
    return code


def check_assembled(log: str, what: str) -> None:
    """Raises CudaError if the assembler serialised the warpgroup products, or ignored setmaxnreg.

    Such code gives right results, but is several times slower. The check looks for the warnings C7507 to C7519.
    """
    if found := re.search(r"^.*\bC75(?:0[7-9]|1\d)\b.*$", log, re.MULTILINE):
        raise CudaError(
            f"NVRTC: {what} is compiled to slow code; install another version of nvidia-cuda-nvrtc\n{found[0].strip()}"
        )


def missing(device: Device) -> str | None:
    """The reason why the kernels cannot run on a device, or None if they can."""
    if device == "cpu":
        return launching.missing(device)
    if reason := launching.no_nvrtc():
        return reason
    return _not_hopper(torch.cuda.current_device()) if torch.cuda.is_available() else "CUDA: no device"


def _not_hopper(device: int) -> str | None:
    """The reason why a GPU is refused, or None. wgmma exists only on sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return (
        None
        if (major, minor) == (9, 0)
        else f"CUDA: {torch.cuda.get_device_name(device)} is sm_{major}{minor}, and wgmma needs a Hopper GPU (sm_90)"
    )


def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU. Without a GPU it is that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


_counters: dict[tuple[int, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """The two counters of the forward on torch's current stream, int32.

    They are 0 before each launch, and each launch leaves them at 0. Launches of one stream run one after the other, so
    they share the counters. Each stream has its own counters. A captured graph may be replayed on any stream, so a
    launch in it has its own counters, which the graph clears.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    place = device.index, torch.cuda.current_stream(device).cuda_stream
    if place not in _counters:
        _counters[place] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[place]


def forward(call: Call, query: Queries, key: Keys, value: Keys) -> tuple[Queries, Rows]:
    """Runs the forward and returns (out, lse)."""
    query, key, value = fitted(query), fitted(key), fitted(value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    forward_launch(call, query, key, value, out, lse, counters(query.device)).run()
    return _columns(out, call.dim), lse


def backward(
    call: Call,
    dout: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    out: Queries,
    lse: Rows,
    *,
    deterministic: bool,
) -> tuple[Queries, Keys, Keys]:
    """Runs the backward and returns (dquery, dkey, dvalue). deterministic: dQ has the same bits in every run."""
    tile = BACKWARD[padded_dim(call.dim)]
    if deterministic:
        tile = replace(tile, atomic=False)
    dout, query, key, value, out = (fitted(tensor) for tensor in (dout, query, key, value, out))
    dquery, dkey, dvalue = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    tiles = call.batch * call.heads * -(-call.queries // tile.step)
    statistics = torch.empty((tiles, 2, tile.step), dtype=torch.float32, device=query.device)
    sums = torch.empty((tiles, tile.dim, tile.step) if tile.atomic else 1, dtype=torch.float32, device=query.device)
    for launch in backward_launches(
        call, tile, dout, query, key, value, out, lse.contiguous(), statistics, sums, dquery, dkey, dvalue
    ):
        launch.run()
    return _columns(dquery, call.dim), _columns(dkey, call.dim), _columns(dvalue, call.dim)


def _columns(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` columns, contiguous."""
    return tensor[..., :dim].contiguous()


def forward_launch(
    call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, counter: Tensor
) -> Launch:
    """The forward: at most one block for each multiprocessor. It fills out and lse. The tensors are `fitted`."""
    tile = forward_tile(call)
    tiles = -(-call.queries // tile.own)
    work = call.batch * call.heads * tiles
    # The number of heads whose keys and values fit in the cache together.
    kept = max(1, L2_BYTES // (4 * call.keys * query.shape[3])) * call.groups
    sign = sign_of(call)
    # With a scale of 0 every score is 0. With magnitude 1, -inf times the magnitude is -inf.
    magnitude = abs(call.scale) if sign else 1.0
    problem = ForwardProblem(
        *(call.batch, call.heads, call.groups, call.queries, call.keys, query.shape[3], call.offset),
        *(tiles, min(kept, call.batch * call.heads), magnitude, magnitude * math.log2(math.e)),
    )
    arguments = (
        *(Boxes(query, 64), Boxes(key, tile.step), Boxes(value, tile.step)),
        *(View.of(out), ctypes.c_void_p(lse.data_ptr()), problem, ctypes.c_void_p(counter.data_ptr())),
    )
    constants = {
        "BF16": int(query.dtype == torch.bfloat16),
        "CAUSAL": int(call.is_causal),
        "SIGN": sign,
    } | tile.constants
    blocks = min(TWIN_BLOCKS if launching.on_twin(query) else processors(query.device), work)
    launch = HopperLaunch(
        "fa3.cu",
        "forward",
        blocks,
        tile.warps,
        tile.shared_bytes,
        constants,
        (query, key, value, out, lse, counter),
        arguments,
    )
    return counted(launch, work)


def backward_launches(
    call: Call,
    tile: BackwardTile,
    dout: Tensor,
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

    The tensors are `fitted`. statistics and sums are scratch, both float32. statistics is [batch * heads * query tiles,
    2, step], and sums is [batch * heads * query tiles, padded dim, step]. A tile that is not `atomic` needs no sums.
    """
    query_tiles, key_tiles = -(-call.queries // tile.step), -(-call.keys // tile.own)
    # The number of key heads whose queries, output gradients and sums of dQ fit in the cache together.
    kept = max(1, L2_BYTES // (8 * call.queries * query.shape[3] * call.groups))
    problem = BackwardProblem(
        *(call.batch, call.heads, call.groups, call.queries, call.keys, query.shape[3], call.offset),
        *(query_tiles, key_tiles, min(kept, call.batch * call.kv_heads), call.scale),
    )
    to_lse, to_statistics, to_sums = (ctypes.c_void_p(x.data_ptr()) for x in (lse, statistics, sums))
    constants = {"BF16": int(query.dtype == torch.bfloat16), "CAUSAL": 0} | tile.constants
    work = call.batch * call.heads * query_tiles
    prepare = HopperLaunch(
        *("fa3_backward.cu", "prepare", work, 8, 0, constants),
        tensors=(out, dout, lse, statistics, sums),
        arguments=(View.of(out), View.of(dout), to_lse, to_statistics, to_sums, problem),
    )
    boxes = (Boxes(query, tile.step), Boxes(key, tile.own), Boxes(value, tile.own), Boxes(dout, tile.step))
    main = HopperLaunch(
        *("fa3_backward.cu", "backward", call.batch * call.kv_heads * key_tiles, tile.warps, tile.shared_bytes),
        constants=constants | {"CAUSAL": int(call.is_causal)},
        tensors=(query, key, value, dout, statistics, sums, dkey, dvalue),
        arguments=(*boxes, to_statistics, to_sums, View.of(dkey), View.of(dvalue), problem),
    )
    if not tile.atomic:
        last = dquery_launch(call, tile, dout, query, key, value, statistics, dquery)
        return counted(prepare, work), counted(main, main.blocks), last
    finish = HopperLaunch(
        *("fa3_backward.cu", "finish", work, 8, 0, constants),
        tensors=(sums, dquery),
        arguments=(to_sums, View.of(dquery), problem),
    )
    return counted(prepare, work), counted(main, main.blocks), counted(finish, work)


def dquery_launch(
    call: Call,
    prepared: BackwardTile,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    statistics: Tensor,
    dquery: Tensor,
) -> Launch:
    """The kernel of the deterministic dQ. It fills dquery. The tensors are `fitted`.

    statistics has the tiles of `prepared`.
    """
    tile = DQUERY[padded_dim(call.dim)]
    query_tiles, key_tiles = -(-call.queries // tile.own), -(-call.keys // tile.step)
    # The number of heads whose keys and values fit in the cache together.
    kept = max(1, L2_BYTES // (4 * call.keys * query.shape[3])) * call.groups
    problem = BackwardProblem(
        *(call.batch, call.heads, call.groups, call.queries, call.keys, query.shape[3], call.offset),
        *(query_tiles, key_tiles, min(kept, call.batch * call.heads), call.scale),
    )
    boxes = (Boxes(query, tile.own), Boxes(key, tile.step), Boxes(value, tile.step), Boxes(dout, tile.own))
    launch = HopperLaunch(
        *("fa3_dquery.cu", "dquery", call.batch * call.heads * query_tiles, tile.warps, tile.shared_bytes),
        constants={"BF16": int(query.dtype == torch.bfloat16), "CAUSAL": int(call.is_causal)}
        | tile.constants
        | {"PREPARED": prepared.step},
        tensors=(query, key, value, dout, statistics, dquery),
        arguments=(*boxes, ctypes.c_void_p(statistics.data_ptr()), View.of(dquery), problem),
    )
    return counted(launch, launch.blocks)


def counted(launch: Launch, work: int) -> Launch:
    """The launch itself. Raises CudaError if the kernel cannot count its pieces of work in 32 bits."""
    if work >= 2**31 - 2**16:
        raise CudaError(
            f"CUDA: {work} tiles of queries or keys, and a kernel counts them in 32 bits: "
            f"fewer batch entries, heads or rows would do, of {launch}"
        )
    return launch


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("flashproof::cuda_fa3_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, offset: int, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """The forward: returns (out, lse). deterministic is for the backward; the forward always is."""
    return forward(call_of(query, key, scale, is_causal, offset, 0.0, 0), query, key, value)


@torch.library.custom_op("flashproof::cuda_fa3_backward", mutates_args=())
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
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward: returns (dquery, dkey, dvalue). torch's deterministic mode asks for a deterministic one, too."""
    return backward(
        *(call_of(query, key, scale, is_causal, offset, 0.0, 0), dout, query, key, value, out, lse),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
    )


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
    """FlashAttention-3: returns (out, lse), with gradients for query, key and value.

    The copy engine reads rows of whole 16-byte pieces. A tensor of another form is copied first (`fitted`), which takes
    time and memory.

    Raises TypeError for float32, NotImplementedError for dropout, ValueError if the scale is beyond float32, and
    CudaError if a kernel cannot be compiled or launched.
    """
    return _attended("cuda.fa3", query, key, value, call, deterministic=False)


@Attention
def deterministic_attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """The same, with gradients that have the same bits in every run. Raises the same."""
    return _attended("cuda.fa3_deterministic", query, key, value, call, deterministic=True)


def _attended(
    name: str, query: Tensor, key: Tensor, value: Tensor, call: Call, *, deterministic: bool
) -> tuple[Tensor, Tensor]:
    if query.dtype == torch.float32:
        raise TypeError(f"query: dtype torch.float32 is not taken by {name}; give float16 or bfloat16")
    if call.dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p: {call.dropout_p} is not taken by {name}, which has no dropout; give 0.0")
    check_scale(call)
    out, lse = _forward(query, key, value, call.scale, call.is_causal, call.offset, deterministic)
    return out, lse


implementation = Implementation(
    name="cuda.fa3",
    attention=attention,
    # The kernels are not deterministic, because atomic additions sum dQ. For the same reason dQ of a slice of a batch
    # may differ from dQ in the batch.
    supports=replace(OWN_KERNELS, dtypes=SIXTEEN_BIT, dropout=False, deterministic=False, batch_invariant=False),
    arithmetic=arithmetic,
    missing=missing,
    slow=launching.slow,
    summary=(
        "FlashAttention-3 in CUDA C++ for Hopper: tiles copied by TMA, "
        "asynchronous products (wgmma) under the softmax of the next tile, dQ by atomics."
    ),
)

deterministic = Implementation(
    name="cuda.fa3_deterministic",
    attention=deterministic_attention,
    supports=replace(OWN_KERNELS, dtypes=SIXTEEN_BIT, dropout=False),
    arithmetic=arithmetic,
    missing=missing,
    # In torch's deterministic mode, cuda.fa3 has the same kernels.
    slow=lambda device: "variant" if device == "cpu" else None,
    summary="cuda.fa3 with a kernel of its own for dQ, in place of atomics: the same bits in every run.",
)
