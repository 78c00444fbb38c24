"""What the page about speed shows."""

import math
from collections import Counter, defaultdict
from typing import Any

from markupsafe import Markup

from flashproof.reports import charts, errors, wording
from flashproof.reports.drawing import Scale
from flashproof.reports.evidence import Evidence, dtype_order
from flashproof.reports.record import Memory
from flashproof.reports.speed import Timing


def values(timings: list[Timing], evidence: Evidence) -> dict[str, Any]:
    """The values of the template speed.html."""
    groups: defaultdict[tuple[str, tuple[str, str, bool, int]], list[Timing]] = defaultdict(list)
    for timing in timings:
        groups[timing.device, timing.group].append(timing)
    sweeps, compared = [], []
    for (device, group), every in groups.items():
        direction, dtype, causal, dim = group
        title = f"{direction}, {dtype}, head dim {dim}{', causal' if causal else ''}"
        by_name: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for timing in every:
            by_name[timing.implementation][timing.length] = timing.tflops
        if max(len(points) for points in by_name.values()) > 1:
            sweeps.append((device, title, _throughput(by_name, every[0].ceiling, f"{title} on {device}")))
        lengths = Counter(timing.length for timing in every)
        length, count = max(lengths.items(), key=lambda pair: (pair[1], pair[0]))
        if count > 2:
            here = sorted((t for t in every if t.length == length), key=lambda t: -t.tflops)
            rows = [(t.implementation, t.tflops, _pace(t)) for t in here]
            label = (
                f"{title}, {length} tokens on {device}: {rows[0][0]} is the fastest with {here[0].tflops:.0f} TFLOP/s"
            )
            compared.append((device, f"{title}, {length} tokens", charts.bars(rows, label, here[0].ceiling)))
    order = sorted(
        timings, key=lambda t: (t.direction == "backward", dtype_order(t.dtype), t.causal, t.dim, t.length, -t.tflops)
    )
    return {
        "sweeps": sweeps,
        "compared": compared,
        "scatters": _scatters(groups, evidence),
        "standard": _beside_the_standard(timings, evidence),
        "timings": order,
        "sources": sorted({t.source for t in timings}),
    }


Groups = dict[tuple[str, tuple[str, str, bool, int]], list[Timing]]


def _scatters(groups: Groups, evidence: Evidence) -> list[tuple[str, Markup]]:
    """Speed against accuracy: the forward against the errors of out, and the backward against those of dV."""
    accuracy = {(row.kernel.name, row.dtype, row.tensor): row.spread for row in errors.rows(evidence) if row.spread}
    found = []
    for wanted, tensor in (("forward", "out"), ("backward", "dv")):
        best: tuple[str, list[tuple[str, float, float]]] = ("", [])
        for (device, (direction, dtype, causal, dim)), every in groups.items():
            length = Counter(t.length for t in every).most_common(1)[0][0]
            points = [
                (t.implementation, spread.absolute[1], t.tflops)
                for t in every
                if t.length == length and (spread := accuracy.get((t.implementation, dtype, tensor)))
            ]
            about = f"{direction}, {dtype}, {length} tokens, head dim {dim}{', causal' if causal else ''}, {device}"
            if direction == wanted and len(points) > len(best[1]):
                best = about, [point for point in points if point[1] > 0]
        if len(best[1]) > 1:
            axes = (
                f"median error of {wording.TITLES[tensor]} on common cases; left is better",
                "TFLOP/s; up is better",
            )
            found.append((best[0], charts.scatter(best[1], f"speed against accuracy: {best[0]}", axes)))
    return found


STANDARD = "sdpa.math"  # the textbook attention of PyTorch, which stores the matrix of scores


def _beside_the_standard(timings: list[Timing], evidence: Evidence) -> list[dict[str, Any]]:
    """The table of the papers: milliseconds and bytes beside those of standard attention."""
    standard = {(t.device, t.group, t.length, t.batch, t.heads): t for t in timings if t.implementation == STANDARD}
    memory: dict[tuple[str, str, str, str, int], Memory] = {
        (kernel.name, str(machine), record.dtype, record.direction, record.length): record
        for kernel in evidence.kernels
        for record, machine in kernel.memory
    }
    rows = []
    for t in sorted(timings, key=lambda t: (t.direction == "backward", t.dtype, t.causal, t.length, t.seconds)):
        plain = standard.get((t.device, t.group, t.length, t.batch, t.heads))
        if t.implementation != STANDARD and plain and t.dtype == "float16":
            measured = memory.get((t.implementation, t.device, t.dtype, t.direction, t.length))
            rows.append({"timing": t, "plain": plain, "memory": measured})
    return rows


def _pace(timing: Timing) -> str:
    share = f", {100 * timing.tflops / timing.ceiling:.0f} %" if timing.ceiling else ""
    return f"{timing.tflops:.0f} TFLOP/s{share}"


def _throughput(by_name: dict[str, dict[int, float]], ceiling: float | None, label: str) -> Markup:
    traces = [
        charts.Trace(name, tuple((float(length), tflops) for length, tflops in sorted(points.items())))
        for name, points in by_name.items()
        if len(points) > 1
    ]
    most = max([ceiling or 0.0] + [tflops for points in by_name.values() for tflops in points.values()])
    step = 10.0 ** math.floor(math.log10(most)) * (
        0.5
        if most < 3 * 10.0 ** math.floor(math.log10(most))
        else 2
        if most > 6 * 10.0 ** math.floor(math.log10(most))
        else 1
    )
    ticks = [(step * k, f"{step * k:g}") for k in range(12) if step * k <= most]
    lengths = sorted({length for points in by_name.values() for length in points})
    return charts.lines(
        traces,
        label,
        ("sequence length", "TFLOP/s"),
        up=Scale(0, most * 1.03, 0, 0, "linear"),
        ticks=ticks,
        places=[(float(length), charts.short(length)) for length in lengths],
        rule=(ceiling, f"ceiling {ceiling:g}") if ceiling else None,
    )
