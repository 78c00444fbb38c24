"""Kernels that misbehave, each in one way. All of them call `attention`, which is right; `innocent` does nothing else.

They are loaded like the file of any user: `pytest --impl tests/suite/sandbox/kernels.py:hangs`. `test_hostile.py` finds
them by regular expressions. So each is a function whose first line begins with `def name(query`, or an assignment
`name = after(...)`.
"""

import ctypes
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Computes textbook attention, in float32 inside."""
    scores = (
        query.float() @ key.float().transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    )
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    return (torch.softmax(scores, dim=-1) @ value.float()).to(query.dtype)


def innocent(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False,
             scale: float | None = None) -> Tensor:  # fmt: skip
    """Does nothing wrong."""
    return attention(query, key, value, is_causal, scale)


class _Table:
    """Holds a file that nobody closes, in a reference cycle.

    Only the garbage collector frees the cycle. So Python warns of the open file at an unpredictable time.
    """

    def __init__(self) -> None:
        self.file = open(os.devnull)  # noqa: SIM115
        self.itself = self


def untidy(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Computes the right answer, but leaves an open file behind."""
    _Table()
    return attention(query, key, value, is_causal, scale)


def after(act: Callable[[Tensor, Tensor, Tensor], object]) -> Kernel:
    """Returns a kernel that calls `act` and then computes attention."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
        act(query, key, value)
        return attention(query, key, value, is_causal)

    return kernel


def poke(tensor: Tensor, element: int, number: float = 7.0) -> None:
    """Writes to the memory that lies `element` elements after the first element of a tensor, whoever owns it."""
    tensor.detach().as_strided((1,), (1,), tensor.storage_offset() + element).fill_(number)


# ------------------------------------------------------------------------------------------------ inputs and outputs

mutates_query = after(lambda query, key, value: query.detach().mul_(1.5))
mutates_one_element_of_key = after(lambda query, key, value: poke(key, 0))
writes_before_value = after(lambda query, key, value: poke(value, -1))
writes_behind_key = after(
    lambda query, key, value: poke(
        key, 1 + sum((size - 1) * stride for size, stride in zip(key.shape, key.stride(), strict=True))
    )
)


class _SpoilsGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(context: Any, dout: Tensor) -> Tensor:
        return dout.detach().mul_(2.0) / 2.0


def mutates_output_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Changes the gradient of its output in place."""
    return _SpoilsGradient.apply(attention(query, key, value))  # type: ignore[no-untyped-call]


