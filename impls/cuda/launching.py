"""The host code that the CUDA implementations share.

It describes a launch as data, compiles it by NVRTC or for the CPU twin, and defines the types of the kernels'
parameters.

A kernel file is compiled at its first use, once for each set of constants (element type, head dim, tiles, mask ...).
The compiled file is kept on disk. Its name is a hash of the source file, the files that it includes, the options and
the compiler's version. Its last bytes are a hash of the other bytes.

For a GPU, one kernel of the file is compiled. For the twin (twin_machine.h), all kernels of a file are compiled at
once, because the host's compiler takes seconds. For the same reason some constants are variables there: they would only
multiply the number of compilations.
"""

import atexit
import ctypes
import fcntl
import functools
import hashlib
import io
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flashproof.impls.call import Call
from flashproof.impls.spec import Device

FOLDER = Path(__file__).parent
KERNELS = {"fa1.cu": ("forward", "backward"), "fa2.cu": ("forward", "delta", "dkey_dvalue", "dquery")}
KERNELS["block_sparse.cu"] = KERNELS["fa2.cu"]
KERNELS |= {"fa3.cu": ("forward",), "fa3_backward.cu": ("prepare", "backward", "finish"), "fa3_dquery.cu": ("dquery",)}
KERNELS |= {
    "fa3_float32_split.cu": ("split",),
    "fa3_float32.cu": ("forward",),
    "fa3_float32_backward.cu": ("prepare", "backward", "finish"),
}
APART = ("fa3_fp8.cu",)  # files whose kernels are compiled one by one for the twin, too
ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
# The options of NVRTC. It does not fuse products and sums: the sources name each fused operation.
OPTIONS = {"std": "c++17", "fma": False, "ptxas_options": ["-v"]}
VARIABLES = ("CAUSAL", "DROPOUT", "VECTOR", "SIGN")  # variables of the twin; constants on a GPU
_TWIN = threading.Lock()  # held from the setting of these variables to the end of their launch


Chip = tuple[int, int] | None  # the capability of a GPU, such as (9, 0), or None for the CPU twin


class CudaError(RuntimeError):
    """A compilation or a launch failed. The message names the kernel, its launch and the case."""


def missing(device: Device) -> str | None:
    """The reason why the kernels cannot run on a device, or None if they can."""
    if device == "cpu":
        return (
            None
            if _compiler()
            else "C++ compiler: none found (c++, g++ or clang++, or the variable CXX), which the CPU twin needs"
        )
    if reason := no_nvrtc():
        return reason
    return _too_old(torch.cuda.current_device()) if torch.cuda.is_available() else "CUDA: no device"


def slow(device: Device) -> Literal["tile"] | None:
    """What is slow on a device, or None. A tile is slow on the CPU twin, which runs one thread after another."""
    return "tile" if device == "cpu" else None


def _too_old(device: int) -> str | None:
    """The reason why a GPU is refused, or None. Asynchronous copies and products of bfloat16 need sm_80 or later."""
    major, minor = torch.cuda.get_device_capability(device)
    return (
        None
        if major >= 8
        else f"CUDA: {torch.cuda.get_device_name(device)} is sm_{major}{minor}, and the kernels need sm_80 or later"
    )


@functools.cache
def no_nvrtc() -> str | None:
    """The reason why kernels cannot be compiled for a GPU, or None. The compilation needs no GPU."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        try:
            found = util.find_spec(module) is not None
        except ImportError:
            found = False
        if not found:
            return f"{package}: not installed"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        return f"NVRTC: {error}"
    return None


# ---------------------------------------------------------------------------------------------------- what kernels take


def on_twin(tensor: Tensor) -> bool:
    """Whether the CPU twin runs the kernels on this tensor."""
    return tensor.device.type == "cpu"


def chip_of(tensor: Tensor) -> Chip:
    """The chip that runs the kernels on this tensor."""
    return None if on_twin(tensor) else torch.cuda.get_device_capability(tensor.device)


def padded_dim(dim: int) -> int:
    """The number of columns to which tiles of this head dim are padded: 64, 128 or 256."""
    return max(64, 1 << (dim - 1).bit_length())


class View(ctypes.Structure):
    """A tensor [batch, heads, length, dim], as `View` of tiles.cuh. Strides are in elements."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("batch", "head", "row", "column")))

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.data_ptr(), *tensor.stride())


