"""The workflows and the action agree with each other and with the project, and no input becomes part of a script."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flashproof.tests.suite.ci.workflows import ACTION, FOLDER, ROOT, WORKFLOWS, read, run, step, steps

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
