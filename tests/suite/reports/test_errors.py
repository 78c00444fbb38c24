"""The table of worst known errors: the worst of each, common cases, and equal answers."""

from pathlib import Path
from typing import Any

from flashproof.reports import errors
from flashproof.reports.evidence import gather
from flashproof.reports.record import Record
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement, worst


def rows(directory: Path, *records: Record) -> dict[str, errors.Row]:
    evidence = gather([building.write(directory / "run.jsonl", [environment(), *records])])
    return {row.kernel.name: row for row in errors.rows(evidence)}


def judged(name: str, cases: range, **fields: Any) -> list[Record]:
    """Judgements of cases. The error of case n is n."""
    return [
        judgement(name, case=f"q{n}", rho=n / 100, ulps=2.0 * n, worst=worst(1.0, error=float(n), got=name), **fields)
        for n in cases
    ]


def test_errors_are_compared_on_common_cases(tmp_path: Path) -> None:
    few = errors.SHARED_CASES - 1
    found = rows(tmp_path, *judged("a", range(1, 21)), *judged("b", range(11, 31)), *judged("few", range(1, 1 + few)))
    assert {name: row.worst.judgement.case for name, row in found.items()} == {"a": "q20", "b": "q30", "few": f"q{few}"}
    assert found["b"].ulps == 60.0
    assert found["a"].spread == found["b"].spread == errors.Spread(10, (20.0, 15.5), (40.0, 31.0))
    assert found["few"].spread is None, "it would leave too few cases for all others"


def test_the_same_answer_is_marked(tmp_path: Path) -> None:
    alike = [judgement(name, worst=worst(1.0)) for name in ("a", "b")]
    found = rows(tmp_path, *alike, judgement("c", worst=worst(1.0, got=0.4120)))
    assert {name: row.alike for name, row in found.items()} == {"a": ("b",), "b": ("a",), "c": ()}
