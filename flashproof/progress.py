"""What the command `flashproof` shows while it verifies, and what it says at the end."""

import os
import sys
import time
from collections import Counter
from types import TracebackType
from typing import IO

import pytest
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flashproof import quick, summary
from flashproof.reports import wording
from flashproof.reports.evidence import DTYPES, TENSORS, size, worst_rho
from flashproof.reports.record import Judgement, Record
from flashproof.running import Watcher

INTERVAL = 10.0  # seconds between two lines of progress where the output is no terminal
REFRESH = 0.1  # seconds between two pictures of the bar
WIDTH = 140  # where the output is no terminal
SHOWN = 10  # failed checks that are listed for each implementation


class Display(Watcher):
    """Shows a run: a bar on a terminal, otherwise a line from time to time; each implementation's first failure."""

    def __init__(self, command: str, output: IO[str] | None = None) -> None:
        # pytest takes the standard output away while a kernel runs. A copy of it stays.
        self.output = output or os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="replace")
        width = None if self.output.isatty() else WIDTH
        self.console = Console(file=self.output, highlight=False, soft_wrap=True, width=width)
        self.command = command
        self.judged: dict[tuple[str, str, str], Judgement] = {}  # the worst by implementation, tensor, dtype
        self.failed: dict[tuple[str, str, str], Judgement] = {}  # the first by implementation, check, dtype
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []  # of checks that ended otherwise than by a finding
        self.total = 0
        self.late = 0  # checks that a quick run had no time for
        self.spoken = self.drawn = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("checks, {task.fields[words]}"),
            TimeElapsedColumn(),
            console=self.console,
            auto_refresh=False,  # by a thread, which would not survive the forks of workers
            transient=True,
        )
        self.task = self.bar.add_task("verifying", total=None, words="")

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        self.output.flush()

    # ------------------------------------------------------------------------------------------------ while it runs

    def begun(self, checks: int) -> None:
        """Says what is verified."""
        if self.total or not self.session:
            return
        self.total = checks
        selection = self.session.selection
        able = [target for target in selection.targets if target.missing is None]
        names = list(dict.fromkeys(target.name for target in able))
        places = ", ".join(dict.fromkeys(target.device for target in able)) or "no device"
        dtypes = ", ".join(dtype for dtype in DTYPES if any(target.dtype == dtype for target in able))
        what = names[0] if len(names) == 1 else wording.plural(len(names), "implementation")
        self.console.print(f"{what}: {wording.plural(checks, 'check')}, {dtypes}, on {places}", markup=False)
        if self.console.is_terminal:
            self.bar.start()
            self.bar.update(self.task, total=checks)

    def recorded(self, record: Record) -> None:
        """Notes a verdict. Shows the first failure of an implementation at once."""
        if not isinstance(record, Judgement):
            return
        place = record.implementation, record.tensor or "", record.dtype
        if record.tensor and record.rho is not None and record.status in ("passed", "failed"):
            before = self.judged.get(place)
            if before is None or size(worst_rho(record)) > size(worst_rho(before)):
                self.judged[place] = record
        if record.status == "failed":
            is_first = all(name != record.implementation for name, _, _ in self.failed)
            self.failed.setdefault((record.implementation, record.check, record.dtype), record)
            if is_first:
                self.console.print(Text(f"\n{wording.failure_block(record)}\n", style="red"))
        self._draw()

    def ended(self, report: pytest.TestReport) -> None:
        """Counts a check."""
        xfailed = getattr(report, "wasxfail", None) is not None and report.outcome == "skipped"
        self.outcomes["known defect" if xfailed else str(report.outcome)] += 1
        known = any(f"{check.partition('/')[2]}[{name}-{dtype}-" in report.nodeid for name, check, dtype in self.failed)
        if report.outcome == "failed" and (report.when != "call" or not known):
            self.errors.append(report.longreprtext)
        self.late += quick.LATE in str(report.longrepr)
        self.bar.advance(self.task)
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if self.console.is_terminal and now - self.drawn > REFRESH:
            self.drawn = now
            self.bar.update(self.task, words=self._words(), refresh=True)
        elif not self.console.is_terminal and now - self.spoken > INTERVAL:
            self.spoken = now
            done = sum(self.outcomes.values())
            self.console.print(f"{done} of {self.total} checks, {self._words()}", markup=False)
            self.output.flush()

    def _words(self) -> str:
        worst = max(self.judged.values(), key=lambda judged: size(worst_rho(judged)), default=None)
        largest = f", largest rho {_rho(worst)} ({worst.tensor}, {worst.dtype})" if worst else ""
        return f"{wording.plural(len(self.failed), 'failure')}{largest}"

    # ------------------------------------------------------------------------------------------------ at its end

    def conclude(self, status: int) -> None:
        """Says what came of the run, and where its records and report are."""
        self.bar.stop()
        if self.session is None:
            return
        for error in self.errors:
            self.console.print(error, style="red", markup=False)
        if status == pytest.ExitCode.INTERRUPTED:
            self.console.print("broken off; what was found so far:", style="yellow")
        names = list(dict.fromkeys(name for name, _, _ in [*self.judged, *self.failed]))
        for name in names:
            self._conclude(name)
        for line in summary.last_lines(self.session):
            self.console.print(line.text, style=line.color or None, markup=False)
        if self.late:
            late = wording.plural(self.late, "check")
            self.console.print(f"{late} did not begin before the time of a quick run was over", style="yellow")
        self._count(status)
        for line in summary.places(self.session):
            self.console.print(line.text, style=line.color or None, markup=False)

    def _conclude(self, name: str) -> None:
        figures = {(tensor, dtype): one for (of, tensor, dtype), one in self.judged.items() if of == name}
        dtypes = [dtype for dtype in DTYPES if any(dtype == other for _, other in figures)]
        if figures:
            table = Table(box=box.SIMPLE, title=f"{name}: the largest rho", title_justify="left", title_style="")
            for column in ("", *dtypes):
                table.add_column(column, justify="right" if column else "left")
            for tensor in TENSORS:
                if any((tensor, dtype) in figures for dtype in dtypes):
                    table.add_row(tensor, *(_cell(figures.get((tensor, dtype))) for dtype in dtypes))
            self.console.print(table)
        failures = [one for (of, _, _), one in self.failed.items() if of == name]
        for one in failures[:SHOWN]:
            told = f"{one.tensor} rho {_rho(one)}" if one.rho is not None else one.message.partition("\n")[0]
            self.console.print(f"failed: {one.check}, {one.dtype}: {told}", style="red", markup=False)
        if len(failures) > SHOWN:
            self.console.print(f"and {len(failures) - SHOWN} more", style="red", markup=False)

    def _count(self, status: int) -> None:
        words = {"passed": "passed", "failed": "failed", "known defect": "with a known defect", "skipped": "left out"}
        counts = ", ".join(f"{self.outcomes[key]} {said}" for key, said in words.items() if self.outcomes[key])
        is_quick = self.session is not None and self.session.clock is not None
        verdict = "verified" if status == 0 else "not verified"
        if is_quick and status == 0:
            verdict = "no fault found by a quick run"
        self.console.print(
            f"{verdict}: {wording.plural(sum(self.outcomes.values()), 'check')}{': ' if counts else ''}{counts}",
            style="green" if status == 0 else "red",
            markup=False,
        )


