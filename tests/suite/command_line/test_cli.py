"""The command `flashproof`: it has the verdicts and the exit status of `pytest --impl`, and starts without PyTorch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashproof import listing, loading, quick
from flashproof.impls.catalogue import CATALOGUE
from flashproof.impls.spec import DTYPES, Device
from flashproof.registry import checks
from flashproof.reports.__main__ import files_of
from flashproof.reports.record import Environment, Judgement, Record, read
from flashproof.space import space_of

SMALL = "b1 h1 q5 k5 d8 float32"
KERNELS = """
import torch


def right(query, key, value, is_causal=False):
    scores = query.float() @ key.float().transpose(-2, -1) / query.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return (torch.softmax(scores, dim=-1) @ value.float()).to(query.dtype)


def wrong(query, key, value, is_causal=False):
    return right(query * 1.01, key, value, is_causal)
"""
# Files that a project may contain. Those that break the project's own pytest must have no effect on the command.
HOSTILE = {
    "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
    "conftest.py": "raise RuntimeError('the conftest of the project')\n",
    "tests/test_mine.py": "def test_mine():\n    assert False\n",
    "mine.py": KERNELS,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of another author, in which pytest itself does not work."""
    for name, text in HOSTILE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, *words: str, module: str = "flashproof") -> tuple[int, str]:
    """Runs the command in a folder. Returns its exit status and its output."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    hostile = {"PYTEST_ADDOPTS": "--no-such-option"} if module == "flashproof" else {}
    ended = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env=names | hostile | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def judgements(records: list[Record]) -> list[tuple[str, ...]]:
    """Returns what a run found, without the name of the run and without times."""
    return sorted(
        (one.check, one.case, one.tensor or "", one.status, str(one.rho), str(one.bias))
        for one in records
        if isinstance(one, Judgement)
    )


def test_the_verdicts_are_those_of_pytest(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The command gives the same verdicts as pytest, whatever the project configures for its own pytest.

    The places of report and records come from [tool.flashproof]. The report leaves out a damaged record file.
    """
    (project / "pyproject.toml").write_text('[tool.flashproof]\nreport = "site"\nrecords = "found"\n')
    (project / "found").mkdir()
    (project / "found" / "20200101-000000-aaaaaa.jsonl").write_text("nonsense\n\n")
    status, said = run(project, "mine.py:right", "--case", SMALL, "-k", "accuracy or gradients")
    assert status == 0, said
    assert "left out of the report: " in said
    assert "20200101-000000-aaaaaa.jsonl, line 1: not a record" in said
    assert "\nreport:  site/index.html" in said
    assert (project / "site" / "index.html").is_file()
    assert not (project / "flashproof-report").exists()

    plain = tmp_path_factory.mktemp("plain")
    (plain / "mine.py").write_text(KERNELS)
    words = ["--impl", "mine.py:right", "--case", SMALL, "-k", "accuracy or gradients", "--records", "run.jsonl"]
    status, words_of_pytest = run(plain, *words, module="pytest")
    assert status == 0, words_of_pytest
    ours = list(read(next(path for path in (project / "found").glob("*.jsonl") if "aaaaaa" not in path.name)))
    assert judgements(ours) == judgements(list(read(plain / "run.jsonl")))
    environment = ours[0]
    assert isinstance(environment, Environment)
    assert not environment.whole
    assert environment.command.startswith("flashproof ")


def test_a_quick_run_rejects_a_wrong_kernel_and_says_what_it_is(project: Path) -> None:
    """The exit status of a quick run on a wrong kernel is 1.

    The run writes no report, and its records say that it was not a whole run.
    """
    status, said = run(project, "mine.py:wrong", "--quick", "--dtype", "fp32")
    assert status == 1, said
    assert "again: pytest --impl mine.py:wrong --case" in said
    assert re.search(r"\nfailed: \d+ of \d+ checks, narrowed by --quick, --dtype float32: .*\d+ failed", said)
    assert not (project / "flashproof-report" / "index.html").exists()
    environment = next(read(next((project / "flashproof-report" / "runs").glob("*.jsonl"))))
    assert isinstance(environment, Environment)
    assert not environment.whole


