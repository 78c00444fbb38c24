"""The pytest plugin: the command line, which implementation each check is run over, records and report.

A check is a test function that takes `subject` and carries `@pytest.mark.check(grid=..., claims=(...))`. It is generated for every selected implementation,
dtype and device whose claims cover at least one case of its grid; what is not claimed leaves no test.
"""

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch
from threadpoolctl import threadpool_limits

from impls import catalogue
from impls.spec import DTYPES, Device, Dtype, Implementation
from reports import wording
from reports.evidence import size, worst_rho
from reports.record import Absence, Claim, Environment, Judgement, Record, append
from tests import grids, judging, profiles
from tests.cases import Case, inputs, not_claimed
from tests.isolation import Diary, Guest, Hosts, available_memory
from tests.subject import Subject, summary
from tests.world import FILTERS, left_alone

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "reports" / "runs"
SITE = ROOT / "reports" / "site"
DEFECTS = ROOT / "tests" / "known_defects.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashproof", "verification of attention kernels")
    group.addoption(
        "--impl",
        action="append",
        default=[],
        metavar="NAME",
        help="an implementation: a name or glob of the catalogue, pkg.mod:attr, or path/file.py:attr; repeatable",
    )
    group.addoption("--dtype", action="append", default=[], choices=DTYPES, help="only this dtype; repeatable")
    group.addoption("--device", choices=("cpu", "cuda"), help="only on this device")
    group.addoption("--records", metavar="FILE", help="where the run's records go, instead of a file of its own in reports/runs")
    group.addoption("--search", metavar="BUDGET", help="how much each search tries: cases (5000) or time (30s, 10m, 8h); Ctrl-C ends all with what they found")
    group.addoption("--case", action="append", default=[], metavar="LINE", help="only this case, as a report prints it, by every check; repeatable")
    limits = ", ".join(f"{seconds} on {device}" for device, seconds in TIME_LIMITS.items())
    group.addoption("--time-limit", type=_seconds, metavar="SECONDS", help=f"for one call of a kernel not in the catalogue, backward included ({limits})")
    group.addoption("--spawn", action="store_true", help=argparse.SUPPRESS)  # start hosts as where there is a GPU
    group.addoption("--host", help=argparse.SUPPRESS)  # this process is a host of another: tests/isolation.py


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:  # NaN neither
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number of seconds above 0")
    return seconds


HOSTS = pytest.StashKey[int]()  # how many processes run the kernels of strangers; none: this one does
TIME_LIMITS: dict[Device, int] = {"cpu": 30, "cuda": 120}  # a call may compile; the first one of a kernel has twice as long


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A run with a stranger's kernel has hosts instead of pytest-xdist's workers, as many as -n says; with -n 0 all of it runs in this process."""
    asked = config.option.numprocesses
    if any(":" in name for name in config.getoption("--impl")) and asked and not config.option.collectonly and not config.getoption("usepdb"):
        count = _processes() if isinstance(asked, str) else int(asked)
        config.stash[HOSTS] = 0 if config.getoption("--benchmark-only", default=False) else count
        config.option.numprocesses = 0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--benchmark-only", default=False):
        config.option.benchmark_skip = True  # timed tests run when they are asked for, and then alone
    config.addinivalue_line("markers", "check(grid=..., claims=(), single=True): a check of an implementation over a grid of cases; single: it takes a --case")
    config.addinivalue_line("markers", "gpu: runs on a CUDA device")
    # The cases are small: a second thread waits more than it computes, and workers (-n) use the other cores better. NumPy's, under Triton's interpreter, waits
    # by spinning.
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")
    share_triton_cache()
    state = config.stash[STATE] = State(config)
    judging.share(state.shared)
    if not state.is_worker:
        state.shared.mkdir(mode=0o700, parents=True)
    if budget := config.getoption("--search"):
        with _named("--search"):
            profiles.begin(profiles.Budget.parse(budget), state.run, is_main=not state.is_worker)


def share_triton_cache() -> None:
    """Names Triton's cache, where the user has not. Inductor would move it in each process in which it compiles, away from those of the others."""
    if torch.cuda.is_available() and find_spec("triton"):
        import triton

        os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


