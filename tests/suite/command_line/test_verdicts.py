"""The last lines of a run: what its verdict claims, why checks were left out, and how it groups equal failures."""

import io
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import flashproof
from flashproof import diagnosis, failures, listing, progress, quick, summary
from flashproof.cases import Case
from flashproof.impls.spec import DTYPES
from flashproof.registry import checks
from flashproof.reports import causes
from flashproof.reports.record import Judgement
from flashproof.session import Session
from flashproof.signatures import of_callable
from flashproof.tests.suite.command_line.test_catalogue import ROOT
from flashproof.tests.suite.command_line.test_cli import KERNELS, SMALL, run

MORE = """

@torch.no_grad()
def forward_only(query, key, value):
    return right(query, key, value)


def loses_its_gradient(query, key, value):
    calls.append(1)
    out = right(query, key, value)
    return out if calls[1:] else out.detach()


calls = []


def raises(query, key, value):
    raise KeyError("a bug")


def hangs(query, key, value):
    while True:
        pass
"""
OWN_CHECK = '''
from flashproof import Subject, check, grids


@check("stability", grid=grids.lines("b1 h1 q5 k5 d8"))
def test_own(subject: Subject) -> None:
    """A check of the project's own."""
    for case in subject.cases:
        subject.judge(case)
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that contains kernels and nothing else."""
    (tmp_path / "mine.py").write_text(KERNELS + MORE)
    return tmp_path


def session(**fields: Any) -> Any:
    """Returns a run of three checks that all passed, with some fields changed."""
    options = {"keyword": fields.pop("keyword", "")}
    selection: dict[str, Any] = {"cases": [], "dtypes": DTYPES, "device": None, "whole": lambda: 3, "loaded": []}
    selection |= {name: fields.pop(name) for name in list(fields) if name in selection}
    config = SimpleNamespace(option=SimpleNamespace(**options))
    about = {
        "status": 0,
        "outcomes": Counter(passed=3),
        "reasons": Counter(),
        "clock": None,
        "is_whole": True,
        "left_out": {},
        "has_paths": False,
        "others": set(),
    }
    about |= {"passed_in": {("f", dtype) for dtype in DTYPES}, "without_gradient": {}, "with_gradient": set()}
    return SimpleNamespace(config=config, selection=SimpleNamespace(**selection), **(about | fields))


@pytest.mark.parametrize(
    ("options", "device", "devices"),
    [
        ({}, None, ["cpu", "cuda"]),
        ({"markexpr": "gpu"}, None, ["cuda"]),
        ({}, "cpu", ["cpu"]),
        ({"markexpr": "gpu"}, "cpu", []),
        ({"markexpr": "gpu", "lf": True}, None, []),
        ({"markexpr": "not gpu"}, None, []),
    ],
)
def test_a_run_is_whole_on_the_devices_that_it_leaves_out_nothing_of(
    options: dict[str, Any], device: str | None, devices: list[str]
) -> None:
    config = SimpleNamespace(getoption=lambda name, default=None: options.get(name, default))
    selection = SimpleNamespace(is_whole=True, device=device)
    about: Any = SimpleNamespace(config=config, selection=selection, has_paths=False, times=False)
    for about.asked, about.is_clone in [(True, False), (False, True)]:
        assert vars(Session)["whole_on"].fget(about) == devices
    about.asked = about.is_clone = False
    assert vars(Session)["whole_on"].fget(about) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "verified: 3 checks: 3 passed"),
        ({"status": 1, "outcomes": Counter(passed=2, failed=1)}, "failed: 3 checks: 2 passed, 1 failed"),
        ({"status": 2, "outcomes": Counter(passed=2)}, "not verified: 2 of 3 checks: 2 passed"),  # interrupted
        ({"keyword": "a/b", "outcomes": Counter(passed=1)}, "passed: 1 of 3 checks, narrowed by -k a/b: 1 passed"),
        ({"keyword": "a"}, "verified: 3 checks: 3 passed"),  # the keyword left nothing out
        ({"cases": [Case()]}, "passed: 3 of 3 checks, narrowed by --case: 3 passed"),
        (
            {"clock": True, "outcomes": Counter(passed=1, skipped=1), "reasons": Counter({quick.LATE: 1})},
            f"no fault found by a quick run: 2 of 3 checks, narrowed by --quick: 1 passed, 1 left out ({quick.LATE})",
        ),
        (
            {"dtypes": ["float16"], "outcomes": Counter(passed=1)},
            "passed: 1 of 3 checks, narrowed by --dtype float16: 1 passed",
        ),
        (
            {"without_gradient": {("f", dtype): {"q4", "q5"} for dtype in DTYPES}},
            "verified forward only: 3 checks: 3 passed; 6 cases refused a backward, and no gradient was judged",
        ),
        (
            {"without_gradient": {("f", "float16"): {"q4"}}},
            "verified in part forward only: 3 checks: 3 passed; "
            "1 case refused a backward, and no gradient was judged of f, float16",
        ),
        (
            {"without_gradient": {("f", "float16"): {"q4"}}, "with_gradient": {("f", "float16")}},
            "verified: 3 checks: 3 passed",
        ),
        (  # the function refused every case in float16
            {"without_gradient": {("f", "float16"): {"q4"}}, "passed_in": {("f", "float32")}},
            "verified: 3 checks: 3 passed",
        ),
        (
            {
                "outcomes": Counter(passed=1, skipped=2),
                "reasons": Counter({"refused: ValueError: a": 1, "refused: ValueError: b": 1}),
            },
            "verified: 3 checks: 1 passed, 2 left out (refused)",
        ),
        (
            {
                "outcomes": Counter(passed=1, skipped=3),
                "reasons": Counter({"no case in this run: no claimed case of this check was selected": 2, "x": 1}),
            },
            "verified: 4 checks: 1 passed, 3 left out (2 no case in this run; 1 x)",
        ),
    ],
)
def test_a_verdict_claims_what_was_run(fields: dict[str, Any], words: str) -> None:
    """Only a run that nothing narrows says "verified". If a dtype has no judged gradient, it adds "forward only"."""
    assert summary.verdict(session(**fields)).text == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "verified, without the parameters attn_mask, dropout_p: 3 checks: 3 passed"),
        (
            {"without_gradient": {("f", dtype): {"q4"} for dtype in DTYPES}},
            "verified forward only, without the parameters attn_mask, dropout_p: 3 checks: 3 passed; "
            "3 cases refused a backward, and no gradient was judged",
        ),
        ({"status": 1, "outcomes": Counter(passed=2, failed=1)}, "failed: 3 checks: 2 passed, 1 failed"),
    ],
)
def test_a_verdict_names_the_parameters_that_no_call_was_given(fields: dict[str, Any], words: str) -> None:
    """A verdict that names parameters is yellow, and never green."""
    sdpa = of_callable(torch.nn.functional.scaled_dot_product_attention, "f")
    loaded = SimpleNamespace(name="f", is_external=True, implementation=sdpa)
    found = summary.verdict(session(loaded=[loaded], **fields))
    assert found == summary.Line(words, "red" if fields.get("status") else "yellow")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (
            ["mine.py:forward_only", "--case", SMALL],
            0,
            r"\npassed forward only: \d+ of \d+ checks, narrowed by --case: \d+ passed, "
            r"\d+ left out \(\d+ refused; .*\); \d+ cases refused a backward, and no gradient was judged$",
        ),
        (  # the second of two threads carries no gradient either
            ["mine.py:forward_only", "--case", f"{SMALL} threads", "--case", f"{SMALL} twice", "-n0"],
            0,
            r"\npassed forward only: \d+ of \d+ checks, narrowed by --case: ",
        ),
        (
            ["mine.py:loses_its_gradient", "-k", "contract/calls_agree", "--dtype", "fp32"],
            1,
            r"the output carries no gradient, but that of another call did: the kernel lost it without an error",
        ),
        (
            ["mine.py:right", "-k", "contract/answers", "--dtype", "fp32"],
            0,
            r"\npassed: 1 of \d+ checks, narrowed by -k contract/answers, --dtype float32: 1 passed$",
        ),
        (
            ["mine.py:right", "--case", SMALL.removesuffix("float32"), "--dtype", "fp32", "--dtype", "fp16"],
            0,
            r"\npassed: \d+ of \d+ checks",
        ),
        (  # a check in which a worker died has failed, although the rest of its cases is left out
            ["mine.py:hangs", "--quick", "--time-limit", "0.3"],
            1,
            r"\nfailed: \d+ of \d+ checks, narrowed by --quick: \d failed, \d+ left out \(.*not run.*\)$",
        ),
        (["mine.py:right", "-k", "nosuch"], 4, r"^ERROR: -k: 'nosuch' matches no check .*flashproof list --checks.*$"),
        (
            ["mine.py:right", "-n", "two"],
            4,
            r"^ERROR: -n: 'two' is not a number of processes; give 0, 1, 2 \.\.\. or auto$",
        ),
        (["mine.py:right", "-n", "-1"], 4, r"^ERROR: -n: '-1' is not a number of processes; "),
        (["mine.py:right", "--time-limit", "0"], 4, r"^ERROR: --time-limit: 0 is not a time; "),
        (["tiled.fa2", "-k", "nosuch", "-n2"], 4, r"^ERROR: -k: 'nosuch' matches no check .*$"),
        pytest.param(
            ["mine.py:right", "--device", "cuda"],
            1,
            r"\nnot verified: \d+ checks: \d+ left out \(CUDA: no device\)$",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device"),
        ),
    ],
    ids=[
        *(
            "forward-only",
            "forward-only-in-threads",
            "lost-gradient",
            "check",
            "dtypes",
            "hang",
            "no-check",
            "no-number",
            "negative",
            "no-time",
        ),
        *("no-check-in-processes", "no-device"),
    ],
)
def test_the_last_line(project: Path, words: list[str], status: int, says: str) -> None:
    """The last line of the command is the verdict."""
    ended, said = run(project, *words, "--records", "run.jsonl")
    assert ended == status, said
    assert re.search(says, said.rstrip()), said
    assert "0 implementations" not in said


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["mine.py:right", "--require=backward,float32"], 0, r"^passed: "),
        (
            ["mine.py:right", "--require", "backward,dropout", "--require", "float16"],
            1,
            r"^required, and not verified: dropout, float16 of mine.py:right$",
        ),
        (
            ["mine.py:forward_only", "--require", "backward"],
            1,
            r"^required, and not verified: backward of mine.py:forward_only$",
        ),
        (["mine.py:right", "--strict"], 0, r"^passed: "),
        (["mine.py:forward_only", "--strict"], 1, r"^no gradient was judged: mine.py:forward_only, float32$"),
        (
            ["mine.py:right", "--require", "bakward"],
            4,
            r"^ERROR: --require: 'bakward' is not a feature; close: backward; ",
        ),
    ],
    ids=str,
)
def test_what_has_to_be_verified(project: Path, words: list[str], status: int, says: str) -> None:
    """With --require or --strict, a run fails if it left something unverified. The last lines say what."""
    ended, said = run(project, *words, "--case", SMALL, "-k", "accuracy or gradients", "--records", "run.jsonl")
    assert ended == status, said
    assert re.search(says, said, re.MULTILINE), said


def test_parameters_that_no_call_was_given(project: Path) -> None:
    """A run names the parameters that no call was given. With --strict, it also fails."""
    (project / "other.py").write_text(
        f"{KERNELS}\n\ndef renamed(q, k, v, causal=False, sm_scale=None):\n    return right(q, k, v, causal)\n"
    )
    words = ("other.py:renamed", "-k", "contract/answers", "--dtype", "fp32", "--records", "run.jsonl")
    never = "never given: causal, sm_scale (parameters of other.py:renamed); rename causal to is_causal and sm_scale to"
    for options, status in ((), 0), (("--strict",), 1):
        ended, said = run(project, *words, *options)
        assert ended == status, said
        assert never in " ".join(said.split())
        last = said.strip().splitlines()[-1]
        assert last.startswith("not verified: " if status else "passed, without the parameters causal, sm_scale: "), (
            said
        )


def test_failures_are_told_once(project: Path) -> None:
    """A run of pytest prints flashproof's text for a failure, the number of equal failures, and the verdict."""
    status, said = run(
        project, "--impl=mine.py:raises", "--impl=mine.py:wrong", "--case", SMALL, "--records=r.jsonl", module="pytest"
    )
    assert status == 1, said
    assert said.count("\n") < 70, said
    assert "Traceback" not in said
    assert "FAILED" not in said
    # The run prints the failure when it occurs, and again at the end.
    assert len(re.findall(r"^forward raised KeyError: 'a bug'", said, re.MULTILINE)) == 2
    assert re.search(r"\nand \d+ more failures in the same words, in \d\d checks\n", said)
    assert re.search(r"\nnot verified: mine.py:raises \(\d+ failures, and no case passed\)\n", said)
    assert re.search(r"\nfailed: \d+ of \d+ checks, narrowed by --case: .*\n=.*=\n$", said)


def test_a_result_says_it_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of `flashproof.verify` says that no gradient was judged, and shows equal failures once."""
    monkeypatch.chdir(project)
    result = flashproof.verify("mine.py:forward_only", cases=SMALL)
    assert result.verified
    assert result.forward_only
    assert result.verdict.startswith("passed forward only: ")
    assert str(result).startswith(f"mine.py:forward_only: {result.verdict}")
    failed = flashproof.verify("mine.py:raises", cases=SMALL)
    assert not failed.forward_only
    assert len(failed.failures) > 20
    with pytest.raises(AssertionError) as raised:
        failed.raise_for_failures()
    assert str(raised.value).count("forward raised KeyError") == 1
    assert "more failures in the same words" in str(raised.value)


def test_failures_fit_one_screen() -> None:
    """Failures with one cause are told once, the known causes first, each with its simplest case."""

    def judgement(check: str, queries: int, question: str = "", dtype: Any = "float32") -> Judgement:
        return Judgement(
            run="r", implementation="f", check=check, case=f"b1 h1 q{queries} k4 d8 {dtype}", dtype=dtype, device="cpu",
            status="failed", tensor="out", rho=2.0, question=question,
        )  # fmt: skip

    unknown = [judgement("a/a", 9), judgement("a/b", 9)]
    assert list(causes.one_screen("f", [*unknown, judgement("a/a", 3)])) == [
        "f is wrong: out in float32; 2 checks failed",
        "  a/a: the largest rho is 2.0 (out)",
        "    in 1 check, float32; the simplest case:",
        "    again: pytest --impl f --case 'b1 h1 q3 k4 d8 float32'",
        "  a/b: the largest rho is 2.0 (out)",
        "    in 1 check, float32; the simplest case:",
        "    again: pytest --impl f --case 'b1 h1 q9 k4 d8 float32'",
    ]
    scale = "this is the answer with a scale of {}, not {} (1.001 times as large)"
    known = [
        judgement("a/c", 5, scale.format(0.2002, 0.2)),
        judgement("a/d", 4, scale.format(0.1001, 0.1), "float16"),
        judgement("a/e", 7, "dq is 1.001 times the exact result"),
        judgement("a/d", 6, "this is the answer without the causal mask"),
    ]
    assert list(causes.one_screen("f", unknown + known)) == [
        "f is wrong: out in float32 and float16; 5 checks failed (6 with dtypes)",
        f"  {scale.format(0.1001, 0.1)}",
        "    in 3 of 5 checks, float32 and float16; the simplest case:",
        "    again: pytest --impl f --case 'b1 h1 q4 k4 d8 float16'",
        "  and 3 more failures, which may follow from this",
    ]

    of_few = [judgement("a/f", n, "dq and dk are 0 everywhere") for n in range(2, 22)]
    of_few += [
        judgement("a/f", 2, "dv is 0 everywhere"),
        judgement("a/d", 6, "this is the answer without the causal mask"),
    ]
    assert list(causes.one_screen("f", of_few)) == [
        "f is wrong: out in float32; 2 checks failed",
        "  dq and dk are 0 everywhere",
        "    in 1 of 2 checks, float32; the simplest case:",
        "    again: pytest --impl f --case 'b1 h1 q2 k4 d8 float32'",
        "  and 1 more failure, which may follow from this",
    ]
    # A known cause that is in few of the failing checks may be a coincidence, so it comes last.
    mostly = [judgement(f"a/{n}", 5) for n in range(4)]
    assert list(causes.one_screen("f", [*mostly[:2], judgement("b/b", 6, "dv is 0 everywhere")]))[1:3] == [
        "  dv is 0 everywhere",
        "    in 1 of 3 checks, float32; the simplest case:",
    ]
    assert list(causes.one_screen("f", [*mostly, judgement("b/b", 6, "dv is 0 everywhere")])) == [
        "f is wrong: out in float32; 5 checks failed",
        *(
            line
            for n in range(3)
            for line in (
                f"  a/{n}: the largest rho is 2.0 (out)",
                "    in 1 check, float32; the simplest case:",
                "    again: pytest --impl f --case 'b1 h1 q5 k4 d8 float32'",
            )
        ),
        "  and 2 more failures",
    ]


def test_a_bias_is_told_as_a_cause() -> None:
    """A failure with a rho below 1 fails by its bias, and the summary says so, with what is allowed."""
    biased = [
        Judgement(
            run="r", implementation="f", check=f"a/{number}", case=f"b1 h1 q{number} k4 d8 {dtype}", dtype=dtype,
            device="cpu", status="failed", tensor="out", rho=0.6, bias=-0.5, bias_error=0.01, bias_allowance=0.25,
        ) for number, dtype in ((3, "float16"), (4, "bfloat16"), (5, "bfloat16"))
    ]  # fmt: skip
    said = list(causes.one_screen("f", biased))
    assert said[1:3] == [
        "  the errors of out in bfloat16 lean to one side: bias -0.50 ± 0.010 ulp, 1.7 times its limit",
        "    in 2 of 3 checks, bfloat16; the simplest case:",
    ]
    assert causes.headline(biased) == said[1].strip()
    assert list(failures.in_short([biased])) == [
        "failed: a/3, float16: out bias -0.50 ± 0.010 ulp, 1.7 times its limit, and 2 checks more in the same words"
    ]
    larger = [msgspec.structs.replace(one, rho=1.3) for one in biased]  # the rho tells these failures
    assert causes.headline(larger) == ""
    even = msgspec.structs.replace(biased[0], bias=None, rms=1.33)
    words = "the root mean square of the errors of out in float16 is 1.3 times what its arithmetic makes"
    assert f"  a/3: {words}" in causes.one_screen("f", [even])


def test_words_of_few_checks_do_not_hide_the_others() -> None:
    """A message in less than a fourth of the failing checks is not the first cause. Each dtype of a check counts."""
    said = Judgement(
        run="r", implementation="f", check="a/a", case="q4", dtype="float32", device="cpu", status="failed",
        message="out differs",
    )  # fmt: skip
    dtypes = ("float32", "float16", "bfloat16")
    wrong = [msgspec.structs.replace(said, check="b/b", rho=2.0, tensor="out", dtype=dtype) for dtype in dtypes]
    assert list(causes.one_screen("f", [said, *wrong]))[1::3] == [
        "  out differs",
        "  b/b: the largest rho is 2.0 (out)",
    ]
    wrong += [msgspec.structs.replace(wrong[0], check="b/c")] * 2
    assert list(causes.one_screen("f", [said, *wrong]))[1::3] == [
        "  b/b: the largest rho is 2.0 (out)",
        "  b/c: the largest rho is 2.0 (out)",
        "  out differs",
    ]


def test_the_simplest_case_stands_below_its_own_words() -> None:
    """The simplest case has the fewest special properties, and then the smallest size."""
    scale = "this is the answer with a scale of {}, not {} (1.001 times as large)"
    layout = "this is the answer for tensors of the layout [batch, length, heads, dim]: {}"
    failed = [
        ("b1 h1 q2 k2 d8 float32 causal normal x16 spelled seed7", 0.3539, 0.3536, "it attends over heads"),
        ("b1 h1 q73 k73 d64 bfloat16 full normal seed0", 0.1251, 0.125, "with one head, each query sees its own key"),
        ("b1 h1 q99 k73 d64 float32 full normal seed0", 0.1252, 0.125, "it attends over heads"),
        ("b1 h1 q4 k4 d16 float32 causal normal seed0", 0.2503, 0.25, "it attends over heads"),
    ]

    def screen(questions: list[str], rho: float | None = 2.0) -> list[str]:
        judgements = [
            Judgement(
                run="r", implementation="f", check="a/a", case=case, dtype="float32", device="cpu",
                status="failed", tensor="out" if rho else None, rho=rho, question=question, message=f"at {case}",
            ) for (case, *_), question in zip(failed, questions, strict=True)
        ]  # fmt: skip
        return list(causes.one_screen("f", judgements))

    again = f"    again: pytest --impl f --case '{failed[1][0]}'"
    said = screen([scale.format(*scales) for _, *scales, _ in failed])
    assert (said[1], said[3]) == (f"  {scale.format(0.1251, 0.125)}", again)
    said = screen([layout.format(words) for *_, words in failed])
    assert (said[1], said[3]) == (f"  {layout.format(failed[1][3])}", again)
    said = screen([""] * len(failed), rho=None)
    assert (said[1], said[3]) == (f"  at {failed[0][0]}", f"    again: pytest --impl f --case '{failed[0][0]}'")


def test_a_multiple_is_no_cause_beside_another_scale() -> None:
    """Another scale makes other multiples of some results."""
    scale = "this is the answer with a scale of 0.1251, not 0.125 (1.001 times as large)"
    questions = [scale, scale, "dq is 0.9961 times the exact result"]
    failed = [
        Judgement(
            run="r", implementation="f", check=f"a/{number}", case="b1 h1 q73 k73 d64 float32 full normal seed0",
            dtype="float32", device="cpu", status="failed", tensor="dq", rho=2.0, question=question,
        ) for number, question in enumerate(questions)
    ]  # fmt: skip
    said = list(causes.one_screen("f", failed))
    assert [line for line in said if "times the exact result" in line] == []
    assert said[-1] == "  and 1 more failure, which may follow from this"


def test_a_summary_gives_no_digits_of_a_figure_above_a_million() -> None:
    """A summary shows `>1e6`. A figure that is not finite stays as it is."""
    found = {rho: causes.capped_rho(rho) for rho in (2.8e39, 1e6, 1.004, None, "inf")}
    assert found == {2.8e39: ">1e6", 1e6: "1.0e6", 1.004: "1.004", None: "–", "inf": "inf"}
    one = Judgement(
        run="r", implementation="f", check="a/a", case="q4", dtype="float32", device="cpu", status="failed",
        tensor="out", rho=2.8e39,
    )  # fmt: skip
    assert list(failures.in_short([[one]])) == ["failed: a/a, float32: out rho >1e6"]
    assert "  a/a: the largest rho is >1e6 (out)" in causes.one_screen("f", [one])


def test_the_table_of_a_run() -> None:
    """A dash stands for a missing figure. The figure in ulps of a tensor that fails is not that of the cases that pass.

    The ulps of other cases than those with normal inputs count only where they fail.
    """
    plain, spike, causal = (
        f"b1 h1 q40 k40 d32 {words} seed0" for words in ("full normal", "full spike", "causal normal")
    )
    found: list[tuple[Any, str, Any, float, float | None, str]] = [
        ("dq", "float32", "passed", 0.5, 3.0, plain),
        ("dq", "float32", "passed", 0.4, 900.0, spike),
        ("dk", "float32", "passed", 0.2, 5.0, plain),
        ("dk", "float32", "failed", 2.8e39, 1e7, causal),
        ("dv", "float32", "passed", 0.3, 4.0, plain),
        ("dv", "float32", "failed", 70.0, None, causal),
        ("dk", "float16", "passed", 0.96, None, plain),
        ("dq", "bfloat16", "passed", 0.15, 0.49, plain),
    ]
    output = io.StringIO()
    display = progress.Display("flashproof", output)
    for tensor, dtype, status, rho, ulps, case in found:
        display.recorded(
            Judgement(
                run="r", implementation="f", check="a/a", case=case, dtype=dtype, device="cpu", status=status,
                tensor=tensor, rho=rho, ulps=ulps,
            )
        )  # fmt: skip
    display._conclude("f")
    rows = [line.split() for line in output.getvalue().splitlines() if line[:5].strip() in ("dq", "dk", "dv")]
    assert rows[:3] == [
        ["dq", "0.50", "3.0", "–", "–", "0.15", "0.49"],
        ["dk", ">1e6", ">1e6", "0.96", "–", "–", "–"],
        ["dv", "70", "–", "–", "–", "–", "–"],
    ]


def test_failures_that_read_alike() -> None:
    """Failures with the same text form one group. Failures with figures are grouped by check and dtype."""

    def judgement(check: str, message: str, rho: float | None = None) -> Judgement:
        return Judgement(
            run="r", implementation="f", check=check, case="q4", dtype="float32", device="cpu", status="failed",
            tensor="out" if rho else None, rho=rho, message=message,
        )  # fmt: skip

    alike = failures.groups(
        [judgement("a/a", "odd"), judgement("a/b", "odd"), judgement("a/a", "", 2.0), judgement("a/b", "", 2.0)]
    )
    assert [len(group) for group in alike] == [2, 1, 1]
    assert failures.told(alike[0]).endswith("\nand 1 more failure in the same words, in 2 checks")
    assert list(failures.in_short(alike, 2)) == [
        "failed: a/a, float32: odd, and 1 check more in the same words",
        "failed: a/a, float32: out rho 2.0",
        "and 1 more failure",
    ]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((9, 3, 13, 16), ": a function for tensors of the layout [batch, length, heads, dim] returns this shape"),
        ((9, 1, 3, 16), ": this is [batch, length, heads, dim]"),
        ((9, 3, 13, 8), ""),
        ((9, 3, 16), ""),
    ],
    ids=str,
)
def test_a_wrong_shape_names_the_layout(shape: tuple[int, ...], says: str) -> None:
    """The shape is that of an output for [9, 3, 1, 16] queries and 13 keys."""
    assert diagnosis.of_another_layout(shape, (9, 3, 1, 16), 13) == says


# ------------------------------------------------------------------------------------------------- quick runs


def test_the_clock_begins_with_the_first_check(tmp_path: Path) -> None:
    """All processes of a quick run share one clock. The time of imports and of the collection does not count."""
    first, second = quick.Clock(tmp_path / "clock"), quick.Clock(tmp_path / "clock")
    assert not list(tmp_path.iterdir())
    assert not first.is_over
    assert not second.is_over
    assert first._end == second._end


def test_a_late_run_asks_each_layer(tmp_path: Path) -> None:
    """After its time is over, a quick run still takes one case of a few checks.

    These checks are in all layers that find most faults.
    """
    (tmp_path / "clock").write_text("0.0")
    clock = quick.Clock(tmp_path / "clock")
    assert clock.is_over
    assert clock.leaves_out("contract/twice")
    assert list(clock.limited([Case(), Case(seed=1)])) == [Case()]
    asked = [name for name in quick.CHECKS if not clock.leaves_out(name)]
    assert {name.partition("/")[0] for name in asked} >= {"accuracy", "gradients", "masks", "contract", "properties"}
    assert any(not checks()[name].claims for name in asked if name.startswith("masks/"))  # a check that needs no claim


# ------------------------------------------------------------------------------------------------- places and names


@pytest.mark.parametrize("module", ["flashproof", "pytest"])
def test_a_report_that_cannot_be_written(project: Path, module: str) -> None:
    """A report that cannot be written is an error of one line, before any check runs."""
    (project / "flashproof-report").write_text("")
    status, said = run(project, *(["--impl"] if module == "pytest" else []), "mine.py:right", module=module)
    assert status == 4, said
    assert said.strip() == (
        "ERROR: --report: flashproof-report is not a folder; "
        "give another place by --report or --records, or in [tool.flashproof] of pyproject.toml"
    )


def test_git_passes_over_the_report(project: Path) -> None:
    """Git ignores a report folder that flashproof created. A folder that existed before stays as it is."""
    words = ["mine.py:right", "--quick", "-k", "contract/answers or contract/changed_in_place"]  # without a report
    assert run(project, *words)[0] == 0
    ignored = project / "flashproof-report" / ".gitignore"
    assert ignored.read_text() == "*\n"
    ignored.unlink()
    assert run(project, *words)[0] == 0
    assert not ignored.exists()


def test_tests_of_the_project_run_where_paths_are_given(project: Path) -> None:
    """If paths are given, the project's tests in these paths run, and its other tests do not.

    They count for the exit status, but not for the verdict.
    """
    (project / "elsewhere.py").write_text("def test_never() -> None:\n    raise AssertionError\n")
    own = OWN_CHECK + "\n\ndef test_plain() -> None:\n    raise AssertionError('of the project')\n"
    (project / "test_own.py").write_text(own)
    words = ["-q", "test_own.py", "--impl=mine.py:right", "--dtype=float32"]
    status, said = run(project, *words, module="pytest")
    assert status == 1
    assert "of the project" in said
    assert "passed: 1 check, narrowed by --dtype float32, the paths that were given: 1 passed" in said
    assert run(project, *words, "-k", "own", module="pytest")[0] == 1


def test_a_check_of_the_projects_own_needs_a_target(project: Path) -> None:
    """Without a target, the check is skipped with a reason. With a target, it runs."""
    (project / "test_own.py").write_text(OWN_CHECK)
    status, said = run(project, "-rs", "-q", "test_own.py", module="pytest")
    assert status == 0
    assert "no implementation is selected; pytest --impl TARGET" in said
    status, said = run(project, "-q", "test_own.py", "--impl=mine.py:right", "--dtype=float32", module="pytest")
    assert status == 0
    assert "passed: 1 check, narrowed by --dtype float32, the paths that were given: 1 passed" in said


def test_names_of_checks_are_listed_as_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The list shows the names of checks in the form that -k and a file of known defects take."""
    listing.show_checks()
    said = capsys.readouterr().out
    assert all(f"  {name}: " in said for name in checks())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_run_for_a_gpu_without_one_is_no_success() -> None:
    """Every test is skipped, and pytest alone would call that a success."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "tests/determinism"]
    names = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, cwd=ROOT, env=names, capture_output=True, text=True, check=False)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert "nothing was verified: the reasons are above" in ended.stdout