class Problem(ctypes.Structure):
    """The sizes, the scale and the dropout of a call, as `Problem` of tiles.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "queries", "keys", "dim")),
        *((name, ctypes.c_float) for name in ("scale", "magnitude", "exponent_scale")),
        ("seed", ctypes.c_ulonglong),
        ("last_dropped", ctypes.c_uint),
        ("kept_scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, call: Call) -> "Problem":
        """The problem of a call.

        With a scale of 0, the kernels make every score 0. The magnitude is 1, because -inf times it has to stay -inf.
        """
        magnitude = abs(call.scale) if sign_of(call) else 1.0
        sizes = (call.heads, call.kv_heads, call.queries, call.keys, call.dim)
        dropout = (call.dropout_seed, max(call.dropout_threshold - 1, 0), 1.0 / (1.0 - call.dropout_p))
        return cls(*sizes, call.scale, magnitude, magnitude * math.log2(math.e), *dropout)


def check_scale(call: Call) -> None:
    """Raises ValueError if the scale is beyond float32."""
    if abs(call.scale) * math.log2(math.e) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale: {call.scale} is beyond float32, in which scores are computed; its magnitude is at most 2.3e38"
        )


def packed_seed(seed: int) -> int:
    """A 64-bit seed as a signed integer, which is the only kind of integer that an operator of torch takes."""
    return seed - 2**64 if seed >= 2**63 else seed


def unpacked_seed(packed: int) -> int:
    """The seed in [0, 2^64), from its packed form."""
    return packed % 2**64


def call_of(
    query: Tensor, key: Tensor, scale: float, is_causal: bool, offset: int, dropout_p: float, dropout_seed: int
) -> Call:
    """The checked call, rebuilt from the arguments of an operator of torch."""
    (batch, heads, queries, dim), (kv_heads, keys) = query.shape, key.shape[1:3]
    return Call(
        batch,
        heads,
        kv_heads,
        heads // kv_heads,
        queries,
        keys,
        dim,
        scale,
        is_causal,
        offset,
        dropout_p,
        unpacked_seed(dropout_seed),
    )


def sign_of(call: Call) -> int:
    """The sign of the scale after its rounding to float32."""
    return int(np.sign(np.float32(call.scale)))


def vectors(*tensors: Tensor) -> bool:
    """VECTOR of tiles.cuh: whether kernels can copy the rows of all tensors in aligned pieces of 16 bytes.

    The columns are contiguous, a row is a whole number of pieces, and the address and the other strides are multiples
    of 16 bytes.
    """
    each = 16 // tensors[0].itemsize
    return all(
        x.stride(3) == 1
        and x.shape[3] % each == 0
        and x.data_ptr() % 16 == 0
        and not any(stride % each for stride in x.stride()[:3])
        for x in tensors
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.itemsize


# ------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Tile:
    """The shape of a block's work. tiles.cuh describes the fields, which have the same names there in capitals."""

    warps: int
    rows: int
    step: int
    split: int = 1
    hold: bool = False  # whether the forward keeps the queries in registers
    blocks: int = 1  # blocks that share a multiprocessor; they limit the registers of a thread

    @property
    def own(self) -> int:
        """The number of rows of scores that a block owns."""
        return self.warps // self.split * self.rows

    @property
    def constants(self) -> dict[str, int]:
        return {
            "WARPS": self.warps,
            "ROWS": self.rows,
            "STEP": self.step,
            "SPLIT": self.split,
            "HOLD": int(self.hold),
            "BLOCKS": self.blocks,
        }


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    A launch is data. `run` starts the kernel. A test compiles the same launch for a GPU that the machine does not have.
    """

    source: str  # a file of this folder, such as "fa2.cu", or the path of another file
    kernel: str
    blocks: int
    warps: int
    shared_bytes: int
    constants: Mapping[str, int | str]
    tensors: tuple[Tensor, ...]  # all tensors that the kernel may access; the device is that of the first one
    arguments: tuple[Any, ...]  # the kernel's parameters, as ctypes values
    # Whether the kernel may start before the kernel before it has ended (`next_may_start` of primitives.cuh).
    early: bool = False

    def __str__(self) -> str:
        constants = " ".join(f"{name}={value}" for name, value in self.constants.items())
        shapes = ", ".join(f"{list(x.shape)}" for x in self.tensors)
        return (
            f"{self.source} {self.kernel} <<<{self.blocks}, {32 * self.warps}, {self.shared_bytes}>>> "
            f"({constants}; tensors {shapes})"
        )

    def run(self) -> None:
        """Starts the kernel on the device of its tensors, on torch's current stream. Raises CudaError."""
        device = self.tensors[0].device
        if self.blocks >= 2**31:
            raise CudaError(
                f"CUDA: {self.blocks} blocks, where a launch has at most 2^31 - 1: "
                f"fewer batch entries, heads or rows would do, of {self}"
            )
        parameters = (ctypes.c_void_p * len(self.arguments))(
            *(ctypes.addressof(argument) for argument in self.arguments)
        )
        if device.type == "cpu":
            self._run_on_twin(parameters)
            return
        from cuda.bindings import driver

        with torch.cuda.device(device):
            try:
                _make_current(device.index)
                kernel = _kernel_on_gpu(
                    self.source, self.kernel, tuple(self.constants.items()), self.shared_bytes, device.index
                )
            except CudaError as error:
                raise CudaError(f"{error}\nwhen loading {self}") from error
            stream = torch.cuda.current_stream(device).cuda_stream
            block = (32 * self.warps, 1, 1)
            if self.early and (chip_of(self.tensors[0]) or (0, 0)) >= (9, 0):
                config = _early_config(self.blocks, self.warps, self.shared_bytes, stream)
                (status,) = driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(parameters), 0)
            else:
                (status,) = driver.cuLaunchKernel(
                    kernel, self.blocks, 1, 1, *block, self.shared_bytes, stream, ctypes.addressof(parameters), 0
                )
        if status:
            raise CudaError(f"CUDA: {status.name} when launching {self}")

    def _run_on_twin(self, parameters: Any) -> None:
        compiled = {name: value for name, value in self.constants.items() if name not in VARIABLES}
        try:
            # Kernels with HAND_OVER have tiles of their own, so they are compiled one by one as well.
            apart = self.source in APART or "HAND_OVER" in self.constants
            kernels = (self.kernel,) if apart else KERNELS.get(self.source, ())
            library = _twin(self.source, kernels, tuple(compiled.items()))
        except CudaError as error:
            raise CudaError(f"{error}\nwhen loading {self}") from error
        _check_sizes(library, self.kernel, self.arguments)
        buffers = (_Buffer * len(self.tensors))(*(_Buffer(*_span(x)) for x in self.tensors))
        launch = _TwinLaunch(self.blocks, 32 * self.warps, self.shared_bytes, len(self.tensors), buffers)
        start = getattr(library, f"{self.kernel}_launch")
        start.restype = ctypes.c_char_p
        with _TWIN:
            for name in VARIABLES:
                ctypes.c_int.in_dll(library, name).value = int(self.constants.get(name, 0))
            fault = start(parameters, ctypes.byref(launch))
            said = fault.decode() if fault else ""
        if said:
            raise CudaError(f"CUDA on the CPU twin: {said}, of {self}")


