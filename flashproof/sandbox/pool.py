"""The pool: the worker processes of a run, seen from its main process.

External kernels run in workers, so that any damage that a kernel does to its process is one failed case. The main
process collects the checks, distributes them and keeps the records. It never calls a kernel. A worker runs the checks
of one external kernel, or of the catalogue. When a worker dies, or the pool ends it because a call did not return,
another worker continues with the next case.

Workers are forks of the main process, which start in milliseconds. A CUDA device does not survive a fork, so on a
machine with a CUDA device, each worker is a new pytest process.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
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

TICK = 0.25  # seconds between two inspections of silent workers
SILENCE = 10  # time limits without a message while no kernel runs: the oracles of a long case take time
PATIENCE = 4  # time limits by the clock, for a kernel that works but waits for the processor
DYING = 3.0  # seconds from the end of a process' connection to its own end, which a GPU delays
DEATHS = 3  # deaths in one check, after which the rest of its cases is left out
HANGS = 3  # of one implementation, after which its other checks are left out; each one quarters the time limit
MEMORY = 2**32  # bytes that a worker may take, if the machine has them
SHARE = 0.25  # the least share of a GPU's memory for each worker
VERIFIER = Path(__file__).resolve().parents[1]  # the folder of the package


@dataclass(eq=False)
class Job:
    """A check of one implementation, dtype and device, for a worker to run."""

    item: pytest.Item
    owner: str  # the external kernel, or "" for the whole catalogue; a worker serves one owner
    cases: list[str]
    after: int = -1  # the check continues after this case
    reached: int = -1  # the last case of the list that a kernel received
    current: str = ""  # the line of the case that a kernel received last
    deaths: int = 0
    blocks: list[str] = field(default_factory=list)  # failures of workers that died, in words

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each case in the list. The pool asks for it at every call of a kernel."""
        return {line: place for place, line in reversed([*enumerate(self.cases)])}


@dataclass(frozen=True)
class Place:
    """Where a worker was when it stopped. `line` is a line of the kernel's Python, if such a line was running."""

    line: str = ""  # "mine.py, line 12, in attention"
    in_native_code: bool = False  # the stack is known, and contains no line of the kernel's Python
    last_words: str = ""  # the last output of the process, if no stack is known

    def __str__(self) -> str:
        if self.line:
            return f", at {self.line}"
        if self.in_native_code:
            return ", while no line of its Python ran"
        return f"; its last words: {self.last_words}" if self.last_words else ""


class Run(Protocol):
    """What the pool needs from its run."""

    name: str

    def limit(self, item: pytest.Item, *, first: bool) -> float:
        """The time limit of a call of a check's kernel, in seconds. first: no call of this kernel has returned yet."""

    def owner(self, item: pytest.Item) -> str:
        """The external kernel of a check, or "" for a kernel of the catalogue."""

    def cases(self, item: pytest.Item) -> list[str]:
        """The case lines of a check."""

    def left_out(self, item: pytest.Item) -> str:
        """The reason to leave a check out, from earlier findings; empty if the check is to run."""

    def record(self, record: Record) -> None:
        """Writes a record."""

    def fail(self, item: pytest.Item, case: str, message: str) -> str:
        """Records a failure of a check's case. Returns the failure in words."""

    def become_worker(self, worker: Worker) -> None:
        """Is called in a fork that becomes a worker."""


