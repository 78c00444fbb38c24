"""The pages: an index, one page for each implementation, and one for the mutants.

Each page is one file. It needs no other file and no network.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup, escape

from flashproof.reports import charts, mutants, tables, wording
from flashproof.reports.evidence import (
    TENSORS,
    Evidence,
    Judged,
    Kernel,
    Machine,
    Mutation,
    dtype_order,
    gather,
    severity,
    size,
)
from flashproof.reports.record import Environment

GENERATOR = "flashproof"  # marks the files that a later site may remove
SHOWN = 20  # at most this many failures are shown in full; all are listed with their check
TITLES = {"out": "out", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}
AXES = {"queries": "sequence length", "magnitude": "score magnitude", "score": "score"}


def write_site(records_paths: Iterable[Path], directory: Path) -> Path:
    """Merges record files (`evidence.gather`) and writes their site. Returns the path of the index.

    Raises OSError and ValueError as `evidence.gather` does; they name the file.
    """
    return write_pages(gather(records_paths), directory)


def write_pages(evidence: Evidence, directory: Path) -> Path:
    """Writes `directory`/index.html and the other pages. Returns the path of the index.

    It removes the pages of an earlier site from the directory. It leaves other files alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pages = {f"{wording.stem(kernel.name)}.html": kernel_page(kernel, evidence) for kernel in evidence.kernels}
    pages["index.html"] = index_page(evidence)
    if evidence.mutation:
        pages["mutants.html"] = mutants_page(evidence.mutation)
    for old in directory.glob("*.html"):
        if (
            old.name not in pages
            and f'<meta name="generator" content="{GENERATOR}">'
            in old.read_text(encoding="utf-8", errors="replace")[:1000]
        ):
            old.unlink()
    for name, text in pages.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory / "index.html"


class Figure(NamedTuple):
    """A chart and its title."""

    title: str
    svg: Markup | None  # None if charts cannot be made


def index_page(evidence: Evidence) -> str:
    """The index: the verdicts, the matrix, the largest figures, the curves and the environments."""
    verdicts = [(kernel, tables.verdict(kernel)) for kernel in evidence.kernels]
    curves: dict[str, list[tables.Series]] = {}
    for curve, machine in evidence.curves:
        curves.setdefault(curve.chart, []).append(tables.series(curve, machine))
    figures = []
    label = _Labeller(len(evidence.machines) > 1)
    for number, (chart, series) in enumerate(curves.items()):
        first = series[0].curve
        title = f"{first.y_title} against {first.x_title}"
        svg = (
            None
            if charts.missing()
            else charts.curve_chart(series, label, title, f"{chart}: {title}", f"curve-{number}")
        )
        figures.append((chart, Figure(title, svg), series))
    return _page("index.html").render(
        evidence=evidence,
        several=len(evidence.machines) > 1,
        verdicts=verdicts,
        summary={kernel.name: cell for kernel, cell in verdicts},
        counts=[(state, sum(1 for _, cell in verdicts if cell.state == state)) for state in tables.STATES],
        judgements=sum(len(kernel.judged) for kernel in evidence.kernels),
        cases=len(
            {judged.judgement.case for kernel in evidence.kernels for judged in kernel.judged if judged.judgement.case}
        ),
        matrix=tables.matrix(evidence),
        states=tables.STATES,
        largest=tables.largest_rows(evidence),
        suite=mutants.scores(evidence.mutation, mutants.rows(evidence.mutation))[0] if evidence.mutation else None,
        figures=figures,
        missing=charts.missing(),
    )


