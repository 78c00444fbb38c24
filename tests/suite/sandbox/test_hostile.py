"""Kernels that misbehave, given to the command line as external kernels.

The run reports the fault of each kernel and goes on. The kernels without a fault pass.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from flashproof.cases import Case
from flashproof.reports import wording
from flashproof.reports.record import Judgement, Status, read
from flashproof.sandbox import journal

# Checks do not report by `assert`, so pytest need not rewrite assertions.
QUICK = ("-p", "no:cacheprovider", "--assert=plain")
ROOT = Path(__file__).resolve().parents[3]
KERNELS = "tests/suite/sandbox/kernels.py"
CALLS = "tests/contract"
CHECKS = ("-k", "test_call.py or after_another or renewed or readdressed")
PLAIN, MASKED = "b2 h2 q33 k33 d16 float32", "b1 h1 q33 k33 d16 float32 causal scale0.3"
TIME_LIMIT = 10

# For each kernel, the words that one of its failures must contain.
SAID: dict[str, str] = {
    "mutates_query": "the call changed its query",
    "mutates_one_element_of_key": "the call changed its key",
    "mutates_output_gradient": "the call changed its output gradient",
    "writes_before_value": r"the call wrote to memory around its value, which it does not own: "
    r"first at element -1, counted from",
    "writes_behind_key": r"the call wrote to memory around its key, which it does not own: "
    r"first at element \+2112, counted from",
    "returns_a_view": "out shares memory with an input",
    "wrong_dtype": r"out has dtype torch\.float64, not torch\.float32",
    "wrong_shape": r"out has shape \[2, 33, 2, 16\], not \[2, 2, 33, 16\]",
    "wrong_device": "out is on meta, not on cpu",
    "returns_a_list": "out is list, not a tensor",
    "reuses_its_output": "checked after another call",
    "uninitialised": r"out  float32  rho \d\.\de4\d",
    "writes_past_its_output": r"the process died of signal (6 \(aborted\)|11 \(segmentation fault\)).* "
    r"in memory that it had damaged",
    "caches_by_shape": "after a call of the same shape with other options|checked after another call",
    "caches_by_pointer": r"after (a call|\d calls) with other (values in the same|tensors at the same addresses)",
    "keeps_strides": "after a call of the same shape with other options|checked after another call",
    "keeps_batch": "after a call with another batch size",
    "wrong_in_the_second_call": "wrong in 12 of 24 calls with one input",
    "wrong_in_one_of_twenty": "wrong in [12] of 24 calls with one input",
    "right_in_one_of_twenty": "wrong in 2[23] of 24 calls with one input",
    "refuses_the_second_call": "refused a case that it had answered before: RuntimeError: already in use",
    "loses_its_gradient": "the output carries no gradient, but that of another call did",
    "raises": "forward raised KeyError: 'b'",
    "hangs": r"no answer within 10 s .*, at .*kernels\.py, line \d+, in _wait_for_ever",
    "hangs_in_c": r"no answer within 10 s .*, at .*kernels\.py, line \d+, in <lambda>",
    "allocates_without_end": "forward raised RuntimeError: .*can't allocate memory",
    "segfaults": r"the process died of signal 11 \(segmentation fault\), at .*kernels\.py, line \d+, in <lambda>",
    "segfaults_on_odd_lengths": r"the process died of signal 11 \(segmentation fault\), at .*kernels\.py, line \d+, "
    r"in segfaults_on_odd_lengths",
    "aborts": r"the process died of signal 6 \(aborted\), at .*kernels\.py",
    "exits": "forward raised SystemExit: 3",
    "raises_system_exit": "forward raised SystemExit: 3",
    "ends_the_process": "the process ended with status 0 in the call",
    "interrupts": "forward raised KeyboardInterrupt",
    "closes_all_files": "the process closed the files that it was given",
    "forks": "the call forked its process, and both processes returned from it",
    "sets_default_dtype": r"the call changed the default dtype \(from torch\.float32 to torch\.float64\)",
    "sets_threads": r"the call changed the number of threads \(from 1 to 7\)",
    "sets_grad_mode": r"the call changed grad mode \(from True to False\)",
    "sets_seed": r"the call changed the random seed \(from \d+ to 0\)",
    "sets_deterministic": "the call changed deterministic mode",
    "filters_warnings": "the call changed the warnings filters",
    "flushes_subnormals": "the call changed the treatment of subnormal numbers",
    "changes_directory": r"the call changed the working directory \(from .* to /\)",
    "closes_stdout": "the call changed stdout",
    "closes_its_file": "the call changed stdout",
}
SAID_MASKED = {
    "ignores_scale": "this is the answer with the default scale",
    "ignores_causal": "this is the answer without the causal mask",
}
SAID_ON_A_GPU = {
    "leaves_a_cuda_error": "forward raised .*CUDA error",
    "declines_after_a_cuda_error": "forward raised RuntimeError: Expected execute.plan. to be true, but got false .*; "
    "the device was left in error",
    "works_in_another_stream": "called in a stream that was still filling the inputs|"
    "out was not ready when the caller's stream read it",
}
SPAWNED = ("segfaults_on_odd_lengths",)


@dataclass(frozen=True)
class Run:
    """A finished run of the command line."""

    status: int
    text: str
    judgements: list[Judgement]

    def failures(self, name: str) -> list[str]:
        """Returns the recorded failures of a kernel, as a run prints them."""
        return [
            wording.failure_block(judgement)
            for judgement in self.judgements
            if judgement.implementation == name and judgement.status == "failed"
        ]

    def statuses(self, name: str) -> list[str]:
        """Returns the check and status of each record of a kernel, for the message of a failed assertion."""
        return [f"{each.check}: {each.status}" for each in self.judgements if each.implementation == name]

    def failing_tests(self, name: str) -> list[str]:
        """Returns the tests of a kernel that pytest's summary lists as failed."""
        return re.findall(rf"^FAILED \S+\[{re.escape(name)}-\S+\]", self.text, re.MULTILINE)