def _early_config(blocks: int, warps: int, shared_bytes: int, stream: int) -> Any:
    """The driver's description of a launch that need not wait for the end of the kernel before it."""
    from cuda.bindings import driver

    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32 * warps, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = [early], 1
    return config


class _Buffer(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("end", ctypes.c_void_p))


class _TwinLaunch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("blocks", "threads", "shared_bytes", "buffer_count")),
        ("buffers", ctypes.POINTER(_Buffer)),
    )


def _check_sizes(library: Any, kernel: str, arguments: tuple[Any, ...]) -> None:
    """Raises CudaError unless the sizes of the arguments equal the sizes of the kernel's parameters.

    The types of the parameters are written twice, here and in the sources.
    """
    sizes = (ctypes.c_int * 32)()
    count = getattr(library, f"{kernel}_sizes")(sizes)
    given = [ctypes.sizeof(argument) for argument in arguments]
    if list(sizes[:count]) != given:
        raise CudaError(f"{kernel}: takes parameters of {list(sizes[:count])} bytes, given {given}")


# --------------------------------------------------------------------------------------------------------- compilations


DIGEST = hashlib.sha256().digest_size  # bytes of the hash at the end of a compiled file


FOR_THE_TWIN = re.compile(rb"^.*//.* for the twin\n", re.MULTILINE)  # lines that say nothing to a GPU


