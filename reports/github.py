"""`python -m flashproof.reports.github RECORDS` tells GitHub Actions what a run found.

It writes a summary in Markdown, which GitHub shows on the page of the workflow run. The summary gives the verdict, then
the causes of failures, then the failures, the worst first. It prints annotations, which GitHub shows beside the source
of the kernel, and writes the same failures as SARIF. It also accepts the records of a run that died, and a run without
records.
"""

import argparse
import ast
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashproof.reports import sarif, wording
from flashproof.reports.causes import one_screen
from flashproof.reports.checks import sentences
from flashproof.reports.evidence import DTYPES, TENSORS, size, without_a_gpu, worst_rho
from flashproof.reports.record import Absence, Claim, Environment, Judgement, Record, read

LIMIT = 1_000_000  # bytes of a summary; GitHub takes 1 MiB from a step
ANNOTATIONS = 10  # GitHub shows at most this many errors of a step
IN_FULL = 3  # failed checks that are shown in full
ROWS = 50  # of a table
KERNELS = 20  # implementations whose figures have a table
BLOCK = 4_000  # characters of a text that is shown as it is
CELL = 200  # characters of a cell of a table
TAIL = 20  # lines of the log of a run without a verdict
NO_VERDICT = "no verdict"  # the run died, or it was refused

# How a message names a line of the user's own code: "at mine.py, line 12, in attention" or "(mine.py:12)".
_PLACE = re.compile(r"(?:\bat ([^\n,()]+\.py), line |\(([^\n:()]+\.py):)(\d+)")


@dataclass
class Found:
    """What the records of one run, or of several, hold.

    problems: why records could not be read.
    """

    environments: list[Environment] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def verdicts(self) -> list[str]:
        """The verdict of each run. Empty if no run came to its end."""
        return list(dict.fromkeys(claim.verdict for claim in self.claims if claim.verdict))

    @property
    def failures(self) -> list[list[Judgement]]:
        """The failures of each check, dtype and device of an implementation, the worst check first."""
        groups: dict[tuple[str, ...], list[Judgement]] = {}
        for one in self.judgements:
            if one.status == "failed":
                groups.setdefault((one.implementation, one.check, one.dtype, one.device), []).append(one)
        return sorted(groups.values(), key=lambda group: -_badness(worst_of(group)))


def _badness(judgement: Judgement) -> float:
    """How bad a failure is. A failure without a figure, such as a crash, is as bad as an infinite error."""
    worst = judgement.rms if judgement.rho is None else worst_rho(judgement)
    return size("inf" if worst is None else worst)


def worst_of(group: Sequence[Judgement]) -> Judgement:
    """The worst of several judgements. If several are equally bad, it is the first of them."""
    return max(group, key=_badness)


def collect(paths: Iterable[Path]) -> Found:
    """Reads record files. A file that cannot be read is noted as a problem, and raises no error."""
    found = Found()
    for path in paths:
        try:
            for record in read(path):
                _take(found, record)
        except (OSError, ValueError) as error:
            found.problems.append(str(error))
    return found


def _take(found: Found, record: Record) -> None:
    match record:
        case Environment():
            found.environments.append(record)
        case Claim():
            found.claims.append(record)
        case Judgement():
            found.judgements.append(record)
        case Absence():
            found.absences.append(record)


# ------------------------------------------------------------------------------------------------------ the summary


def summary(found: Found, log: str = "", report: str = "") -> str:
    """The summary in Markdown. It has at most `LIMIT` bytes.

    log: what the run printed. Its end is shown if there is no verdict.
    report: the address of the report, if there is one.
    """
    sections = [
        *_verdict(found, log),
        *_causes(found),
        *_failures(found),
        *_figures(found),
        *_rest(found),
        *_origin(found, report),
    ]
    cut = "The summary is cut here. The records hold the rest."
    room = LIMIT - len(cut) - 2
    shown: list[str] = []
    for section in sections:
        room -= len(section.encode(errors="replace")) + 2
        if room < 0:
            shown.append(cut)
            break
        shown.append(section)
    return "\n\n".join(shown) + "\n"


