"""A stranger's kernel runs in processes of their own, so that whatever it does to its process is one failed case and the run goes on.

The main process collects, hands out checks and keeps the records; it never calls a kernel. A host is a process that runs the checks of one stranger, or of
the catalogue, one check at a time. It sends each record as it is made, and the line of each case before a kernel gets it. So when a host dies, or a call does
not come back and the host is ended, nothing is lost, the case is known, and a new host goes on with the case after it.

Hosts are forks of the main process, which costs milliseconds. Where there is a CUDA device, which does not survive a fork, each is a pytest of its own.
"""

import ctypes
import faulthandler
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

import msgspec
import pytest
import torch

from reports.record import Judgement, Record
from tests import running

TICK = 0.25  # seconds between two looks at what is silent
SILENCE = 10  # time limits that may pass without a word while no kernel is called: the oracles of a long case
PATIENCE = 4  # time limits by the clock, for a kernel that works but does not get the processor
DYING = 3.0  # seconds between the end of a process' connection and its own, which takes a while where it holds a GPU
DEATHS = 3  # of one check, after which the rest of its cases is left out
HANGS = 3  # of one implementation, after which the rest of its checks is left out; each leaves its calls a quarter of the time
SPOILT = 87  # the exit status of a host whose kernel left it unusable, after it said so
MEMORY = 2**32  # bytes that a host may take up, if the machine has them to give
SHARE = 0.25  # of a GPU's memory, for each host at least
SUITE = Path(__file__).parent
M_MMAP_THRESHOLD, M_PERTURB, PR_SET_PDEATHSIG = -3, -6, 1  # malloc.h, sys/prctl.h

Message = tuple[Literal["record", "calling", "back", "report", "done"], object]


@dataclass(eq=False)
class Job:
    """A check of one implementation, dtype and device, to be run by a host."""

    item: pytest.Item
    owner: str  # the stranger, or "" for all of the catalogue: a host serves one owner
    cases: list[str]
    after: int = -1  # the case that it goes on behind
    reached: int = -1  # the last case of its list that a kernel was given
    current: str = ""  # the line of the case that a kernel was given last
    deaths: int = 0
    blocks: list[str] = field(default_factory=list)  # failures told by hosts that died


# ---------------------------------------------------------------------------------------------------------------------------- in a host


