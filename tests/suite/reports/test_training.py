"""The page about training shows the committed trainings, the drifts in the records, and measured steps."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashproof.reports import training
from flashproof.reports.evidence import gather
from flashproof.reports.pages import write_pages
from flashproof.reports.record import Curve, append
from flashproof.reports.training import Cost, Step
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement

STEP = Step("triton.fa2", "NVIDIA H200", "124M", 1024, Cost(16, 2e5, 2**34), Cost(16, 1e5, 2**35), 0.1, "a.json", "")


def drift(series: str, y: list[float | None]) -> Curve:
    """The distance of the loss in a training with triton.fa2."""
    return Curve(
        run=building.CPU,
        chart="drift of the loss, float32, triton.fa2",
        series=series,
        device="cpu",
        x=[0.0, 1.0],
        y=y,
        x_title="step",
        y_title="loss - exact",
    )


def page(tmp_path: Path, *records: Any, steps: list[Step]) -> str:
    file = tmp_path / "run.jsonl"
    for record in (environment(), judgement(), *records):
        append(file, record)
    write_pages(gather([file]), tmp_path / "site", [], steps=steps)
    return (tmp_path / "site" / "training.html").read_text()


def test_a_step_is_beside_standard_attention() -> None:
    assert STEP.speed_up == 2.0
    assert STEP.memory_ratio == 2.0
    assert round(STEP.cost.milliseconds(STEP.length), 6) == 81.92


def test_memories_of_other_batches_are_not_compared() -> None:
    assert STEP.standard
    other = replace(STEP, standard=replace(STEP.standard, batch=8))
    assert other.memory_ratio is None
    assert other.speed_up == 2.0


def test_the_committed_steps_are_those_of_the_file() -> None:
    steps = training.committed()
    assert {step.model for step in steps} >= {"124M", "350M", "1.5B"}
    assert all(step.speed_up for step in steps if step.length <= 4096)
    assert {step.standard for step in steps if step.length == 16384} == {None}  # it does not fit into the memory


def test_a_file_of_another_form_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"benchmarks": [{"extra_info": {"attention_share": 0.5}}]}))
    with pytest.raises(ValueError, match=r"a\.json: holds no benchmarks"):
        training.read(tmp_path / "a.json")


def test_the_page_shows_the_two_curves_and_the_table(tmp_path: Path) -> None:
    text = page(tmp_path, steps=[STEP, replace(STEP, length=2048, standard=None)])
    told = json.loads((training.FOLDER / "bias.json").read_text())["told"]
    assert f"<td>step {told['cut']['bias']}<td>step {told['cut']['loss']}\n" in text
    assert "does not fit" in text
    rows = [re.findall(r"<t[hd][^>]*>([^<\n]*)", row) for row in text.split("<tr>")]
    assert ["1024", "164", "81.9", "16, 16", "2.00", "32.0", "16.0", "2.00", "10 %"] in rows


def test_drifts_are_on_this_page_alone(tmp_path: Path) -> None:
    own, right = drift("triton.fa2", [1e-6, None]), drift("right 0", [1e-7, 1e-5])
    outside = judgement(check="training/drift", status="failed", message="drifts")
    text = page(tmp_path, own, right, outside, steps=[])
    assert "triton.fa2 leaves the spread of right kernels" in text
    assert "right kernels" in text
    assert "drift of the" not in (tmp_path / "site" / "index.html").read_text()


def test_committed_drifts_are_shown_for_the_verified_alone(tmp_path: Path) -> None:
    text = page(tmp_path, steps=[])  # of triton.fa2
    assert "All 1 implementations" not in text
    assert "triton.fa2 stays within the spread of right kernels" in text
    assert "tiled.fa1" not in text
