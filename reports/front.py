"""What the first page shows: the matrix as it is drawn, and where errors grow."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from flashproof.reports import charts, common, failing, mutants, overview, tables, training, wording
from flashproof.reports.evidence import Evidence, without_a_gpu
from flashproof.reports.speed import Timing

TALLEST = 21  # pixels of a bar
BOUND = 16  # pixels of a bar with rho 1


def values(
    evidence: Evidence, timings: Sequence[Timing], shared: Mapping[str, common.Shared | None] | None = None
) -> dict[str, Any]:
    """The values of the template index.html.

    shared: what the failing cases of an implementation have in common.
    """
    shown, worst = overview.columns(overview.layers(evidence)), overview.worst(evidence)
    where, of_several = (shared or {}).get(worst.name) if worst else None, len(shared or {}) > 1
    suite = mutants.scores(evidence.mutation, mutants.rows(evidence.mutation))[0] if evidence.mutation else None
    series: defaultdict[str, list[tables.Series]] = defaultdict(list)
    for curve, machine in evidence.curves:
        if training.is_drift(curve):  # the page about training shows it
            continue
        series[curve.chart].append(tables.series(curve, machine))
    speeds, speed_title, fastest = _speeds(timings)
    judging = {judged.judgement.run for kernel in evidence.kernels for judged in kernel.judged}
    dates = sorted(environment.date[:10] for environment in evidence.environments if environment.run in judging)
    machines = [str(machine) for machine in evidence.machines if machine.name]
    return {
        "evidence": evidence,
        "verdict": overview.verdict(evidence),
        "marks": MARKS,
        "words": WORDS,
        "of_several": wording.short_name(worst.name) if worst and of_several else "",
        "answered": failing.answers(worst, where, "" if of_several else overview.said(worst)) if worst else None,
        "ran": failing.ran(worst, evidence).words if worst else "",
        "machines": machines,
        "date": dates[-1] if dates else "",
        "without_a_gpu": without_a_gpu(
            [environment for environment in evidence.environments if environment.run in judging],
            [kernel.claim for kernel in evidence.kernels if kernel.claim],
        ),
        "groups": [(title, [Row(line) for line in lines]) for title, lines in overview.lines(evidence)],
        "columns": shown,
        "places": list(dict.fromkeys(machines)),
        "speeds": speeds,
        "speed_title": speed_title,
        "fastest": fastest,
        "suite": suite,
        "growing": _growing(evidence),
        "curves": [(name, charts.curves(every, f"{name}: {heading(every)}"), every) for name, every in series.items()],
        "judgements": sum(len(kernel.judged) for kernel in evidence.kernels),
        "cases": len({j.judgement.case for kernel in evidence.kernels for j in kernel.judged if j.judgement.case}),
    }


def _speeds(timings: Sequence[Timing]) -> tuple[dict[tuple[str, str], list[float | None]], str, float]:
    """The speeds beside the matrix: of the setting in float16 in which most implementations were timed."""
    timings = [t for t in timings if t.blocks is None]
    forward = [t for t in timings if t.direction == "forward" and t.dtype == "float16"]
    if not forward:
        return {}, "", 1.0
    places = Counter((t.length, t.dim, t.causal, t.device) for t in forward)
    (length, dim, causal, device), _ = places.most_common(1)[0]
    found: dict[tuple[str, str], list[float | None]] = {}
    for t in timings:
        if (t.length, t.dim, t.causal, t.device, t.dtype) == (length, dim, causal, device, "float16"):
            found.setdefault((t.implementation, device), [None, None])[t.direction == "backward"] = t.tflops
    title = f"float16, {length} tokens, head dim {dim}{', causal' if causal else ''}"
    return found, title, max(value for pair in found.values() for value in pair if value)


class Form(NamedTuple):
    """A bar of a strip: the class of its form, and its height in pixels (0 for a form without a height)."""

    mark: str
    height: int


# What stands in a cell of the matrix.
MARKS: tuple[tuple[Form, str], ...] = (
    (Form("", 9), "the largest rho of a dtype, inside its bound"),
    (Form("f", 20), "outside its bound"),
    (Form("d", 18), "a known defect"),
    (Form("o", 0), "a check without a rho that holds"),
    (Form("of", 0), "one that fails"),
    (Form("od", 0), "one with a known defect"),
    (Form("r", 0), "refused"),
    (Form("n", 0), "not claimed"),
    (Form("x", 0), "not run"),
)
WORDS: tuple[tuple[str, str], ...] = (
    ("1.7", "the largest rho; up to 1 passes"),
    ("∞", "not finite, or wrong where no error is allowed"),
    ("bias", "inside the bound, but the errors lean to one side"),
    ("rms 1.9", "the errors have 1.9 times the root mean square that they may have"),
    ("ok", "the checks, which have no rho, hold"),
    ("no", "a check without a rho fails"),
    ("fault", "a call ends without an answer: an exception, a crash, a hang"),
    ("refused", "a call ends with a clear exception that declines the case"),
    ("not claimed, not run, not run here", "nothing was judged; on a narrow screen –"),
)


class Cell:
    """A cell of the matrix, as the template draws it."""

    def __init__(self, strip: overview.Strip) -> None:
        self.key, self.words, self.figure = strip.column.key, strip.words, strip.figure
        self.title = strip.column.title
        self.bars = [_form(bar) for bar in strip.bars]
        state = strip.worst.state
        self.kind = {"failed": "failed", "known defect": "known-defect"}.get(state, "")
        states = {bar.state for bar in strip.bars}
        if "not possible here" in states:
            self.nothing = "not run here"
        else:
            self.nothing = "not claimed" if "not claimed" in states else "not run"
        self.zero = self.figure.startswith("0.")
        self.word, _, self.rest = (
            self.figure.rpartition(" ") if self.figure.startswith("rms") else ("", "", self.figure)
        )


def _form(bar: overview.Bar) -> Form:
    letters = {"passed": "", "failed": "f", "known defect": "d"}
    if bar.state not in letters:
        return Form({"refused": "r", "not claimed": "n"}.get(bar.state, "x"), 0)
    letter = letters[bar.state]
    if bar.rho is None:
        return Form(f"o{letter}", 0)
    height = BOUND * math.sqrt(bar.rho) if bar.rho < math.inf else math.inf
    return Form(letter, max(1, round(min(height, TALLEST))))


class Row:
    """A row of the matrix, as the template draws it."""

    def __init__(self, line: overview.Line) -> None:
        self.kernel, self.machine, self.state, self.note, self.strips = (
            line.kernel,
            line.machine,
            line.state,
            line.note,
            line.strips,
        )
        self.cells = [Cell(strip) for strip in line.strips]


def heading(series: Sequence[tables.Series]) -> str:
    """The title of a chart of curves."""
    return f"{series[0].curve.y_title} against {series[0].curve.x_title}"


def _growing(evidence: Evidence) -> list[tuple[str, list[Markup]]]:
    """Rho of out and dV over the magnitude of the scores: a chart for each dtype, a line for each implementation."""
    found = []
    for tensor in ("out", "dv"):
        svgs = []
        for dtype in evidence.dtypes:
            lines = []
            for kernel in evidence.kernels:
                for machine in kernel.machines:
                    points = tables.places(kernel, machine, tensor, dtype, "magnitude")
                    if len(points) > 1:
                        states = {judged.judgement.status for _, judged in points}
                        state = next((s for s in ("failed", "known defect") if s in states), "passed")
                        lines.append((wording.short_name(kernel.name), state, points))
            if lines:
                title = f"{wording.TITLES[tensor]}, {dtype}"
                failing = wording.listed(dict.fromkeys(name for name, state, _ in lines if state == "failed"))
                about = f"{len(lines)} implementations; {failing or 'none'} above the bound"
                label = f"{title}: rho over score magnitude of {about}"
                svgs.append(charts.magnitudes(lines, title, label))
        if svgs:
            found.append((tensor, svgs))
    return found
