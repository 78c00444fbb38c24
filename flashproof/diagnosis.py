"""Examines calls without an answer: whether the function declined, and whether every call would end the same way.

A function that returns a pair, works on NumPy arrays or needs a missing device answers no case. A run reports this
once, with advice, and leaves its other checks out.
"""

import os
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy
from torch import Tensor

from flashproof import wrapping
from flashproof.signatures import parameters_of

# The words of errors from kernels that run only on a GPU, in PyTorch, in Triton and in code that uses them.
GPU_ALONE = re.compile(r"cuda|nvidia|\bgpus?\b|active drivers|cpu tensor", re.IGNORECASE)
SHOWN = 4  # the number of elements of a tuple that are named
_FOREIGN = re.compile(r"^<|site-packages|dist-packages|/lib/python")  # files that do not belong to the user
_OURS = (Path(__file__).parent, Path(__file__).parent / "impls")  # the catalogue's kernels are in subfolders of impls


def said(error: BaseException) -> str:
    """An exception in words: its type and its text, or the line of an assertion without text."""
    text = " ".join(str(error).split())
    if not text and isinstance(error, AssertionError) and error.__traceback__:
        text = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def told(error: BaseException) -> str:
    """An exception in words, with the innermost line of the user's own code: "KeyError: 'b' (mine.py:12)"."""
    frame = own_frame(error)
    return f"{said(error)} ({shown(frame.filename)}:{frame.lineno})" if frame else said(error)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of an exception outside installed packages, Python's library and flashproof."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not _FOREIGN.search(frame.filename) and Path(frame.filename).parent not in _OURS
    ]
    return own[-1] if own else None


def shown(path: Path | str) -> str:
    """A path, relative to the working directory if it is inside that directory."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def declines(error: BaseException) -> bool:
    """Whether a call may decline an input by this error, if the device survived it."""
    usual = isinstance(error, NotImplementedError | ValueError | TypeError | RuntimeError | AssertionError)
    return (usual or _is_of_triton(error)) and "can't allocate memory" not in str(error)


def _is_of_triton(error: BaseException) -> bool:
    """Whether Triton failed to compile the kernel, or the device lacks resources. Triton need not be loaded."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "triton"]
    return any(kind.__name__ in ("CompilationError", "OutOfResources") for kind in kinds)


def needs_gpu(error: BaseException) -> bool:
    """Whether a call with tensors on the CPU raised this error because the function runs only on a GPU."""
    return GPU_ALONE.search(f"{said(error)} {error}") is not None


def works_on_arrays(attention: Callable[..., object], query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a function that fails on tensors answers NumPy arrays by an array. This calls the function."""
    if query.is_cuda:
        return False
    with suppress(Exception):
        return isinstance(
            attention(*(tensor.detach().float().numpy() for tensor in (query, key, value))), numpy.ndarray
        )
    return False


def converting(attention: Callable[..., object], name: str) -> str:
    """Advice for a function that works on NumPy arrays."""
    wrapper = wrapping.of_arrays(parameters_of(attention), name)
    return f"only its forward can be verified; {wrapping.advice(wrapper, name)}"


def not_a_tensor(returned: object, attention: Callable[..., object], name: str) -> str:
    """What the named function returned in place of a tensor, with advice."""
    words, parameters = f"{_kind(returned)}, not a tensor", parameters_of(attention)
    if isinstance(returned, numpy.ndarray):
        return f"{words}; {wrapping.advice(wrapping.to_array(parameters, name), name)}"
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        # A function with a parameter return_lse returns (out, lse) only if that parameter is True.
        return f"{words}; {wrapping.advice(wrapping.first_of_tuple(parameters, name), name)}"
    return f"{words}; give a function that returns the output"


def of_another_layout(shape: Sequence[int], expected: Sequence[int], keys: int) -> str:
    """Says how a wrong shape of an output may come from [batch, length, heads, dim]. Empty if it may not.

    expected: [batch, heads, queries, dim]. A function for the other layout takes one query for one head, and as many
    keys for as many heads. So it repeats the query for each of them.
    """
    batch, heads, queries, dim = expected
    if tuple(shape) == (batch, queries, heads, dim):
        return ": this is [batch, length, heads, dim]"
    if queries == 1 and tuple(shape) == (batch, heads, keys, dim):
        return ": a function for tensors of the layout [batch, length, heads, dim] returns this shape"
    return ""


def _kind(value: object) -> str:
    """The type of a value, in words; for a tuple, the types of its elements."""
    if isinstance(value, tuple):
        kinds = ["None" if element is None else type(element).__name__ for element in value[:SHOWN]]
        return f"a tuple ({', '.join(kinds)}{', ...' if len(value) > SHOWN else ''})"
    return "None" if value is None else type(value).__name__
