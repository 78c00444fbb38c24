"""The table [tool.flashproof] of a project's pyproject.toml."""

from pathlib import Path

import pytest

from flashproof.settings import Settings


@pytest.mark.parametrize(
    ("text", "report", "records", "defects"),
    [
        (None, "flashproof-report", "flashproof-report/runs", None),
        ("[tool.other]\nreport = 3\n", "flashproof-report", "flashproof-report/runs", None),
        ('[tool.flashproof]\nreport = "site"\n', "site", "site/runs", None),
        ('[tool.flashproof]\nrecords = "runs"\n', "flashproof-report", "runs", None),
        ('[tool.flashproof]\nknown_defects = "k.toml"\n', "flashproof-report", "flashproof-report/runs", "k.toml"),
    ],
)
def test_places(tmp_path: Path, text: str | None, report: str, records: str, defects: str | None) -> None:
    """Places are relative to the folder of the pyproject.toml. By default, records go into the folder of the report."""
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    found = Settings.of(tmp_path)
    assert found.report == tmp_path / report
    assert found.records == tmp_path / records
    assert found.known_defects == (defects and tmp_path / defects)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.flashproof\n", "cannot be read"),
        ("[tool]\nflashproof = 3\n", "give a table"),
        ("[tool.flashproof]\nreports = 'x'\n", "has no key 'reports'; give report, records, known_defects"),
        ("[tool.flashproof]\nreport = ''\n", "report is ''; give a path"),
        ("[tool.flashproof]\nrecords = 3\n", "records is 3; give a path"),
    ],
)
def test_what_cannot_be_understood(tmp_path: Path, text: str, words: str) -> None:
    """The error names the file and the key."""
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        Settings.of(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / "pyproject.toml"))
