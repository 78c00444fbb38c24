"""The site is complete and self-contained, harmless whatever the records hold, and the same for the same records."""

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from flashproof.reports import __main__, charts, front, overview, portrait, wording
from flashproof.reports.evidence import gather
from flashproof.reports.pages import write_site
from flashproof.reports.portrait import NEXT, SHOWN
from flashproof.reports.record import FIRST_POWER, LAST_POWER, Absence, Elements, Grid, Judgement, Record, TensorName
from flashproof.reports.templating import linked
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import claim, environment, judgement

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("tiled.fa2", "triton.fa2", "cuda.fa1", building.SDPA, building.HOSTILE)
PARTS = ("errors", "how", "index", "mutants", "speed", "training")


class Page(HTMLParser):
    """The content of a page: its elements with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.inside.append(tag)

    def handle_data(self, data: str) -> None:
        if self.inside[-1:] not in (["script"], ["style"]):
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            del self.inside[len(self.inside) - 1 - self.inside[::-1].index(tag) :]

    def all(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def pages(site: Path) -> dict[str, Page]:
    return {path.name: Page(path) for path in site.glob("*.html")}


def small_site(directory: Path, *records: Record) -> Path:
    """Returns the site of a run. The run is whole for the implementations that have a claim in the records."""
    write_site([building.write(directory / "run.jsonl", [environment(whole=True), *records])], directory / "site")
    return directory / "site"


def the_page(site: Path, name: str) -> Page:
    return Page(site / f"{wording.stem(name)}.html")


def every_case(site: Path, name: str) -> dict[str, Any]:
    """What the file with all cases of an implementation holds."""
    text = (site / "cases" / f"{wording.stem(name)}.js").read_text()
    packed = re.fullmatch(r'flashproofCases\("([A-Za-z0-9+/=]+)"\)\n', text)
    assert packed
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return data


# ---------------------------------------------------------------------------------------------------- completeness


def test_every_implementation_has_a_page_that_the_index_links(site: Path) -> None:
    found = pages(site)
    assert set(found) == {f"{name}.html" for name in (*PARTS, *map(wording.stem, NAMES))}
    linked_ = {address.partition("#")[0] for address in found["index.html"].all("href")}
    assert set(found) <= linked_
    for name in NAMES:
        assert wording.short_name(name) in the_page(site, name).text


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    found = pages(site)
    for name, page in found.items():
        ids = page.all("id")
        assert len(ids) == len(set(ids)), f"{name} has an id twice"
        for href in page.all("href") + page.all("data-file"):
            if re.match(r"https?://", href):
                continue
            file, _, anchor = href.partition("#")
            assert not file or (site / file).is_file(), f"{name}: {href}"
            assert not anchor or anchor in found[file or name].all("id"), f"{name}: {href}"


def test_the_index_begins_with_a_sentence_of_verdict(site: Path) -> None:
    words = pages(site)["index.html"].words
    for told in (
        "1 of 4 implementations holds its bound",
        "2 fail; the name of each in the table opens its failures. The worst is",
        "AMD EPYC, 2 cores",
        "NVIDIA H200",
        "2026-03-03",
    ):
        assert told in words, told


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [claim(), judgement()],
            "triton.fa2 holds its bound on every case. out of triton.fa2 in float32 comes closest to its",
        ),
        (
            [claim(), judgement(), judgement("b", check="gradients/backward", tensor="dv", status="failed", rho=1.7)],
            "1 of 2 implementations holds its bound on every case. "
            "b on AMD EPYC, 2 cores fails in its only case: dV in float32 is 1.7 times as far off as its arithmetic "
            "allows.",
        ),
        (
            [judgement("b", status="failed", bias=0.31, bias_error=0.01, bias_allowance=0.25, dtype="float16")],
            "b on AMD EPYC, 2 cores fails in its only case: the errors of out in float16 lean to one side: "
            "bias 0.31 ± 0.010 ulp, 1.1 times its limit.",
        ),
        ([judgement(), judgement("b", status="known defect", rho=3.0)], "b has known defects."),
        ([judgement("b", status="failed", rho="nan")], "out in float32 is not finite where the exact result is."),
        ([building.property_("masks/hidden", False)], "masks/hidden in float32 does not hold: two runs differ in 3"),
        ([], "Nothing was verified in these runs."),
    ],
)
def test_the_sentence_says_what_is_right_and_what_is_wrong(tmp_path: Path, records: list[Record], words: str) -> None:
    assert words in pages(small_site(tmp_path, *records))["index.html"].words


def run(*records: Record, **fields: Any) -> list[Record]:
    """Returns the records of a run. fields: of its environment, where they differ from those of a narrowed run."""
    return [environment(**fields), *records]


def several(directory: Path, *runs: list[Record]) -> Path:
    """Returns the site of several runs."""
    paths = [building.write(directory / f"{number}.jsonl", one) for number, one in enumerate(runs)]
    return write_site(paths, directory / "site").parent


PASSED: list[Record] = [claim(), judgement(rho=0.5)]
ON_GPU: list[Record] = [claim(run=building.GPU), judgement(run=building.GPU, rho=0.5)]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run(*PASSED)], "triton.fa2 holds its bound on the cases that were run; no run was whole. out of"),
        ([run(*PASSED, whole=True)], "triton.fa2 holds its bound on every case. out of"),
        (
            [run(*PASSED, whole=True), run(*ON_GPU, run=building.GPU)],
            "triton.fa2 holds its bound on the cases that were run; no run on NVIDIA H200 was whole. out of",
        ),
        (
            [run(*PASSED, judgement("b", status="failed", rho=1.7))],
            "1 of 2 implementations holds its bound on the cases that were run; no run of it was whole. b on AMD",
        ),
        (
            [run(*PASSED, judgement("b"))],
            "All 2 implementations hold their bound on the cases that were run; no run of them was whole. out",
        ),
        (
            [run(*PASSED, judgement("b"), whole=True)],
            "1 of 2 implementations holds its bound on every case. "
            "1 more holds its bound on the cases that were run; no run of it was whole. out",
        ),
        (
            [run(*PASSED, claim("b"), judgement("b"), whole=True), run(*ON_GPU, run=building.GPU)],
            "1 more holds its bound on the cases that were run; not every device had a whole run. out",
        ),
    ],
)
def test_the_sentence_says_that_a_run_was_narrowed(tmp_path: Path, runs: list[list[Record]], words: str) -> None:
    assert words in pages(several(tmp_path, *runs))["index.html"].words


def test_the_matrix_keeps_narrowed_runs_apart(tmp_path: Path) -> None:
    site = several(tmp_path, run(*PASSED, whole=True), run(*ON_GPU, run=building.GPU))
    words = pages(site)["index.html"].words
    every, narrowed = (
        words.index(f"holds its bound on {on} 1 triton.fa2 {machine}")
        for on, machine in (("every case", "EPYC"), ("the cases of narrowed runs", "H200"))
    )
    assert every < narrowed


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (PASSED, "Holds its bound on the cases that were run, in 1 judgement on AMD EPYC, 2 cores; no run was whole."),
        (
            [claim(), judgement(status="known defect", rho=3.0)],
            "Holds its bound, but for 1 case of known defects, on AMD EPYC, 2 cores; no run was whole.",
        ),
        (
            [claim(), judgement(status="failed", rho=3.0)],
            "Cases that failed: 1 of 1 in float32 on AMD EPYC, 2 cores. No run was whole: float16, bfloat16 and CUDA "
            "were not run, although claimed. Its command: pytest --impl '*'.",
        ),
    ],
)
def test_the_page_says_that_a_run_was_narrowed(tmp_path: Path, records: list[Record], words: str) -> None:
    assert words in the_page(several(tmp_path / "narrowed", run(*records)), "triton.fa2").words
    whole = the_page(several(tmp_path / "whole", run(*records, whole=True)), "triton.fa2").words
    assert "was whole" not in whole


def test_what_was_run_stands_beside_the_verdict(tmp_path: Path) -> None:
    judged = [
        judgement(dtype=dtype, case=f"b1 h1 q{n} k{n} d8 {dtype}") for n in (1, 2) for dtype in ("float32", "float16")
    ]
    failed = judgement(dtype="float16", case="b1 h1 q3 k3 d8 float16", status="failed", rho=3.0)
    site = several(tmp_path, run(claim(ended=False), *judged, failed, command="flashproof f --dtype float16"))
    says = (
        "Cases that failed: 0 of 2 in float32 and 1 of 3 in float16 on AMD EPYC, 2 cores. "
        "No run was whole: bfloat16 and CUDA were not run, although claimed. The run was interrupted."
    )
    assert f"{says} Its command: flashproof f --dtype float16." in the_page(site, "triton.fa2").words
    assert says in pages(site)["index.html"].words


def test_a_quick_run_is_called_quick(tmp_path: Path) -> None:
    failed = judgement(status="failed", rho=3.0)
    for command, is_quick in (("flashproof f --quick", True), ("flashproof f", False)):
        site = several(tmp_path / str(is_quick), run(claim(), failed, command=command))
        says = "The run was quick, which leaves out most of the cases."
        assert (says in the_page(site, "triton.fa2").words) == is_quick
        assert (says in pages(site)["index.html"].words) == is_quick


def test_what_where_how_bad_and_how_to_repeat_it_stand_on_top(tmp_path: Path) -> None:
    failed = [
        judgement(status="failed", tensor=tensor, dtype=dtype, rho=rho, case=f"b1 h1 q{n} k{n} d8 {dtype} causal")
        for n, tensor, dtype, rho in ((7, "out", "float32", 9.0), (8, "dk", "float32", 2.0), (9, "dk", "float16", 2.0))
    ]
    worst = building.worst(4.0, got=1.5, exact=1.0, error=0.5, bound=0.125)
    failed[0] = replace(failed[0], rho=4.0, worst=worst, case="b1 h1 q3 k3 d8 float32")
    site = small_site(tmp_path, claim(), *failed, judgement(case="b1 h1 q5 k5 d64 float32", tensor="dq"))
    says = (
        "What is wrong out is wrong in float32; dK is wrong in float32 and float16. Where It fails in 3 of 4 cases. "
        "How bad In the simplest failing case, out in float32 is 4.0 times as far off as its arithmetic allows: "
        "got 1.5 for 1. This is an error of 0.5, and 0.12 is allowed. To repeat it "
        "pytest --impl triton.fa2 --case 'b1 h1 q3 k3 d8 float32' "
    )
    for page in (the_page(site, "triton.fa2"), pages(site)["index.html"]):
        assert says in page.words


def test_accuracy_is_told_before_special_calls(tmp_path: Path) -> None:
    failed = [
        judgement(check="contract/twice", status="failed", rho=9.0),
        judgement(check="accuracy/forward", status="failed", rho=2.0),
    ]
    text = the_page(small_site(tmp_path, *failed), "triton.fa2").text
    assert text.index("rho 2.0") < text.index("rho 9.0")


def test_the_sentence_says_how_many_fail_and_how_to_see_each(tmp_path: Path) -> None:
    failed = [judgement(name, status="failed", rho=rho) for name, rho in (("a", 2.0), ("b", 9.0), ("c", 3.0))]
    site = small_site(tmp_path, *failed, judgement("d"))
    words = pages(site)["index.html"].words
    assert "3 fail; the name of each in the table opens its failures. The worst is b on AMD EPYC, 2 cores: out" in words
    assert {"a.html", "b.html", "c.html"} <= set(pages(site)["index.html"].all("href"))


def test_the_overview_says_what_the_cause_is_and_where(tmp_path: Path) -> None:
    cause = "this is the answer without the causal mask"
    checks = ("accuracy/forward", "masks/hidden", "contract/twice")
    failed = [judgement(status="failed", check=check, rho=9.0, question=cause) for check in checks]
    site = small_site(tmp_path / "answer", *failed, judgement(check="stability/shifted", status="failed", rho=2.0))
    assert f"fails in its only case: {cause}." in pages(site)["index.html"].words
    for page in (pages(site)["index.html"], the_page(site, "triton.fa2")):
        assert page.words.count(cause[1:]) >= 1
        assert "What is wrong out is wrong in float32. Where" in page.words  # the headline says the cause
    wide = [f"b1 h1 q{n} k{n} d256 float32 full normal seed0" for n in range(200, 204)]
    failed = [judgement(status="failed", check=check, case=case, rho=9.0) for check in checks for case in wide]
    passed = [judgement(case=f"b1 h1 q{n} k{n} d64 float32 full normal seed0") for n in range(200, 210)]
    words = pages(small_site(tmp_path / "cases", *failed, *passed))["index.html"].words
    says = "All 4 failing cases have a head dim of at least 256 (a case with 64 passes); no passing case has that."
    assert says in words


def test_a_tensor_fails_in_its_column_wherever_it_fails(tmp_path: Path) -> None:
    """Also where the same check holds in another dtype."""
    twice: dict[str, Any] = {"check": "contract/twice", "tensor": "dk"}
    every = [judgement(check="gradients/backward", tensor="dk"), judgement(**twice, dtype="float32")]
    every += [judgement(**twice, dtype="float16", status="failed", rho=9.0)]
    index = pages(small_site(tmp_path, *every))["index.html"]
    (title,) = [about["title"] for tag, about in index.elements if tag == "a" and about.get("href", "").endswith("#dk")]
    assert "float16 failed 9.0" in title
    assert "float32 passed" in title


def test_the_legend_of_the_overview_has_every_word_and_mark(tmp_path: Path) -> None:
    """Each status, with a rho and without: the cells of the overview hold nothing that the legend lacks."""
    statuses = ("passed", "failed", "known defect", "refused")
    about: tuple[dict[str, Any], ...] = (
        {"rho": 2.0},
        {"rho": "inf"},
        {"rho": 0.5, "bias": 9.0, "bias_error": 0.1, "bias_allowance": 0.25},
        {"rho": None, "tensor": None},
        {"rho": None, "tensor": None, "check": "masks/hidden"},
        {"rho": None, "tensor": None, "rms": 1.9},
    )
    every = [judgement(status=status, **one) for status in statuses for one in about]
    every = [one for one in every if (one.status, one.rho) != ("passed", "inf")]
    legend = {word for words, _ in front.WORDS for word in words.split(", ")}
    for one in every:
        word = re.sub(r"\d+(\.\d+)?", "1.7", wording.short_reason(one))
        assert word in {re.sub(r"\d+(\.\d+)?", "1.7", known) for known in legend}, word
    site = small_site(
        tmp_path, claim(), *(msgspec.structs.replace(one, check=f"accuracy/{i}") for i, one in enumerate(every))
    )
    page = pages(site)["index.html"]
    marks = {attributes.get("class", "") for tag, attributes in page.elements if tag == "i"}
    assert marks <= {form.mark for form, _ in front.MARKS}
    for state in overview.GROUPS.values():
        for bar in state:
            assert front._form(overview.Bar("float32", bar)).mark in {form.mark for form, _ in front.MARKS}
    for word in ("fault", "no", "bias", "ok", "not run here"):
        assert word in legend
    assert all(said in page.words for _, said in (*front.MARKS, *front.WORDS))


def test_a_cell_tells_its_worst_case_and_leads_to_its_cases(tmp_path: Path) -> None:
    judged = [
        judgement(rho=0.2),
        judgement(dtype="bfloat16", rho=1.7, status="failed"),
        judgement(tensor="dq", rho=0.1),
    ]
    index = pages(small_site(tmp_path, claim(), *judged))["index.html"]
    cells = {
        attributes["href"].partition("#")[2]: attributes["title"]
        for tag, attributes in index.elements
        if tag == "a" and attributes.get("href", "").startswith("triton.fa2.html#")
    }
    assert cells == {
        "out": "float32 passed 0.20; float16 not run; bfloat16 failed 1.7",
        "dq": "float32 passed 0.10; float16 not run; bfloat16 not run",
    }


def test_a_dtype_that_a_run_left_out_was_not_run(tmp_path: Path) -> None:
    """Another check of the layer that is not claimed does not hide this."""
    missing = Absence(
        run=building.CPU, implementation="triton.fa2", device="cpu", reason="not claimed", check="masks/other"
    )
    index = pages(small_site(tmp_path, claim(), judgement(check="masks/one"), missing))["index.html"]
    titles = [attributes.get("title") for _, attributes in index.elements]
    assert "float32 passed 0.50; float16 not run; bfloat16 not run" in titles


def test_what_was_not_judged_is_told_apart(site: Path) -> None:
    words = pages(site)["index.html"].words
    assert "not claimed" in words
    assert "not run" in words
    assert "not possible here: CUDA: no device" in words


def test_states_differ_in_shape_as_well_as_in_colour(site: Path) -> None:
    source = (site / "index.html").read_text()
    shapes = dict(re.findall(r'<symbol id="state-([a-z-]+)"[^>]*>(.*?)</symbol>', source))
    assert len(set(shapes.values())) == len(shapes) == 7


def test_an_implementation_page_is_complete(site: Path) -> None:
    page = the_page(site, "triton.fa2")
    for words in (
        "passes at magnitude 4, fails from 16",
        "again: pytest --impl triton.fa2 --case 'b1 h1 q150 k150 d64 bfloat16 full normal x16 seed2'",
        "the query sees 518 keys; the largest weight is 99.8 %",
        "two runs differ in 3 of 16384 elements",
        "fitted exponent 1.00",
        "FlashAttention-2, section 3.1",
        "sm_100",
        "certified",
        "88.72",
        "It takes float32, float16 and bfloat16 on cpu and cuda, forward and backward, with head dims from 1 to 256.",
    ):
        assert words in page.words, words
    order = [
        page.text.index(heading) for heading in ("Failures", "Error over length", "What was checked", "What it claims")
    ]
    assert order == sorted(order)
    names = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg" and "role" in attributes]
    assert any(name.startswith("rho over sequence length, triton.fa2 on NVIDIA H200: at most") for name in names)
    assert "triton.fa2: memory over sequence length on AMD EPYC, 2 cores" in names


def test_every_chart_says_what_it_shows(site: Path) -> None:
    for name, page in pages(site).items():
        for tag, attributes in page.elements:
            if tag == "svg" and attributes.get("role") == "img":
                assert len(attributes["aria-label"]) > 10, name


def test_the_file_of_cases_holds_every_judgement(tmp_path: Path) -> None:
    judged = [judgement(rho=0.5), judgement(case="x", status="failed", rho=7.0, message="two sums"), judgement("other")]
    data = every_case(small_site(tmp_path, *judged), "triton.fa2")
    assert [data["words"][i] for i in data["status"]] == ["passed", "failed"]
    assert data["rho"] == ["0.50", "7.0"]
    assert data["words"][data["command"][1]] + data["words"][data["case"][1]] == "pytest --impl triton.fa2 --case x"
    assert data["words"][data["said"][1]] == "two sums"


def test_the_simplest_failure_is_first_and_the_worst_beside_it(tmp_path: Path) -> None:
    cases = {
        "b1 h2 q128 k128 d64 float32 causal normal x16 k.columns spelled seed1": 9.0,
        "b1 h2 q99 k99 d64 float32 causal normal seed2": 2.0,
        "b1 h2 q128 k128 d64 float32 causal normal seed3": 3.0,
    }
    failed = [judgement(status="failed", case=case, rho=rho) for case, rho in cases.items()]
    text = the_page(small_site(tmp_path / "recorded", *failed), "triton.fa2").text
    top, _, below = text.partition("Failures")
    assert "In the simplest failing case, out in float32 is 2.0 times as far off" in top
    order = ["simplest case first", "rho 2.0", "seed2'", "The worst case", "rho 9.0", "seed1'"]
    places = [below.index(words) for words in order]
    assert places == sorted(places)


def test_the_needs_of_one_case_are_not_told_beside_what_all_share(tmp_path: Path) -> None:
    """A second failure may need something else, so the words of single cases contradict one another."""
    simple = "b1 h1 q71 k71 d256 float32 full normal seed4"
    said = f"the simplest case that fails: {simple}; it needs head dim 256, layout of k columns"
    failed = [
        judgement(
            status="failed",
            rho=2.0,
            case=f"b2 h1 q{n} k{n} d256 float32 full normal x16 seed0",
            message=said,
            worst=building.worst(2.0),
        )
        for n in range(200, 204)
    ]
    failed.append(judgement(status="failed", rho=1.5, case=simple, worst=building.worst(1.5)))
    passed = [judgement(case=f"b1 h1 q{n} k{n} d64 float32 full normal seed0") for n in range(200, 210)]
    for others, is_told in (([], True), (passed, False)):
        site = small_site(tmp_path / str(is_told), *failed, *others)
        page = the_page(site, "triton.fa2").words
        assert f"To repeat it pytest --impl triton.fa2 --case '{simple}'" in page
        assert "All failing cases have a head dim of 256. The simplest one, " in page
        assert f"{simple}, passes without that, and also without layout of k columns." in page
        assert f"the simplest case that fails: {simple}" in page
        assert ("it needs" in page) == is_told
        assert any("it needs" in word for word in every_case(site, "triton.fa2")["words"]) == is_told


def test_the_charts_say_which_failing_cases_they_do_not_show(tmp_path: Path) -> None:
    def swept(**fields: Any) -> list[Record]:
        return [
            judgement(case=f"b1 h1 q{n} k{n} d64 float32 full normal seed1", axes={"queries": n}, **fields)
            for n in (8, 9)
        ]

    other = [judgement(status="failed", case=f"b1 h1 q8 k8 d64 float32 full normal x{n} seed1") for n in (2, 3, 4)]
    for records, words in (
        (
            [*swept(), *other],
            "They show none of the 3 failing cases. The failures stand above.",
        ),
        ([*swept(status="failed"), *other], "They show 2 of the 5 failing cases. The failures stand above."),
        ([*swept(), other[0]], "They do not show the failing case. The failures stand above."),
        ([*swept(status="failed")], ""),
    ):
        page = the_page(small_site(tmp_path / str(len(words)), *records), "triton.fa2").words
        assert words in page
        assert ("The charts have cases of their own" in page) == bool(words)


def test_charts_without_a_failing_case_are_folded(tmp_path: Path) -> None:
    def swept(**fields: Any) -> list[Record]:
        return [
            judgement(case=f"b1 h1 q{n} k{n} d64 float32 full normal seed1", axes={"queries": n}, **fields)
            for n in (8, 9)
        ]

    other = judgement(status="failed", case="b1 h1 q8 k8 d64 float32 full normal x2 seed1", rho=3.0)
    fold = "<summary>charts of cases that hold</summary>"
    for number, (records, is_folded) in enumerate(
        (([*swept(), other], True), ([*swept(status="failed", rho=3.0), other], False), (swept(), False))
    ):
        page = (small_site(tmp_path / str(number), *records) / "triton.fa2.html").read_text()
        assert (fold in page) == is_folded
        assert page.count("<details") == page.count("</details>")
        assert 'aria-label="rho over sequence length' in page


def test_failures_of_special_calls_that_repeat_one_fault_are_one(tmp_path: Path) -> None:
    wide = [f"b1 h1 q{n} k{n} d256 float32 full normal seed0" for n in range(200, 204)]
    checks = ("accuracy/forward", "accuracy/search", "contract/a", "contract/b", "contract/c")
    failed = [judgement(status="failed", check=check, case=case, rho=9.0) for check in checks for case in wide]
    own = judgement(status="failed", check="contract/d", tensor="dk", case="b1 h1 q9 k9 d64 float32", rho=9.0)
    passed = [judgement(case=f"b1 h1 q{n} k{n} d64 float32 full normal seed0") for n in range(200, 240)]
    page = the_page(small_site(tmp_path, *failed, own, *passed), "triton.fa2")
    failures = page.words.partition("Failures ")[2].partition("What was checked")[0]
    assert "11 more cases of contract/a, contract/b and contract/c." in failures
    cards = [attributes for tag, attributes in page.elements if attributes.get("class", "").startswith("failure")]
    assert len(cards) == 3, "the simplest one with the worst, the other check of accuracy, and one of the calls"
    alone = the_page(small_site(tmp_path / "alone", *failed, own), "triton.fa2").words
    assert "are like this one" not in alone


def test_a_bias_is_told_as_a_share_of_its_own_limit(tmp_path: Path) -> None:
    """The limit of rho is 1, and that of a bias is another number."""
    failed = judgement(status="failed", dtype="float16", rho=0.6, bias=0.58, bias_error=0.01, bias_allowance=0.25)
    text = the_page(small_site(tmp_path, failed), "triton.fa2").text
    assert "lean to one side: bias 0.58 ± 0.010 ulp, 2.0 times its limit" in text


def test_the_words_of_the_cases_on_a_page_are_explained(site: Path) -> None:
    page = the_page(site, "triton.fa2")
    legend = page.text.partition("What the words of a case mean")[2].partition("One case of each")[0]
    cases = re.findall(r"--case 'b\d+ h\d+ q\d+ k\d+ d\d+ ([^']*)'", page.text)
    assert cases
    for word in {word for case in cases for word in case.split()}:
        number = re.fullmatch(r"(x|seed|shift)[-\d.]+", word)
        assert re.search(rf"(?<![\w.]){number[1]}[-\d.]+ " if number else rf"(?<![\w.]){re.escape(word)} ", legend), (
            word
        )
    assert "packed" not in legend


def test_a_failure_shows_where_in_the_tensor_it_lies(tmp_path: Path) -> None:
    grid = Grid(rows=128, columns=64, rho=[[0.1, 0.2], [0.3, 7.0]])
    site = small_site(tmp_path, judgement(status="failed", rho=7.0, grid=grid))
    page = the_page(site, "triton.fa2")
    assert "Where in the tensor" in page.text
    assert "rho 7" in page.text


def test_a_known_defect_tells_what_was_seen_and_where_it_is_reported(site: Path) -> None:
    page = the_page(site, building.SDPA)
    assert "16-bit sums." in page.text
    assert building.ISSUE in page.all("href")
    assert "RuntimeError: scale must be positive" in page.text


def test_refusals_that_differ_in_numbers_are_one(tmp_path: Path) -> None:
    numbers = ("64", "-1.5", "1e-05")
    refused = [
        judgement("mine.py:f", case=f"q{i}", status="refused", message=f"ValueError: {n} is taken by nobody")
        for i, n in enumerate(numbers)
    ]
    text = the_page(small_site(tmp_path, claim("mine.py:f", bare=True), *refused), "mine.py:f").text
    section = text[text.index("what it said first") : text.index("What it claims")]
    assert section.count("is taken by nobody") == 1
    assert "64 is taken by nobody" in section


def test_failures_that_are_left_out_are_counted(tmp_path: Path) -> None:
    failed = [
        judgement(check=f"masks/check{i}", case=case, status="failed", rho=40.0 - i)
        for i in range(SHOWN + 2)
        for case in ("q1", "q2")
    ]
    words = the_page(small_site(tmp_path, *failed), "triton.fa2").words
    assert f"{SHOWN - NEXT} more" in words
    assert "The rest, with 2 failed judgements, stands in the folds below." in words


def test_judgements_without_a_claim_are_shown(tmp_path: Path) -> None:
    page = the_page(small_site(tmp_path, judgement()), "triton.fa2")
    assert "No claim in these records." in page.text
    assert "If no gradient is wanted, output and LSE are inside the bound" in page.text, "each check is explained"


# ----------------------------------------------------------------------------------------------- offline, harmless


def test_nothing_is_fetched(site: Path) -> None:
    fetching = {"src", "srcset", "data", "poster", "background", "action", "formaction", "ping", "manifest"}
    for path in site.glob("*.html"):
        page = Page(path)
        assert not {tag for tag, _ in page.elements} & {
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
            if (tag, attributes.get("href") or attributes.get("src")) in (
                ("link", "style.css"),
                ("script", "script.js"),
            ):
                continue
            assert tag != "link"
            assert not fetching & set(attributes), f"{path.name}: <{tag}> {attributes}"
            assert not [name for name in attributes if name.startswith("on")], f"{path.name}: <{tag}> {attributes}"
            for href in (attributes.get("href", ""), attributes.get("xlink:href", "")):
                assert tag == "a" or not href or href.startswith("#"), f"{path.name}: <{tag} href={href}>"
                assert not re.match(r"\s*(javascript|data|vbscript):", href, re.IGNORECASE)
        source = path.read_text()
        assert source.count("<script") == 1, f"{path.name}: the script of the pages and no other"
    assert not re.search(r"@import|url\(", (site / "style.css").read_text())


def test_what_others_write_is_only_text(site: Path) -> None:
    page = the_page(site, building.HOSTILE)
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
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in write_site([records], tmp_path / name).parent.rglob("*")
            if path.is_file()
        }
        for name in ("a", "b")
    ]
    assert sites[0] == sites[1]


def test_the_site_of_the_committed_records_is_small(tmp_path: Path) -> None:
    """The limits are for the whole site, for each file and for the first page.

    The site is built by another process, because the checks of types make it four times as slow in this one.
    """
    records = sorted((ROOT / "reports" / "records").glob("*.jsonl.gz"))
    command = [sys.executable, "-m", "flashproof.reports", *map(str, records), "-o", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) <= 5_000_000
    assert max(sizes) <= 500_000
    assert (tmp_path / "index.html").stat().st_size < 150_000


def test_pages_of_an_earlier_site_go_and_other_files_stay(tmp_path: Path) -> None:
    site = small_site(tmp_path / "a", judgement("old.kernel"))
    (site / "notes.html").write_text("<p>mine</p>")
    write_site([building.write(tmp_path / "b.jsonl", [environment(), judgement("new.kernel")])], site)
    files = {path.relative_to(site).as_posix() for path in site.rglob("*.*")}
    assert not [name for name in files if "old.kernel" in name]
    assert {"notes.html", "new.kernel.html", "cases/new.kernel.js", "badges/new.kernel.svg"} <= files


def test_badges_tell_the_verdict_and_the_commit(tmp_path: Path) -> None:
    site = small_site(tmp_path, claim(), judgement(rho=0.5), claim("b"), judgement("b", status="failed", rho=1.7))
    badge = json.loads((site / "badges" / "b.json").read_text())
    assert badge == {
        "schemaVersion": 1,
        "label": "flashproof",
        "message": "fails · rho 1.7 · 0123456",
        "color": "c62828",
    }
    assert "holds · rho 0.50 · 0123456" in (site / "badges" / "triton.fa2.svg").read_text()


@pytest.mark.parametrize(
    ("status", "words", "colour"),
    [("passed", "holds", "5b6470"), ("failed", "fails", "c62828"), ("known defect", "known defect", "9a5b00")],
)
def test_a_badge_says_that_a_run_was_narrowed(tmp_path: Path, status: Any, words: str, colour: str) -> None:
    """A pass of a narrowed run does not have the colour of a pass."""
    site = several(tmp_path, run(claim(), judgement(status=status, rho=0.5)))
    badge = json.loads((site / "badges" / "triton.fa2.json").read_text())
    message = f"{words} in a narrowed run · rho 0.50 · 0123456"
    assert (badge["message"], badge["color"]) == (message, colour)
    svg = (site / "badges" / "triton.fa2.svg").read_text()
    assert message in svg
    assert f'fill="#{colour}"' in svg


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
        ("cut.jsonl.gz", "site", "cut.jsonl.gz, line 3: cannot be unpacked"),
        ("good.jsonl", "good.jsonl", "good.jsonl: is a file; give a directory"),
        ("speeds.json", "site", "speeds.json: holds no benchmarks"),
    ],
)
def test_errors_name_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: str, output: str, message: str
) -> None:
    """An error names the file and the line, and the rest is built where there is a rest."""
    (tmp_path / "no-records").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "foreign.jsonl").write_text('{"hello": 1}\n')
    (tmp_path / "speeds.json").write_text('{"hello": 1}\n')
    good = building.write(tmp_path / "good.jsonl", [environment(), judgement()])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(good.read_bytes())[:-9])
    assert __main__.main([str(tmp_path / records), "-o", str(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m flashproof.reports: ")
    assert message in error
    assert not (tmp_path / "site").exists()
    if records.endswith((".jsonl", ".gz")) and records != "good.jsonl":
        assert __main__.main([str(tmp_path / records), str(good), "-o", str(tmp_path / output)]) == 1
        assert message in capsys.readouterr().err
        page = Page(tmp_path / "site" / "index.html")
        assert message in page.text
        assert "Left out of this report, because it cannot be read: 1 file" in page.words
        assert ("summary", {"class": "failed"}) in page.elements


@pytest.mark.parametrize(("tensor", "edges"), [("dk", 3), ("out", 0)])
def test_a_heat_map_has_the_edges_of_claimed_tiles(tmp_path: Path, tensor: TensorName, edges: int) -> None:
    """The claim says 64 keys, and nothing about queries."""
    grid = Grid(rows=256, columns=64, rho=[[2.0, 0.5], [0.1, 0.1]])
    failed = judgement(status="failed", tensor=tensor, rho=2.0, grid=grid, worst=building.worst(2.0))
    path = building.write(tmp_path / "run.jsonl", [environment(), claim(), failed])
    (kernel,) = gather([path]).kernels
    ((_, _, svg),) = portrait._heats(list(kernel.judged), kernel)
    assert svg.count('class="landmark"') == edges


def test_a_heat_map_shows_the_simplest_failing_case(tmp_path: Path) -> None:
    rows: list[list[float | str]] = [[0.05, 2.0e3] * 8] * 16
    grid, small = Grid(rows=64, columns=16, rho=rows), Grid(rows=1, columns=16, rho=rows[:1])
    cases = ("b1 h1 q64 k64 d2 float32 causal normal x16 k.columns seed7", "b1 h1 q64 k64 d2 float32 full normal seed8")
    failed = [judgement(status="failed", rho=2.0e3 / n, grid=grid, case=case) for n, case in enumerate(cases, 1)]
    failed.append(judgement(status="failed", rho=9.0, grid=small, case="b1 h1 q1 k1 d2 float32 full normal seed9"))
    (kernel,) = gather([building.write(tmp_path / "run.jsonl", [environment(), *failed])]).kernels
    ((about, line, _),) = portrait._heats(list(kernel.judged), kernel)
    assert about == "out in float32, rho up to 2000"
    assert "seed8" in line


def test_a_heat_map_has_a_scale_of_logarithms_up_to_its_largest_rho() -> None:
    assert charts.heat_steps([0.5, 1.0]) == [(0.1, "h0"), (1.0, "h1")]
    assert [edge for edge, _ in charts.heat_steps([0.0, 1e4])] == [0.1, 1.0, 10.0, 100.0, 1000.0, 1e4]
    assert charts.heat_steps([1.5, math.nan])[2:] == [(1.5, "h5"), (math.inf, "h6")]
    svg = charts.heat([[0.05, 50.0], [1e4, math.inf]], (64, 64), "a map", ("queries", "dim"), (0, 0))
    for name in ("up to 0.1", "up to 1, the bound", "up to 10", "up to 100", "up to 1000", "up to 1.0e4", "not finite"):
        assert f">{name}</text>" in svg, name
    assert [svg.count(f'<path class="{kind}"') for kind in ("h0", "h3", "h5", "h6")] == [1, 1, 1, 1]
    assert svg.count("mark over") == 3


def test_errors_of_all_elements_stand_beside_the_correctly_rounded_result(tmp_path: Path) -> None:
    counts = [0] * (LAST_POWER - FIRST_POWER + 2)
    one = Elements(counts=[*counts[:3], 30, 10, *counts[5:]], floor=[*counts[:3], 40, 0, *counts[5:]])
    records = [judgement(tensor=tensor, elements=one) for tensor in ("out", "dq", "dk")]
    (kernel,) = gather([building.write(tmp_path / "run.jsonl", [environment(), *records])]).kernels
    (out, _, first), (gradients, _, _) = portrait._elements(kernel)
    assert out == "out, float32: 40 elements, 100 % within 1 ulp"
    assert gradients == "gradients, float32: 80 elements, 100 % within 1 ulp"
    assert first.count('class="fill rho"') == first.count('class="exact"') == 1
    assert portrait._histograms(kernel) == []


@pytest.mark.parametrize(("status", "classes"), [("passed", {"rho dotted"}), ("failed", {"rho", "dots"})])
def test_each_point_of_a_line_is_marked_once(tmp_path: Path, status: Any, classes: set[str]) -> None:
    """A line on which all points pass carries their dots itself. Only a rho too small for the chart needs its own."""
    axes = [{"queries": float(2**power)} for power in range(4)]
    judged = [judgement(case=str(place), rho=0.5, axes=place) for place in axes[:3]]
    judged.append(judgement(case="last", rho=0.5, axes=axes[3], status=status))
    page = (small_site(tmp_path, *judged) / "triton.fa2.html").read_text("utf-8")
    assert set(re.findall(r'<path class="(rho dotted|rho|dots)" d="m', page)) == classes
    judged[0] = judgement(case="first", rho=1e-6, axes=axes[0])
    page = (small_site(tmp_path / "small", *judged) / "triton.fa2.html").read_text("utf-8")
    assert "dots" in re.findall(r'<path class="(dots)" d="m', page)


def test_the_unshifted_softmax_is_beside_the_landmarks(site: Path) -> None:
    text = (site / "triton.fa2.html").read_text("utf-8")
    assert text.count(">For comparison: a softmax that overflows<") == 1
    assert text.index('id="picture"') < text.index('id="unshifted"') < text.index('id="checks"')


def test_a_failure_whose_cause_was_found_comes_first(tmp_path: Path) -> None:
    cause = "this is the answer without the causal mask"
    failed = [judgement(status="failed", tensor=tensor, rho=rho) for tensor, rho in (("out", 3.0), ("dv", 9.0))]
    failed.append(judgement(status="failed", tensor="out", rho=2.0, question=cause, case="b1 q8 seed1"))
    site = write_site([building.write(tmp_path / "run.jsonl", [environment(), *failed])], tmp_path / "site").parent
    text = the_page(site, "triton.fa2").text
    assert f"Fails 1 check in all 2 cases: {cause}." in text
    assert "In the simplest failing case, out in float32 is 2.0 times" in text
    assert text.index("rho 2.0") < text.index("rho 9.0")


def test_a_cause_in_few_failing_checks_is_no_headline(tmp_path: Path) -> None:
    """A question that is answered in one of five failing checks may be answered by chance."""
    cause = "this is the answer without the causal mask"
    failed = [judgement(status="failed", check=f"contract/{name}", rho=3.0) for name in ("a", "b", "c", "d")]
    failed.append(judgement(status="failed", rho=2.0, question=cause))
    text = the_page(small_site(tmp_path, claim(), *failed), "triton.fa2").text
    assert "Fails 5 checks in its only case." in text


def test_a_larger_rho_in_a_check_of_calls_is_the_worst_case(tmp_path: Path) -> None:
    failed = [judgement(status="failed", rho=141.0), judgement(status="failed", check="contract/grown", rho=1423.0)]
    page = the_page(small_site(tmp_path, claim(), *failed), "triton.fa2").text
    assert page.index("rho 141") < page.index("The worst case") < page.index("rho 1423")
    checks = ("contract/z", "accuracy/forward")  # without a figure, the check of plain calls tells most
    failed = [judgement(status="failed", check=check, tensor=None, rho=None, message="wrong") for check in checks]
    page = the_page(small_site(tmp_path / "none", claim(), *failed), "triton.fa2").text
    assert "In the simplest failing case, accuracy/forward in float32 does not hold" in page


def test_an_exact_value_of_nearly_0_is_not_the_headline(tmp_path: Path) -> None:
    """There, a bound may be tiny and rho larger than any other, although the error is small."""

    def failed(rho: float | str, got: float, exact: float, case: str) -> Judgement:
        element = building.worst(17.0, got=got, exact=exact, error=abs(got - exact))
        return judgement(status="failed", rho=rho, worst=element, case=case)

    typical = failed(17.0, -0.06506, -0.07506, "b2 h1 q79 k79 d216 float32 causal normal seed1")
    small = [
        failed(2.1e31, 1.0, 1.277e-29, "b1 h1 q8 k8 d64 float32 full normal seed2"),
        failed("inf", -1.9, 0.0, "b1 h1 q7 k7 d64 float32 full normal seed3"),
        failed("nan", 0.0, -2.48e-319, "b1 h1 q6 k6 d64 float32 full normal seed4"),
    ]
    site = small_site(tmp_path, claim(), *small, typical, judgement(case="b1 h1 q5 k5 d64 float32"))
    says = "out in float32 is 17 times as far off as its arithmetic allows: got -0.06506 for -0.07506."
    assert f"fails in 4 of 5 cases; in the simplest one, {says}" in pages(site)["index.html"].words
    page = the_page(site, "triton.fa2").words
    assert f"In the simplest failing case, {says}" in page
    assert "The worst case, and the simplest" in page
    assert "rho 17" in page.partition("Failures")[2][:500]
    titles = [attributes.get("title") for _, attributes in pages(site)["index.html"].elements]
    assert "float32 failed 17; float16 not run; bfloat16 not run" in titles
    others = [replace(one, implementation="b") for one in small]
    words = pages(small_site(tmp_path / "several", typical, *others))["index.html"].words
    assert "The worst is triton.fa2" in words


def test_an_exact_value_below_every_number_of_the_dtype_counts_as_0(tmp_path: Path) -> None:
    element = building.worst(9.0, got=-5.8e-6, exact=-5.8e-182, error=5.8e-6)
    failed = judgement(status="failed", dtype="bfloat16", rho=4.9e32, worst=element)
    page = the_page(small_site(tmp_path, failed), "triton.fa2").words
    assert "got -5.8e-06 for 0." in page
    assert "exact -5.8e-182, which counts as 0 in bfloat16" in page


def test_failed_checks_are_counted_with_and_without_their_dtypes(tmp_path: Path) -> None:
    failed = [judgement(status="failed", rho=2.0, dtype=dtype) for dtype in ("float32", "float16")]
    text = the_page(small_site(tmp_path, claim(), *failed), "triton.fa2").text
    assert "Fails 1 check (2 with dtypes)" in text