class WorkerProcess:
    """The main process' side of a worker."""

    def __init__(self, owner: str, start: Callable[[Connection, int], "int | subprocess.Popen[bytes]"]) -> None:
        self.owner = owner
        self.job: Job | None = None
        self.calling = False
        self.since = time.monotonic()  # the time of the last message
        self.worked: float | None = None  # processor seconds, measured shortly after that
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = Pipe()
        self.process = start(theirs, self.log.fileno())
        theirs.close()

    @property
    def pid(self) -> int:
        """The id of the process, and of the group of all processes that it starts."""
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
        with suppress(OSError):  # the worker has died; the pool notices this next
            self.connection.send((job.item.nodeid, job.after))

    def end(self, patience: float = 5.0) -> None:
        """Ends the process and all processes that it started."""
        deadline = time.monotonic() + patience
        while self.status() is None and time.monotonic() < deadline:
            os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        self.log.close()

    def place(self, check: Path) -> Place:
        """Where the process was, by the stack that faulthandler wrote. check: the file of the check.

        The line is the innermost line outside all installed packages.
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

        The limit applies to processor time, of the worker and of all processes that it started, since a compiler may
        wait for the processor on a busy machine. The limit applies to clock time if the worker does almost nothing. A
        multiple of the limit applies to clock time in every case.
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
        """items: of the session. count: workers at a time. spawns: each worker is a new pytest process, not a fork."""
        self.session, self.config, self.run_of, self.spawns = session, session.config, run, spawns
        self.jobs = deque(Job(item, run.owner(item), run.cases(item)) for item in items)
        self.slots: list[WorkerProcess | None] = [None] * max(1, min(count, len(self.jobs)))
        self.first: dict[str, Job] = {}  # for each owner, the job that its others wait for: it may show them needless
        self.ended: set[str] = set()  # owners whose first job has ended
        self.hangs: dict[str, int] = {}
        self.slowest: dict[str, float] = {}  # for each owner, the seconds of its longest call that returned
        self.memory = min(available_memory() // (len(self.slots) + 1), MEMORY)
        self.forking = ThreadPoolExecutor(1, "flashproof.fork")

    def run(self) -> None:
        """Works until every item is reported."""
        if not self.spawns:
            # The first backward imports sympy, which takes half a second. This imports it once, and not in each fork.
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
            self.forking.shutdown()

    def _give_work(self, slot: int) -> None:
        worker = self.slots[slot]
        while self.jobs:
            job = self._next_job(worker)
            if reason := self._left_out(job):
                self.jobs.remove(job)
                if job.blocks:  # its worker died before, so the check has already failed
                    self._report(job, "failed", "\n\n".join(job.blocks))
                else:
                    self._report(job, "skipped", (str(job.item.path), None, f"Skipped: {reason}"))
                continue
            if worker is None or worker.owner != job.owner:
                if worker is not None:
                    worker.end()
                worker = self.slots[slot] = WorkerProcess(job.owner, self._spawn if self.spawns else self._fork)
            if self._waits(job):
                return  # meanwhile, the worker starts
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
        """Whether the first check of this external kernel has not ended yet."""
        return job.owner in self.first and job.owner not in self.ended

    def _next_job(self, worker: WorkerProcess | None) -> Job:
        """The next job, one of the worker's owner if possible.

        Jobs whose cases no other worker has at the moment come first. Two workers with the same cases would compute the
        same exact results. A worker that takes them later can reuse the results.
        """
        ready = [job for job in self.jobs if not self._waits(job)] or list(self.jobs)
        of_owner = [job for job in ready if worker is not None and job.owner == worker.owner]
        waiting = of_owner or [job for job in ready if job.owner == ready[0].owner]
        at_work = [other.job.cases for other in self.slots if other is not None and other.job is not None]
        return next((job for job in waiting if job.cases not in at_work), waiting[0])

    def _hear(self, worker: WorkerProcess) -> None:
        """Processes what a worker has sent so far."""
        while worker.job is not None:
            try:
                if not worker.connection.poll():
                    return
                kind, content = worker.connection.recv()
            except Exception:  # the connection has ended, or a damaged process did not finish a message
                time.sleep(0.05)  # the connection closes shortly before the process ends
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
                job.reached = job.places.get(job.current, job.reached)
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
                if content:  # it has lost its device; the next check gets another worker
                    worker.end()
                    self.slots[self.slots.index(worker)] = None

    def _look_after(self, worker: WorkerProcess) -> None:
        """Ends a worker after its time limit, and handles the death of a worker."""
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
        os.kill(worker.pid, signal.SIGUSR1)  # faulthandler writes the stack, even while the interpreter is locked
        time.sleep(0.1)
        self.hangs[job.owner] = hangs + 1
        allowed = f"no answer within {seconds:.3g} s" if worker.calling else f"the process was silent for {seconds:g} s"
        self._lose(worker, f"{allowed} (--time-limit SECONDS sets another limit)")

    def _lose(self, worker: WorkerProcess, how: str, *, status: int = 0) -> None:
        """Handles the loss of a worker. Its case has failed, and another worker continues its check after this case."""
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
        if status != SPOILT:  # with SPOILT, the worker has recorded the failure itself
            job.blocks.append(self.run_of.fail(job.item, job.current, message))
        known = job.reached > job.after or not job.current  # whether the position to continue from is known
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
        """Forks a worker from a thread that does nothing else.

        OpenMP keeps a pool of threads for each thread that calls it. In a fork from the main thread, the pool would
        have no threads, and the first parallel operation would wait for them forever. The thread must not end before
        the workers do: the system kills a worker when the thread that forked it ends.
        """

        def fork() -> int:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of a fork while threads run. These wait for work.
                pid = os.fork()
            if not pid:
                self._live(connection, log)
            return pid

        return self.forking.submit(fork).result()

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
        # Checks do not use assertions, and rewriting assertions takes a second.
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
    """The processor time of a process and its descendants."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    total, front = 0, [process]
    while front:
        total += sum(ticks.get(pid, 0) for pid in front)
        front = [pid for pid, parent in parents.items() if parent in front]
    return total / os.sysconf("SC_CLK_TCK")
