"""Operators of kernels in Triton's interpreter that call NumPy directly, with the same results, bit for bit.

For an operator such as +, the interpreter calls about twenty Python functions. They check the types of the operands,
choose a common type, and fill a block with a number. If the operands already have the same type, there is nothing to
choose, and NumPy broadcasts numbers itself. The functions here compute this case, and return None in any other case.
The function of the interpreter then computes the result as usual.

OPERATORS has the changes: an owner, the name of an attribute, and the function that takes its place.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

# Returns an array of results from two arrays, which are broadcast against each other. One may be a number.
Compute = Callable[[Any, Any], NDArray[Any]]
Direct = Callable[..., tl.tensor | None]

_NUMBERS = ("fp32", "int32", "int64", "uint32")
_IN_MEMORY = ("fp32", "fp16", "bf16", "int32")
# By type: the least Python integer that the interpreter makes an element of it, and how. The largest is 2^31 - 1.
_INTEGERS = {"int32": (-(2**31), np.int32), "int64": (-(2**31), np.int64), "uint32": (0, np.uint32)}
_NORMAL = np.finfo(np.float32)
_known: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}  # the attributes of a value, by type and shape


def _value(
    data: NDArray[Any], dtype: tl.dtype, *, of: Collection[Any], handle: tl.dtype | None = None, is_block: bool = False
) -> tl.tensor:
    """Returns the value with these elements. It is a block if one of the operands `of` is.

    handle: the type of the handle, if it is another one. A comparison has a handle of the type that was compared.
    """
    for operand in of:
        is_block = is_block or (type(operand) is tl.tensor and operand.type.is_block())
    key = (dtype.name, data.shape if is_block else None)
    if key not in _known:
        _known[key] = vars(tl.tensor(None, tl.block_type(dtype, list(data.shape)) if is_block else dtype))
    made, held = object.__new__(tl.tensor), object.__new__(interpreter.TensorHandle)
    held.__dict__ = {"data": data, "dtype": handle or dtype, "attr": {}}
    made.__dict__ = _known[key] | {"handle": held}
    return made


def _operand(number: Any, dtype: tl.dtype) -> Any:
    """Returns the elements of a value of this type, or a number as an element of it.

    None if the interpreter would convert one of the operands.
    """
    if type(number) is tl.tensor:
        return number.handle.data if number.dtype is dtype else None
    if type(number) is tl.constexpr:
        number = number.value
    if type(number) is float and dtype is tl.float32:
        size = abs(number)
        is_float32 = _NORMAL.tiny <= size <= _NORMAL.max or size in (0.0, np.inf)
        return np.float32(number or 0.0) if is_float32 else None  # the interpreter has no -0
    if type(number) is int and dtype.name in _INTEGERS:
        least, integer = _INTEGERS[dtype.name]
        return integer(number) if least <= number < 2**31 else None
    return None


def _directly(owner: Any, name: str, compute: Direct) -> tuple[Any, str, Callable[..., tl.tensor]]:
    """Returns the change that lets `compute` take the place of a function of the interpreter, where it can."""
    interpreted = getattr(owner, name)

    def function(*operands: Any, **options: Any) -> tl.tensor:
        found = compute(*operands, **options)
        if found is not None:
            return found
        return interpreted(*operands, **options, _semantic=interpreter.interpreter_semantic)

    return owner, name, function


def _binary(compute: Compute, dtypes: Collection[str], gives: tl.dtype | None = None) -> Direct:
    """Returns a function of two operands. dtypes: the types that it takes. gives: the type of the result, if another.

    tl.minimum and tl.maximum take a keyword that says what becomes of NaN. The interpreter ignores it: NaN propagates.
    """

    def direct(x: Any, y: Any, **_: Any) -> tl.tensor | None:
        if type(x) is tl.tensor and x.dtype.name in dtypes and (other := _operand(y, x.dtype)) is not None:
            mine = x.handle
            return _value(compute(mine.data, other), gives or x.dtype, of=(x, y), handle=mine.dtype)
        return None

    return direct


_add_numbers = _binary(np.add, _NUMBERS)


def _add(x: tl.tensor, y: Any) -> tl.tensor | None:
    """Adds numbers, or a signed integer to a pointer."""
    if not x.dtype.is_ptr():
        return _add_numbers(x, y)
    if type(y) is tl.tensor and y.dtype.name in ("int32", "int64"):
        offset = y.handle.data.astype(np.uint64)
    elif type(y) is int and abs(y) < 2**63:
        offset = np.uint64(y % 2**64)
    else:
        return None
    width = np.uint64(max(1, x.dtype.element_ty.primitive_bitwidth // 8))
    return _value(x.handle.data + width * offset, x.dtype, of=(x, y), handle=x.handle.dtype)


def _item(x: tl.tensor, index: Any) -> tl.tensor | None:
    """Adds axes to a block, as in block[:, None]."""
    if type(index) is tuple and all(part is None or part == slice(None) for part in index):
        return _value(x.handle.data[index], x.dtype, of=(x,), handle=x.handle.dtype) if x.type.is_block() else None
    return None


def _where(condition: Any, x: Any, y: Any) -> tl.tensor | None:
    """Chooses between float32 numbers."""
    chosen = [_operand(number, tl.float32) for number in (x, y)]
    if type(condition) is not tl.tensor or condition.dtype is not tl.int1 or any(each is None for each in chosen):
        return None
    return _value(np.where(condition.handle.data, *chosen), tl.float32, of=(condition, x, y))


def _fma(x: Any, y: Any, z: Any) -> tl.tensor | None:
    """Multiplies and adds float32 numbers. In the interpreter, this rounds twice."""
    operands = [_operand(number, tl.float32) for number in (x, y, z)]
    if type(x) is not tl.tensor or any(operand is None for operand in operands):
        return None
    return _value(operands[0] * operands[1] + operands[2], tl.float32, of=(x, y, z))


def _to(x: tl.tensor, dtype: Any, **options: Any) -> tl.tensor | None:
    """Converts to a type to which NumPy converts in the same way."""
    if options or not isinstance(dtype, tl.dtype):
        return None
    if x.dtype is dtype:
        return x
    converted = _CONVERTED.get((x.dtype.name, dtype.name))
    return _value(x.handle.data.astype(converted), dtype, of=(x,)) if converted else None


_CONVERTED = {("fp16", "fp32"): np.float32, ("fp32", "fp16"): np.float16, ("int32", "int64"): np.int64}


def _dot(a: Any, b: Any, acc: Any = None, **_: Any) -> tl.tensor | None:
    """Multiplies float32 blocks. The interpreter takes no notice of the precision."""
    operands = [_operand(block, tl.float32) for block in (a, b, 0.0 if acc is None else acc)]
    if any(operand is None for operand in operands):
        return None
    return _value(np.matmul(*operands[:2], dtype=np.float32) + operands[2], tl.float32, of=(a, b))


def _load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> tl.tensor | None:
    """Loads a block. Elements that the mask hides are 0."""
    dtype = getattr(pointer.dtype, "element_ty", tl.void)
    is_zero = type(other) is float and other == 0.0
    if options or not is_zero or dtype.name not in _IN_MEMORY or type(mask) is not tl.tensor:
        return None
    at = pointer.handle
    if not pointer.type.is_block() or np.broadcast_shapes(at.data.shape, mask.handle.data.shape) != at.data.shape:
        return None
    seen = interpreter.TensorHandle(np.broadcast_to(mask.handle.data, at.data.shape), tl.int1)
    loaded = interpreter.interpreter_builder.create_masked_load(at, seen, None, None, None, None)
    return _value(loaded.data, dtype, of=(pointer,))


def _arange(start: Any, end: Any) -> tl.tensor | None:
    """Returns the integers from start to end - 1."""
    first, last = (number.value if type(number) is tl.constexpr else number for number in (start, end))
    if type(first) is not int or type(last) is not int or last - first not in _LENGTHS:
        return None
    return _value(np.arange(first, last, dtype=np.int32), tl.int32, of=(), is_block=True)


_LENGTHS = {2**exponent for exponent in range(12)}


def _materialized(self: Any, offsets: list[Any]) -> tuple[Any, NDArray[np.bool_]]:
    """Returns what this method of the interpreter returns, and broadcasts a sum of axes only where an axis needs it.

    offsets: the first position of the tile on each axis of the tensor. Returns pointers [tile], and whether each of
    them is inside the tensor.
    """
    width, axes = self.base.dtype.element_ty.primitive_bitwidth // 8, len(self.block_shape)
    assert (offsets[-1].data * width) % 16 == 0, "block offset start must be 16-byte aligned"
    pointers, inside = self.base.data, np.ones(1, dtype=bool)
    for axis, size in enumerate(self.block_shape):
        at = (offsets[axis].data + np.arange(size)).reshape([size if axis == other else 1 for other in range(axes)])
        pointers = pointers + (width * at * self.strides[axis].data).astype(np.uint64)
        inside = inside & (at >= 0) & (at < self.shape[axis].data)
    return interpreter.TensorHandle(pointers, self.base.dtype.scalar), inside


_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
OPERATORS = [
    _directly(tl.tensor, "__add__", _add),
    _directly(tl.tensor, "__radd__", _add),
    _directly(tl.tensor, "__sub__", _binary(np.subtract, _NUMBERS)),
    _directly(tl.tensor, "__rsub__", _binary(lambda right, left: left - right, _NUMBERS)),
    _directly(tl.tensor, "__mul__", _binary(np.multiply, _NUMBERS)),
    _directly(tl.tensor, "__rmul__", _binary(np.multiply, _NUMBERS)),
    _directly(tl.tensor, "__and__", _binary(np.bitwise_and, ("int1", "uint32"))),
    _directly(tl.tensor, "__rshift__", _binary(np.right_shift, ("uint32",))),
    *(_directly(tl.tensor, name, _binary(compute, _NUMBERS, tl.int1)) for name, compute in _COMPARISONS.items()),
    _directly(tl.tensor, "__getitem__", _item),
    _directly(tl.tensor, "to", _to),
    _directly(tl, "arange", _arange),
    _directly(tl, "dot", _dot),
    _directly(tl, "fma", _fma),
    _directly(tl, "load", _load),
    _directly(tl, "maximum", _binary(np.maximum, _NUMBERS)),
    _directly(tl, "minimum", _binary(np.minimum, _NUMBERS)),
    _directly(tl, "where", _where),
    (interpreter.TensorDescHandle, "materialize_pointers", _materialized),
]
