"""Checks the functions of a claim: `missing` and `arithmetic` of an `Implementation`.

The fields of a claim are checked when the claim is made.
"""

from itertools import product

from flashproof.impls.fields import UnreadableClaim
from flashproof.impls.spec import Arithmetic, Device, Dtype, Implementation


def check(implementation: Implementation) -> None:
    """Calls the functions of a claim. Raises ValueError for the first function that does not give a valid answer.

    The message contains the call, its answer and the valid answers.
    """
    supports = implementation.supports
    for device in supports.devices:
        _check_missing(implementation, device)
    for dtype, device in product(supports.dtypes, supports.devices):
        _check_arithmetic(implementation, dtype, device)


def _check_missing(implementation: Implementation, device: Device) -> None:
    call = f"missing({device!r})"
    try:
        reason = implementation.missing(device)
    except Exception as error:
        raise ValueError(
            f"{call}: raised {_said(error)}; give a function that takes a device and returns None or a str"
        ) from error
    if not isinstance(reason, str | None):
        raise ValueError(
            f"{call}: returned {reason!r}; return None if the kernel runs there, and a str that says why if it does not"
        )


def _check_arithmetic(implementation: Implementation, dtype: Dtype, device: Device) -> None:
    call = f"arithmetic({dtype!r}, {device!r})"
    try:
        arithmetic = implementation.arithmetic(dtype, device)
    except UnreadableClaim as error:
        raise ValueError(f"{call}: {error}") from error
    except Exception as error:
        advice = "give a function that takes a dtype and a device, and answers without that device"
        raise ValueError(f"{call}: raised {_said(error)}; {advice}") from error
    if not isinstance(arithmetic, Arithmetic):
        raise ValueError(f"{call}: returned {arithmetic!r}; return a flashproof.Arithmetic")


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
