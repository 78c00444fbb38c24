"""The benchmarks, on a CPU: what is timed, how, and beside what. Only the clock of a GPU is left out."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashproof import loading
from flashproof.cases import Case
from flashproof.impls import catalogue
from flashproof.impls.spec import DTYPES, Device, Implementation
from flashproof.selection import Selection
from flashproof.tests.bench import calls, compare_clocks, comparing, settings, timing
from flashproof.tests.bench.calls import DIRECTIONS, Calls, Direction

ROOT = Path(__file__).resolve().parents[3]
LINE = "b1 h2 q192 k192 d32 float32"


def half_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with half of the right scale."""
    return torch.softmax(query @ key.mT / (2 * query.shape[-1] ** 0.5), dim=-1) @ value


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quick_run_times_every_implementation(device: Device) -> None:
    selection = Selection([], device=device)
    for loaded in selection.loaded:
        implementation = loaded.implementation
        assert implementation
        if device in implementation.supports.devices:
            found = [settings.settings_of(implementation, dtype, selection) for dtype in implementation.supports.dtypes]
            assert any(found), loaded.name


def test_a_thorough_run_has_every_length_dim_mask_and_dtype() -> None:
    selection, efficient = Selection([], device="cuda", thorough=True), loading.load("sdpa.efficient")
    found = [case for dtype in DTYPES for case in settings.settings_of(efficient, dtype, selection)]
    assert len(found) == 6 * 3 * 2 * 3
    assert {case.queries for case in found} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {case.batch * case.queries for case in found} == {16384}
    assert {case.heads * case.dim for case in found} == {2048}


def test_a_named_dtype_is_timed_in_a_quick_run() -> None:
    flash = loading.load("sdpa.flash")
    assert settings.settings_of(flash, "bfloat16", Selection([], device="cuda")) == []
    assert settings.settings_of(flash, "bfloat16", Selection([], ["bfloat16"], device="cuda"))


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("line", "direction", "count"),
    [
        ("b2 h3 q256 k256 d64 float32", "forward", 4 * 6 * 256 * 256 * 64),
        ("b2 h3 q256 k256 d64 float32", "backward", 10 * 6 * 256 * 256 * 64),
        ("b2 h3 q256 k256 d64 float32 causal", "forward", 2 * 6 * 256 * 256 * 64),
        ("b1 h1 q256 k256 d64 float32 blocks1", "forward", 4 * 256 * 256 * 64),
    ],
)
def test_operations_are_counted_as_in_the_papers(line: str, direction: Direction, count: float) -> None:
    assert calls.operations(calls.given(Case.parse(line), "cpu"), direction) == count


def test_hidden_blocks_are_not_counted() -> None:
    given = calls.given(Case.parse("b1 h2 q1024 k1024 d8 float32 blocks0.25"), "cpu")
    assert given.block_mask is not None
    kept = int(given.block_mask.sum())
    assert 0 < kept < given.block_mask.numel()
    assert calls.operations(given, "forward") == 4.0 * 128 * 128 * 8 * kept


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("extra", ["", " causal", " blocks0.5"])
def test_the_tensors_that_are_timed_are_judged(direction: Direction, extra: str) -> None:
    own = Calls(loading.load("tiled.block_sparse"), calls.given(Case.parse(LINE + extra), "cpu"))
    verdicts = own.judge(direction)
    assert verdicts.passed
    assert set(verdicts) == ({"out"} if direction == "forward" else {"out", "dq", "dk", "dv"})


def test_the_textbook_holds_the_matrix_of_scores() -> None:
    given = calls.given(Case.parse("b1 h1 q512 k512 d32 float32"), "cpu")
    matrix = 512 * 512 * 4
    for direction in DIRECTIONS:
        assert Calls(loading.load("sdpa.math"), given).peak_bytes(direction) >= matrix
        assert Calls(loading.load("sdpa.flash_cpu"), given).peak_bytes(direction) < matrix


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_implementation_is_measured(direction: Direction) -> None:
    found = comparing.measure(loading.load("tiled.fa2"), Case.parse(LINE), direction, "cpu", 0.01)
    assert timing.FEWEST <= len(found.seconds) <= timing.MOST
    about = found.about
    assert about["baseline"] in ("sdpa.math", "sdpa.flash_cpu")
    assert about["matrix_bytes"] == 2 * 192 * 192 * 4
    assert max(about["rho"].values()) <= 1
    assert about["tflops"] > 0 < about["ratio"]
    assert about["share_of_peak"] is None  # the peak of this CPU is not known
    assert json.loads(json.dumps(about)) == about


