"""Tests that covering arrays contain every possible pair of levels in few rows."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest

from flashproof.covering import Covering, Partial, Row


def pairs(rows: Sequence[Row]) -> set[tuple[int, int, int, int]]:
    """Returns the pairs of levels in the rows: the numbers of two factors, then of their levels."""
    return {(i, j, row[i], row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


def all_rows(covering: Covering, *, until_pairs: bool = True) -> list[Row]:
    rows = []
    while covering.open_pairs.any() or not until_pairs:
        row = covering.next_row()
        if row is None:
            break
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("sizes", "most"), [((2, 2, 2), 6), ((3, 3, 3, 3), 14), ((5, 4, 3, 2), 22), ((7, 2, 2, 2, 2, 2, 6), 44)]
)
def test_every_pair_stands_in_few_rows(sizes: tuple[int, ...], most: int) -> None:
    rows = all_rows(Covering(sizes, lambda row, new: True))
    every = {
        (i, j, a, b)
        for i, j in combinations(range(len(sizes)), 2)
        for a, b in product(range(sizes[i]), range(sizes[j]))
    }
    assert pairs(rows) == every
    assert len(rows) <= most


def test_every_triple_stands_in_the_end() -> None:
    sizes = (3, 2, 4, 2)
    covering = Covering(sizes, lambda row, new: True)
    rows = all_rows(covering, until_pairs=False)
    for places in combinations(range(4), 3):
        found = {tuple(row[place] for place in places) for row in rows}
        assert found == set(product(*(range(sizes[place]) for place in places)))
    assert [coverage.share for coverage in covering.coverage] == [1.0, 1.0]


def test_what_may_not_stand_together_does_not() -> None:
    def allowed(row: Partial, new: int | None = None) -> bool:
        return not (row[0] == 1 and row[1] == 2) and not (row[1] == 0 and row[2] == 1 and row[3] == 1)

    covering = Covering((2, 3, 2, 2), allowed)
    rows = all_rows(covering, until_pairs=False)
    assert all(map(allowed, rows))
    assert pairs(rows) == {
        pair for pair in pairs(list(product(range(2), range(3), range(2), range(2)))) if pair != (0, 1, 1, 2)
    }


def test_a_pair_that_no_row_can_hold_is_found_out() -> None:
    """The pair of level 1 for factors 0 and 1 is allowed by itself. But then no level of factor 2 is allowed."""

    def allowed(row: Partial, new: int | None = None) -> bool:
        return not (row[0] == 1 and row[2] == 0) and not (row[1] == 1 and row[2] == 1)

    covering = Covering((2, 2, 2), allowed)
    rows = all_rows(covering)
    assert (0, 1, 1, 1) not in pairs(rows)
    assert covering.coverage[0].covered == covering.coverage[0].possible == len(pairs(rows))


def test_rows_from_elsewhere_count() -> None:
    covering = Covering((2, 2), lambda row, new: True)
    covering.add((0, 1))
    assert len(all_rows(covering)) == 3


def test_a_level_that_hides_faults_counts_for_its_own_pairs_alone() -> None:
    hiding = [[False, True, True], [False, False, True], [False] * 4]
    covering = Covering((3, 3, 4), lambda row, new: True, hiding=hiding)
    rows = all_rows(covering)
    for i, j in combinations(range(3), 2):
        for a, b in product(range(len(hiding[i])), range(len(hiding[j]))):
            (other,) = {0, 1, 2} - {i, j}
            assert any(row[i] == a and row[j] == b and not hiding[other][row[other]] for row in rows), (i, j, a, b)
