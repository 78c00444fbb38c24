"""Triton's interpreter, made to describe each type once while a kernel of this project runs. Kernels compute the same, bit for bit, in half the time.

Every operation of an interpreted kernel makes a value, and describes anew what its type and shape are, in words too; and every call of a function of Triton's
own, such as tl.sum, prepares Triton's modules for the interpreter once more. There are few types and few modules: what was made for the first is kept, of types
for good, of modules until the launch ends, since what it ends with may put them back. Other kernels run in the interpreter as it is.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def described_once() -> Iterator[None]:
    """While it is open, descriptions are kept."""
    changed = [*_DESCRIBING, (interpreter, "_patch_lang", _as_to_the_first(interpreter._patch_lang, key=_own_module))]
    with ExitStack() as stack:
        for owner, name, kept in changed:
            stack.enter_context(mock.patch.object(owner, name, kept))
        yield


def _like_the_first(initialise: Callable[..., None], key: Callable[..., Any], own: tuple[str, ...]) -> Callable[..., None]:
    """An initialiser that fills an object as it filled the first of its key, but for what is the object's own: its first arguments, under the names `own`."""
    kept: dict[Any, dict[str, Any]] = {}

    def described(self: Any, *arguments: Any) -> None:
        like = key(*arguments)
        if like in kept:
            vars(self).update(kept[like])
            vars(self).update(zip(own, arguments, strict=False))
        else:
            initialise(self, *arguments)
            kept[like] = {name: value for name, value in vars(self).items() if name not in own}

    return described


def _as_to_the_first(function: Callable[[Any], Any], key: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that answers what it answered to the first argument of this one's key; where the key is None it is asked again."""
    kept: dict[Any, Any] = {}

    def answer(argument: Any) -> Any:
        like = key(argument)
        if like is None:
            return function(argument)
        if like not in kept:
            kept[like] = function(argument)
        return kept[like]

    return answer


def _own_module(function: Any) -> str | None:
    """The module of a function of Triton's own; None of a kernel, whose module is prepared and put back with every launch."""
    module: str = function.__module__
    return module if module.startswith("triton.language") else None


_DESCRIBING = [
    (tl.block_type, "__init__", _like_the_first(tl.block_type.__init__, key=lambda element, shape: (element.name, *map(int, shape)), own=())),
    (tl.tensor, "__init__", _like_the_first(tl.tensor.__init__, key=lambda handle, kind: kind.name, own=("handle", "type"))),
    (interpreter, "_get_np_dtype", _as_to_the_first(interpreter._get_np_dtype, key=lambda kind: kind.name)),
]
