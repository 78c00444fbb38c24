"""Runs an implementation on a case and says what came of it: tensors, a refusal, or a fault."""

import time
import warnings
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from impls.spec import Implementation, Supports
from tests.cases import Case, Inputs, dropout_seed

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
TENSORS: tuple[TensorName, ...] = get_args(TensorName)


class Refused(Exception):
    """A bare callable declined the case with a clear exception, at its call. Not a failure."""


class Fault(Exception):
    """The implementation raised, or answered with something that is no answer. A result, not the end of the run."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What an implementation gave back, detached: lse only where it is claimed, gradients only where they were asked for."""

    tensors: dict[TensorName, Tensor]
    seconds: float
    has_gradient: bool = field(default=True)  # whether the output carried a gradient

    def __getitem__(self, name: TensorName) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: TensorName) -> bool:
        return name in self.tensors


def arguments(case: Case, supports: Supports, inputs: Inputs) -> dict[str, object]:
    """The keywords of the call: only those that the case needs, so that a kernel without a keyword is still run where it is not needed."""
    keywords: dict[str, object] = {}
    if case.mask != "full":
        keywords["is_causal"] = True
        if "bottom_right" in supports.causal:
            keywords["causal_alignment"] = "top_left" if case.mask == "causal" else "bottom_right"
    if case.scale is not None:
        keywords["scale"] = case.scale
    if case.kv_heads != case.heads:
        keywords["enable_gqa"] = True
    if inputs.block_mask is not None:
        keywords["block_mask"] = inputs.block_mask
    if case.dropout:
        keywords["dropout_p"] = case.dropout
        keywords["dropout_seed"] = dropout_seed(case)
    if supports.lse:
        keywords["return_lse"] = True
    return keywords


def attend(implementation: Implementation, case: Case, inputs: Inputs, *, backward: bool) -> Answer:
    """Calls the implementation, and its backward if asked. Raises Refused or Fault.

    A refusal is an exception of a kind that says "not this input", at the first call and of a bare callable only; one with claims has said what it takes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # errors in the suite itself; what a kernel warns of is no fault of its arithmetic
        return _attend(implementation, case, inputs, backward)


def _attend(implementation: Implementation, case: Case, inputs: Inputs, backward: bool) -> Answer:
    leaves = tuple(tensor.detach().requires_grad_(backward) for tensor in (inputs.query, inputs.key, inputs.value))
    keywords = arguments(case, implementation.supports, inputs)
    started = time.perf_counter()
    try:
        returned = implementation.attention(*leaves, **keywords)
        _synchronise(inputs)
    except Exception as error:
        if implementation.bare and _declines(error):
            raise Refused(_said(error)) from error
        raise Fault(f"forward raised {_said(error)}") from error
    tensors = _outputs(returned, implementation.supports, case, inputs)
    out = tensors["out"]
    if backward and out.requires_grad:
        try:
            gradients = torch.autograd.grad(out, leaves, inputs.dout, allow_unused=True)
            _synchronise(inputs)
        except Exception as error:
            if implementation.bare and isinstance(error, NotImplementedError):
                raise Refused(f"backward: {_said(error)}") from error
            raise Fault(f"backward raised {_said(error)}") from error
        names: tuple[TensorName, ...] = ("dq", "dk", "dv")
        for name, leaf, gradient in zip(names, leaves, gradients, strict=True):
            # No gradient at all for an input is the same statement as a gradient of zero, and judged as such.
            tensors[name] = torch.zeros_like(leaf) if gradient is None else gradient
    seconds = time.perf_counter() - started
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    return Answer(detached, seconds, has_gradient=not backward or out.requires_grad)


def _outputs(returned: object, supports: Supports, case: Case, inputs: Inputs) -> dict[TensorName, Tensor]:
    """Out, and lse where claimed, checked for what makes them comparable at all."""
    shape = (case.batch, case.heads, case.queries, case.dim)
    expected: dict[TensorName, tuple[tuple[int, ...], torch.dtype]] = {"out": (shape, inputs.query.dtype)}
    if supports.lse:
        expected["lse"] = (shape[:3], torch.float32)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise Fault(f"return_lse=True returned {type(returned).__name__}, not the pair (out, lse)")
    values = returned if isinstance(returned, tuple) and supports.lse else (returned,)
    tensors: dict[TensorName, Tensor] = {}
    for (name, (size, dtype)), value in zip(expected.items(), values, strict=True):
        if not isinstance(value, Tensor):
            raise Fault(f"{name} is {type(value).__name__}, not a tensor")
        if tuple(value.shape) != size:
            raise Fault(f"{name} has shape {list(value.shape)}, not {list(size)}")
        if value.dtype != dtype:
            raise Fault(f"{name} has dtype {value.dtype}, not {dtype}")
        if value.device != inputs.query.device:
            raise Fault(f"{name} is on {value.device}, not on {inputs.query.device}")
        tensors[name] = value
    return tensors


def _declines(error: Exception) -> bool:
    broken = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return isinstance(error, NotImplementedError | ValueError | TypeError | RuntimeError) and not isinstance(error, broken) and "CUDA error" not in str(error)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _synchronise(inputs: Inputs) -> None:
    if inputs.query.is_cuda:
        torch.cuda.synchronize()
