"""A sealed file shows every later change. It shows which line was edited, and where lines are missing."""

import gzip
from pathlib import Path

import msgspec
import pytest

from flashproof.reports import bundle
from flashproof.reports.__main__ import merge
from flashproof.reports.record import Record, append, lines, read
from flashproof.tests.suite.reports import building


def sealed(path: Path, records: list[Record]) -> Path:
    """A file with a sealed run."""
    building.write(path, records)
    bundle.seal(path, case_set=1, effort="default", dtypes=["float32"])
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    cases = [f"b1 h1 q{length} k{length} d16 float32" for length in range(1, 20)]
    return sealed(tmp_path / "run.jsonl", [building.environment(), *(building.judgement(case=case) for case in cases)])


def problems(path: Path) -> list[str]:
    return [words for run in bundle.runs(path) for words in run.problems()]


def test_an_unchanged_run_has_no_problem(path: Path) -> None:
    (run,) = bundle.runs(path)
    assert run.manifest is not None
    assert (run.manifest.lines, run.manifest.case_set, run.manifest.dtypes) == (20, 1, ["float32"])
    assert problems(path) == []


@pytest.mark.parametrize("number", [1, 7, 20])
def test_an_edited_line_is_named(path: Path, number: int) -> None:
    every = lines(path)
    every[number - 1] = every[number - 1].replace(b'"run":"cpu run"', b'"run":"cpu run" ')
    path.write_bytes(b"\n".join(every))
    (words,) = problems(path)
    assert words.startswith(f"{path}, line {number}: changed since")


def test_lines_that_were_left_out_are_noticed(path: Path) -> None:
    every = lines(path)
    del every[4:6]
    path.write_bytes(b"\n".join(every))
    (words,) = problems(path)
    assert words.startswith(f"{path}, line 5: from here on, lines were left out")
    assert "18 lines, and 20 were sealed" in words


def test_lines_that_were_moved_are_noticed(path: Path) -> None:
    every = lines(path)
    every[4], every[5] = every[5], every[4]
    path.write_bytes(b"\n".join(every))
    assert f"{path}, lines 5, 6: changed since" in problems(path)[0]


@pytest.mark.parametrize("change", [{"case_set": 2}, {"effort": "thorough"}, {"dtypes": ["float16"]}])
def test_an_edited_manifest_is_noticed(path: Path, change: dict[str, object]) -> None:
    every = lines(path)
    manifest = msgspec.json.decode(every[-2])
    every[-2] = msgspec.json.encode(manifest | change)
    path.write_bytes(b"\n".join(every))
    (words,) = problems(path)
    assert words.startswith(f"{path}, line 21: the checksum of run 'cpu run' does not fit")


def test_a_run_without_a_seal_is_named(tmp_path: Path) -> None:
    path = building.write(tmp_path / "run.jsonl", building.cpu_run())
    assert "is not sealed" in problems(path)[0]


def test_runs_in_one_file_have_a_seal_each(tmp_path: Path) -> None:
    path = sealed(tmp_path / "run.jsonl", building.cpu_run())
    sealed(path, building.gpu_run())
    assert [run.name for run in bundle.runs(path)] == [building.CPU, building.GPU]
    assert problems(path) == []


def test_packing_seals_what_has_no_seal(tmp_path: Path) -> None:
    own = sealed(tmp_path / "gpu.jsonl", building.gpu_run())
    older = building.write(tmp_path / "cpu.jsonl", building.cpu_run())
    packed = tmp_path / "all.jsonl.gz"
    assert bundle.tell([own, older], packed) == 0
    assert [run.manifest and run.manifest.case_set for run in bundle.runs(packed)] == [1, 0]
    assert problems(packed) == []
    first = packed.read_bytes()
    assert bundle.tell([packed], packed) == 0
    assert packed.read_bytes() == first, "packing again changes nothing"


def test_packing_seals_no_edited_run_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(path.read_bytes().replace(b"q7 k7", b"q8 k7"))
    assert bundle.tell([path], path.with_name("bundle.jsonl")) == 2
    assert f"{path}, line 8: changed since" in capsys.readouterr().err
    assert not path.with_name("bundle.jsonl").exists()


def test_a_report_takes_a_bundle(tmp_path: Path) -> None:
    path = sealed(tmp_path / "run.jsonl", building.cpu_run())
    assert merge([path], tmp_path / "site") == 0


def test_a_file_that_was_cut_off_is_named_with_its_line(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"run\.jsonl, line 21: is incomplete"):
        bundle.runs(path)
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(content)[:-40])
    with pytest.raises(ValueError, match=r"line \d+: cannot be unpacked any further"):
        bundle.runs(packed)


def test_a_foreign_line_is_named(path: Path) -> None:
    with path.open("a") as file:
        file.write("a letter\n")
    with pytest.raises(ValueError, match=r"run\.jsonl, line 22: not a record of flashproof"):
        bundle.runs(path)


def test_a_run_that_is_not_sealed_leaves_the_runs_before_it(path: Path) -> None:
    append(path, building.environment(building.GPU))
    assert [bool(run.manifest) for run in bundle.runs(path)] == [True, False]
    assert len(list(read(path))) == 22