def _sources(source: str, *, twin: bool) -> str:
    """A hash of a source file and of all files of this folder that it includes, directly or indirectly.

    Only the compilation for the twin includes the files of the twin, whose names begin with "twin". Lines that say
    nothing to a GPU, FOR_THE_TWIN, do not count for it. So what is kept about its kernels stays valid.
    """
    front, files = [FOLDER / source], dict[Path, bytes]()
    while front:
        if (path := front.pop()) not in files:
            files[path] = path.read_bytes()
            included = re.findall(rb'^\s*#\s*include\s+"(.+?)"', files[path], re.MULTILINE)
            names = [name.decode() for name in included if twin or not name.startswith(b"twin")]
            front += [FOLDER / name for name in names if (FOLDER / name).is_file()]
    if not twin:
        files = {path: FOR_THE_TWIN.sub(b"", text) for path, text in files.items()}
    parts = (path.name.encode() + b"\0" + files[path] + b"\0" for path in sorted(files))
    return hashlib.sha256(b"".join(parts)).hexdigest()


@functools.cache
def cache_folder() -> Path:
    """The folder for compiled kernels, in the user's cache folder.

    If the process cannot write there, it uses a temporary folder, which is deleted when the process ends.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashproof"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # a RuntimeError if the user has no home
        folder, owner = Path(tempfile.mkdtemp(prefix="flashproof-")), os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
        return folder


def _name(source: str, *key: object, twin: bool = False) -> str:
    """The name of a compiled file: a hash of everything that the file depends on."""
    parts = (source, _sources(source, twin=twin), *key)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _compiled(
    suffix: str, compile_to: Callable[[Path], None], source: str, *key: object, twin: bool = False
) -> tuple[Path, bytes]:
    """A compiled file, from the disk or from `compile_to`: its path, and its content without the hash at its end.

    A damaged file is compiled again. Processes that need the same file wait for one another, and no process sees an
    unfinished file. Raises CudaError if the file cannot be kept.
    """
    try:
        place = cache_folder() / f"{_name(source, *key, twin=twin)}{suffix}"
        if code := _whole(place):
            return place, code
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if code := _whole(place):
                return place, code
            unfinished = place.with_suffix(f".{os.getpid()}")
            try:
                compile_to(unfinished)
                code = _seal(unfinished)
                if place.is_dir():
                    shutil.rmtree(place)
                unfinished.replace(place)
                return place, code
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise CudaError(f"cache: {error}; with XDG_CACHE_HOME it can be put where there is room to write") from error


def _seal(path: Path) -> bytes:
    """Appends to a new file the hash of its content, and returns the content.

    The hash does not disturb loaders: they read no further than the end that the file's own format states.
    """
    code = path.read_bytes() if path.exists() else b""
    if not code:
        raise CudaError(f"{path}: the compiler wrote nothing")
    with path.open("ab") as file:
        file.write(hashlib.sha256(code).digest())
        file.flush()
        os.fsync(file.fileno())
    return code


def _whole(place: Path) -> bytes | None:
    """The content of a compiled file, or None if the file does not exist or is damaged."""
    try:
        found = place.read_bytes()
    except OSError:
        return None
    code = found[:-DIGEST]
    return code if code and hashlib.sha256(code).digest() == found[-DIGEST:] else None


# Held while a thread imports cuda.core. Of two threads that import it at the same time, one may see an unfinished
# module.
IMPORTING = threading.Lock()


def _make_current(device: int) -> None:
    """Makes the device's context current in the calling thread.

    A new thread has no current context, even if torch reports this device as the thread's device.
    """
    from cuda.bindings import driver

    status, current = driver.cuCtxGetDevice()
    if not status and int(current) == device:
        return
    if status and status != driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this error: no context
        raise CudaError(f"CUDA: {status.name} when asking for the thread's device")
    try:
        with IMPORTING:
            from cuda.core import Device

        Device(device).set_current()
    except Exception as error:
        raise CudaError(f"CUDA: device {device} cannot be made the thread's own: {error}") from error


@functools.cache
def _kernel_on_gpu(
    source: str, kernel: str, constants: tuple[tuple[str, int | str], ...], shared_bytes: int, device: int
) -> Any:
    """A loaded kernel, whose code comes from the disk or from NVRTC. Raises CudaError."""
    from cuda.bindings import driver

    with IMPORTING:
        from cuda.core import ObjectCode

    if reason := _too_old(device):
        raise CudaError(reason)
    status, limit = driver.cuDeviceGetAttribute(
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, driver.CUdevice(device)
    )
    if status:
        raise CudaError(f"CUDA: {status.name} when asking how much shared memory there is")
    if shared_bytes > limit:
        needs = (
            f"{source} {kernel} needs {shared_bytes} bytes of shared memory for a block, "
            f"and {torch.cuda.get_device_name(device)} gives {limit}"
        )
        raise CudaError(f"CUDA: {needs}; a smaller head dim or a dtype of 16 bit needs less")
    major, minor = torch.cuda.get_device_capability(device)
    target = f"sm_{major}{minor}"

    def compile_to(path: Path) -> None:
        path.write_bytes(compile_cubin(source, kernel, dict(constants), target)[0])

    place, code = _compiled(".cubin", compile_to, source, *_key(kernel, constants, target))
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
    _kept.append(loaded)
    return driver.CUfunction(int(loaded.handle))


_kept: list[Any] = []  # loaded kernels; they are kept because a kernel is unloaded with its module


def nvrtc_version() -> str:
    """The versions of NVRTC and of cuda-core, which calls it.

    NVRTC reports its major and minor version. The patch version is known only if NVRTC is a pip package.
    """
    from cuda.bindings import nvrtc

    return f"{nvrtc.nvrtcVersion()[1:]} {_package_version('nvidia-cuda-nvrtc')} {_package_version('cuda-core')}"


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _key(kernel: str, constants: tuple[tuple[str, int | str], ...], target: str) -> tuple[object, ...]:
    """What a kernel's machine code depends on, apart from its sources."""
    return kernel, constants, target, sorted(OPTIONS.items()), nvrtc_version()


