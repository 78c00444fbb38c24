"""`flashproof.verify`: a verification that Python code starts, and its result."""

import ctypes
import importlib
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from flashproof import failures, loading
from flashproof.impls.catalogue import CATALOGUE
from flashproof.impls.spec import Implementation
from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Judgement, read
from flashproof.running import Wanted, Watcher, run
from flashproof.sandbox.process_state import SETTINGS
from flashproof.signatures import of_callable
from flashproof.words import check_processes, check_seconds

PR_SET_PDEATHSIG = 1
PATIENCE = 10.0  # seconds in which a child may end after Ctrl-C, with what it found


@dataclass(frozen=True)
class Result:
    """The result of a verification.

    `print(result)` shows it in words, and `result.raise_for_failures()` ends a test with them. A run that `cases`,
    `dtypes`, `device` or `quick` narrowed may be `verified`, but it ran only a part of the checks. `verdict` says so.
    """

    target: str  # the name of what was verified, as `pytest --impl` takes it
    # Whether nothing failed, and something passed of each implementation that was selected: exit status 0.
    verified: bool
    quick: bool  # whether `quick=True` was asked for, which never counts as a whole verification
    checks: int  # the number of checks that were run. A check counts once for each dtype and device
    failures: tuple[Judgement, ...]  # everything that failed, in the order of the run
    # The judgement with the largest rho, by tensor and dtype. `result.worst["dq", "float16"].rho` is a number.
    worst: dict[tuple[str, str], Judgement]
    refused: tuple[Judgement, ...]  # what the function declined with a clear exception. This is no failure
    unverified: dict[str, str]  # implementations without any verified check, each with the reason
    records: Path | None  # the file with the records, if one was asked for
    report: Path | None  # the first page of the report, if one was asked for
    said: tuple[str, ...] = field(default=())  # further lines of the run, such as what is not claimed
    # The last line of the run: "verified: 117 checks: 117 passed".
    verdict: str = ""
    forward_only: bool = False  # whether no gradient was verified in any dtype, because every backward was refused
    again: bool = True  # whether the command of a failure can repeat it, because the target has a name to load it by

    def __bool__(self) -> bool:
        """Returns `verified`, so that `assert flashproof.verify(...)` works."""
        return self.verified

    def __str__(self) -> str:
        """Returns the verdict, the largest rho, what was not verified, and the failures in words."""
        lines = [f"{self.target}: {self.verdict}"]
        if largest := max(self.worst.values(), key=lambda one: size(worst_rho(one)), default=None):
            lines[0] += f", largest rho {wording.rho(worst_rho(largest))} ({largest.tensor}, {largest.dtype})"
        lines += [f"not verified: {name} ({why})" for name, why in self.unverified.items()]
        alike = failures.groups(self.failures)
        for group in alike[: failures.IN_FULL]:
            lines += ["", self._told(group)]
        if len(alike) > failures.IN_FULL:
            lines += ["", *failures.in_short(alike[failures.IN_FULL :])]
        return "\n".join([*lines, *self.said])

    def _told(self, group: Sequence[Judgement]) -> str:
        words = failures.told(group)
        if self.again:
            return words
        before, _, behind = words.rpartition("again: ")
        call = f"again: flashproof.verify(..., cases=[{group[0].case!r}])"
        return f"{before}{call}{''.join(behind.partition(chr(10))[1:])}"

    def raise_for_failures(self) -> None:
        """Raises AssertionError with the text of the result, unless the target is verified."""
        if not self.verified:
            raise AssertionError(str(self))


