"""Whether a claim can be read: every field of an `Implementation` holds what its type says, and its arithmetic answers for all that it claims.

Checks trust claims. A misspelt one would pass for one that was not made, and what it asks for would never be verified.
"""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from itertools import product
from math import isfinite
from typing import Literal, get_args, get_origin, get_type_hints

from flashproof.impls.spec import DTYPES, Arithmetic, Device, Implementation


def check(implementation: Implementation) -> None:
    """Raises ValueError for the first field that cannot be read: its name, its value and what would do."""
    _check_fields(implementation, "")
    supports = implementation.supports
    _check_fields(supports, "supports.")
    for name, known in (("dtypes", DTYPES), ("devices", get_args(Device))):
        if not getattr(supports, name):
            raise ValueError(f"supports.{name}: is empty; give any of {_listed(known)}")
    (low, high), multiple = supports.dims, supports.dim_multiple
    if not 1 <= low <= high:
        raise ValueError(f"supports.dims: {supports.dims} is no range; give the smallest and the largest head dim, both at least 1")
    if multiple < 1 or high // multiple * multiple < low:
        raise ValueError(f"supports.dim_multiple: {multiple} has no multiple from {low} to {high}; give what every head dim is a multiple of")
    try:
        signature(implementation.missing).bind("cpu")
    except TypeError as error:
        raise ValueError(f"missing: cannot be asked of a device ({error}); give a function of a device") from error
    for dtype, device in product(supports.dtypes, supports.devices):
        call = f"arithmetic({dtype!r}, {device!r})"
        try:
            arithmetic = implementation.arithmetic(dtype, device)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{call}: raised {said}; give a function of dtype and device that needs no such device to answer") from error
        if not isinstance(arithmetic, Arithmetic):
            raise ValueError(f"{call}: {arithmetic!r} is no Arithmetic")
        _check_fields(arithmetic, f"{call}.")
        for name, least in (("exp_ulps", 0), ("key_tile", 1), ("query_tile", 1)):
            number = getattr(arithmetic, name)
            if number is not None and not (isfinite(number) and number >= least):
                raise ValueError(f"{call}.{name}: {number} will not do; give a finite number of at least {least}")


def _check_fields(claim: object, place: str) -> None:
    kinds = get_type_hints(type(claim))
    for field in fields(claim):  # type: ignore[arg-type]
        if wrong := _wrong(getattr(claim, field.name), kinds[field.name]):
            raise ValueError(f"{place}{field.name}: {wrong}")


def _wrong(value: object, kind: type) -> str | None:
    """Why a value is not of a kind, and what would do; None where it is. Only for kinds that the fields of a claim have."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return None if value in arguments else f"{value!r} is none of {_listed(arguments)}"
    if origin is tuple:
        any_number = arguments[-1] is ...
        if not isinstance(value, tuple) or not (any_number or len(value) == len(arguments)):
            holds = f"any of {_listed(get_args(arguments[0]))}" if any_number else ", ".join(each.__name__ for each in arguments)
            return f"{value!r} will not do; give a tuple with {holds}"
        kinds = arguments[:1] * len(value) if any_number else arguments
        return next((wrong for element, each in zip(value, kinds, strict=True) if (wrong := _wrong(element, each))), None)
    if origin is Callable:
        return None if callable(value) else f"{value!r} cannot be called; give a function"
    accepted = (int, float) if kind is float else arguments or (kind,)  # int | None has both as arguments
    right = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    return None if right else f"{value!r} is no {kind.__name__ if isinstance(kind, type) else kind}"


def _listed(words: tuple[object, ...]) -> str:
    return ", ".join(map(repr, words))
