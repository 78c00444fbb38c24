"""Trials: a trial runs a check of the suite on an implementation in this process and stops at the first failure."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import hypothesis

from flashproof import search
from flashproof.cases import Case
from flashproof.impls.spec import Dtype, Implementation
from flashproof.registry import Check
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Judgement, Record
from flashproof.reports.wording import bias_line, number, rho
from flashproof.space import space_of
from flashproof.subject import Subject

Verdict = Literal["accepted", "rejected", "not claimed"]


@dataclass(frozen=True)
class Outcome:
    """The verdict of a judge about an implementation. If the judge rejected it, also the case and the reason."""

    verdict: Verdict
    case: str = ""
    said: str = ""


class Rejected(Exception):
    """The first failure of a trial."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__(judgement.message)
        self.outcome = Outcome("rejected", judgement.case, _reason(judgement))


def _reason(judgement: Judgement) -> str:
    """Returns the reason of a failure in one line."""
    worst = worst_rho(judgement)
    if size(worst) > 1.0:
        return f"{judgement.tensor} rho {rho(worst)}"
    if judgement.bias is not None and judgement.tensor:
        rms = f", rms {number(judgement.rms)}" if judgement.rms is not None else ""
        return f"{judgement.tensor} {bias_line(judgement)}{rms}"
    return judgement.message.partition("\n")[0]


def _stop_at_failure(record: Record) -> None:
    """Takes the records of a trial. Ends the trial at the first failure."""
    if isinstance(record, Judgement) and record.status == "failed":
        raise Rejected(record)


class _Unrecorded:
    """Replaces the recorder in checks that measure."""

    run = ""

    def add(self, record: Record) -> None:
        """Discards the record."""


# A trial searches the same cases as the suite, but does not shrink a failing one.
SEARCH = (hypothesis.Phase.generate, hypothesis.Phase.target)


def ask(check: Check, implementation: Implementation, dtype: Dtype, cases: Sequence[Case] | None = None) -> Outcome:
    """Runs one check on one implementation up to the first failure.

    cases: those that the check runs; all cases of its grid if None.
    """
    space = space_of(implementation)
    chosen = check.cases(implementation, dtype, space) if cases is None else list(cases)
    if not chosen:
        return Outcome("not claimed")
    about: dict[str, Any] = {
        "implementation": implementation,
        "dtype": dtype,
        "device": "cpu",
        "check": check.name,
        "space": space,
        "cases": chosen,
        "run": "",
    }
    subject = Subject(**about, emit=_stop_at_failure, explains=False)
    needed = inspect.signature(check.function).parameters
    arguments = {"subject": subject} | ({"recorder": _Unrecorded()} if "recorder" in needed else {})
    try:
        with mock.patch.object(search, "PHASES", SEARCH):
            check.function(**arguments)
    except Rejected as rejection:
        return rejection.outcome
    return Outcome("accepted" if subject.judged else "not claimed")