def test_a_wrong_implementation_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "in_turn", lambda *_: pytest.fail("was timed"))
    wrong = Implementation(name="half", attention=half_scale)
    with pytest.raises(comparing.Wrong, match="rho"):
        comparing.measure(wrong, Case.parse(LINE), "forward", "cpu", 0.01)


def test_two_calls_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing, "_on_cpu", lambda call: call() or 0.1)
    own, other = timing.in_turn(lambda: order.append("own"), lambda: order.append("other"), "cpu", 1.0)
    assert (len(own), len(other)) == (5, 5)
    assert order == ["other", "own"] * 6


@pytest.mark.parametrize(("host", "is_slow"), [([1.0, 0.1, 0.1], False), ([0.1, 0.1, 0.9], False), ([0.6] * 3, True)])
def test_one_slow_launch_does_not_make_a_call_one_that_launches_slowly(
    monkeypatch: pytest.MonkeyPatch, host: list[float], is_slow: bool
) -> None:
    """host: the seconds that the host takes to launch each call. The GPU takes half a second after each launch."""
    now, launches, launched = [0.0], iter(host), [False]

    def call() -> None:
        now[0] += next(launches)
        launched[0] = True

    def synchronize() -> None:
        now[0] += 0.5 if launched[0] else 0.0
        launched[0] = False

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    found = timing._launches_slowly(call)
    monkeypatch.undo()
    assert found == is_slow


def test_the_fastest_peer_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("b1 h1 q160 k160 d32 float32")
    times = {"sdpa.math": 2.0, "sdpa.flash_cpu": 3.0}
    monkeypatch.setattr(comparing, "_second", lambda peer, given, direction: times[peer.name])
    assert comparing.fastest_peer(calls.given(case, "cpu"), "forward").name == "sdpa.math"
    monkeypatch.setattr(comparing, "_second", lambda peer, given, direction: None)
    with pytest.raises(NotImplementedError, match="no peer"):
        comparing.fastest_peer(calls.given(case, "cpu"), "forward")


def test_without_a_peer_for_blocks_the_baseline_has_no_mask() -> None:
    masked = calls.given(Case.parse("b1 h1 q256 k256 d32 float32 blocks0.5"), "cpu")
    assert comparing.fastest_peer(masked, "forward").block_mask is None


def test_a_peer_that_refuses_is_passed_over() -> None:
    def refuse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    refusing = replace(loading.load("sdpa.math"), attention=refuse)
    assert comparing._second(refusing, calls.given(Case.parse(LINE), "cpu"), "forward") is None


def test_peers_are_those_of_the_catalogue() -> None:
    assert set(catalogue.PEERS) == {name for name in catalogue.CATALOGUE if name.startswith(("sdpa.", "flex"))}
    assert catalogue.STANDARD in catalogue.PEERS


# -------------------------------------------------------------------------------------------------- the two GPU clocks


@pytest.mark.parametrize(("theirs", "status"), [(0.00102, 0), (0.0011, 1)])
def test_clocks_that_differ_by_more_than_three_percent_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], theirs: float, status: int
) -> None:
    on_cpu = calls.given(Case.parse(LINE), "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(calls, "given", lambda case, device: on_cpu)
    monkeypatch.setattr(compare_clocks, "compare", lambda call: (0.001, theirs))
    assert compare_clocks.main(["sdpa.math"]) == status
    assert ("not within 3 %" in capsys.readouterr().out) == bool(status)


def test_without_a_gpu_there_is_no_clock_to_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compare_clocks.main([]) == 1
    assert "no device" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- whole runs


def run(*words: str) -> tuple[int, str]:
    """Runs benchmarks on the CPU of this clone. Returns the exit status and the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--benchmark-only", "--device", "cpu", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_run_makes_a_table_and_json_and_compares(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    one = ("--impl", "tiled.fa2", "--dtype", "float32", "-k", "forward and causal")
    status, said = run(*one, f"--benchmark-json={file}")
    assert status == 0, said
    assert "benchmark 'forward, b1 h1 q256 k256 d64 causal float32': 1 tests" in said
    content = json.loads(file.read_bytes())
    (benchmark,) = content["benchmarks"]
    assert benchmark["params"]["name"] == benchmark["extra_info"]["implementation"] == "tiled.fa2"
    assert set(content["machine_info"]) >= {"device", "versions"}

    for each in ("min", "median", "mean"):
        benchmark["stats"][each] /= 100
    content["machine_info"]["device"] = "another machine"
    file.write_text(json.dumps(content))
    status, said = run(*one, f"--benchmark-compare={file}", "--benchmark-compare-fail=median:200%")
    assert (status, "Performance has regressed" in said) == (1, True), said


def test_a_run_that_times_nothing_fails() -> None:
    status, said = run("--impl", "sdpa.cudnn")
    assert (status, "nothing was timed" in said) == (1, True), said