def mutants_page(mutation: Mutation) -> str:
    """The page about mutants: what the suite rejects and accepts, beside the rules that are in use elsewhere."""
    rows = mutants.rows(mutation)
    suite, checks, others = mutants.scores(mutation, rows)
    wrong = [row for row in rows if row.specimen.kind == "mutant"]
    kinds = (("right kernels of other makes", "variant"), ("right kernels of the catalogue", "kernel"))
    return _page("mutants.html").render(
        mutation=mutation,
        judges=mutation.judges,
        key=mutants.key,
        verdicts=mutants.VERDICTS,
        suite=suite,
        checks=checks,
        others=others,
        mutants=wrong,
        combined=mutation.combined,
        survivors=[row for row in wrong if row.specimen.survives],
        faults=[
            (fault, [row for row in wrong if row.specimen.fault == fault])
            for fault in dict.fromkeys(row.specimen.fault for row in wrong)
        ],
        right=[
            (words, of_kind) for words, kind in kinds if (of_kind := [row for row in rows if row.specimen.kind == kind])
        ],
    )


class Check(NamedTuple):
    """Everything that one check found for one implementation."""

    name: str
    rows: list[tuple[Machine, str, tables.Cell]]
    judged: list[Judged]  # worst first


def kernel_page(kernel: Kernel, evidence: Evidence) -> str:
    """The page of one implementation. Failures come first."""
    label = _Labeller(len(kernel.machines) > 1)
    by_status = {
        status: [j for j in kernel.judged if j.judgement.status == status]
        for status in ("failed", "known defect", "refused")
    }
    failed = _grouped(sorted(by_status["failed"], key=severity, reverse=True), kernel)
    sweeps: list[tuple[tables.Sweep, Figure]] = []
    for axis in tables.axes(kernel):
        if sweep := tables.sweep(kernel, axis):
            title, heading = f"Error against {AXES.get(axis, axis)}", f"rho against {AXES.get(axis, axis)}"
            svg = (
                None
                if charts.missing()
                else charts.sweep_chart(sweep, label, heading, f"{kernel.name}: {heading}", f"sweep-{len(sweeps)}")
            )
            sweeps.append((sweep, Figure(title, svg)))
    growths = tables.memory(kernel)
    growth_figure = None
    if growths:
        heading = "memory against sequence length"
        svg = (
            None
            if charts.missing()
            else charts.memory_chart(growths, label, heading, f"{kernel.name}: {heading}", "memory")
        )
        growth_figure = Figure("Memory beyond inputs and outputs", svg)
    by_tensor = tables.by_tensor(kernel)
    absent = [
        words
        for words, there in (
            ("rho by tensor", any(table.has_rho for table in by_tensor)),
            ("error against sequence length", any(sweep.axis == "queries" for sweep, _ in sweeps)),
            ("error against score magnitude", any(sweep.axis in {"magnitude", "score"} for sweep, _ in sweeps)),
            ("bias", any(table.has_bias for table in by_tensor)),
            ("memory", bool(growths)),
            ("memory traffic", bool(kernel.traffic)),
            ("compiler resources", bool(kernel.resources)),
        )
        if not there
    ]
    return _page("implementation.html").render(
        kernel=kernel,
        several=len(kernel.machines) > 1,
        verdict=tables.verdict(kernel),
        failed=failed[:SHOWN],
        untold=sum(1 + told.more for told in failed[SHOWN:]),
        defects=_grouped(sorted(by_status["known defect"], key=severity, reverse=True), kernel),
        refusals=_refusals(by_status["refused"]),
        by_tensor=by_tensor,
        biases=[j for j in _biases(kernel) if j.judgement.bias is not None],
        worst=tables.worst_cases(kernel),
        sweeps=sweeps,
        axes=AXES,
        growths=growths,
        growth_figure=growth_figure,
        checks=[_check(kernel, check) for check in evidence.checks],
        absent=absent,
        runs=_environments(kernel, evidence),
        missing=charts.missing(),
    )


def _check(kernel: Kernel, check: str) -> Check:
    judged = sorted((j for j in kernel.judged if j.judgement.check == check), key=severity, reverse=True)
    places = sorted(
        {(j.machine, j.judgement.dtype) for j in judged}, key=lambda place: (place[0], dtype_order(place[1]))
    )
    if not places:
        places = [(machine, "") for machine in kernel.machines]
    return Check(
        check, [(machine, dtype, tables.cell(kernel, machine, dtype, check)) for machine, dtype in places], judged
    )


