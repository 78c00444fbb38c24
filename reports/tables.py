"""The tables of the report: pure functions from evidence to rows."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flashproof.reports.evidence import DTYPES, TENSORS, Evidence, Judged, Kernel, Machine, dtype_order, severity, size
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


# ------------------------------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class Cell:
    """What one check found for one implementation, dtype and machine."""

    state: State
    worst: Judged | None = None  # of the largest rho
    cases: int = 0  # different cases, not tensors
    part: str = ""  # "3 of 24", where not all cases have this state
    note: str = ""  # "3 of 24 failed", "block mask"

    @property
    def rho(self) -> str:
        return "" if self.worst is None or self.worst.rho is None else rho(self.worst.rho)


@dataclass(frozen=True)
class Row:
    """One line of the matrix. `nothing` stands for all of `cells` when none was judged, for one reason. `span`: lines of this machine, told in the first."""

    machine: Machine
    span: int
    dtype: str
    cells: tuple[Cell, ...]
    nothing: Cell | None


@dataclass(frozen=True)
class Matrix:
    """Implementations by checks. `layers` are the groups of columns: a name and how many checks it holds."""

    layers: tuple[tuple[str, int], ...]
    checks: tuple[str, ...]
    rows: tuple[tuple[Kernel, tuple[Row, ...]], ...]


def matrix(evidence: Evidence) -> Matrix:
    """The matrix of every implementation, machine and dtype by every check."""
    layers = Counter(check.partition("/")[0] for check in evidence.checks)
    rows = []
    for kernel in evidence.kernels:
        own = {judged.judgement.dtype for judged in kernel.judged}
        dtypes = [dtype for dtype in evidence.dtypes or DTYPES if dtype in DTYPES or dtype in own]
        lines = [_row(kernel, machine, 0 if line else len(dtypes), dtype, evidence.checks) for machine in kernel.machines for line, dtype in enumerate(dtypes)]
        rows.append((kernel, tuple(lines)))
    return Matrix(tuple(layers.items()), evidence.checks, tuple(rows))


def _row(kernel: Kernel, machine: Machine, span: int, dtype: str, checks: tuple[str, ...]) -> Row:
    cells = tuple(cell(kernel, machine, dtype, check) for check in checks)
    states, notes = {c.state for c in cells}, {c.note for c in cells}
    alike = len(states) == 1 and not any(c.cases for c in cells)
    nothing = Cell(cells[0].state, note=notes.pop() if len(notes) == 1 else "") if alike else None
    return Row(machine, span, dtype, cells, nothing)


def cell(kernel: Kernel, machine: Machine, dtype: str, check: str) -> Cell:
    """What a check found, or why it found nothing."""
    judged = kernel.judged_in.get((machine, dtype, check))
    return found(judged) if judged else _absent(kernel, machine, dtype, check)


def found(judged: list[Judged]) -> Cell:
    """Sums judgements up: the gravest status, the largest rho, the number of cases. Refusals among passes are a note; alone they are the status."""
    by_case: defaultdict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        by_case[one.judgement.case].append(one)
    cases: Counter[State] = Counter(max(of_case, key=severity).judgement.status for of_case in by_case.values())
    state: State = next((status for status in ("failed", "known defect", "passed") if cases[status]), "refused")
    total = len(by_case)
    notes = [f"{cases[status]} of {total} {words}" for status, words in _PARTS if cases[status] and (status != state or cases[status] < total)]
    worst = max(judged, key=lambda one: size(one.rho))
    part = f"{cases[state]} of {total}" if cases[state] < total and state != "passed" else ""
    return Cell(state, worst, total, part, ", ".join(notes) or plural(total, "case"))


_PARTS: tuple[tuple[State, str], ...] = (("failed", "failed"), ("known defect", "known defects"), ("refused", "refused"))


def _absent(kernel: Kernel, machine: Machine, dtype: str, check: str) -> Cell:
    matching = [(a, m) for a, m in kernel.absences if a.check in ("", check) and a.dtype in ("", dtype)]
    # A claim holds on every machine of a kind; what is possible depends on the machine.
    absences = [a for a, m in matching if a.reason == "not claimed" and m.kind == machine.kind] or [a for a, m in matching if m == machine]
    if absences:
        most_specific = max(absences, key=lambda a: (a.check != "", a.dtype != ""))
        return Cell(most_specific.reason, note=most_specific.message)
    if kernel.claim is not None:
        for field, wanted in (("dtypes", dtype), ("devices", machine.kind)):
            claimed = kernel.claim.supports.get(field)
            if wanted and isinstance(claimed, list) and wanted not in claimed:
                return Cell("not claimed", note=wanted)
    return Cell("not run")


def verdict(kernel: Kernel) -> Cell:
    """The one word for an implementation: failed when anything failed, passed when something passed and nothing failed."""
    if kernel.judged:
        return found(list(kernel.judged))
    reasons = {absence.reason: absence.message for absence, _ in kernel.absences}
    for reason, message in reasons.items():
        return Cell(reason, note=message)
    return Cell("not run")


# --------------------------------------------------------------------------------------------------------------------- largest figures


@dataclass(frozen=True)
class Largest:
    """The largest rho and the largest bias of some judgements; None where none has one."""

    rho: Judged | None
    bias: Judged | None


def largest(judged: Iterable[Judged]) -> Largest:
    """The largest figures. Of the biases, the one that uses up most of what it is allowed: the largest number is often a mean over rows that nearly cancel,
    with a standard error as large."""
    judged = list(judged)
    of_rho = max((j for j in judged if j.rho is not None), key=lambda j: size(j.rho), default=None)
    of_bias = max((j for j in judged if j.judgement.bias is not None), key=lambda j: lean(j.judgement), default=None)
    return Largest(of_rho, of_bias)


def lean(judgement: Judgement) -> float:
    """A bias over all that it is allowed: its allowance and four standard errors (oracles/verdict.py). Above 1 it fails."""
    allowed = (judgement.bias_allowance or 0.0) + 4.0 * (judgement.bias_error or 0.0)
    return size(judgement.bias) / allowed if allowed else size(judgement.bias)


@dataclass(frozen=True)
class LargestRow:
    """Largest figures of one implementation on one machine, by dtype."""

    kernel: Kernel
    machine: Machine
    by_dtype: dict[str, Largest]


def largest_rows(evidence: Evidence) -> list[LargestRow]:
    """The largest rho and bias by implementation, machine and dtype."""
    rows = []
    for kernel in evidence.kernels:
        for machine in kernel.machines:
            own = [j for j in kernel.judged if j.machine == machine]
            if any(j.rho is not None or j.judgement.bias is not None for j in own):
                rows.append(LargestRow(kernel, machine, {dtype: largest(j for j in own if j.judgement.dtype == dtype) for dtype in evidence.dtypes}))
    return rows


@dataclass(frozen=True)
class ByTensor:
    """Largest figures on one machine: a row for each tensor, a column for each dtype."""

    machine: Machine
    dtypes: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Largest, ...]], ...]

    @property
    def has_rho(self) -> bool:
        return any(largest.rho for _, row in self.rows for largest in row)

    @property
    def has_bias(self) -> bool:
        return any(largest.bias for _, row in self.rows for largest in row)


def by_tensor(kernel: Kernel) -> list[ByTensor]:
    """Largest rho and bias by dtype and tensor, one table a machine."""
    tables = []
    for machine in kernel.machines:
        own = [j for j in kernel.judged if j.machine == machine and j.judgement.tensor is not None]
        dtypes = tuple(sorted({j.judgement.dtype for j in own}, key=dtype_order))
        tensors = [tensor for tensor in TENSORS if any(j.judgement.tensor == tensor for j in own)]
        rows = tuple(
            (tensor, tuple(largest(j for j in own if (j.judgement.tensor, j.judgement.dtype) == (tensor, dtype)) for dtype in dtypes)) for tensor in tensors
        )
        if rows:
            tables.append(ByTensor(machine, dtypes, rows))
    return tables


def worst_cases(kernel: Kernel, count: int = 3) -> list[Judged]:
    """The judgements of the largest rho, at most `count` of each machine and dtype, each case once; the largest first."""
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


# -------------------------------------------------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class Panel:
    """Rho along one axis, for one dtype on one machine: at each place and for each tensor the largest."""

    dtype: str
    machine: Machine
    tensors: tuple[str, ...]
    rows: tuple[tuple[float, tuple[Judged | None, ...]], ...]


@dataclass(frozen=True)
class Sweep:
    """Rho along one axis. `checks` are those that contribute, `certainty` counts how the figures were judged."""

    axis: str
    panels: tuple[Panel, ...]
    checks: tuple[str, ...]
    certainty: tuple[tuple[str, int], ...]


def sweep(kernel: Kernel, axis: str) -> Sweep | None:
    """Rho along an axis that judgements name, or None where there are not two places to compare."""
    along = [j for j in kernel.judged if axis in j.judgement.axes and j.judgement.tensor is not None and j.rho is not None]
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
                rows.append((place, tuple(largest(j for j in here if j.judgement.tensor == tensor).rho for tensor in tensors)))
            panels.append(Panel(dtype, machine, tensors, tuple(rows)))
            used += [judged for _, row in rows for judged in row if judged]
    if not panels:
        return None
    checks = tuple(dict.fromkeys(j.judgement.check for j in along))
    return Sweep(axis, tuple(panels), checks, tuple(Counter(j.judgement.certainty or "not labelled" for j in used).most_common()))


def axes(kernel: Kernel) -> list[str]:
    """The axes that judgements of an implementation name, the usual ones first."""
    named = {axis for judged in kernel.judged for axis in judged.judgement.axes}
    usual = ("queries", "magnitude", "score")
    return [axis for axis in usual if axis in named] + sorted(named - set(usual))


# Words of a case's line that tell where it stands on an axis.
_AXIS_WORDS = {"queries": r"[qk]\d+", "magnitude": r"x[-+.\de]+", "score": r"(x|shift|scale)[-+.\de]+"}


def threshold(judged: Judged, kernel: Kernel) -> str:
    """Where a sweep starts to fail, "passes at magnitude 8, fails from 16", when the cases that differ in one axis alone tell; else empty."""
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
    same = (a.check, a.tensor, a.dtype, one.machine, _rest(a.axes, axis)) == (b.check, b.tensor, b.dtype, other.machine, _rest(b.axes, axis))
    return same and axis in b.axes and _without(axis, a) == _without(axis, b)


def _rest(axes: dict[str, float], axis: str) -> dict[str, float]:
    return {name: place for name, place in axes.items() if name != axis}


def _without(axis: str, judgement: Judgement) -> list[str]:
    pattern = _AXIS_WORDS.get(axis)
    return [word for word in judgement.case.split() if pattern is None or not re.fullmatch(pattern, word)]


# ---------------------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Growth:
    """Memory at several lengths, all else equal. exponent: of the fit bytes ~ length^exponent; None where fewer than two lengths took any."""

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
    return [Growth(*key, tuple(rows), exponent([(row.length, row.measured_bytes) for row in rows])) for key, rows in groups.items()]


def exponent(points: list[tuple[int, int]]) -> float | None:
    """Slope of the least-squares line through (log x, log y), over the points with y > 0; None with fewer than two different x."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope


# ---------------------------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Series:
    """A curve in words: how far it goes, where it is not finite, and its largest value."""

    curve: Curve
    machine: Machine
    gaps: tuple[tuple[float, float], ...]  # stretches of x where there is no finite value, both ends included
    largest: float | None


def series(curve: Curve, machine: Machine) -> Series:
    """Sums a curve up for the table beside its chart."""
    gaps: list[tuple[float, float]] = []
    inside = False
    for x, y in sorted(zip(curve.x, curve.y, strict=True), key=lambda point: point[0]):
        if y is None:
            gaps = [*gaps[:-1], (gaps[-1][0], x)] if inside else [*gaps, (x, x)]
        inside = y is None
    return Series(curve, machine, tuple(gaps), max((y for y in curve.y if y is not None), key=abs, default=None))
