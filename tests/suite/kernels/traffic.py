"""Counts exactly how many bytes Triton kernels read from and write to device memory, without a GPU.

Triton's interpreter reads and writes memory through a few methods of one object. `counted()` wraps these methods. Each
lane of a load or store counts its bytes if its mask is true, even if a cache of a chip would hold them. So the result
is the number of accesses that the papers count, and not the traffic of a chip.
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
    """Counts what every kernel reads and writes that is interpreted while the context is open.

    Loads and stores through descriptors and block pointers use the same methods, so they count too.
    """
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
            wrapped.enter_context(
                mock.patch.object(interpreter_builder, name, _before(count, getattr(interpreter_builder, name)))
            )
        yield total


def _before(count: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        count(*args, **kwargs)
        return method(*args, **kwargs)

    return counting


def _bytes(pointers: Any, mask: Any = None) -> int:
    """Returns the bytes of the lanes whose mask is true. Without a mask, all lanes count."""
    lanes = (
        pointers.data.size if mask is None else int(np.count_nonzero(np.broadcast_to(mask.data, pointers.data.shape)))
    )
    return lanes * int(pointers.get_element_ty().primitive_bitwidth) // 8
