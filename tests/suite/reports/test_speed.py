"""Speeds are read from pytest-benchmark, and the later measurement of a setting counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from flashproof.reports import speed
from flashproof.reports.evidence import gather
from flashproof.reports.pages import write_pages
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement


def benchmark(tflops: float) -> dict[str, Any]:
    return {
        "params": {"name": "triton.fa2", "dtype": "float16", "direction": "forward", "line": "b4 h16 q4096 k4096 d128"},
        "extra_info": {"implementation": "triton.fa2", "tflops": tflops, "gpu": "NVIDIA H200", "ratio": 0.5},
        "stats": {"median": 0.0016},
    }


def write(path: Path, date: str, *benchmarks: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"datetime": date, "benchmarks": benchmarks}))
    return path


def test_the_later_measurement_counts(tmp_path: Path) -> None:
    late = write(tmp_path / "a.json", "2026-02-01", benchmark(346.0))
    early = write(tmp_path / "b.json", "2026-01-01", benchmark(200.0))
    (timing,) = speed.latest([*speed.read(late), *speed.read(early)])
    assert (timing.length, timing.dim, timing.heads, timing.causal) == (4096, 128, 16, False)
    assert (timing.tflops, timing.ceiling, timing.ratio) == (346.0, 989.4, 0.5)


def test_what_has_no_throughput_is_left_out(tmp_path: Path) -> None:
    other = {"params": {}, "extra_info": {}, "stats": {"median": 1.0}}
    assert speed.read(write(tmp_path / "a.json", "2026-02-01", other)) == []


def test_measurements_of_another_kind_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "FOLDER", tmp_path)
    write(tmp_path / "a.json", "2026-02-01", benchmark(346.0))
    (tmp_path / "b.json").write_text('{"gpu": "NVIDIA H200", "prototypes": {}}')
    assert [timing.tflops for timing in speed.committed()] == [346.0]


def test_speeds_of_the_verified_are_shown(tmp_path: Path) -> None:
    records = building.write(tmp_path / "run.jsonl", [environment(), judgement()])
    timings = speed.read(write(tmp_path / "a.json", "2026-02-01", benchmark(346.0)))
    write_pages(gather([records]), tmp_path / "site", timings)
    assert "35 %" in (tmp_path / "site" / "speed.html").read_text()
    write_pages(gather([records]), tmp_path / "site", [])
    assert not (tmp_path / "site" / "speed.html").exists()