class Guest:
    """A host's side: what its checks tell the main process."""

    def __init__(self, connection: Connection, log: int, *, memory: int | None = None, share: float = 1.0) -> None:
        """log: a file for the stack at a crash or a hang. memory: bytes that it may take up beside what it has. share: of the memory of a GPU."""
        self.connection = connection
        self.after = -1  # the case that the check at hand goes on behind
        self.log = os.fdopen(log, "wb", buffering=0)
        faulthandler.enable(file=self.log, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=self.log, all_threads=False)
        # What malloc gives and what it took back holds no zeros: memory that is read before it is written, or after it was given back, shows.
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # large blocks from the same place, and not from the kernel, whose pages are zero
        libc.mallopt(M_PERTURB, 0x01)  # 0xfe in what is given: -1.7e38 in float32 and bfloat16, NaN in float16
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the run
        if memory is not None:
            held = int(re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
            resource.setrlimit(resource.RLIMIT_DATA, (held + memory, resource.RLIM_INFINITY))
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(share)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' affair
        running.watch = lambda case: self.say("back") if case is None else self.say("calling", str(case))

    @classmethod
    def spawned(cls, words: str) -> "Guest":
        """A host that was started as a pytest of its own, by what --host told it."""
        connection, log, share = words.split(",")[:3]
        return cls(Connection(int(connection)), int(log), share=float(share))

    def say(self, kind: Literal["record", "calling", "back", "report", "done"], content: object = None) -> None:
        """Sends a message to the main process."""
        self.connection.send((kind, content))

    def serve(self, session: pytest.Session) -> None:
        """Runs checks until no more come."""
        for unheard in ("PytestUnraisableExceptionWarning", "PytestUnhandledThreadExceptionWarning"):
            # Of an object that a kernel left to the collector, or a thread of its own. It comes up in whichever check then runs, and is no answer to a case.
            session.config.addinivalue_line("filterwarnings", f"ignore::pytest.{unheard}")
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                name, self.after = self.connection.recv()
            except EOFError:
                return
            item = items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self.say("done", _has_lost_its_device())


class Diary:
    """What a worker of pytest-xdist, which runs the kernels of the catalogue, leaves behind of a check in which it dies: line by line, as it happens.

    xdist says which test a worker died in, and starts another worker. Which case it was, and what was found until then, its controller reads here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        running.watch = lambda case: self.write("back") if case is None else self.write("calling", str(case))

    def begin(self, name: str, about: Judgement) -> None:
        """Of a check. about: what is to be recorded if the worker dies in it."""
        self._file = _diary(self._folder, name).open("wb", buffering=0)
        self.write("about", msgspec.json.encode(about).decode())

    def write(self, kind: Literal["about", "calling", "back", "record"], content: str = "") -> None:
        """A line of the check that runs, if one does."""
        if self._file:
            self._file.write(msgspec.json.encode((kind, content)) + b"\n")

    def end(self) -> None:
        """Of a check that the worker has survived."""
        if self._file:
            self._file.close()
            Path(os.fsdecode(self._file.name)).unlink()
            self._file = None

    @staticmethod
    def read(folder: Path, name: str) -> "Unfinished | None":
        """What a worker left of a check."""
        path = _diary(folder, name)
        lines = [msgspec.json.decode(line, type=tuple[str, str]) for line in path.read_bytes().splitlines()] if path.exists() else []
        if not lines:
            return None
        cases = [content for kind, content in lines if kind == "calling"]
        return Unfinished(
            about=msgspec.json.decode(lines[0][1], type=Judgement),
            records=[msgspec.json.decode(content, type=Record) for kind, content in lines if kind == "record"],
            case=cases[-1] if cases else "",
            last=lines[-1][0],
        )


@dataclass(frozen=True)
class Unfinished:
    """What is known of a check in which a worker died."""

    about: Judgement  # what is to be recorded of the death itself
    records: list[Record]
    case: str  # the line of the last one that a kernel was given
    last: str  # what kind of line was the last

    def findings(self) -> list[Record]:
        """The records and, unless the last thing heard is the failure that the worker ended itself for, the death."""
        told = self.records[-1] if self.records and self.last == "record" else None
        if isinstance(told, Judgement) and told.status in ("failed", "known defect"):
            return self.records
        how = "the process died in the call" if self.last == "calling" else "the process died after the call had come back: it was damaged"
        return [*self.records, msgspec.structs.replace(self.about, case=self.case, message=how)]


def _diary(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()}.diary"


def end_if_spoilt(fault: running.Fault) -> None:
    """Ends a process that a kernel left unusable, once its failure is told: a host or a worker, in whose place there will be another. Nothing elsewhere."""
    if fault.spoils and running.watch is not running._nobody:
        os._exit(SPOILT)


def _has_lost_its_device() -> bool:
    """Whether the CUDA device answers with errors from now on: of a kernel that worked on after its call had come back, since no call told of it."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# ---------------------------------------------------------------------------------------------------------------------- in the main process


class Host:
    """The main process' side of a host."""

    def __init__(self, owner: str, start: Callable[[Connection, int], "int | subprocess.Popen[bytes]"]) -> None:
        self.owner = owner
        self.job: Job | None = None
        self.calling = False
        self.since = time.monotonic()  # the last message
        self.worked: float | None = None  # seconds of processor time by about then
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = Pipe()
        self.process = start(theirs, self.log.fileno())
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process, and of the group of all that it starts."""
        return self.process if isinstance(self.process, int) else self.process.pid

    def status(self) -> int | None:
        """The exit status, minus the signal that ended it, or None while it lives."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        if self._status is None:
            pid, status = os.waitpid(self.process, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    _status: int | None = None

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

    def place(self, check: Path) -> str:
        """Where in the kernel's Python it was, by faulthandler's account of its stack: its innermost line that is not of an installed package."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', text.rpartition("most recent call first")[2], re.MULTILINE)
        for file, line, function in frames:
            if Path(file).parent == SUITE or Path(file) == check:  # below stands who called the kernel
                break
            if not (file.startswith("<") or "site-packages" in file or "/lib/python" in file):
                return f", at {os.path.relpath(file) if file.startswith(os.getcwd()) else file}, line {line}, in {function}"
        if frames:
            return ", while no line of its Python ran"
        said = [line for line in text.splitlines() if line.strip()]
        return f"; its last words: {said[-1][:300]}" if said else ""


class Hosts:
    """Runs all collected items in hosts."""

    def __init__(
        self,
        session: pytest.Session,
        *,
        count: int,
        limit: Callable[[pytest.Item, bool], float],
        describe: Callable[[pytest.Item], tuple[str, list[str]]],
        record: Callable[[Record], None],
        failed: Callable[[pytest.Item, str, str], str],
        enter: Callable[[Guest], None],
        run: str,
        spawns: bool,
    ) -> None:
        """limit: seconds for a call, or for the first one of a kernel. describe: an item's owner and its cases. failed: records a failure of a case with a
        message, and words it. enter: is told, in a fork, that it is now a host. spawns: hosts are no forks."""
        self.session, self.config = session, session.config
        self.limit, self.record, self.failed, self.enter, self.run_name = limit, record, failed, enter, run
        self.jobs = deque(Job(item, *describe(item)) for item in session.items)
        self.spawns = spawns
        self.slots: list[Host | None] = [None] * max(1, min(count, len(self.jobs)))
        self.hangs: dict[str, int] = {}
        self.slowest: dict[str, float] = {}  # seconds of a call that came back
        self.memory = min(available_memory() // (len(self.slots) + 1), MEMORY)

    def run(self) -> None:
        """Until every item is reported."""
        if not self.spawns:
            leaf = torch.ones(1, requires_grad=True)
            torch.autograd.grad(leaf * 2.0, leaf, torch.ones(1))  # imports sympy, which takes half a second: once, and not in each fork
        try:
            while True:
                for slot, host in enumerate(self.slots):
                    if host is None or host.job is None:
                        self._give_work(slot)
                busy = [host for host in self.slots if host is not None and host.job is not None]
                if not busy:
                    return
                heard = wait([host.connection for host in busy], TICK)
                for host in busy:
                    if host.connection in heard:
                        self._hear(host)
                    if host.job is not None:
                        self._look_after(host)
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            for host in self.slots:
                if host is not None:
                    host.end()

    def _give_work(self, slot: int) -> None:
        host = self.slots[slot]
        while self.jobs:
            job = self._next_job(host)
            self.jobs.remove(job)
            if self.hangs.get(job.owner, 0) >= HANGS:
                reason = f"not run: {HANGS} calls of {job.owner} did not come back"
                self._report(job, "skipped", (str(job.item.path), None, f"Skipped: {reason}"))
                continue
            if host is None or host.owner != job.owner:
                if host is not None:
                    host.end()
                host = self.slots[slot] = Host(job.owner, self._spawn if self.spawns else self._fork)
            host.job, host.calling, host.since, host.worked, job.current = job, False, time.monotonic(), None, ""
            with suppress(OSError):  # it has died, and is about to be looked after
                host.connection.send((job.item.nodeid, job.after))
            return

    def _next_job(self, host: Host | None) -> Job:
        """One of the host's owner, if there is one left; over cases that no other host is at work on, if there are such: both would compute the same exact
        results, which whoever comes later finds."""
        of_owner = [job for job in self.jobs if host is not None and job.owner == host.owner]
        waiting = of_owner or [job for job in self.jobs if job.owner == self.jobs[0].owner]
        at_work = [other.job.cases for other in self.slots if other is not None and other.job is not None]
        return next((job for job in waiting if job.cases not in at_work), waiting[0])

    def _hear(self, host: Host) -> None:
        """Takes in what a host has sent so far."""
        while host.job is not None:
            try:
                if not host.connection.poll():
                    return
                kind, content = host.connection.recv()
            except Exception:  # its end, or words that a damaged process did not finish
                time.sleep(0.05)  # the connection closes a moment before the process is gone
                lives, deadline = host.status() is None, time.monotonic() + DYING
                while host.status() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                status = host.status()
                if lives and (status is None or (status >= 0 and status != SPOILT)):
                    self._lose(host, "the process closed the files that it was given")
                return
            self._take(host, host.job, kind, content)

    def _take(self, host: Host, job: Job, kind: str, content: object) -> None:
        silent, host.since, host.worked = time.monotonic() - host.since, time.monotonic(), None
        match kind:
            case "record":
                self.record(msgspec.json.decode(str(content), type=Record))
            case "calling":
                host.calling, job.current = True, str(content)
                job.reached = job.cases.index(job.current) if job.current in job.cases else job.reached
            case "back":
                host.calling = False
                self.slowest[job.owner] = max(self.slowest.get(job.owner, 0.0), silent)
            case "report":
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
                if report.when == "call" and job.deaths:
                    told = [report.longreprtext] if report.outcome == "failed" else []
                    report.outcome, report.longrepr = "failed", "\n\n".join(job.blocks + told)
                self.config.hook.pytest_runtest_logreport(report=report)
            case "done":
                host.job = None
                if content:  # the next check has another host
                    host.end()
                    self.slots[self.slots.index(host)] = None

    def _look_after(self, host: Host) -> None:
        """Ends a host whose time is up, and accounts for one that died."""
        job = host.job
        assert job is not None
        if (status := host.status()) is not None:
            self._hear(host)
            if host.job is not None:
                self._lose(host, _how(status, host.calling), spoilt=status == SPOILT)
            return
        hangs = self.hangs.get(job.owner, 0)
        seconds = self.limit(job.item, job.owner not in self.slowest and not hangs)
        if hangs:  # but never less than four times what its slowest call took
            seconds = min(seconds, max(seconds / 4**hangs, 4 * self.slowest.get(job.owner, 0.0)))
        if not host.calling:
            seconds = SILENCE * self.limit(job.item, False)
        if not self._is_overdue(host, seconds):
            return
        os.kill(host.pid, signal.SIGUSR1)  # faulthandler writes the stack, whoever holds the interpreter's lock
        time.sleep(0.1)
        self.hangs[job.owner] = hangs + 1
        allowed = f"no answer within {seconds:g} s" if host.calling else f"no sign of life for {seconds:g} s"
        self._lose(host, f"{allowed} (--time-limit SECONDS sets another limit)")

    def _is_overdue(self, host: Host, seconds: float) -> bool:
        """Whether a host that is silent had its time: of the processor, with all that it started, since a compiler may wait for its turn on a busy machine;
        by the clock if it does next to nothing, and if it takes far too long."""
        silent = time.monotonic() - host.since
        if host.worked is None and silent > min(1.0, seconds / 4):
            host.worked = _processor_seconds(host.pid)
        if host.worked is None or silent < seconds:
            return False
        worked = _processor_seconds(host.pid) - host.worked
        return worked > 0.9 * seconds or worked < 0.05 * silent or silent > PATIENCE * seconds

    def _lose(self, host: Host, how: str, *, spoilt: bool = False) -> None:
        """A host is gone. Its case has failed, its check goes on behind this case in another host."""
        job = host.job
        assert job is not None
        place = host.place(job.item.path)
        if how.startswith("the process died") and place.endswith("ran"):
            place += ": in its backward, or afterwards in memory that it had damaged"
        host.end()
        host.job = None
        self.slots[self.slots.index(host)] = None
        job.deaths += 1
        if not spoilt:  # else the host has told of the failure itself
            job.blocks.append(self.failed(job.item, job.current, how + place))
        known = job.reached > job.after or not job.current  # where to go on: behind the case, or where it had not yet begun
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

    # ------------------------------------------------------------------------------------------------ starting a host

    def _fork(self, connection: Connection, log: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: numpy's wait for work, and none of them is ours
            pid = os.fork()
        if not pid:
            self._live(connection, log)
        return pid

    def _live(self, connection: Connection, log: int) -> NoReturn:
        """The life of a forked host."""
        status = 1
        try:
            os.setsid()
            capture = self.config.pluginmanager.getplugin("capturemanager")
            capture.stop_global_capturing()  # what it prints goes into files of its own
            os.dup2(log, 1)
            os.dup2(log, 2)
            capture.start_global_capturing()
            self.config.pluginmanager.unregister(name="terminalreporter")
            guest = Guest(connection, log, memory=self.memory)
            self.enter(guest)
            guest.serve(self.session)
            status = 0
        except BaseException:
            os.write(log, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def _spawn(self, connection: Connection, log: int) -> "subprocess.Popen[bytes]":
        words = [str(word) for word in self.config.invocation_params.args]
        host = f"--host={connection.fileno()},{log},{max(0.9 / len(self.slots), SHARE)},{self.run_name}"
        # Checks do not speak by assertions, and to rewrite those takes a second.
        command = [sys.executable, "-m", "pytest", *words, "-n0", "--assert=plain", host]
        directory = self.config.invocation_params.dir
        return subprocess.Popen(command, cwd=directory, pass_fds=[connection.fileno(), log], stdout=log, stderr=log, start_new_session=True)


def _how(status: int, calling: bool) -> str:
    when = "" if calling else " after the call had come back: it was damaged"
    if status < 0:
        said = signal.strsignal(-status) or "unknown"
        return f"the process died of signal {-status} ({said[0].lower() + said[1:]}){when}"
    return f"the process ended with status {status}{' in the call' if calling else when}"


def _processor_seconds(process: int) -> float:
    """What a process and its descendants have used."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    total, front = 0, [process]
    while front:
        total += sum(ticks.get(pid, 0) for pid in front)
        front = [pid for pid, parent in parents.items() if parent in front]
    return total / os.sysconf("SC_CLK_TCK")


def available_memory() -> int:
    """Bytes that the machine, or the group of processes that this one belongs to, has left."""
    left = [int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024]  # type: ignore[index]
    try:
        group = Path("/sys/fs/cgroup")
        left.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return max(min(left), 2**30)
