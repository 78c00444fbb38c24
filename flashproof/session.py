"""A run of pytest that verifies something: its options, its role among the processes of the run, and its records."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import msgspec
import pytest
import torch
from threadpoolctl import threadpool_limits

from flashproof import arrays, defects, exercised, judging, quick, search, space
from flashproof.defects import Defect
from flashproof.environment import environment, run_name
from flashproof.exercised import Exercised
from flashproof.impls.spec import Device, Implementation
from flashproof.loading import is_external
from flashproof.registry import Check, check_of, checks
from flashproof.reports import bundle, wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Absence, Claim, Covered, Judgement, Record, append
from flashproof.sandbox import journal
from flashproof.sandbox.journal import Journal
from flashproof.sandbox.worker import Worker
from flashproof.selection import Selection, parse_cases
from flashproof.settings import FOLDER, Settings
from flashproof.space import GRADIENTS, Space
from flashproof.subject import ENDED_BY, Subject
from flashproof.targets import Loaded, Target
from flashproof.words import parse_device, parse_dtypes

CATALOGUE_DEFECTS = Path(__file__).parent / "tests" / "known_defects.toml"
TIME_LIMITS: dict[Device, float] = {"cpu": 30.0, "cuda": 120.0}  # calls may compile; twice as long before one returns
QUICK_LIMIT = 0.25  # the share of these limits that holds in a quick run, whose cases are small
PROCESSES_ON_A_GPU = 16  # processes that share one GPU; they spend most of their time compiling kernels
SIMPLIFIED = 6  # failing checks of an implementation in a process; the cases of later ones are simplified briefly
SIMPLIFYING_LATE = 0.3  # seconds for each of these
NOT_ANSWERED = "not run: {} answers no call"
OTHER_PLACE = "give another place by --report or --records, or in [tool.flashproof] of pyproject.toml"

Role = Literal["main", "process", "worker"]  # process: of pytest-xdist; worker: of the pool


class Session:
    """The state of a run in one of its processes."""

    def __init__(self, config: pytest.Config) -> None:
        """Raises pytest.UsageError, which names the option, for an option that cannot be parsed."""
        self.config = config
        options = config.option
        sender: dict[str, str] | None = getattr(config, "workerinput", None)
        spawned: str | None = getattr(options, "flashproof_worker", None)
        self.role: Role = "process" if sender else "worker" if spawned else "main"
        self.run = sender["flashproof_run"] if sender else spawned.split(",")[3] if spawned else run_name()
        self.shared = Path(tempfile.gettempdir()) / f"flashproof-{self.run}"  # the run's processes share it
        self.worker = Worker.spawned(spawned) if spawned else None
        self.journal = Journal(self.shared) if sender else None
        self.is_clone = config.rootpath / "flashproof" == Path(__file__).parent
        self.times: bool = config.getoption("benchmark_only", default=False)  # a run of benchmarks verifies nothing
        self.shown: set[str] = set()  # implementations whose first failure was shown during the run
        self.written = 0
        self.chosen: int | None = None  # tests collected before -k applies; None if other processes collect
        self.status: int | None = None  # the exit status, once the run has ended
        self.others: set[str] = set()  # tests of the project itself, which run if paths are given
        self.outcomes: Counter[str] = Counter()  # of checks: passed, failed, known defect, skipped
        self.reasons: Counter[str] = Counter()  # the reasons why checks were skipped
        self.failures: list[Judgement] = []
        self.failing: set[tuple[str, str, str]] = set()  # implementation, check and dtype of failures in this process
        self.errors: list[str] = []  # errors of checks that did not end with a finding
        self.passed: dict[str, int] = {}
        self.passed_in: set[tuple[str, str]] = set()  # implementations and dtypes with any passed judgement
        self.with_gradient: set[tuple[str, str]] = set()  # implementations and dtypes with a judged gradient
        self.without_gradient: dict[tuple[str, str], set[str]] = {}  # the cases in which they refused a backward
        self.refused: dict[tuple[str, str], list[str]] = {}  # messages of refusals, by implementation and dtype
        self.left_out: dict[tuple[str, Device], str] = {}  # implementations that answer no call, and why
        self.found: dict[tuple[str, str], Judgement] = {}  # the worst case of a search, by implementation and dtype
        with named("--require"):
            self.exercised = Exercised(exercised.parse(getattr(config.option, "flashproof_require", None) or []))
        self.strict = bool(getattr(config.option, "flashproof_strict_verdict", False))
        self.listeners: list[Callable[[Record], None]] = []  # functions that receive each record that is written
        self.command = ""  # what started the run, if not pytest
        with named("[tool.flashproof]"):
            self.settings = Settings.of(config.rootpath)
        self._read_options()
        self.absences = [
            Absence(
                run=self.run,
                implementation=target.name,
                device=target.device,
                dtype=target.dtype,
                reason="not possible here",
                message=target.missing,
            )
            for target in self.selection.targets
            if target.missing
        ]
        self.defects = defects.read(CATALOGUE_DEFECTS)
        with named("[tool.flashproof] known_defects"):
            if own := self.settings.known_defects:
                defects.check_names(found := defects.read(own))
                self.defects += found

    def _read_options(self) -> None:
        def given(name: str) -> list[str]:
            return getattr(self.config.option, f"flashproof_{name}", None) or []

        with named("--dtype"):
            dtypes = parse_dtypes(given("dtype"))
        with named("--case"):
            cases = parse_cases(given("case"), dtypes if given("dtype") else [])
        with named("--dtype"):
            if others := [case.dtype for case in cases if given("dtype") and case.dtype not in dtypes]:
                raise ValueError(f"the case is in {others[0]}")
        with named("--device"):
            device = parse_device(getattr(self.config.option, "flashproof_device", None))
        self.asked = bool(given("impl") or cases)  # a verification, which excludes the suite's own tests
        by_name = bool(self.config.getoption("keyword")) or any("::" in str(word) for word in self.config.args)
        is_quick = bool(getattr(self.config.option, "flashproof_quick", False)) and not cases
        is_thorough = bool(getattr(self.config.option, "flashproof_thorough", False))
        with named("--quick"):
            if is_quick and is_thorough:
                raise ValueError("cannot be combined with --thorough; give only one of them")
        self.clock = quick.Clock(self.shared / "clock") if is_quick else None  # the clock of a quick run
        with named("--impl"):
            self.selection = Selection(given("impl"), dtypes, device, cases, by_name, is_quick, is_thorough)
        records = getattr(self.config.option, "flashproof_records", None)
        report = getattr(self.config.option, "flashproof_report", None)
        folder = Path(report) / "runs" if report else self.settings.records
        with named("--records"):
            self.path = _writable(Path(records)) if records else folder / f"{self.run}.jsonl"
        # Records in a place of their own become part of a report only on request. In a quick run, writing a report
        # would double the time.
        self.site = Path(report) if report else None if records or self.clock else self.settings.report

    def check_places(self) -> None:
        """Raises pytest.UsageError before the run if a file of the run cannot be written."""
        for option, folder in (("--report", self.site), ("--records", self.path.parent)):
            with named(option):
                _check_folder(folder or self.path.parent)
        if junit := getattr(self.config.option, "xmlpath", None):
            with named("--junitxml"):
                _check_folder(Path(junit).parent, "give another file")

    def _make_report_folder(self) -> None:
        """Makes the report folder with a .gitignore, if the folder has the default name and does not exist."""
        folder = self.settings.report
        if folder.name == FOLDER and not folder.exists() and folder in (self.site, *self.path.parents):
            folder.mkdir(parents=True)
            (folder / ".gitignore").write_text("*\n")

    # ------------------------------------------------------------------------------------------ beginning and end

    def begin(self) -> None:
        """Prepares this process."""
        # The cases are small. A second thread would mostly wait, and other processes use the cores better. NumPy's
        # threads, which Triton's interpreter starts, spin while they wait.
        torch.set_num_threads(1)
        threadpool_limits(1, user_api="blas")
        # In each process of the run, torch.compile would start one more process for each core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        share_triton_cache()
        judging.share(self.shared)
        arrays.share(self.shared)
        if self.selection.thorough:
            judging.certify_fewer()
        if self.role == "main":
            if self.asked and not self.times:
                self.check_places()
            self.shared.mkdir(mode=0o700, parents=True)
        if budget := getattr(self.config.option, "flashproof_search", None):
            with named("--search"):
                search.begin(search.Budget.parse(budget), self.run, is_main=self.role == "main")

    def end(self) -> None:
        """Ends the search and removes the shared folder."""
        search.end()
        if self.role == "main":
            shutil.rmtree(self.shared, ignore_errors=True)

    # ---------------------------------------------------------------------------------------------------- checks

    def subject(self, item: pytest.Item, target: Target) -> Subject:
        """The subject that a check receives."""
        check = check_of(getattr(item, "function", None))
        assert check is not None
        assert target.implementation is not None
        if (target.name, target.device) in self.left_out:
            pytest.skip(NOT_ANSWERED.format(target.name))
        begin = self.worker.after + 1 if self.worker else 0
        cases = self.selection.cases_of(check, target)[begin:]
        return Subject(
            implementation=target.implementation,
            dtype=target.dtype,
            device=target.device,
            check=check.name,
            space=self.selection.space_of(target),
            cases=self.clock.limited(cases) if self.clock else cases,
            run=self.run,
            emit=lambda record: self.attach(item, record),
            defects=self._defects_of(check, target),
            observer=self.worker or self.journal,
            simplifying=self._simplifying(target),
        )

    def _simplifying(self, target: Target) -> float:
        """The seconds in which a failure's case may be made simpler. After several failing checks, they are few."""
        if self.clock:
            return quick.SIMPLIFYING
        count = sum(name == target.name for name, _, _ in self.failing)
        return Subject.simplifying if count < SIMPLIFIED else SIMPLIFYING_LATE

    def build_arrays(self, items: Sequence[pytest.Item]) -> None:
        """Builds the arrays of these items' cases, as far as no other process of pytest-xdist builds them."""
        targets = [target for target in map(target_of, items) if target and target.implementation]
        spaces = dict.fromkeys(self.selection.space_of(target) for target in targets)
        built = [space.build() for space in spaces]
        if not all(built):  # The import takes seconds, and most processes need it. There is time until the rows exist.
            import torch._dynamo  # noqa: F401

    def defect(self, check: Check, target: Target) -> Defect | None:
        """The known defect of an implementation that a check finds in all cases."""
        return next((defect for defect in self._defects_of(check, target) if not defect.where), None)

    def _defects_of(self, check: Check, target: Target) -> list[Defect]:
        """The known defects that a check may find in an implementation. None for single cases, which may well pass."""
        if self.selection.cases:
            return []
        about = (target.name, target.device)
        return [
            defect
            for defect in self.defects
            if (defect.implementation, defect.device) == about
            and target.dtype in defect.dtypes
            and {check.name, defects.EVERY} & set(defect.checks)
        ]

    def gone(self, item: pytest.Item) -> str:
        """Advice about a known defect that a check no longer finds."""
        target, check = target_of(item), check_of(getattr(item, "function", None))
        defect = self.defect(check, target) if check and target else None
        if check is None or target is None or defect is None:
            return "the test passed, and was expected to fail"
        return (
            f"a known defect is gone: {check.name} passes {target.name} in {target.dtype} on {target.device}\n"
            f"remove {check.name!r} or {target.dtype!r} from {defect.place}"
        )

    def weight(self, item: pytest.Item) -> tuple[str | bool | int, ...]:
        """The sort key of an item in the order of a run."""
        target, check = target_of(item), check_of(getattr(item, "function", None))
        if target is None or check is None:
            # The suite's own tests come first. Those that need a GPU are short and come last, except those that wait
            # for kernels that hang.
            is_short = item.get_closest_marker("gpu") is not None and item.path.parent.name != "sandbox"
            return (False, "last" if is_short else "", 0, "", 0)
        if self.clock:
            return (False, target.device, quick.place(check.name), target.dtype, 0)
        if self.uses_pool:
            # An external kernel has the early checks first, and then those of the array. Its dtypes alternate, since a
            # fault may affect one dtype only.
            return (False, target.device, 0 if check.early else 1 if check.call else 2, "", 0)
        place = 0 if check.call else 1  # the checks of the array have more to do than others, so they come first
        if target.device == "cpu":
            # The items of one check and dtype are adjacent, since a process caches their exact results.
            return (False, target.device, place, f"{check.name} {target.dtype}", 0)
        # On a GPU, the longest work comes first, and all checks of one implementation and dtype are adjacent. The fewer
        # dtypes an implementation has, the more cases each dtype has.
        slow = target.implementation.slow(target.device) if target.implementation else None
        dtypes = len(target.implementation.supports.dtypes) if target.implementation else 0
        heavy = 10 * ("call", "shape", None, "variant", "tile").index(slow) + dtypes
        return (False, target.device, heavy, f"{target.name} {target.dtype}", place)

    @property
    def is_whole(self) -> bool:
        """Whether the run verifies everything that its implementations claim, and no option leaves anything out."""
        return self.whole_on == list(get_args(Device))

    @property
    def whole_on(self) -> list[Device]:
        """The devices on which the run verifies everything that its implementations claim."""
        options = ("deselect", "lf", "stepwise", "maxfail", "ignore", "ignore_glob")
        narrowed = any(self.config.getoption(name, default=None) for name in options)
        verifies = (self.asked or self.is_clone) and not self.times  # in a clone, `pytest` verifies the catalogue
        if not verifies or not self.selection.is_whole or narrowed or self.has_paths:
            return []
        marks = self.config.getoption("markexpr", default="").strip()
        chosen = {"": get_args(Device), "gpu": ("cuda",)}.get(marks, ())
        return [device for device in get_args(Device) if device in chosen and self.selection.device in (None, device)]

    @property
    def has_paths(self) -> bool:
        """Whether the command line names files or folders to collect."""
        return self.config.args_source is pytest.Config.ArgsSource.ARGS

    @property
    def orders(self) -> bool:
        """Whether the run may reorder its tests. It does not reorder the tests of another project."""
        return self.asked or self.role == "worker" or self.is_clone

    @property
    def uses_pool(self) -> bool:
        """Whether workers of the pool run the checks."""
        return self.pool_size > 0

    @property
    def pool_size(self) -> int:
        """The number of workers that the main process starts."""
        return self.config.stash.get(POOL_SIZE, 0)

    # ---------------------------------------------------------------------------------------------------- records

    def attach(self, item: pytest.Item, record: Record) -> None:
        """Sends a record of an item towards the file of the run, which the main process writes."""
        if isinstance(record, Judgement) and record.status == "failed":
            self.failing.add((record.implementation, record.check, record.dtype))
        line = msgspec.json.encode(record).decode()
        if self.journal:
            self.journal.record(line)
        if self.worker:
            self.worker.record(line)  # at once, since the next call may end the process
        else:
            item.user_properties.append(("flashproof", line))  # pytest-xdist sends them to the main process

    def record(self, record: Record) -> None:
        """Writes a record. The first one follows a record of the environment."""
        if not self.written:
            self._make_report_folder()
            append(self.path, environment(self.run, whole_on=self.whole_on, command=self.command))
        append(self.path, record)
        self.written += 1
        for listener in self.listeners:
            listener(record)
        if not isinstance(record, Judgement):
            return
        self.exercised.add(record)
        of = record.implementation, record.dtype
        if record.status == "passed":
            self.passed[record.implementation] = self.passed.get(record.implementation, 0) + 1
            self.passed_in.add(of)
        if record.status in ("passed", "failed") and record.tensor in GRADIENTS:
            self.with_gradient.add(of)
        if record.status == "failed":
            self.failures.append(record)
        if record.of_every_call and not self.passed.get(record.implementation):
            # A refusal applies to one device. A function that returns no tensor does so on every device.
            for device in (record.device,) if record.status == "refused" else get_args(Device):
                self.left_out.setdefault((record.implementation, device), record.message)
        if record.status == "refused":
            self.refused.setdefault(of, []).append(record.message)
            check = checks().get(record.check)
            if check and "backward" in check.claims:
                self.without_gradient.setdefault(of, set()).add(record.case)
        if record.check.endswith("_search") and record.rho is not None:
            before = self.found.get((record.implementation, record.dtype))
            if before is None or size(worst_rho(record)) >= size(worst_rho(before)):
                self.found[record.implementation, record.dtype] = record

    def take_report(self, report: pytest.TestReport) -> None:
        """Writes the records that pytest's report of a check contains. A worker sends the report to the pool."""
        if self.worker:
            hook = self.config.hook
            self.worker.report(hook.pytest_report_to_serializable(config=self.config, report=report))
        if self.role != "main":
            return
        if report.when == "call":
            for name, text in report.user_properties:
                if name == "flashproof":
                    self.record(_decoder.decode(str(text)))
        # Nothing else needs these records, and pytest's JUnit XML would contain them.
        report.user_properties = [(name, text) for name, text in report.user_properties if name != "flashproof"]
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self._count(report)

    def _count(self, report: pytest.TestReport) -> None:
        """Counts a check that has ended."""
        if report.nodeid in self.others:
            return
        is_known = hasattr(report, "wasxfail") and report.outcome == "skipped"
        self.outcomes["known defect" if is_known else report.outcome] += 1
        if report.outcome == "skipped" and not is_known:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.reasons[str(reason).removeprefix("Skipped: ")] += 1
        if report.outcome == "failed" and (report.when != "call" or not self._is_told(report)):
            self.errors.append(report.longreprtext)

    def _is_told(self, report: pytest.TestReport) -> bool:
        """Whether a finding explains the failure of a check."""
        told = [one for one in self.failures if not one.message.startswith(ENDED_BY)]
        found = {(one.check.partition("/")[2], one.implementation, one.dtype) for one in told}
        return any(f"test_{check}[{name}-{dtype}-" in report.nodeid for check, name, dtype in found)

    @contextmanager
    def journalled(self, test: str, subject: Subject) -> Generator[None]:
        """Keeps a journal while a check runs, in a process that a crash would end."""
        if self.journal:
            self.journal.begin(test, subject.unfinished())
        try:
            yield
        finally:
            if self.journal:
                self.journal.end()

    def take_absences(self, lines: list[str]) -> None:
        """Adds the absences that a process of pytest-xdist found. Only these processes collect."""
        for line in lines:
            absence = _decoder.decode(line)
            if isinstance(absence, Absence) and absence not in self.absences:
                self.absences.append(absence)

    def covered(self, loaded: Loaded) -> dict[str, Covered]:
        """What an implementation's cases cover, by device. Empty if the run has its own choice of cases or checks."""
        selection = self.selection
        if selection.cases or selection.by_name or selection.quick or loaded.implementation is None:
            return {}
        devices = {target.device for target in selection.targets if target.name == loaded.name and not target.missing}
        return {
            device: _covered(selection.space_of_loaded(loaded.implementation, device)) for device in sorted(devices)
        }

    def close(self, *, ended: bool = True, verdict: str = "") -> None:
        """Writes the last records: the claims of the implementations, what was not verified, and the seal.

        ended: whether every collected check was run. verdict: the last line of the run.
        """
        if not self.written:
            return
        for loaded in self.selection.loaded:
            if loaded.implementation is not None:
                covered = self.covered(loaded)
                self.record(_claim(self.run, loaded.implementation, ended=ended, covered=covered, verdict=verdict))
        for absence in self.absences:
            self.record(absence)
        with suppress(ValueError):  # an earlier run that died left half a line in this file; no bundle holds one
            selection = self.selection
            bundle.seal(self.path, case_set=space.CASE_SET, effort=selection.effort, dtypes=selection.dtypes)


