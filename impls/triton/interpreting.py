"""Makes the kernels of this project run in Triton's interpreter in half the time, with the same results, bit for bit.

Triton's interpreter repeats two kinds of work. Every operation of a kernel creates a value, and describes the type and
the shape of that value again, also as text. Every call of one of Triton's own functions, such as tl.sum, prepares the
modules of Triton for the interpreter again.

There are few types and few modules, so this module keeps the first result of each. It keeps the descriptions of types
for good. It keeps the prepared modules only until the launch ends, because the end of a launch may undo the
preparation. The interpreter runs all other kernels as usual.
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
    """Keeps descriptions and prepared modules while the context is open."""
    changed = [*_DESCRIBING, (interpreter, "_patch_lang", _as_to_the_first(interpreter._patch_lang, key=_own_module))]
    with ExitStack() as stack:
        for owner, name, kept in changed:
            stack.enter_context(mock.patch.object(owner, name, kept))
        yield


def _like_the_first(
    initialise: Callable[..., None], key: Callable[..., Any], own: tuple[str, ...]
) -> Callable[..., None]:
    """Wraps an initialiser so that it runs only once for each key.

    The first object of a key is initialised as usual. Every later object with the same key gets the attributes of the
    first one, except the attributes that are its own. `own` names these attributes: they are the first arguments of the
    initialiser, in order.
    """
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
    """Wraps a function so that it is called only once for each key.

    Every later argument with the same key gets the first answer. If the key is None, the function is called every time.
    """
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
    """Returns the module of one of Triton's own functions, and None for any other function, such as a kernel.

    The module of a kernel is prepared and restored with every launch, so nothing about it is kept.
    """
    module: str = function.__module__
    return module if module.startswith("triton.language") else None


_DESCRIBING = [
    (
        tl.block_type,
        "__init__",
        _like_the_first(tl.block_type.__init__, key=lambda element, shape: (element.name, *map(int, shape)), own=()),
    ),
    (
        tl.tensor,
        "__init__",
        _like_the_first(tl.tensor.__init__, key=lambda handle, kind: kind.name, own=("handle", "type")),
    ),
    (interpreter, "_get_np_dtype", _as_to_the_first(interpreter._get_np_dtype, key=lambda kind: kind.name)),
]
