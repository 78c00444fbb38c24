"""Counts the bytes that Triton kernels read from and write to device memory, exactly, with no GPU.

Triton's interpreter moves all memory through a few methods of one object. They are wrapped while `counted()` is open: each lane of a load or store
whose mask is true counts its bytes, whether or not a cache would have answered it. So these are the accesses that the papers count, not a chip's traffic.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime.interpreter import interpreter_builder


@dataclass
class Bytes:
    """Bytes read from and written to device memory."""

    read: int = 0
    written: int = 0


@contextmanager
def counted() -> Iterator[Bytes]:
    """Counts what every kernel interpreted inside it reads and writes. Loads and stores through descriptors and block pointers pass the same methods."""
    total = Bytes()

    def load(pointers: Any, mask: Any, *_: Any, **__: Any) -> None:
        total.read += _bytes(pointers, mask)

    def store(pointers: Any, _value: Any, mask: Any, *_: Any, **__: Any) -> None:
        total.written += _bytes(pointers, mask)

    def atomic(_operation: Any, pointers: Any, _value: Any, mask: Any, *_: Any) -> None:
        total.read += _bytes(pointers, mask)
        total.written += _bytes(pointers, mask)

    def compare_and_swap(pointers: Any, *_: Any) -> None:
        total.read += _bytes(pointers)
        total.written += _bytes(pointers)

    counters: dict[str, Callable[..., None]] = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": atomic,
        "create_atomic_cas": compare_and_swap,
    }
    with ExitStack() as wrapped:
        for name, count in counters.items():
            wrapped.enter_context(mock.patch.object(interpreter_builder, name, _before(count, getattr(interpreter_builder, name))))
        yield total


def _before(count: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        count(*args, **kwargs)
        return method(*args, **kwargs)

    return counting


def _bytes(pointers: Any, mask: Any = None) -> int:
    """Of the lanes whose mask is true."""
    lanes = pointers.data.size if mask is None else int(np.count_nonzero(np.broadcast_to(mask.data, pointers.data.shape)))
    return lanes * int(pointers.get_element_ty().primitive_bitwidth) // 8
