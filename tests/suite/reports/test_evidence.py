"""Merging: which of two records about the same thing counts, and the errors about files that cannot be merged."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashproof.reports.evidence import Evidence, Machine, clear, gather, without_a_gpu
from flashproof.reports.github import collect, summary
from flashproof.reports.pages import write_pages
from flashproof.reports.record import Absence, Curve, Environment, Memory, Record
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import claim, environment, judgement

CPU, GPU = Machine("cpu", "AMD EPYC, 2 cores"), Machine("cuda", "NVIDIA H200")


def merged(directory: Path, *runs: list[Record]) -> Evidence:
    return gather([building.write(directory / f"{number}.jsonl", run) for number, run in enumerate(runs)])


def rhos(evidence: Evidence) -> dict[Machine, list[float | str | None]]:
    found: dict[Machine, list[float | str | None]] = {}
    for kernel in evidence.kernels:
        for judged in kernel.judged:
            found.setdefault(judged.machine, []).append(judged.rho)
    return found


def test_machines_stand_beside_each_other(tmp_path: Path) -> None:
    evidence = merged(
        tmp_path,
        [environment(building.CPU), judgement(rho=0.5)],
        [environment(building.GPU), judgement(run=building.GPU, rho=0.7)],
    )
    assert rhos(evidence) == {CPU: [0.5], GPU: [0.7]}
    assert evidence.machines == (CPU, GPU)
    assert [e.run for e in evidence.environments] == [building.CPU, building.GPU]


def test_two_machines_of_one_kind_stay_apart(tmp_path: Path) -> None:
    evidence = merged(
        tmp_path,
        [environment("a"), judgement(run="a", rho=0.5)],
        [environment("b", device="Grace"), judgement(run="b", rho=0.7)],
    )
    assert rhos(evidence) == {CPU: [0.5], Machine("cpu", "Grace"): [0.7]}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_later_date_wins_on_the_same_device(tmp_path: Path, order: tuple[int, int]) -> None:
    early: list[Record] = [
        environment("early", date="2026-03-02T10:00:00+02:00"),
        judgement(run="early", rho=7.0, status="failed"),
        judgement(run="early", rho=0.2, case="only early"),
    ]
    late: list[Record] = [environment("late", date="2026-03-02T09:00:00Z"), judgement(run="late", rho=0.5)]
    runs = [early, late]
    assert rhos(merged(tmp_path, *(runs[i] for i in order))) == {CPU: [0.5, 0.2]}


def dated(
    run: str, day: int, *records: Record, whole: bool = False, ended: bool = True, **fields: object
) -> list[Record]:
    """Returns the records of a run on a day of March 2026. Its last record is a claim that says whether it ended."""
    end = claim(run=run, ended=ended)
    return [environment(run, date=f"2026-03-{day:02}T10:00:00Z", whole=whole, **fields), *records, end]


def cases(evidence: Evidence) -> list[str]:
    return sorted(judged.judgement.case for kernel in evidence.kernels for judged in kernel.judged)


def test_a_whole_run_takes_the_place_of_all_before_it(tmp_path: Path) -> None:
    """A whole run replaces all earlier runs of its implementations on its machine.

    A later, narrower run adds to it and removes nothing.
    """
    other = judgement(run="before", implementation="tiled.fa2", case="other kernel")
    before = dated("before", 1, judgement(run="before", case="gone"), judgement(run="before", case="again"), other)
    elsewhere = dated("elsewhere", 1, judgement(run="elsewhere", case="elsewhere"), device="Grace")
    whole = dated("whole", 2, judgement(run="whole", case="again"), judgement(run="whole", case="kept"), whole=True)
    after = dated("after", 3, judgement(run="after", case="again", rho=0.7))
    evidence = merged(tmp_path, before, elsewhere, whole, after)
    assert cases(evidence) == ["again", "elsewhere", "kept", "other kernel"]
    assert [
        judged.rho for kernel in evidence.kernels for judged in kernel.judged if judged.judgement.case == "again"
    ] == [0.7]


def test_a_whole_run_that_was_broken_off_takes_no_place(tmp_path: Path) -> None:
    """A whole run that was interrupted replaces nothing. Neither does a run that died before it wrote a claim."""
    before = dated("before", 1, judgement(run="before", case="stays"), whole=True)
    broken_off = dated("late", 2, judgement(run="late", case="late"), whole=True, ended=False)
    assert cases(merged(tmp_path, before, broken_off)) == ["late", "stays"]
    assert cases(merged(tmp_path / "b", before, broken_off[:-1])) == ["late", "stays"]


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({"whole": True}, {CPU}),
        ({}, set()),
        ({"whole": True, "ended": False}, set()),
        ({"run": building.GPU}, set()),
        ({"run": building.GPU, "whole": True}, {GPU}),
        ({"run": building.GPU, "whole_on": ["cuda"]}, {GPU}),
        ({"run": building.GPU, "whole_on": ["cpu"]}, set()),
        ({"run": building.GPU, "whole_on": ["cuda"], "ended": False}, set()),
        ({"whole_on": ["cpu"]}, {CPU}),
    ],
)
def test_only_a_run_that_leaves_nothing_out_is_whole(
    tmp_path: Path, fields: dict[str, Any], whole: set[Machine]
) -> None:
    """A run may be whole on a GPU and leave out the CPU."""
    run = fields.pop("run", building.CPU)
    end = claim(run=run, ended=fields.pop("ended", True))
    (kernel,) = merged(tmp_path, [environment(run, **fields), judgement(run=run), end]).kernels
    machine = GPU if run == building.GPU else CPU
    assert kernel.whole_on & {CPU, GPU} == whole
    assert kernel.narrowed_on == (() if whole else (machine,))


def test_a_later_narrowed_run_leaves_an_implementation_whole(tmp_path: Path) -> None:
    whole = dated("whole", 1, judgement(run="whole"), whole=True)
    (kernel,) = merged(tmp_path, whole, dated("after", 2, judgement(run="after", case="more"))).kernels
    assert kernel.narrowed_on == ()


def test_a_damaged_file_is_left_out_where_that_is_asked(tmp_path: Path) -> None:
    good = building.write(tmp_path / "good.jsonl", [environment(), judgement()])
    (tmp_path / "bad.jsonl").write_text('{"type": "nonsense"}\n\n')
    words: list[str] = []
    assert gather([tmp_path / "bad.jsonl", good], words) == gather([good])
    assert len(words) == 1
    assert "bad.jsonl, line 1: not a record" in words[0]
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        gather([tmp_path / "bad.jsonl", good])


def test_files_of_runs_that_nothing_is_left_of_are_removed(tmp_path: Path) -> None:
    """Three kinds of files stay: files with another name, runs that may still be going on, and unreadable files."""
    names = {
        name: f"2026030{number}-100000-abcde{number}.jsonl"
        for number, name in enumerate(("old", "narrow", "whole", "late", "begun"))
    }
    runs = {
        "old": dated("old", 1, judgement(run="old"), whole=True),
        "narrow": dated("narrow", 2, judgement(run="narrow", case="found")),
        "whole": dated("whole", 3, judgement(run="whole"), judgement(run="whole", case="b"), whole=True),
        "late": dated("late", 4, judgement(run="late")),
        "begun": dated("begun", 1, judgement(run="begun"))[:-1],
    }
    for name, records in runs.items():
        building.write(tmp_path / names[name], records)
    building.write(tmp_path / "mine.jsonl", [environment("mine", date="2026-03-01T10:00:00Z"), judgement(run="mine")])
    (tmp_path / "20260301-100000-ffffff.jsonl").write_text("nonsense\n\n")
    evidence = gather(path for path in sorted(tmp_path.glob("*.jsonl")) if "ffffff" not in path.name)
    soon = datetime(2026, 3, 1, 11, tzinfo=UTC)
    assert [path.name for path in clear(tmp_path, evidence, soon)] == [names["old"], names["narrow"]]
    assert [path.name for path in clear(tmp_path, evidence)] == [names["begun"]]
    left = {"mine.jsonl", "20260301-100000-ffffff.jsonl", names["whole"], names["late"]}
    assert {path.name for path in tmp_path.glob("*.jsonl")} == left


def test_within_a_run_the_worst_counts(tmp_path: Path) -> None:
    run: list[Record] = [environment(), judgement(rho=0.5), judgement(rho="nan", status="failed"), judgement(rho=0.6)]
    assert rhos(merged(tmp_path, run)) == {CPU: ["nan"]}
    assert merged(tmp_path / "b", run).kernels[0].judged[0].judgement.status == "failed"


def test_the_larger_of_the_two_gates_is_rho(tmp_path: Path) -> None:
    assert rhos(merged(tmp_path, [environment(), judgement(rho=0.02, rho_statistical=1.5)])) == {CPU: [1.5]}
    assert rhos(merged(tmp_path / "b", [environment(), judgement(rho="inf", rho_statistical=1.5)])) == {CPU: ["inf"]}


def test_a_cpu_judged_by_a_gpu_machine_is_named(tmp_path: Path) -> None:
    assert rhos(merged(tmp_path, [environment(building.GPU), judgement(run=building.GPU, device="cpu")])) == {
        Machine("cpu", "CPU beside NVIDIA H200"): [0.5]
    }


def test_measurements_of_a_later_run_replace_the_same_ones(tmp_path: Path) -> None:
    early: list[Record] = [
        environment("early", date="2026-01-01T00:00:00Z"),
        *_as(building.measured("triton.fa2", building.CPU, growth=2), "early"),
    ]
    late: list[Record] = [
        environment("late", date="2026-01-02T00:00:00Z"),
        *_as(building.measured("triton.fa2", building.CPU), "late"),
    ]
    kernel = merged(tmp_path, late, early).kernels[0]
    assert {record.run for record, _ in kernel.memory} == {"late"}
    assert [record.length for record, _ in kernel.memory] == [512, 1024, 2048, 4096, 8192, 16384] * 2


def _as(records: object, run: str) -> list[Record]:
    import msgspec

    return [
        msgspec.structs.replace(record, run=run)
        for record in records  # type: ignore[attr-defined]
        if isinstance(record, Memory)
    ]


def test_a_machine_without_a_gpu_says_nothing_of_it_once_another_has_one(tmp_path: Path) -> None:
    absence = Absence(
        run=building.CPU,
        implementation="triton.fa2",
        device="cuda",
        reason="not possible here",
        message="CUDA: no device",
    )
    alone = merged(tmp_path, [environment(), judgement(), absence])
    assert alone.kernels[0].machines == (CPU, Machine("cuda", ""))
    beside = merged(
        tmp_path / "b", [environment(), judgement(), absence], [environment(building.GPU), judgement(run=building.GPU)]
    )
    assert beside.kernels[0].machines == (CPU, GPU)


def test_what_a_run_leaves_out_of_a_device_that_it_was_not_about_is_not_told(tmp_path: Path) -> None:
    left_out = [
        Absence(
            run=building.GPU, implementation="triton.fa2", device=device, reason="not claimed", check="masks/blocks"
        )
        for device in ("cpu", "cuda")
    ]
    evidence = merged(tmp_path, [environment(building.GPU), judgement(run=building.GPU), *left_out])
    assert evidence.kernels[0].machines == (GPU,)


def test_order_of_files_and_of_records_changes_nothing(tmp_path: Path) -> None:
    cpu, gpu = building.cpu_run(), building.gpu_run()
    first = merged(tmp_path, cpu, gpu)
    assert merged(tmp_path / "b", gpu, cpu) == first
    shuffled = merged(tmp_path / "c", [cpu[0], *reversed(cpu[1:])], gpu)
    assert shuffled.kernels == first.kernels
    assert shuffled.checks == first.checks


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    path = building.write(tmp_path / "run.jsonl", [environment(), judgement()])
    assert gather([path, path]) == gather([path])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], r"0\.jsonl: holds no records"),
        ([judgement()], r"0\.jsonl: run 'cpu run' has no environment record"),
        ([environment(), environment(device="Grace")], r"0\.jsonl: the environment of run 'cpu run' differs"),
        ([environment(date="yesterday")], r"0\.jsonl: the date 'yesterday' of run 'cpu run' is not ISO 8601"),
        (
            [
                environment(),
                Curve(
                    run=building.CPU,
                    chart="overflow",
                    series="naive",
                    device="cpu",
                    x=[1.0, 2.0],
                    y=[1.0],
                    x_title="x",
                    y_title="y",
                ),
            ],
            r"0\.jsonl: the curve 'naive' of chart 'overflow' has 2 x for 1 y",
        ),
    ],
)
def test_what_cannot_be_merged_is_named(tmp_path: Path, records: list[Record], message: str) -> None:
    (tmp_path / "0.jsonl").touch()
    with pytest.raises(ValueError, match=message):
        merged(tmp_path, records)


OTHER = "fedcba987654"


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([building.environment()], "No GPU run for this commit (0123456789ab)."),
        ([building.environment(building.GPU), building.environment(date="2026-03-04T00:00:00Z")], ""),
        (
            [building.environment(building.GPU, commit=OTHER), building.environment(date="2026-03-04T00:00:00Z")],
            f"No GPU run for this commit (0123456789ab): the newest one is of commit {OTHER}, 2026-03-03.",
        ),
        ([building.environment(building.GPU, commit=OTHER), building.environment()], ""),
        ([building.environment(commit="")], "No GPU run."),
        ([], ""),
    ],
)
def test_a_commit_without_a_gpu_run_is_said(runs: list[Environment], words: str) -> None:
    claim = building.claim()
    assert without_a_gpu(runs, [claim]) == words
    for_cpus = msgspec.structs.replace(claim, supports=claim.supports | {"devices": ["cpu"]})
    assert without_a_gpu(runs, [for_cpus]) == ""


def test_the_report_and_the_summary_say_that_there_is_no_gpu_run(tmp_path: Path) -> None:
    path = building.write(tmp_path / "run.jsonl", [environment(), claim(), judgement()])
    words = "No GPU run for this commit (0123456789ab)."
    assert words in write_pages(gather([path]), tmp_path / "site").read_text()
    assert words in summary(collect([path]))