def test_a_case_shows_its_verdict_where_it_passes(project: Path) -> None:
    """The output shows each tensor with its rho, its bias and its worst element."""
    status, said = run(project, "case", SMALL, "mine.py:right")
    assert status == 0, said
    line = next(line for line in said.splitlines() if "accuracy/forward" in line)
    assert " out " in line
    assert "got " in line
    assert "passed" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mine.py:attention"], "mine.py has no attribute 'attention'"),
        (["mine.py:right", "--dtype", "float8"], "--dtype: 'float8' is unknown"),
        (["mine.py:right", "--junitxml", "/proc/no/junit.xml"], "proc cannot be written to"),
        (["mine.py:right", "--no-such-option"], "No such option"),
        (["case", "b1 zzz", "mine.py:right"], "--case: the word 'zzz' is unknown"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_error_on_the_command_line(project: Path, words: list[str], says: str) -> None:
    """The exit status is that of pytest, and one line says what is wrong."""
    status, said = run(project, *words)
    assert status == 4, said
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--help"], ""),
        (["verify", "--help"], ""),
        (["list"], ""),
        (["report", "none.jsonl", "-o", "site"], "flashproof report: none.jsonl: no such file\n"),
        (
            ["report", ".", "-o", "site"],
            "flashproof report: .: is a folder that holds no records (*.jsonl, *.jsonl.gz)\n",
        ),
        (["mine.py:f", "--dtype", "int8"], "ERROR: --dtype: 'int8' is unknown; give float32, float16, bfloat16\n"),
        (["mine.py:f", "--device", "gpu"], "ERROR: --device: 'gpu' is unknown; give cpu or cuda\n"),
    ],
)
def test_nothing_is_imported_that_takes_long(tmp_path: Path, words: list[str], error: str) -> None:
    """Help, the list, the report and errors on the command line import neither PyTorch nor pytest."""
    program = (
        "import sys; from flashproof.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: print('status', end.code)\n"
        "print({'torch', 'triton', 'pytest', 'hypothesis'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.stdout.endswith("\nset()\n"), ended.stdout + ended.stderr
    assert ended.stderr == error
    assert f"status {4 if error else 0}" in ended.stdout


def test_a_report_takes_folders(tmp_path: Path) -> None:
    """The report reads all record files below a folder, compressed or not, and each file that is named."""
    names = ["a.jsonl", "of/b.jsonl.gz", "of/index.html"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    named = tmp_path / "of" / "index.html"
    assert files_of([named, tmp_path]) == [named, tmp_path / "a.jsonl", tmp_path / "of" / "b.jsonl.gz"]


def test_the_list_says_what_the_kernels_say() -> None:
    """The list says where each kernel of the catalogue runs, with its summary, and does not import the kernel."""
    devices: tuple[Device, ...] = ("cpu", "cuda")
    for name in CATALOGUE:
        try:
            implementation = loading.load(name)
        except ImportError:  # Triton or another backend is not installed
            assert all(listing.missing(name, device) for device in devices)
            continue
        assert listing.summary(name) == implementation.summary
        for device in devices:
            runs = device in implementation.supports.devices and implementation.missing(device) is None
            runs = runs and (device == "cpu" or torch.cuda.is_available())
            assert (listing.missing(name, device) is None) == runs, (name, device)


def test_a_quick_run_takes_the_first_cases_of_checks() -> None:
    """Every check that a quick run names exists, and has cases among the first rows of the covering array."""
    kernel = loading.load("tiled.fa2")
    space = space_of(kernel, effort="quick")
    assert len(space.array) < 100
    for name in quick.CHECKS:
        assert any(checks()[name].cases(kernel, dtype, space) for dtype in DTYPES), name
