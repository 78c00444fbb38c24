"""Every check, once: the layer that it belongs to, the cases that it is given, and the claims that it needs.

A check is a function that takes a `Subject` and carries `@check(...)`. The pytest plugin, the reports and the mutants
all read the checks from here.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from flashproof.cases import Case, not_claimed
from flashproof.grids import Grid
from flashproof.impls.spec import Device, Dtype, Implementation
from flashproof.reports.record import LAYERS

Function = TypeVar("Function", bound=Callable[..., None])
ATTRIBUTE = "flashproof_check"  # where a function carries its Check


@dataclass(frozen=True)
class Check:
    """A function over a subject, and what a run needs to know to give it one."""

    function: Callable[..., None]
    layer: str
    grid: Grid
    claims: tuple[str, ...] = ()  # fields of `Supports` that must hold
    single: bool = True  # whether it accepts a case from the command line in place of those of its grid
    early: bool = False  # whether a run begins with it: it takes a second, and explains failures of later checks

    @property
    def name(self) -> str:
        """ "accuracy/forward"."""
        return f"{self.layer}/{self.function.__name__.removeprefix('test_')}"

    @property
    def says(self) -> str:
        """The first paragraph of its docstring: what it asks of a kernel."""
        return " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split())

    def cases(self, implementation: Implementation, dtype: Dtype, device: Device = "cpu") -> list[Case]:
        """The cases of its grid that the implementation claims. Empty where a claim that the check needs is missing."""
        supports = implementation.supports
        if dtype not in supports.dtypes or not all(getattr(supports, claim) for claim in self.claims):
            return []
        return [case for case in self.grid(dtype, device) if not_claimed(case, supports) is None]


def check(
    layer: str, *, grid: Grid, claims: tuple[str, ...] = (), single: bool = True, early: bool = False
) -> Callable[[Function], Function]:
    """Makes a function `test_name(subject)` the check "layer/name". The fields of `Check` say what the arguments mean.

    Raises ValueError for a layer that does not exist, and for a function without a docstring: reports explain a check
    by its first paragraph.
    """
    if layer not in LAYERS:
        raise ValueError(f"layer: {layer!r} does not exist; give one of {', '.join(LAYERS)}")

    def register(function: Function) -> Function:
        if not inspect.getdoc(function):
            raise ValueError(f"{function.__name__}: a check needs a docstring that says what it asks of a kernel")
        setattr(function, ATTRIBUTE, Check(function, layer, grid, claims, single, early))
        return function

    return register


def check_of(function: object) -> Check | None:
    """The check that a function is, or None."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Check) else None


@cache
def files() -> tuple[str, ...]:
    """The modules of `flashproof.tests` that hold checks, by layer."""
    modules: list[str] = []
    for layer in LAYERS:
        package = importlib.import_module(f"flashproof.tests.{layer}")
        names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        modules += [f"{package.__name__}.{name}" for name in names if name.startswith("test_")]
    return tuple(modules)


@cache
def checks() -> dict[str, Check]:
    """Every check of flashproof by its name, in the order of layers and, within a layer, of files and lines."""
    found = (check_of(member) for module in files() for member in vars(importlib.import_module(module)).values())
    return {check.name: check for check in found if check}
