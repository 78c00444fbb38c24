"""`flashproof check` accepts what a run wrote, and refuses it after a change, also if a forger seals it again.

Every forgery here changes the records of one real run, which takes a few seconds.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashproof import checking
from flashproof.reports import bundle
from flashproof.reports.record import Manifest, lines

Fields = dict[str, Any]  # of a record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of a check of a right kernel in float32, as the run wrote them."""
    folder = tmp_path_factory.mktemp("run")
    words = ["tiled.fa2", "--dtype", "float32", "-k", "accuracy/forward", "-n", "0", "--records", "run.jsonl"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "flashproof", *words]
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run.jsonl"


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    copy = tmp_path / "run.jsonl"
    copy.write_bytes(whole.read_bytes())
    return copy


def problems(path: Path) -> str:
    """What is wrong with a bundle. All certified figures are computed again."""
    return "\n".join(checking.check(path, None, 0).problems)


def told(path: Path, sample: str = "all", **how: bool) -> int:
    return checking.tell(path, sample, 0, must_be_whole=how.get("must_be_whole", False))


def edit(path: Path, which: Callable[[Fields], bool], change: Callable[[Fields], object]) -> int:
    """Changes the first record that meets a condition. Returns the number of its line."""
    every = lines(path)
    for number, line in enumerate(every, start=1):
        if which(record := msgspec.json.decode(line)):
            change(record)
            every[number - 1] = msgspec.json.encode(record)
            path.write_bytes(b"\n".join(every))
            return number
    raise AssertionError("no record meets the condition")


def seal_again(path: Path) -> None:
    """Replaces the manifest by one that fits, as a forger would."""
    *sealed, last, _ = lines(path)
    old = msgspec.json.decode(last, type=Manifest)
    new = bundle.manifest_of(sealed, old.run, case_set=old.case_set, effort=old.effort, dtypes=old.dtypes)
    path.write_bytes(b"\n".join([*sealed, msgspec.json.encode(new), b""]))


def is_certified(record: Fields) -> bool:
    """A certified figure with an error and a statistical rho, of an output."""
    figures = record.get("certainty") == "certified" and record["tensor"] == "out" and float(record["rho"]) > 0.0
    figures = figures and record["rho_statistical"] is not None
    return figures and record["worst"]["got"] not in (0.0, record["worst"]["exact"])


def next_digit(text: str) -> str:
    """The same number with another last digit of its mantissa."""
    mantissa, sign, exponent = text.partition("e")
    return f"{mantissa[:-1]}{(int(mantissa[-1]) + 1) % 10}{sign}{exponent}"


# ------------------------------------------------------------------------------------------------------- as it is


def test_what_a_run_wrote_is_accepted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(path) == 0
    said = capsys.readouterr().out
    assert "none was changed since the run ended" in said
    found = checking.check(path, None, 0)
    assert found.certified == found.sampled == found.agree > 2
    assert f"{found.agree} of {found.agree} certified figures agree (all of them)" in said
    assert said.rstrip().endswith("accepted: a part of a run; not every case that its claims ask for was judged")


def test_a_packed_run_is_accepted(path: Path) -> None:
    packed = path.with_name("packed.jsonl.gz")
    assert bundle.tell([path], packed) == 0
    assert problems(packed) == ""


def test_a_part_is_refused_where_a_whole_run_is_asked_for(path: Path) -> None:
    assert told(path, must_be_whole=True) == 1


def test_a_sample_is_repeated_by_its_seed(path: Path) -> None:
    edit(path, is_certified, lambda record: record["worst"].update(got=0.0))
    seal_again(path)
    half = checking.check(path, None, 0).certified // 2
    once, again = ([checking.check(path, half, seed).problems for seed in range(20)] for _ in range(2))
    assert once == again
    assert any(once)
    assert not all(once)


# ------------------------------------------------------------------------------------------------------- edited


