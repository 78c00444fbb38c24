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


def test_ulps_are_compared_where_all_have_a_figure(tmp_path: Path) -> None:
    """If one judgement of a case has no figure in ulps, the case is not compared in ulps.

    An old record may have a huge figure instead.
    """
    without = judgement("a", case="q20", rho=0.2, ulps=None, worst=worst(1.0, error=20.0))
    huge = judgement("b", case="q19", rho=0.19, ulps=2.0**30, worst=worst(1.0, error=19.0))
    wrong = judgement("c", case="q18", rho=9.0, ulps=2.0**30, status="failed", worst=worst(1.0, error=18.0))
    found = rows(
        tmp_path,
        *judged("a", range(1, 20)),
        without,
        *judged("b", range(1, 19)),
        huge,
        *judged("b", range(20, 21)),
        wrong,
    )
    assert found["a"].spread == found["b"].spread == errors.Spread(20, (20.0, 10.5), (36.0, 19.0))
    assert (found["a"].ulps, found["b"].ulps, found["c"].ulps) == (38.0, 40.0, 2.0**30)


def test_the_same_answer_is_marked(tmp_path: Path) -> None:
    alike = [judgement(name, worst=worst(1.0)) for name in ("a", "b")]
    found = rows(tmp_path, *alike, judgement("c", worst=worst(1.0, got=0.4120)))
    assert {name: row.alike for name, row in found.items()} == {"a": ("b",), "b": ("a",), "c": ()}
