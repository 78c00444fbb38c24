"""The rules for a field of a claim: its value has the type of the field, and its numbers make sense.

The checks trust the claims. A misspelt claim would look like a claim that was not made, and no check would verify it.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class UnreadableClaim(ValueError):
    """A field of a claim is invalid. The message contains the field, its value and the valid values."""


def check_types(claim: object, kind: type) -> None:
    """Raises UnreadableClaim for the first field whose value does not have the type of the field.

    kind: the class whose fields are checked. Fields that a subclass adds are not checked.
    """
    kinds = _kinds(kind)
    for field in fields(kind):
        value = getattr(claim, field.name)
        if not _is_of(value, kinds[field.name]):
            raise wrong(claim, field.name, _named(kinds[field.name]))


def check_number(claim: object, name: str, *, least: float) -> None:
    """Raises UnreadableClaim if a number is smaller than `least` or not finite. None is valid."""
    number = getattr(claim, name)
    if number is not None and not (isfinite(number) and number >= least):
        raise wrong(claim, name, f"a finite number of at least {least}")


def wrong(claim: object, name: str, wanted: str) -> UnreadableClaim:
    """The error for an invalid field. wanted: the valid values, such as "a bool"."""
    return UnreadableClaim(f"{type(claim).__name__}.{name}: {getattr(claim, name)!r} will not do; give {wanted}")


@cache
def _kinds(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value has a type. Supports only the types that fields of a claim have."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        each = arguments[:1] * len(value) if isinstance(value, tuple) and arguments[-1] is ... else arguments
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_is_of, value, each))
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in arguments)
    if origin is Callable:
        return callable(value)
    accepted = (int, float) if kind is float else kind
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _named(kind: Any) -> str:
    """The valid values of a type, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple and arguments[-1] is ...:
        return f"a tuple of any of {', '.join(map(repr, get_args(arguments[0])))}"
    if origin is tuple:
        return f"a tuple of {', '.join(kind.__name__ for kind in arguments)}"
    if origin in (Union, UnionType):
        return " or ".join(map(_named, arguments))
    if origin is Callable:
        return "a function"
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a str", type(None): "None"}
    return words.get(kind) or f"a flashproof.{kind.__name__}"
