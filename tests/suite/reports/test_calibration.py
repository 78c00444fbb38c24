"""The calibration: it says how close right kernels come to each gate, and the committed table fits the records."""

from pathlib import Path

import pytest

from flashproof.reports import calibration
from flashproof.reports.evidence import Judged, Machine
from flashproof.reports.record import Record
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import claim, environment, judgement

ROOT = Path(__file__).resolve().parents[3]
HERE = Machine("cpu", "here")


def test_shares_of_the_gates() -> None:
    """Each share is 1 exactly where the verdict changes."""
    lean = judgement(bias=-0.65, bias_error=0.1, bias_allowance=0.25)
    assert calibration.share_of_bias(Judged(lean, HERE)) == 1.0
    assert calibration.share_of_bias(Judged(judgement(bias=0.1, bias_error=0.1, bias_allowance=0.25), HERE)) == 0.0
    assert calibration.share_of_bias(Judged(judgement(), HERE)) is None
    assert calibration.share_of_rms(Judged(judgement(rms=1.1, rms_error=0.0), HERE)) == 1.0
    assert calibration.share_of_rms(Judged(judgement(rms="inf", rms_error=0.0), HERE)) == float("inf")


def test_the_worst_of_each_is_shown(tmp_path: Path) -> None:
    records: list[Record] = [
        environment(),
        claim(),
        judgement(rho=0.3, rho_statistical=0.7, bias=0.2, bias_error=0.01, bias_allowance=0.25),
        judgement(case="worse", rho=0.5, bias=0.24, bias_error=0.01, bias_allowance=0.25),
        judgement(case="gradient", tensor="dv", rho=0.9),
        judgement(case="property", tensor=None, rho=None, rms=0.88, rms_error=0.0),
    ]
    text = calibration.table([building.write(tmp_path / "run.jsonl", records)])
    (line,) = (line for line in text.splitlines() if line.startswith("| triton.fa2"))
    assert [cell.strip() for cell in line.split("|")[3:10]] == ["0.70", "", "", "", "0.90", "0.80", "0.80"]
    assert "\n- triton.fa2, float32: +0.240 ± 0.010, allowance 0.250, out, `worse`\n" in text


def test_a_run_that_judged_nothing_is_not_told(tmp_path: Path) -> None:
    judging, other = (
        environment(),
        environment(run="other", date="2026-03-04T00:00:00Z", command="python -m flashproof.tests.suite.mutants"),
    )
    paths = [
        building.write(tmp_path / "run.jsonl", [judging, claim(), judgement(rho=0.3)]),
        building.write(tmp_path / "other.jsonl", [other]),
    ]
    text = calibration.table(paths)
    assert judging.command in text
    assert other.command not in text


def test_the_committed_table_is_that_of_the_committed_records() -> None:
    """`python -m flashproof.reports.calibration` makes the table again."""
    text = calibration.table(sorted((ROOT / "reports" / "records").glob("*.jsonl.gz")))
    assert (ROOT / "docs" / "calibration.md").read_text() == text


def test_a_file_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration.main([str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err
