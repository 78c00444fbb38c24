"""`python -m flashproof.tests.suite.kernels [--all]` runs the compile gates and writes reports/compilers.json.gz.

The gates ask the compilers about every kernel. All gates run in one process, because `said.heard` collects the answers
in memory. An answer that another process received is only in the user's cache folder. If a gate fails or is skipped,
the file is not written.
"""

import sys
from pathlib import Path

import pytest

from flashproof.tests.suite.kernels import said


class Unheard:
    """Counts the tests that did not pass: failed, skipped or deselected ones."""

    count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += not report.passed

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.count += len(items)


said.heard, said.asks_all, unheard = {}, "--all" in sys.argv, Unheard()
gates = [str(Path(__file__).resolve().with_name(name)) for name in ("test_compile.py", "test_cuda_compile.py")]
status = pytest.main(
    ["-n0", "-q", "--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning", *gates], plugins=[unheard]
)
if status or unheard.count:
    sys.exit(f"{said.PLACE.name}: the file was not written, because {unheard.count} tests did not pass")
said.write(said.heard)