def identity(source: str, kernel: str, constants: tuple[tuple[str, int | str], ...], target: str) -> str:
    """A hash, in hexadecimal digits, of everything that a kernel's machine code depends on.

    That is its sources, constants, options, target and compiler.
    """
    return _name(source, *_key(kernel, constants, target))


def said_of(source: str, kernel: str, constants: tuple[tuple[str, int | str], ...], target: str) -> str:
    """What the assembler says about a kernel's registers. Needs no GPU. Raises CudaError.

    The answer is kept on disk, as compiled kernels are.
    """

    def compile_to(path: Path) -> None:
        path.write_text(compile_cubin(source, kernel, dict(constants), target)[1])

    return _compiled(".said", compile_to, source, *_key(kernel, constants, target))[1].decode()


def compile_cubin(source: str, kernel: str, constants: Mapping[str, int | str], target: str) -> tuple[bytes, str]:
    """A kernel's machine code for a target such as "sm_90a", and what the assembler said about its registers.

    Needs no GPU. Raises CudaError.
    """
    with IMPORTING:
        from cuda.core import Program, ProgramOptions

    macros = [(name, str(value)) for name, value in (*constants.items(), (kernel.upper(), 1))]
    options = ProgramOptions(arch=target, define_macro=macros, include_path=str(FOLDER), **OPTIONS)
    log = io.StringIO()
    try:
        code = Program((FOLDER / source).read_text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:
        words = " ".join(f"{name}={value}" for name, value in constants.items())
        raise CudaError(
            f"NVRTC: {source} {kernel} does not compile for {target} ({words})\n{error}\n{log.getvalue()}"
        ) from error
    return bytes(code.code), log.getvalue()


def _compiler() -> str | None:
    """The full path of the host's C++ compiler, or None if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


@functools.cache
def _compiler_version(compiler: str) -> str:
    return _said([compiler, "--version"], f"{compiler} does not say its version")


def _said(command: list[str], trouble: str) -> str:
    """The output of a compiler. Raises CudaError with the trouble, the command and the compiler's messages."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CudaError(f"C++ compiler: {trouble}\n{error}") from error
    if done.returncode:
        raise CudaError(
            f"C++ compiler: {trouble}\n{' '.join(command)}\nexit status {done.returncode}\n{done.stderr[:4000]}"
        )
    return done.stdout


@functools.cache
def _processor() -> str:
    """The properties of the processor on which the code of -march=native depends."""
    try:
        lines = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features", "model name"))
        ]
    except OSError:
        lines = [platform.processor()]
    return "\n".join(sorted(set(lines)))