def returns_a_view(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Writes its answer into the memory of the query."""
    return query.detach().copy_(attention(query, key, value))


def wrong_dtype(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns float64 instead of the dtype of the query."""
    return attention(query, key, value).double()


def wrong_shape(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns [batch, queries, heads, dim], the layout of some libraries."""
    return attention(query, key, value).transpose(1, 2)


def wrong_device(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns a tensor on the meta device."""
    return attention(query, key, value).to("meta")


def returns_a_list(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Returns a list in place of a tensor."""
    return [attention(query, key, value)]


_buffers: dict[tuple[object, ...], Tensor] = {}


def reuses_its_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Uses one output buffer for all calls of a shape and dtype."""
    buffer = _buffers.setdefault(
        (query.shape, query.dtype), torch.empty_like(query, memory_format=torch.contiguous_format).detach()
    )
    return buffer.copy_(attention(query, key, value).detach())


def uninitialised(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Adds its answer to memory that was never set to zero."""
    total = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    return total.mul_(1e-3).add_(attention(query, key, value).float()).to(query.dtype)


def writes_past_its_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Writes past the end of its output, as a kernel does whose tail is not masked."""
    out = attention(query, key, value)
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0x41, 512)
    return out


# ------------------------------------------------------------------------------------------------ from call to call

_answers: dict[object, Tensor] = {}


def _stale(place: object, out: Tensor) -> Tensor:
    """Replaces the values of an answer by those of the first answer with the same key. The gradient stays right."""
    out.data.copy_(_answers.setdefault(place, out.detach().clone()))
    return out


def caches_by_shape(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns the first answer to inputs of this shape again."""
    place = (query.shape, key.shape, query.dtype)
    return _stale(place, attention(query, key, value))


def caches_by_pointer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns the first answer to tensors at these addresses again."""
    place = (query.data_ptr(), key.data_ptr(), value.data_ptr(), query.shape, key.shape, query.dtype)
    return _stale(place, attention(query, key, value))


_strides: dict[object, tuple[int, ...]] = {}


def keeps_strides(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Keeps the strides of the first call of a shape, as if they were compiled into the kernel."""
    strides = _strides.setdefault(query.shape, query.stride())
    reach = sum((size - 1) * stride for size, stride in zip(query.shape, strides, strict=True)) + query.storage_offset()
    inside = reach < query.untyped_storage().nbytes() // query.element_size()
    return attention(query.as_strided(query.shape, strides) if inside else query, key, value)


_batches: dict[object, int] = {}


def keeps_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Keeps the batch size of the first call, as if it were compiled into the kernel."""
    batch = _batches.setdefault((query.shape[1:], key.shape[1:]), query.shape[0])
    out = attention(query, key, value)
    return torch.cat([out[:batch], torch.zeros_like(out[batch:])])


_calls: Counter[str] = Counter()  # in this process


def _count(kernel: str) -> int:
    """Counts the calls of a kernel. Other kernels may have been called in the same process."""
    _calls[kernel] += 1
    return _calls[kernel]


def wrong_in_the_second_call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Is wrong in every second call, as if a call left its accumulator behind."""
    return attention(query, key, value) * (1.0 if _count("wrong_in_the_second_call") % 2 else 2.0)


def wrong_in_one_of_twenty(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Is wrong in one of twenty calls, like a race condition that seldom shows."""
    return attention(query, key, value) * (1.01 if _count("wrong_in_one_of_twenty") % 20 == 19 else 1.0)


def right_in_one_of_twenty(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Is right in one of twenty calls, beginning with the first, like a race condition that nearly always shows."""
    return attention(query, key, value) * (1.0 if _count("right_in_one_of_twenty") % 20 == 1 else 1.01)


def refuses_the_second_call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Refuses every call after the first, like a kernel that never releases a resource."""
    if _count("refuses_the_second_call") > 1:
        raise RuntimeError("already in use")
    return attention(query, key, value)


def loses_its_gradient(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Detaches its output from autograd in every third call."""
    out = attention(query, key, value, is_causal)
    return out.detach() if _count("loses_its_gradient") % 3 == 0 else out


def ignores_scale(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False,
                  scale: float | None = None) -> Tensor:  # fmt: skip
    """Takes a scale and ignores it."""
    return attention(query, key, value, is_causal)


def ignores_causal(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False,
                   scale: float | None = None) -> Tensor:  # fmt: skip
    """Takes `is_causal` and ignores it."""
    return attention(query, key, value, scale=scale)


# ------------------------------------------------------------------------------------------------ the process


def raises(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Raises an exception that is no refusal, because of a bug."""
    return {"a": query}["b"]


def _take_all_memory(*tensors: Tensor) -> None:
    held: list[Tensor] = []
    while True:
        held.append(torch.empty(2**22 * 16 ** len(held), device=tensors[0].device))


def _wait_for_ever(*tensors: Tensor) -> None:
    while True:
        time.sleep(0.1)


def _end_softly(*tensors: Tensor) -> None:
    raise SystemExit(3)


def _interrupt(*tensors: Tensor) -> None:
    raise KeyboardInterrupt


hangs = after(_wait_for_ever)
hangs_in_c = after(lambda query, key, value: ctypes.PyDLL(None).pause())  # PyDLL does not release the GIL
allocates_without_end = after(_take_all_memory)
segfaults = after(lambda query, key, value: ctypes.string_at(0))
aborts = after(lambda query, key, value: os.abort())
exits = after(lambda query, key, value: sys.exit(3))
raises_system_exit = after(_end_softly)
ends_the_process = after(lambda query, key, value: os._exit(0))
interrupts = after(_interrupt)
closes_all_files = after(lambda query, key, value: os.closerange(0, 64))
forks = after(lambda query, key, value: os.fork())


def segfaults_on_odd_lengths(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes the right answer for an even number of keys, and crashes for an odd number."""
    return attention(query, key, value) if key.shape[2] % 2 == 0 else ctypes.string_at(0)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------- the global state of a process

sets_default_dtype = after(lambda query, key, value: torch.set_default_dtype(torch.float64))
sets_threads = after(lambda query, key, value: torch.set_num_threads(7))
sets_grad_mode = after(lambda query, key, value: torch.set_grad_enabled(False))
sets_seed = after(lambda query, key, value: torch.manual_seed(0))
sets_deterministic = after(lambda query, key, value: torch.use_deterministic_algorithms(True))
filters_warnings = after(lambda query, key, value: warnings.simplefilter("always"))
flushes_subnormals = after(lambda query, key, value: torch.set_flush_denormal(True))
changes_directory = after(lambda query, key, value: os.chdir("/"))
closes_stdout = after(lambda query, key, value: sys.stdout.close())
closes_its_file = after(lambda query, key, value: os.close(1))


# ------------------------------------------------------------------------------------------------ on a GPU


def leaves_a_cuda_error(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Reads an element beyond the end of a tensor. The device fails, and the kernel does not synchronise to see it."""
    out = attention(query, key, value)
    query.flatten()[torch.full((1,), 2**40, device=query.device)]
    return out


def declines_after_a_cuda_error(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Synchronises after such a read and raises another error in place of CUDA's, as some libraries do."""
    query.flatten()[torch.full((1,), 2**40, device=query.device)]
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise RuntimeError("Expected execute(plan) to be true, but got false") from None
    return attention(query, key, value)


def works_in_another_stream(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Works in a stream of its own that does not wait for the caller's stream."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        return attention(query, key, value)
