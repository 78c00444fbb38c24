"""A verification that starts outside pytest: which words pytest is given, and what comes of them.

The command `flashproof` and `flashproof.verify` run pytest with a configuration of their own. The pytest.ini, the
conftest files and the other plugins of the caller play no part. The table `[tool.flashproof]` of the working folder's
pyproject.toml does.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flashproof.reports.record import Record

if TYPE_CHECKING:
    from flashproof.session import Session

CONFIGURATION = Path(__file__).with_name("isolated.ini")
# No plugin but these, no output of pytest's own, and no file but the records. The plugin that collects log messages
# would make torch.compile write its traces, which takes a tenth of its time.
ALONE = (
    *("--disable-plugin-autoload", "-p", "xdist.plugin", "-p", "flashproof.pytest_plugin"),
    *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:logging", "--assert=plain"),
)
FOREIGN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_AUTO_NUM_WORKERS")  # variables that would add to the words
Processes = int | str  # how many, or "auto"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be verified, and how. The fields are the options of `pytest --impl`."""

    targets: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    device: str | None = None
    cases: tuple[str, ...] = ()
    quick: bool = False
    thorough: bool = False
    search: str | None = None
    require: tuple[str, ...] = ()
    strict: bool = False
    time_limit: float | None = None
    processes: Processes = "auto"
    keyword: str | None = None
    records: Path | None = None
    report: Path | None = None
    junitxml: Path | None = None

    def words(self) -> list[str]:
        """The words that pytest is given."""
        found = ["-c", str(CONFIGURATION), f"--rootdir={Path.cwd()}", *ALONE, "-n", str(self.processes)]
        several = {"impl": self.targets, "dtype": self.dtypes, "case": self.cases, "require": self.require}
        for option, values in several.items():
            found += [f"--{option}={value}" for value in values]
        single = {
            "--device": self.device,
            "--search": self.search,
            "--time-limit": self.time_limit,
            "--records": self.records,
            "--report": self.report,
            "--junitxml": self.junitxml,
            "-k": self.keyword,
        }
        for name, value in single.items():
            if value is not None:
                found += [f"{name}={value}"] if name.startswith("--") else [name, str(value)]
        flags = {"--quick": self.quick, "--thorough": self.thorough, "--strict-verdict": self.strict}
        return found + [flag for flag, is_given in flags.items() if is_given]


class Watcher:
    """A plugin that follows a run. Its methods do nothing: a subclass says what it wants to know."""

    session: "Session | None" = None  # once there is one
    command = ""  # what started the run, as its records name it

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Listens to the records of the run."""
        from flashproof.session import STATE

        self.session = config.stash.get(STATE, None)
        if self.session:
            self.session.listeners.append(self.recorded)
            self.session.command = self.command or self.session.command

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Takes the number of checks, where this process runs them or hands them to workers."""
        if self._is_main and session.items:
            self.begun(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Takes the number of checks, where the processes of pytest-xdist run them."""
        self.begun(len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a check that has ended."""
        if self._is_main and (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
            self.ended(report)

    @property
    def _is_main(self) -> bool:
        return self.session is not None and self.session.role == "main"

    def begun(self, checks: int) -> None:
        """The checks are collected."""

    def recorded(self, record: Record) -> None:
        """A record was written."""

    def ended(self, report: pytest.TestReport) -> None:
        """A check has ended."""


def run(wanted: Wanted, watcher: Watcher) -> int:
    """Runs pytest in this process. Returns its exit status: 0 only if everything that was selected is verified."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    return int(pytest.main(wanted.words(), plugins=[watcher]))
