"""Speeds are read from pytest-benchmark, the later measurement of a setting counts, and the page shows all of them."""

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from flashproof.reports import charts, speed, throughput, training
from flashproof.reports.drawing import Scale, steps
from flashproof.reports.evidence import gather
from flashproof.reports.pages import write_pages
from flashproof.reports.speed import Timing
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement

TIMING = Timing(
    implementation="triton.fa2",
    device="NVIDIA H200",
    dtype="float16",
    direction="forward",
    causal=False,
    length=4096,
    dim=128,
    batch=4,
    heads=16,
    seconds=0.0016,
    tflops=346.0,
    source="a.json",
)


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


def test_every_committed_file_is_read() -> None:
    every = sorted(speed.FOLDER.glob("*.json"))
    files = [
        path for path in every if {"results", "benchmarks", "cases"} & {*json.loads(path.read_text())}
    ]  # not raw figures
    assert files
    assert all(speed.read(path) or training.read(path) for path in files)
    sources = {timing.source for timing in speed.committed()} | {step.source for step in training.committed()}
    assert sources == {path.name for path in files}


def test_measurements_in_another_form_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "FOLDER", tmp_path)
    write(tmp_path / "a.json", "2026-02-01", benchmark(346.0))
    (tmp_path / "b.json").write_text('{"gpu": "NVIDIA H200", "prototypes": {}}')
    assert [timing.tflops for timing in speed.committed()] == [346.0]
    with pytest.raises(ValueError, match=r"b\.json: holds no benchmarks"):
        speed.read(tmp_path / "b.json")


def test_a_block_mask_is_a_setting_of_its_own(tmp_path: Path) -> None:
    lines = [f"b2 h16 q8192 k8192 d128{blocks}" for blocks in (" blocks1", " blocks0.25", "")]
    benchmarks = [benchmark(300.0) for _ in lines]
    for one, line in zip(benchmarks, lines, strict=True):
        one["params"] |= {"line": line}
    timings = speed.latest(speed.read(write(tmp_path / "a.json", "2026-02-01", *benchmarks)))
    assert [(timing.blocks, timing.mask) for timing in timings] == [
        (1.0, "100 % of blocks"),
        (0.25, "25 % of blocks"),
        (None, "none"),
    ]
    assert len({timing.setting for timing in timings}) == 3


def test_speeds_of_the_verified_are_shown(tmp_path: Path) -> None:
    records = building.write(tmp_path / "run.jsonl", [environment(), judgement()])
    timings = speed.read(write(tmp_path / "a.json", "2026-02-01", benchmark(346.0)))
    write_pages(gather([records]), tmp_path / "site", timings)
    assert "35 %" in (tmp_path / "site" / "speed.html").read_text()
    write_pages(gather([records]), tmp_path / "site", [])
    assert not (tmp_path / "site" / "speed.html").exists()


# ------------------------------------------------------------------------------------------- the page of a whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a thorough run on a GPU."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "speeds.json").write_text(json.dumps(building.benchmarks()))
    records = building.write(
        folder / "run.jsonl",
        [environment(building.GPU), *(judgement(name, building.GPU) for name in building.GPU_NAMES)],
    )
    write_pages(gather([records]), folder / "site", speed.read(folder / "speeds.json"))
    return folder / "site" / "speed.html"


def test_the_page_of_a_whole_run_is_small(whole: Path) -> None:
    assert whole.stat().st_size < 500_000
    assert (whole.parent / "index.html").stat().st_size < 150_000


def test_the_page_has_every_part(whole: Path) -> None:
    text = whole.read_text()
    parts = re.findall(r'<h2 id="(\w+)"', text)
    assert parts == ["lengths", "compared", "sparse", "generations", "standard", "figures"]
    assert "The fastest forward is that of flex: 580 TFLOP/s (59 % of the chip" in text
    labels = re.findall(r'<svg role="img" aria-label="([^"]+)"', text)
    assert any(label.startswith("TFLOP/s over sequence length, forward, float16") for label in labels)
    assert any(label.startswith("milliseconds over the share of kept blocks") for label in labels)


