"""Measures the peak memory of a call, beyond the memory that was in use before it.

On a GPU, the figure comes from the statistics of torch's allocator. On a CPU, every allocation of torch is counted.
"""

import gc
import os
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes each start and stop to stderr

Result = TypeVar("Result")
Method = Literal["allocator", "counted"]


def peak_bytes(call: Callable[[], Result], device: str) -> tuple[int, Result]:
    """Returns the largest number of bytes that the call held at once, including its results, and the results."""
    gc.disable()  # a collection during the call would free memory that is not its own
    try:
        return _peak_on_gpu(call) if device == "cuda" else _peak_on_cpu(call)
    finally:
        gc.enable()


def method(device: str) -> Method:
    """Names the method by which `peak_bytes` measures."""
    return "allocator" if device == "cuda" else "counted"


def _peak_on_gpu(call: Callable[[], Result]) -> tuple[int, Result]:
    # The autograd thread may still hold the gradients of the last backward. It frees them before it runs another
    # backward, so this runs one that holds no bytes. Memory that another stream has used is freed at an allocation, so
    # this also allocates. The requested bytes are counted, because the allocated ones depend on earlier calls: a free
    # block of the cache may be a megabyte larger than the tensor that gets it.
    leaf = torch.zeros(0, device="cuda", requires_grad=True)
    torch.autograd.grad((2.0 * leaf).sum(), leaf)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize()
    peak: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return peak - before, result


def _peak_on_cpu(call: Callable[[], Result]) -> tuple[int, Result]:
    # The profiler reports each allocation and release of torch's CPU allocator, also inside operators written in C++.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, result
