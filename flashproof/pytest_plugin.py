"""The pytest plugin: hooks only.

pytest loads the plugin wherever flashproof is installed. The plugin does nothing, and loads neither PyTorch nor a
kernel, unless `--impl` is given or a check is collected. Then it registers `Verification`, which contains the other
hooks and the fixtures.
"""

import argparse
import gc
import importlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flashproof import summary
    from flashproof.session import Session
    from flashproof.subject import Recorder, Subject

PACKAGE = Path(__file__).parent
TESTS = tuple({PACKAGE / "tests", (PACKAGE / "tests").resolve()})
OPTION = "--impl"
PLAIN_SUMMARY = "fE"  # pytest's -r if nobody sets it
VERIFICATION = "flashproof-verification"  # the plugin that is registered if there is something to verify


# ------------------------------------------------------------------------------------------------- the command line


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Adds the options only if they are used, since a project may have its own options with these names."""
    config = pluginmanager.get_plugin("pytestconfig")
    given = [str(word) for word in config.invocation_params.args] if config else []
    if any(word.partition("=")[0] in (OPTION, "--help", "-h") for word in given):
        add_options(parser)


def add_options(parser: pytest.Parser) -> None:
    """Adds the options of flashproof."""
    group = parser.getgroup("flashproof", "verification of attention kernels")
    if group.options:
        return

    def add(option: str, says: str, **words: Any) -> None:
        group.addoption(option, dest=f"flashproof_{option[2:].replace('-', '_')}", help=says, **words)

    many: dict[str, Any] = {"action": "append", "default": []}
    add(
        OPTION,
        "verify this: a name or glob of the catalogue, pkg.mod:attr or path/file.py:attr",
        metavar="NAME",
        **many,
    )
    add("--dtype", "only this dtype: float32, float16 or bfloat16; repeatable", metavar="DTYPE", **many)
    add("--device", "only on this device: cpu or cuda", metavar="DEVICE")
    add("--case", "only this case (the line of a failure), by every check; repeatable", metavar="LINE", **many)
    add(
        "--quick",
        "a few checks and cases that find most faults within seconds; this is not a whole verification",
        action="store_true",
    )
    add(
        "--thorough",
        "also the cases that all triples of levels need; takes many times as long",
        action="store_true",
    )
    add("--search", "how much each search tries: cases (5000) or time (30s, 10m, 8h); Ctrl-C ends it", metavar="BUDGET")
    add(
        "--require",
        "fail unless these were verified: backward, causal, dropout, float16 ...; separate them by commas",
        metavar="FEATURES",
        **many,
    )
    # pytest has its own --strict.
    add("--strict-verdict", "fail if something could not be verified, and say what", action="store_true")
    add(
        "--time-limit",
        "the limit for one forward of an external kernel, and for one backward",
        metavar="SECONDS",
        type=_seconds,
    )
    add("--records", "write the records to this file; no report is written then", metavar="FILE")
    add("--report", "write the report to this folder, instead of flashproof-report", metavar="DIR")
    add("--spawn", argparse.SUPPRESS, action="store_true")  # starts workers as on a machine with a GPU
    add("--worker", argparse.SUPPRESS)  # this process is a worker of another process: sandbox/worker.py


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:  # also for NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give a number of seconds above 0")
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Leaves the project's conftest files out of a run without paths, since their fixtures are not for the checks."""
    known = early_config.known_args_namespace
    if getattr(known, "flashproof_impl", None) and not known.file_or_dir and not is_clone(early_config):
        known.noconftest = True


def is_clone(config: pytest.Config) -> bool:
    """Whether the run takes place in a clone of flashproof."""
    return config.rootpath / "flashproof" == PACKAGE


