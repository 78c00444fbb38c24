"""What the page of one implementation shows."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flashproof.impls.catalogue import STANDARD
from flashproof.reports import (
    badges,
    casefile,
    causes,
    charts,
    claims,
    common,
    failing,
    front,
    glossary,
    overview,
    tables,
    throughput,
    wording,
)
from flashproof.reports.evidence import (
    TENSORS,
    Evidence,
    Judged,
    Kernel,
    Machine,
    dtype_order,
    in_ulps,
    is_nearly_zero,
    severity,
    size,
)
from flashproof.reports.record import FIRST_POWER, Environment, TensorName
from flashproof.reports.speed import Timing

NEXT = 2  # failures that are shown with their block below the first ones
SHOWN = 20  # at most this many are shown below them at all; the fold of all cases holds every one
ROWS = 8  # parts of a heat map, from which on it shows where the errors lie
WORST = 3  # of a column, in its fold


def values(
    kernel: Kernel,
    evidence: Evidence,
    timings: Sequence[Timing],
    says: dict[str, str],
    where: common.Shared | None = None,
) -> dict[str, Any]:
    """The values of the template implementation.html.

    says: what each check asks. where: what the failing cases have in common.
    """
    by_status = {
        status: sorted((j for j in kernel.judged if j.judgement.status == status), key=overview.gravity, reverse=True)
        for status in ("failed", "known defect", "refused")
    }
    first = failing.first(kernel, where) if by_status["failed"] else None
    shown_first = [one for one in (first.simplest, first.worst) if one] if first else []
    failed = failing.told(by_status["failed"], kernel, where, shown_first)
    defects = failing.told(by_status["known defect"], kernel)
    own = [t for t in timings if t.implementation == kernel.name]
    shown = overview.columns(overview.layers(evidence))
    lines = [overview.line(kernel, machine, shown, evidence) for machine in kernel.machines]
    pictures = [_picture(kernel, machine, len(kernel.machines) > 1) for machine in kernel.machines]
    columns = [_column(kernel, column, lines, evidence, says) for column in shown]
    heats = _heats(by_status["failed"] or by_status["known defect"], kernel)
    refusals = _refusals(by_status["refused"])
    texts = [told.block for told in (*shown_first, *failed[:SHOWN], *defects)]
    texts += [line for _, line, _ in heats]
    repeated = [*(j for part in columns for j in part["worst"]), *(group[0] for _, _, group in refusals)]
    texts += [wording.repeat_line(judged.judgement) for judged in repeated]
    return {
        "kernel": kernel,
        "sentences": says,
        "several": len(kernel.machines) > 1,
        "verdict": tables.verdict(kernel),
        "sentence": _sentence(kernel),
        "answered": failing.answers(kernel, where, overview.said(kernel)) if first else None,
        "first": first,
        "ran": failing.ran(kernel, evidence) if first else None,
        "next": failed[:NEXT],
        "failed": failed[NEXT:SHOWN],
        "untold": sum(1 + told.more for told in failed[SHOWN:]),
        "defects": defects,
        "refusals": refusals,
        "pictures": pictures,
        "of_charts": failing.of_charts(kernel, {case for picture in pictures for case in picture["failing"]}),
        "is_without_failures": first is not None and not any(picture["failing"] for picture in pictures),
        "curves": _unshifted(evidence),
        "heats": heats,
        "words": glossary.entries(texts),
        "elements": _elements(kernel),
        "histograms": _histograms(kernel),
        "memory": _memory(kernel),
        "traffic": _traffic(kernel),
        "beside": _beside(own, timings, kernel) if own else None,
        "columns": columns,
        "claims": claims.sentences(kernel.claim) if kernel.claim else [],
        "cases_file": casefile.address(kernel),
        "runs": _environments(kernel, evidence),
        "badge": f"{badges.FOLDER}/{wording.stem(kernel.name)}",
    }


def _column(
    kernel: Kernel,
    column: overview.Column,
    lines: Sequence[overview.Line],
    evidence: Evidence,
    says: dict[str, str],
) -> dict[str, Any]:
    """What a fold of the page holds: a strip of each machine, a table of checks, and the worst cases.

    lines: the rows of the implementation in the overview.
    """
    judged = [j for j in kernel.judged if column.holds(j.judgement)]
    checks = [check for check in evidence.checks if any(j.judgement.check == check for j in judged)]
    dtypes = sorted({j.judgement.dtype for j in judged}, key=dtype_order)
    rows = []
    for check in checks:
        own = [j for j in judged if j.judgement.check == check]
        for machine in kernel.machines:
            of_machine = [j for j in own if j.machine == machine]
            if of_machine:
                cells = [_found([j for j in of_machine if j.judgement.dtype == dtype]) for dtype in dtypes]
                rows.append((check, says.get(check, ""), machine, cells))
    worst_of = {
        j.judgement.case: j for j in sorted(judged, key=severity) if j.rho is not None or j.judgement.status != "passed"
    }
    return {
        "column": column,
        "strips": [
            (line.machine, front.Cell(strip)) for line in lines for strip in line.strips if strip.column == column
        ],
        "state": tables.found(judged).state if judged else "not claimed",
        "dtypes": dtypes,
        "rows": rows,
        "worst": sorted(worst_of.values(), key=severity, reverse=True)[:WORST],
        "layers": " ".join(column.layers),
        "tensor": wording.TITLES.get(column.tensor, ""),
        "count": len(judged),
    }


def _found(judged: list[Judged]) -> tuple[tables.Cell, str] | None:
    """What a check found in one dtype, and the figure of its worst case. None if it judged nothing."""
    if not judged:
        return None
    found = tables.found(judged)
    worst = max((j for j in judged if j.judgement.status == found.state), key=severity)
    return found, wording.short_reason(worst.judgement)


def _sentence(kernel: Kernel) -> str:
    """The verdict on an implementation, as a sentence."""
    whole, narrowed = tables.verdict(kernel), overview.not_whole(kernel)
    on = wording.listed(str(machine) for machine in kernel.machines if machine.name)
    if whole.state == "failed":
        failed = [judged.judgement for judged in overview.failed(kernel)]
        said = overview.said(kernel)
        cause = f": {said}" if said else ""
        return f"Fails {wording.failed_checks(failed)}{overview.of_cases(kernel)}{cause}."
    if whole.state == "known defect":
        count = sum(j.judgement.status == "known defect" for j in kernel.judged)
        words = f"Holds its bound, but for {wording.plural(count, 'case')} of known defects, on {on}"
        return f"{words}; {narrowed}." if narrowed else f"{words}."
    if whole.state == "passed" and narrowed:
        judgements = wording.plural(len(kernel.judged), "judgement")
        return f"Holds its bound on the cases that were run, in {judgements} on {on}; {narrowed}."
    if whole.state == "passed":
        return f"Holds its bound in all {len(kernel.judged):,} judgements on {on}."
    return f"{whole.state.capitalize()}{': ' + whole.note if whole.note else ''}."


def _refusals(refused: list[Judged]) -> list[tuple[str, list[str], list[Judged]]]:
    """The refusals by message: the message, the checks and the judgements.

    Messages that differ only in their numbers count as one, because an implementation usually answers many cases of
    many checks with the same message.
    """
    groups: dict[str, list[Judged]] = {}
    for judged in refused:
        groups.setdefault(re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "0", judged.judgement.message), []).append(judged)
    return [
        (group[0].judgement.message, sorted({judged.judgement.check for judged in group}), group)
        for group in groups.values()
    ]


AXES = (
    ("queries", "sequence length", False),
    ("magnitude", "magnitude of the scores", False),
    ("score", "a score moved to where exponentials overflow or underflow (side by side, not to scale)", True),
)


def _picture(kernel: Kernel, machine: Machine, several: bool) -> dict[str, Any]:
    """The picture at the head of a page: rho over length, over magnitude and over the landmarks, on one grid."""
    charts_, figures = [], []
    failed: set[str] = set()
    for axis, title, landmarks in AXES:
        panels = []
        dtypes = sorted(
            {j.judgement.dtype for j in kernel.judged if j.machine == machine and axis in j.judgement.axes},
            key=dtype_order,
        )
        for tensor in TENSORS:
            for dtype in dtypes:
                points = tables.places(kernel, machine, tensor, dtype, axis)
                if len(points) > 1:
                    panels.append(charts.Panel(tensor, dtype, tuple(points)))
        if panels:
            points_ = [judged.judgement for panel in panels for _, judged in panel.points]
            failed |= {one.case for one in points_ if one.status == "failed"}
            worst = max((j for panel in panels for _, j in panel.points), key=lambda j: size(j.rho))
            label = (
                f"rho over {title}, {kernel.name} on {machine}: at most {wording.rho(worst.rho)}, "
                f"{wording.tensor(worst.judgement)} in {worst.judgement.dtype}"
            )
            # The charts over length and magnitude stand side by side; the one over landmarks has a row of its own.
            wide = (1290 - 68) / len(dtypes) - 10 if landmarks else (630 - 68) / len(dtypes) - 10
            charts_.append((axis, title, charts.multiples(panels, title, label, wide, landmarks), label))
            places = sorted({place for panel in panels for place, _ in panel.points})
            rows = [(place, [dict(panel.points).get(place) for panel in panels]) for place in places]
            figures.append((title, panels, rows))
    return {"machine": machine, "charts": charts_, "figures": figures, "named": several, "failing": failed}


def _unshifted(evidence: Evidence) -> Markup | None:
    """The softmax without a maximum, which fails at 88.72, for comparison."""
    series = [tables.series(curve, machine) for curve, machine in evidence.curves if curve.chart == "overflow"]
    return charts.curves(series, f"overflow: {front.heading(series)}") if series else None


def _heats(failed: list[Judged], kernel: Kernel) -> list[tuple[str, str, Markup]]:
    """Where the errors lie in the simplest failing case of each tensor, from the grid that the records hold.

    A case whose tensor has few rows or columns is taken only where there is no other one. Edges of tiles are drawn
    where the implementation claims a tile size.
    """

    def order(judged: Judged) -> tuple[bool, bool, tuple[float, float]]:
        one = judged.judgement
        parts = min(len(one.grid.rho), len(one.grid.rho[0])) if one.grid and one.tensor != "lse" else ROWS
        return is_nearly_zero(one), parts < ROWS, causes.complexity(one.case)

    found = []
    for tensor in TENSORS:
        own = [judged for judged in failed if judged.judgement.grid and judged.judgement.tensor == tensor]
        judged = min(own, key=order, default=None)
        one = judged.judgement if judged else None
        if judged is None or one is None or one.grid is None:
            continue
        grid = [[float(rho) for rho in row] for row in one.grid.rho]
        axes = ("keys" if tensor in ("dk", "dv") else "queries", "dim" if tensor != "lse" else "")
        about = f"{wording.TITLES[tensor]} in {one.dtype}"
        most = wording.rho(max((rho for row in grid for rho in row), key=size))
        label = f"the largest rho in each part of {about}: {most} at most"
        arithmetic = kernel.claim.arithmetic.get(f"{one.dtype} on {one.device}", {}) if kernel.claim else {}
        tile = arithmetic.get("key_tile" if axes[0] == "keys" else "query_tile")
        svg = charts.heat(grid, (one.grid.rows, one.grid.columns), label, axes, (int(tile or 0), 0))
        which = "deterministic rho" if size(one.rho_statistical) > size(one.rho) else "rho"
        found.append((f"{about}, {which} up to {most}", wording.repeat_line(one), svg))
    return found


PARTS: tuple[tuple[str, tuple[TensorName, ...]], ...] = (("out", ("out",)), ("gradients", ("dq", "dk", "dv")))


def _elements(kernel: Kernel) -> list[tuple[str, Machine, Markup]]:
    """How many elements have an error of so many ulps, for each dtype, beside the correctly rounded result.

    The elements are those of the sweep over lengths, whose numbers are normal.
    """
    found = []
    for machine in kernel.machines:
        for dtype in sorted({j.judgement.dtype for j in kernel.judged}, key=dtype_order):
            for part, tensors in PARTS:
                every = [
                    j.judgement.elements
                    for j in kernel.judged
                    if j.judgement.elements and (j.machine, j.judgement.dtype) == (machine, dtype)
                    if j.judgement.tensor in tensors
                ]
                if not every:
                    continue
                counts = [sum(numbers) for numbers in zip(*(one.counts for one in every), strict=True)]
                floor = [sum(numbers) for numbers in zip(*(one.floor for one in every), strict=True)]
                within = 100 * sum(counts[: 1 - FIRST_POWER]) / sum(counts)
                about = f"{sum(counts):,} elements, {within:.3g} % within 1 ulp"
                svg = charts.histogram(
                    [(2.0 ** (FIRST_POWER - 1 + place), count) for place, count in enumerate(counts)],
                    f"errors of {part} in {dtype} on {machine}: {about}",
                    "error in ulps of the element; all smaller and larger ones at the ends",
                    (0.5, "correctly rounded: 0.5"),
                    floor,
                )
                found.append((f"{part}, {dtype}: {about}", machine, svg))
    return found


def _histograms(kernel: Kernel) -> list[tuple[str, str, Markup, int]]:
    """How many judgements have a largest error of so many ulps, for each dtype.

    A machine whose records count the elements is left out, because `_elements` says more.
    """
    counted = {j.machine for j in kernel.judged if j.judgement.elements}
    found = []
    for machine in [machine for machine in kernel.machines if machine not in counted]:
        for dtype in sorted({j.judgement.dtype for j in kernel.judged}, key=dtype_order):
            own = [j.judgement for j in kernel.judged if (j.machine, j.judgement.dtype) == (machine, dtype)]
            finite = [value for value in map(in_ulps, own) if value is not None and 0 < value < math.inf]
            if len(finite) < 2:
                continue
            low, high = -4, min(12, max(4, math.ceil(math.log2(max(finite)))))
            counts = Counter(min(max(math.floor(math.log2(value)), low), high) for value in finite)
            about = f"largest errors of {len(finite)} judgements in ulps, at most {wording.number(max(finite))}"
            label = f"{dtype} on {machine}: {about}"
            svg = charts.histogram(
                [(2.0**power, counts[power]) for power in range(low, high + 1)],
                label,
                "largest error in ulps of the tensor's largest number; all larger ones at the end",
                (0.5, "correctly rounded: 0.5"),
            )
            found.append((dtype, str(machine), svg, len(finite)))
    return found


def _memory(kernel: Kernel) -> list[tuple[Machine, Markup, list[tables.Growth]]]:
    growths = tables.memory(kernel)
    found = []
    for machine in kernel.machines:
        own = [growth for growth in growths if growth.machine == machine and len(growth.rows) > 1]
        if own:
            found.append((machine, charts.growth(own, f"{kernel.name}: memory over sequence length on {machine}"), own))
    return found


def _traffic(kernel: Kernel) -> list[tuple[str, Markup, list[Any]]]:
    """Counted bytes over length beside the paper's formula: a chart for each direction."""
    groups: defaultdict[tuple[str, str, int, int, int], list[Any]] = defaultdict(list)
    for row in kernel.traffic:
        groups[row.direction, row.dtype, row.dim, row.query_tile, row.key_tile].append(row)
    found = []
    for (direction, dtype, dim, query_tile, key_tile), rows in groups.items():
        if len(rows) < 2:
            continue
        title = f"{direction}, {dtype}, head dim {dim}, tiles of {query_tile} queries by {key_tile} keys"
        traces = [
            charts.Trace("read", tuple((float(r.length), float(r.read_bytes)) for r in rows)),
            charts.Trace(
                "read, formula", tuple((float(r.length), float(r.formula_read_bytes)) for r in rows), "formula"
            ),
            charts.Trace("written", tuple((float(r.length), float(r.written_bytes)) for r in rows)),
            charts.Trace(
                "written, formula", tuple((float(r.length), float(r.formula_written_bytes)) for r in rows), "formula"
            ),
        ]
        found.append((title, charts.traffic(traces, f"{kernel.name}: traffic, {title}"), rows))
    return found


def _beside(own: list[Timing], every: Sequence[Timing], kernel: Kernel) -> dict[str, Any]:
    """The speeds of an implementation, each with the fastest other one that was timed in the same setting."""
    rows = []
    by_setting: defaultdict[tuple[object, ...], list[Timing]] = defaultdict(list)
    for timing in every:
        by_setting[timing.setting].append(timing)
    for timing in sorted(own, key=throughput.order):
        same = by_setting[timing.setting]
        best = max((t for t in same if t.implementation != kernel.name), key=lambda t: t.tflops, default=None)
        standard = next((t for t in same if t.implementation == STANDARD != kernel.name), None)
        rows.append((timing, best, standard))
    return {"rows": rows}


def _environments(kernel: Kernel, evidence: Evidence) -> list[Environment]:
    """The environments that the figures of the page come from."""
    runs = {judged.judgement.run for judged in kernel.judged}
    runs |= {record.run for record, _ in kernel.memory} | {record.run for record, _ in kernel.absences}
    runs |= {record.run for record in kernel.traffic} | {record.run for record in kernel.resources}
    runs |= {kernel.claim.run} if kernel.claim else set()
    return [environment for environment in evidence.environments if environment.run in runs]
