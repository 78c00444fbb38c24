"""Tests the space of cases: a case has the levels that it was made for, and the array contains every pair of levels."""

from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
import torch

from flashproof import arrays, space
from flashproof.cases import CALLS, Call, Case, not_claimed
from flashproof.impls.spec import Implementation, Supports
from flashproof.registry import checks
from flashproof.selection import Selection
from flashproof.space import COMMON, FACTORS, PLAIN, Room, Space, case_of, levels, simplest
from flashproof.tensors import inputs, memory
from flashproof.tests.suite.mutants.combinations import SUPPORTS, points

MODEST = Supports(causal=("top_left",), dims=(8, 128), dim_multiple=8, dtypes=("float16", "bfloat16"))
POINTS = [case for case, _ in zip(points("test"), range(60), strict=False)]


@pytest.mark.parametrize("supports", [SUPPORTS, MODEST], ids=["full", "modest"])
def test_the_array_holds_every_pair(supports: Supports) -> None:
    """The pairs are counted in the printed lines of the cases, not in the code that made the cases."""
    space = Space(supports)
    shown = [levels(Case.parse(str(case))) for case in space.array]
    found = {pair for row in shown for pair in combinations(row.items(), 2)}
    assert len(found) == space.coverage[0].covered == space.coverage[0].possible
    assert {level for case in space.cases for level in levels(case).items()} >= {
        (factor.name, level) for factor in FACTORS for level in space.levels[factor.name]
    }
    assert not any(not_claimed(case, supports) for case in space.cases)


@pytest.mark.parametrize(
    "supports",
    [MODEST, Supports(), Supports(backward=False), Supports(dims=(8, 32))],
    ids=["modest", "plain", "forward-only", "narrow"],
)
def test_every_four_common_levels_meet(supports: Supports) -> None:
    """Whatever four common levels a case of the array has, some common case has them too."""
    space = Space(supports)
    found = {four for case in space.common for four in fours(case, space)}
    shown = [case for case in space.array if space.row(case)]
    assert found
    assert found >= {four for case in shown for four in fours(case, space)}
    assert not any(not_claimed(case, supports) for case in space.cases)


def fours(case: Case, space: Space) -> set[tuple[tuple[str, str], ...]]:
    """The combinations of four common levels of a case."""
    row = levels(case)
    own = {name: row[name] for name, words in COMMON.items() if row[name] in words}
    return set(combinations(own.items(), 4))


def test_every_way_of_calling_has_a_check() -> None:
    assert {check.call for check in checks().values() if check.call} == set(CALLS)


@pytest.mark.parametrize("supports", [SUPPORTS, MODEST], ids=["full", "modest"])
def test_a_sketch_says_which_checks_have_cases(supports: Supports) -> None:
    """A run leaves a check out if the sketch has no case for it. It must not leave out a check of the array."""
    kernel = Implementation(name="kernel", attention=print, supports=supports)
    whole, sketch = (space.space_of(kernel, is_sketch=is_sketch) for is_sketch in (False, True))
    for check in checks().values():
        for dtype in supports.dtypes:
            assert bool(check.cases(kernel, dtype, sketch)) == bool(check.cases(kernel, dtype, whole)), check.name


@pytest.mark.parametrize("name", ["sdpa.math", "tiled.block_sparse"])
def test_a_run_judges_every_case_of_the_array(name: str) -> None:
    """Counts the cases in the checks that a run selects, since the report says that all of them were judged."""
    selection = Selection([name], device="cpu")
    judged = {
        case
        for target in selection.targets
        for check in checks().values()
        if selection.covers(check, target)
        for case in selection.cases_of(check, target)
    }
    assert set(selection.space_of(selection.targets[0]).cases) <= judged


def test_a_check_that_is_asked_for_takes_only_its_own_cases() -> None:
    """The checks of training have tensors of their own. They leave out any other case, also if -k chooses them."""
    selection = Selection(["sdpa.math"], ["float32"], "cpu", [Case.parse("b1 h1 q5 k5 d8 float32")], by_name=True)
    (target,) = selection.targets
    of_training = [check for check in checks().values() if check.asked]
    assert of_training
    assert not any(selection.cases_of(check, target) for check in of_training)


