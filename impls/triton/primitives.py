"""Functions that the Triton kernels share, on the device and on the host.

On the device: products, rounding, loads, stores and dropout. On the host: the arguments of a launch.

The device functions hide the one difference between a GPU and Triton's interpreter. The interpreter treats a bfloat16
as the integer that holds its bits. In the interpreter, every operation on bfloat16 values therefore converts them to
float32, which is exact, and `rounded` converts the result back.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashproof.impls.call import Call
from flashproof.impls.spec import Device
from flashproof.impls.triton import interpreting

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(math.log2(math.e))
INFINITY = tl.constexpr(math.inf)


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that kernels call.

    In the interpreter it stays a plain Python function, because there a call from one jit function to another takes
    half a millisecond.
    """
    return function if INTERPRETED.value else triton.jit(function)


# By default, Triton compiles a kernel again for a size or a stride of 1, and for a size, a stride or an address that 16
# divides. Loads gain only if all tensors are aligned, and `loadable` sees to that. `kernel` therefore excludes _SIZES
# from these rules, and the block mask, whose address may be any. Strides are in tuples, which Triton excludes from no
# rule. `as_argument` therefore makes numbers of them to which the rules do not apply.
_PLACES = ("heads", "kv_heads", "groups", "queries", "keys", "dim", "offset", "block_rows", "blocks")
_TENSORS = ("query", "key", "value", "out", "dout", "dquery", "dkey", "dvalue", "mask", "lists", "transposed")
_STRIDES = tuple(f"{name}_strides" for name in _TENSORS)
_SIZES = (*_PLACES, "seed", "last_dropped")


def kernel(function: Callable[..., Any], *, and_for: tuple[str, ...] = ()) -> Any:
    """Marks a kernel.

    A kernel is compiled for its constants and its dtypes. It is not compiled again for other kinds of sizes, except if
    a size that `and_for` names is 1.

    In the interpreter, sizes and strides stay plain numbers, as constants do. The interpreter would turn any other
    number into an array, and the sum of two such numbers into a call.
    """
    unlike = [size for size in _SIZES if size not in and_for]
    compiled = triton.jit(function, do_not_specialize=unlike, do_not_specialize_on_alignment=(*and_for, "mask"))
    if INTERPRETED.value:
        compiled.rewrite().__annotations__.update(dict.fromkeys((*_PLACES, *_STRIDES), tl.constexpr))
    return compiled


@device_function
def dot(a, b, accumulator=None):
    """Returns a b + accumulator in float32.

    The operands are multiplied exactly, in their own dtype and without TF32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@device_function
def dot_of_parts(a, b, accumulator=None):
    """Returns what `dot` returns, with float32 operands on tensor cores too.

    A float32 operand is the sum of three bfloat16 parts. Tensor cores add six products of parts, small ones first, and
    the sum is added to the accumulator in float32. The smallest three of the nine products are left out.
    """
    if INTERPRETED:
        return dot(a, b, accumulator)
    return tl.dot(a, b, accumulator, input_precision="bf16x6")


@device_function
def rounded(x, dtype: tl.constexpr):
    """Rounds float32 to `dtype`, to nearest with ties to even.

    In the interpreter, Triton's own cast to bfloat16 truncates. The result is therefore computed from the bits.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        result = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@device_function
def this_program():
    """Returns the index of this program in the launch.

    In the interpreter the index is a plain number, like sizes and strides. What a function computes from plain numbers
    only is a plain number too.
    """
    program = tl.program_id(0)
    return program.__index__() if INTERPRETED else program


@device_function
def wide(number):
    """Returns a scalar in 64 bits.

    In the interpreter, a plain number has all the bits that it needs and stays as it is. A value that was loaded, or
    that the body of a kernel assigned, is not a plain number and is cast.
    """
    return (
        (number.to(tl.int64) if isinstance(number, tl.tensor) else number) if INTERPRETED else tl.cast(number, tl.int64)
    )


