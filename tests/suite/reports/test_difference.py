"""The comparison of two runs: what became worse, what is missing, the page, and the exit status."""

from pathlib import Path

import pytest

from flashproof.reports import difference
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement

CASE = "b1 h1 q5 k5 d8 float32 full normal seed0"


@pytest.mark.parametrize(
    ("before", "after", "status", "words"),
    [
        ({}, {}, 0, "No verdict changed, and no rho rose, in 1 judgement.\n1 judgement in both runs: 0 worse"),
        (
            {},
            {"status": "failed", "rho": 7.0},
            1,
            f"out of triton.fa2 in float32 passed with rho 0.50 and fails now with rho 7.0 at {CASE}.\n",
        ),
        ({"status": "failed", "rho": 7.0}, {}, 0, "failed with rho 7.0 and passes now with rho 0.50"),
        ({}, {"rho": 0.75}, 0, f"out of triton.fa2 in float32 rises from 0.50 to 0.75 at {CASE}."),
        ({}, {"check": "gradients/backward"}, 1, "1 missing, 0 better, 1 new"),
        ({"check": "accuracy/search"}, {"check": "accuracy/search", "case": "another"}, 0, "1 judgement in both runs"),
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
    first, second = [
        building.write(tmp_path / name, [environment(), judgement(**about | fields)])  # type: ignore[arg-type]
        for name, fields in (("before.jsonl", before), ("after.jsonl", after))
    ]
    assert difference.tell(first, second, tmp_path / "site") == status
    said = capsys.readouterr().out
    assert words in said
    page = (tmp_path / "site" / "difference.html").read_text()
    assert said.partition("\n")[0] in page


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such file"), ("empty", "holds no judgements")])
def test_a_file_without_judgements(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    building.write(tmp_path / "empty", [environment()])
    assert difference.tell(tmp_path / name, tmp_path / name) == 2
    assert f"{name}: {words}" in capsys.readouterr().err
