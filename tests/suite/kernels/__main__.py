"""`python -m flashproof.tests.suite.kernels [--all]` runs the compile gates and writes reports/compilers.json.gz.

The gates ask compilers about every kernel. All of it happens in one process, since what other processes heard is in the
user's cache folder. If a gate fails or is skipped, nothing is written.
"""

import sys
from pathlib import Path

import pytest

from flashproof.tests.suite.kernels import said


class Unheard:
    """Counts the tests that did not pass, for whatever reason."""

    count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += not report.passed

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.count += len(items)


said.heard, said.asks_all, unheard = {}, "--all" in sys.argv, Unheard()
gates = [str(Path(__file__).resolve().with_name(name)) for name in ("test_compile.py", "test_cuda_compile.py")]
status = pytest.main(["-n0", "-q", "--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning", *gates], plugins=[unheard])
if status or unheard.count:
    sys.exit(f"{said.PLACE.name}: the file was not written, because {unheard.count} tests did not pass")
said.write(said.heard)
