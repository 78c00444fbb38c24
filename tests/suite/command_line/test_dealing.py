"""What a run has to do, shared out: shapes among dtypes that run one code, tests among processes."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from flashproof import processes, session
from flashproof.impls import catalogue
from flashproof.impls.spec import Device, Implementation

DEVICES: tuple[Device, ...] = ("cpu", "cuda")
SHARING = [(name, device) for name in catalogue.names(["triton.*", "cuda.*"]) for device in DEVICES]


def loaded(name: str) -> Implementation:
    try:
        return catalogue.load(name)
    except ImportError as error:
        pytest.skip(str(error))


def test_triton_cache_is_one_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has named none, Triton's own, which Inductor then leaves in place."""
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
    """pytest-xdist hands the first tests out in twos."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = SimpleNamespace(workerinput={"workercount": 2})
    tests = SimpleNamespace(items=list(range(7)), config=config)  # the longest first
    processes.deal(tests)  # type: ignore[arg-type]
    assert tests.items == [0, 5, 1, 6, 2, 3, 4]
