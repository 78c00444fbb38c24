"""`flashproof.verify`: what it accepts, what it returns, and that it leaves the caller's process unchanged."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashproof
from flashproof import loading, verification
from flashproof.reports.record import Claim, read

CASE = "b1 h1 q5 k5 d8 float32"


def right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes textbook attention."""
    scores = query.float() @ key.float().transpose(-2, -1) / query.shape[-1] ** 0.5
    return (torch.softmax(scores, dim=-1) @ value.float()).to(query.dtype)


def state() -> tuple[object, ...]:
    """Returns the global state of the process."""
    torch_state = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.initial_seed()
    python = dict(os.environ), list(sys.path), list(sys.meta_path), os.getcwd(), list(warnings.filters)
    streams = sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    return *torch_state, *python, *streams, dict(loading.GIVEN)


def test_a_function_is_verified(tmp_path: Path) -> None:
    """A function of a module gets a name that the command line accepts. Records go to the file that was asked for."""
    records = tmp_path / "run.jsonl"
    result = flashproof.verify(right, cases=CASE, records=records)
    assert result.verified
    assert result
    assert result.target == f"{__name__}:right"
    assert result.checks > 10
    assert (result.failures, result.refused, result.unverified) == ((), (), {})
    assert float(result.worst["out", "float32"].rho or 9.0) < 1.0
    assert result.records == records
    assert any(isinstance(record, Claim) for record in read(records))
    result.raise_for_failures()


def test_a_closure_under_no_grad_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The grad mode of the caller has no effect. The error shows the failure, and the call that repeats it."""
    monkeypatch.chdir(tmp_path)
    factor = 1.01
    with torch.no_grad():
        before = state()
        result = flashproof.verify(lambda query, key, value: right(query * factor, key, value), cases=[CASE])
        assert state() == before
    assert not result
    assert {failure.tensor for failure in result.failures} >= {"out", "dq", "dk"}
    assert result.records is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match=r"rho .*\n(.*\n)*again: flashproof.verify\(..., cases=\['b1 h1 q"):
        result.raise_for_failures()


class Layer(torch.nn.Module):
    """A module of PyTorch that computes attention in 16 bit only."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Refuses tensors in float32."""
        if query.dtype == torch.float32:
            raise NotImplementedError("16 bit only")
        return right(query, key, value)


def test_a_module_that_refuses_the_case() -> None:
    """If the module refuses the only case, nothing is verified, and the result says why."""
    result = flashproof.verify(Layer(), cases=CASE)
    assert not result.verified
    assert not result.failures
    assert result.refused[0].message.startswith("NotImplementedError: 16 bit only")
    assert list(result.unverified) == [result.target]
    assert "refused: " in str(result)


@pytest.mark.parametrize(
    ("target", "options", "error", "words"),
    [
        ("mine.py:attention", {}, ValueError, "there is no file"),
        (right, {"cases": "b1 zzz"}, ValueError, "--case: the word 'zzz' is unknown"),
        (right, {"dtypes": "float8"}, ValueError, "--dtype: 'float8' is unknown"),
        (3, {}, TypeError, "not an attention function"),
    ],
    ids=["no-file", "no-case", "no-dtype", "no-function"],
)
def test_what_it_does_not_take(target: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    """The error has the words of the command line."""
    with pytest.raises(error, match=words):
        flashproof.verify(target, **options)


def _elsewhere(way: str) -> Callable[..., dict[str, Any]]:
    def run(wanted: Any, given: object, folder: Path) -> dict[str, Any]:
        if way == "spawned":
            return verification._spawned(wanted, folder)
        return verification._here(replace(wanted, processes=0), given, folder)

    return run


@pytest.mark.parametrize("way", ["spawned", "here"])
def test_where_a_process_cannot_be_forked(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """If this process cannot be forked, as with a CUDA device, the target runs in a new process or in this one.

    In both cases this process stays as it was.
    """
    monkeypatch.setattr(verification, "_forked", _elsewhere(way))
    before = state()
    result = flashproof.verify(right, cases=CASE)
    assert state() == before
    assert result.verified, result