class CaseDisplay(Display):
    """Shows a single case: the verdict on each tensor, by each check, also where it passes."""

    def __init__(self, command: str, output: IO[str] | None = None) -> None:
        super().__init__(command, output)
        self.verdicts: list[Judgement] = []

    def recorded(self, record: Record) -> None:
        """Keeps every verdict."""
        super().recorded(record)
        if isinstance(record, Judgement):
            self.verdicts.append(record)

    def _conclude(self, name: str) -> None:
        """A line for each check and tensor: the worst of its verdicts."""
        worst: dict[tuple[str, str, str], Judgement] = {}
        for one in self.verdicts:
            place = one.check, one.dtype, one.tensor or ""
            if one.implementation == name and (place not in worst or _severity(one) > _severity(worst[place])):
                worst[place] = one
        several = len({dtype for _, dtype, _ in worst}) > 1
        table = Table(box=box.SIMPLE, title=name, title_justify="left", title_style="")
        for column in ("check", "tensor", "rho", "bias", "worst element", ""):
            table.add_column(column, justify="right" if column in ("rho", "bias") else "left")
        for (check, dtype, tensor), one in worst.items():
            table.add_row(
                f"{check}, {dtype}" if several else check,
                tensor,
                _cell(one) if one.rho is not None else "",
                "" if one.bias is None else f"{wording.number(one.bias)} {wording.bias_unit(one.dtype)}",
                escape(_element(one)),
                f"[red]{one.status}[/]" if one.status == "failed" else one.status,
            )
        self.console.print(table)


def _rho(judgement: Judgement) -> str:
    return wording.rho(worst_rho(judgement))


def _cell(judgement: Judgement | None) -> str:
    if judgement is None:
        return ""
    return f"[red]{_rho(judgement)}[/]" if judgement.status == "failed" else _rho(judgement)


def _element(judgement: Judgement) -> str:
    worst = judgement.worst
    if worst is None:
        return judgement.message.partition("\n")[0]
    got, exact = wording.told_apart(worst.got, worst.exact)
    return f"{list(worst.index)}: got {got}, exact {exact}"


def _severity(judgement: Judgement) -> tuple[bool, float]:
    return judgement.status == "failed", size(worst_rho(judgement))