def pytest_unconfigure(config: pytest.Config) -> None:
    profiles.end()
    if STATE in config.stash and not config.stash[STATE].is_worker:
        shutil.rmtree(config.stash[STATE].shared, ignore_errors=True)


@contextmanager
def _named(option: str) -> Generator[None]:
    """Makes what is wrong with an option an error of the command line, which says which option it is."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        raise pytest.UsageError(f"{option}: {error}") from error


WORKERS_ON_GPU = 16  # processes that share one GPU: most of their time goes into compiling kernels


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes, unless -n says: one a core. None beside this one for one case, and for benchmarks, which must have the machine to themselves."""
    if config.getoption("--benchmark-only", default=False) or config.getoption("--case") or config.option.collectonly:
        return 0
    if not torch.cuda.is_available():
        config.option.dist = "worksteal"  # neighbours stay together, and share the exact results that a process remembers
    else:
        # One at a time, the heaviest first: what one process has compiled the others find on disk.
        config.option.dist, config.option.maxschedchunk = "load", 1
    return _processes()


def _processes() -> int:
    """One a core; on a GPU, which they share, not too many."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, WORKERS_ON_GPU) if torch.cuda.is_available() else cores


# ------------------------------------------------------------------------------------------------ what is run over what


@dataclass(frozen=True)
class Target:
    """One implementation, dtype and device that a check is generated for, or the reason why the implementation cannot be loaded."""

    name: str
    dtype: Dtype
    device: Device
    implementation: Implementation | None
    missing: str | None  # why it cannot run here

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.device}"


class State:
    """What a session knows: the selection of the command line, the run's name, the records."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selected: list[str] = list(dict.fromkeys(map(catalogue.spelled, config.getoption("--impl"))))
        with _named("--case"):
            self.chosen = list(dict.fromkeys(map(_parsed_case, config.getoption("--case"))))  # instead of those of the grids
        asked: list[Dtype] = config.getoption("--dtype")
        if others := [case.dtype for case in self.chosen if asked and case.dtype not in asked]:
            raise pytest.UsageError(f"--dtype: the case is in {others[0]}")
        self.dtypes: list[Dtype] = list(dict.fromkeys(case.dtype for case in self.chosen)) or asked or list(DTYPES)
        self.device: Device | None = config.getoption("--device")
        self.timed: bool = config.getoption("--benchmark-only", default=False)  # benchmarks verify nothing
        worker = getattr(config, "workerinput", None)
        host: str | None = config.getoption("--host")
        self.run: str = worker["flashproof_run"] if worker else host.split(",")[3] if host else run_name()
        self.shared = Path(tempfile.gettempdir()) / f"flashproof-{self.run}"  # what the processes of a run leave one another
        self.guest = Guest.spawned(host) if host else None  # set in a host: what it finds goes to the main process
        self.diary = Diary(self.shared) if worker else None  # of a worker of pytest-xdist
        self.is_worker = worker is not None or host is not None
        self.hosts = config.stash.get(HOSTS, 0)
        self.shown: set[str] = set()  # implementations of which a failure was shown while the run went on
        with _named("--records"):
            self.path = _records(Path(given)) if (given := config.getoption("--records")) else RUNS / f"{self.run}.jsonl"
        self.written = 0
        self.passed: dict[str, int] = {}
        self.refused: dict[tuple[str, str], list[str]] = {}  # of an implementation and dtype, what it said for each case that it declined
        self.changed_by_import: dict[str, list[str]] = {}  # of an implementation, the global state that was put back after its file was imported
        self.found: dict[tuple[str, str], Judgement] = {}  # of an implementation and dtype, the worst that a search found
        self.claimed: dict[tuple[object, str], list[Case]] = {}  # of a grid and target, the cases that it takes
        self.implementations: dict[str, Implementation | None] = {}  # those that were selected and, where they can be loaded, what they are
        with _named("--impl"):
            self.targets = self._targets()
        self.absences: list[Absence] = [
            Absence(run=self.run, implementation=target.name, device=target.device, dtype=target.dtype, reason="not possible here", message=target.missing)
            for target in self.targets
            if target.missing
        ]
        self.defects = tomllib.loads(DEFECTS.read_text())["defect"] if DEFECTS.exists() else []

    def _targets(self) -> list[Target]:
        names: list[str] = []
        for pattern in self.selected or ["*"]:
            names += [pattern] if ":" in pattern or pattern.endswith(".py") else catalogue.names([pattern])
        targets = []
        for name in dict.fromkeys(names):
            with warnings.catch_warnings(), left_alone() as changed:
                warnings.simplefilter("ignore")  # errors in the suite itself; what a stranger's file warns of is its own affair
                implementation, failure = _loaded(name, asked_for=bool(self.selected))
            self.implementations[name] = implementation
            self.changed_by_import[name] = [setting for setting in changed if setting != FILTERS]
            for device in _devices(implementation, self.device):
                missing = failure if implementation is None else implementation.missing(device) or _no_device(device)
                dtypes = [dtype for dtype in self.dtypes if implementation is None or dtype in implementation.supports.dtypes]
                targets += [Target(name, dtype, device, implementation, missing) for dtype in dtypes]
        return targets

    def cases(self, marker: pytest.Mark, target: Target) -> list[Case]:
        """The cases of a check's grid that the target claims, its share where it shares them with other dtypes; with --case, those."""
        if target.implementation is None:
            return []
        about = (marker.kwargs["grid"], str(target))
        if about not in self.claimed:
            grid = [case for case in self.chosen if case.dtype == target.dtype] if self.chosen else marker.kwargs["grid"](target.dtype, target.device)
            claimed = [case for case in grid if not_claimed(case, target.implementation.supports) is None]
            names = list(dict.fromkeys(other.name for other in self.targets))
            dealt = grids.dealt(marker.kwargs["grid"], claimed, target.dtype, self._sharing(target))
            self.claimed[about] = grids.turned(marker.kwargs["grid"], dealt, names.index(target.name))
        return list(self.claimed[about])

    def _sharing(self, target: Target) -> list[Dtype]:
        """The dtypes of this run whose code is that of the target. None share where cases are chosen, or tests by name, which may leave out a dtype's share."""
        chosen = self.chosen or self.config.getoption("keyword") or any("::" in str(word) for word in self.config.args)
        alike = target.implementation.one_code(target.device) if target.implementation and not chosen else ()
        return [dtype for dtype in self.dtypes if dtype in alike] if target.dtype in alike else []

    def record(self, record: Record) -> None:
        """Appends a record, behind the environment that the run's file begins with."""
        if not self.written:
            append(self.path, environment(self.run))
        append(self.path, record)
        self.written += 1
        if isinstance(record, Judgement) and record.status == "passed":
            self.passed[record.implementation] = self.passed.get(record.implementation, 0) + 1
        if isinstance(record, Judgement) and record.status == "refused":
            self.refused.setdefault((record.implementation, record.dtype), []).append(record.message)
        if isinstance(record, Judgement) and record.check.endswith("_search") and record.rho is not None:
            before = self.found.get((record.implementation, record.dtype))
            if before is None or size(worst_rho(record)) >= size(worst_rho(before)):
                self.found[record.implementation, record.dtype] = record