def run(folder: Path, kernels: Iterable[str], case: str, checks: str, *options: str) -> Run:
    """Verifies some kernels of the file by the checks in `checks`.

    The kernels without a fault are in the middle of the list. One of them is from the catalogue.
    """
    records = folder / "records.jsonl"
    named = [f"--impl={KERNELS}:{kernel}" for kernel in kernels]
    named = [
        *named[: len(named) // 2],
        "--impl=tiled.fa2",
        *(f"--impl={kernel}" for kernel in INNOCENT[1:]),
        *named[len(named) // 2 :],
    ]
    command = [sys.executable, "-m", "pytest", checks, *named, f"--case={case}"]
    command += ["-q", "-n2", *QUICK, f"--records={records}", f"--time-limit={TIME_LIMIT}", *options]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    text = ended.stdout + ended.stderr
    assert records.exists(), text
    return Run(ended.returncode, text, [record for record in read(records) if isinstance(record, Judgement)])


def check(ended: Run, said: dict[str, str], innocent: tuple[str, ...]) -> None:
    """Asserts that each kernel failed with its own words, and that the innocent kernels passed every check."""
    assert ended.status == pytest.ExitCode.TESTS_FAILED, ended.text
    for kernel, words in said.items():
        name = f"{KERNELS}:{kernel}"
        assert any(re.search(words, block) for block in ended.failures(name)), (
            f"{kernel}: not {words!r} but {ended.failures(name)[:4]}, in {ended.statuses(name)}\n{ended.text[-4000:]}"
        )
        assert ended.failing_tests(name), f"{kernel}: recorded, but no test of it failed"
    for name in innocent:
        statuses = [judgement.status for judgement in ended.judgements if judgement.implementation == name]
        assert set(statuses) == {"passed"}, ended.failures(name)
        assert not ended.failing_tests(name)


INNOCENT = ("tiled.fa2", f"{KERNELS}:innocent", f"{KERNELS}:untidy")


def test_every_kernel_is_listed() -> None:
    """Every kernel of the file has an entry in one of the tables of expected words."""
    text = (ROOT / KERNELS).read_text()
    kernels = {
        first or second for first, second in re.findall(r"^(\w+) = after\(|^def ([a-z]\w+)\(query", text, re.MULTILINE)
    }
    assert kernels - {"attention", "innocent", "untidy"} == {*SAID, *SAID_MASKED, *SAID_ON_A_GPU}


def test_reported_as_what_it_is(tmp_path: Path) -> None:
    """All kernels run in one run, and none changes the verdict of another."""
    check(run(tmp_path, SAID, PLAIN, CALLS, *CHECKS), SAID, INNOCENT)


def test_what_was_ignored(tmp_path: Path) -> None:
    """The failure of a kernel that ignores a keyword names the other question that its answer is right for."""
    check(run(tmp_path, SAID_MASKED, MASKED, "tests/accuracy/test_forward.py"), SAID_MASKED, INNOCENT)


def test_spawned(tmp_path: Path) -> None:
    """The verdict is the same if the worker processes are spawned, as on a machine with a GPU."""
    said = {kernel: SAID[kernel] for kernel in SPAWNED}
    check(run(tmp_path, said, PLAIN, CALLS, "-k", "test_answers or test_calls_agree", "--spawn"), said, INNOCENT)


def test_of_the_catalogue(tmp_path: Path) -> None:
    """A kernel of the catalogue runs in a process of pytest-xdist.

    If it crashes, the process ends with it, but the verdicts of the other kernels do not change.
    """
    records = tmp_path / "records.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        CALLS,
        "-q",
        "-n2",
        *QUICK,
        "-p",
        "flashproof.tests.suite.sandbox.catalogued",
        f"--records={records}",
    ]
    command += [
        "--impl=crashing",
        "--impl=tiled.fa2",
        "--impl=sdpa.math",
        "--case=b1 h1 q65 k65 d16 float32",
        "-k",
        "test_answers or test_calls_agree",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    text = ended.stdout + ended.stderr
    found = Run(ended.returncode, text, [record for record in read(records) if isinstance(record, Judgement)])
    assert found.status == pytest.ExitCode.TESTS_FAILED, text
    # There is one segmentation fault in each of the two checks.
    assert len(found.failures("crashing")) == len(found.failing_tests("crashing")) == 2, text
    assert all(
        "the process died in the call" in failure and "q65 k65" in failure for failure in found.failures("crashing")
    ), text
    for name in ("tiled.fa2", "sdpa.math"):
        assert {judgement.status for judgement in found.judgements if judgement.implementation == name} == {"passed"}, (
            text
        )
        assert len({judgement.check for judgement in found.judgements if judgement.implementation == name}) == 2, text
        assert not found.failing_tests(name)


@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_that_lost_its_device_serves_no_other_check(tmp_path: Path, lost: bool) -> None:
    """If a device fails after a call, no call reports it. The worker of this device then runs no other check.

    The test replaces the function that asks the device, because that function asks nothing on a machine without a GPU.
    """
    kernel = tmp_path / "kernel.py"
    kernel.write_text(f"""
import os
from pathlib import Path
from flashproof.sandbox import worker
from flashproof.tests.suite.sandbox.kernels import attention as innocent

worker._has_lost_its_device = lambda: {lost}

def attention(query, key, value):
    with Path({str(tmp_path / "processes")!r}).open("a") as file:
        print(os.getpid(), file=file)
    return innocent(query, key, value)
""")
    command = [sys.executable, "-m", "pytest", CALLS, "-q", "-n1", *QUICK, f"--records={tmp_path / 'records.jsonl'}"]
    command += [
        f"--impl={kernel}:attention",
        "--dtype=float32",
        "--device=cpu",
        "-k",
        "test_answers or test_calls_agree",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert "2 passed" in ended.stdout, ended.stdout + ended.stderr
    assert len(set((tmp_path / "processes").read_text().split())) == (2 if lost else 1)


def test_threads_of_the_main_process_do_not_stop_a_worker(tmp_path: Path) -> None:
    """A worker can compute with several threads although the main process did so before its fork."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text("""
import torch
from torch.nn.functional import scaled_dot_product_attention

torch.set_num_threads(2)
torch.ones(2**20).exp()

def attention(query, key, value):
    return scaled_dot_product_attention(query, key, value)
""")
    command = [sys.executable, "-m", "pytest", CALLS, "-q", "-n1", *QUICK, f"--records={tmp_path / 'records.jsonl'}"]
    command += [f"--impl={kernel}:attention", "--case=b1 h2 q300 k300 d64 float32 parallel", "--device=cpu"]
    ended = subprocess.run(
        [*command, "--time-limit=20", "-k", "parallel"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("status", ["passed", "refused", "failed", "known defect"])
def test_a_worker_that_dies_after_a_record(tmp_path: Path, status: Status) -> None:
    """The death of a worker is a failure of the check.

    The exception is a worker that ended itself after a failure: its last record reports that failure already.
    """
    about = Judgement(
        run="", implementation="x", check="contract/answers", case="", dtype="float32", device="cpu", status="failed"
    )
    written = journal.Journal(tmp_path)
    written.begin("check", about)
    written.given(Case.parse(PLAIN))
    written.returned()
    written.record(msgspec.json.encode(msgspec.structs.replace(about, status=status)).decode())
    left = journal.read(tmp_path, "check")
    written.end()
    assert left
    assert len(left.findings()) == (1 if status in ("failed", "known defect") else 2)
    assert left.findings()[-1].status in ("failed", "known defect")  # type: ignore[union-attr]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """On a GPU, a run reports a device that failed, and work in another stream than the caller's."""
    if not torch.cuda.is_available():
        pytest.skip("CUDA: no device")
    said = SAID_ON_A_GPU | {"hangs_in_c": "no answer within 30 s"}
    checks = ("-k", "test_answers or test_calls_agree or test_stream")
    ended = run(tmp_path, said, "b2 h4 q1024 k1024 d64 float32", CALLS, *checks, "--device=cuda", "--time-limit=30")
    check(ended, said, INNOCENT)
