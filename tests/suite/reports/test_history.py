"""The history of rho: a run is compared with the last one on its machine, and the gate closes where a rho rose."""

from pathlib import Path
from typing import Any

import pytest

from flashproof.reports import bundle, history
from flashproof.reports.record import Record
from flashproof.tests.suite.reports import building

OUT = "cpu out float32"


def run_of(path: Path, rho: float | str, run: str, commit: str = "0123456789ab", **fields: Any) -> Path:
    """A sealed run with a judgement of rho 0.1 and one with this rho."""
    environment = building.environment(run, commit=commit, kind="cpu", device=fields.pop("device", "AMD EPYC, 2 cores"))
    about: dict[str, Any] = {"run": run, "device": "cpu"}
    records: list[Record] = [environment, building.judgement(rho=0.1, **about)]
    records.append(building.judgement(rho=rho, case="b1 h1 q5 k5 d8 float32", **about | fields))
    building.write(path, records)
    bundle.seal(path, case_set=1, effort="default", dtypes=["float32"])
    return path


def test_a_history_holds_the_largest_rho_of_each_run(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    assert history.tell([run_of(tmp_path / "a.jsonl", 0.34567, "a")], path) == 0
    assert history.tell([run_of(tmp_path / "b.jsonl", "inf", "b", status="failed")], path) == 0
    first, second = history.load(path).runs
    assert (first.run, first.case_set, first.rho["triton.fa2"][OUT]) == ("a", 1, 0.3457)
    assert (second.rho["triton.fa2"][OUT], second.failed) == ("inf", {"triton.fa2": 1})
    assert path.read_text().count("\n") == 4, "each run has a line of its own"


def test_a_run_is_added_once(tmp_path: Path) -> None:
    path, records = tmp_path / "history.json", run_of(tmp_path / "a.jsonl", 0.3, "a")
    for _ in range(2):
        assert history.tell([records], path, gate=True) == 0
    assert len(history.load(path).runs) == 1


@pytest.mark.parametrize(("rho", "status"), [(0.3, 0), (0.39, 0), (0.41, 1), (0.9, 1), ("nan", 1), (0.1, 0)])
def test_the_gate_closes_where_a_rho_rose(
    tmp_path: Path, rho: float | str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.json"
    history.tell([run_of(tmp_path / "a.jsonl", 0.3, "a", commit="aaaaaaaaaaaa")], path)
    capsys.readouterr()
    assert history.tell([run_of(tmp_path / "b.jsonl", rho, "b")], path, gate=True) == status
    said = capsys.readouterr().out
    assert "aaaaaaaaaaaa" in said
    assert (f"triton.fa2 {OUT}: rho" in said) == bool(status)
    assert len(history.load(path).runs) == 2 - status, "a run that is worse is not published"


def test_the_gate_closes_where_a_verdict_became_worse(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    history.tell([run_of(tmp_path / "a.jsonl", 0.3, "a")], path)
    assert history.tell([run_of(tmp_path / "b.jsonl", 0.3, "b", status="failed")], path, gate=True) == 1
    assert history.tell([run_of(tmp_path / "b.jsonl", 0.3, "b", status="failed")], path) == 0


@pytest.mark.parametrize(
    "change", [{"device": "another CPU"}, {"check": "accuracy/search"}, {"status": "known defect"}]
)
def test_what_cannot_be_compared_does_not_close_the_gate(tmp_path: Path, change: dict[str, str]) -> None:
    path = tmp_path / "history.json"
    history.tell([run_of(tmp_path / "a.jsonl", 0.3, "a")], path)
    assert history.tell([run_of(tmp_path / "b.jsonl", 0.9, "b", **change)], path, gate=True) == 0


def test_a_narrow_run_is_no_measure_of_a_wider_one(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    narrow = building.write(tmp_path / "a.jsonl", [building.environment("a"), building.judgement(rho=0.1, run="a")])
    bundle.seal(narrow, case_set=1, effort="default", dtypes=["float32"])
    history.tell([narrow], path)
    assert history.tell([run_of(tmp_path / "b.jsonl", 0.9, "b")], path, gate=True) == 0


def test_a_foreign_history_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.json"
    path.write_text("[1, 2]")
    assert history.tell([run_of(tmp_path / "a.jsonl", 0.3, "a")], path) == 2
    assert f"{path}: not a history of flashproof" in capsys.readouterr().err
