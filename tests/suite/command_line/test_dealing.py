"""How a run distributes its tests to its processes, and that these share one Triton cache."""

import os
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from flashproof import session
from flashproof.scheduling import ByImplementation


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


class Process:
    """A process of pytest-xdist, as its scheduler sees it."""

    shutting_down = False

    def __init__(self, tests: list[str]) -> None:
        self.tests, self.given = tests, list[str]()
        self.gateway = SimpleNamespace(id=id(self))

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.given += [self.tests[index] for index in indexes]

    def shutdown(self) -> None:
        self.shutting_down = True


def dealt(processes: list[Process], spread: Collection[str] = ()) -> ByImplementation:
    """A scheduler that has dealt the tests of these processes to them."""
    config: Any = SimpleNamespace(getvalue=lambda name: ["2*popen"], option=SimpleNamespace(loadscopereorder=True))
    scheduler = ByImplementation(config, spread=spread)
    scheduler.numnodes = len(processes)
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, process.tests)
    scheduler.schedule()
    return scheduler


def test_on_a_gpu_each_process_gets_whole_implementations() -> None:
    """A process that dies in a test leaves the others of its implementation to the next one, and not that test."""
    tests = [
        f"t.py::test_{name}[{target}-cuda]" for target in ("a-float32", "b-float32", "b-float16") for name in "xyz"
    ]
    tests.append("suite.py::test_own")
    one, other, new = (Process(tests) for _ in range(3))
    scheduler = dealt([one, other])
    assert one.given[:3] == tests[:3]
    assert other.given[:3] == tests[3:6]
    scheduler.mark_test_complete(one, 0)
    assert scheduler.remove_node(one) == tests[1]
    scheduler.add_node(new)
    scheduler.schedule()
    assert new.given == []  # it has not collected its tests yet
    scheduler.add_node_collection(new, tests)
    scheduler.schedule()
    assert tests[2] in new.given + other.given
    assert tests[1] not in new.given + other.given


def test_checks_of_a_kernel_that_is_compiled_for_each_call_go_to_any_process() -> None:
    """Two processes share the checks of one implementation and dtype, if it is named."""
    tests = [f"t.py::test_{check}[a-float32-cuda]" for check in "uvwxyz"]
    processes = [Process(tests), Process(tests)]
    dealt(processes)
    assert not all(process.given for process in processes)
    processes = [Process(tests), Process(tests)]
    dealt(processes, spread=["a"])
    assert all(process.given for process in processes)
