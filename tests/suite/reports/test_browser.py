"""The pages in a browser: no error, no request, no overflow, a name for every image, and a script that works."""

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from flashproof.reports import speed, wording
from flashproof.reports.evidence import gather
from flashproof.reports.pages import write_pages
from flashproof.tests.suite.reports import building

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium: not installed"),
    pytest.mark.skipif(importlib.util.find_spec("axe_playwright_python") is None, reason="axe: not installed"),
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
SERIOUS = ("serious", "critical")  # the impacts of findings, in axe's words
PAGES = [
    f"{name}.html"
    for name in (
        *("index", "errors", "mutants", "speed", "training", "how", "triton.fa2", "cuda.fa1"),
        wording.stem(building.SDPA),
        wording.stem(building.HOSTILE),
    )
]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
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
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    page.wait_for_function("!document.querySelector('.cases > p')")
    assert troubles == []
    cases = f"cases/{name.removesuffix('html')}js"
    assert set(requests) <= {(site / file).as_uri() for file in (name, cases, "style.css", "script.js")}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_CLIPPED) == []
    assert page.evaluate(_CUT_OFF) == []
    _check_what_is_heard(page)
    _check_by_axe(page)
    page.close()


def _check_by_axe(page: "Page") -> None:
    """axe, which knows the usual faults of accessibility, finds none that is serious."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in SERIOUS] == []


def test_axe_rejects_an_image_without_a_name(browser: "Browser") -> None:
    page = browser.new_page()
    page.set_content("<html lang=en><title>A page</title><main><h1>A page</h1><img src='data:,'></main>")
    with pytest.raises(AssertionError, match="image-alt"):
        _check_by_axe(page)
    page.close()


def _check_what_is_heard(page: "Page") -> None:
    """Headings have no gap, images and boxes that scroll have names, and the page has a title and a language."""
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
        "all => all.filter(image => !image.closest('[aria-hidden=true], [role=img] *') && "
        "!image.getAttribute('aria-label') && !image.alt).length",
    )
    assert unnamed == 0
    assert page.title()
    assert page.locator("html").get_attribute("lang") == "en"
    regions = page.eval_on_selector_all(
        ".scroll", "all => all.filter(box => !box.getAttribute('aria-label') || box.tabIndex !== 0).length"
    )
    assert regions == 0


# A script that finds boxes that extend beyond the window although no ancestor scrolls.
_CLIPPED = """
() => [...document.querySelectorAll("main *")].filter(element => {
    if (element.closest(".scroll, pre, svg, .symbols")) return false;
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map(element => element.outerHTML.slice(0, 80))
"""


# A script that finds commands of which a part cannot be seen.
_CUT_OFF = """
() => [...document.querySelectorAll("code.again, pre")].filter(element =>
    element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== "inline"
    || getComputedStyle(element).textOverflow !== "clip" || getComputedStyle(element).whiteSpace === "nowrap"
).map(element => element.outerHTML.slice(0, 200))
"""


# A script that finds texts of a chart that cover one another.
_COVERED = """
() => [...document.querySelectorAll(".chart svg")].flatMap(chart => {
    const texts = [...chart.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    return texts.flatMap(([one, a], place) => texts.slice(place + 1).filter(([, b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([other]) => [one, other]));
})
"""


def test_labels_of_speeds_do_not_overlap(browser: "Browser", tmp_path: Path) -> None:
    records = building.write(
        tmp_path / "run.jsonl",
        [
            building.environment(building.GPU),
            *(building.judgement(name, building.GPU) for name in building.GPU_NAMES),
        ],
    )
    content = building.benchmarks()
    content["benchmarks"] = [one for one in content["benchmarks"] if "d128" in one["params"]["line"]]
    (tmp_path / "speeds.json").write_text(json.dumps(content))
    write_pages(gather([records]), tmp_path / "site", speed.read(tmp_path / "speeds.json"))
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto((tmp_path / "site" / "speed.html").as_uri())
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert page.locator(".chart svg").count() > 15
    assert page.evaluate(_COVERED) == []
    page.close()


def test_charts_are_readable_in_both_schemes(browser: "Browser", site: Path) -> None:
    """Every text of a chart stands out from the page by a contrast of 4.5."""
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page = browser.new_page(color_scheme=scheme)
        page.goto((site / "triton.fa2.html").as_uri())
        pairs = page.evaluate(
            "[...new Set([...document.querySelectorAll('.chart text')].map(text => getComputedStyle(text).fill))]"
            ".map(fill => [fill, getComputedStyle(document.body).backgroundColor])"
        )
        assert len(pairs) > 1
        for fill, behind in pairs:
            light, dark = sorted((_luminance(fill), _luminance(behind)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) > 4.5, (scheme, fill, behind)
        page.close()


def _luminance(colour: str) -> float:
    """The relative luminance of "rgb(12, 34, 56)", as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_line_to_repeat_is_selected_whole(browser: "Browser", site: Path) -> None:
    page = browser.new_page()
    page.goto(f"{(site / 'triton.fa2.html').as_uri()}#out")
    line = page.locator("#out code.again").first
    line.click()
    assert page.evaluate("getSelection().toString()") == line.text_content()
    page.close()


def test_a_cell_opens_its_cases(browser: "Browser", site: Path) -> None:
    """By keyboard: from the cell of the overview to the list of all cases, which is searched by words."""
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator(".matrix a[href='triton.fa2.html#out']").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#out .cases tbody tr")
    rows = page.locator("#out .cases tbody tr")
    assert rows.first.locator("td").first.text_content() == "failed"
    before = rows.count()
    page.locator("#out .cases input").fill("bfloat16 x16")
    assert 0 < rows.count() < before
    assert all("x16" in (row or "") for row in rows.all_text_contents())
    page.close()


def test_devices_are_switched(browser: "Browser", site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    visible = "[...document.querySelectorAll('.matrix tbody tr:not(.group)')].filter(row => row.offsetHeight).length"
    every = page.evaluate(visible)
    page.get_by_label("NVIDIA H200").check()
    assert 0 < page.evaluate(visible) < every
    page.close()


def test_tables_are_sorted_and_filtered(browser: "Browser", site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "errors.html").as_uri())
    page.get_by_role("button", name="rho").click()
    shown = page.evaluate("[...document.querySelectorAll('#worst tbody tr')].map(row => row.cells[4].dataset.value)")
    numbers = [float(text) for text in shown if text != "nan"]
    assert numbers == sorted(numbers, reverse=True)
    page.get_by_label("dtype").select_option("float16")
    kinds = page.evaluate(
        "[...document.querySelectorAll('#worst tbody tr')].filter(row => !row.hidden).map(row => row.dataset.dtype)"
    )
    assert set(kinds) == {"float16"}
    page.close()
