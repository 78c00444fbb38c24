"""Makes the kernels of this project run fast in Triton's interpreter, with the same results, bit for bit.

Triton's interpreter repeats two kinds of work. Every operation of a kernel creates a value, and describes the type and
the shape of that value again, also as text. Every call of one of Triton's own functions, such as tl.sum, prepares the
modules of Triton for the interpreter again.

There are few types and few modules, so this module keeps the first result of each. It keeps the descriptions of types
for good. It keeps the prepared modules only until the launch ends, because the end of a launch may undo the
preparation. The interpreter runs all other kernels as usual.

Operators such as + run as `operators.py` computes them.

To convert numbers between bfloat16 and float32, the interpreter computes sign, exponent and fraction. `_by_shifts`
shifts the bits instead.

A dropout mask takes about 150 operations on a whole tile, which the interpreter runs one by one. `first_word` computes
the same numbers directly.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

from flashproof.impls.triton.operators import OPERATORS

# The interpreter computes whether an integer overflows, and then drops the answer, except when it debugs.
_WITHOUT_TESTS_OF_OVERFLOW = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


@contextmanager
def described_once() -> Iterator[None]:
    """Keeps descriptions and prepared modules, and computes directly, while the context is open."""
    changed = [
        *_DESCRIBING,
        _CONVERTING,
        *OPERATORS,
        (interpreter, "_patch_lang", _as_to_the_first(interpreter._patch_lang, key=_own_module)),
        (interpreter, "_patch_builtin", _patch_builtin),
        (interpreter.interpreter_builder, "options", _WITHOUT_TESTS_OF_OVERFLOW),
    ]
    with ExitStack() as stack:
        for owner, name, kept in changed:
            stack.enter_context(mock.patch.object(owner, name, kept))
        yield


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after each round
_ROUNDS = 10


def first_word(seed: tl.tensor, key: Any, query: Any, head: Any, batch: Any) -> tl.tensor:
    """Returns the first word of tl.philox(seed, key, query, head, batch).

    The counter consists of blocks of 32-bit integers and of numbers, which are broadcast against each other. In the
    first rounds, the words depend on only a part of the counter, so they are small.
    """
    c0, c1, c2, c3 = (_words_of(part) for part in (key, query, head, batch))
    whole_key = int(seed.handle.data.item())
    k0, k1 = whole_key & 0xFFFFFFFF, whole_key >> 32
    for _ in range(_ROUNDS):
        (low0, high0), (low1, high1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1 = high1 ^ c1, low1
        c2, c3 = high0 ^ c3, low0
        c0 ^= np.uint32(k0)
        c2 ^= np.uint32(k1)
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return tl.tensor(interpreter.TensorHandle(c0, tl.uint32), tl.block_type(tl.uint32, list(c0.shape)))


def _words_of(part: Any) -> NDArray[np.uint32]:
    """Returns a part of the counter, which is a value of a kernel or a plain number, as words."""
    numbers = part.handle.data if isinstance(part, tl.tensor) else np.array([part])
    return np.asarray(numbers.astype(np.uint32))


def _product(words: NDArray[np.uint32], multiplier: np.uint64) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Returns the low and the high words of the 64-bit products. They are views of the products."""
    halves = np.multiply(words, multiplier, dtype=np.uint64, order="C").view(np.uint32)
    return halves[..., 0::2], halves[..., 1::2]


def _types_once(initialise: Callable[..., None]) -> Callable[..., None]:
    """Wraps the initialiser of block types so that it describes each type only once. Equal types share the result."""
    kept: dict[Any, dict[str, Any]] = {}

    def described(self: tl.block_type, element: tl.dtype, shape: Any) -> None:
        like = (element.name, *map(int, shape))
        if like not in kept:
            initialise(self, element, shape)
            kept[like] = self.__dict__
        self.__dict__ = kept[like]

    return described


def _values_once(initialise: Callable[..., None]) -> Callable[..., None]:
    """Wraps the initialiser of values so that it describes only the first value of each type."""
    kept: dict[str, dict[str, Any]] = {}

    def described(self: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        if kind.name not in kept:
            initialise(self, handle, kind)
            kept[kind.name] = self.__dict__.copy()
        self.__dict__ = kept[kind.name] | {"handle": handle, "type": kind}

    return described


def _as_to_the_first(function: Callable[[Any], Any], key: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a function so that it is called only once for each key.

    Every later argument with the same key gets the first answer. If the key is None, the function is called every time.
    """
    kept: dict[Any, Any] = {}

    def answer(argument: Any) -> Any:
        like = key(argument)
        if like is None:
            return function(argument)
        if like not in kept:
            kept[like] = function(argument)
        return kept[like]

    return answer


@cache
def _builtins(owner: Any) -> list[str]:
    """Returns the names of Triton's own functions in a module or class, while they are unchanged."""
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    """Does what the function of this name does in the interpreter, and searches each module and class only once."""
    for name in _builtins(owner):
        if tl.core.is_builtin(member := getattr(owner, name)):  # no outer launch has replaced it
            interpreter._patch_attr(owner, name, member, builder, scope)


def _own_module(function: Any) -> str | None:
    """Returns the module of one of Triton's own functions, and None for any other function, such as a kernel.

    The module of a kernel is prepared and restored with every launch, so nothing about it is kept.
    """
    module: str = function.__module__
    return module if module.startswith("triton.language") else None


_DESCRIBING = [
    (tl.block_type, "__init__", _types_once(tl.block_type.__init__)),
    (tl.tensor, "__init__", _values_once(tl.tensor.__init__)),
    (interpreter, "_get_np_dtype", _as_to_the_first(interpreter._get_np_dtype, key=lambda kind: kind.name)),
]


def _by_shifts(convert: Callable[..., NDArray[Any]]) -> Callable[..., NDArray[Any]]:
    """Wraps a conversion between formats so that bfloat16 and float32 are converted by a shift of their bits.

    The interpreter truncates if there is no rounding mode, and so does a shift. The interpreter converts subnormal
    numbers in another way, so it converts every array that holds one.
    """

    def converted(numbers: NDArray[Any], given: tl.dtype, wanted: tl.dtype, rounding_mode: Any) -> NDArray[Any]:
        pair = (given.name, wanted.name) if rounding_mode is None else None
        if pair == ("bf16", "fp32"):
            bits: NDArray[np.uint32] = numbers.view(np.uint16).astype(np.uint32) << np.uint32(16)
            if not _has_subnormal(bits):
                return bits
        if pair == ("fp32", "bf16"):
            bits = numbers.view(np.uint32)
            if not _has_subnormal(bits):
                return (bits >> np.uint32(16)).astype(np.uint16)
        return convert(numbers, given, wanted, rounding_mode)

    return converted


def _has_subnormal(bits: NDArray[np.uint32]) -> bool:
    """Whether some float32 with these bits is subnormal."""
    size = bits & np.uint32(0x7FFFFFFF)
    return bool(((size != 0) & (size < 0x00800000)).any())


_CONVERTING = (interpreter, "_convert_float", _by_shifts(interpreter._convert_float))
