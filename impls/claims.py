"""Whether a claim can be read: every field of an `Implementation` holds what its type says, and its functions answer.

Checks trust claims. A misspelt claim would pass for one that was not made: what it asks for would not be verified.
"""

from collections.abc import Callable
from dataclasses import fields
from itertools import product
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flashproof.impls.spec import DTYPES, Arithmetic, Device, Dtype, Implementation, Supports


def check(implementation: Implementation) -> None:
    """Raises ValueError for the first field that cannot be read: its name, its value and what would do.

    Fields that a subclass adds are left alone.
    """
    _check_fields(implementation, Implementation, "")
    supports = implementation.supports
    _check_fields(supports, Supports, "supports.")
    for name, known in (("dtypes", DTYPES), ("devices", get_args(Device))):
        if not getattr(supports, name):
            raise ValueError(f"supports.{name}: is empty; give any of {_listed(known)}")
    (low, high), multiple = supports.dims, supports.dim_multiple
    if not 1 <= low <= high:
        raise ValueError(f"supports.dims: {supports.dims} is no range; give the smallest and the largest head dim, both at least 1")
    if multiple < 1 or high // multiple * multiple < low:
        raise ValueError(f"supports.dim_multiple: {multiple} has no multiple from {low} to {high}; give what every head dim is a multiple of")
    for device in supports.devices:
        _check_missing(implementation, device)
    for dtype, device in product(supports.dtypes, supports.devices):
        _check_arithmetic(implementation, dtype, device)


def _check_missing(implementation: Implementation, device: Device) -> None:
    call = f"missing({device!r})"
    try:
        reason = implementation.missing(device)
    except Exception as error:
        raise ValueError(f"{call}: raised {_said(error)}; give a function of a device that returns None or why") from error
    if not isinstance(reason, str | None):
        raise ValueError(f"{call}: returned {reason!r}; give None if the kernel runs there, or why it does not, as a str")


def _check_arithmetic(implementation: Implementation, dtype: Dtype, device: Device) -> None:
    call = f"arithmetic({dtype!r}, {device!r})"
    try:
        arithmetic = implementation.arithmetic(dtype, device)
    except Exception as error:
        raise ValueError(f"{call}: raised {_said(error)}; give a function of dtype and device that needs no such device to answer") from error
    if not isinstance(arithmetic, Arithmetic):
        raise ValueError(f"{call}: {arithmetic!r} is no flashproof.Arithmetic")
    _check_fields(arithmetic, Arithmetic, f"{call}.")
    for name, least in (("exp_ulps", 0), ("key_tile", 1), ("query_tile", 1)):
        number = getattr(arithmetic, name)
        if number is not None and not (isfinite(number) and number >= least):
            raise ValueError(f"{call}.{name}: {number} will not do; give a finite number of at least {least}")


def _check_fields(claim: object, kind: type, place: str) -> None:
    kinds = get_type_hints(kind)
    for field in fields(kind):
        if wrong := _wrong(getattr(claim, field.name), kinds[field.name]):
            raise ValueError(f"{place}{field.name}: {wrong}")


def _wrong(value: object, kind: type) -> str | None:
    """Why a value is not of a kind, and what would do. None if it is. Knows the kinds that fields of a claim have."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return None if value in arguments else f"{value!r} is none of {_listed(arguments)}"
    if origin is tuple:
        return _wrong_tuple(value, arguments)
    if origin is Callable:
        return None if callable(value) else f"{value!r} cannot be called; give a function"
    accepted = (int, float) if kind is float else arguments or (kind,)  # int | None has both as arguments
    right = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    return None if right else f"{value!r} is no {_named(kind)}"


def _wrong_tuple(value: object, kinds: tuple[Any, ...]) -> str | None:
    any_number = kinds[-1] is ...
    if not isinstance(value, tuple) or not (any_number or len(value) == len(kinds)):
        holds = f"any of {_listed(get_args(kinds[0]))}" if any_number else ", ".join(kind.__name__ for kind in kinds)
        return f"{value!r} will not do; give a tuple with {holds}"
    each = kinds[:1] * len(value) if any_number else kinds
    return next((wrong for element, kind in zip(value, each, strict=True) if (wrong := _wrong(element, kind))), None)


def _named(kind: type) -> str:
    """A kind as a user writes it."""
    if not isinstance(kind, type):
        return str(kind)
    return f"flashproof.{kind.__name__}" if kind in (Supports, Arithmetic) else kind.__name__


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _listed(words: tuple[object, ...]) -> str:
    return ", ".join(map(repr, words))
