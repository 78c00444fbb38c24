"""The tables of the report. All functions are pure, from evidence to rows."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flashproof.reports.evidence import TENSORS, Judged, Kernel, Machine, dtype_order, severity, size
from flashproof.reports.record import Curve, Judgement, Memory
from flashproof.reports.wording import plural, rho

State = Literal["passed", "failed", "known defect", "refused", "not possible here", "not claimed", "not run"]

STATES: dict[State, str] = {
    "passed": "every case inside its bound",
    "failed": "at least one case outside its bound, or wrong",
    "known defect": "fails as expected; the page tells what was seen and where it is reported",
    "refused": "a bare callable that answered with a clear exception",
    "not possible here": "claimed, but this machine cannot run it",
    "not claimed": "outside what the implementation says it takes",
    "not run": "not part of these runs",
}


# ------------------------------------------------------------------------------------------------------------ states


@dataclass(frozen=True)
class Cell:
    """The result of one check, or of several, for one implementation, dtype and machine."""

    state: State
    worst: Judged | None = None  # the judgement with the largest rho
    cases: int = 0  # the number of different cases; the tensors of a case count once
    part: str = ""  # "3 of 24", if not all cases have this state; empty for "passed"
    note: str = ""  # "3 of 24 failed", "block mask"

    @property
    def rho(self) -> str:
        return "" if self.worst is None or self.worst.rho is None else rho(self.worst.rho)


def cell(kernel: Kernel, machine: Machine, dtype: str, check: str) -> Cell:
    """What a check found, or the reason why it found nothing."""
    judged = kernel.judged_in.get((machine, dtype, check))
    return found(judged) if judged else _absent(kernel, machine, dtype, check)


def found(judged: list[Judged]) -> Cell:
    """Summarises judgements: the worst status, the largest rho and the number of cases.

    Refusals beside other statuses are only a note. If every case was refused, "refused" is the status.
    """
    by_case: defaultdict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        by_case[one.judgement.case].append(one)
    cases: Counter[State] = Counter(max(of_case, key=severity).judgement.status for of_case in by_case.values())
    state: State = next((status for status in ("failed", "known defect", "passed") if cases[status]), "refused")
    total = len(by_case)
    notes = [
        f"{cases[status]} of {total} {words}"
        for status, words in _PARTS
        if cases[status] and (status != state or cases[status] < total)
    ]
    worst = max(judged, key=lambda one: size(one.rho))
    part = f"{cases[state]} of {total}" if cases[state] < total and state != "passed" else ""
    return Cell(state, worst, total, part, ", ".join(notes) or plural(total, "case"))


_PARTS: tuple[tuple[State, str], ...] = (
    ("failed", "failed"),
    ("known defect", "known defects"),
    ("refused", "refused"),
)


def _absent(kernel: Kernel, machine: Machine, dtype: str, check: str) -> Cell:
    matching = [(a, m) for a, m in kernel.absences if a.check in ("", check) and a.dtype in ("", dtype)]
    # A claim is the same on every machine of a kind. What is possible depends on the machine.
    absences = [a for a, m in matching if a.reason == "not claimed" and m.kind == machine.kind] or [
        a for a, m in matching if m == machine
    ]
    if absences:
        most_specific = max(absences, key=lambda a: (a.check != "", a.dtype != ""))
        return Cell(most_specific.reason, note=most_specific.message)
    if kernel.claim is not None:
        for field, wanted in (("dtypes", dtype), ("devices", machine.kind)):
            claimed = kernel.claim.supports.get(field)
            if wanted and isinstance(claimed, list) and wanted not in claimed:
                return Cell("not claimed", note=wanted)
        # The check measures the memory of every implementation. It judges that of those that claim linear memory.
        if check.startswith("memory/") and kernel.claim.supports.get("linear_memory") is False:
            return Cell("not claimed", note="linear memory")
    return Cell("not run")


def verdict(kernel: Kernel) -> Cell:
    """The one state of an implementation.

    It is "failed" if anything failed, else "known defect" if there is one, else "passed" if anything passed. Without
    judgements, it is the reason of the first absence, or "not run". Many parts of a site ask for it, so the kernel
    keeps it.
    """
    kept: dict[str, Cell] = vars(kernel)
    if "verdict" not in kept:
        kept["verdict"] = _verdict(kernel)
    return kept["verdict"]


def _verdict(kernel: Kernel) -> Cell:
    if kernel.judged:
        return found(list(kernel.judged))
    reasons = {absence.reason: absence.message for absence, _ in kernel.absences}
    for reason, message in reasons.items():
        return Cell(reason, note=message)
    return Cell("not run")


# ------------------------------------------------------------------------------------------------------ largest figures


@dataclass(frozen=True)
class Largest:
    """The judgements with the largest rho and the largest bias; None where no judgement has one."""

    rho: Judged | None
    bias: Judged | None


def largest(judged: Iterable[Judged]) -> Largest:
    """The largest rho and the largest bias.

    The largest bias is the one that uses the largest share of what it is allowed (`lean`). The largest number would be
    misleading: it is often a mean over rows that nearly cancel, and its standard error is as large.
    """
    judged = list(judged)
    of_rho = max((j for j in judged if j.rho is not None), key=lambda j: size(j.rho), default=None)
    of_bias = max((j for j in judged if j.judgement.bias is not None), key=lambda j: lean(j.judgement), default=None)
    return Largest(of_rho, of_bias)


def lean(judgement: Judgement) -> float:
    """|bias| / (allowance + four standard errors). Above 1, the bias fails (oracles/verdict.py)."""
    allowed = (judgement.bias_allowance or 0.0) + 4.0 * (judgement.bias_error or 0.0)
    return size(judgement.bias) / allowed if allowed else size(judgement.bias)


def worst_cases(kernel: Kernel, count: int = 3) -> list[Judged]:
    """The worst judgements that have a rho: at most `count` of each machine and dtype.

    Worse statuses are chosen first, then larger rhos (`evidence.severity`). On one machine, a case is chosen only once.
    The result is sorted by rho, the largest first.
    """
    chosen: list[Judged] = []
    groups: Counter[tuple[Machine, str]] = Counter()
    cases: set[tuple[Machine, str]] = set()
    for judged in sorted((j for j in kernel.judged if j.rho is not None), key=severity, reverse=True):
        group, case = (judged.machine, judged.judgement.dtype), (judged.machine, judged.judgement.case)
        if groups[group] < count and case not in cases:
            chosen.append(judged)
            groups[group] += 1
            cases.add(case)
    return sorted(chosen, key=lambda j: size(j.rho), reverse=True)


# --------------------------------------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class Panel:
    """Rho along one axis, for one dtype on one machine.

    rows: the places, each with the judgement of the largest rho for each of `tensors`.
    """

    dtype: str
    machine: Machine
    tensors: tuple[str, ...]
    rows: tuple[tuple[float, tuple[Judged | None, ...]], ...]


@dataclass(frozen=True)
class Sweep:
    """Rho along one axis.

    checks: those that contribute.
    certainty: how many figures of the panels have each certainty.
    """

    axis: str
    panels: tuple[Panel, ...]
    checks: tuple[str, ...]
    certainty: tuple[tuple[str, int], ...]


def sweep(kernel: Kernel, axis: str) -> Sweep | None:
    """Rho along an axis that judgements name. None if no dtype and machine has two places to compare."""
    along = [
        j for j in kernel.judged if axis in j.judgement.axes and j.judgement.tensor is not None and j.rho is not None
    ]
    panels = []
    used: list[Judged] = []
    for machine in kernel.machines:
        for dtype in sorted({j.judgement.dtype for j in along}, key=dtype_order):
            own = [j for j in along if (j.machine, j.judgement.dtype) == (machine, dtype)]
            tensors = tuple(tensor for tensor in TENSORS if any(j.judgement.tensor == tensor for j in own))
            places = sorted({j.judgement.axes[axis] for j in own})
            if len(places) < 2:
                continue
            rows = []
            for place in places:
                here = [j for j in own if j.judgement.axes[axis] == place]
                rows.append(
                    (place, tuple(largest(j for j in here if j.judgement.tensor == tensor).rho for tensor in tensors))
                )
            panels.append(Panel(dtype, machine, tensors, tuple(rows)))
            used += [judged for _, row in rows for judged in row if judged]
    if not panels:
        return None
    checks = tuple(dict.fromkeys(j.judgement.check for j in along))
    return Sweep(
        axis, tuple(panels), checks, tuple(Counter(j.judgement.certainty or "not labelled" for j in used).most_common())
    )


def places(kernel: Kernel, machine: Machine, tensor: str, dtype: str, axis: str) -> list[tuple[float, Judged]]:
    """The worst judgement of a tensor at each place of an axis, in order."""
    worst: dict[float, Judged] = {}
    for judged in kernel.swept.get((machine, tensor, dtype, axis), ()):
        place = judged.judgement.axes[axis]
        if place not in worst or severity(judged) > severity(worst[place]):
            worst[place] = judged
    return sorted(worst.items(), key=lambda pair: pair[0])


def axes(kernel: Kernel) -> list[str]:
    """The axes that the judgements of an implementation name: first the usual ones, then all others by name."""
    named = {axis for judged in kernel.judged for axis in judged.judgement.axes}
    usual = ("queries", "magnitude", "score")
    return [axis for axis in usual if axis in named] + sorted(named - set(usual))


# The words of a case's line that give its place on an axis.
_AXIS_WORDS = {"queries": r"[qk]\d+", "magnitude": r"x[-+.\de]+", "score": r"(x|shift|scale)[-+.\de]+"}


def threshold(judged: Judged, kernel: Kernel) -> str:
    """The place where a sweep starts to fail: "passes at magnitude 8, fails from 16".

    It comes from the cases that differ from the judged one in one axis only. It is empty if these do not separate into
    passes on one side and other statuses on the other.
    """
    for axis in judged.judgement.axes:
        siblings = [other for other in kernel.judged if _differ_in(axis, judged, other)]
        failing = [j.judgement.axes[axis] for j in siblings if j.judgement.status != "passed"]
        passing = [j.judgement.axes[axis] for j in siblings if j.judgement.status == "passed"]
        if failing and passing and max(passing) < min(failing):
            return f"passes at {axis} {max(passing):g}, fails from {min(failing):g}"
        if failing and passing and max(failing) < min(passing):
            return f"passes at {axis} {min(passing):g}, fails from {max(failing):g} down"
    return ""


def _differ_in(axis: str, one: Judged, other: Judged) -> bool:
    a, b = one.judgement, other.judgement
    same = (a.check, a.tensor, a.dtype, one.machine, _rest(a.axes, axis)) == (
        b.check,
        b.tensor,
        b.dtype,
        other.machine,
        _rest(b.axes, axis),
    )
    return same and axis in b.axes and _without(axis, a) == _without(axis, b)


def _rest(axes: dict[str, float], axis: str) -> dict[str, float]:
    return {name: place for name, place in axes.items() if name != axis}


def _without(axis: str, judgement: Judgement) -> list[str]:
    pattern = _AXIS_WORDS.get(axis)
    return [word for word in judgement.case.split() if pattern is None or not re.fullmatch(pattern, word)]


# --------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Growth:
    """Memory at several lengths, with everything else equal.

    exponent: from the fit bytes ~ length^exponent; None if fewer than two lengths took any memory.
    """

    machine: Machine
    dtype: str
    direction: str
    heads: int
    dim: int
    method: str
    rows: tuple[Memory, ...]
    exponent: float | None


def memory(kernel: Kernel) -> list[Growth]:
    """The memory tables of an implementation."""
    groups: defaultdict[tuple[Machine, str, str, int, int, str], list[Memory]] = defaultdict(list)
    for record, machine in kernel.memory:
        groups[machine, record.dtype, record.direction, record.heads, record.dim, record.method].append(record)
    return [
        Growth(*key, tuple(rows), exponent([(row.length, row.measured_bytes) for row in rows]))
        for key, rows in groups.items()
    ]


def exponent(points: list[tuple[int, int]]) -> float | None:
    """The slope of the least-squares line through (log x, log y).

    It uses the points with x > 0 and y > 0. It is None if these have fewer than two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope


# --------------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Series:
    """The summary of a curve.

    gaps: ranges of x without a finite value, both ends included.
    largest: the finite value with the largest absolute value; None if there is none.
    """

    curve: Curve
    machine: Machine
    gaps: tuple[tuple[float, float], ...]
    largest: float | None


def series(curve: Curve, machine: Machine) -> Series:
    """Summarises a curve for the table beside its chart."""
    gaps: list[tuple[float, float]] = []
    inside = False
    for x, y in sorted(zip(curve.x, curve.y, strict=True), key=lambda point: point[0]):
        if y is None:
            gaps = [*gaps[:-1], (gaps[-1][0], x)] if inside else [*gaps, (x, x)]
        inside = y is None
    return Series(curve, machine, tuple(gaps), max((y for y in curve.y if y is not None), key=abs, default=None))
