"""Launches of Triton kernels: a launch as data, and the plan by which it is repeated.

To describe a launch (tiles, grid, strides, descriptors) and to find the kernel that Triton compiled for it takes the
host several times as long as to start the kernel. A description depends on the options of a call and on the form of
each tensor: everything but its address. So `launch` describes a launch once for its options and forms. It keeps the
plan, which needs only the addresses.
"""

# mypy: disable-error-code="no-untyped-call"
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from flashproof.impls.triton import interpreting
from flashproof.impls.triton.primitives import INTERPRETED, loadable


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its grid, its arguments by name (with the constants), and its compile options.

    A launch is data. `run` starts it. A test can compile it for a GPU that is not present.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; with None, the compiler may use fewer to run more programs at a time

    @property
    def options(self) -> dict[str, Any]:
        """The compile options.

        The fusion of a product and a sum into an fma is set explicitly, because Triton is about to change its default.
        """
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **limit}

    def run(self) -> "Plan":
        """Starts the kernel on the device of its tensors. Returns the plan by which it is repeated."""
        tensors = {name: _tensor_of(argument) for name, argument in self.arguments.items()}
        device = next(tensor for tensor in tensors.values() if isinstance(tensor, Tensor)).device
        plan = Plan.of(self, device)
        with _on(device):
            plan.run(tensors)
        return plan


@dataclass(frozen=True)
class Plan:
    """A launch without its tensors. It serves all tensors of the same forms."""

    start: Callable[..., object]  # starts the compiled kernel with the arguments
    arguments: list[Any]  # in the order of the kernel's parameters, with None for what differs from call to call
    # The places and names of what differs:
    numbers: list[tuple[int, str]]
    pointers: list[tuple[int, str]]
    descriptors: list[tuple[int, str, type, dict[str, Any]]]  # of tensors: their class, and their other fields

    @classmethod
    def of(cls, launch: Launch, device: torch.device) -> "Plan":
        """Makes the plan of a launch. On a GPU, Triton compiles the kernel first, if it has not done so before."""
        plan = cls(_compiled(launch, device), [None] * len(launch.arguments), [], [], [])
        for place, name in enumerate(launch.kernel.arg_names):
            argument = launch.arguments[name]
            if _describes(argument):
                plan.descriptors.append((place, name, type(argument), vars(argument) | {"base": None}))
            elif isinstance(argument, Tensor):
                plan.pointers.append((place, name))
            elif name in _NUMBERS:
                plan.numbers.append((place, name))
            else:
                plan.arguments[place] = argument
        return plan

    def run(self, given: Mapping[str, Any]) -> None:
        """Starts the kernel, in the context that `_on` returns. given: the tensors and numbers by their names."""
        arguments = self.arguments.copy()
        for place, name in self.numbers:
            arguments[place] = given[name]
        for place, name in self.pointers:
            arguments[place] = _pointer(given[name])
        for place, name, kind, fields in self.descriptors:
            # kind() would check again what it has checked for the launch.
            descriptor: Any = object.__new__(kind)
            arguments[place] = descriptor
            vars(descriptor).update(fields, base=given[name])
        self.start(*arguments)


_NUMBERS = ("seed",)  # the numbers that differ from call to call; no kernel is compiled for them


def _pointer(tensor: Tensor) -> Tensor | int:
    """Returns what is passed for a tensor. For a tensor itself, Triton would ask the driver about its address."""
    return tensor if INTERPRETED.value else tensor.data_ptr()


def _describes(argument: Any) -> bool:
    """Returns whether an argument is a descriptor. Triton and Gluon have a class each."""
    return hasattr(argument, "block_shape")


def _tensor_of(argument: Any) -> Any:
    """Returns the tensor that a descriptor describes, and any other argument itself."""
    return argument.base if _describes(argument) else argument


def _compiled(launch: Launch, device: torch.device) -> Callable[..., object]:
    """Returns a function that starts the kernel of a launch with arguments in the order of its parameters.

    Raises RuntimeError if the kernel does not run on the device.
    """
    if INTERPRETED.value:
        return partial(launch.kernel[launch.grid], **launch.options)
    if device.type != "cuda":
        raise RuntimeError(f"Triton: compiled for a GPU, not for a tensor on {device}; set TRITON_INTERPRET=1 for that")
    with _on(device):
        compiled = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
        start: Callable[..., object] = compiled[(*launch.grid, 1, 1)]
    return start


_PLANS: dict[Hashable, tuple[list[str], list[Plan]]] = {}  # the names of tensors that are copied first, and the plans
_MOST = 4096  # entries that are kept; one takes a few kilobytes


_LOADED = ("query", "key", "value", "out", "dout")  # the tensors that kernels load in units: see `loadable`


def launch(describe: Callable[..., Iterable[Launch]], *options: Hashable, **given: Tensor | int) -> None:
    """Starts the launches `describe(*options, **given)`, one after the other.

    The kernels get the tensors and numbers in `given` under their names. The description may depend on the options, on
    the form of each tensor, and on nothing else. A tensor that kernels cannot load in units is replaced by a copy.
    """
    tensors = [argument for argument in given.values() if isinstance(argument, Tensor)]
    key = describe, options, *map(_form, tensors)
    known = _PLANS.get(key)
    if known is not None:
        copied, plans = known
        if copied:
            given |= _loadable(given, copied)
        with _on(tensors[0].device):
            for plan in plans:
                plan.run(given)
        return
    if len(_PLANS) >= _MOST:
        _PLANS.clear()
    ready = _loadable(given, _LOADED)
    copied = [name for name, tensor in ready.items() if tensor is not given[name]]
    _PLANS[key] = copied, [each.run() for each in describe(*options, **given | ready)]


def _loadable(given: Mapping[str, Tensor | int], names: Iterable[str]) -> dict[str, Tensor]:
    """Returns those of the tensors that are given, in a form that kernels can load in units."""
    return {name: loadable(tensor) for name in names if isinstance(tensor := given.get(name), Tensor)}


def _form(tensor: Tensor) -> Hashable:
    """Returns everything of a tensor but its address. A tensor at an address that 16 does not divide is copied."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0


# ------------------------------------------------------------------------------------------------ where kernels run


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Returns the context in which kernels run on a device."""
    if INTERPRETED.value:
        return _as_on_a_gpu()
    if device not in _THREAD.devices:
        # Triton encodes descriptors before it gives the thread a context of the GPU. The first launch makes one.
        torch.zeros((), device=device)
        _THREAD.devices.add(device)
    return torch.cuda.device(device.index)


class _Thread(threading.local):
    """What a thread has of its own."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()  # the GPUs of which the thread has a context


_THREAD = _Thread()
_ONE_AT_A_TIME = threading.Lock()  # the interpreter changes the modules of Triton while it runs


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Makes the interpreter behave like a GPU, without warnings and without checks.

    The interpreter runs kernels in NumPy. NumPy warns where a GPU is silent: at the exponential of -inf, at an overflow
    in a row that is never stored, and at a maximum of nothing but NaN.

    The interpreter also checks for every sum and product of integers whether the result left its type, and describes
    the type of every value again. This takes most of its time, so neither is done here.
    """
    with _ONE_AT_A_TIME:
        before = interpreter_builder.options
        interpreter_builder.options = replace(before, sanitize_overflow=False)
        try:
            with interpreting.described_once(), np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                yield
        finally:
            interpreter_builder.options = before
