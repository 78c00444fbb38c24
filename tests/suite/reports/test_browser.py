"""The pages in a browser: they cause no errors and no requests, fit into the window, and name every image."""

import importlib.util
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from flashproof.reports import wording
from flashproof.tests.suite.reports import building

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium: not installed"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="Playwright: not installed"),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PAGES = [
    f"{name}.html"
    for name in ("index", "triton.fa2", "cuda.fa1", wording.stem(building.SDPA), wording.stem(building.HOSTILE))
]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_offline_and_fits(
    browser: "Browser", site: Path, name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / name).as_uri())
    for details in page.locator("details").all():
        details.evaluate("element => { element.open = true }")
    assert troubles == []
    assert requests == [(site / name).as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_CLIPPED) == []
    page.close()


# A script that finds boxes that extend beyond the window although no ancestor scrolls.
_CLIPPED = """
() => [...document.querySelectorAll("main *")].filter(element => {
    if (element.closest(".scroll, pre, svg, .symbols")) return false;
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map(element => element.outerHTML.slice(0, 80))
"""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_by_ear(browser: "Browser", site: Path, name: str) -> None:
    page = browser.new_page()
    page.goto((site / name).as_uri())
    levels = [
        int(level)
        for level in page.eval_on_selector_all(
            "h1, h2, h3, h4, h5, h6", "all => all.map(heading => heading.tagName[1])"
        )
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    unnamed = page.eval_on_selector_all(
        "svg, img",
        "all => all.filter(image => !image.closest('[aria-hidden=true]') && "
        "!image.getAttribute('aria-label') && !image.alt).length",
    )
    assert unnamed == 0
    assert page.title()
    assert page.locator("html").get_attribute("lang") == "en"
    regions = page.eval_on_selector_all(
        ".scroll", "all => all.filter(box => !box.getAttribute('aria-label') || box.tabIndex !== 0).length"
    )
    assert regions == 0
    page.close()


def test_charts_take_the_colour_of_the_page(browser: "Browser", site: Path) -> None:
    colours = {}
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page = browser.new_page(color_scheme=scheme)
        page.goto((site / "triton.fa2.html").as_uri())
        colours[scheme] = page.evaluate(
            "[getComputedStyle(document.body).color, "
            "...[...document.querySelectorAll('.chart text')].map(text => getComputedStyle(text).fill)]"
        )
        assert len(colours[scheme]) > 50
        assert len(set(colours[scheme])) == 1, "every text of a chart has the colour of the page's text"
        page.close()
    assert colours["light"][0] != colours["dark"][0]


def test_the_line_to_repeat_is_selected_whole(browser: "Browser", site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "triton.fa2.html").as_uri())
    line = page.locator("code.again").first
    line.click()
    assert page.evaluate("getSelection().toString()") == line.text_content()
    page.close()
