"""The workflows and the action agree with each other and with the project, and no input becomes part of a script."""

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flashproof.reports import history
from flashproof.reports.record import read as read_records
from flashproof.tests.suite.ci.workflows import ACTION, FOLDER, ROOT, WORKFLOWS, read, run, step, steps
from flashproof.tests.suite.reports import building

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [*WORKFLOWS, ACTION, *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))]
SCRIPTS = [(path, found["run"]) for path in (*WORKFLOWS, ACTION) for found in steps(path) if "run" in found]


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint() -> None:
    ended = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lines_are_short(path: Path) -> None:
    assert read(path)
    assert not [line for line in path.read_text().splitlines() if len(line) > 120]


@pytest.mark.parametrize(("path", "script"), SCRIPTS)
def test_scripts(path: Path, script: str) -> None:
    """A script is Bash. It takes values from its environment, so a value cannot become a part of it."""
    assert "${{" not in script
    ended = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_summary_and_report_are_made_in_any_case() -> None:
    """Also after a failure, and after the end of the time of a job. Nothing hides the status of flashproof."""
    for name in ("Upload", "Summarise"):
        assert step(ACTION, name)["if"].startswith("${{ always() && ")
    assert not [found for found in steps(ACTION) if "continue-on-error" in found]


def test_the_workflow_for_others_passes_its_inputs_to_the_action() -> None:
    workflow = read(FOLDER / "verify.yml")
    inputs = workflow["on"]["workflow_call"]["inputs"]
    (given,) = [found for found in steps(FOLDER / "verify.yml") if found["uses"].startswith("flashproof/")]
    assert given["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in given["with"]}
    assert set(inputs) == set(given["with"]) | {"runner", "timeout-minutes"}
    action = read(ACTION)["inputs"]
    assert set(given["with"]) <= set(action)
    for name in given["with"]:
        assert inputs[name].get("default") == action[name].get("default"), name


def test_versions_that_others_name() -> None:
    """The workflow for others, and the documents, name the action by the minor version of the project."""
    minor = "v" + ".".join(PROJECT["version"].split(".")[:2])
    for path in (FOLDER / "verify.yml", ROOT / "docs" / "ci.md"):
        assert set(re.findall(r"flashproof/flashproof[\w/.-]*@(\S+)", path.read_text())) == {minor}, path
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_of_the_project_runs_the_script_on_every_python() -> None:
    job = read(FOLDER / "ci.yml")["jobs"]["cpu"]
    assert ".ci/run" in [found.get("run") for found in job["steps"]]
    found = [re.search(r":: (3\.\d+)$", classifier) for classifier in PROJECT["classifiers"]]
    assert job["strategy"]["matrix"]["python"] == [match[1] for match in found if match]


@pytest.mark.parametrize(("tag", "status"), [(f"v{PROJECT['version']}", 0), (PROJECT["version"], 1), ("v9.9.9", 1)])
def test_a_release_has_the_tag_of_its_version(tmp_path: Path, tag: str, status: int) -> None:
    ended = run(step(FOLDER / "release.yml", "The tag is the version")["run"], ROOT, tmp_path, {"TAG": tag})
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.startswith("::error file=pyproject.toml::") == bool(status)


@pytest.mark.parametrize("exists", [True, False])
def test_a_release_moves_the_tag_of_the_minor_version(tmp_path: Path, exists: bool) -> None:
    """If there is no such tag yet, it is made."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gh").write_text(f'#!/bin/sh\necho "$@"\n[ "$3" = POST ] || {str(exists).lower()}\n')
    (programs / "gh").chmod(0o755)
    given = {"TAG": "v0.1.2", "GITHUB_REPOSITORY": "flashproof/flashproof", "GITHUB_SHA": "0123"}
    script = step(FOLDER / "release.yml", "Move the tag of the minor version")["run"]
    ended = run(script, tmp_path, tmp_path / "runner", given, programs)
    moved = "api --method PATCH repos/flashproof/flashproof/git/refs/tags/v0.1 -f sha=0123 -F force=true"
    made = "api --method POST repos/flashproof/flashproof/git/refs -f ref=refs/tags/v0.1 -f sha=0123"
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == ([moved] if exists else [moved, made])


@pytest.mark.parametrize(("published", "status"), [("", 0), ("the same", 0), ("better", 1)])
def test_the_report_is_not_published_if_a_rho_rose(tmp_path: Path, published: str, status: int) -> None:
    """The step takes the history from the site, and ends the job if the run is worse than the last one there."""
    records = tmp_path / "reports" / "runs" / "latest.jsonl"
    building.write(records, [building.environment(), building.judgement(rho=0.8)])
    programs, venv = tmp_path / "bin", tmp_path / ".venv" / "bin"
    for folder in (programs, venv):
        folder.mkdir(parents=True)
    (venv / "flashproof").symlink_to(Path(sys.executable).parent / "flashproof")
    if published:
        older = building.judgement(rho=0.8 if published == "the same" else 0.5, run="older")
        before = building.write(tmp_path / "older.jsonl", [building.environment("older"), older])
        assert history.tell([before], tmp_path / "published.json") == 0
    (tmp_path / "reports" / "site").mkdir()
    (programs / "curl").write_text(f'#!/bin/sh\necho "$@" > asked\ncp {tmp_path}/published.json "$7"\n')
    (programs / "curl").chmod(0o755)
    given = {"GITHUB_REPOSITORY": "me/kernels", "GITHUB_REPOSITORY_OWNER": "me", "RISE": "0.1"}
    script = step(FOLDER / "pages.yml", "Compare with the last published run")["run"]
    ended = run(script, tmp_path, tmp_path / "runner", given, programs)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert "https://me.github.io/kernels/history.json" in (tmp_path / "asked").read_text()
    runs = history.load(tmp_path / "reports" / "site" / "history.json").runs
    assert len(runs) == (2 if published == "the same" else 1)
    assert "AMD EPYC, 2 cores" in (tmp_path / "runner" / "summary.md").read_text()


# ------------------------------------------------------------------------------- the other steps, with stub programs


@dataclass
class Machine:
    """A folder that stands for a checkout on a runner. A stub in place of each program notes how it is called."""

    folder: Path

    @property
    def programs(self) -> Path:
        """The folder of the stubs that come before all other programs."""
        return self.folder / "bin"

    def stub(self, name: str, script: str = "", *, of_venv: bool = False) -> None:
        """Makes a program that notes its name and its arguments, and then runs a script."""
        path = (self.folder / ".venv" / "bin" if of_venv else self.programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.folder}/called\n{script}\n')
        path.chmod(0o755)

    def run(self, script: str, **variables: str) -> tuple[int, list[str]]:
        """Returns the exit status of a script, and the calls of the stubs."""
        called = self.folder / "called"
        called.unlink(missing_ok=True)
        self.programs.mkdir(exist_ok=True)
        ended = run(script, self.folder, self.folder / "runner", variables, self.programs)
        return ended.returncode, called.read_text().splitlines() if called.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def scripts(name: str) -> list[str]:
    """The scripts of the steps of a workflow that have no name of their own."""
    return [found["run"] for found in steps(FOLDER / f"{name}.yml") if "run" in found and "name" not in found]


@pytest.mark.parametrize("linted", [True, False])
def test_ci_runs_the_lints_and_then_the_suite(machine: Machine, linted: bool) -> None:
    """The suite does not run if a lint fails. Nothing is installed where there is a browser."""
    assert scripts("ci") == [".ci/run"]
    (machine.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", machine.folder / ".ci" / "run")
    machine.stub("make", f'[ "$1" = test ] || {str(linted).lower()}')
    machine.stub("chromium")
    machine.stub("apt-get")
    assert machine.run(".ci/run") == ((0, ["make lint", "make test"]) if linted else (1, ["make lint"]))


@pytest.mark.parametrize("status", [0, 1])
def test_a_gpu_run_is_that_of_pytest(machine: Machine, status: int) -> None:
    """It ends with the status of pytest, and its records are those that the next step uploads."""
    setting_up, verifying = scripts("gpu")
    machine.stub("make")
    machine.stub("pytest", f"exit {status}", of_venv=True)
    assert machine.run(setting_up) == (0, ["make venv"])
    ended, (called,) = machine.run(verifying)
    assert ended == status
    program, *words = called.split()
    assert (program, words[:2]) == ("pytest", ["-m", "gpu"])
    upload = next(found for found in steps(FOLDER / "gpu.yml") if "upload-artifact" in found.get("uses", ""))
    assert words[words.index("--records") + 1] == upload["with"]["path"]


def test_a_gpu_run_needs_a_device(machine: Machine) -> None:
    (machine.folder / ".venv" / "bin").mkdir(parents=True)
    (machine.folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    status, _ = machine.run(step(FOLDER / "gpu.yml", "A device is there")["run"])
    assert (status == 0) == torch.cuda.is_available()


@pytest.mark.parametrize("run_found", [True, False])
@pytest.mark.parametrize("downloaded", [True, False])
def test_the_report_gets_the_records_of_the_last_gpu_run(machine: Machine, run_found: bool, downloaded: bool) -> None:
    """The report of the CPU is published in any case."""
    machine.stub("gh", f'[ "$2" = download ] && exec {str(downloaded).lower()}\n{"echo 17" if run_found else "true"}')
    machine.stub("flashproof", of_venv=True)
    (making,) = scripts("pages")
    machine.stub("make")
    assert machine.run(making) == (0, ["make report"])
    status, called = machine.run(step(FOLDER / "pages.yml", "Add the last GPU run")["run"])
    assert status == 0
    assert called[0].startswith("gh run list --workflow gpu.yml --branch main --status success --limit 1 ")
    asked = ["gh run download 17 --name records-gpu --dir reports/runs"] * run_found
    merged = ["flashproof report reports/records reports/runs -o reports/site"] * (run_found and downloaded)
    assert called[1:] == asked + merged


def test_published_records_are_packed(machine: Machine) -> None:
    """The package is one that `flashproof check` reads."""
    building.write(machine.folder / "reports" / "runs" / "latest.jsonl", [building.environment(), building.judgement()])
    (machine.folder / "reports" / "site").mkdir()
    (machine.folder / ".venv" / "bin").mkdir(parents=True)
    (machine.folder / ".venv" / "bin" / "flashproof").symlink_to(Path(sys.executable).parent / "flashproof")
    status, _ = machine.run(step(FOLDER / "pages.yml", "Pack the records")["run"])
    assert status == 0
    packed = read_records(machine.folder / "reports" / "site" / "records.jsonl.gz")
    assert building.judgement() in list(packed)


def test_a_release_is_built_by_the_front_end(machine: Machine) -> None:
    machine.stub("python")
    assert machine.run(step(FOLDER / "release.yml", "Build")["run"]) == (
        0,
        ["python -m pip install build", "python -m build"],
    )


def test_every_script_is_run_here() -> None:
    """Each step of a workflow or of the action with a script is named in a test, or is one of the steps above."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
    for path in (*WORKFLOWS, ACTION):
        for found in steps(path):
            if "run" in found:
                name = found.get("name")
                assert f'"{name}"' in text if name else f'scripts("{path.stem}")' in text, (path, found)