def is_asked_for(config: pytest.Config) -> bool:
    return any(getattr(config.option, f"flashproof_{name}", None) for name in ("impl", "case", "search", "worker"))


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Before pytest-xdist starts, chooses workers in place of its processes for a run with an external kernel."""
    if is_asked_for(config):
        from flashproof.processes import choose

        choose(config)
    return (yield)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The number of processes of `-n auto`."""
    if not is_asked_for(config) and not is_clone(config):
        return None
    from flashproof.processes import automatic

    return automatic(config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prepares a verification if one is asked for."""
    if is_asked_for(config) or is_clone(config):
        activate(config)


def activate(config: pytest.Config) -> None:
    """Registers the hooks and fixtures of a verification, once."""
    if not config.pluginmanager.has_plugin(VERIFICATION):
        from flashproof.session import STATE, Session

        session = config.stash[STATE] = Session(config)
        session.begin()
        config.pluginmanager.register(Verification(session), VERIFICATION)


# ------------------------------------------------------------------------------------------------------ collection


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool | None:
    """Collects flashproof's checks, and nothing else, if no path is given."""
    config = session.config
    if config.getoption("benchmark_only", default=False):
        return None
    if config.args_source is pytest.Config.ArgsSource.ARGS or not is_asked_for(config):
        return None
    if config.pluginmanager.has_plugin("dsession"):  # the processes of pytest-xdist collect
        return None
    from flashproof.registry import files

    places = [(name, PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")) for name in files()]
    modules = [
        CheckModule.from_parent(session, path=path, name=name, nodeid="/".join(path.parts[-3:]))
        for name, path in places
    ]
    session.items = [item for module in modules for item in session.genitems(module)]
    config.hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
    config.hook.pytest_collection_finish(session=session)
    session.testscollected = len(session.items)
    return True


class CheckModule(pytest.Module):
    """A module of flashproof's tests. It is imported under one name, wherever it is collected."""

    def _getobj(self) -> object:
        parts = self.path.with_suffix("").parts
        folders = [folder for folder in TESTS if self.path.is_relative_to(folder)]
        return importlib.import_module(".".join(["flashproof", "tests", *parts[len(folders[0].parts) :]]))

    def funcnamefilter(self, name: str) -> bool:
        """Whether a function is a test, independent of the project's own pattern."""
        return name.startswith("test_")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Makes the modules of flashproof's tests check modules."""
    if not any(module_path.is_relative_to(folder) for folder in TESTS):
        return None
    module: pytest.Module = CheckModule.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects the folders of flashproof's tests. As packages, pytest would import them under a second name."""
    if not any(path.is_relative_to(folder) for folder in TESTS):
        return None
    folder: pytest.Dir = pytest.Dir.from_parent(parent, path=path)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> None:
    """Prepares a verification when the first check is collected."""
    if getattr(obj, "flashproof_check", None) is not None:
        activate(collector.config)


# ----------------------------------------------------------------------------------------------------- verification


class Verification:
    """The hooks and fixtures of a run that verifies something."""

    def __init__(self, session: "Session") -> None:
        self.session = session

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> "Subject":
        """The implementation, dtype and device under a check."""
        return self.session.subject(request.node, request.param)

    @pytest.fixture
    def recorder(self, request: pytest.FixtureRequest) -> "Recorder":
        """Records what a check measures."""
        from flashproof.subject import Recorder

        return Recorder(self.session.run, lambda record: self.session.attach(request.node, record))

    def pytest_configure(self, config: pytest.Config) -> None:
        """Registers the marker of tests that run on a GPU."""
        config.addinivalue_line("markers", "gpu: runs on a CUDA device")

    def pytest_unconfigure(self) -> None:
        """Ends the session."""
        self.session.end()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Turns a check into one test for each target that claims it."""
        if "subject" in metafunc.fixturenames:
            from flashproof.parametrizing import parameters

            metafunc.parametrize("subject", parameters(self.session, metafunc), indirect=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Chooses, orders and marks the items."""
        from flashproof.parametrizing import arrange

        arrange(self.session, config, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Raises an error if -k left no tests."""
        from flashproof.parametrizing import check_keyword

        if self.session.role == "main" and self.session.chosen is not None:
            check_keyword(self.session, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Raises the same error if the processes of pytest-xdist collect."""
        from flashproof.parametrizing import check_keyword

        check_keyword(self.session, len(ids))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs the checks in workers if there is an external kernel. In a worker, serves the pool."""
        from flashproof.processes import run_in_workers

        if self.session.role == "process":
            self.session.build_arrays(session.items)
        gc.freeze()  # modules, items and arrays live until the end, so the garbage collector need not visit them
        return run_in_workers(self.session, session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Starts no further check after the end of a quick run's time."""
        from flashproof.registry import check_of

        check = check_of(getattr(item, "function", None))
        if self.session.clock and check and self.session.clock.leaves_out(check.name):
            from flashproof.quick import LATE

            pytest.skip(LATE)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds advice if a known defect is gone."""
        report = yield
        if str(report.longrepr).startswith("[XPASS(strict)]"):
            report.longrepr = self.session.gone(item)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Turns the findings of a check into its outcome."""
        from flashproof.subject import Subject, concluded

        subject = pyfuncitem.funcargs.get("subject")
        if not isinstance(subject, Subject):
            return (yield)
        with self.session.journalled(pyfuncitem.nodeid, subject), concluded(subject):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the records of a report. In a worker, sends the report to the pool."""
        self.session.take_report(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> object | None:
        """On a GPU, gives each process whole implementations, except those that are compiled for each call."""
        import torch

        if not torch.cuda.is_available() or not self.session.orders:
            return None
        from flashproof.impls import catalogue
        from flashproof.loading import load
        from flashproof.scheduling import ByImplementation

        compiled = [name for name in catalogue.names(["*"]) if load(name).slow("cuda") == "call"]
        return ByImplementation(config, log, spread=compiled)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Sends the name of the run to a process of pytest-xdist."""
        node.workerinput["flashproof_run"] = self.session.run

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Takes the absences that a process of pytest-xdist found."""
        self.session.take_absences(getattr(node, "workeroutput", {}).get("flashproof_absences", []))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Completes the report of a check in which a process of pytest-xdist died."""
        from flashproof.processes import complete_crash

        complete_crash(self.session, crashitem, report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Writes the last records. A run that did not verify everything that was selected is not a success."""
        from flashproof.summary import settle

        settle(self.session, session, exitstatus)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: Any, exitstatus: int, config: pytest.Config
    ) -> Generator[None, None, None]:
        """Prints failures in flashproof's form, what was not verified, where the records are, and the verdict."""
        from flashproof import summary

        session, option = self.session, config.option
        if session.role != "main" or option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
            return (yield)

        def write(lines: "Iterable[summary.Line]") -> None:
            for line in lines:
                terminalreporter.write_line(line.text, **({line.color: True} if line.color else {}))

        # Failures are printed once, in place of pytest's output for each check, unless --tb asks for a style of pytest.
        # pytest prints the failures of the project's own tests, if there are any.
        failed = terminalreporter.stats.get("failed", [])
        before = list(failed), option.tbstyle, terminalreporter.reportchars
        if session.asked and option.tbstyle == "auto":
            write(summary.failures(session))
            if session.others:
                failed[:] = [report for report in failed if report.nodeid in session.others]
            else:
                option.tbstyle = "no"
            if option.reportchars == PLAIN_SUMMARY:
                terminalreporter.reportchars = before[2].replace("f", "")
        write(summary.last_lines(session))
        write(summary.places(session))
        try:
            yield
        finally:
            failed[:], option.tbstyle, terminalreporter.reportchars = before
        if session.asked and not session.times:
            write([summary.verdict(session)])