def verify(
    target: "str | Callable[..., object] | Implementation",
    *,
    dtypes: "Sequence[str | torch.dtype] | str | torch.dtype | None" = None,
    device: str | None = None,
    cases: Sequence[str] | str = (),
    quick: bool = False,
    thorough: bool = False,
    search: str | None = None,
    require: Sequence[str] | str = (),
    strict: bool = False,
    time_limit: float | None = None,
    processes: int | None = None,
    report: Path | str | None = None,
    records: Path | str | None = None,
) -> Result:
    """Verifies an implementation by flashproof's checks, and returns the result.

    - `target`: a name, as `pytest --impl` takes it; or a function, a module of PyTorch, any other callable, or an
      `Implementation`.
    - `dtypes`: only these dtypes, as names or as dtypes of torch.
    - `device`: only this device, "cpu" or "cuda".
    - `cases`: only these cases, by every check. Each is a line, as a failure names it.
    - `quick`: a few checks and cases that find most faults, for about five seconds. This is not a whole verification.
    - `thorough`: also the cases that all triples of levels need.
    - `search`: how long each search tries new cases ("10m"), or how many it tries ("5000"). By default 10.
    - `require`: features that must have passed, such as "backward". Without them the result is not verified.
    - `strict`: whether the result is not verified if something could not be verified.
    - `time_limit`: the seconds that one forward of an external kernel may take, and likewise one backward.
    - `processes`: how many processes run checks. By default one for each core, and on a GPU at most 16.
    - `report`, `records`: a folder and a file. Neither is written if it is not given.

    The verification runs in a fork of this process. So the caller's process does not change, and a kernel that crashes
    or hangs is a failed case. A process that uses CUDA cannot be forked. On a machine with a CUDA device, the target
    runs in a new process if a name (`package.module:function`) can import it. A lambda, a closure or another object
    without a name then runs in this process, as with `-n 0`. Nothing protects this process from a crash or a hang.

    Raises ValueError for what the command line would not accept, such as an unknown name; TypeError for an object that
    is not an attention function; and RuntimeError if the process of the verification itself dies.
    """
    check_processes("auto" if processes is None else processes)
    check_seconds(time_limit)
    name, given, importable = _named(target)
    if given is not None and not isinstance(given, Implementation):
        of_callable(given, name)  # raises TypeError
    words = [dtypes] if isinstance(dtypes, str | torch.dtype) else dtypes or ()
    with tempfile.TemporaryDirectory(prefix="flashproof-") as temporary:
        folder = Path(temporary)
        wanted = Wanted(
            targets=(name,),
            dtypes=tuple(str(word) for word in words),
            device=device,
            cases=(cases,) if isinstance(cases, str) else tuple(cases),
            quick=quick,
            thorough=thorough,
            search=search,
            require=(require,) if isinstance(require, str) else tuple(require),
            strict=strict,
            time_limit=time_limit,
            processes="auto" if processes is None else processes,
            records=Path(records).absolute() if records else folder / "records.jsonl",
            report=Path(report).absolute() if report else None,
        )
        if not torch.cuda.is_available():
            outcome = _forked(wanted, given, folder)
        elif importable:
            outcome = _spawned(wanted, folder)
        else:
            outcome = _here(replace(wanted, processes=0), given, folder)
        return _result(name, wanted, outcome, folder, importable=importable)


# ------------------------------------------------------------------------------------------------------- the target


def _named(target: object) -> tuple[str, object | None, bool]:
    """The target's name in the run, the target if it is an object, and whether the name can be imported."""
    if isinstance(target, str):
        return target, None, True
    if isinstance(target, Implementation) and target.name in CATALOGUE and loading.load(target.name) is target:
        return target.name, None, True
    function = target.attention if isinstance(target, Implementation) else target
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and module.__name__ != "__main__":
        for qualified in (_qualified(target), *(key for key, value in vars(module).items() if value is target)):
            with suppress(AttributeError):
                if qualified and reduce(getattr, qualified.split("."), module) is target:
                    return f"{module.__name__}:{qualified}", target, True
    place = "given"
    with suppress(TypeError, OSError):
        path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").absolute()  # type: ignore[arg-type]
        place = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    own = target.name if isinstance(target, Implementation) else ""
    return f"{place}:{own or _qualified(target) or type(target).__qualname__}", target, False


def _qualified(target: object) -> str:
    return str(getattr(target, "__qualname__", ""))


# ----------------------------------------------------------------------------------------------------- the processes


class _Silent(Watcher):
    """Shows nothing."""

    command = "flashproof.verify"


def _work(wanted: Wanted, folder: Path) -> None:
    """Verifies in this process, writes the report if one is asked for, and writes the outcome to the folder."""
    from flashproof import summary

    watcher = _Silent()
    status = run(wanted, watcher)
    outcome: dict[str, Any] = {"status": status, "checks": 0, "unverified": {}, "said": [], "report": None}
    outcome |= {"verdict": "", "forward_only": False}
    if session := watcher.session:
        if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            outcome["checks"] = session.outcomes.total() - session.outcomes["skipped"]
            outcome["verdict"] = summary.verdict(session).text
            outcome["forward_only"] = bool(summary.forward_only(session)) and not session.with_gradient
            outcome["unverified"] = {name: summary.reason(session, name) for name in summary.unverified(session)}
            lines = [line.text for line in summary.last_lines(session)]
            outcome["said"] = [line for line in lines if not line.startswith("not verified: ")]
        if wanted.report:
            try:
                from flashproof.reports.pages import write_site

                outcome["report"] = str(write_site([session.path], wanted.report))
            except (ImportError, OSError, ValueError) as error:  # the verdict stands
                outcome["said"].append(f"report: not written: {error}")
    (folder / "outcome.json").write_text(json.dumps(outcome))


def _forked(wanted: Wanted, given: object | None, folder: Path) -> dict[str, Any]:
    """The outcome of a verification in a fork of this process.

    OpenMP keeps a pool of threads for each thread that calls it. A fork has the calling thread's pool, but none of the
    threads in it, and its next parallel operation waits for them forever. So a new thread forks: it has no pool yet.
    """
    _prepare()
    sys.stdout.flush()
    sys.stderr.flush()
    processes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of a fork while threads run; these are PyTorch's, and wait
            process = os.fork()
        if not process:
            _live(wanted, given, folder)
        processes.put(process)
        with suppress(ChildProcessError):
            os.waitpid(process, 0)  # the kernel of the system ends the child when the thread that forked it ends

    thread = threading.Thread(target=fork, name="flashproof.verify")
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C: the child ends with what it found, and ends its workers
        _end(processes.get())
        raise
    return _outcome(folder)


