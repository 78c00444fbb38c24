"""The exit status: 0 only if every selected implementation was verified."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "b1 h1 q5 k5 d8 float32"
KERNELS = """
import torch

from impls.spec import Implementation, Supports


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
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of kernels."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


def run(kernels: Path, options: list[str]) -> tuple[int, str]:
    """The exit status and the output of a verification; names of kernels stand for those of the file."""
    given = [f"{kernels}:{word}" if word.isidentifier() and options[i - 1] == "--impl" else word for i, word in enumerate(options)]
    records = kernels.parent / "records.jsonl"
    quick = ["tests/accuracy", "tests/gradients", "-q", "-n0", "-p", "no:cacheprovider", "--assert=plain"]
    command = [sys.executable, "-m", "pytest", *given, *quick, f"--records={records}", "-k", "not search and not over"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--impl", "right", "--case", SMALL], 0, "passed"),
        (["--impl", "not_a_number", "--case", SMALL], 1, "rho inf"),
        (["--impl", "value_by_strides_of_key", "--case", "b2 h2 q9 k9 d8 float32 transposed"], 0, "passed"),  # of one layout, it shows nothing
        (["--impl", "value_by_strides_of_key", "--case", "b2 h2 q9 k9 d8 float32 mixed"], 1, "rho inf"),
        (["--impl", "nothing", "--case", SMALL], 1, "not verified"),
        (["--impl", "right", "--impl", "half", "--case", SMALL], 1, "not verified"),
        (["--impl", "half", "--dtype", "float32"], 1, "not verified"),
        (["--impl", "right", "--case", f"{SMALL} causal"], 1, "not verified: .*does not claim the case: causal, top-left"),
        (["--impl", "right", "--impl", "picky", "--case", SMALL], 1, "refused: .*picky, float32, \\d+ times, first with: ValueError: dim 8 is too small"),
        (
            ["--impl", "swallows", "--dtype", "float16"],
            0,
            r"not claimed: \S+:swallows has no parameter is_causal, .*return_lse;",
        ),
        (["--impl", "sdpa.fl*h", "--device", "cpu", "--dtype", "float32"], 1, "not verified"),
        (["--impl", "right", "--case", SMALL, "--dtype", "float16"], 4, "--dtype: the case is in float32"),
        (["--impl", "right", "--case", f"{SMALL} q6"], 4, "q6"),
        (["--impl", "right", "--case", f"{SMALL} dropout1.5"], 4, "dropout"),
        (["--impl", "right", "--case", f"{SMALL} blocks2"], 4, "blocks: 2 is no share"),
        (["--impl", "right", "--case", "h3/0 float32"], 4, "h3/0"),
        (["--impl", "half", "--case", "b1 h1 q5 k5 d8 float16 x1e9"], 4, "query reaches .* beyond torch.float16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_status(kernels: Path, options: list[str], status: int, words: str) -> None:
    """Each way to verify nothing, or less than was asked for, is no success."""
    code, said = run(kernels, options)
    assert code == status, said
    assert re.search(words, said), said
