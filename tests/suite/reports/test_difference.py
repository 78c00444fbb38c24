"""The comparison of two runs: what became worse, what is missing, and the exit status."""

from pathlib import Path

import pytest

from flashproof.reports import difference
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement

CASE = "b1 h1 q5 k5 d8 float32 full normal seed0"


@pytest.mark.parametrize(
    ("before", "after", "status", "words"),
    [
        ({}, {}, 0, "1 judgement in both runs: 0 worse, 0 missing"),
        (
            {},
            {"status": "failed", "rho": 7.0},
            1,
            f"triton.fa2 accuracy/forward float32 out [{CASE}]: passed before, failed now",
        ),
        ({"status": "failed", "rho": 7.0}, {}, 0, "failed before, passed now"),
        ({}, {"rho": 0.75}, 0, "rho 0.50 before, 0.75 now"),
        ({}, {"check": "gradients/backward"}, 1, "1 missing, 0 better, 1 new"),
    ],
)
def test_what_changed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, object],
    after: dict[str, object],
    status: int,
    words: str,
) -> None:
    about: dict[str, object] = {"case": CASE, "check": "accuracy/forward", "rho": 0.5}
    paths = [
        building.write(tmp_path / name, [environment(), judgement(**about | fields)])  # type: ignore[arg-type]
        for name, fields in (("before.jsonl", before), ("after.jsonl", after))
    ]
    assert difference.main([str(path) for path in paths]) == status
    assert words in capsys.readouterr().out


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert difference.main(["nowhere.jsonl", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err