def _verdict(found: Found, log: str) -> Iterator[str]:
    verdicts = found.verdicts
    heads = dict.fromkeys(verdict.partition(":")[0] for verdict in verdicts)
    yield f"## flashproof: {_text('; '.join(heads) if heads else NO_VERDICT)}"
    for verdict in verdicts:
        yield f"**{_text(verdict)}**"
    if verdicts:
        return
    for problem in found.problems:
        yield _text(problem)
    if lines := log.strip().splitlines()[-TAIL:]:
        yield "The last lines of its log:"
        yield _block("\n".join(lines))


def _causes(found: Found) -> Iterator[str]:
    """What is wrong with each implementation, as the command says it at the end of a run."""
    failed = dict.fromkeys(one.implementation for one in found.judgements if one.status == "failed")
    for name in list(failed)[:KERNELS]:
        judgements = [one for one in found.judgements if one.implementation == name]
        yield _block("\n".join(one_screen(name, judgements)))


def _failures(found: Found) -> Iterator[str]:
    groups = found.failures
    if not groups:
        return
    yield "### Failures, the worst first"
    for group in groups[:IN_FULL]:
        yield _block(_told(group))
    several = len({group[0].implementation for group in groups}) > 1
    heads = ["implementation"] * several + ["check", "dtype", "device", "worst", "failures", "the first one says"]
    rows = []
    for group in groups[:ROWS]:
        first, worst = group[0], worst_of(group)
        cells = [_code(first.implementation)] * several
        cells += [_code(first.check), first.dtype, first.device]
        cells += [f"{worst.tensor or ''} {_figure(worst)}".strip(), f"{len(group):,}", _text(_short(_says(first)))]
        rows.append(cells)
    yield _table(heads, rows)
    if rest := len(groups) - len(rows):
        yield f"and {wording.plural(rest, 'more failed check')}"


def _told(group: Sequence[Judgement]) -> str:
    """The worst failure of a check, and the message of the first. Only the first names an answered question."""
    first, worst = group[0], worst_of(group)
    text = wording.failure_block(worst)
    if others := len(group) - 1:
        text += f"\nand {wording.plural(others, 'more failure')} of this check"
        says = _short(_says(first))
        text += f"; the first one says: {says}" if says and first.message != worst.message else ""
    return text


def _says(judgement: Judgement) -> str:
    """The message of a failure in one line, without code."""
    return "; ".join(judgement.message.split("\n\n")[0].splitlines())


def _figure(judgement: Judgement) -> str:
    """The figure that a failure is measured by."""
    if judgement.rho is not None:
        return f"rho {wording.rho(worst_rho(judgement))}"
    return "" if judgement.rms is None else f"rms {wording.number(judgement.rms)}"


def _figures(found: Found) -> Iterator[str]:
    """The largest rho of each tensor and dtype, for each implementation."""
    worst: dict[str, dict[tuple[str, str], Judgement]] = {}
    for one in found.judgements:
        if one.tensor and one.rho is not None and one.status in ("passed", "failed"):
            of_kernel, place = worst.setdefault(one.implementation, {}), (one.tensor, one.dtype)
            if place not in of_kernel or size(worst_rho(one)) > size(worst_rho(of_kernel[place])):
                of_kernel[place] = one
    if not worst:
        return
    yield "### The largest rho"
    yield "rho is the error divided by the bound. Up to 1 passes."
    for name, figures in list(worst.items())[:KERNELS]:
        dtypes = [dtype for dtype in DTYPES if any(dtype == other for _, other in figures)]
        rows = [
            [tensor, *(_cell(figures.get((tensor, dtype))) for dtype in dtypes)]
            for tensor in TENSORS
            if any((tensor, dtype) in figures for dtype in dtypes)
        ]
        yield _table([_code(name), *dtypes], rows)
    if len(worst) > KERNELS:
        yield f"and {wording.plural(len(worst) - KERNELS, 'more implementation')}"


