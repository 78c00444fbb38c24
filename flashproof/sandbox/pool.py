"""The pool: the worker processes of a run, seen from its main process.

External kernels run in workers, so that whatever a kernel does to its process is one failed case. The main process
collects the checks, hands them out and keeps the records; it never calls a kernel. A worker runs the checks of one
external kernel, or of the catalogue. When a worker dies, or is ended because a call did not return, another worker goes
on with the next case.

Workers are forks of the main process, which takes milliseconds. A CUDA device does not survive a fork, so where there
is one, each worker is a new pytest process.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import msgspec
import pytest
import torch

from flashproof.reports.record import Record
from flashproof.sandbox.journal import SPOILT
from flashproof.sandbox.memory import available_memory
from flashproof.sandbox.worker import Worker

TICK = 0.25  # seconds between two looks at workers that are silent
SILENCE = 10  # time limits that may pass without a message while no kernel runs: the oracles of a long case
PATIENCE = 4  # time limits by the clock, for a kernel that works but waits for the processor
DYING = 3.0  # seconds from the end of a process' connection to its own end; a GPU makes it slow
DEATHS = 3  # of one check, after which the rest of its cases is left out
HANGS = 3  # of one implementation, after which its other checks are left out; each one quarters the time limit
MEMORY = 2**32  # bytes that a worker may take, if the machine has them
SHARE = 0.25  # of a GPU's memory, for each worker, at least
VERIFIER = Path(__file__).resolve().parents[1]  # the folder of the package


@dataclass(eq=False)
class Job:
    """A check of one implementation, dtype and device, for a worker to run."""

    item: pytest.Item
    owner: str  # the external kernel, or "" for the whole catalogue: a worker serves one owner
    cases: list[str]
    after: int = -1  # the check goes on behind this case
    reached: int = -1  # the last case of the list that a kernel was given
    current: str = ""  # the case that a kernel was given last, as a line
    deaths: int = 0
    blocks: list[str] = field(default_factory=list)  # failures of workers that died, in words


@dataclass(frozen=True)
class Place:
    """Where a worker was when it stopped. `line` is a line of the kernel's Python, if one was running."""

    line: str = ""  # "mine.py, line 12, in attention"
    in_native_code: bool = False  # the stack is known, and holds no line of the kernel's Python
    last_words: str = ""  # what the process printed last, where no stack is known

    def __str__(self) -> str:
        if self.line:
            return f", at {self.line}"
        if self.in_native_code:
            return ", while no line of its Python ran"
        return f"; its last words: {self.last_words}" if self.last_words else ""


class Run(Protocol):
    """What the pool needs of the run that it works for."""

    name: str

    def limit(self, item: pytest.Item, *, first: bool) -> float:
        """Seconds for a call of a check's kernel. first: no call of this kernel has returned yet."""

    def owner(self, item: pytest.Item) -> str:
        """The external kernel of a check, or "" for one of the catalogue."""

    def cases(self, item: pytest.Item) -> list[str]:
        """The case lines of a check."""

    def left_out(self, item: pytest.Item) -> str:
        """Why a check is not to be run, after what the others have found; empty if it is to be run."""

    def record(self, record: Record) -> None:
        """Takes a record."""

    def fail(self, item: pytest.Item, case: str, message: str) -> str:
        """Records a failure of a check's case. Returns the failure in words."""

    def become_worker(self, worker: Worker) -> None:
        """Is called in a fork, which is a worker from now on."""


