"""The tables of the report show what the records hold: states, largest figures, thresholds, exponents."""

from pathlib import Path
from typing import Any

import pytest

from flashproof.reports import front, overview, tables
from flashproof.reports.evidence import Evidence, Kernel, gather
from flashproof.reports.record import Absence, Record
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import claim, environment, judgement


def evidence(directory: Path, *records: Record) -> Evidence:
    return gather([building.write(directory / "run.jsonl", [environment(), *records])])


def kernel(directory: Path, *records: Record) -> Kernel:
    (found,) = evidence(directory, *records).kernels
    return found


def the_cell(kernel: Kernel, dtype: str = "float32", check: str = "accuracy/forward") -> tables.Cell:
    return tables.cell(kernel, kernel.machines[0], dtype, check)


# ---------------------------------------------------------------------------------------------------------- states


def test_the_gravest_status_is_the_state(tmp_path: Path) -> None:
    statuses: list[Any] = ["passed", "refused", "known defect", "failed"]
    records = [judgement(case=f"case {i}", status=status, rho=0.1 * (i + 1)) for i, status in enumerate(statuses)]
    assert [the_cell(kernel(tmp_path / str(n), *records[:n])).state for n in (1, 2, 3, 4)] == [
        "passed",
        "passed",
        "known defect",
        "failed",
    ]
    whole = the_cell(kernel(tmp_path / "all", *records))
    assert (whole.rho, whole.cases, whole.note) == ("0.40", 4, "1 of 4 failed, 1 of 4 known defects, 1 of 4 refused")


def test_refusals_alone_are_refused(tmp_path: Path) -> None:
    assert the_cell(kernel(tmp_path, judgement(status="refused", rho=None))).state == "refused"


def test_a_case_counts_once_for_all_its_tensors(tmp_path: Path) -> None:
    judged = [
        judgement(tensor=tensor, status="failed" if tensor == "dk" else "passed") for tensor in ("dq", "dk", "dv")
    ]
    cell = the_cell(kernel(tmp_path, *judged, judgement(case="another")))
    assert (cell.cases, cell.part, cell.note) == (2, "1 of 2", "1 of 2 failed")


def test_not_finite_is_the_largest(tmp_path: Path) -> None:
    judged = [judgement(case=str(i), rho=rho) for i, rho in enumerate((0.5, "nan", 7.0))]
    assert the_cell(kernel(tmp_path, *judged)).rho == "nan"


def test_what_was_not_judged_says_why(tmp_path: Path) -> None:
    asked = kernel(
        tmp_path,
        claim(supports=building.SUPPORTS | {"dtypes": ["float32"]}),
        judgement(),
        Absence(
            run=building.CPU,
            implementation="triton.fa2",
            device="cpu",
            reason="not claimed",
            check="contract/lse",
            message="lse",
        ),
        Absence(
            run=building.CPU,
            implementation="triton.fa2",
            device="cpu",
            reason="not possible here",
            dtype="bfloat16",
            message="no bfloat16 here",
        ),
    )
    assert the_cell(asked) == tables.found([asked.judged[0]])
    assert the_cell(asked, check="masks/other") == tables.Cell("not run")
    assert the_cell(asked, check="contract/lse") == tables.Cell("not claimed", note="lse")
    assert the_cell(asked, dtype="float16") == tables.Cell("not claimed", note="float16")
    assert the_cell(asked, dtype="bfloat16") == tables.Cell("not possible here", note="no bfloat16 here")


def test_a_claim_without_the_device_is_not_claimed(tmp_path: Path) -> None:
    assert the_cell(kernel(tmp_path, claim(supports={"devices": ["cuda"]}))) == tables.Cell("not claimed", note="cpu")


@pytest.mark.parametrize(("linear", "state"), [(False, "not claimed"), (True, "not run"), (None, "not run")])
def test_memory_that_is_measured_and_not_judged_is_not_claimed(
    tmp_path: Path, linear: bool | None, state: tables.State
) -> None:
    """The check measures each implementation. It judges only those that claim linear memory."""
    supports = building.SUPPORTS | ({} if linear is None else {"linear_memory": linear})
    judged: list[Record] = [
        claim(supports=supports),
        judgement(),
        *building.measured("triton.fa2", building.CPU, growth=2),
    ]
    other: list[Record] = [claim("other"), judgement("other", check="memory/memory_growth", tensor=None, rho=None)]
    found = evidence(tmp_path, *judged, *other)
    own = next(one for one in found.kernels if one.name == "triton.fa2")
    assert the_cell(own, check="memory/memory_growth").state == state
    line = overview.line(own, own.machines[0], overview.columns(overview.layers(found)), found)
    strip = next(strip for strip in line.strips if strip.column.key == "memory")
    assert front.Cell(strip).nothing == state


def test_the_verdict_of_nothing_is_not_a_pass(tmp_path: Path) -> None:
    assert tables.verdict(kernel(tmp_path, claim())).state == "not run"
    absence = Absence(
        run=building.CPU,
        implementation="triton.fa2",
        device="cuda",
        reason="not possible here",
        message="CUDA: no device",
    )
    assert tables.verdict(kernel(tmp_path / "b", claim(), absence)) == tables.Cell(
        "not possible here", note="CUDA: no device"
    )