@pytest.mark.parametrize("case", POINTS, ids=str)
def test_a_point_is_its_line(case: Case) -> None:
    assert Case.parse(str(case)) == case
    assert "another" not in levels(case).values()


def test_each_level_is_read_off_the_case_that_has_it() -> None:
    # The lengths and the batch of a case depend on other factors, too. A pooled gradient needs several queries.
    others = ("queries", "queries' rest", "keys", "keys' rest", "batch", "layout of do")
    for factor in FACTORS:
        for level in factor.levels:
            found = levels(case_of(PLAIN | {factor.name: level}, 3))
            changed = {name for name in found if found[name] != PLAIN[name]} - {factor.name}
            if factor.name not in others:
                assert found[factor.name] == level
                assert not changed, (factor.name, level)


@pytest.mark.parametrize("case", POINTS[:30], ids=str)
def test_tensors_hold_the_same_numbers_in_any_memory(case: Case) -> None:
    """Layout, address and sharing change no numbers, except where several entries are one in memory."""
    given = inputs(case)
    for name, layout in zip(("query", "key", "value", "dout"), case.layouts, strict=True):
        tensor = getattr(given, name)
        assert torch.equal(tensor.isnan(), torch.zeros_like(tensor, dtype=torch.bool))
        assert bool(memory(tensor).view(tensor.dtype).isnan().any())  # the memory around it
        if layout == "sliced":
            assert tensor.stride(3) == 2
        if layout in ("expanded", "pooled", "summed"):
            assert 0 in tensor.stride()


def test_calls_are_described() -> None:
    assert set(CALLS) == set(get_args(Call))


def test_the_simplest_case_keeps_what_it_needs() -> None:
    line = "b2 h8/2 q150 k150 d40 bfloat16 causal x16 v.positive k.columns do.offset packed-kv seed5"
    with pytest.raises(ValueError, match="packed-kv needs k to have no layout"):
        Case.parse(line)
    case = Case.parse(line.replace(" packed-kv", "").replace("q150 k150", "q200 k200"))
    found = simplest(case, lambda other: other.mask == "causal" and other.layouts[1] == "columns")
    assert {name for name, level in levels(found.case).items() if level != PLAIN[name]} == {"mask", "layout of k"}
    assert set(found.needs) == {"mask", "layout of k"}


def test_an_array_is_left_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(work=2.0**16, numbers=2.0**16, many=2.0**16, cases=0, dims=("64",))
    found = Space(Supports(), room=room)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(arrays, "_shared", tmp_path)
    first, second = (Space(Supports(), room=room) for _ in range(2))
    assert (first.array, first.left_out) == (found.array, found.left_out)
    monkeypatch.setattr(Space, "_nothing_covered", None)  # the second one finds the array on disk and does not make it
    assert (second.array, second.coverage, second.left_out) == (found.array, found.coverage, found.left_out)


def test_an_array_is_kept_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(work=2.0**16, numbers=2.0**16, many=2.0**16, cases=0, dims=("64",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "flashproof" / "arrays"

    def built() -> list[Case]:
        """The array in a new run."""
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        run.mkdir()
        monkeypatch.setattr(arrays, "_shared", run)
        return Space(Supports(), room=room).array

    first = built()
    (file,) = kept.glob("*.rows")
    with monkeypatch.context() as patch:
        patch.setattr(Space, "_nothing_covered", None)
        assert built() == first
    file.write_bytes(file.read_bytes()[:-9])
    assert built() == first
    with monkeypatch.context() as patch:
        patch.setattr(space, "_sources", lambda: "other sources")
        patch.setattr(arrays, "KEPT", 1)
        assert built() == first
    assert len(list(kept.iterdir())) == 1
    assert not file.exists()