def test_the_table_of_the_tutorials_has_every_length(whole: Path) -> None:
    text = whole.read_text()
    table = text[text.index('id="standard"') :]
    rows = re.findall(r"<tr><th scope=\"row\">(\d+)((?:<td>[^<]*)+)", table)[:6]
    assert [int(length) for length, _ in rows] == [512, 1024, 2048, 4096, 8192, 16384]
    standard, flash, speed_up, matrix, measured, ratio = re.findall(r"<td>([^<]*)", rows[5][1])
    assert float(speed_up) == pytest.approx(float(standard) / float(flash), rel=0.01)
    assert (matrix, measured) == ("512 MiB", "64 KiB")
    assert float(ratio.replace("e", "e+")) == pytest.approx(512 * 1024 / 64)


def test_implementations_are_not_compared_across_sizes(tmp_path: Path) -> None:
    small, large = benchmark(1.0), benchmark(300.0)
    small["params"] |= {"line": "b1 h1 q1024 k1024 d128"}
    timings = speed.read(write(tmp_path / "a.json", "2026-02-01", small, large))
    assert len({timing.group for timing in timings}) == 2


def test_generations_are_paired(tmp_path: Path) -> None:
    found = []
    for name, tflops in (("triton.fa1", 100.0), ("triton.fa2", 250.0), ("cuda.fa1", 50.0)):
        one = benchmark(tflops)
        one["extra_info"] |= {"implementation": name}
        one["stats"] = {"median": 1 / tflops}
        found.append(one)
    (part,) = throughput._generations(speed.read(write(tmp_path / "a.json", "2026-02-01", *found)))
    assert [(one.implementation, other.implementation) for one, other in part["rows"]] == [("triton.fa1", "triton.fa2")]


def test_block_masks_measured_in_two_ways_are_not_in_one_chart(tmp_path: Path) -> None:
    sparse = [replace(TIMING, blocks=blocks, note=note) for blocks in (0.25, 0.5, 1.0) for note in ("", "waits")]
    early, late = (
        replace(timing, date=date) for timing, date in ((sparse[1], "2026-01-01"), (sparse[0], "2026-02-01"))
    )
    assert len(speed.latest([early, late])) == 2
    assert [part["note"] for part in throughput._sparse(throughput._by_share(sparse))] == ["", "waits"]
    assert throughput._sparse(throughput._by_share([sparse[0], sparse[3]])) == []


def test_implementations_are_compared_where_one_share_of_blocks_was_timed() -> None:
    one = [replace(TIMING, implementation=name, blocks=0.25) for name in ("cuda.block_sparse", "flex")]
    several = [replace(TIMING, implementation="flex", blocks=blocks, length=8192) for blocks in (0.5, 1.0)]
    (chart,) = throughput._compared_at_one_share(throughput._by_share([TIMING, *one, *several]))
    assert chart.title == "forward, float16, head dim 128, 4096 tokens, 25 % of blocks"
    assert "cuda.block_sparse" in chart.svg


def test_what_was_timed_stands_on_the_page_of_the_committed_measurements(tmp_path: Path) -> None:
    """cuda.fa3_fp8 and the block-sparse kernels have figures, so they have charts, too."""
    names = sorted({timing.implementation for timing in speed.committed()})
    records = building.write(
        tmp_path / "run.jsonl", [environment(building.GPU), *(judgement(name, building.GPU) for name in names)]
    )
    text = write_pages(gather([records]), tmp_path / "site").with_name("speed.html").read_text()
    figures = text[text.index('id="figures"') :]
    drawn = {
        name for svg in re.findall(r'<svg role="img".*?</svg>', text, re.DOTALL) for name in names if f">{name}<" in svg
    }
    assert [name for name in names if f">{name}</a>" not in figures] == []
    assert {"cuda.fa3_fp8", "cuda.block_sparse", "triton.block_sparse", "flex"} <= drawn
    lengths = text[text.index('id="lengths"') : text.index('id="compared"')]
    assert ">cuda.fa3_fp8<" in lengths


