"""Peak memory of a call beyond what was there before it: torch's allocator statistics on a GPU, every allocation of torch counted on a CPU."""

import gc
import os
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells stderr of each start and stop

Result = TypeVar("Result")
Method = Literal["allocator", "counted"]


def peak_bytes(call: Callable[[], Result], device: str) -> tuple[int, Result]:
    """The largest number of bytes that the call held at once, its results included, and its results."""
    gc.disable()  # what is freed while it runs must be its own
    try:
        return _peak_on_gpu(call) if device == "cuda" else _peak_on_cpu(call)
    finally:
        gc.enable()


def method(device: str) -> Method:
    """How `peak_bytes` knows."""
    return "allocator" if device == "cuda" else "counted"


def _peak_on_gpu(call: Callable[[], Result]) -> tuple[int, Result]:
    # The thread of autograd may still hold the gradients of the last backward. It frees them before it runs another,
    # which has no bytes here. Memory that another stream has used is freed when some is allocated.
    leaf = torch.zeros(0, device="cuda", requires_grad=True)
    torch.autograd.grad((2.0 * leaf).sum(), leaf)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def _peak_on_cpu(call: Callable[[], Result]) -> tuple[int, Result]:
    # The profiler reports each allocation and release of torch's CPU allocator, those inside operators written in C++ too.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, result
