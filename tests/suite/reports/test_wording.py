"""How the report writes figures, failures, commands and file names."""

import shlex
from typing import Any

import pytest

from flashproof.cases import Case
from flashproof.reports import wording
from flashproof.reports.record import Judgement
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import judgement, worst


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.79, "0.79"),
        (7.3, "7.3"),
        (0.049, "0.049"),
        (12.6, "13"),
        (0.0, "0"),
        (3.14e-5, "3.1e-5"),
        (123456.0, "1.2e5"),
        (-0.031, "-0.031"),
        (None, "–"),
        ("nan", "nan"),
        ("inf", "inf"),
    ],
)
def test_numbers(value: float | str | None, words: str) -> None:
    assert wording.number(value) == words
    assert wording.rho(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(1.0, "1.0"), (1.004, "1.004"), (0.9996, "0.9996"), (0.96, "0.96"), (1.00000001, "1.000000")]
)
def test_a_rho_beside_one_is_told_from_it(value: float, words: str) -> None:
    assert wording.rho(value) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2 * 16384**2 * 2, "1 GiB"),
        (1023 * 1024, "1023 KiB"),
    ],
)
def test_bytes(count: int, words: str) -> None:
    assert wording.bytes_(count) == words


def test_a_failure_reads_as_it_should() -> None:
    failing = judgement(
        dtype="bfloat16",
        rho=7.3,
        status="failed",
        case="b1 h4 q1024 k1024 d64 bfloat16 causal spike x30 seed7",
        worst=worst(7.3, error=0.0313, bound=0.00429),
    )
    assert (
        wording.failure_block(failing, "passes at magnitude 8, fails from 16")
        == """\
triton.fa2  out  bfloat16  rho 7.3   error 3.1e-2, bound 4.3e-3, exact value certified
worst at [batch 0, head 3, query 517, dim 12]: got 0.4121, exact 0.4434
the query sees 518 keys; the largest weight is 99.8 %
passes at magnitude 8, fails from 16
again: pytest --impl triton.fa2 --case 'b1 h4 q1024 k1024 d64 bfloat16 causal spike x30 seed7'"""
    )


def test_a_failure_without_figures_reads_as_what_was_seen() -> None:
    failing = building.property_("determinism/runs", False, building.GPU, case="")
    assert (
        wording.failure_block(failing)
        == """\
triton.fa2  determinism/runs  float32
two runs differ in 3 of 16384 elements
again: pytest --impl triton.fa2 --device cuda"""
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"rho": 0.2, "bias": 0.31, "bias_error": 0.02, "bias_allowance": 0.25, "dtype": "float16"},
            "bias 0.31 ± 0.020 ulp, 0.94 times its limit",
        ),
        (
            {"rho": 0.2, "rho_statistical": 3.0},
            "triton.fa2  out  float32  rho 3.0 (statistical)   exact value certified",
        ),
        (
            {"rho": "nan", "worst": worst(1.0, got="nan", error="nan")},
            "worst at [batch 0, head 3, query 517, dim 12]: got nan, exact 0.4434",
        ),
        (
            {"tensor": "dk", "worst": worst(1.0)},
            "worst at [batch 0, kv head 3, key 517, dim 12]: got 0.4121, exact 0.4434",
        ),
        (
            {"tensor": "lse", "worst": worst(1.0, index=(1, 2, 3))},
            "worst at [batch 1, head 2, query 3]: got 0.4121, exact 0.4434",
        ),
        ({"worst": worst(1.0, index=())}, "worst at []: got 0.4121, exact 0.4434"),
    ],
)
def test_lines_of_a_failure(fields: dict[str, Any], line: str) -> None:
    assert line in wording.failure_block(judgement(status="failed", **fields)).splitlines()


def test_code_in_a_message_stands_apart() -> None:
    failing = judgement(status="failed", message="out is a tuple; add this:\n\ndef verified(query):\n    return query")
    assert wording.failure_block(failing).splitlines()[-5:-1] == ["", "def verified(query):", "    return query", ""]


def test_the_words_of_the_run_replace_those_of_a_sweep() -> None:
    failing = judgement(status="failed", rho=7.0, message="this is the answer without the causal mask")
    block = wording.failure_block(failing, "passes at magnitude 8, fails from 16").splitlines()
    assert block[-2] == "this is the answer without the causal mask"
    assert not any(line.startswith("passes at") for line in block)


@pytest.mark.parametrize(
    "name", ["triton.fa2", "mine.py:attention", "/home/me/my kernels/a'b.py:f", "$(reboot).py:f", building.HOSTILE]
)
def test_the_command_survives_the_shell(name: str) -> None:
    case = str(Case(family="spike", magnitude=30.0, seed=7))
    assert shlex.split(wording.repeat_line(judgement(name, case=case))) == ["pytest", "--impl", name, "--case", case]


PLAIN = [
    "triton.fa2",
    "Triton.fa2",
    "mine.py:attention",
    "mine.py/attention",
    "mine.py-attention",
    building.SDPA,
    building.HOSTILE,
]
RESERVED = ["index", "con", "con.x", "lpt1", "", "..", ".", "-", "a/../b", "ä", "日本", "a" * 300, "x\n", "x\0", "x."]
NAMES = PLAIN + RESERVED


def test_file_names_are_safe_and_apart() -> None:
    stems = [wording.stem(name) for name in NAMES]
    assert stems[0] == "triton.fa2"
    assert len({stem.lower() for stem in stems}) == len(NAMES)  # also on a file system that ignores case
    for stem in stems:
        assert set(stem) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert stem[0] not in ".-"
        assert stem[-1] != "."
        assert len(stem) <= 80
        assert stem.partition(".")[0].lower() not in {"index", "con", "lpt1"}


def test_the_block_needs_no_figures_at_all() -> None:
    bare = Judgement(
        run="r",
        implementation="mine.py:f",
        check="contract/shape",
        case="",
        dtype="float32",
        device="cpu",
        status="failed",
    )
    assert wording.failure_block(bare) == "mine.py:f  contract/shape  float32\nagain: pytest --impl mine.py:f"


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("a", "float32", "cpu")], "1 check failed"),
        ([("a", "float32", "cpu"), ("b", "float32", "cpu"), ("a", "float32", "cpu")], "2 checks failed"),
        ([("a", "float32", "cpu"), ("a", "float16", "cpu")], "1 check failed (2 with dtypes)"),
        (
            [("a", "float32", "cpu"), ("a", "float32", "cuda")],
            "1 check failed (2 with dtypes and devices)",
        ),
    ],
)
def test_failed_checks_are_counted_as_the_run_counts_them(places: list[tuple[str, str, Any]], words: str) -> None:
    failed = [judgement(check=check, dtype=dtype, device=device) for check, dtype, device in places]
    assert wording.failed_checks(failed, " failed") == words


def test_a_finite_error_above_a_bound_of_zero_is_not_called_infinite() -> None:
    wrong = judgement(status="failed", rho="inf", worst=worst(1.0, bound=0.0, exact=0.0))
    assert wording.reason(wrong) == "out in float32 is wrong where its arithmetic allows no error"
    infinite = judgement(status="failed", rho="inf", worst=worst(1.0, got="nan"))
    assert wording.reason(infinite) == "out in float32 is not finite where the exact result is"