@functools.cache
def _twin(source: str, kernels: tuple[str, ...], constants: tuple[tuple[str, int | str], ...]) -> ctypes.PyDLL:
    """A library of some kernels of a file, compiled for the CPU twin. A launch is one call of the library.

    A call keeps the interpreter's lock (`PyDLL`).
    """
    compiler = _compiler()
    if compiler is None:
        raise CudaError(str(missing("cpu")))
    native = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    # The code calls the ordinary functions of the C library, and the compiler fuses no products and sums. So one
    # rounding on a GPU is one rounding here. A local variable that may be read before it is set is an error. Only g++
    # knows the second of these warnings, and clang ignores its name.
    flags = [
        "-std=c++17",
        "-O2",
        "-ftree-vectorize",
        native,
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-exceptions",
        "-shared",
        "-fPIC",
        "-DTWIN",
    ]
    flags += ["-Werror=uninitialized", "-Werror=maybe-uninitialized"]
    flags += [f"-D{name}={value}" for name, value in constants] + [f"-D{kernel.upper()}" for kernel in kernels]

    def compile_to(path: Path) -> None:
        _said(
            [compiler, *flags, f"-I{FOLDER}", "-x", "c++", str(FOLDER / source), "-o", str(path)],
            f"{source} does not compile for the CPU twin",
        )

    key = (compiler, _compiler_version(compiler), flags, _processor(), sys.platform)
    place, _ = _compiled(".so", compile_to, source, *key, twin=True)
    try:
        return ctypes.PyDLL(str(place))
    except OSError as error:
        raise CudaError(f"CPU twin: {source} cannot be loaded: {error}") from error
