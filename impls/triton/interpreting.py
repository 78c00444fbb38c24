"""Triton's interpreter, made to describe each type once. Kernels compute the same, bit for bit, in half the time.

Every operation of an interpreted kernel makes a value, and describes anew what its type and shape are, in words too; and every call of a function of Triton's
own, such as tl.sum, prepares Triton's modules for the interpreter once more. There are few types and few modules: what was made for the first is kept.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def keep_descriptions() -> None:
    """From now on, in this process, descriptions are kept."""
    tl.block_type.__init__ = _like_the_first(tl.block_type.__init__, key=lambda element, shape: (element.name, *map(int, shape)), own=())
    tl.tensor.__init__ = _like_the_first(tl.tensor.__init__, key=lambda handle, kind: kind.name, own=("handle", "type"))
    interpreter._get_np_dtype = _as_to_the_first(interpreter._get_np_dtype, key=lambda kind: kind.name)
    interpreter._patch_lang = _as_to_the_first(interpreter._patch_lang, key=_own_module)


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
    """The module of a function of Triton's own, which is prepared at its first call and stays so. That of a kernel is put back after every launch."""
    module: str = function.__module__
    return module if module.startswith("triton.language") else None
