"""What the command `flashproof` shows while it verifies, and at its end."""

import os
import sys
import time
from functools import lru_cache
from types import TracebackType
from typing import IO

import pytest
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flashproof import summary
from flashproof.cases import OF_DOUT, Case
from flashproof.reports import wording
from flashproof.reports.causes import capped, capped_rho, one_screen
from flashproof.reports.evidence import DTYPES, TENSORS, size, worst_rho
from flashproof.reports.record import Judgement, Record
from flashproof.running import Watcher

INTERVAL = 10.0  # seconds between two lines of progress where the output is no terminal
REFRESH = 0.1  # seconds between two pictures of the bar
WIDTH = 140  # where the output is no terminal
LEGEND = """\
rho is an error divided by the largest one that the claimed arithmetic can make. Up to 1 passes.
ulps: the largest error on normal inputs and in cases that failed, in units in the last place of the largest number of
its tensor. A dash stands where there is no figure."""


class Display(Watcher):
    """Shows a run: a bar on a terminal or a line from time to time, and the first failure of each implementation."""

    def __init__(self, command: str, output: IO[str] | None = None) -> None:
        # pytest replaces the standard output while a kernel runs. This copy of it stays.
        self.output = output or os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="replace")
        width = None if self.output.isatty() else WIDTH
        self.console = Console(file=self.output, highlight=False, soft_wrap=True, width=width)
        self.command = command
        self.judged: dict[tuple[str, str, str], Judgement] = {}  # the worst by implementation, tensor, dtype
        self.ulps: dict[tuple[str, str, str, str], float | str] = {}  # the largest error, likewise and by status
        self.failed: dict[str, set[tuple[str, str]]] = {}  # checks and dtypes, by implementation
        self.judgements: dict[str, list[Judgement]] = {}  # by implementation
        self.total = 0
        self.spoken = self.drawn = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("checks, {task.fields[words]}"),
            TimeElapsedColumn(),
            console=self.console,
            auto_refresh=False,  # it uses a thread, which would not survive the forks of workers
            transient=True,
        )
        self.task = self.bar.add_task("verifying", total=None, words="")

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
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
        places = ", ".join(dict.fromkeys(target.device for target in able))
        dtypes = [dtype for dtype in DTYPES if any(target.dtype == dtype for target in able)]
        counted = f"counted once for each of {', '.join(dtypes)}" if len(dtypes) > 1 else "".join(dtypes)
        if not able:
            return
        what = names[0] if len(names) == 1 else wording.plural(len(names), "implementation")
        self.console.print(f"{what}: {wording.plural(checks, 'check')}, {counted}, on {places}", markup=False)
        if self.console.is_terminal:
            self.bar.start()
            self.bar.update(self.task, total=checks)

    def recorded(self, record: Record) -> None:
        """Notes a verdict. Shows the first failure of an implementation at once."""
        if not isinstance(record, Judgement):
            return
        self.judgements.setdefault(record.implementation, []).append(record)
        place = record.implementation, record.tensor or "", record.dtype
        if record.tensor and record.rho is not None and record.status in ("passed", "failed"):
            before = self.judged.get(place)
            if before is None or size(worst_rho(record)) > size(worst_rho(before)):
                self.judged[place] = record
            own = *place, record.status
            is_larger = size(record.ulps) > size(self.ulps.get(own))
            # In other cases an error of many ulps may be right, for example where scores are large.
            if record.ulps is not None and is_larger and (record.status == "failed" or _is_normal(record.case)):
                self.ulps[own] = record.ulps
        if record.status == "failed":
            is_first = record.implementation not in self.failed
            self.failed.setdefault(record.implementation, set()).add((record.check, record.dtype))
            if is_first:
                self.console.print(Text(f"\n{wording.failure_block(record)}\n", style="red"))
        self._draw()

    def ended(self, report: pytest.TestReport) -> None:
        """Counts a check."""
        self.bar.advance(self.task)
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if self.console.is_terminal and now - self.drawn > REFRESH:
            self.drawn = now
            self.bar.update(self.task, words=self._words(), refresh=True)
        elif not self.console.is_terminal and now - self.spoken > INTERVAL:
            self.spoken = now
            done = sum(self.session.outcomes.values()) if self.session else 0
            self.console.print(f"{done} of {self.total} checks, {self._words()}", markup=False)
            self.output.flush()

    def _stop(self) -> None:
        """Removes the bar. A bar that was never started would leave an empty line."""
        if self.bar.live.is_started:
            self.bar.stop()

    def _words(self) -> str:
        worst = max(self.judged.values(), key=lambda judged: size(worst_rho(judged)), default=None)
        largest = f", largest rho {_rho(worst)} ({worst.tensor}, {worst.dtype})" if worst else ""
        return f"{wording.plural(sum(map(len, self.failed.values())), 'failed check')}{largest}"

    # ------------------------------------------------------------------------------------------------ at its end

    def conclude(self, status: int) -> None:
        """Shows the result of the run, and where its records and report are."""
        self._stop()
        if self.session is None or status == pytest.ExitCode.USAGE_ERROR:
            return
        for error in self.session.errors:
            self.console.print(error, style="red", markup=False)
        if status == pytest.ExitCode.INTERRUPTED:
            self.console.print("interrupted; this was found so far:", style="yellow")
        names = list(dict.fromkeys([*(name for name, _, _ in self.judged), *self.failed]))
        verdict = summary.verdict(self.session)
        if names and not self.failed:
            self._print(verdict)
        for name in names:
            self._conclude(name)
        for line in (*summary.last_lines(self.session), *summary.places(self.session), verdict):
            self._print(line)

    def _print(self, line: summary.Line) -> None:
        self.console.print(line.text, style=line.color or None, markup=False)

    def _conclude(self, name: str) -> None:
        if name in self.failed:
            for line in one_screen(name, self.judgements[name]):
                self.console.print(line, style="red", markup=False)
        figures = {(tensor, dtype): one for (of, tensor, dtype), one in self.judged.items() if of == name}
        dtypes = [dtype for dtype in DTYPES if any(dtype == other for _, other in figures)]
        if figures:
            title = f"{name}: the largest rho, and the largest error in ulps"
            table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="")
            for column in ("", *(f"{dtype}\nrho   ulps" for dtype in dtypes)):
                table.add_column(column, justify="right" if column else "left")
            shown = [tensor for tensor in TENSORS if any((tensor, dtype) in figures for dtype in dtypes)]
            for tensor in shown:
                found = [figures.get((tensor, dtype)) for dtype in dtypes]
                table.add_row(tensor, *[f"{_cell(one)} {self._ulps(one):>6}" for one in found])
            self.console.print(table)
            if len({of for of, _, _ in self.judged}) == 1:
                self.console.print(LEGEND, markup=False)
            if (
                name not in self.failed and len({of for of, _, _ in self.judged}) == 1
            ):  # otherwise the failures name their cases
                self.console.print("The cases with the largest rho:")
                for tensor in shown:
                    of_tensor = [one for (of, _), one in figures.items() if of == tensor]
                    worst = max(of_tensor, key=lambda one: size(worst_rho(one)))
                    self.console.print(f"  {tensor:4} {worst.case}", markup=False, soft_wrap=True)

    def _ulps(self, worst: Judgement | None) -> str:
        """The largest error in ulps of a tensor and dtype. A dash if it failed and no case that failed has a figure."""
        if worst is None:
            return capped(None)
        place = worst.implementation, worst.tensor or "", worst.dtype
        own, passed = (self.ulps.get((*place, status)) for status in (worst.status, "passed"))
        return capped(own if own is None else max(own, passed, key=size))


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


@lru_cache(8)  # the tensors of a case come together
def _is_normal(line: str) -> bool:
    """Whether a case has normal numbers that differ from one another, and every query sees several keys."""
    case, plain = Case.parse(line), Case()
    numbers = ("family", "magnitude", "shift", "values", "douts", "scale", "mask", "blocks", "dropout")
    is_plain = all(getattr(case, name) == getattr(plain, name) for name in numbers)
    is_apart = not {*case.layouts} & {"expanded", *OF_DOUT} and not case.sharing.startswith("one-")
    return is_plain and is_apart and case.keys > 1


def _rho(judgement: Judgement) -> str:
    return capped_rho(worst_rho(judgement))


def _cell(judgement: Judgement | None) -> str:
    if judgement is None:
        return "–"
    return f"[red]{_rho(judgement)}[/]" if judgement.status == "failed" else _rho(judgement)


def _element(judgement: Judgement) -> str:
    worst = judgement.worst
    if worst is None:
        return judgement.message.partition("\n")[0]
    got, exact = wording.told_apart(worst.got, worst.exact)
    return f"{list(worst.index)}: got {got}, exact {exact}"


def _severity(judgement: Judgement) -> tuple[bool, float]:
    return judgement.status == "failed", size(worst_rho(judgement))
