"""Tests the summary and the annotations for GitHub. The records are made by hand."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashproof.reports import github
from flashproof.reports.github import Found, annotations, collect, summary
from flashproof.reports.record import Absence, Judgement, Record
from flashproof.tests.suite.reports import building

NAME = "mine.py:attention"
VERDICT = "failed: 117 checks: 115 passed, 2 failed"
SOURCE = """import torch


class Kernel:
    def forward(self):
        pass


attention = torch.nn.functional.scaled_dot_product_attention


@torch.compile
def compiled(query, key, value):
    return attention(query, key, value)
"""


def failure(rho: float | None, **fields: Any) -> Judgement:
    given: dict[str, Any] = {"implementation": NAME, "status": "failed", "rho": rho}
    given |= {"worst": building.worst(rho)} if rho else {"tensor": None}
    return building.judgement(**(given | fields))


def found(tmp_path: Path, *records: Record, verdict: str = VERDICT) -> Found:
    """Writes records to a file, and reads it."""
    ends = [building.claim(NAME, verdict=verdict)] if verdict else []
    return collect([building.write(tmp_path / "run.jsonl", [building.environment(), *records, *ends])])


def test_the_worst_comes_first(tmp_path: Path) -> None:
    """A kernel that brings no answer is worse than one with a large error."""
    crash = failure(None, check="contract/threads", message="the process died of signal 11")
    of_run = found(tmp_path, failure(3.0), failure(7.0, dtype="float16"), failure(5.0, tensor="dq"), crash)
    text = summary(of_run)
    head = ["## flashproof: failed", f"**{VERDICT}**", "```text\nmine.py:attention is wrong: "]
    assert text.startswith("\n\n".join(head))
    text = text[text.index("### Failures, the worst first\n\n```text\n") :]
    places = [text.index(words) for words in ("signal 11", "rho 7.0", "rho 5.0", "### The largest rho")]
    assert places == sorted(places)
    assert "| `accuracy/forward` | float32 | cpu | dq rho 5.0 | 2 |" in text
    assert "| `mine.py:attention` | float32 | float16 |" in text


def test_the_first_failure_of_a_check_says_more(tmp_path: Path) -> None:
    """Only the first failure says which question the answer is for. Its words stand below the worst failure."""
    first = failure(2.0, message="this is the answer without the causal mask")
    wide = failure(None, tensor="dv", check="properties/spread", rms=3.94, message="the mean square is too large")
    of_run = found(tmp_path, wide, first, failure(7.0, tensor="dq"))
    text = summary(of_run).partition("### Failures, the worst first")[2]
    assert (
        "\nand 1 more failure of this check; the first one says: this is the answer without the causal mask\n" in text
    )
    assert text.index("rho 7.0") < text.index("the mean square") < text.index("| `accuracy/forward` |")
    assert "| `properties/spread` | float32 | cpu | dv rms 3.9 | 1 | the mean square is too large |" in text
    assert "of this check; the first one says: " in next(annotations(of_run))


def test_a_run_that_verifies(tmp_path: Path) -> None:
    passed = building.judgement(NAME, rho=0.99999)
    text = summary(found(tmp_path, passed, verdict="verified: 112 checks: 112 passed"), report="https://x/1")
    assert text.startswith("## flashproof: verified\n")
    assert "Failures" not in text
    assert "| out | 0.99999 |" in text
    assert text.endswith("](https://x/1)\n")
    assert not list(annotations(found(tmp_path, passed)))


def test_what_was_not_verified(tmp_path: Path) -> None:
    refused = building.judgement(NAME, status="refused", dtype="float16", message="ValueError: no\nhalves", rho=None)
    known = building.judgement(NAME, status="known defect", link=building.ISSUE)
    absent = Absence(
        run=building.CPU,
        implementation=NAME,
        device="cuda",
        reason="not possible here",
        message="CUDA: no device",
    )
    lines = summary(found(tmp_path, refused, refused, known, absent)).splitlines()
    assert "- `mine.py:attention` refused float16: ValueError: no halves (2 times)" in lines
    assert f"- `mine.py:attention` has a known defect: `accuracy/forward`, float32 ({building.ISSUE})" in lines
    assert "- `mine.py:attention` cannot run here, on cuda: CUDA: no device" in lines


def test_a_run_that_died(tmp_path: Path) -> None:
    """The summary shows what the run found, and the end of its log."""
    of_run = found(tmp_path, failure(3.0), verdict="")
    text = summary(of_run, log="\n".join(f"line {number}" for number in range(100)))
    assert text.startswith("## flashproof: no verdict\n")
    assert "line 99" in text
    assert "line 79" not in text
    assert "rho 3.0" in text
    first, second = annotations(of_run, "line 1\nline 2\n", tmp_path)
    assert first == "::error title=flashproof::no verdict: line 2"
    assert second.startswith("::error title=flashproof%3A out%2C float32%2C rho 3.0::mine.py:attention")


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    path = building.write(tmp_path / "run.jsonl", [building.environment(), failure(3.0)])
    path.write_text(path.read_text() + '{"type": "unknown"}\n{}\n')
    text = summary(collect([path, tmp_path / "missing.jsonl"]))
    assert "run.jsonl, line 3: not a record" in text
    assert "missing.jsonl: no such file" in text
    assert "rho 3.0" in text


def test_foreign_words_are_shown_as_they_are(tmp_path: Path) -> None:
    """A name or a message never becomes markup, ends a block, or becomes a command of the workflow."""
    name = "a`b|c.py:<img src=x>"
    message = "```\n# title\n<script>\x1b[31m\n::error::no 100 %"
    of_run = found(tmp_path, failure(2.0, implementation=name, message=message))
    text = summary(of_run)
    block = text[text.index("````text\n") :].split("\n````\n")[0]
    assert "```\n# title\n<script>[31m\n::error::no 100 %" in block
    assert "| ``a`b\\|c.py:<img src=x>`` | float32 |" in text
    assert "| \\`\\`\\`; \\# title; \\<script\\>[31m; ::error::no 100 % |".replace("[", "\\[") in text
    (line,) = annotations(of_run)
    assert "\n" not in line
    assert "%0A::error::no 100 %25%0A" in line


def test_a_summary_has_room(tmp_path: Path) -> None:
    """A summary stays below what GitHub takes, however much fails, and says that there is more."""
    long = "é" * 100_000
    many = [
        failure(2.0 + number, check=f"accuracy/{number}", implementation=f"{long}{number}", message=long)
        for number in range(60)
    ]
    of_run = found(tmp_path, *many)
    text = summary(of_run, log=long)
    assert len(text.encode()) <= github.LIMIT
    assert "and 10 more failed checks" in text
    assert len(list(annotations(of_run))) < github.ANNOTATIONS


def test_a_summary_is_cut_between_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github, "LIMIT", 600)
    text = summary(found(tmp_path, failure(3.0), failure(2.0, dtype="float16")))
    assert len(text.encode()) <= 600
    assert text.endswith("\n\nThe summary is cut here. The records hold the rest.\n")
    assert text.count("```") % 2 == 0


@pytest.mark.parametrize(
    ("attribute", "line"), [("Kernel.forward", 5), ("attention", 9), ("compiled", 13), ("missing", 1), ("Kernel.no", 4)]
)
def test_the_line_of_a_kernel(tmp_path: Path, attribute: str, line: int) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    of_run = found(tmp_path, failure(2.0, implementation=f"{tmp_path}/mine.py:{attribute}"))
    (annotation,) = annotations(of_run, workspace=tmp_path)
    assert annotation.startswith(f"::error file=mine.py,line={line},title=")


@pytest.mark.parametrize("place", ["kernels/mine.py", "kernels/mine/__init__.py", "src/kernels/mine.py"])
def test_the_file_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    (annotation,) = annotations(found(tmp_path, failure(2.0, implementation="kernels.mine:compiled")))
    assert annotation.startswith(f"::error file={place},line=13,title=")


def test_the_line_that_a_message_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash is shown at its line. All failures of one line share one annotation, about the worst of them."""
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    died = "the process died of signal 11 (segmentation fault), at mine.py, line 14, in compiled"
    raised = "forward raised KeyError: 'b' (mine.py:14)"
    elsewhere = "forward raised KeyError: 'b' (/elsewhere/mine.py:3)"
    records = [failure(None, check=f"contract/{number}", message=said) for number, said in enumerate((died, raised))]
    records += [failure(2.0, message=elsewhere), failure(3.0, dtype="float16")]
    first, second = annotations(found(tmp_path, *records), workspace=tmp_path)
    assert first.startswith("::error file=mine.py,line=14,title=flashproof%3A contract/0%2C float32::")
    assert first.endswith("%0Aand 1 more failed check")
    assert second.startswith("::error file=mine.py,line=9,title=flashproof%3A out%2C float16%2C rho 3.0::")


def test_the_command(tmp_path: Path) -> None:
    """It appends to the summary, prints the annotations, and does not load PyTorch."""
    path = building.write(tmp_path / "run.jsonl", [building.environment(), failure(3.0)])
    code = "import sys; from flashproof.reports.github import main; main(); sys.exit('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), "--summary", str(tmp_path / "summary.md")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("::error ") == 2
    assert (tmp_path / "summary.md").read_text() == summary(collect([path]))