def _biases(kernel: Kernel) -> list[Judged]:
    """The judgement with the largest bias (`tables.largest`) for each machine, dtype and tensor."""
    found = []
    for machine in kernel.machines:
        for dtype in sorted({j.judgement.dtype for j in kernel.judged}, key=dtype_order):
            for tensor in TENSORS:
                own = [
                    j
                    for j in kernel.judged
                    if (j.machine, j.judgement.dtype, j.judgement.tensor) == (machine, dtype, tensor)
                ]
                found.append(tables.largest(own).bias)
    return [judged for judged in found if judged]


class Told(NamedTuple):
    """The worst failure of one check, tensor, dtype and machine.

    block: its text. more: how many more failures of this kind there are.
    """

    judged: Judged
    block: str
    more: int


def _grouped(failures: list[Judged], kernel: Kernel) -> list[Told]:
    """The worst failure of each check, tensor, dtype and machine.

    failures: sorted, worst first.
    """
    groups: dict[tuple[str, str | None, str, Machine], list[Judged]] = {}
    for judged in failures:
        groups.setdefault(
            (judged.judgement.check, judged.judgement.tensor, judged.judgement.dtype, judged.machine), []
        ).append(judged)
    return [
        Told(group[0], wording.failure_block(group[0].judgement, tables.threshold(group[0], kernel)), len(group) - 1)
        for group in groups.values()
    ]


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


def _environments(kernel: Kernel, evidence: Evidence) -> list[Environment]:
    """The environments that the figures of the page come from."""
    runs = {judged.judgement.run for judged in kernel.judged}
    runs |= {record.run for record, _ in kernel.memory} | {record.run for record, _ in kernel.absences}
    runs |= {record.run for record in kernel.traffic} | {record.run for record in kernel.resources}
    runs |= {kernel.claim.run} if kernel.claim else set()
    return [environment for environment in evidence.environments if environment.run in runs]


# ------------------------------------------------------------------------------------------------------------ templates


class _Labeller:
    """The label of a machine in a chart. It is empty if there is only one machine."""

    def __init__(self, several: bool) -> None:
        self.several = several

    def __call__(self, machine: Machine) -> str:
        return str(machine) if self.several else ""


def linked(text: str) -> Markup:
    """The text as HTML: web addresses become links, and everything else is escaped."""
    parts = re.split(r"(https?://[^\s<>\"']*[^\s<>\"'.,;:!?)\]])", text)
    return Markup("").join(
        Markup('<a href="{0}">{0}</a>').format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )


def plain(field: object) -> str:
    """A claimed value in words: "yes" or "no", a range of two integers as "1 to 128", a list, or "unknown" for None."""
    if isinstance(field, bool):
        return "yes" if field else "no"
    if isinstance(field, list) and len(field) == 2 and all(isinstance(item, int) for item in field):
        return f"{field[0]} to {field[1]}"
    if isinstance(field, list):
        return ", ".join(str(item) for item in field) or "none"
    return "unknown" if field is None else str(field)


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashproof.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": wording.number,
        "rho": wording.rho,
        "scientific": wording.scientific,
        "bytes": wording.bytes_,
        "repeat": wording.repeat_line,
        "where": wording.where,
        "stem": wording.stem,
        "anchor": lambda check: "check-" + wording.stem(check.replace("/", ".")),
        "unit": wording.bias_unit,
        "plural": wording.plural,
        "place": charts.places,
        "exceeds": lambda judged: size(judged.rho) > 1,
        "linked": linked,
        "plain": plain,
    }
    environment.globals |= {"generator": GENERATOR, "titles": TITLES, "states": tables.STATES}
    return environment


def _page(name: str) -> jinja2.Template:
    return _templates().get_template(name)