STATE = pytest.StashKey[State]()


def run_name() -> str:
    """A name for a run, its own on any machine."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def _parsed_case(line: str) -> Case:
    """A case of the command line. Raises ValueError for one that cannot be built: a word unknown, numbers beyond the dtype or the memory."""
    if not line.strip():
        raise ValueError("is empty; give a case, as a report prints it")
    case = Case.parse(line)
    needed, left = case.numbers * BYTES_OF_A_NUMBER / 2**30, available_memory() / 2**30
    if needed > left:
        raise ValueError(f"the tensors of '{case}' need {needed:.0f} GiB while they are made, and {left:.0f} GiB are left; give a smaller one")
    inputs(case)
    return case


BYTES_OF_A_NUMBER = 40  # the 64-bit words that it is made of, their sum, and the numbers of the other tensors in float64


def _records(path: Path) -> Path:
    """The file, its folder made. Raises OSError for what cannot be appended to."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written to; name another file")
    return path


def _loaded(name: str, *, asked_for: bool) -> tuple[Implementation | None, str | None]:
    """The implementation, or why there is none: an optional backend that is absent. An error of what was named on the command line is one."""
    try:
        implementation = replace(catalogue.load(name), name=name)  # the run knows it by the name that loads it again
        return (replace(implementation, one_code=lambda device: ()) if ":" in name else implementation), None
    except ImportError as error:
        if asked_for and ":" in name:
            raise
        return None, f"{error.name or name}: not installed"


