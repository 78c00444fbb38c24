"""What a run has to do, shared out: among dtypes that run one code, of which each case that only indexing can fail needs but one, and among processes."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from impls import catalogue
from impls.spec import DTYPES, Device, Dtype, Implementation
from tests import grids, plugin
from tests.cases import Case, not_claimed
from tests.mutants.trial import checks

DEVICES: tuple[Device, ...] = ("cpu", "cuda")
SHARING = [(name, device) for name in catalogue.names(["tiled.*", "triton.*", "cuda.*"]) for device in DEVICES]


def loaded(name: str) -> Implementation:
    try:
        return catalogue.load(name)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("name", "device"), SHARING)
def test_each_case_runs_in_one_of_the_dtypes_that_run_one_code(name: str, device: Device) -> None:
    """For every check: dealt cases fall to one dtype each, or to more where there are fewer of them than dtypes; the others to all; no dtype goes without."""
    implementation = loaded(name)
    among = implementation.one_code(device)
    assert len(among) > 1
    for check in checks().values():
        claimed = {dtype: [case for case in check.grid(dtype, device) if not_claimed(case, implementation.supports) is None] for dtype in among}
        given = {dtype: grids.dealt(check.grid, claimed[dtype], dtype, among) for dtype in among}
        for dtype in among:
            assert bool(given[dtype]) == bool(claimed[dtype]), check.name
            assert [case for case in claimed[dtype] if case in given[dtype]] == given[dtype], check.name  # in the order of the grid
            assert [case for case in claimed[dtype] if not is_ordinary(case)] == [case for case in given[dtype] if not is_ordinary(case)], check.name
        if check.grid(among[0], device) and {len(cases) for cases in claimed.values()} == {len(claimed[among[0]])}:
            runs = Counter(replace(case, dtype=among[0]) for cases in given.values() for case in cases)
            assert set(runs) == {replace(case, dtype=among[0]) for cases in claimed.values() for case in cases}, check.name


def is_ordinary(case: Case) -> bool:
    return case.family == "normal" and case.magnitude == 1.0 and not case.shift


def test_most_shapes_run_once() -> None:
    """It is for that: of the ordinary grid, a shape runs in one dtype of three."""
    cases = {dtype: grids.dealt(grids.ordinary, grids.ordinary(dtype, "cpu"), dtype, DTYPES) for dtype in DTYPES}
    runs = Counter(replace(case, dtype="float32") for each in cases.values() for case in each)
    assert {count for case, count in runs.items() if is_ordinary(case)} == {1}
    assert {count for case, count in runs.items() if not is_ordinary(case)} == {len(DTYPES)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_of_one_dtype_has_all_of_them(dtype: Dtype) -> None:
    for check in checks().values():
        cases = check.grid(dtype, "cpu")
        assert grids.dealt(check.grid, cases, dtype, [dtype]) == cases


@pytest.mark.parametrize(("name", "device"), SHARING)
def test_dtypes_of_one_code_claim_one_arithmetic(name: str, device: Device) -> None:
    """What can be seen of it without a look into the code."""
    implementation = loaded(name)
    assert len({implementation.arithmetic(dtype, device) for dtype in implementation.one_code(device)}) == 1


def test_a_function_as_it_stands_is_given_every_case() -> None:
    """Nobody said that its dtypes share code."""

    def attention(query: object, key: object, value: object) -> object:
        raise NotImplementedError

    assert not catalogue.of_callable(attention, "mine").one_code("cuda")


def test_on_a_gpu_a_short_test_goes_with_each_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist hands the first tests out in twos."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    session = SimpleNamespace(items=list(range(7)))  # the longest first
    plugin.pytest_collection_finish(session)  # type: ignore[arg-type]
    assert session.items == [0, 5, 1, 6, 2, 3, 4]
