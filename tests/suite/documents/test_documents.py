"""Tests that the generated pages agree with the code, that links lead to files, and that no line is too long."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashproof.tests.suite.documents import api, checks
from flashproof.tests.suite.documents.checks import ROOT

COLUMNS = 120
DATA = (".json", ".gz", ".png")
# Not yet wrapped: the templates and the style of the report.
NOT_WRAPPED = ROOT / "reports" / "templates"
PAGES = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def test_the_page_of_the_checks_is_current() -> None:
    """If this fails, `python -m flashproof.tests.suite.documents` writes the page again."""
    assert checks.PAGE.read_text() == checks.page()


def test_the_page_of_the_api_is_current() -> None:
    """If this fails, `python -m flashproof.tests.suite.documents` writes the page again."""
    assert api.PAGE.read_text() == api.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def texts() -> list[Path]:
    """The text files of the project. Skips without Git."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("git: not installed, or this is not a clone")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if not name.endswith(DATA)]
    found = [path for path in paths if path.is_file()]
    assert len(found) > 100
    return found


def test_no_line_is_too_long() -> None:
    """The text files of the project have lines of at most 120 columns."""
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts()
        if not path.is_relative_to(NOT_WRAPPED)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > COLUMNS
    ]
    assert not long


def test_no_retired_term_is_used() -> None:
    """The terms are worker, journal, external kernel and shared code."""
    retired = re.compile(r"\b(guest|diary|diaries|stranger|one_code)s?\b", re.IGNORECASE)
    assert not [str(path) for path in texts() if path != Path(__file__).resolve() and retired.search(path.read_text())]


def test_the_readme_is_short() -> None:
    """It has at most 1,000 words, as `wc -w` counts them."""
    assert len((ROOT / "README.md").read_text().split()) <= 1000