STATE = pytest.StashKey[Session]()
POOL_SIZE = pytest.StashKey[int]()
_decoder = msgspec.json.Decoder(Record)


class PoolRun:
    """The pool's interface to the session (`sandbox.pool.Run`)."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.name = session.run

    def limit(self, item: pytest.Item, *, first: bool) -> float:
        """The time limit of a call, in seconds."""
        target = target_of(item)
        limit: float | None = getattr(self.session.config.option, "flashproof_time_limit", None)
        usual = (QUICK_LIMIT if self.session.clock else 1.0) * TIME_LIMITS[target.device if target else "cpu"]
        return limit or (2 if first else 1) * usual

    def owner(self, item: pytest.Item) -> str:
        """The external kernel of a check, or "" if it has none."""
        target = target_of(item)
        return target.name if target and is_external(target.name) else ""

    def left_out(self, item: pytest.Item) -> str:
        """The reason to leave a check out, if its kernel answers no call; else empty."""
        target = target_of(item)
        if target is None or (target.name, target.device) not in self.session.left_out:
            return ""
        return NOT_ANSWERED.format(target.name)

    def cases(self, item: pytest.Item) -> list[str]:
        """The case lines of a check."""
        target, check = target_of(item), check_of(getattr(item, "function", None))
        assert target is not None
        assert check is not None
        return [str(case) for case in self.session.selection.cases_of(check, target)]

    def record(self, record: Record) -> None:
        """Writes a record, and prints the first failure of each implementation at once."""
        self.session.record(record)
        reporter = self.session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is None or not isinstance(record, Judgement) or record.status != "failed":
            return
        if record.implementation not in self.session.shown:
            self.session.shown.add(record.implementation)
            reporter.write_line("")  # ends the line of dots
            reporter.write_line(wording.failure_block(record), red=True)

    def fail(self, item: pytest.Item, case: str, message: str) -> str:
        """Records a failure that a worker could not record itself. Returns the failure in words."""
        target, check = target_of(item), check_of(getattr(item, "function", None))
        assert target is not None
        assert check is not None
        judgement = Judgement(
            run=self.session.run,
            implementation=target.name,
            check=check.name,
            case=case,
            dtype=target.dtype,
            device=target.device,
            status="failed",
            message=message,
        )
        self.record(judgement)
        return wording.failure_block(judgement)

    def become_worker(self, worker: Worker) -> None:
        """Makes the session of a fork the session of a worker."""
        self.session.worker, self.session.role = worker, "worker"


def target_of(item: pytest.Item) -> Target | None:
    """The target of a check's item."""
    callspec = getattr(item, "callspec", None)
    target = callspec.params.get("subject") if callspec else None
    return target if isinstance(target, Target) else None


