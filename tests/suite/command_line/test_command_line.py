"""The exit status, errors about options, and a check that raises an exception itself.

The exit status is 0 only if every selected implementation was verified.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashproof import pytest_plugin, selection, session
from flashproof.reports import record

ROOT = Path(__file__).resolve().parents[3]
SMALL = "b1 h1 q5 k5 d8 float32"
KERNELS = """
import torch

from flashproof.impls.spec import Implementation, Supports


def right(query, key, value):
    scores = query.float() @ key.float().transpose(-2, -1) / query.shape[-1] ** 0.5
    return (torch.softmax(scores, dim=-1) @ value.float()).to(query.dtype)


def nothing(query, key, value):
    raise ValueError("not today")


def swallows(query, key, value, **kwargs):
    return right(query, key, value)


def not_a_number(query, key, value):
    return right(query, key, value) * torch.nan


def picky(query, key, value):
    if query.shape[3] == 8:
        raise ValueError("dim 8 is too small")
    return right(query, key, value)


def value_by_strides_of_key(query, key, value):
    return right(query, key, value.as_strided(value.shape, key.stride()))


half = Implementation(name="half", attention=right, supports=Supports(dtypes=("float16",)))
unclear = Implementation(name="unclear", attention=right, missing=lambda device: False)
"""

BROKEN_CHECK = '''
from flashproof import Subject, check, grids


@check("accuracy", grid=grids.lines("b1 h2 q20 k20 d16"))
def test_broken(subject: Subject) -> None:
    """Raises."""
    subject.judge(subject.cases[0])
    raise LookupError("no such tile")
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of kernels."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


def run(kernels: Path, options: list[str]) -> tuple[int, str]:
    """Runs a verification. Returns its exit status and its output.

    After `--impl`, a plain identifier names a kernel of the file `kernels`.
    """
    given = [
        f"{kernels}:{word}" if word.isidentifier() and options[i - 1] == "--impl" else word
        for i, word in enumerate(options)
    ]
    records = kernels.parent / "records.jsonl"
    quick = ["tests/accuracy", "tests/gradients", "-q", "-n0", "-p", "no:cacheprovider", "--assert=plain"]
    command = [sys.executable, "-m", "pytest", *given, *quick, f"--records={records}", "-k", "not search and not over"]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--impl", "right", "--case", SMALL], 0, "passed"),
        (["--impl", "not_a_number", "--case", SMALL], 1, "rho inf"),
        # Key and value have the same strides here, so this case does not show the fault.
        (["--impl", "value_by_strides_of_key", "--case", "b2 h2 q9 k9 d8 float32"], 0, "passed"),
        (
            ["--impl", "value_by_strides_of_key", "--case", "b2 h2 q9 k9 d8 float32 k.columns v.transposed do.sliced"],
            1,
            "rho inf",
        ),
        (["--impl", "nothing", "--case", SMALL], 1, "not verified"),
        (["--impl", "right", "--impl", "half", "--case", SMALL], 1, "not verified"),
        (["--impl", "half", "--dtype", "float32"], 1, "not verified: .*does not claim float32"),
        (["--impl", "half", "--case", SMALL], 1, "not verified: .*does not claim the case: dtype float32"),
        (["--impl", "right", "--case", SMALL, "--case", "q6 d8 float16"], 0, "4 passed"),
        (
            ["--impl", "unclear", "--case", SMALL],
            4,
            r"--impl: \S+:unclear: missing\('cpu'\): returned False; return None if",
        ),
        (["--impl", "kernels.py"], 4, r"--impl: kernels.py: there is no file .*kernels.py; give"),
        (
            ["--impl", "right", "--case", f"{SMALL} causal"],
            1,
            "not verified: .*does not claim the case: causal, top-left",
        ),
        (
            ["--impl", "right", "--impl", "picky", "--case", SMALL],
            1,
            "refused: .*picky, float32, \\d+ times; the first message: ValueError: dim 8 is too small",
        ),
        (
            ["--impl", "swallows", "--dtype", "float16", "--quick", "-k", "accuracy/forward"],
            0,
            r"not claimed: \S+:swallows has no parameter is_causal, .*return_lse;",
        ),
        (["--impl", "sdpa.fl*h", "--device", "cpu", "--dtype", "float32"], 1, "not verified"),
        (["--impl", "right", "--case", SMALL, "--dtype", "float16"], 4, "--dtype: the case is in float32"),
        (["--impl", "right", "--case", f"{SMALL} q6"], 4, "q6"),
        (["--impl", "right", "--case", f"{SMALL} dropout1.5"], 4, "dropout"),
        (["--impl", "right", "--case", f"{SMALL} blocks2"], 4, "blocks: 2 is not a share"),
        (["--impl", "right", "--case", "h3/0 float32"], 4, "h3/0"),
        (["--impl", "half", "--case", "b1 h1 q5 k5 d8 float16 x1e9"], 4, "query reaches .* beyond torch.float16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_status(kernels: Path, options: list[str], status: int, words: str) -> None:
    """The exit status is 0 only if the run verified all that was asked for."""
    code, said = run(kernels, options)
    assert code == status, said
    assert re.search(words, said), said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (" ", "is empty"),
        ("q4 causl", "the word 'causl' is unknown; close: causal, causal-br; a case looks like"),
        ("q4 zzz", "the word 'zzz' is unknown; a case looks like"),
        ("q4 k.summed", "the word 'k.summed' is unknown; close: "),
        ("q4 k8 packed", "sharing: packed needs as many queries as keys"),
        ("q100000000 k100000000", r"need 1907 GiB while they are made, and \d+ GiB are left"),
    ],
)
def test_a_case_that_cannot_be_built(line: str, words: str) -> None:
    """The error says what is wrong with the line, before any memory is allocated."""
    with pytest.raises(ValueError, match=words):
        selection.parse_case(line)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "soon"])
def test_a_time_limit_is_a_time(text: str) -> None:
    """A time limit must be a positive number of seconds. With any other limit, a right kernel could fail."""
    assert pytest_plugin._seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a time"):
        pytest_plugin._seconds(text)


def test_records_go_into_a_file(tmp_path: Path) -> None:
    """The folder of the record file is created if it does not exist. A folder is not accepted as the record file."""
    assert session._writable(tmp_path / "new" / "run.jsonl").parent.is_dir()
    with pytest.raises(OSError, match="is a directory; name a file"):
        session._writable(tmp_path)


def test_a_check_that_an_exception_ends(kernels: Path) -> None:
    """The exception becomes a failed record after the records that the check made before.

    So no report shows the check as passed.
    """
    check, records = kernels.parent / "test_broken.py", kernels.parent / "broken.jsonl"
    check.write_text(BROKEN_CHECK)
    asked = ["--impl", f"{kernels}:right", "--dtype", "float32", f"--records={records}"]
    plain = ["-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml", "-q", "-n0"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *asked, str(check)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    *judged, ended_by = [each for each in record.read(records) if isinstance(each, record.Judgement)]
    assert [(one.tensor, one.status) for one in judged] == [(name, "passed") for name in ("out", "dq", "dk", "dv")]
    assert (ended_by.status, ended_by.message) == ("failed", "the check was ended by LookupError: no such tile")
