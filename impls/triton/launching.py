"""Launches of Triton kernels: a launch as data, and the plan by which it is repeated.

To describe a launch (tiles, grid, strides, descriptors) and to find the kernel that Triton compiled for it takes the
host several times as long as to start the kernel. A description depends on the options of a call and on the form of
each tensor: everything but its address. So `launch` describes a launch once for its options and forms. It keeps the
plan, which needs only the addresses.
"""

# mypy: disable-error-code="no-untyped-call"
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder
from triton.tools.tensor_descriptor import TensorDescriptor

from flashproof.impls.triton import interpreting
from flashproof.impls.triton.primitives import INTERPRETED

Given = Tensor | int  # what differs from call to call: a tensor, or a number for which no kernel is compiled


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

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments, and those that descriptors describe."""
        bases = {
            name: argument.base if isinstance(argument, TensorDescriptor) else argument
            for name, argument in self.arguments.items()
        }
        return {name: base for name, base in bases.items() if isinstance(base, Tensor)}

    def run(self) -> "Plan":
        """Starts the kernel on the device of its tensors. Returns the plan by which it is repeated."""
        plan = Plan.of(self)
        plan.run(self.tensors)
        return plan


@dataclass(frozen=True)
class Plan:
    """A launch without its tensors. It serves all tensors of the same forms."""

    device: torch.device
    start: Callable[..., object]  # starts the compiled kernel with the arguments
    arguments: list[Any]  # in the order of the kernel's parameters, with None in place of tensors
    places: dict[str, int]  # the place of each argument
    descriptors: dict[str, dict[str, Any]]  # for each tensor that is passed as a descriptor: the descriptor's fields

    @classmethod
    def of(cls, launch: Launch) -> "Plan":
        """Makes the plan of a launch. On a GPU, Triton compiles the kernel first, if it has not done so before."""
        tensors, names = launch.tensors, launch.kernel.arg_names
        device = next(iter(tensors.values())).device
        return cls(
            device,
            _compiled(launch, device),
            [None if name in tensors else launch.arguments[name] for name in names],
            {name: place for place, name in enumerate(names)},
            {
                name: vars(argument) | {"base": None}
                for name, argument in launch.arguments.items()
                if isinstance(argument, TensorDescriptor)
            },
        )

    def run(self, given: Mapping[str, Given]) -> None:
        """Starts the kernel with these tensors, and with these numbers in place of those of the launch."""
        arguments = self.arguments.copy()
        for name, argument in given.items():
            arguments[self.places[name]] = self._passed(name, argument)
        with _on(self.device):
            self.start(*arguments)

    def _passed(self, name: str, argument: Given) -> Any:
        """Returns what is passed for a tensor or a number: a descriptor, an address or the argument itself."""
        if name in self.descriptors:
            # TensorDescriptor() would check again what it has checked for the launch.
            descriptor = object.__new__(TensorDescriptor)
            vars(descriptor).update(self.descriptors[name], base=argument)
            return descriptor
        # For a tensor, Triton would ask the driver whether its address is one of a GPU.
        return argument if INTERPRETED.value or isinstance(argument, int) else argument.data_ptr()


def _compiled(launch: Launch, device: torch.device) -> Callable[..., object]:
    """Returns a function that starts the kernel of a launch with arguments in the order of its parameters.

    Raises RuntimeError if the kernel does not run on the device.
    """
    if INTERPRETED.value:
        return partial(launch.kernel[launch.grid], **launch.options)
    if device.type != "cuda":
        raise RuntimeError(f"Triton: compiled for a GPU, not for a tensor on {device}; set TRITON_INTERPRET=1 for that")
    kernel = launch.kernel if launch.arguments["UNIT"] > 1 else launch.kernel.unaligned
    with _on(device):
        compiled = kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
        start: Callable[..., object] = compiled[(*launch.grid, 1, 1)]
    return start


_PLANS: dict[Hashable, Plan] = {}
_MOST = 4096  # plans that are kept; a plan takes a few kilobytes


def launch(describe: Callable[..., Launch], *options: Hashable, **given: Given) -> None:
    """Starts the launch `describe(*options, **given)`.

    The description may depend on the options, on the form of the tensors in `given`, and on nothing else. A number in
    `given` is passed to the kernel under its name. Each call may have another one.
    """
    key = describe, options, tuple(map(_form, given.values()))
    plan = _PLANS.get(key)
    if plan is not None:
        plan.run(given)
        return
    if len(_PLANS) >= _MOST:
        _PLANS.clear()
    _PLANS[key] = describe(*options, **given).run()


def _form(argument: Given) -> Hashable:
    """Returns what a launch depends on: everything of a tensor but its address, and nothing of a number.

    Kernels are compiled for addresses that 16 divides, and for others.
    """
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device, argument.data_ptr() % 16 == 0
    return None


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
