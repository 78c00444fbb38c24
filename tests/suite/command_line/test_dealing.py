"""What a run has to do, shared out: shapes among dtypes that run one code, tests among processes."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from flashproof import grids, processes, session, targets
from flashproof.cases import Case
from flashproof.impls import catalogue
from flashproof.impls.spec import DTYPES, SIXTEEN_BIT, Device, Dtype, Implementation
from flashproof.registry import checks
from flashproof.tests.suite.mutants import mutant
from flashproof.tests.suite.mutants.mutant import Mutant

DEVICES: tuple[Device, ...] = ("cpu", "cuda")
SHARING = [(name, device) for name in catalogue.names(["triton.*", "cuda.*"]) for device in DEVICES]


def loaded(name: str) -> Implementation:
    try:
        return catalogue.load(name)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("among", [DTYPES, SIXTEEN_BIT])
@pytest.mark.parametrize("device", DEVICES)
def test_a_shape_runs_in_one_dtype_and_all_else_in_each(device: Device, among: tuple[Dtype, ...]) -> None:
    given = {dtype: grids.dealt(grids.ordinary, grids.ordinary(dtype, device), dtype, among) for dtype in among}
    runs = Counter(replace(case, dtype="float32") for cases in given.values() for case in cases)
    assert set(runs) == {replace(case, dtype="float32") for case in grids.ordinary("float32", device)}
    assert set(runs.values()) == {1, len(among)}
    for case, count in runs.items():
        if case.scale is not None or case.family != "normal" or case.magnitude != 1.0 or case.shift or max(case.queries, case.keys) > 2048:
            assert count == len(among), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_checks_have_all_their_cases_and_so_has_a_run_of_one_dtype(dtype: Dtype) -> None:
    for check in checks().values():
        cases = check.grid(dtype, "cpu")
        assert grids.dealt(check.grid, cases, dtype, [dtype]) == cases
        if check.grid is not grids.ordinary:
            assert grids.dealt(check.grid, cases, dtype, DTYPES) == cases


@pytest.mark.parametrize("turn", range(5))
def test_each_implementation_takes_all_cases_whatever_its_turn(turn: int) -> None:
    cases = grids.ordinary("float32", "cpu")
    turned = grids.turned(grids.ordinary, cases, turn)
    assert (turned == cases) == (turn == 0)
    assert Counter(turned) == Counter(cases)
    lengths = grids.lengths("float32", "cpu")  # whose order says where to stop
    assert grids.turned(grids.lengths, lengths, turn) == lengths


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


@pytest.mark.parametrize(("name", "device"), SHARING)
def test_dtypes_of_one_code_claim_one_arithmetic(name: str, device: Device) -> None:
    """What can be seen of it without a look into the code."""
    implementation = loaded(name)
    among = implementation.one_code(device)
    assert len({implementation.arithmetic(dtype, device) for dtype in among}) == 1
    assert set(among) <= set(implementation.supports.dtypes)


@pytest.mark.parametrize("one", [one for one in mutant.every() if one.case and one.of.startswith(("triton.", "cuda."))], ids=lambda one: one.name)
def test_the_case_that_shows_a_mutant_runs_in_a_dtype_in_which_it_shows(one: Mutant) -> None:
    """What the kill matrix says, for all dtypes alone, holds of a run of all of them."""
    among = loaded(one.of).one_code("cpu")
    grid = checks()[one.check].grid
    for dtype in one.dtypes:
        cases = grid(dtype, "cpu")
        if Case.parse(f"{one.case} {dtype}") in (grids.dealt(grid, cases, dtype, among) if dtype in among else cases):
            return
    pytest.fail(f"{one.name}: {one.case} is given to no dtype of {one.dtypes}")


def test_a_kernel_that_is_not_in_the_catalogue_is_spared_nothing() -> None:
    """Whatever it says: nobody knows its code."""
    loaded = targets.load_selected(["flashproof.impls.triton.fa2:implementation"])[0]
    assert loaded.implementation is not None
    assert not loaded.implementation.one_code("cuda")


def test_on_a_gpu_a_short_test_goes_with_each_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist hands the first tests out in twos."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = SimpleNamespace(workerinput={"workercount": 2})
    tests = SimpleNamespace(items=list(range(7)), config=config)  # the longest first
    processes.deal(tests)  # type: ignore[arg-type]
    assert tests.items == [0, 5, 1, 6, 2, 3, 4]