def _devices(implementation: Implementation | None, asked: Device | None) -> list[Device]:
    claimed: list[Device] = list(implementation.supports.devices) if implementation else ["cpu"]
    if asked:
        return [asked] if asked in claimed else []
    if torch.cuda.is_available():
        return [device for device in claimed if implementation is None or device == "cuda" or implementation.missing(device) is None]
    return [device for device in claimed if device == "cpu"] or claimed


def _no_device(device: Device) -> str | None:
    return "CUDA: no device" if device == "cuda" and not torch.cuda.is_available() else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("check")
    if marker is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: a check takes @pytest.mark.check(grid=...)")
    state = metafunc.config.stash[STATE]
    targets = [target for target in state.targets if _covers(state, marker, target)]
    for target in state.targets:
        if target not in targets and not state.chosen and (marker.kwargs.get("claims") or marker.kwargs["grid"](target.dtype, target.device)):
            check = _check_name(metafunc.definition)
            absence = Absence(run=state.run, implementation=target.name, device=target.device, dtype=target.dtype, check=check, reason="not claimed")
            state.absences.append(absence)
    parameters = [pytest.param(target, id=str(target), marks=[pytest.mark.gpu] if target.device == "cuda" else []) for target in targets]
    metafunc.parametrize("subject", parameters, indirect=True)


