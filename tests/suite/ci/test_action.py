"""The action: it verifies a right kernel and a wrong one, and tells GitHub what it found."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from flashproof.reports.record import Claim, read
from flashproof.tests.suite.ci.workflows import ACTION, ROOT, Runner, run, step

KERNELS = """
import math

import torch


def right(query, key, value, *, is_causal=False):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def wrong(query, key, value, *, is_causal=False):
    scale = 1.001 / math.sqrt(query.shape[-1])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
"""
LINE = "b1 h1 q129 k129 d64 float32 full normal x0.015625 seed2"
FEW = f"""-n 0 --case '{LINE}' -k "forward or backward" """
LIMIT = 1024 * 1024  # bytes that GitHub takes from a step


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two kernels in a folder of their own."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "mine.py").write_text(KERNELS)
    return folder


def verify(workspace: Path, files: Path, target: str, options: str) -> Runner:
    """Runs the steps of the action in turn. As on GitHub, the last one runs also if `Verify` failed."""
    inputs = {"target": target, "options": options, "working_directory": "kernels", "install_flashproof": "false"}
    return Runner(workspace, files, **inputs).run("Install", "Verify", "Summarise")


@pytest.fixture(scope="module")
def failed(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The action on a kernel with 0.1 % on its scale."""
    return verify(workspace, tmp_path_factory.mktemp("failed"), "mine.py:wrong", FEW)


def test_a_right_kernel(workspace: Path, tmp_path: Path) -> None:
    runner = verify(workspace, tmp_path, "mine.py:right", FEW)
    assert runner.status == {"Install": 0, "Verify": 0, "Summarise": 0}, runner.said
    assert runner.summary.startswith("## flashproof: passed\n")
    assert "Failures" not in runner.summary
    assert "::error" not in runner.said["Summarise"]


def test_the_status_of_a_wrong_kernel_is_that_of_flashproof(failed: Runner) -> None:
    assert failed.status == {"Install": 0, "Verify": 1, "Summarise": 0}, failed.said
    assert "status=1\n" in (failed.files / "output").read_text()


def test_the_summary_of_a_wrong_kernel(failed: Runner) -> None:
    """The verdict comes first, then the cause, then the worst failure with the command that repeats it."""
    lines = failed.summary.splitlines()
    (verdict,) = {one.verdict for one in read(failed.report / "runs" / "verify.jsonl") if isinstance(one, Claim)}
    assert verdict in failed.said["Verify"]
    assert lines[0] == "## flashproof: failed"
    assert lines[2] == f"**{verdict}**"
    causes, *blocks = re.findall(r"```text\n(.*?)\n```", failed.summary, re.DOTALL)
    assert causes.splitlines()[1].startswith("  this is the answer with a scale of 0.1251, not 0.125")
    figures = [float(found) for block in blocks for found in re.findall(r"  rho (\S+)", block)]
    assert figures == sorted(figures, reverse=True)
    assert figures[0] > 10
    assert re.search(r"\nagain: pytest --impl mine.py:wrong --case '.*'\n", blocks[0])
    assert f"again: pytest --impl mine.py:wrong --case '{LINE}'" in failed.summary
    assert "this is the answer with a scale of 0.1251, not 0.125" in failed.summary
    assert len(failed.summary.encode()) < LIMIT


def test_the_annotation_of_a_wrong_kernel(failed: Runner) -> None:
    """It names the file from the root of the repository, and the line of the function."""
    line = KERNELS.splitlines().index("def wrong(query, key, value, *, is_causal=False):") + 1
    (annotation,) = [words for words in failed.said["Summarise"].splitlines() if words.startswith("::error")]
    assert annotation.startswith(f"::error file=kernels/mine.py,line={line},title=flashproof%3A ")
    assert "%0Aagain: pytest --impl mine.py:wrong --case" in annotation


def test_the_sarif_of_a_wrong_kernel(failed: Runner) -> None:
    """It has the place of the annotation, and a rule for each check that failed."""
    (run,) = json.loads((failed.report / "flashproof.sarif").read_text())["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert "gradients/backward" in rules
    assert run["invocations"] == [{"executionSuccessful": True}]
    line = KERNELS.splitlines().index("def wrong(query, key, value, *, is_causal=False):") + 1
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "kernels/mine.py"
        assert place["region"] == {"startLine": line}
        assert "again: pytest --impl mine.py:wrong" in result["message"]["text"]


def test_the_files_of_a_wrong_kernel(failed: Runner) -> None:
    """The folder that is uploaded holds the report, the records, the JUnit XML and the log."""
    assert {path.name for path in failed.report.iterdir()} >= {"index.html", "runs", "junit.xml", "log.txt"}
    suite = ET.parse(failed.report / "junit.xml").getroot()[0]
    assert int(suite.attrib["failures"]) == sum(test.find("failure") is not None for test in suite) > 0
    assert "rho" in (suite.findtext("testcase/failure") or "")
    assert suite.find("testcase/properties") is None, "the records stand in a file of their own"


def test_an_error_on_the_command_line(workspace: Path, tmp_path: Path) -> None:
    """There are no records, so the summary shows what flashproof printed."""
    runner = verify(workspace, tmp_path, "mine.py:right", "--dtype float8")
    assert runner.status == {"Install": 0, "Verify": 4, "Summarise": 0}, runner.said
    assert runner.summary.startswith("## flashproof: no verdict\n")
    assert "ERROR: --dtype: 'float8' is unknown" in runner.summary
    assert "::error title=flashproof::no verdict" in runner.said["Summarise"]


@pytest.mark.parametrize("words", ["$(touch run)", "`touch run`", "; touch run", "&& touch run", "* ~ $HOME"])
def test_inputs_are_words_and_not_code(workspace: Path, tmp_path: Path, words: str) -> None:
    runner = Runner(workspace, tmp_path, target=words, options=f"--dtype 'a  {words}'").run("Verify")
    assert runner.status == {"Verify": 4}, runner.said
    assert repr(f"a  {words}") in runner.said["Verify"]
    assert not list(workspace.rglob("run"))


def test_quotes_that_do_not_match(workspace: Path, tmp_path: Path) -> None:
    runner = Runner(workspace, tmp_path, target="mine.py:right", options="--case 'b1 h1").run("Verify", "Summarise")
    assert runner.status["Verify"] != 0
    assert "unmatched single quote" in runner.said["Verify"]
    assert runner.summary.startswith("## flashproof: no verdict\n")


def test_installing(tmp_path: Path) -> None:
    """The command of the user runs first. pip then installs flashproof from the folder of the action."""
    programs, runner = tmp_path / "bin", tmp_path / "runner"
    programs.mkdir()
    (programs / "python").write_text('#!/bin/sh\necho "python $@"\n')
    (programs / "python").chmod(0o755)
    script = step(ACTION, "Install")["run"]

    def said(install: str, own: str) -> list[str]:
        ended = run(script, tmp_path, runner, {"INSTALL": install, "INSTALL_FLASHPROOF": own}, programs)
        return [f"status {ended.returncode}", *ended.stdout.splitlines()]

    pip = f"python -m pip install {ROOT}[report]"
    assert said("", "true") == ["status 0", pip]
    assert said("echo one\necho two", "true") == ["status 0", "one", "two", pip]
    assert said("echo one && false\necho two", "true") == ["status 1", "one"]
    assert said("", "false") == ["status 0"]
