"""What a call that brought no answer says of the function itself: whether it declined, and whether every call ends so.

A function that returns a pair, works on NumPy arrays or needs a device that is not there answers no case. A run says so
once, with what would do, and leaves its other checks out.
"""

import os
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy
from torch import Tensor

from flashproof import wrapping
from flashproof.signatures import parameters_of

# How a kernel words that it runs on a GPU alone, as PyTorch, Triton and their users do.
GPU_ALONE = re.compile(r"cuda|nvidia|\bgpus?\b|active drivers|cpu tensor", re.IGNORECASE)
SHOWN = 4  # elements of a tuple that are named
_FOREIGN = re.compile(r"^<|site-packages|dist-packages|/lib/python")  # files of no user
_OURS = (Path(__file__).parent, Path(__file__).parent / "impls")  # kernels of the catalogue stand in folders below


def said(error: BaseException) -> str:
    """An exception in words: its type and its text, or the line that raised it where an assertion has no text."""
    text = " ".join(str(error).split())
    if not text and isinstance(error, AssertionError) and error.__traceback__:
        text = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def told(error: BaseException) -> str:
    """An exception in words, with the innermost line of the user's own code: "KeyError: 'b' (mine.py:12)"."""
    frame = own_frame(error)
    return f"{said(error)} ({shown(frame.filename)}:{frame.lineno})" if frame else said(error)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of an exception that is neither of a package, of Python's library, nor of flashproof."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not _FOREIGN.search(frame.filename) and Path(frame.filename).parent not in _OURS
    ]
    return own[-1] if own else None


def shown(path: Path | str) -> str:
    """A path, from the working directory if it is in it or below it."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def declines(error: BaseException) -> bool:
    """Whether it is an error by which a call may be declined, if the device has survived it."""
    usual = isinstance(error, NotImplementedError | ValueError | TypeError | RuntimeError | AssertionError)
    return (usual or _is_of_triton(error)) and "can't allocate memory" not in str(error)


def _is_of_triton(error: BaseException) -> bool:
    """Whether Triton could not compile the kernel, or needs more of the device than there is. It need not be loaded."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "triton"]
    return any(kind.__name__ in ("CompilationError", "OutOfResources") for kind in kinds)


def needs_gpu(error: BaseException) -> bool:
    """Whether a call with tensors on the CPU raised this because the function runs on a GPU alone."""
    return GPU_ALONE.search(f"{said(error)} {error}") is not None


def works_on_arrays(attention: Callable[..., object], query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a function that fails on tensors answers NumPy arrays by an array. It is called."""
    if query.is_cuda:
        return False
    with suppress(Exception):
        return isinstance(
            attention(*(tensor.detach().float().numpy() for tensor in (query, key, value))), numpy.ndarray
        )
    return False


def converting(attention: Callable[..., object], name: str) -> str:
    """What would do in place of a function that works on NumPy arrays."""
    wrapper = wrapping.of_arrays(parameters_of(attention), name)
    return f"only its forward can be verified; {wrapping.advice(wrapper, name)}"


def not_a_tensor(returned: object, attention: Callable[..., object], name: str) -> str:
    """What the function of a name returned in place of a tensor, and what would do."""
    words, parameters = f"{_kind(returned)}, not a tensor", parameters_of(attention)
    if isinstance(returned, numpy.ndarray):
        return f"{words}; {wrapping.advice(wrapping.to_array(parameters, name), name)}"
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        # A function with a parameter return_lse returns (out, lse) only where that is True.
        return f"{words}; {wrapping.advice(wrapping.first_of_tuple(parameters, name), name)}"
    return f"{words}; give a function that returns the output"


def _kind(value: object) -> str:
    """The type of a value, in words; of a tuple, those of its elements."""
    if isinstance(value, tuple):
        kinds = ["None" if element is None else type(element).__name__ for element in value[:SHOWN]]
        return f"a tuple ({', '.join(kinds)}{', ...' if len(value) > SHOWN else ''})"
    return "None" if value is None else type(value).__name__
