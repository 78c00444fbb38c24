"""Reads the workflows and the action, and runs a step of them here as GitHub does."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
ACTION = ROOT / "action.yml"
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]  # what `shell: bash` means
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a YAML file. YAML reads the key `on` of a workflow as the value true."""
    content: dict[Any, Any] = yaml.safe_load(path.read_text())
    return {("on" if key is True else str(key)): value for key, value in content.items()}


def steps(path: Path) -> list[dict[str, Any]]:
    """Returns the steps of all jobs of a workflow, or those of the action."""
    content = read(path)
    if "runs" in content:
        return list(content["runs"]["steps"])
    return [step for job in content["jobs"].values() for step in job.get("steps", [])]


def step(path: Path, name: str) -> dict[str, Any]:
    """Returns the step with a name."""
    return next(step for step in steps(path) if step.get("name") == name)


def run(
    script: str, folder: Path, runner: Path, variables: dict[str, str], first: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a folder of the workspace, with the variables that GitHub sets.

    runner: a folder for the files of the runner.
    first: a folder whose programs come before all others.
    """
    (runner / "temp").mkdir(parents=True, exist_ok=True)
    programs = [str(first)] * (first is not None) + [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    environment = {
        "PATH": os.pathsep.join(programs),
        "HOME": str(runner),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CI": "true",
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(runner / "output"),
        "GITHUB_STEP_SUMMARY": str(runner / "summary.md"),
        "RUNNER_TEMP": str(runner / "temp"),
    }
    return subprocess.run(
        [*SHELL, script],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def outputs(runner: Path) -> dict[str, str]:
    """Returns the outputs that the scripts of a runner wrote."""
    file = runner / "output"
    return dict(line.split("=", 1) for line in file.read_text().splitlines()) if file.exists() else {}


class Runner:
    """Runs the steps of the action that have a script, with some inputs. Its outputs are those of the steps.

    workspace: the repository of the user.
    files: a folder for the files of the runner.
    """

    def __init__(self, workspace: Path, files: Path, **inputs: str) -> None:
        defaults = {name: str(given.get("default", "")) for name, given in read(ACTION)["inputs"].items()}
        self.workspace, self.files = workspace, files
        self.inputs = defaults | {name.replace("_", "-"): value for name, value in inputs.items()}
        self.said: dict[str, str] = {}
        self.status: dict[str, int] = {}

    def run(self, *names: str) -> "Runner":
        """Runs steps by their names."""
        for name in names:
            found = step(ACTION, name)
            variables = {key: self._evaluated(value) for key, value in found["env"].items()}
            folder = self.workspace / self._evaluated(found["working-directory"])
            ended = run(found["run"], folder, self.files, variables | {"GITHUB_WORKSPACE": str(self.workspace)})
            self.said[name], self.status[name] = ended.stdout + ended.stderr, ended.returncode
        return self

    @property
    def report(self) -> Path:
        """The folder with the report."""
        return Path(outputs(self.files)["folder"])

    @property
    def summary(self) -> str:
        """The summary in Markdown."""
        return (self.files / "summary.md").read_text()

    def _evaluated(self, text: str) -> str:
        """A value in which the expressions are replaced. Nothing is uploaded, so an upload has no outputs."""
        values = {f"inputs.{name}": value for name, value in self.inputs.items()}
        values |= {f"steps.verify.outputs.{name}": value for name, value in outputs(self.files).items()}
        values |= {"steps.upload.outputs.artifact-url": "https://github.com/me/mine/actions/runs/1/artifacts/2"}
        return EXPRESSION.sub(lambda match: values[match[1]], text)
