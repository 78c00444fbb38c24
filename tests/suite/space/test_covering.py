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


def is_shown(row: Row, tensor: str, hides: Sequence[tuple[Sequence[tuple[int, int]], Sequence[str]]]) -> bool:
    """Returns whether a row shows a tensor."""
    return not any(tensor in tensors and all(row[i] == a for i, a in levels) for levels, tensors in hides)


def test_every_pair_stands_in_rows_that_show_each_tensor() -> None:
    """Except the tensors that the pair itself hides."""
    hides = [([(0, 1)], ["out"]), ([(0, 2)], ["out", "dq"]), ([(1, 2)], ["dq"]), ([(2, 1), (3, 1)], ["dq"])]
    sizes = (3, 3, 4, 2)
    rows = all_rows(Covering(sizes, lambda row, new: True, hides=hides))
    for tensor, (i, j) in product(("out", "dq"), combinations(range(4), 2)):
        for a, b in product(range(sizes[i]), range(sizes[j])):
            pair = [-1] * 4
            pair[i], pair[j] = a, b
            is_found = any(row[i] == a and row[j] == b and is_shown(row, tensor, hides) for row in rows)
            assert is_found == is_shown(tuple(pair), tensor, hides), (tensor, pair)
    assert len(rows) <= 26


def test_a_pair_that_no_row_shows_stands_in_some_row() -> None:
    """Level 1 of factor 0 needs level 1 of factor 1, which hides dq. So no row shows dq with level 1 of factor 0."""
    covering = Covering(
        (2, 2, 3), lambda row, new: not (row[0] == 1 and row[1] == 0), hides=[([(1, 1)], ["dq"])], coarse=None
    )
    rows = all_rows(covering)
    assert pairs(rows) == pairs([row for row in product(range(2), range(2), range(3)) if row[:2] != (1, 0)])
    assert covering.coverage[0].share == 1.0
    assert len(rows) <= 12


def test_levels_that_hide_the_same_tensor_share_rows() -> None:
    """The 10 levels of the last factor need each of them. One row for two of them is enough."""
    hides = [([(factor, 1)], ["dq"]) for factor in range(4)]
    rows = all_rows(Covering((2, 2, 2, 2, 10), lambda row, new: True, hides=hides))
    hidden = [row for row in rows if 1 in row[:4]]
    assert len(hidden) < 30


def test_the_triples_of_an_impossible_pair_are_impossible() -> None:
    covering = Covering((2, 2, 2), lambda row, new: True)
    covering.forget([1, 3])
    assert not covering.triples[1, 3].any()
    assert not covering.triples[1, :, 3].any()
    assert not covering.triples[:, 1, 3].any()
    assert covering.coverage[1].possible == 6
