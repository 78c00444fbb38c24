"""The site is complete and self-contained, harmless whatever the records hold, and the same for the same records."""

import gzip
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flashproof.reports import __main__, charts, wording
from flashproof.reports.pages import SHOWN, linked, write_site
from flashproof.reports.record import Record
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import (
    claim,
    environment,
    judgement,
)

ROOT = Path(__file__).resolve().parents[3]


class Page(HTMLParser):
    """The content of a page: its elements with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def pages(site: Path) -> dict[str, Page]:
    return {path.name: Page(path) for path in site.iterdir()}


def small_site(directory: Path, *records: Record) -> Path:
    write_site([building.write(directory / "run.jsonl", [environment(), *records])], directory / "site")
    return directory / "site"


# ---------------------------------------------------------------------------------------------------- completeness


def test_every_implementation_has_a_page_that_the_index_links(site: Path) -> None:
    found = pages(site)
    names = ("tiled.fa2", "triton.fa2", "cuda.fa1", building.SDPA, building.HOSTILE)
    assert set(found) == {"index.html", "mutants.html", *(f"{wording.stem(name)}.html" for name in names)}
    assert set(found) - {"index.html"} <= set(found["index.html"].all("href"))
    for name in names:
        assert name in found[f"{wording.stem(name)}.html"].text


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    found = pages(site)
    for name, page in found.items():
        ids = page.all("id")
        assert len(ids) == len(set(ids)), f"{name} has an id twice"
        for href in page.all("href") + page.all("xlink:href"):
            if re.match(r"https?://", href):
                continue
            file, _, anchor = href.partition("#")
            assert (file or name) in found, f"{name}: {href}"
            assert not anchor or anchor in found[file or name].all("id"), f"{name}: {href}"


def test_the_index_tells_machines_states_and_figures(site: Path) -> None:
    text = pages(site)["index.html"].text
    for word in (
        "AMD EPYC, 2 cores",
        "NVIDIA H200",
        "2026-03-02T10:00:00Z",
        "0123456789ab",
        "torch 2.13.0",
        "CUDA: no device",
        "9.6",
        "88.73 to 90.00",
    ):
        assert word in text
    for state in ("passed", "failed", "known defect", "refused", "not possible here", "not claimed", "not run"):
        assert re.search(rf"\b{state}\b", text)


def test_states_differ_in_shape_as_well_as_in_colour(site: Path) -> None:
    source = (site / "index.html").read_text()
    shapes = dict(re.findall(r'<symbol id="state-([a-z-]+)"[^>]*>(.*?)</symbol>', source))
    used = set(re.findall(r'<use href="#state-([a-z-]+)"', source))
    assert used == set(shapes)
    assert len(set(shapes.values())) == len(shapes) == 7


def test_an_implementation_page_is_complete(site: Path) -> None:
    page = pages(site)["triton.fa2.html"]
    for words in (
        "passes at magnitude 4, fails from 16",
        "again: pytest --impl triton.fa2 --case 'b1 h1 q150 k150 d64 bfloat16 full normal x16 seed2'",
        "the query sees 518 keys; the largest weight is 99.8 %",
        "two runs differ in 3 of 16384 elements",
        "fitted exponent 1.00",
        "16384",
        "FlashAttention-2, section 3.1",
        "sm_100",
        "certified",
        "bounded",
        "sampled",
        "landmarks",
    ):
        assert words in page.text, words
    order = [
        page.text.index(heading)
        for heading in (
            "Failures",
            "What it claims",
            "Rho by dtype and tensor",
            "Worst cases",
            "Compiler resources",
            "Checks",
        )
    ]
    assert order == sorted(order)
    charts_ = [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]
    assert [attributes["aria-label"] for attributes in charts_] == [
        "triton.fa2: rho against sequence length",
        "triton.fa2: rho against score magnitude",
        "triton.fa2: rho against score",
        "triton.fa2: memory against sequence length",
    ]


def test_a_known_defect_tells_what_was_seen_and_where_it_is_reported(site: Path) -> None:
    page = pages(site)[f"{wording.stem(building.SDPA)}.html"]
    assert "16-bit sums." in page.text
    assert building.ISSUE in page.all("href")
    assert "RuntimeError: scale must be positive" in page.text


def test_refusals_that_differ_in_numbers_are_one(tmp_path: Path) -> None:
    numbers = ("64", "-1.5", "1e-05")
    refused = [
        judgement("mine.py:f", case=f"q{i}", status="refused", message=f"ValueError: {n} is taken by nobody")
        for i, n in enumerate(numbers)
    ]
    text = pages(small_site(tmp_path, claim("mine.py:f", bare=True), *refused))[
        f"{wording.stem('mine.py:f')}.html"
    ].text
    section = text[text.index("what it said first") : text.index("What it claims")]
    assert section.count("is taken by nobody") == 1
    assert "64 is taken by nobody" in section


def test_failures_that_are_left_out_are_counted(tmp_path: Path) -> None:
    failed = [
        judgement(check=f"masks/check{i}", case=case, status="failed", rho=40.0 - i)
        for i in range(SHOWN + 2)
        for case in ("q1", "q2")
    ]
    text = pages(small_site(tmp_path, *failed))["triton.fa2.html"].text
    assert f"These are the {SHOWN} worst; the rest, with 4 failed cases, are not shown here." in text


def test_a_run_on_one_function_is_sensible(tmp_path: Path) -> None:
    site = small_site(
        tmp_path,
        claim("mine.py:attention", bare=True),
        judgement("mine.py:attention", status="failed", rho=7.3, worst=building.worst(7.3)),
    )
    page = pages(site)[f"{wording.stem('mine.py:attention')}.html"]
    assert "mine.py:attention  out  float32  rho 7.3" in page.text
    assert (
        "Not in these records: error against sequence length, error against score magnitude, bias, memory, "
        "memory traffic, compiler resources." in page.text
    )


def test_judgements_without_a_claim_are_shown(tmp_path: Path) -> None:
    assert "No claim in these records." in pages(small_site(tmp_path, judgement()))["triton.fa2.html"].text


def test_a_run_that_judged_nothing_says_so(tmp_path: Path) -> None:
    assert "Nothing was verified in these runs." in pages(small_site(tmp_path))["index.html"].text


# ----------------------------------------------------------------------------------------------- offline, harmless


def test_nothing_is_fetched(site: Path) -> None:
    fetching = {"src", "srcset", "data", "poster", "background", "action", "formaction", "ping", "manifest"}
    for path in site.iterdir():
        page = Page(path)
        assert not {tag for tag, _ in page.elements} & {
            "script",
            "link",
            "iframe",
            "object",
            "embed",
            "img",
            "image",
            "base",
            "video",
            "audio",
            "foreignobject",
        }
        for tag, attributes in page.elements:
            assert not fetching & set(attributes), f"{path.name}: <{tag}> {attributes}"
            assert not [name for name in attributes if name.startswith("on")], f"{path.name}: <{tag}> {attributes}"
            for href in (attributes.get("href", ""), attributes.get("xlink:href", "")):
                assert tag == "a" or not href or href.startswith("#"), f"{path.name}: <{tag} href={href}>"
                assert not re.match(r"\s*(javascript|data|vbscript):", href, re.IGNORECASE)
        source = path.read_text()
        assert "@import" not in source
        assert set(re.findall(r"url\((.)", source)) <= {"#"}


def test_what_strangers_write_is_only_text(site: Path) -> None:
    page = pages(site)[f"{wording.stem(building.HOSTILE)}.html"]
    for words in (
        building.HOSTILE,
        "<img src=x onerror=alert(2)>",
        "</pre><script>alert(3)</script>",
        '"><script src="https://example.invalid/x.js"></script>',
    ):
        assert words in page.text
    assert "javascript:alert(4)" not in page.all("href")


def test_links_in_messages_are_links_and_nothing_else() -> None:
    assert (
        str(linked("seen (https://a.example/b?c=1&d)."))
        == 'seen (<a href="https://a.example/b?c=1&amp;d">https://a.example/b?c=1&amp;d</a>).'
    )
    assert "<script" not in str(linked('https://a.example/"><script>'))
    assert str(linked("javascript:alert(1)")) == "javascript:alert(1)"


def test_a_chart_escapes_its_names(site: Path) -> None:
    source = (site / "index.html").read_text()
    assert "tiled.fa2 &lt;script&gt;" in source
    assert "tiled.fa2 <script>" not in source


# ---------------------------------------------------------------------------------------------- reliable behaviour


def test_the_same_records_give_the_same_site(tmp_path: Path) -> None:
    records = building.write(tmp_path / "run.jsonl", building.cpu_run())
    sites = [
        {path.name: path.read_bytes() for path in write_site([records], tmp_path / name).parent.iterdir()}
        for name in ("a", "b")
    ]
    assert sites[0] == sites[1]


def test_pages_of_an_earlier_site_go_and_other_files_stay(tmp_path: Path) -> None:
    site = small_site(tmp_path / "a", judgement("old.kernel"))
    (site / "notes.html").write_text("<p>mine</p>")
    write_site([building.write(tmp_path / "b.jsonl", [environment(), judgement("new.kernel")])], site)
    assert {path.name for path in site.iterdir()} == {"index.html", "new.kernel.html", "notes.html"}


@pytest.mark.parametrize(
    ("module", "words"), [("altair", "Altair: not installed"), ("vl_convert", "vl-convert: not installed")]
)
def test_without_the_chart_library_the_tables_stand_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert charts.missing() == words
    curve = building.curve("naive", [1.0, 2.0, None, None, None])
    found = pages(
        small_site(
            tmp_path,
            *building.swept("triton.fa2", building.CPU, "float16"),
            *building.measured("triton.fa2", building.CPU),
            curve,
        )
    )
    assert words in found["index.html"].text
    page = found["triton.fa2.html"]
    assert page.text.count(words) == 4
    assert "fitted exponent 1.00" in page.text
    assert not [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]


def test_nothing_imports_torch(tmp_path: Path) -> None:
    records = building.write(
        tmp_path / "run.jsonl", [environment(), judgement(), *building.measured("triton.fa2", building.CPU)]
    )
    program = (
        "import sys; from flashproof.reports.__main__ import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'triton', 'jax'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, records, "-o", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_merges_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        building.write(tmp_path / f"{run}.jsonl", [environment(run), judgement(run=run)])
        for run in (building.CPU, building.GPU)
    ]
    assert __main__.main([*map(str, paths), "-o", str(tmp_path / "new" / "site")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "new" / "site" / "index.html")
    text = Page(tmp_path / "new" / "site" / "index.html").text
    assert "AMD EPYC, 2 cores" in text
    assert "NVIDIA H200" in text


@pytest.mark.parametrize(
    ("records", "output", "message"),
    [
        ("absent.jsonl", "site", "absent.jsonl: no such file"),
        ("no-records", "site", "no-records: is a folder that holds no records"),
        ("empty.jsonl", "site", "empty.jsonl: holds no records"),
        ("foreign.jsonl", "site", "foreign.jsonl, line 1: not a record of flashproof"),
        ("cut.jsonl.gz", "site", "cut.jsonl.gz: cannot be unpacked"),
        ("good.jsonl", "good.jsonl", "good.jsonl: is a file; give a directory"),
    ],
)
def test_errors_name_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: str, output: str, message: str
) -> None:
    (tmp_path / "no-records").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "foreign.jsonl").write_text('{"hello": 1}\n')
    good = building.write(tmp_path / "good.jsonl", [environment(), judgement()])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(good.read_bytes())[:-9])
    assert __main__.main([str(tmp_path / records), "-o", str(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m flashproof.reports: ")
    assert message in error
    assert not (tmp_path / "site").exists()
