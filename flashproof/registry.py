"""All checks: the layer of each, the cases that it receives, and the claims that it needs.

A check is a function that takes a `Subject` and has the decorator `@check(...)`. The pytest plugin, the reports and the
mutants all take the checks from here.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from flashproof.cases import DETACHED_CALLS, WITHOUT_BACKWARD, Call, Case, not_claimed, without_backward
from flashproof.grids import Grid, called
from flashproof.impls.spec import Dtype, Implementation
from flashproof.reports.record import LAYERS
from flashproof.space import Space

Function = TypeVar("Function", bound=Callable[..., None])
ATTRIBUTE = "flashproof_check"  # the attribute of a function that holds its Check


@dataclass(frozen=True)
class Check:
    """A function of a subject, and what a run needs to know to call it."""

    function: Callable[..., None]
    layer: str
    grid: Grid
    call: Call | None = None  # the way of calling that it judges; None: it calls in its own way
    claims: tuple[str, ...] = ()  # fields of `Supports` that must hold
    single: bool = True  # whether it accepts a case from the command line in place of its grid's cases
    early: bool = False  # whether a run begins with it: it takes a second, and explains failures of later checks
    # Whether it takes minutes. A run then includes it only with -k or --thorough, or with one of its cases in --case.
    asked: bool = False
    every: bool = True  # whether a run judges each of its cases, under the case's own line

    @property
    def name(self) -> str:
        """The name of the check: "accuracy/forward"."""
        return f"{self.layer}/{self.function.__name__.removeprefix('test_')}"

    @property
    def says(self) -> str:
        """The first paragraph of the function's docstring: what the check asks of a kernel."""
        return " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split())

    def cases(self, implementation: Implementation, dtype: Dtype, space: Space) -> list[Case]:
        """The cases of the grid that the implementation claims. Empty if it lacks a claim that the check needs.

        space: the space of the implementation in a run.
        """
        supports = implementation.supports
        if dtype not in supports.dtypes or not all(getattr(supports, claim) for claim in self.claims):
            return []
        found = [case for case in self.grid(space, dtype) if not_claimed(case, supports) is None]
        return found if supports.backward else [without_backward(case) for case in found]

    def of_line(self, case: Case) -> Case | None:
        """The check's form of a case from the command line. None if the check's way of calling cannot take the case."""
        if self.call is None:
            return replace(case, call="plain", wanted="all")
        if case.call not in ("plain", self.call) or (self.call == "autocast" and case.dtype == "float32"):
            return None
        if self.call == "grown" and (case.keys == 1 or case.sharing.startswith("one-")):
            return None
        if self.call in WITHOUT_BACKWARD or (case.wanted == "none" and self.call not in DETACHED_CALLS):
            return replace(case, call=self.call, wanted="all")
        return replace(case, call=self.call)


def check(
    layer: str,
    *,
    grid: Grid | None = None,
    call: Call | None = None,
    claims: tuple[str, ...] = (),
    single: bool = True,
    early: bool = False,
    asked: bool = False,
    every: bool = True,
) -> Callable[[Function], Function]:
    """Makes a function `test_name(subject)` the check "layer/name".

    - `layer`: "contract", "accuracy", "gradients", "stability", "masks", "properties", "memory",
      "determinism" or "training".
    - `grid`: a function of the space of cases and the dtype that returns the cases of the check. `flashproof.grids`
      makes some: `grids.lines(text)` takes one case on each line.
    - `call`: a way of calling, such as "no_grad". The check is given the cases of the space that are called like this.
      Give either `grid` or `call`.
    - `claims`: fields of `Supports` that must hold. Other implementations do not run the check.
    - `single`: whether the check takes a case from `--case` in place of those of its grid.
    - `early`: whether a run begins with this check, because it takes a second and explains failures of later checks.
    - `asked`: whether the check takes minutes. A run then includes it only with `-k` or `--thorough`, or with one of
      its cases in `--case`.
    - `every`: whether a run judges each case of the grid, under the line of the case. False for a check that may stop
      early, leave cases out, or judge others. `flashproof check` does not ask a run for the cases of such a check.

    Raises ValueError for a layer that does not exist, for neither or both of `grid` and `call`, and for a function
    without a docstring: reports explain a check by its first paragraph.
    """
    if layer not in LAYERS:
        raise ValueError(f"layer: {layer!r} does not exist; give one of {', '.join(LAYERS)}")
    if (grid is None) == (call is None):
        raise ValueError("grid: give either the cases of the check or its way of calling")
    found = grid or called(call or "plain")

    def register(function: Function) -> Function:
        if not inspect.getdoc(function):
            raise ValueError(f"{function.__name__}: a check needs a docstring that says what it asks of a kernel")
        setattr(function, ATTRIBUTE, Check(function, layer, found, call, claims, single, early, asked, every))
        return function

    return register


def check_of(function: object) -> Check | None:
    """The check of a function, or None."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Check) else None


@cache
def files() -> tuple[str, ...]:
    """The modules of `flashproof.tests` that contain checks, by layer."""
    modules: list[str] = []
    for layer in LAYERS:
        package = importlib.import_module(f"flashproof.tests.{layer}")
        names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        modules += [f"{package.__name__}.{name}" for name in names if name.startswith("test_")]
    return tuple(modules)


@cache
def checks() -> dict[str, Check]:
    """Every check of flashproof by its name, in the order of layers, then of files, then of lines."""
    found = (check_of(member) for module in files() for member in vars(importlib.import_module(module)).values())
    return {check.name: check for check in found if check}