def _prepare() -> None:
    """Imports, once, what every fork needs. An imported library sets a variable, so the environment is restored."""
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("flashproof.summary")
        importlib.import_module("flashproof.registry").checks()
    os.environ.clear()
    os.environ.update(before)


def _live(wanted: Wanted, given: object | None, folder: Path) -> None:
    """The life of the fork."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:  # of a test that calls this
            del os.environ[name]
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        _register(wanted, given)
        with _plain_torch():
            _work(wanted, folder)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        (folder / "died").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def _end(process: int) -> None:
    """Ends a child: first by Ctrl-C, then by force."""
    deadline = time.monotonic() + PATIENCE
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGINT)
        while time.monotonic() < deadline:
            if os.waitpid(process, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _spawned(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """The outcome of a verification in a new process, which finds the same modules as this process."""
    (folder / "wanted.json").write_text(json.dumps(asdict(wanted), default=str))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    program = "import sys, pathlib, flashproof.verification as v; v.work_in(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait()
        except BaseException:
            _end(process.pid)
            raise
    return _outcome(folder)


def work_in(folder: Path) -> None:
    """Verifies, in a new process, what the folder describes."""
    fields = json.loads((folder / "wanted.json").read_text())
    for name in ("targets", "dtypes", "cases"):
        fields[name] = tuple(fields[name])
    for name in ("records", "report"):
        fields[name] = Path(fields[name]) if fields[name] else None
    _work(Wanted(**fields), folder)


def _here(wanted: Wanted, given: object | None, folder: Path) -> dict[str, Any]:
    """The outcome of a run in this process, whose state is restored."""
    with (folder / "log").open("w") as log, redirect_stdout(log), redirect_stderr(log), _left_as_it_was():
        _register(wanted, given)
        try:
            with _plain_torch():
                _work(wanted, folder)
        finally:
            loading.GIVEN.pop(wanted.targets[0], None)
    return _outcome(folder)


def _register(wanted: Wanted, given: object | None) -> None:
    if given is not None:
        loading.GIVEN[wanted.targets[0]] = given


@contextmanager
def _plain_torch() -> Generator[None]:
    """A context in which PyTorch has the state of a new process, whatever the caller's modes are."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def _left_as_it_was() -> Generator[None]:
    """Restores what a run changes in its process."""
    from threadpoolctl import threadpool_limits

    before = [(setting, setting.read()) for setting in SETTINGS]
    variables, paths, finders, modules = dict(os.environ), list(sys.path), list(sys.meta_path), set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings(), threadpool_limits(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:], sys.meta_path[:] = paths, finders
        for name in [name for name in set(sys.modules) - modules if name.startswith("flashproof.tests.")]:
            sys.modules.pop(name, None)
        for number, handler in handlers.items():
            with suppress(ValueError):  # not in the main thread, where no handler was changed either
                signal.signal(number, handler)
        for setting, value in before:
            if setting.read() != value:
                setting.put_back(value)


def _outcome(folder: Path) -> dict[str, Any]:
    path = folder / "outcome.json"
    if not path.exists():
        died, log = folder / "died", folder / "log"
        words = "".join(file.read_text(errors="replace") for file in (died, log) if file.exists())
        raise RuntimeError(f"the process of the verification died:\n{words[-3000:]}")
    outcome: dict[str, Any] = json.loads(path.read_text())
    if outcome["status"] == pytest.ExitCode.USAGE_ERROR:
        said = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
        raise ValueError("\n".join(line.removeprefix("ERROR: ") for line in said) or "the options cannot be understood")
    if outcome["status"] == pytest.ExitCode.INTERNAL_ERROR:
        raise RuntimeError((folder / "log").read_text(errors="replace")[-3000:])
    return outcome


# -------------------------------------------------------------------------------------------------------- the result


def _result(name: str, wanted: Wanted, outcome: dict[str, Any], folder: Path, *, importable: bool) -> Result:
    path = wanted.records
    assert path is not None
    judged = [one for one in read(path) if isinstance(one, Judgement)] if path.exists() else []
    worst: dict[tuple[str, str], Judgement] = {}
    for one in judged:
        if one.tensor and one.rho is not None and one.status in ("passed", "failed"):
            before = worst.get((one.tensor, one.dtype))
            if before is None or size(worst_rho(one)) > size(worst_rho(before)):
                worst[one.tensor, one.dtype] = one
    return Result(
        target=name,
        verified=outcome["status"] == 0,
        quick=wanted.quick,
        checks=outcome["checks"],
        failures=tuple(one for one in judged if one.status == "failed"),
        worst=worst,
        refused=tuple(one for one in judged if one.status == "refused"),
        unverified=outcome["unverified"],
        records=None if path.is_relative_to(folder) else path,
        report=Path(outcome["report"]) if outcome["report"] else None,
        said=tuple(outcome["said"]),
        verdict=outcome["verdict"],
        forward_only=outcome["forward_only"],
        again=importable,
    )
