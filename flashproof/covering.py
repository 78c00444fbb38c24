"""Covering arrays: few rows in which every pair of levels stands together, and as many triples as the rows can hold.

The greedy construction of AETG (Cohen, Dalal, Fredman and Patton, IEEE Trans. Softw. Eng. 23(7), 1997) with
constraints: each row begins with a pair that no row has yet, and takes level after level the one that completes most
new pairs, then most new triples. There is no random number, so an array is the same on every machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

Row = tuple[int, ...]  # the number of a level for each factor
Partial = Sequence[int]  # the same, with -1 for a factor that has no level yet
# Whether some row with these levels may stand in an array. The second argument is the factor whose level is new, where
# all others are known to be allowed, or None.
Allowed = Callable[[Partial, int | None], bool]
OPEN = -1
_TRIES = 6  # of a row that ends in a dead end
_PAIR = 1e6  # what a new pair counts for, in new triples: more than all triples of a row


@dataclass(frozen=True)
class Coverage:
    """How many of the pairs, or triples, that are possible stand in some row."""

    covered: int
    possible: int

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.covered / self.possible if self.possible else 1.0


class Covering:
    """The pairs and triples of levels that are possible, and which of them stand in a row by now.

    sizes: how many levels each factor has. Level 0 of a factor is its plain one. allowed: whether a part of a row may
    stand. A pair or triple that no row can hold, though it is allowed by itself, is found out and counts as impossible.
    weights: of a factor; a triple counts for the product of its three. costs: of the levels of each factor, in new
    triples; a level that costs is taken where a pair needs it, or many triples. hiding: the levels of each factor that
    hide faults of others. A row with such a level completes no pair or triple without it.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        allowed: Allowed,
        weights: Sequence[float] | None = None,
        costs: Sequence[Sequence[float]] | None = None,
        hiding: Sequence[Sequence[bool]] | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self.allowed = allowed
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.factor = np.repeat(np.arange(len(self.sizes)), self.sizes)
        weight = np.ones(len(self.sizes)) if weights is None else np.asarray(weights, dtype=float)
        self._weight = (weight / weight.max())[self.factor].astype(np.float32)
        self.pairs = self._possible_pairs()
        self.triples = self._possible_triples()
        self.forgotten: list[list[int]] = []  # pairs and triples that were found to be impossible
        self.open_pairs = self.pairs.copy()
        self.open_triples = self.triples.copy()
        self._open = np.zeros(len(self.factor), dtype=int)  # the open triples of each level
        self._count(range(len(self.factor)))
        # The number of rows that have a level. Of two levels that complete as much, the rarer one is taken.
        self.used = np.zeros(len(self.factor))
        self._costs = np.zeros(len(self.factor)) if costs is None else np.concatenate(costs)
        self._hiding = np.zeros(len(self.factor), dtype=bool) if hiding is None else np.concatenate(hiding)
        # These costs make plain levels the first choice. Other levels follow in their order.
        self._plainly = 1e9 * (np.arange(len(self.factor)) - self.starts[self.factor])

    def _row(self, *levels: int) -> list[int]:
        """A part of a row. levels: numbers among all levels."""
        row = [OPEN] * len(self.sizes)
        for level in levels:
            row[self.factor[level]] = int(level - self.starts[self.factor[level]])
        return row

    def _possible_pairs(self) -> np.ndarray:
        count = len(self.factor)
        single = np.array([self.allowed(self._row(level), None) for level in range(count)])
        found = np.zeros((count, count), dtype=bool)
        for one, other in combinations(np.flatnonzero(single).tolist(), 2):
            if self.factor[one] != self.factor[other] and self.allowed(self._row(one, other), None):
                found[one, other] = found[other, one] = True
        return found

    def _possible_triples(self) -> np.ndarray:
        """The triples whose pairs are possible. A few of them are impossible; `next_row` finds them."""
        return self.pairs[:, :, None] & self.pairs[:, None, :] & self.pairs[None, :, :]

    def next_row(self) -> Row | None:
        """A row that completes a pair, or if there is none left, a triple; None if nothing is left to complete."""
        while (wanted := self._wanted()) is not None:
            row = self._completed(wanted) if self.allowed(self._row(*wanted), None) else None
            if row is not None and self._completes(row):
                return self.add(row)
            self.forget(wanted)
        return None

    def _wanted(self) -> list[int] | None:
        """A pair that no row has yet, or else a triple. None if there is none."""
        if self.open_pairs.any():
            left = self.open_pairs.sum(axis=1)
            one = int(left.argmax())
            return [one, int((self.open_pairs[one] * (left + 1)).argmax())]
        open_triples = self._open * self._weight
        if not open_triples.any():
            return None
        one = int(open_triples.argmax())
        return [one, *divmod(int(self.open_triples[one].argmax()), len(self.factor))]

    def add(self, row: Row) -> Row:
        """Counts what a row completes. The row may come from elsewhere."""
        self._close(row, self.open_pairs, self.open_triples)
        self._count(self._numbers(row))
        self.used[self._numbers(row)] += 1.0
        return row

    def _count(self, levels: Sequence[int]) -> None:
        """Counts the open triples of each of these levels again.

        To count one plane after the other takes a twentieth of the time of a sum over two axes.
        """
        for level in levels:
            self._open[level] = np.count_nonzero(self.open_triples[level])

    def _numbers(self, row: Row) -> list[int]:
        """The numbers of its levels among all levels."""
        return [int(self.starts[factor]) + level for factor, level in enumerate(row)]

    def _places(self, row: Row, size: int) -> list[list[int]]:
        """The levels that can stand in each place of the pairs, or triples, that a row completes.

        The row completes what has all of its hiding levels, and any of its levels in the other places.
        """
        levels = self._numbers(row)
        hiding = [level for level in levels if self._hiding[level]]
        if len(hiding) > size:
            return [[]] * size
        return [*([level] for level in hiding), *[levels] * (size - len(hiding))]

    def _completes(self, row: Row) -> bool:
        """Whether a row holds an open pair or triple."""
        found = ((self.open_pairs, 2), (self.open_triples, 3))
        return any(bool(left[np.ix_(*self._places(row, size))].any()) for left, size in found)

    def _close(self, row: Row, pairs: np.ndarray, triples: np.ndarray) -> None:
        """Takes what a row completes out of open pairs and triples."""
        for found, size in ((pairs, 2), (triples, 3)):
            places = self._places(row, size)
            for order in permutations(range(size)):
                found[np.ix_(*(places[place] for place in order))] = False

    def completed(self, rows: Sequence[Row]) -> tuple[int, int]:
        """How many open pairs and triples these rows hold. They stay open."""
        pairs, triples = self.open_pairs.copy(), self.open_triples.copy()
        for row in rows:
            self._close(row, pairs, triples)
        return (int(self.open_pairs.sum() - pairs.sum()) // 2, int(self.open_triples.sum() - triples.sum()) // 6)

    def forget(self, levels: Sequence[int]) -> None:
        """Marks a pair or a triple as impossible. levels: numbers among all levels."""
        self.forgotten.append(list(levels))
        if len(levels) == 2:
            places = np.ix_(levels, levels)
            self.pairs[places] = self.open_pairs[places] = False
        for order in permutations(levels):
            self.triples[order] = self.open_triples[order] = False
        self._count(levels)

    def _completed(self, chosen: list[int]) -> Row | None:
        """A row with these levels that completes much; None if there is no row with them.

        At a dead end, the factor that no level was left for gets its level first in the next try.
        """
        first: list[int] = []
        while len(first) < _TRIES:
            row, stuck = self._greedy(chosen, first, self._costs + self.used / 1e3)
            if row is not None:
                return row
            if stuck in first:
                break
            first.append(stuck)
        return self._greedy(chosen, first, self._plainly)[0]

    def _greedy(self, chosen: list[int], first: list[int], cost: np.ndarray) -> tuple[Row | None, int]:
        """Takes the level that completes most, less its cost, until each factor has one.

        first: factors that get a level before the others. Returns None and the factor that has no level left at a dead
        end.
        """
        row = self._row(*chosen)
        gain = np.zeros(len(self.factor))
        worth_so_far = 0.0  # what the row completes by now; a hiding level would take it away
        possible = np.ones(len(self.factor), dtype=bool)
        taken: list[int] = []
        for level in chosen:
            self._take(level, taken, gain, possible)
        while OPEN in row:
            early = [factor for factor in first if row[factor] == OPEN]
            mine = possible & (self.factor == early[0]) if early else possible
            worth = np.where(mine, gain - cost, -np.inf)
            worth[self._hiding] -= worth_so_far
            while True:
                level = int(worth.argmax())
                if worth[level] == -np.inf:
                    return None, early[0] if early else row.index(OPEN)
                factor = int(self.factor[level])
                row[factor] = int(level - self.starts[factor])
                if self.allowed(row, factor):
                    break
                row[factor] = OPEN
                worth[level] = -np.inf
                possible[level] = False
            worth_so_far = 0.0 if self._hiding[level] else worth_so_far + gain[level]
            self._take(level, taken, gain, possible)
        return tuple(row), OPEN

    def _take(self, level: int, taken: list[int], gain: np.ndarray, possible: np.ndarray) -> None:
        """Counts what each level would complete together with this one and those that are taken."""
        with_it = self.open_triples[:, level]
        before = [other for other in taken if self._hiding[other]]
        if before:
            triples = with_it[:, before[0]] * (self._weight[before[0]] * self._weight[level])
        else:
            triples = with_it[:, taken].astype(np.float32) @ self._weight[taken] * self._weight[level]
        if not before and not self._hiding[level]:
            gain += _PAIR * self.open_pairs[:, level] + triples
        elif not before:  # nothing counts any more but what is with this level
            gain[:] = _PAIR * self.open_pairs[:, level] + triples
        elif len(before) == 1 and not self._hiding[level]:
            gain += triples
        elif len(before) == 1:
            gain[:] = triples
        elif self._hiding[level]:
            gain[:] = 0.0
        taken.append(level)
        possible &= self.pairs[:, level]

    @property
    def possible_pairs(self) -> int:
        """How many there are."""
        return int(self.pairs.sum()) // 2

    @property
    def coverage(self) -> tuple[Coverage, Coverage]:
        """Of pairs and of triples."""
        pairs, triples = self.possible_pairs, int(np.count_nonzero(self.triples)) // 6
        return (
            Coverage(pairs - int(np.count_nonzero(self.open_pairs)) // 2, pairs),
            Coverage(triples - int(np.count_nonzero(self.open_triples)) // 6, triples),
        )
