"""The site: an overview, the worst errors, what the checks catch, speed, training, how it works, and implementations.

The pages, their style, their script and the lists of all cases lie in one folder, and need no network. A page is
readable without its script, which adds sorting, filters, and the lists of all cases.
"""

import multiprocessing
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flashproof.reports import (
    badges,
    casefile,
    charts,
    difference,
    errors,
    example,
    failing,
    front,
    mutants,
    portrait,
    speed,
    tables,
    templating,
    throughput,
    training,
    wording,
)
from flashproof.reports.checks import sentences
from flashproof.reports.evidence import Evidence, Kernel, gather
from flashproof.reports.record import Judge
from flashproof.reports.speed import Timing
from flashproof.reports.templating import GENERATOR
from flashproof.reports.training import Step

MANY = 20_000  # judgements whose pages several processes write
# The files that every page names: its style, and its script.
BESIDE = {name: (Path(__file__).parent / "templates" / name).read_text("utf-8") for name in ("style.css", "script.js")}


def write_site(records_paths: Iterable[Path], directory: Path, timings: Sequence[Timing] | None = None) -> Path:
    """Merges record files (`evidence.gather`) and writes their site. Returns the path of the index.

    Raises OSError and ValueError as `evidence.gather` does; they name the file.
    """
    return write_pages(gather(records_paths), directory, timings)


def write_pages(
    evidence: Evidence,
    directory: Path,
    timings: Sequence[Timing] | None = None,
    left_out: Sequence[str] = (),
    steps: Sequence[Step] | None = None,
) -> Path:
    """Writes `directory`/index.html and the other files. Returns the path of the index.

    It removes the files of an earlier site from the directory. It leaves other files alone.

    timings, steps: speeds of implementations and of trainings with them, of which those in the evidence are shown.
    Without them, the committed ones are. left_out: what could not be read; the index says so.
    """
    names = {kernel.name for kernel in evidence.kernels}
    timed = [t for t in (speed.committed() if timings is None else timings) if t.implementation in names]
    trained = [s for s in (training.committed() if steps is None else steps) if s.implementation in names]
    site = _Site(evidence, timed, left_out, trained)
    files = dict(site.files())
    _write(directory, files)
    _remove_old(directory, set(files))
    return directory / "index.html"


def write_difference(found: difference.Difference, runs: Sequence[difference.Run], directory: Path) -> Path:
    """Writes the page of the difference of two runs. Returns its path, `directory`/difference.html."""
    counts = [
        (len(found.worse), "verdicts became worse"),
        (len(found.lost), "judgements are gone"),
        (len(found.better), "verdicts became better"),
        (len(found.new), "judgements are new"),
        (len(found.moved), "have another rho and the same verdict"),
        (found.both, "judged in both runs"),
    ]
    text = templating.render(
        "difference.html",
        menu=[],
        here="",
        difference=found,
        runs=runs,
        counts=counts,
        sentence=difference.sentence(found),
        most=difference.ON_A_PAGE,
    )
    _write(directory, {"difference.html": text, **BESIDE})
    return directory / "difference.html"


# HTML lets cells, rows, terms and their explanations leave out their end tags, which take a twentieth of a site.
_END_TAG = re.compile(
    r"</t[dh]>(?=\s*(?:<t[dh][ >]|</tr>))"
    r"|</tr>(?=\s*(?:<tr[ >]|</t(?:head|body|able)>))"
    r"|</d[td]>(?=\s*(?:<d[td][ >]|</d(?:iv|l)>))"
)