def test_a_line_over_length_needs_two_lengths() -> None:
    swept = [replace(TIMING, length=length) for length in (1024, 4096)]
    svg = throughput._throughput([*swept, replace(TIMING, implementation="cuda.fa1", tflops=4.0)], "forward")
    assert "triton.fa2" in svg
    assert "cuda.fa1" not in svg


@pytest.mark.parametrize(("tflops", "share"), [(4.1, "0.4 %"), (770.0, "78 %")])
def test_a_small_share_of_the_chip_is_not_zero(tflops: float, share: str) -> None:
    assert throughput._pace(replace(TIMING, tflops=tflops)).endswith(f", {share}")


def test_products_in_fp8_have_a_ceiling_of_their_own() -> None:
    fast = replace(TIMING, implementation="cuda.fa3_fp8")
    assert fast.ceiling == 2 * 989.4
    assert throughput._ceiling([fast, TIMING]) == TIMING.ceiling


def test_a_table_has_the_bytes_of_one_measurement(tmp_path: Path) -> None:
    memory = list(building.measured("triton.fa2", building.GPU))
    evidence = gather([building.write(tmp_path / "run.jsonl", [environment(building.GPU), *memory])])
    rows = [replace(TIMING, length=1024, batch=16), replace(TIMING, memory_bytes=2**20)]
    standard = replace(TIMING, implementation="sdpa.math")

    def measured(*timings: Timing) -> list[int | None]:
        (part,) = throughput._beside_the_standard([*timings, standard], evidence)
        return [row.measured_bytes for row in part["rows"]]

    assert measured(*rows) == [None, 2**20 // 64]
    alone = [replace(timing, memory_bytes=None) for timing in rows]
    assert measured(*alone) == [512 * 1024 // 2, 512 * 4096 // 2]


# ------------------------------------------------------------------------------------------------------------- labels


def boxes(svg: Markup) -> list[tuple[str, charts.Box]]:
    """The texts of a drawing, with the place that each takes at most."""
    found = []
    for about, group in re.findall(r"<g([^>]*)>(.*?)</g>", svg):
        for x, y, text in re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)"[^>]*>([^<]*)<', group):
            width = charts.LETTER * len(text)
            left = float(x) - width * (0.5 if "middle" in about else 1.0 if '"end"' in about else 0.0)
            found.append((text, charts.Box(left, float(y) - 9, left + width, float(y) + 2)))
    return found


def check_labels(svg: Markup, names: list[str]) -> None:
    every = boxes(svg)
    assert {text for text, _ in every} >= set(names)
    wide, high = (float(size) for size in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    for text, box in every:
        if text in names:
            assert charts.Box(0, 0, wide, high).holds(box), text
    for (one, first), (other, second) in combinations(every, 2):
        assert not (first.meets(second) and {one, other} & set(names)), (one, other)


@pytest.mark.parametrize("values", [[500.0] * 16, [float(value) for value in range(16)], [989.0] * 16])
def test_names_beside_lines_do_not_overlap(values: list[float]) -> None:
    names = [f"implementation_{place}" for place in range(16)]
    traces = [charts.Trace(name, ((512.0, 100.0), (1024.0, value))) for name, value in zip(names, values, strict=True)]
    svg = charts.lines(
        traces,
        "lines",
        ("length", "TFLOP/s"),
        up=Scale(0, 1000, 0, 0, "linear"),
        ticks=steps(1000),
        places=[(512.0, "512"), (1024.0, "1k")],
        rule=(989.0, "the chip, 989"),
    )
    check_labels(svg, [*names, "the chip, 989"])


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_names_beside_points_do_not_overlap(spread: float) -> None:
    names = [f"implementation_{place}" for place in range(14)]
    points = [(name, 1e-4 * (1 + place % 3), 300.0 + spread * place) for place, name in enumerate(names)]
    check_labels(charts.scatter(points, "points", ("error", "TFLOP/s")), names)


def test_steps_are_round() -> None:
    assert [value for value, _ in steps(1019.0)] == [0, 200, 400, 600, 800, 1000]
    assert [name for _, name in steps(0.35)] == ["0", "0.1", "0.2", "0.3"]
