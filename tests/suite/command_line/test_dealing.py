"""How a run distributes its tests to its processes, and that these share one Triton cache."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from flashproof import processes, session


def test_triton_cache_is_one_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user names no cache folder, all processes use Triton's default, and Inductor does not change it."""
    triton = pytest.importorskip("triton", reason="Triton: not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "named")
    session.share_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "named"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    place = triton.knobs.cache.dir
    session.share_triton_cache()
    assert triton_cache_dir(0) == os.environ["TRITON_CACHE_DIR"] == place


def test_on_a_gpu_a_short_test_goes_with_each_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist gives each process two tests at first, so a short test follows each of the longest ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = SimpleNamespace(workerinput={"workercount": 2})
    tests = SimpleNamespace(items=list(range(7)), config=config)  # the longest first
    processes.deal(tests)  # type: ignore[arg-type]
    assert tests.items == [0, 5, 1, 6, 2, 3, 4]