def test_one_digit_of_one_rho(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = lines(path)
    number = next(i for i, line in enumerate(every, start=1) if is_certified(msgspec.json.decode(line)))
    rho = str(msgspec.json.decode(every[number - 1])["rho"])
    every[number - 1] = every[number - 1].replace(f'"rho":{rho}'.encode(), f'"rho":{next_digit(rho)}'.encode())
    path.write_bytes(b"\n".join(every))
    assert told(path, "0") == 1
    said = capsys.readouterr().out
    assert f"run.jsonl, line {number}: changed since run" in said
    assert said.rstrip().endswith("rejected")


def test_one_case_line(path: Path) -> None:
    number = edit(path, is_certified, lambda record: record.update(case=record["case"] + "1"))
    assert f"run.jsonl, line {number}: changed since" in problems(path)


def test_one_commit(path: Path) -> None:
    assert edit(path, lambda record: "commit" in record, lambda record: record.update(commit="0123456789ab")) == 1
    assert "run.jsonl, line 1: changed since" in problems(path)


def a_tenth_less(path: Path) -> None:
    """Leaves out a tenth of the judgements."""
    every = lines(path)
    judged = [number for number, line in enumerate(every) if line.startswith(b'{"type":"judgement"')]
    out = set(random.Random(0).sample(judged, len(judged) // 10))
    path.write_bytes(b"\n".join(line for number, line in enumerate(every) if number not in out))


def test_a_tenth_of_the_records(path: Path) -> None:
    a_tenth_less(path)
    assert "lines were left out, added or moved" in problems(path)


def test_the_manifest(path: Path) -> None:
    *every, _, _ = lines(path)
    path.write_bytes(b"\n".join([*every, b""]))
    assert "is not sealed" in problems(path)


# ------------------------------------------------------------------------------------- edited, and sealed again


def larger(*names: str) -> Callable[[Fields], None]:
    """Makes numbers of a record a little larger."""

    def change(record: Fields) -> None:
        for name in names:
            of = record if name in record else record["worst"]
            of[name] *= 1.0 + 1e-5

    return change


def make_smaller(record: Fields) -> None:
    """Halves the error of a figure, and all that follows from it, but not the answer."""
    worst = record["worst"]
    worst["error"] /= 2.0
    for name in ("rho", "rho_statistical", "ulps"):
        record[name] = record[name] and record[name] / 2.0


FORGERIES: dict[str, tuple[Callable[[Fields], object], str]] = {
    "rho": (larger("rho_statistical"), "rho is"),
    "both rhos": (larger("rho", "rho_statistical"), "rho is"),
    "exact": (larger("exact"), "the exact value is"),
    "error": (make_smaller, "the error is"),
    "bound": (larger("bound"), "the bound is"),
    "answer": (lambda record: record["worst"].update(got=0.1), "is no number of float32"),
    "index": (lambda record: record["worst"].update(index=[0, 0, 10**6, 0]), "there is no element"),
    "element": (lambda record: record.update(worst=None), "has no worst element"),
    "case": (lambda record: record.update(case=record["case"] + "1"), "not judged: tiled.fa2"),
    "line": (lambda record: record.update(case="no such words"), "the case cannot be read"),
    "tensor": (lambda record: record.update(tensor="dq"), "no record of out"),
    "certainty": (lambda record: record.update(certainty="bounded"), "is not certified, although the case is small"),
    "verdict": (lambda record: record.update(rho=1.5, rho_statistical=3.0), "passed with rho 3"),
    "bias": (lambda record: record.update(bias=9.0, bias_error=0.1, bias_allowance=0.2), "passed with a bias beyond"),
    "implementation": (lambda record: record.update(implementation="mine"), "mine: was judged, and the run holds no"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_figure(path: Path, name: str) -> None:
    change, words = FORGERIES[name]

    def which(record: Fields) -> bool:
        # The worst element is that of the larger rho. So the smaller one cannot be computed from the record.
        return is_certified(record) and (name != "rho" or record["rho_statistical"] > record["rho"])

    edit(path, which, change)
    seal_again(path)
    assert words in problems(path)


def test_a_forged_tenth(path: Path) -> None:
    a_tenth_less(path)
    seal_again(path)
    assert "not judged: tiled.fa2" in problems(path)


def test_a_record_of_another_case_set(path: Path) -> None:
    """The list of cases cannot be made, and still a case that lacks a tensor is found."""
    every = lines(path)
    every.remove(next(line for line in every if b'"tensor":"lse"' in line))
    path.write_bytes(b"\n".join(every))
    edit(path, lambda record: record["type"] == "manifest", lambda record: record.update(case_set=999))
    seal_again(path)
    found = checking.check(path, None, 0)
    (words,) = found.problems
    assert words.endswith("no record of lse")
    assert found.whole is None


def test_a_forged_case(path: Path) -> None:
    """All records of one case are gone."""
    every = lines(path)
    line = next(record["case"] for one in every if is_certified(record := msgspec.json.decode(one)))
    path.write_bytes(b"\n".join(one for one in every if f'"case":"{line}"'.encode() not in one))
    seal_again(path)
    assert problems(path) == f"not judged: tiled.fa2 accuracy/forward cpu [{line}]"


def test_a_forged_whole_run(path: Path) -> None:
    edit(path, lambda record: "whole" in record, lambda record: record.update(whole=True))
    seal_again(path)
    assert "says that it is whole, and tiled.fa2 contract/answers float32 judged nothing" in problems(path)


def test_a_forged_verdict(path: Path) -> None:
    edit(path, is_certified, lambda record: record.update(status="failed"))
    edit(path, lambda record: record["type"] == "claim", lambda record: record.update(verdict="verified: 112 checks"))
    seal_again(path)
    assert "the verdict is 'verified: 112 checks', and 1 judgement failed" in problems(path)


def test_what_no_case_shows_stays_hidden(path: Path) -> None:
    """The limit that docs/commands.md states: with a new seal, words that no case depends on can be anything."""
    edit(path, lambda record: "commit" in record, lambda record: record.update(commit="0123456789ab"))
    seal_again(path)
    assert problems(path) == ""


# ------------------------------------------------------------------------------------------------------- damaged


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-200], "is incomplete; the file was cut off here"),
        (lambda content: content.replace(b'{"type":"claim"', b'{"type":"letter"'), "not a record of flashproof"),
        (lambda content: b"", "holds no records"),
        (lambda content: b"\x1f\x8b\x08\x00", "line 1: is incomplete"),
    ],
    ids=["cut", "foreign", "empty", "binary"],
)
def test_a_damaged_file(
    path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes], words: str
) -> None:
    path.write_bytes(damage(path.read_bytes()))
    assert told(path) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"rejected: {path}")
    assert words in said


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(tmp_path / "none.jsonl") == 1
    assert "no such file" in capsys.readouterr().out
