"""The site that the tests look at."""

from pathlib import Path

import pytest

from reports.pages import write_site
from tests.reports import building


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of a CPU run and a GPU run."""
    records, directory = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("site")
    paths = [building.write(records / "cpu.jsonl", building.cpu_run()), building.write(records / "gpu.jsonl", building.gpu_run())]
    assert write_site(paths, directory) == directory / "index.html"
    return directory
