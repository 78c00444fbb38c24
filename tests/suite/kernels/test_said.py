"""Tests the kept answers of the compilers.

An answer is used while nothing has changed that it depends on. Each answer is asked for again in turn and compared.
"""

import datetime
from pathlib import Path
from typing import Any

import pytest

from flashproof.tests.suite.kernels import said

KEYS = [f"{number:032x}" for number in range(100)]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a file that keeps an answer under every key."""
    monkeypatch.setattr(said, "PLACE", tmp_path / "compilers.json.gz")
    said.write(dict.fromkeys(KEYS, "128 0"))


def on(day: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the date to this number of days after a fixed date."""

    class Clock(datetime.datetime):  # `said` gets the class from the module, so it finds this one
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, 1, tzinfo=tz) + datetime.timedelta(days=day)

    monkeypatch.setattr(datetime, "datetime", Clock)


def test_everything_is_asked_again_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for day in range(said.DAYS):
        on(day, monkeypatch)
        today = [key for key in KEYS if said.recall(key) is None]
        assert len(today) == len(KEYS) / said.DAYS
        asked += today
    assert sorted(asked) == KEYS


def test_what_is_kept_is_believed_on_other_days(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for day in (0, 1):
        on(day, monkeypatch)
        answers += [said.recall(key) for key in KEYS]
    assert set(answers) == {None, "128 0"}
    assert said.recall("f" * 32) is None  # no answer is kept for changed sources


def test_what_a_compiler_says_is_held_against_what_is_kept() -> None:
    said.hold(KEYS[0], "128 0")
    said.hold("f" * 32, "255 16")  # no answer is kept for changed sources, so none differs
    with pytest.raises(ValueError, match=r"holds '128 0' under .*, but the compiler now says '128 8'; run `python"):
        said.hold(KEYS[0], "128 8")


def test_a_damaged_file_is_named() -> None:
    said.PLACE.write_bytes(said.PLACE.read_bytes()[:-9])
    with pytest.raises(
        ValueError,
        match=r"compilers.json.gz: cannot be read .*; run `python -m flashproof.tests.suite.kernels` to write",
    ):
        said.hold(KEYS[0], "128 0")