def left_by_a_crash(session: Session, test: str) -> list[Record]:
    """The records that a process of pytest-xdist left of a check in which it died. Empty if it left no journal."""
    left = journal.read(session.shared, test)
    return left.findings() if left else []


def processes() -> int:
    """The number of processes of a run: one for each core, and at most PROCESSES_ON_A_GPU if there is a GPU."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, PROCESSES_ON_A_GPU) if torch.cuda.is_available() else cores


def share_triton_cache() -> None:
    """Sets Triton's cache folder if the user has not set it.

    Otherwise Inductor gives each process in which it compiles another cache folder.
    """
    if torch.cuda.is_available() and find_spec("triton"):
        import triton

        os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


@contextmanager
def named(option: str) -> Generator[None]:
    """Turns an error into a pytest.UsageError that names the option."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        raise pytest.UsageError(f"{option}: {error}") from error


def _writable(path: Path) -> Path:
    """The path of a file, whose folder is made. Raises OSError if the file cannot be written."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file")
    _check_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written to; name another file")
    return path


def _check_folder(folder: Path, advice: str = OTHER_PLACE) -> None:
    """Raises OSError if a folder cannot be made, or cannot hold a new file. It leaves nothing there."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    shown = os.path.relpath(there)
    if not there.is_dir():
        raise NotADirectoryError(f"{shown} is not a folder; {advice}")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise OSError(f"the folder {shown} cannot be written to ({error.strerror}); {advice}") from error


def _covered(space: Space) -> Covered:
    pairs, triples = space.coverage
    forbidden, no_room = space.left_out
    return Covered(
        cases=space.size,
        pairs=pairs.covered,
        possible_pairs=pairs.possible,
        triples=triples.covered,
        possible_triples=triples.possible,
        forbidden=forbidden,
        no_room=no_room,
    )


def _claim(
    run: str, implementation: Implementation, *, ended: bool, covered: dict[str, Covered], verdict: str
) -> Claim:
    supports = implementation.supports
    return Claim(
        run=run,
        implementation=implementation.name,
        summary=implementation.summary,
        supports={key: list(value) if isinstance(value, tuple) else value for key, value in asdict(supports).items()},
        arithmetic={
            f"{dtype} on {device}": asdict(implementation.arithmetic(dtype, device))
            for dtype in supports.dtypes
            for device in supports.devices
        },
        bare=implementation.bare,
        slow={device: implementation.slow(device) or "" for device in supports.devices},
        ended=ended,
        covered=covered,
        verdict=verdict,
    )
