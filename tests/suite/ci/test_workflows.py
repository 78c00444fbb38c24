"""The workflows and the action agree with each other and with the project, and no input becomes part of a script."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flashproof.reports import history
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
