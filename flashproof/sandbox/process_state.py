"""The state of the process that a call must not change.

It is read before a call, compared after the call, and restored.
"""

import os
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_ONE, _SUBNORMAL = 1.0, 5e-324  # their product is 0 if subnormals are flushed


@dataclass(frozen=True)
class Setting:
    """A piece of global state: how to read it, and how to restore an earlier reading."""

    name: str
    read: Callable[[], Any]
    put_back: Callable[[Any], object]


def _cuda() -> tuple[int, torch.cuda.Stream] | None:
    """The current device and stream. None before CUDA is initialised."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (torch.cuda.current_device(), torch.cuda.current_stream()) if started else None


def _put_cuda_back(before: tuple[int, torch.cuda.Stream] | None) -> None:
    if before is not None:
        torch.cuda.set_device(before[0])
        torch.cuda.set_stream(before[1])


def _float32_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by two interfaces that contradict each other; torch then raises for both
        return None


FILTERS = "the warnings filters"  # imports of modules during a first call add filters
SETTINGS = (
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "the default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "autocast", lambda: torch.is_autocast_enabled("cpu"), lambda enabled: torch.set_autocast_enabled("cpu", enabled)
    ),
    Setting("the random seed", torch.initial_seed, torch.manual_seed),
    Setting(
        "deterministic mode",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    Setting(
        "the precision of float32 products",
        _float32_precision,
        lambda precision: torch.set_float32_matmul_precision(precision or "highest"),
    ),
    Setting(
        "the treatment of subnormal numbers",
        lambda: _SUBNORMAL * _ONE != 0.0,
        lambda kept: torch.set_flush_denormal(not kept),
    ),
    Setting("the current CUDA device or stream", _cuda, _put_cuda_back),
    Setting("the working directory", os.getcwd, os.chdir),
    Setting(FILTERS, lambda: list(warnings.filters), lambda filters: None),  # the caller's catch_warnings restores them
)


class _Unclosable:
    """A stream that notes an attempt to close it. A logger that was made during a call can keep writing to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.was_closed = False

    def close(self) -> None:
        self.was_closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def left_alone() -> Generator[list[str], None, None]:
    """The context of a call. Afterwards the list names what the call changed, and everything is restored.

    The `catch_warnings` around the context restores the warnings filters.
    """
    changed: list[str] = []
    before = [(setting, setting.read()) for setting in SETTINGS]
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    guards = {name: _Unclosable(stream) for name, stream in streams.items()}
    copies = {number: os.dup(number) for number in (1, 2)}
    for name, guard in guards.items():
        setattr(sys, name, guard)
    try:
        yield changed
    finally:
        for (name, stream), (number, copy) in zip(streams.items(), copies.items(), strict=True):
            if guards[name].was_closed or getattr(sys, name) is not guards[name] or not _is_open(number):
                changed.append(f"{name} (closed or replaced)")
                os.dup2(copy, number)
            setattr(sys, name, stream)
            os.close(copy)
        for setting, value in before:
            now = setting.read()
            if now != value and not (setting.read is _cuda and value is None):  # a first call starts CUDA
                changed.append(setting.name if setting.name == FILTERS else f"{setting.name} (from {value} to {now})")
                setting.put_back(value)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
