"""A clone of flashproof: its options are always there, and so is its plugin, whether the clone is installed or not.

While the tests of the suite itself run, tensors are held to the shapes that signatures name.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from flashproof import pytest_plugin


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Registers the plugin if pytest did not find it among the installed ones."""
    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin, "flashproof")
    pytest_plugin.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leaves the benchmarks out, unless they are asked for: they run alone."""
    if not config.getoption("benchmark_only", default=False):
        config.option.benchmark_skip = True


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Prepares the check of shapes before others import what it wraps.

    A verification and a benchmark do without it, and so does a run of nothing but what needs a GPU: that one is to be
    over soon.
    """
    if pytest_plugin.is_asked_for(config) or config.getoption("benchmark_only", default=False):
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
