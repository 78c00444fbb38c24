"""Trials: a check of the suite, run on an implementation in this process and stopped at its first failure."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import hypothesis

from impls.spec import Dtype, Implementation
from reports.evidence import LAYERS, size, worst_rho
from reports.record import Judgement, Record
from reports.wording import bias_line, number, rho
from tests import profiles
from tests.cases import Case, not_claimed
from tests.grids import Grid
from tests.subject import Subject

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Check:
    """A check of the suite: a function over a subject, its grid, and the claims that it is for."""

    name: str  # "accuracy/forward"
    function: Callable[..., None]
    grid: Grid
    claims: tuple[str, ...]

    def cases(self, implementation: Implementation, dtype: Dtype) -> list[Case]:
        """The cases that an implementation claims; none where it does not claim what the check is for."""
        supports = implementation.supports
        if dtype not in supports.dtypes or not all(getattr(supports, claim) for claim in self.claims):
            return []
        return [case for case in self.grid(dtype, "cpu") if not_claimed(case, supports) is None]


@cache
def checks() -> dict[str, Check]:
    """Every check of the suite by its name, in the order of the layers and, within one, of files and lines."""
    found: list[Check] = []
    layers = sorted((path.name for path in TESTS.iterdir() if path.is_dir()), key=lambda name: (LAYERS.index(name) if name in LAYERS else len(LAYERS), name))
    for layer in layers:
        for path in sorted((TESTS / layer).glob("test_*.py")):
            if "mark.check(" not in path.read_text() or layer == Path(__file__).parent.name:
                continue
            module = importlib.import_module(f"tests.{layer}.{path.stem}")
            for name, function in vars(module).items():
                for mark in getattr(function, "pytestmark", []):
                    if mark.name == "check":
                        words = f"{layer}/{name.removeprefix('test_')}"
                        found.append(Check(words, function, mark.kwargs["grid"], tuple(mark.kwargs.get("claims", ()))))
    return {check.name: check for check in found}


Verdict = Literal["accepted", "rejected", "not claimed"]


@dataclass(frozen=True)
class Outcome:
    """What a judge said of an implementation: its verdict and, where it rejected, on which case and why."""

    verdict: Verdict
    case: str = ""
    said: str = ""


class Rejected(Exception):
    """The first failure of a trial."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__(judgement.message)
        self.outcome = Outcome("rejected", judgement.case, _reason(judgement))


def _reason(judgement: Judgement) -> str:
    """A failure in one line."""
    worst = worst_rho(judgement)
    if size(worst) > 1.0:
        return f"{judgement.tensor} rho {rho(worst)}"
    if judgement.bias is not None and judgement.tensor:
        rms = f", rms {number(judgement.rms)}" if judgement.rms is not None else ""
        return f"{judgement.tensor} {bias_line(judgement)}{rms}"
    return judgement.message.partition("\n")[0]


def _stop_at_failure(record: Record) -> None:
    """What a trial's records go to."""
    if isinstance(record, Judgement) and record.status == "failed":
        raise Rejected(record)


class _Unrecorded:
    """Stands in for the recorder of checks that measure."""

    run = ""

    def add(self, record: Record) -> None:
        """Forgets it."""


SEARCH = (hypothesis.Phase.generate, hypothesis.Phase.target)  # the cases of the suite's search, without looking for the smallest one that fails


def ask(check: Check, implementation: Implementation, dtype: Dtype, cases: Sequence[Case] | None = None) -> Outcome:
    """Runs one check on one implementation, over the check's grid or over some cases of it, up to the first failure."""
    chosen = check.cases(implementation, dtype) if cases is None else list(cases)
    if not chosen:
        return Outcome("not claimed")
    # It has failed before, as far as it knows: only the first failure is looked into, which takes longer than a trial.
    about: dict[str, Any] = {"implementation": implementation, "dtype": dtype, "device": "cpu", "check": check.name, "cases": chosen, "run": ""}
    subject = Subject(**about, emit=_stop_at_failure, failures=["before"])
    needed = inspect.signature(check.function).parameters
    arguments = {"subject": subject} | ({"recorder": _Unrecorded()} if "recorder" in needed else {})
    try:
        with mock.patch.object(profiles, "PHASES", SEARCH):
            check.function(**arguments)
    except Rejected as rejection:
        return rejection.outcome
    return Outcome("accepted" if subject.judged else "not claimed")