# --------------------------------------------------------------------------------------------------------- figures


def test_a_noisy_mean_is_not_the_largest_bias(tmp_path: Path) -> None:
    noisy = judgement(case="noisy", bias=75000.0, bias_error=325000.0, bias_allowance=0.25)
    sure = judgement(case="sure", bias=-0.2, bias_error=0.01, bias_allowance=0.25)
    found = tables.largest(kernel(tmp_path, noisy, sure).judged).bias
    assert found is not None
    assert found.judgement == sure


@pytest.mark.parametrize(("bias", "fails"), [(0.28, False), (-0.28, False), (0.3, True), (-0.3, True)])
def test_a_bias_above_what_it_is_allowed_leans_by_more_than_one(bias: float, fails: bool) -> None:
    assert (tables.lean(judgement(bias=bias, bias_error=0.01, bias_allowance=0.25)) > 1) is fails


@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_exponent_of_a_power_is_that_power(power: int) -> None:
    fitted = tables.exponent([(length, 3 * length**power) for length in (512, 1024, 4096, 16384)])
    assert fitted is not None
    assert round(fitted, 9) == power


def test_the_exponent_is_of_least_squares() -> None:
    # In log2, the points (0, 0), (1, 2) and (2, 1) have a least-squares slope of 1/2.
    assert round(tables.exponent([(1, 1), (2, 4), (4, 2)]) or 0.0, 9) == 0.5


def test_there_is_no_exponent_of_nothing() -> None:
    assert tables.exponent([]) is None
    assert tables.exponent([(512, 7)]) is None
    assert tables.exponent([(512, 0), (1024, 0), (2048, 9)]) is None
    assert tables.exponent([(512, 1), (512, 2)]) is None


def test_the_worst_cases_are_the_worst_of_each_dtype(tmp_path: Path) -> None:
    judged = [
        judgement(case=f"{dtype} {i}", dtype=dtype, rho=i / 10) for dtype in ("float32", "float16") for i in range(6)
    ]
    judged += [judgement(case="float16 5", dtype="float16", tensor="dv", rho="inf", status="failed")]
    worst = tables.worst_cases(kernel(tmp_path, *judged), 2)
    assert [(j.judgement.case, j.rho) for j in worst] == [
        ("float16 5", "inf"),
        ("float32 5", 0.5),
        ("float16 4", 0.4),
        ("float32 4", 0.4),
    ]


def test_gaps_of_a_curve(tmp_path: Path) -> None:
    curve = building.curve("naive", [None, 1.0, None, None, -2.0])
    ((found, machine),) = evidence(tmp_path, curve).curves
    series = tables.series(found, machine)
    assert series.gaps == ((87.0, 87.0), (88.73, 89.0))
    assert series.largest == -2.0


# ---------------------------------------------------------------------------------------------------------- sweeps


def swept(directory: Path, failing: set[float], **fields: Any) -> list[str]:
    judged = [
        judgement(
            case=f"b1 q8 x{x:g} seed0", status="failed" if x in failing else "passed", axes={"magnitude": x}, **fields
        )
        for x in (1.0, 4.0, 16.0, 64.0)
    ]
    found = kernel(directory, *judged)
    return [tables.threshold(j, found) for j in found.judged if j.judgement.status == "failed"]


def test_a_threshold_is_told_where_the_sweep_has_one(tmp_path: Path) -> None:
    assert swept(tmp_path / "above", {16.0, 64.0}) == ["passes at magnitude 4, fails from 16"] * 2
    assert swept(tmp_path / "below", {1.0}) == ["passes at magnitude 4, fails from 1 down"]
    assert swept(tmp_path / "island", {4.0}) == [""]
    assert swept(tmp_path / "all", {1.0, 4.0, 16.0, 64.0}) == [""] * 4


def test_a_threshold_compares_only_cases_that_differ_in_the_axis(tmp_path: Path) -> None:
    failing = judgement(case="b1 q8 spike x16 seed0", status="failed", axes={"magnitude": 16.0})
    other = judgement(case="b1 q8 normal x4 seed0", axes={"magnitude": 4.0})
    found = kernel(tmp_path, failing, other)
    assert [tables.threshold(j, found) for j in found.judged] == ["", ""]


def test_a_sweep_takes_the_largest_at_each_place(tmp_path: Path) -> None:
    judged = [judgement(case=f"{q} {i}", rho=q / 100 * i, axes={"queries": q}) for q in (16.0, 32.0) for i in (1, 2)]
    judged += [
        judgement(case="16 dv", tensor="dv", rho="nan", axes={"queries": 16.0}, certainty="bounded"),
        judgement(case="elsewhere", rho=9.0),
    ]
    sweep = tables.sweep(kernel(tmp_path, *judged), "queries")
    assert sweep is not None
    (panel,) = sweep.panels
    assert panel.tensors == ("out", "dv")
    assert [(place, [j and j.rho for j in row]) for place, row in panel.rows] == [
        (16.0, [0.32, "nan"]),
        (32.0, [0.64, None]),
    ]
    assert dict(sweep.certainty) == {"certified": 2, "bounded": 1}


def test_one_place_is_no_sweep(tmp_path: Path) -> None:
    assert tables.sweep(kernel(tmp_path, judgement(axes={"queries": 16.0})), "queries") is None
