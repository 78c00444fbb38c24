"""`python -m flashproof.tests.training.bias`: what it writes, and what it says about a short run."""

from pathlib import Path

import pytest

from flashproof.tests.training import bias


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the committed file."""
    monkeypatch.setattr(bias, "PLACE", tmp_path / "bias.json")
    monkeypatch.setattr(bias, "JUDGED", (0,))
    return tmp_path / "bias.json"


def test_a_short_run_is_written_only_where_it_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps are fewer than the test of the loss averages, so the loss tells nothing."""
    assert bias.main(["--steps", "2"]) == 1
    said = capsys.readouterr().out
    assert "not written: " in said
    assert "cut: told by the bias at step 0; not told by the bound, the loss" in said
    assert not place.exists()
    bias.main(["--steps", "1", "-o", str(place)])
    assert place.exists()


def test_the_number_of_steps_is_positive(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bias.main(["--steps", "0"])
    assert "--steps 0: give at least 1" in capsys.readouterr().err