def _cell(judgement: Judgement | None) -> str:
    if judgement is None:
        return ""
    text = wording.rho(worst_rho(judgement))
    return f"**{text}**" if judgement.status == "failed" else text


def _rest(found: Found) -> Iterator[str]:
    """What was refused, what could not run, and which failures are known."""
    lines: Counter[str] = Counter()
    for one in found.judgements:
        if one.status == "refused":
            lines[f"{_code(one.implementation)} refused {one.dtype}: {_text(_short(one.message))}"] += 1
        if one.status == "known defect":
            link = f" ({one.link})" if re.fullmatch(r"https?://[^\s<>()]+", one.link) else ""
            lines[f"{_code(one.implementation)} has a known defect: {_code(one.check)}, {one.dtype}{link}"] += 1
    for absence in found.absences:
        if absence.reason == "not possible here":
            what = " ".join(part for part in (absence.dtype, "on", absence.device) if part)
            lines[f"{_code(absence.implementation)} cannot run here, {what}: {_text(_short(absence.message))}"] += 1
    if not lines:
        return
    yield "### What was not verified"
    told = [f"- {line}" + (f" ({count:,} times)" if count > 1 else "") for line, count in lines.most_common(ROWS)]
    told += [f"- and {len(lines) - ROWS:,} more"] if len(lines) > ROWS else []
    yield "\n".join(told)


def _origin(found: Found, report: str) -> Iterator[str]:
    """Where the figures come from, and where the report is."""
    for environment in found.environments[:KERNELS]:
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
        yield f"{_code(environment.command)} on {_text(f'{environment.device}: {versions}')}"
    if words := without_a_gpu(found.environments, found.claims):
        yield _text(words)
    if found.verdicts:
        for problem in found.problems:
            yield _text(f"records that were left out: {problem}")
    if re.fullmatch(r"https?://[^\s<>()]+", report):
        yield f"[The whole report, with the records and the JUnit XML]({report})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain(text: str) -> str:
    """A text without control characters."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


def _short(text: str, most: int = CELL) -> str:
    words = " ".join(_plain(text).split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


def _text(words: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>|~#&])", r"\\\1", _short(words, BLOCK))


def _code(words: str) -> str:
    """A text as code in one line, also for a cell of a table."""
    text = _short(words, BLOCK)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def _block(text: str) -> str:
    """A text as a block of code, as it is."""
    text = _plain(text)
    text = text if len(text) <= BLOCK else f"{text[:BLOCK]}\n..."
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


# -------------------------------------------------------------------------------------------------- the annotations


def annotations(found: Found, log: str = "", workspace: Path | None = None) -> Iterator[str]:
    """The annotations: for each line of source with failures, the worst of them. At most `ANNOTATIONS`.

    workspace: the root of the repository. A file that is not in it gets no annotation of its own.
    """
    root = (workspace or Path.cwd()).resolve()
    if not found.verdicts:
        lines = found.problems + log.strip().splitlines()[-1:]
        yield _error("flashproof", f"{NO_VERDICT}: {'; '.join(lines)}" if lines else NO_VERDICT)
    places: dict[tuple[str, int] | str, list[list[Judgement]]] = {}
    for group in found.failures:
        place = place_of(worst_of(group), root) or group[0].implementation
        places.setdefault(place, []).append(group)
    for place, groups in list(places.items())[: ANNOTATIONS - 1]:
        worst = worst_of(groups[0])
        about = (worst.tensor or worst.check, worst.dtype, _figure(worst))
        title = f"flashproof: {', '.join(part for part in about if part)}"
        words = _told(groups[0])
        if others := len(groups) - 1:
            words += f"\nand {wording.plural(others, 'more failed check')}"
        yield _error(title, words, place if isinstance(place, tuple) else None)


def place_of(judgement: Judgement, root: Path) -> tuple[str, int] | None:
    """The file (relative to the root of the repository) and the line of a failure.

    This is the line that the message names, or else the line that defines the kernel. None if the file is not in the
    repository.
    """
    for match in _PLACE.finditer(judgement.message):
        if inside := _inside(Path(match[1] or match[2]), root):
            return inside, int(match[3])
    place, _, attribute = judgement.implementation.rpartition(":")
    for path in _files(place):
        if inside := _inside(path, root):
            return inside, _line(path, attribute)
    return None


def sarif_log(found: Found, workspace: Path | None = None) -> dict[str, Any]:
    """The failures as a SARIF log. workspace: as in `annotations`."""
    root = (workspace or Path.cwd()).resolve()
    groups = [sorted(group, key=_badness, reverse=True) for group in found.failures]
    versions = [environment.versions.get("flashproof", "") for environment in found.environments]
    return sarif.log(
        groups,
        [place_of(group[0], root) for group in groups],
        sentences(),
        ended=bool(found.verdicts),
        version=versions[0] if versions else "",
    )


def _files(place: str) -> Iterator[Path]:
    """Where the source of a target may be: the file that it names, or the file of the module that it names."""
    if place.endswith(".py"):
        yield Path(place)
    elif place:
        module = Path(*place.split("."))
        for folder in (Path(), Path("src")):
            yield folder / module.with_suffix(".py")
            yield folder / module / "__init__.py"


def _inside(path: Path, root: Path) -> str:
    """The path of a file, relative to the root of the repository. Empty if the repository has no such file."""
    whole = path.resolve()
    return whole.relative_to(root).as_posix() if whole.is_file() and whole.is_relative_to(root) else ""


def _line(path: Path, attribute: str) -> int:
    """The line that defines an attribute of a module, or 1. This reads the module and does not run it."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return 1
    line = 1
    for name in attribute.split("."):
        defined = [node for node in body if name in _names(node)]
        if not defined:
            break
        line, body = defined[-1].lineno, getattr(defined[-1], "body", [])
    return line


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
    return []