class WorkerProcess:
    """The main process' side of a worker."""

    def __init__(self, owner: str, start: Callable[[Connection, int], "int | subprocess.Popen[bytes]"]) -> None:
        self.owner = owner
        self.job: Job | None = None
        self.calling = False
        self.since = time.monotonic()  # the last message
        self.worked: float | None = None  # processor seconds, read a little later
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = Pipe()
        self.process = start(theirs, self.log.fileno())
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process, and of the group of all processes that it starts."""
        return self.process if isinstance(self.process, int) else self.process.pid

    def status(self) -> int | None:
        """The exit status, or minus the signal that ended the process, or None while it lives."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        if self._status is None:
            pid, status = os.waitpid(self.process, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    _status: int | None = None

    def begin(self, job: Job) -> None:
        """Gives the worker a job."""
        self.job, self.calling, self.since, self.worked, job.current = job, False, time.monotonic(), None, ""
        with suppress(OSError):  # the worker has died; the pool notices it next
            self.connection.send((job.item.nodeid, job.after))

    def end(self, patience: float = 5.0) -> None:
        """Ends the process and all that it started."""
        deadline = time.monotonic() + patience
        while self.status() is None and time.monotonic() < deadline:
            os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        self.log.close()

    def place(self, check: Path) -> Place:
        """Where the process was, from the stack that faulthandler wrote. check: the file of the check.

        The line is the innermost one that belongs to no installed package.
        """
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        stack = text.rpartition("most recent call first")[2]
        frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
        for file, line, function in frames:
            path = Path(file).resolve()
            if path.is_relative_to(VERIFIER) or path == check.resolve():
                break  # the verifier called the kernel from here
            if not (file.startswith("<") or "site-packages" in file or "/lib/python" in file):
                shown = os.path.relpath(file) if file.startswith(os.getcwd()) else file
                return Place(line=f"{shown}, line {line}, in {function}")
        if frames:
            return Place(in_native_code=True)
        said = [line for line in text.splitlines() if line.strip()]
        return Place(last_words=said[-1][:300] if said else "")

    def is_overdue(self, seconds: float) -> bool:
        """Whether a silent worker has used up its time.

        What counts is processor time, its own and that of all that it started, since a compiler may wait for its turn
        on a busy machine. Time by the clock counts if it does next to nothing, and if it takes far too long.
        """
        silent = time.monotonic() - self.since
        if self.worked is None and silent > min(1.0, seconds / 4):
            self.worked = _processor_seconds(self.pid)
        if self.worked is None or silent < seconds:
            return False
        worked = _processor_seconds(self.pid) - self.worked
        return worked > 0.9 * seconds or worked < 0.05 * silent or silent > PATIENCE * seconds


class Pool:
    """Runs items in workers."""

    def __init__(
        self, session: pytest.Session, items: Sequence[pytest.Item], run: Run, *, count: int, spawns: bool
    ) -> None:
        """items: of the session. count: workers at a time. spawns: each worker is a new pytest process and no fork."""
        self.session, self.config, self.run_of, self.spawns = session, session.config, run, spawns
        self.jobs = deque(Job(item, run.owner(item), run.cases(item)) for item in items)
        self.slots: list[WorkerProcess | None] = [None] * max(1, min(count, len(self.jobs)))
        self.first: dict[str, Job] = {}  # of an owner, the job that its others wait for: they may have nothing to do
        self.ended: set[str] = set()  # owners whose first job has ended
        self.hangs: dict[str, int] = {}
        self.slowest: dict[str, float] = {}  # of an owner, the seconds of its longest call that returned
        self.memory = min(available_memory() // (len(self.slots) + 1), MEMORY)

    def run(self) -> None:
        """Works until every item is reported."""
        if not self.spawns:
            # The first backward imports sympy, which takes half a second: once here, and not in each fork.
            leaf = torch.ones(1, requires_grad=True)
            torch.autograd.grad(leaf * 2.0, leaf, torch.ones(1))
        try:
            while True:
                for slot, worker in enumerate(self.slots):
                    if worker is None or worker.job is None:
                        self._give_work(slot)
                busy = [worker for worker in self.slots if worker is not None and worker.job is not None]
                if not busy:
                    return
                heard = wait([worker.connection for worker in busy], TICK)
                for worker in busy:
                    if worker.connection in heard:
                        self._hear(worker)
                    if worker.job is not None:
                        self._look_after(worker)
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            for worker in self.slots:
                if worker is not None:
                    worker.end()

    def _give_work(self, slot: int) -> None:
        worker = self.slots[slot]
        while self.jobs:
            job = self._next_job(worker)
            if reason := self._left_out(job):
                self.jobs.remove(job)
                if job.blocks:  # its worker died before: the check has failed already
                    self._report(job, "failed", "\n\n".join(job.blocks))
                else:
                    self._report(job, "skipped", (str(job.item.path), None, f"Skipped: {reason}"))
                continue
            if worker is None or worker.owner != job.owner:
                if worker is not None:
                    worker.end()
                worker = self.slots[slot] = WorkerProcess(job.owner, self._spawn if self.spawns else self._fork)
            if self._waits(job):
                return  # the worker starts meanwhile
            self.jobs.remove(job)
            if job.owner:
                self.first.setdefault(job.owner, job)
            worker.begin(job)
            return

    def _left_out(self, job: Job) -> str:
        if self.hangs.get(job.owner, 0) >= HANGS:
            return f"not run: {HANGS} calls of {job.owner} did not return"
        return self.run_of.left_out(job.item)

    def _waits(self, job: Job) -> bool:
        """Whether the first check of an external kernel is still at work."""
        return job.owner in self.first and job.owner not in self.ended

    def _next_job(self, worker: WorkerProcess | None) -> Job:
        """A job of the worker's owner if one is left.

        Jobs with cases that no other worker has at the moment come first: two workers with the same cases would compute
        the same exact results, and whoever comes later finds them.
        """
        ready = [job for job in self.jobs if not self._waits(job)] or list(self.jobs)
        of_owner = [job for job in ready if worker is not None and job.owner == worker.owner]
        waiting = of_owner or [job for job in ready if job.owner == ready[0].owner]
        at_work = [other.job.cases for other in self.slots if other is not None and other.job is not None]
        return next((job for job in waiting if job.cases not in at_work), waiting[0])

    def _hear(self, worker: WorkerProcess) -> None:
        """Takes what a worker has sent so far."""
        while worker.job is not None:
            try:
                if not worker.connection.poll():
                    return
                kind, content = worker.connection.recv()
            except Exception:  # the connection has ended, or a damaged process did not finish a message
                time.sleep(0.05)  # the connection closes a moment before the process is gone
                lives, deadline = worker.status() is None, time.monotonic() + DYING
                while worker.status() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                status = worker.status()
                if lives and (status is None or (status >= 0 and status != SPOILT)):
                    self._lose(worker, "the process closed the files that it was given")
                return
            self._take(worker, worker.job, kind, content)

    def _take(self, worker: WorkerProcess, job: Job, kind: str, content: object) -> None:
        silent, worker.since, worker.worked = time.monotonic() - worker.since, time.monotonic(), None
        match kind:
            case "record":
                self.run_of.record(msgspec.json.decode(str(content), type=Record))
            case "given":
                worker.calling, job.current = True, str(content)
                job.reached = job.cases.index(job.current) if job.current in job.cases else job.reached
            case "returned":
                worker.calling = False
                self.slowest[job.owner] = max(self.slowest.get(job.owner, 0.0), silent)
            case "report":
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
                if report.when == "call" and job.deaths:
                    told = [report.longreprtext] if report.outcome == "failed" else []
                    report.outcome, report.longrepr = "failed", "\n\n".join(job.blocks + told)
                self.config.hook.pytest_runtest_logreport(report=report)
            case "done":
                worker.job = None
                self.ended.add(job.owner)
                if content:  # it has lost its device: the next check gets another worker
                    worker.end()
                    self.slots[self.slots.index(worker)] = None

    def _look_after(self, worker: WorkerProcess) -> None:
        """Ends a worker whose time is up, and accounts for one that died."""
        job = worker.job
        assert job is not None
        if (status := worker.status()) is not None:
            self._hear(worker)
            if worker.job is not None:
                self._lose(worker, _how(status, worker.calling), status=status)
            return
        hangs = self.hangs.get(job.owner, 0)
        seconds = self.run_of.limit(job.item, first=job.owner not in self.slowest and not hangs)
        if hangs:  # but never less than four times the slowest call
            seconds = min(seconds, max(seconds / 4**hangs, 4 * self.slowest.get(job.owner, 0.0)))
        if not worker.calling:
            seconds = SILENCE * self.run_of.limit(job.item, first=False)
        if not worker.is_overdue(seconds):
            return
        os.kill(worker.pid, signal.SIGUSR1)  # faulthandler writes the stack, whoever holds the interpreter's lock
        time.sleep(0.1)
        self.hangs[job.owner] = hangs + 1
        allowed = f"no answer within {seconds:g} s" if worker.calling else f"no sign of life for {seconds:g} s"
        self._lose(worker, f"{allowed} (--time-limit SECONDS sets another limit)")

    def _lose(self, worker: WorkerProcess, how: str, *, status: int = 0) -> None:
        """A worker is gone. Its case has failed; its check goes on behind this case, in another worker."""
        job = worker.job
        assert job is not None
        place = worker.place(job.item.path)
        message = f"{how}{place}"
        if status < 0 and place.in_native_code:
            message += ": in its backward, or afterwards in memory that it had damaged"
        worker.end()
        worker.job = None
        self.slots[self.slots.index(worker)] = None
        self.ended.add(job.owner)
        job.deaths += 1
        if status != SPOILT:  # such a worker has recorded the failure itself
            job.blocks.append(self.run_of.fail(job.item, job.current, message))
        known = job.reached > job.after or not job.current  # whether it is known where to go on
        if known and job.reached + 1 < len(job.cases) and job.deaths < DEATHS:
            job.after = job.reached
            self.jobs.appendleft(job)
        else:
            rest = len(job.cases) - job.reached - 1 if known else 0
            left = [f"the other {rest} cases of this check were left out"] if rest else []
            self._report(job, "failed", "\n\n".join(job.blocks + left))

    def _report(self, job: Job, outcome: Literal["failed", "skipped"], words: str | tuple[str, None, str]) -> None:
        report = pytest.TestReport(
            nodeid=job.item.nodeid,
            location=job.item.location,
            keywords={},
            outcome=outcome,
            longrepr=words,  # type: ignore[arg-type]
            when="call",
        )
        self.config.hook.pytest_runtest_logreport(report=report)

    # ------------------------------------------------------------------------------------------- starting a worker

    def _fork(self, connection: Connection, log: int) -> int:
        with warnings.catch_warnings():
            # Python warns of a fork while threads run. They are NumPy's, which wait for work.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            self._live(connection, log)
        return pid

    def _live(self, connection: Connection, log: int) -> NoReturn:
        """The life of a forked worker."""
        status = 1
        try:
            os.setsid()
            capture = self.config.pluginmanager.getplugin("capturemanager")
            if capture:
                capture.stop_global_capturing()  # its output goes into files of its own
            os.dup2(log, 1)
            os.dup2(log, 2)
            if capture:
                capture.start_global_capturing()
            if self.config.pluginmanager.has_plugin("terminalreporter"):
                self.config.pluginmanager.unregister(name="terminalreporter")
            worker = Worker(connection, log, memory=self.memory)
            self.run_of.become_worker(worker)
            worker.serve(self.session)
            status = 0
        except BaseException:
            os.write(log, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def _spawn(self, connection: Connection, log: int) -> "subprocess.Popen[bytes]":
        words = [str(word) for word in self.config.invocation_params.args]
        share = max(0.9 / len(self.slots), SHARE)
        worker = f"--worker={connection.fileno()},{log},{share},{self.run_of.name}"
        # Checks do not use assertions, and to rewrite assertions takes a second.
        command = [sys.executable, "-m", "pytest", *words, "-n0", "--assert=plain", worker]
        return subprocess.Popen(
            command,
            cwd=self.config.invocation_params.dir,
            pass_fds=[connection.fileno(), log],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _how(status: int, calling: bool) -> str:
    when = "" if calling else " after the call had returned: its memory was damaged"
    if status < 0:
        said = signal.strsignal(-status) or "unknown"
        return f"the process died of signal {-status} ({said[0].lower() + said[1:]}){when}"
    return f"the process ended with status {status}{' in the call' if calling else when}"


def _processor_seconds(process: int) -> float:
    """Processor time of a process and its descendants."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process is gone by now
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    total, front = 0, [process]
    while front:
        total += sum(ticks.get(pid, 0) for pid in front)
        front = [pid for pid, parent in parents.items() if parent in front]
    return total / os.sysconf("SC_CLK_TCK")
