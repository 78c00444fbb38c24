"""Tests that the generated pages agree with the code, and that every link leads to a file."""

import re
from pathlib import Path

import pytest

from flashproof.tests.suite.documents import api, checks
from flashproof.tests.suite.documents.checks import ROOT

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