def _error(title: str, words: str, place: tuple[str, int] | None = None) -> str:
    """A workflow command that annotates a line."""
    fields = {"file": place[0], "line": str(place[1])} if place else {}
    fields["title"] = title
    told = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in fields.items())
    return f"::error {told}::{_escaped(_plain(words)[:BLOCK])}"


def _escaped(text: str, further: str = "") -> str:
    """A text as a workflow command takes it."""
    for letter in "%\r\n" + further:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


# ------------------------------------------------------------------------------------------------- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the summary and prints the annotations. Returns the exit status, which is 0."""
    parser = argparse.ArgumentParser(
        prog="python -m flashproof.reports.github",
        description="Writes a summary of a run in Markdown, and prints annotations for GitHub Actions.",
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS", help="record files of a run")
    parser.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        default=os.environ.get("GITHUB_STEP_SUMMARY") or None,
        help="where the summary is appended; $GITHUB_STEP_SUMMARY if it is set, and otherwise it is printed",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the run printed, for a run without a verdict")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="where the failures are written as SARIF")
    parser.add_argument("--report", default="", metavar="URL", help="where the report is, for a link")
    options = parser.parse_args(arguments)
    found = collect(options.records)
    log = options.log.read_text(errors="replace") if options.log and options.log.is_file() else ""
    text = summary(found, log, options.report)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    if options.summary:
        with options.summary.open("a", encoding="utf-8", errors="replace") as file:
            file.write(text)
    else:
        print(text)
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    for line in annotations(found, log, workspace):
        print(line)
    if options.sarif:
        options.sarif.write_text(json.dumps(sarif_log(found, workspace), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