def _covers(state: State, marker: pytest.Mark, target: Target) -> bool:
    if target.implementation is None:
        return True
    if state.chosen and not marker.kwargs.get("single", True):
        return False
    supports = target.implementation.supports
    return all(getattr(supports, claim) for claim in marker.kwargs.get("claims", ())) and bool(state.cases(marker, target))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    state = config.stash[STATE]
    if (state.selected or state.chosen) and not state.timed:  # a verification: the tests of the suite itself stay out
        checks = [item for item in items if item.get_closest_marker("check")]
        chosen = [item for item in checks if _target(item) is not None]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    # The checks with the most to do first, so that no long one is left to the end; and those of one grid and dtype together, whose exact results a worker then
    # remembers, and of one target; on a GPU, where items go to the workers one by one, those of one check, so that the forward finds the kernels that the
    # backward had compiled. Of a stranger's kernel, whose hosts take turns, too: a fault may be one dtype's. And before them the checks of the call itself:
    # they take a second, and a kernel that answers for another call shows it there.
    items.sort(key=lambda item: (not (state.hosts and item.path.name == "test_call.py"), *_weight(state, item)))
    for item in items:
        target = _target(item)
        if target is None:
            continue
        if target.missing:
            item.add_marker(pytest.mark.skip(reason=target.missing))
        elif defect := _defect(state, item, target):
            item.add_marker(pytest.mark.xfail(reason=f"{defect['seen']} ({defect['link']})", strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """On a GPU the longest come first. pytest-xdist gives each worker two to begin with, and takes none back: a short one goes with each long one."""
    items, workers = session.items, getattr(session.config, "workerinput", {}).get("workercount", 0)
    if torch.cuda.is_available() and 0 < 2 * workers <= len(items):
        rest = len(items) - workers
        pairs = zip(items[:workers], items[rest:], strict=True)
        items[:] = [*(item for pair in pairs for item in pair), *items[workers:rest]]


def _target(item: pytest.Item) -> Target | None:
    callspec = getattr(item, "callspec", None)
    target = callspec.params.get("subject") if callspec else None
    return target if isinstance(target, Target) else None


def _weight(state: State, item: pytest.Item) -> tuple[str, int, str, int]:
    target, marker = _target(item), item.get_closest_marker("check")
    if target is None or marker is None:
        # Tests of the suite itself come first. Those that need a GPU are short and come last, but for those that wait for kernels that hang.
        is_short = item.get_closest_marker("gpu") is not None and item.path.parent.name != "hostile"
        return "last" if is_short else "", 0, "", 0
    passes = 2 if "backward" in marker.kwargs.get("claims", ()) else 1
    neighbours = target.device == "cpu" and not state.hosts
    cases = len(state.cases(marker, target))
    return (target.device, -cases, f"{target.dtype} {target}", -passes) if neighbours else (target.device, -passes * cases, "", 0)


def _check_name(item: pytest.Item) -> str:
    """tests/accuracy/test_forward.py::test_grid is the check accuracy/grid."""
    return f"{item.path.parent.name}/{getattr(item, 'originalname', item.name).removeprefix('test_')}"


def _defect(state: State, item: pytest.Item, target: Target) -> dict[str, str] | None:
    if state.chosen:  # one case may well pass
        return None
    for defect in state.defects:
        if (
            defect["implementation"] == target.name
            and defect["device"] == target.device
            and target.dtype in defect["dtypes"]
            and _check_name(item) in defect["checks"]
        ):
            return defect
    return None


# ------------------------------------------------------------------------------------------------ running a check


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """The implementation, dtype and device under a check."""
    state, target = request.config.stash[STATE], request.param
    marker = request.node.get_closest_marker("check")
    defect = _defect(state, request.node, target)
    return Subject(
        implementation=target.implementation,
        dtype=target.dtype,
        device=target.device,
        check=_check_name(request.node),
        cases=state.cases(marker, target)[state.guest.after + 1 if state.guest else 0 :],
        run=state.run,
        emit=lambda record: _attach(request.node, record),
        defect=defect,
    )


class Recorder:
    """Lets a test of the suite add records that are not judgements: memory, traffic, curves, compiler figures."""

    def __init__(self, run: str, item: pytest.Item) -> None:
        self.run = run
        self._item = item

    def add(self, record: Record) -> None:
        """Adds a record to the run."""
        _attach(self._item, record)


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> Recorder:
    """Where a test puts what it measured."""
    return Recorder(request.config.stash[STATE].run, request.node)


def _attach(item: pytest.Item, record: Record) -> None:
    line = msgspec.json.encode(record).decode()
    state = item.config.stash[STATE]
    if state.diary:
        state.diary.write("record", line)
    if state.guest:
        state.guest.say("record", line)  # at once: the next call may be its last
    else:
        # User properties travel from a worker to the controller, so one process writes the file.
        item.user_properties.append(("flashproof", line))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    diary, subject = pyfuncitem.config.stash[STATE].diary, pyfuncitem.funcargs.get("subject")
    if diary and isinstance(subject, Subject):
        diary.begin(pyfuncitem.nodeid, subject.unfinished())
    try:
        result = yield
    except Exception as error:
        if isinstance(subject, Subject):
            subject.emit(subject.ended_by(error))  # whoever raised it: a check that did not come to its end is no pass in the report either
        raise
    finally:
        if diary:
            diary.end()
    if isinstance(subject, Subject):
        if subject.failures:
            pytest.fail(summary(subject), pytrace=False)
        if not subject.judged:
            pytest.skip(f"refused: {subject.refusals[0]}" if subject.refusals else "nothing to judge: no case of this check is one for this implementation")
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Only workers collect, under pytest-xdist; each tells the controller, at its end, what it found not to be claimed."""
    if _session_state is not None:
        for line in getattr(node, "workeroutput", {}).get("flashproof_absences", ()):
            absence = _decoder.decode(line)
            if isinstance(absence, Absence) and absence not in _session_state.absences:
                _session_state.absences.append(absence)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """A worker of pytest-xdist died in a check, which has failed with all that its diary holds. The run goes on with another worker."""
    state = _session_state
    if state is None or (left := Diary.read(state.shared, crashitem)) is None:
        return
    found = left.findings()
    for record in found:
        state.record(record)
    failures = [record for record in found if isinstance(record, Judgement) and record.status in ("failed", "known defect")]
    known = all(record.status == "known defect" for record in failures)
    words = [wording.failure_block(record) for record in failures]
    report.when, report.outcome = "call", "skipped" if known else "failed"
    report.location = (report.location[0], None, crashitem.rpartition("::")[2])
    report.longrepr = "\n\n".join([*words, "the process is of no further use: the other cases of this check were left out"])
    if known:
        report.wasxfail = failures[-1].message


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _session_state is not None and _session_state.guest:
        config = _session_state.config
        _session_state.guest.say("report", config.hook.pytest_report_to_serializable(config=config, report=report))
    if report.when != "call" or _session_state is None or _session_state.is_worker:
        return
    for name, text in report.user_properties:
        if name == "flashproof":
            _session_state.record(_decoder.decode(str(text)))


_decoder = msgspec.json.Decoder(Record)
_session_state: State | None = None  # pytest_runtest_logreport is given no config


def pytest_sessionstart(session: pytest.Session) -> None:
    global _session_state  # noqa: PLW0603
    _session_state = session.config.stash[STATE]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Under pytest-xdist every worker belongs to the controller's run."""
    node.workerinput["flashproof_run"] = node.config.stash[STATE].run  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ strangers


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In a run with hosts, has them run the checks; in a host that was started as a pytest of its own, is one."""
    state = session.config.stash[STATE]
    if state.guest:
        state.guest.serve(session)
        return True
    if not state.hosts or session.testsfailed:
        return None

    def enter(guest: Guest) -> None:
        state.guest, state.is_worker = guest, True

    def record(found: Record) -> None:
        state.record(found)
        _show_first(session.config, state, found)

    def failed(item: pytest.Item, line: str, message: str) -> str:
        target = _target(item)
        assert target is not None  # only checks are run in hosts
        judgement = Judgement(
            run=state.run,
            implementation=target.name,
            check=_check_name(item),
            case=line,
            dtype=target.dtype,
            device=target.device,
            status="failed",
            message=message,
        )
        record(judgement)
        return wording.failure_block(judgement)

    def limit(item: pytest.Item, first: bool) -> float:
        target = _target(item)
        return session.config.getoption("--time-limit") or (2 if first else 1) * TIME_LIMITS[target.device if target else "cpu"]

    def describe(item: pytest.Item) -> tuple[str, list[str]]:
        target, marker = _target(item), item.get_closest_marker("check")
        assert target is not None
        assert marker is not None
        return (target.name if ":" in target.name else ""), [str(case) for case in state.cases(marker, target)]

    spawns = torch.cuda.is_available() or session.config.getoption("--spawn")
    Hosts(session, count=state.hosts, limit=limit, describe=describe, record=record, failed=failed, enter=enter, run=state.run, spawns=spawns).run()
    return True


def _show_first(config: pytest.Config, state: State, record: Record) -> None:
    """Shows the first failure of each implementation as soon as it is found: whoever waits for it need not wait for the rest."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or not isinstance(record, Judgement) or record.status != "failed" or record.implementation in state.shown:
        return
    state.shown.add(record.implementation)
    reporter.write_line("")  # ends the line of dots
    reporter.write_line(wording.failure_block(record), red=True)


# ------------------------------------------------------------------------------------------------ the end of a run


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    state = session.config.stash[STATE]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["flashproof_absences"] = [msgspec.json.encode(absence).decode() for absence in state.absences]
    if state.is_worker or session.config.option.collectonly:
        return
    if state.written:
        for implementation in {target.name: target.implementation for target in state.targets}.values():
            if implementation is not None:
                state.record(_claim(state, implementation))
        for absence in state.absences:
            state.record(absence)
    if state.selected and not state.timed and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and _unverified(state):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _unverified(state: State) -> list[str]:
    """Selected implementations of which nothing passed, although they could run here; or that were named and cannot run here; all, if nothing passed at all."""
    named = [name for name in state.selected if not any(letter in name for letter in "*?[")]
    reasons = {target.name: target.missing for target in state.targets}
    untouched = [name for name in named if name not in reasons]  # claims neither the dtype nor the device that was asked for
    unverified = [name for name, missing in reasons.items() if not state.passed.get(name) and (missing is None or name in named)]
    return untouched + unverified or ([] if any(state.passed.values()) else list(reasons) or state.selected)  # a run that verified nothing is no success


def _unnamed(implementation: Implementation) -> list[str]:
    """The parameters that a bare callable could name and does not: it is never asked for what they mean. It may take them by **kwargs, or by other names."""
    supports = implementation.supports
    claimed = {
        "is_causal": bool(supports.causal),
        "causal_alignment": "bottom_right" in supports.causal,
        "scale": supports.scale != "default",
        "enable_gqa": supports.grouped_heads,
        "block_mask": supports.block_mask,
        "dropout_p with dropout_seed": supports.dropout,
        "return_lse": supports.lse,
    }
    return [parameter for parameter, named in claimed.items() if implementation.bare and not named]


def _unjudged(state: State, name: str) -> str:
    """Why nothing passed of an implementation, in words."""
    if missing := next((target.missing for target in state.targets if target.name == name and target.missing), None):
        return missing
    if (implementation := state.implementations.get(name)) is None:
        return "no case passed"
    supports = implementation.supports
    features = [feature for case in state.chosen if (feature := not_claimed(case, supports))]
    if features:
        return f"does not claim the case: {', '.join(dict.fromkeys(features))}"
    if state.device and state.device not in supports.devices:
        return f"does not claim {state.device}"
    if not set(state.dtypes) & set(supports.dtypes):
        return f"does not claim {', '.join(state.dtypes)}"
    return "no case passed"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    state = config.stash[STATE]
    if state.is_worker or config.option.collectonly:
        return
    if state.selected and not state.timed:
        for name in _unverified(state):
            terminalreporter.write_line(f"not verified: {name} ({_unjudged(state, name)})", red=True)
        for target in {target.name: target for target in state.targets if not state.chosen}.values():
            if ":" in target.name and target.implementation and (unnamed := _unnamed(target.implementation)):
                terminalreporter.write_line(f"not claimed: {target.name} has no parameter {', '.join(unnamed)}; nothing that these ask for was verified")
        for name, changed in state.changed_by_import.items():
            if changed:
                terminalreporter.write_line(f"put back: {name} changed {', '.join(changed)} when it was imported", yellow=True)
        for (name, dtype), said in state.refused.items():
            terminalreporter.write_line(f"refused: {name}, {dtype}, {len(said)} time{'s' if len(said) != 1 else ''}, first with: {said[0]}", yellow=True)
    for (name, dtype), found in state.found.items() if config.getoption("--search") else ():
        of = f", {found.worst.note}" if found.worst and found.status == "passed" else ""
        terminalreporter.write_line(f"search: {name}, {dtype}: rho {wording.rho(worst_rho(found))} of {found.tensor}{of}: {found.case}")
    if not state.written:
        return
    from reports.pages import write_site

    index = write_site([state.path], SITE)
    terminalreporter.write_line(f"records: {os.path.relpath(state.path)}")
    terminalreporter.write_line(f"report:  {os.path.relpath(index)}")


def _claim(state: State, implementation: Implementation) -> Claim:
    supports = implementation.supports
    arithmetic = {f"{dtype} on {device}": asdict(implementation.arithmetic(dtype, device)) for dtype in supports.dtypes for device in supports.devices}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(supports).items()}
    return Claim(
        run=state.run,
        implementation=implementation.name,
        summary=implementation.summary,
        supports=fields,
        arithmetic=arithmetic,
        bare=implementation.bare,
        one_code={device: list(dtypes) for device in supports.devices if (dtypes := implementation.one_code(device))},
    )


def environment(run: str) -> Environment:
    """Where and when a run takes place."""
    cuda = torch.cuda.is_available()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for module in ("triton", "hypothesis", "flint", "mpmath"):
        loaded = sys.modules.get(module)
        if loaded is not None and hasattr(loaded, "__version__"):
            versions[module] = str(loaded.__version__)
    if cuda:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)} | _driver()
    return Environment(
        run=run,
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        commit=_commit(),
        device=torch.cuda.get_device_name() if cuda else _processor(),
        kind="cuda" if cuda else "cpu",
        versions=versions,
        command=" ".join(["pytest", *sys.argv[1:]]),
    )


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return os.environ.get("GITHUB_SHA", "unknown")[:12]


def _processor() -> str:
    try:
        models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        models = []
    return f"{models[0]}, {len(models)} cores" if models else platform.processor() or platform.machine()


def _driver() -> dict[str, str]:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return {"driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]}
    except (OSError, subprocess.CalledProcessError, IndexError):
        return {}