def _write(directory: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        text = _END_TAG.sub("", content) if name.endswith(".html") else content
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")


def _remove_old(directory: Path, kept: set[str]) -> None:
    """Removes what an earlier site wrote and this one did not."""
    marks = {
        "*.html": f'<meta name="generator" content="{GENERATOR}">',
        f"{casefile.FOLDER}/*.js": "flashproofCases(",
        f"{badges.FOLDER}/*.svg": '<svg xmlns="http://www.w3.org/2000/svg"',
        f"{badges.FOLDER}/*.json": '{"schemaVersion": 1, "label": "flashproof"',
    }
    for pattern, mark in marks.items():
        for old in directory.glob(pattern):
            with old.open(encoding="utf-8", errors="replace") as file:
                if old.relative_to(directory).as_posix() not in kept and mark in file.read(1000):
                    old.unlink()


class _Site:
    """The files of a site."""

    def __init__(self, evidence: Evidence, timings: list[Timing], left_out: Sequence[str], steps: list[Step]) -> None:
        self.evidence, self.timings, self.left_out = evidence, timings, left_out
        failed = [kernel for kernel in evidence.kernels if tables.verdict(kernel).state == "failed"]
        self.shared = {kernel.name: failing.shared(kernel) for kernel in failed}
        self.trainings = training.values(evidence, steps)
        judged = any(judged.rho is not None for kernel in evidence.kernels for judged in kernel.judged)
        menu = [("index.html", "overview", True), ("errors.html", "worst errors", judged)]
        menu += [("mutants.html", "what the checks catch", evidence.mutation is not None)]
        menu += [("speed.html", "speed", bool(timings))]
        menu += [("training.html", "training", any(self.trainings.values())), ("how.html", "how it works", True)]
        self.menu = [(file, title) for file, title, there in menu if there]
        self.sentences = sentences(evidence.mutation.judges if evidence.mutation else ())

    def files(self) -> Iterable[tuple[str, str]]:
        pages = {"index.html": self.index, "errors.html": self.errors, "mutants.html": self.mutants}
        pages |= {"speed.html": self.speed, "training.html": self.training, "how.html": self.how}
        yield from BESIDE.items()
        for file, _ in self.menu:
            yield file, pages[file]()
        for files in self._of_kernels():
            yield from files

    def _of_kernels(self) -> Iterator[list[tuple[str, str]]]:
        """The files of each implementation. Where there is much to write, several processes write them."""
        numbers = range(len(self.evidence.kernels))
        if sum(len(kernel.judged) for kernel in self.evidence.kernels) < MANY:
            yield from map(self.of_kernel, numbers)
            return
        global _site  # noqa: PLW0603
        _site = self  # the processes that are forked now have it, too
        with multiprocessing.get_context("fork").Pool() as pool:
            yield from pool.imap(_of_kernel, numbers)

    def of_kernel(self, number: int) -> list[tuple[str, str]]:
        """The names and contents of the files about one implementation."""
        kernel = self.evidence.kernels[number]
        name = wording.stem(kernel.name)
        files = [(f"{name}.html", self.kernel(kernel))]
        if kernel.judged:
            files += [
                (casefile.address(kernel), casefile.content(kernel, self.shared.get(kernel.name))),
                (f"{badges.FOLDER}/{name}.svg", badges.svg(kernel, self.evidence)),
                (f"{badges.FOLDER}/{name}.json", badges.endpoint(kernel, self.evidence)),
            ]
        return files

    def render(self, page: str, file: str = "", **values: Any) -> str:
        """A page with its menu. file: its name, where the menu holds it."""
        return templating.render(page, menu=self.menu, here=file or page, **values)

    # ---------------------------------------------------------------------------------------------------- the overview

    def index(self) -> str:
        return self.render(
            "index.html", left_out=self.left_out, **front.values(self.evidence, self.timings, self.shared)
        )

    # ------------------------------------------------------------------------------------------------ the worst errors

    def errors(self) -> str:
        rows = errors.rows(self.evidence)
        spreads = [row.spread for row in rows if row.spread]
        return self.render(
            "errors.html",
            rows=rows,
            several=len(self.evidence.machines) > 1,
            has_ulps=any(row.ulps is not None for row in rows),
            common=(min(s.cases for s in spreads), max(s.cases for s in spreads)) if spreads else None,
        )

    # ------------------------------------------------------------------------------------------------------ the mutants

    def mutants(self) -> str:
        mutation = self.evidence.mutation
        assert mutation is not None, "the menu holds this page only where there are trials"
        rows = mutants.rows(mutation)
        suite, checks, others = mutants.scores(mutation, rows)
        wrong = [row for row in rows if row.specimen.kind == "mutant"]
        return self.render(
            "mutants.html",
            mutation=mutation,
            picture=_picture_of_mutants(rows, suite, others),
            details=_picture_of_checks(rows, checks),
            suite=suite,
            checks=[(score, self.sentences.get(score.judge.name, "") if score.judge else "") for score in checks],
            others=others,
            faults=[
                (fault, [row for row in wrong if row.specimen.fault == fault])
                for fault in dict.fromkeys(row.specimen.fault for row in wrong)
            ],
            survivors=[row for row in wrong if row.specimen.survives],
            right=[row for row in rows if row.specimen.kind != "mutant"],
            key=mutants.key,
        )

    # ------------------------------------------------------------------------------------------------------- the speeds

    def speed(self) -> str:
        return self.render("speed.html", **throughput.values(self.timings, self.evidence))

    def training(self) -> str:
        return self.render("training.html", **self.trainings)

    def how(self) -> str:
        return self.render("how.html", **example.values(self.evidence))

    def kernel(self, kernel: Kernel) -> str:
        return self.render(
            "implementation.html",
            **portrait.values(kernel, self.evidence, self.timings, self.sentences, self.shared.get(kernel.name)),
        )


_site: _Site | None = None  # in a process that writes files of implementations


def _of_kernel(number: int) -> list[tuple[str, str]]:
    assert _site is not None
    return _site.of_kernel(number)


def _order(rows: list[mutants.Row]) -> list[tuple[str, list[mutants.Row]]]:
    return [
        (fault, [row for row in rows if row.specimen.fault == fault])
        for fault in dict.fromkeys(row.specimen.fault for row in rows)
    ]


def _picture_of_mutants(table: list[mutants.Row], suite: mutants.Score, others: list[mutants.Score]) -> Markup:
    """The suite and the rules in use elsewhere, by what they reject."""
    groups = _order([row for row in table if row.specimen.kind == "mutant"])
    rows = [row for _, of_fault in groups for row in of_fault]
    found = tuple("told" if row.is_killed else "missed" for row in rows)
    sections = [("flashproof", [charts.Score("all checks", f"{suite.told} of {suite.mutants}", found, True)])]
    for title, inputs in (
        ("rules on the inputs of their own tests", "theirs"),
        ("the same rules on our cases", "ours"),
    ):
        scores = [
            charts.Score(score.judge.name, f"{score.told} of {score.mutants}", _found(score.judge, table, rows))
            for score in others
            if score.judge and score.judge.inputs == inputs
        ]
        if scores:
            sections.append((title, scores))
    return charts.kills(
        [(fault, len(of_fault)) for fault, of_fault in groups],
        [(f"{row.specimen.name}: {row.specimen.says}", f"#mutant-{wording.stem(row.specimen.name)}") for row in rows],
        sections,
        f"What tells the {len(rows)} mutants from right kernels: flashproof {suite.told} of {suite.mutants}; "
        + "; ".join(f"{s.judge.name}, {s.judge.inputs} inputs, {s.told} of {s.mutants}" for s in others if s.judge),
    )


def _picture_of_checks(table: list[mutants.Row], checks: list[mutants.Score]) -> Markup:
    """Each check, by what it rejects."""
    groups = _order([row for row in table if row.specimen.kind == "mutant"])
    rows = [row for _, of_fault in groups for row in of_fault]
    by_layer: defaultdict[str, list[charts.Score]] = defaultdict(list)
    for score in checks:
        if score.judge:
            layer, _, name = score.judge.name.partition("/")
            found = _found(score.judge, table, rows)
            by_layer[layer].append(charts.Score(name.replace("_", " "), str(score.killed), found))
    return charts.kills(
        [(fault, len(of_fault)) for fault, of_fault in groups],
        (),
        list(by_layer.items()),
        "What each check rejects; the table below holds the counts",
    )


def _found(judge: Judge, table: list[mutants.Row], rows: list[mutants.Row]) -> tuple[str, ...]:
    found = mutants.telling(judge, table)
    return tuple(found[row.specimen.name] for row in rows)
