"""What the Triton kernels share: products, roundings, loads and dropout on the device, and the launch of a kernel on the host.

The functions on the device hide the one difference between a GPU and Triton's interpreter: the interpreter takes a bfloat16 for the integer that
holds its bits, so there every operation on one goes through float32, which is exact, and the way back is rounded here.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from flashproof.impls.call import Call
from flashproof.impls.spec import Device
from flashproof.impls.triton.interpreting import described_once

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(math.log2(math.e))
INFINITY = tl.constexpr(math.inf)


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that kernels call. Interpreted it stays plain Python, since a call between two jit functions there costs half a millisecond."""
    return function if INTERPRETED.value else triton.jit(function)


# Arguments whose values a kernel is not compiled for. Triton would compile again for a size of 1 and for one that 16 divides, and no load gets wider by it:
# how tensors are aligned is said by UNIT, of their strides.
_PLACES = ("heads", "kv_heads", "groups", "queries", "keys", "offset")
_SIZES = (*_PLACES, "seed", "last_dropped")
_STRIDES = tuple(f"{name}_strides" for name in ("query", "key", "value", "out", "dout", "dquery", "dkey", "dvalue", "lists"))


def kernel(function: Callable[..., Any], *, and_for: tuple[str, ...] = ()) -> Any:
    """Marks a kernel. It is compiled for its constants, its dtypes and strides of 1, not for each kind of length; `and_for`: sizes that it is compiled for.

    Interpreted, sizes and strides stay plain numbers, as constants do: of any other number the interpreter makes an array, and of every sum of two a call.
    """
    unlike = [size for size in _SIZES if size not in and_for]
    compiled = triton.jit(function, do_not_specialize=unlike, do_not_specialize_on_alignment=_STRIDES)
    if INTERPRETED.value:
        compiled.rewrite().__annotations__.update(dict.fromkeys((*_PLACES, *_STRIDES), tl.constexpr))
    return compiled


@device_function
def dot(a, b, accumulator=None):
    """a b + accumulator in float32: exact products of the operands' own dtype, and no TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@device_function
def rounded(x, dtype: tl.constexpr):
    """float32 to `dtype`, to the nearest and ties to even. Interpreted, Triton's own cast to bfloat16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        result = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@device_function
def times_sign(x, SIGN: tl.constexpr):
    """SIGN x, exactly; SIGN is 1, -1 or 0."""
    return x if SIGN == 1 else rounded(x.to(tl.float32) * SIGN, x.dtype)


@device_function
def this_program():
    """Which program of the launch this is. Interpreted it is a plain number, as sizes and strides are, and so is what a function makes of them alone."""
    program = tl.program_id(0)
    return program.__index__() if INTERPRETED else program


@device_function
def wide(number):
    """A scalar of 64 bits. Interpreted, plain numbers have all the bits they need; what was loaded, or assigned in a kernel's body, is none."""
    return (number.to(tl.int64) if isinstance(number, tl.tensor) else number) if INTERPRETED else tl.cast(number, tl.int64)