@device_function
def place(rows, heads, LENGTH: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Returns where this program works: the first row of its tile of LENGTH rows, its head and its batch.

    With LAST_FIRST, the programs of a head take its tiles in reverse order.
    """
    tiles = (rows + LENGTH - 1) // LENGTH
    program = this_program()
    tile = program % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile * LENGTH, program // tiles % heads, program // tiles // heads


@device_function
def seen_keys(query, keys, offset):
    """Returns how many keys a query sees. query: a position, or a block of positions.

    Without a causal mask, query + offset may need more than 32 bits. For this reason, the offset is subtracted.
    """
    return keys - tl.minimum(tl.maximum(keys - offset - 1 - query, 0), keys)


@device_function
def elements(units):
    """Returns how many elements are in some units of 8 elements. So the compiler knows that 8 divides the number."""
    return units * 8


@device_function
def head_dim(dim, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Returns the head dim in elements. Kernels get it in units.

    PADDED means that it may be smaller than PADDED_DIM. Otherwise, it is PADDED_DIM, a constant.
    """
    return elements(dim) if PADDED else PADDED_DIM


@device_function
def stride_of(number):
    """Returns the stride of which `as_argument` made a number."""
    return (number >> 1) - 1


@device_function
def head_of(
    pointer, strides, batch, head,
    LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns the location of one head of a [batch, heads, length, dim] tensor, in three parts.

    For a descriptor, the parts are the descriptor, the batch entry and the head. If all batch entries or all heads are
    in the same memory, the descriptor has one of them.

    For a pointer, the parts are the start of the head, the offsets of a tile [LENGTH, PADDED_DIM], and the stride from
    row to row. The tile whose first row is r is at start + r stride + offsets. The first two terms have 64 bits. The
    offsets have 32 bits unless WIDE, because offsets of 64 bits cost registers.
    """
    if isinstance(pointer, tl.tensor_descriptor):
        location = pointer, batch * (stride_of(strides[0]) != 0), head * (stride_of(strides[1]) != 0)
    else:
        row_stride = elements(stride_of(strides[2]))
        start = pointer + (wide(batch) * elements(stride_of(strides[0])) + wide(head) * elements(stride_of(strides[1])))
        row = tl.arange(0, LENGTH)[:, None]
        column = tl.arange(0, PADDED_DIM)[None, :]
        if WIDE:
            row = row.to(tl.int64)
            column = column.to(tl.int64)
        location = start, row * row_stride + column, wide(row_stride)
    return location


@device_function
def tile_at(
    pointer, strides, batch, head, row,
    LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns pointers to the tile [LENGTH, PADDED_DIM] that starts at `row` of one head."""
    return tile_of(head_of(pointer, strides, batch, head, LENGTH, PADDED_DIM, WIDE), row)


@device_function
def contiguous_tile_at(pointer, row, dim, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Returns pointers to the tile [LENGTH, PADDED_DIM] that starts at `row` of a contiguous [length, dim] tensor."""
    return pointer + wide(row) * dim + (tl.arange(0, LENGTH)[:, None] * dim + tl.arange(0, PADDED_DIM)[None, :])


@device_function
def tile_of(head, row):
    """Returns pointers to the tile that starts at `row` of a head in the form that `head_of` returns."""
    start, offsets, stride = head
    return start + wide(row) * stride + offsets


@device_function
def load_at(head, row, rows, dim, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Loads the tile [LENGTH, PADDED_DIM] that starts at `row` of a head in the form that `head_of` returns.

    Elements past the last row or past the head dim are zero. Through a descriptor, the chip's copy unit does this.
    """
    if isinstance(head[0], tl.tensor_descriptor):
        tile = head[0].load([head[1], head[2], row, 0]).reshape(LENGTH, PADDED_DIM)
    else:
        tile = load_tile(tile_of(head, row), row, rows, dim, LENGTH, PADDED_DIM, PADDED, True)
    return tile


@device_function
def in_fours(rows):
    """Returns how far apart in memory the numbers of two heads are, if each of the `rows` rows of a head has a number.

    It is a multiple of four, because a copy unit takes rows of 16 bytes.
    """
    return (rows + 3) // 4 * 4


@device_function
def numbers_of(numbers, index, rows):
    """Returns the location of the numbers of one head, of which each of its `rows` rows has one.

    index: the place of the head among all heads of all batch entries.
    """
    location = numbers, index
    if not isinstance(numbers, tl.tensor_descriptor):
        location = numbers + wide(index) * in_fours(rows), index
    return location


@device_function
def load_numbers(numbers, row, rows, LENGTH: tl.constexpr):
    """Loads LENGTH numbers from `row` on, from a location that `numbers_of` returns. Past the last row they are 0."""
    if isinstance(numbers[0], tl.tensor_descriptor):
        loaded = numbers[0].load([numbers[1], row]).reshape(LENGTH)
    else:
        at = row + tl.arange(0, LENGTH)
        loaded = tl.load(numbers[0] + at, mask=at < rows, other=0.0)
    return loaded


@device_function
def load_tile(
    pointers, first_row, rows,
    dim, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Loads a tile [LENGTH, PADDED_DIM].

    Elements past the head dim are zero. TAIL means that the tile may have rows past the last row of the tensor, and
    these rows are zero too. Memory that the tensor does not own is never read: it may hold NaN, and 0 NaN is NaN.
    """
    if TAIL:
        mask = (first_row + tl.arange(0, LENGTH) < rows)[:, None]
        if PADDED:
            mask = mask & (tl.arange(0, PADDED_DIM) < dim)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=(tl.arange(0, PADDED_DIM) < dim)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@device_function
def store_tile(
    pointers, tile, first_row, rows, dim, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Rounds a float32 tile [LENGTH, PADDED_DIM] to the dtype of the tensor, and stores it.

    Only the part that is inside the tensor is stored.
    """
    mask = (first_row + tl.arange(0, LENGTH) < rows)[:, None]
    if PADDED:
        mask = mask & (tl.arange(0, PADDED_DIM) < dim)[None, :]
    tl.store(pointers, rounded(tile, pointers.dtype.element_ty), mask=mask)


@device_function
def load_rows(
    pointer, strides, batch, head, row, rows,
    dim, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Loads the tile [LENGTH, PADDED_DIM] that starts at `row` of one head. Each head has `rows` rows."""
    return load_at(
        head_of(pointer, strides, batch, head, LENGTH, PADDED_DIM, WIDE),
        row, rows, dim, LENGTH, PADDED_DIM, PADDED,
    )  # fmt: skip


@device_function
def store_rows(
    pointer, strides, tile, batch, head, row, rows,
    dim, LENGTH: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rounds a float32 tile and stores it to the place from which `load_rows` would load it."""
    store_tile(
        tile_at(pointer, strides, batch, head, row, LENGTH, PADDED_DIM, WIDE),
        tile, row, rows, dim, LENGTH, PADDED_DIM, PADDED,
    )  # fmt: skip


@device_function
def _first_word(seed, key, query, head, batch):
    """Returns the first word of Philox 4x32-10."""
    word, _, _, _ = tl.philox(seed, key, query, head, batch)
    return word


first_word = interpreting.first_word if INTERPRETED.value else _first_word


@device_function
def kept(seed, last_dropped, batch, head, query, key):
    """Returns the dropout mask at the positions `query` and `key`, which are broadcast against each other.

    A weight is kept if the first word of Philox 4x32-10 is above `last_dropped`. The Philox key is the 64-bit seed. The
    counter is (key, query, head, batch). The forward and both backward kernels therefore draw the same mask.
    """
    return first_word(seed, key, query, head, batch) > last_dropped.to(tl.uint32)


# ----------------------------------------------------------------------------------------------------------------- host


def missing(device: Device) -> str | None:
    """Returns why the kernels cannot run on a device, or None if they can.

    On "cuda" they need a GPU. On "cpu" they need Triton's interpreter.
    """
    if device == "cuda":
        return None if torch.cuda.is_available() else "CUDA: no device"
    if not INTERPRETED.value:
        return "Triton: not interpreted"
    # Triton's own functions are made for one or the other when Triton is imported, by torch._dynamo for example.
    late = isinstance(tl.max, triton.JITFunction)
    return "Triton: imported before flashproof chose its interpreter; set TRITON_INTERPRET=1" if late else None


def slow(device: Device) -> Literal["tile", "shape"]:
    """Returns what takes long on a device: each tile in the interpreter, or each new shape, which is compiled."""
    return "tile" if device == "cpu" else "shape"


def padded_dim(dim: int) -> int:
    """Returns the power of two to which tiles of this head dim are padded.

    It is at least 16, the smallest size that tl.dot takes.
    """
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Scale:
    """A scale in the form that a forward uses: scores = sign (q k) magnitude.

    The magnitude is positive, so sign (q k) and the scores have their row maximum at the same key. The product by the
    sign is exact. A scale that is zero in float32 has sign 0 and magnitude 1: every score is then 0,
    and -inf times the magnitude stays -inf.
    """

    sign: int
    magnitude: float
    exponent: float  # magnitude log2 e

    @classmethod
    @functools.lru_cache(maxsize=256)  # each call needs the sign
    def of(cls, scale: float) -> "Scale":
        """Splits a scale into its parts. Raises ValueError if the scale is beyond float32."""
        exponent = abs(scale) * math.log2(math.e)
        if exponent > torch.finfo(torch.float32).max:
            raise ValueError(
                f"scale: {scale} is beyond float32, in which scores are computed; its magnitude is at most 2.3e38"
            )
        if np.float32(abs(scale)) == 0.0:
            return cls(sign=0, magnitude=1.0, exponent=math.log2(math.e))
        return cls(sign=1 if scale > 0.0 else -1, magnitude=abs(scale), exponent=exponent)


def as_argument(stride: int) -> int:
    """Returns a number for a stride, from which `stride_of` computes the stride.

    Triton would compile a kernel again for a stride of 1, and for a stride that 16 divides. The number is odd and is
    not 1.
    """
    return 2 * stride + 3


UNIT = 8  # kernels load as many elements at a time: 16 bytes of a 16-bit tensor


def loadable(tensor: Tensor) -> Tensor:
    """Returns a tensor [batch, heads, length, dim] in a form that kernels load fast: UNIT elements at a time.

    16 divides its address, UNIT divides its head dim and all strides except the last, its columns are contiguous, and
    each row has its own memory. A copy unit takes strides below 2^40 bytes. A tensor of another form is copied. Zeros
    fill up its head dim.

    Kernels that load single elements would need no copy, but they take several times as long, and more kernels would
    have to be compiled.
    """
    batch, head, row, column = tensor.stride()
    dim = tensor.shape[3]
    is_in_units = column == 1 and row > 0 and not (dim | batch | head | row) % UNIT and not tensor.data_ptr() % 16
    if is_in_units and max(batch, head, row) < 2**40 // 4:
        return tensor
    rest = -dim % UNIT
    copy = torch.nn.functional.pad(tensor, (0, rest)) if rest else tensor.clone(memory_format=torch.contiguous_format)
    return copy.contiguous()


def room_for(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns room for a result of the shape of an input, contiguous and `loadable`."""
    dim = tensor.shape[3]
    if dim % UNIT == 0:
        return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    return tensor.new_empty((*tensor.shape[:3], triton.cdiv(dim, UNIT) * UNIT), dtype=dtype)


def cropped(result: Tensor, dim: int) -> Tensor:
    """Returns a result, in the room that `room_for` made, without the columns past the head dim."""
    return result if dim % UNIT == 0 else result[..., :dim].contiguous()


def with_strides(**tensors: Tensor) -> dict[str, Any]:
    """Returns the kernel arguments for `loadable` tensors, which have the same head dim.

    Each tensor is passed under its name. Its strides except the last, which is 1, are passed as `<name>_strides`, in
    the form that `as_argument` returns. The head dim and these strides are counted in units. WIDE says that an offset
    inside a tile, which has at most 256 rows and columns, may need more than 32 bits.
    """
    strides = {name: tensor.stride()[:3] for name, tensor in tensors.items()}
    dim = next(iter(tensors.values())).shape[3]
    wide = any(256 * (row + 1) >= 2**31 for _, _, row in strides.values())
    counted = {
        f"{name}_strides": tuple(as_argument(stride // UNIT) for stride in each) for name, each in strides.items()
    }
    padded = padded_dim(dim)
    constants = {"PADDED_DIM": padded, "PADDED": dim != padded, "WIDE": wide}
    return tensors | counted | {"dim": dim // UNIT} | constants


Chip = Literal["interpreter", "hopper", "other"]


def chip_of(tensor: Tensor) -> Chip:
    """Returns what runs the kernels on the device of a tensor: the interpreter, a Hopper GPU (sm_90) or another GPU."""
    if INTERPRETED.value:
        return "interpreter"
    with torch.cuda.device_of(tensor):
        return "hopper" if driver.active.get_current_target().arch // 10 == 9 else "other"


def with_descriptors(arguments: dict[str, Any], rows: Mapping[str, int]) -> dict[str, Any]:
    """Replaces the tensors of a launch that a loop reads by descriptors, if a Hopper GPU and its copy unit read them.

    Through a descriptor, one thread starts the copy of a whole tile to shared memory. The other threads compute no
    addresses. This saves registers and instructions.

    rows: the rows of a tile by the name of the tensor, [batch, heads, length, dim] or [batch, heads, length].

    In the interpreter, 16-bit tensors take this way too, so that the checks cover it.
    """
    query = arguments["query"]
    if query.dtype.itemsize > 2 or chip_of(query) == "other":
        return arguments
    dim = arguments["PADDED_DIM"]
    return arguments | {name: descriptor_of(arguments[name], length, dim) for name, length in rows.items()}


def descriptor_of(tensor: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """Returns a descriptor of tiles of `rows` rows and `dim` columns.

    The tensor is [batch, heads, length, dim], or [batch, heads, length] with heads that are `in_fours` apart.

    A copy unit takes no stride of 0. If all batch entries or all heads are in the same memory, the descriptor has one.
    """
    if tensor.ndim == 3:
        batch, heads, length = tensor.shape
        return TensorDescriptor(tensor, [batch * heads, length], [4 * triton.cdiv(length, 4), 1], [1, rows])
    shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride or UNIT for stride in tensor.stride()]
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, dim])


# A tile has at most 128 keys, so its last key is less than 128 keys past the end. With this much more than all keys as
# the offset, the diagonal cuts not even the last tile of keys.
_PAST_THE_END = 128


def call_arguments(call: Call) -> dict[str, Any]:
    """Returns the arguments that every kernel with a loop takes: sizes, and those of dropout, except the seed.

    A call without a causal mask is a causal call whose offset shows every key to every query. The kernels therefore do
    not know whether a call is causal.
    """
    return {
        "groups": call.groups,
        "queries": call.queries,
        "keys": call.keys,
        "offset": call.offset if call.is_causal else call.keys + _PAST_THE_END,
        "last_dropped": max(call.dropout_threshold - 1, 0),
        "kept_scale": 1.0 / (1.0 - call.dropout_p),
        "DROPOUT": call.dropout_p > 0.0,
    }
