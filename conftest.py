"""A clone of flashproof: its options are always there, and so is its plugin, whether the clone is installed or not.

A run with `--benchmark-only` collects tests/bench alone, unless paths are given. While the tests of the suite itself
run, tensors are held to the shapes that signatures name.
"""

from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashproof import pytest_plugin

DEPENDED_ON = ("torch", "cuda", "cudnn", "driver")  # by the times of every run, whatever it loads
NOTHING = pytest.StashKey[str]()  # why a run in which nothing passed is no success


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Registers the plugin if pytest did not find it among the installed ones."""
    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin, "flashproof")
    pytest_plugin.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leaves the benchmarks out, unless they are asked for: they run alone."""
    if not _times(config):
        config.option.benchmark_skip = True
    elif config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = [str(config.rootpath / "tests" / "bench")]


def _times(config: pytest.Config) -> bool:
    """Whether the run is one of benchmarks."""
    return bool(config.getoption("benchmark_only", default=False))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, object]) -> None:
    """Adds to the JSON what the times depend on: the device and the versions."""
    from flashproof.environment import environment

    here = environment("benchmarks")
    versions = {name: version for name, version in here.versions.items() if name in DEPENDED_ON}
    machine_info |= {"device": here.device, "versions": versions}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Benchmarks that time nothing, and a run for a GPU that verifies nothing, are failures: also if all is skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    said = "timed" if _times(session.config) else "verified" if session.config.getoption("markexpr") == "gpu" else ""
    runs = said and not session.config.option.collectonly
    if runs and ended and reporter and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[NOTHING] = f"nothing was {said}: the reasons are above"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """Says last that nothing was timed or verified."""
    yield
    if said := terminalreporter.config.stash.get(NOTHING, ""):
        terminalreporter.write_line(said, red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Prepares the check of shapes before others import what it wraps.

    A verification and a benchmark do without it, and so does a run of nothing but what needs a GPU: that one is to be
    over soon.
    """
    if pytest_plugin.is_asked_for(config) or _times(config):
        return
    if config.getoption("markexpr") == "gpu":
        return
    if find_spec("jaxtyping") and find_spec("beartype"):
        from flashproof.tests.suite import shapes

        shapes.wrap()
        config.pluginmanager.register(shapes)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of a CPU run and a GPU run whose records were made by hand, for the tests of the report."""
    from flashproof.reports.pages import write_site
    from flashproof.tests.suite.reports import building

    records, directory = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("site")
    runs = {"cpu": building.cpu_run(), "gpu": building.gpu_run()}
    paths = [building.write(records / f"{name}.jsonl", run) for name, run in runs.items()]
    assert write_site(paths, directory) == directory / "index.html"
    return directory