@device_function
def place(rows, heads, LENGTH: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Where this program works: the first row of its tile of LENGTH rows, its head and its batch. LAST_FIRST: the last tile of a head is taken first."""
    tiles = (rows + LENGTH - 1) // LENGTH
    program = this_program()
    tile = program % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile * LENGTH, program // tiles % heads, program // tiles // heads


@device_function
def head_of(pointer, strides, batch, head, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr):
    """Where one head of a [batch, heads, length, dim] tensor lies: its start, the offsets of a tile [LENGTH, PADDED_DIM], the stride from row to row.

    The tile that starts at row r is at start + r stride + offsets. The first two terms have 64 bits, the offsets 32 unless WIDE: they cost registers.
    """
    start = pointer + (wide(batch) * (strides[0] * UNIT) + wide(head) * (strides[1] * UNIT))
    row = tl.arange(0, LENGTH)[:, None]
    column = tl.arange(0, PADDED_DIM)[None, :]
    if WIDE:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    return start, row * (strides[2] * UNIT) + column * strides[3], wide(strides[2] * UNIT)


@device_function
def tile_at(pointer, strides, batch, head, row, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr):
    """Pointers to the tile [LENGTH, PADDED_DIM] that starts at one row of one head."""
    return tile_of(head_of(pointer, strides, batch, head, LENGTH, PADDED_DIM, WIDE, UNIT), row)


@device_function
def tile_of(head, row):
    """Pointers to the tile that starts at one row of a head, as `head_of` gives it."""
    start, offsets, stride = head
    return start + wide(row) * stride + offsets


@device_function
def load_tile(pointers, first_row, rows, DIM: tl.constexpr, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, TAIL: tl.constexpr):
    """A tile [LENGTH, PADDED_DIM] with zeros past the head dim and, where TAIL says that there may be such rows, past the tensor's last row.

    Memory that the tensor does not own is never read: it may hold NaN, and 0 NaN is NaN.
    """
    if TAIL:
        mask = (first_row + tl.arange(0, LENGTH) < rows)[:, None]
        if DIM != PADDED_DIM:
            mask = mask & (tl.arange(0, PADDED_DIM) < DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif DIM != PADDED_DIM:
        tile = tl.load(pointers, mask=(tl.arange(0, PADDED_DIM) < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@device_function
def store_tile(pointers, tile, first_row, rows, DIM: tl.constexpr, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Rounds a float32 tile [LENGTH, PADDED_DIM] to the tensor's dtype and stores what of it lies inside the tensor."""
    mask = (first_row + tl.arange(0, LENGTH) < rows)[:, None]
    if DIM != PADDED_DIM:
        mask = mask & (tl.arange(0, PADDED_DIM) < DIM)[None, :]
    tl.store(pointers, rounded(tile, pointers.dtype.element_ty), mask=mask)


@device_function
def load_rows(
    pointer, strides, batch, head, row, rows,
    DIM: tl.constexpr, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The tile [LENGTH, PADDED_DIM] that starts at one row of one head of a tensor with `rows` rows to a head."""
    return load_tile(tile_at(pointer, strides, batch, head, row, LENGTH, PADDED_DIM, WIDE, UNIT), row, rows, DIM, LENGTH, PADDED_DIM, True)


@device_function
def store_rows(
    pointer, strides, tile, batch, head, row, rows,
    DIM: tl.constexpr, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rounds a float32 tile and stores it where `load_rows` would load one."""
    store_tile(tile_at(pointer, strides, batch, head, row, LENGTH, PADDED_DIM, WIDE, UNIT), tile, row, rows, DIM, LENGTH, PADDED_DIM)


@device_function
def kept(seed, last_dropped, batch, head, query, key):
    """Dropout's mask at the positions `query` and `key`, which broadcast: the first word of Philox 4x32-10 is above `last_dropped`.

    Key the 64-bit seed, counter (key, query, head, batch): the same entry is drawn in the forward and in both backward kernels.
    """
    word, _, _, _ = tl.philox(seed, key, query, head, batch)
    return word > last_dropped.to(tl.uint32)


# ------------------------------------------------------------------------------------------------------------------------------ host


def missing(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None. Compiled, they take tensors of a GPU; interpreted, those of the CPU."""
    if device == "cuda":
        return None if torch.cuda.is_available() else "CUDA: no device"
    return None if INTERPRETED.value else "Triton: not interpreted"


_ONE_AT_A_TIME = threading.Lock()  # the interpreter changes Triton's modules while it runs


def slow(device: Device) -> Literal["tile", "shape"]:
    """What takes long: a tile of the interpreter, and the compiler."""
    return "tile" if device == "cpu" else "shape"


def padded_dim(dim: int) -> int:
    """The power of two that tiles of this head dim are padded to; tl.dot takes 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Scale:
    """A scale as a forward uses it: scores = sign (q k) magnitude, so that the row maximum of sign (q k) is the row maximum of the scores.

    The sign is folded into an operand, exactly. A zero scale is sign 0 and magnitude 1: every score is 0, and -inf times the magnitude stays -inf.
    """

    sign: int
    magnitude: float
    exponent: float  # magnitude log2 e

    @classmethod
    def of(cls, scale: float) -> "Scale":
        """Raises ValueError for a scale beyond float32."""
        exponent = abs(scale) * math.log2(math.e)
        if exponent > torch.finfo(torch.float32).max:
            raise ValueError(f"scale: {scale} is beyond float32, in which scores are computed; its magnitude is at most 2.3e38")
        if np.float32(abs(scale)) == 0.0:
            return cls(sign=0, magnitude=1.0, exponent=math.log2(math.e))
        return cls(sign=1 if scale > 0.0 else -1, magnitude=abs(scale), exponent=exponent)


def with_strides(**tensors: Tensor) -> dict[str, Any]:
    """A kernel's arguments for tensors that may lie anyhow: each by its name, and its strides as `<name>_strides`.

    UNIT is what the strides but the last are counted in: 8 elements if that divides them all, so that a GPU loads 16 bytes at a time. WIDE says that an offset
    inside a tile, of at most 256 rows and columns, may need more than 32 bits.
    """
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    unit = 8 if all(stride % 8 == 0 for each in strides.values() for stride in each[:3]) else 1
    wide = any(256 * (row + column) >= 2**31 for _, _, row, column in strides.values())
    counted = {f"{name}_strides": (batch // unit, head // unit, row // unit, column) for name, (batch, head, row, column) in strides.items()}
    return tensors | counted | {"WIDE": wide, "UNIT": unit}


def call_arguments(call: Call) -> dict[str, Any]:
    """What of a call every kernel takes alike: its sizes, its dropout, and the constants that follow from them."""
    return {
        "groups": call.groups,
        "queries": call.queries,
        "keys": call.keys,
        "offset": call.offset,
        "seed": call.dropout_seed,
        "last_dropped": max(call.dropout_threshold - 1, 0),
        "kept_scale": 1.0 / (1.0 - call.dropout_p),
        "CAUSAL": call.is_causal,
        "DROPOUT": call.dropout_p > 0.0,
        "DIM": call.dim,
        "PADDED_DIM": padded_dim(call.dim),
    }


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Interpreted, kernels are NumPy, which warns where a GPU goes on in silence: the exponential of -inf, an overflow in a row that is never stored, a maximum
    of nothing but NaN. And the interpreter asks of every sum and product of integers whether it left its type, and describes every value's type anew, which
    takes most of its time."""
    if not INTERPRETED.value:
        yield
        return
    before = interpreter_builder.options
    interpreter_builder.options = replace(before, sanitize_overflow=False)
    try:
        with described_once(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        interpreter_builder.options = before


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its grid, its arguments by name, constants included, and the options of its compilation.

    A launch is data: `run` starts it, and a test compiles it for a GPU that is not there.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; None lets the compiler trade registers for programs that run side by side

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compilation. Fusing a product with a sum into an fma is chosen, not inherited: Triton's default is about to change."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **limit}

    def run(self) -> None:
        """Starts the kernel on the device of its tensors."""
        tensor = next(argument for argument in self.arguments.values() if isinstance(argument, Tensor))
        with _ONE_AT_A_TIME if INTERPRETED.value else nullcontext(), torch.cuda.device_of(tensor), _as_on_a_gpu():
            self.kernel[self.grid](**self.arguments, **self.options)
