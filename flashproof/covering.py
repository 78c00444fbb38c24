"""Covering arrays: few rows that contain every pair of levels, and as many triples as the rows can hold.

The construction is the greedy one of AETG (Cohen, Dalal, Fredman and Patton, IEEE Trans. Softw. Eng. 23(7), 1997) with
constraints. Each row starts with a pair that no row contains yet. Then it takes, one at a time, the level that
completes most new pairs, and among equals most new triples. The construction uses no random numbers, so an array is the
same on every machine.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

STRENGTH = 4  # the number of levels of different factors that `every_four` combines
Row = tuple[int, ...]  # for each factor, the number of its level
Partial = Sequence[int]  # the same, with -1 for a factor that has no level yet
# Whether some row with these levels is allowed in an array. The second argument is the factor whose level is new, if
# the other levels are already known to be allowed. Otherwise it is None.
Allowed = Callable[[Partial, int | None], bool]
OPEN = -1
_TRIES = 6  # attempts to build a row, each of which may reach a dead end
PAIR = 1e6  # the value of a new pair, in new triples: more than all triples of a row
_OF_COARSE = 1e5  # the cost of a coarse level in a row for a seldom level: more than all triples, less than a pair


@dataclass(frozen=True)
class Coverage:
    """The number of pairs, or triples, that are possible, and the number that some row contains."""

    covered: int
    possible: int

    @property
    def share(self) -> float:
        """The covered share, between 0 and 1."""
        return self.covered / self.possible if self.possible else 1.0


class Covering:
    """The pairs and triples of levels that are possible, and which of them some row already contains.

    sizes: the number of levels of each factor. Level 0 of a factor is its plain level. allowed: whether a part of a row
    is allowed. If an allowed pair or triple fits in no row, `next_row` finds this out and counts it as impossible.
    weights: the weight of each factor; a triple counts for the product of its three weights. costs: the costs of each
    factor's levels, in new triples. A level with a cost is taken where a pair or many triples need it. coarse: for each
    factor, whether its levels hide small faults. Few rows contain a level that has a cost. A row for such a level
    avoids coarse levels where it can.

    hides: what hides the faults of other levels in some tensors of an answer: one level or two, each by the numbers of
    its factor and of itself, and the names of the tensors. A pair is complete when each tensor is shown by some row
    that contains the pair, except the tensors that the pair itself hides. A row in which one level hides a tensor
    completes only triples that contain this level.

    dense: whether a row for a triple has no hiding level beside it. A row then completes more triples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        allowed: Allowed,
        weights: Sequence[float] | None = None,
        costs: Sequence[Sequence[float]] | None = None,
        hides: Sequence[tuple[Sequence[tuple[int, int]], Collection[str]]] = (),
        coarse: Sequence[Sequence[bool]] | None = None,
        dense: bool = False,
    ) -> None:
        self.sizes = tuple(sizes)
        self.allowed = allowed
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.factor = np.repeat(np.arange(len(self.sizes)), self.sizes)
        weight = np.ones(len(self.sizes)) if weights is None else np.asarray(weights, dtype=float)
        self._weight = (weight / weight.max())[self.factor].astype(np.float32)
        self.pairs = self._possible_pairs()
        self.triples = self._possible_triples()
        self.open_triples = self.triples.copy()
        self.forgotten: list[list[int]] = []  # pairs and triples that were found to be impossible
        # For each tensor, whether each two levels show it, and on the diagonal whether each level does. All levels show
        # the first tensor, which stands for the whole answer.
        names = ["", *sorted({name for _, tensors in hides for name in tensors})]
        self._shows = np.ones((len(names), len(self.factor), len(self.factor)), dtype=bool)
        for levels, tensors in hides:
            numbers = [int(self.starts[factor]) + level for factor, level in levels]
            for name in tensors:
                self._shows[names.index(name), numbers[0], numbers[-1]] = False
                self._shows[names.index(name), numbers[-1], numbers[0]] = False
        alone = self._shows.diagonal(axis1=1, axis2=2)
        # For each tensor, the pairs that show it and that no row with this tensor shown contains yet.
        self._open_pairs = self.pairs & self._shows & alone[:, :, None] & alone[:, None, :]
        self._open = np.zeros(len(self.factor), dtype=int)  # the number of open triples of each level
        self._count(range(len(self.factor)))
        # The number of rows that contain each level. Of two levels with equal gain, the construction takes the rarer
        # one.
        self.used = np.zeros(len(self.factor))
        self._costs = np.zeros(len(self.factor)) if costs is None else np.concatenate(costs)
        self._hiding: np.ndarray = np.logical_not(alone.all(axis=0))
        self._fits: np.ndarray = ~self._hiding if dense else np.ones(len(self.factor), dtype=bool)
        self._coarse = np.zeros(len(self.factor)) if coarse is None else _OF_COARSE * np.concatenate(coarse)
        # These costs make the plain levels the first choice. The other levels follow in their order.
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
            factor = int(self.factor[other])
            if factor != self.factor[one] and self.allowed(self._row(one, other), factor):
                found[one, other] = found[other, one] = True
        return found

    def _possible_triples(self) -> np.ndarray:
        """The triples whose pairs are possible. A few of these triples are impossible; `next_row` finds them."""
        return self.pairs[:, :, None] & self.pairs[:, None, :] & self.pairs[None, :, :]

    def next_row(self) -> Row | None:
        """A new row that completes a pair, or a triple if no pair is open. None if nothing is left to complete."""
        while (wanted := self._wanted()) is not None:
            row = self._completed(wanted) if self.allowed(self._row(*wanted), None) else None
            if row is not None and self._completes(row, wanted):
                return self.add(row)
            self.forget(wanted)
        return None

    def _wanted(self) -> list[int] | None:
        """A pair that no row contains yet, or else a triple. None if both are complete."""
        if self._open_pairs.any():
            open_pairs = self._open_pairs.sum(axis=0)
            left = open_pairs.sum(axis=1)
            one = int(left.argmax())
            return [one, int((open_pairs[one] * (left + 1)).argmax())]
        open_triples = self._open * self._weight
        if not open_triples.any():
            return None
        one = int(open_triples.argmax())
        return [one, *divmod(int(self.open_triples[one].argmax()), len(self.factor))]

    def add(self, row: Row) -> Row:
        """Marks what a row completes, and returns the row. The row may come from elsewhere."""
        self._close(row, self._open_pairs, self.open_triples)
        self._count(self._numbers(row))
        self.used[self._numbers(row)] += 1.0
        return row

    def _count(self, levels: Sequence[int]) -> None:
        """Counts the open triples of each of these levels again.

        Counting one plane after another takes a twentieth of the time of a sum over two axes.
        """
        for level in levels:
            self._open[level] = np.count_nonzero(self.open_triples[level])

    def _numbers(self, row: Row) -> list[int]:
        """The numbers of a row's levels among all levels."""
        return [int(self.starts[factor]) + level for factor, level in enumerate(row)]

    def _triples_of(self, row: Row) -> list[list[int]]:
        """For each place of a triple, the levels that a row can complete there.

        The row completes only triples that contain all of its hiding levels. Any of its levels fits in the other
        places.
        """
        levels = self._numbers(row)
        hiding = [level for level in levels if self._hiding[level]]
        if len(hiding) > 3:
            return [[]] * 3
        return [*([level] for level in hiding), *[levels] * (3 - len(hiding))]

    def _could_show(self, one: int, other: int) -> np.ndarray:
        """For each tensor, whether two levels show it."""
        levels = [one, other]
        return np.array([of_tensor[np.ix_(levels, levels)].all() for of_tensor in self._shows])

    def _shown(self, row: Row) -> list[int]:
        """The numbers of the tensors that a row shows."""
        levels = self._numbers(row)
        found: list[int] = np.flatnonzero(self._shows[:, levels][:, :, levels].all(axis=(1, 2))).tolist()
        return found

    def _completes(self, row: Row, wanted: list[int]) -> bool:
        """Whether a row with a pair, or a triple, of levels completes it in a tensor that it did not show yet."""
        if len(wanted) == 2:
            return bool(self._open_pairs[self._shown(row), wanted[0], wanted[1]].any())
        return all(level in wanted for level in self._numbers(row) if self._hiding[level])

    def _close(self, row: Row, pairs: np.ndarray, triples: np.ndarray) -> None:
        """Removes what a row completes from the open pairs and triples."""
        levels = self._numbers(row)
        pairs[np.ix_(self._shown(row), levels, levels)] = False
        for places in set(permutations(tuple(place) for place in self._triples_of(row))):
            triples[np.ix_(*places)] = False

    def completed(self, rows: Sequence[Row]) -> tuple[int, int]:
        """The number of open pairs and of open triples that these rows contain. They stay open."""
        pairs, triples = self._open_pairs.copy(), self.open_triples.copy()
        for row in rows:
            self._close(row, pairs, triples)
        left = pairs.any(axis=0)
        return (int(self.open_pairs.sum() - left.sum()) // 2, int(self.open_triples.sum() - triples.sum()) // 6)

    def forget(self, levels: Sequence[int]) -> None:
        """Marks a pair or a triple as impossible. levels: numbers among all levels.

        A pair that some row contains is possible. Then no row shows the other tensors together with this pair.
        """
        self.forgotten.append(list(levels))
        if len(levels) == 3:
            for order in permutations(levels):
                self.triples[order] = self.open_triples[order] = False
            self._count(levels)
            return
        one, other = levels
        is_complete = (self._could_show(one, other) & ~self._open_pairs[:, one, other]).any()
        for first, second in ((one, other), (other, one)):
            self._open_pairs[:, first, second] = False
            if is_complete:
                continue
            self.pairs[first, second] = False
            for found in (self.triples, self.open_triples):
                found[first, second] = found[:, first, second] = found[first, :, second] = False
        self._count(range(len(self.factor)))

    def _completed(self, chosen: list[int]) -> Row | None:
        """A row with these levels that completes much. None if no row with these levels was found.

        After a dead end, the factor for which no level was left gets its level first in the next attempt.
        """
        first: list[int] = []
        while len(first) < _TRIES:
            cost = self._costs + self.used / 1e3 + (self._coarse if self._costs[chosen].any() else 0.0)
            row, stuck = self._greedy(chosen, first, cost)
            if row is not None:
                return row
            if stuck in first:
                break
            first.append(stuck)
        return self._greedy(chosen, first, self._plainly)[0]

    def _greedy(self, chosen: list[int], first: list[int], cost: np.ndarray) -> tuple[Row | None, int]:
        """Takes the level with the largest gain less its cost, until each factor has a level.

        first: factors that get a level before the others. At a dead end, the function returns None and the factor for
        which no level is left.
        """
        row = self._row(*chosen)
        gain = _Gain(self, chosen)
        possible = self._fits.copy() if len(chosen) > 2 else np.ones(len(self.factor), dtype=bool)
        for level in chosen:
            gain.take(level)
            possible &= self.pairs[:, level]
        while OPEN in row:
            early = [factor for factor in first if row[factor] == OPEN]
            mine = possible & (self.factor == early[0]) if early else possible
            worth = np.where(mine, gain.worth - cost, -np.inf)
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
            gain.take(level)
            possible &= self.pairs[:, level]
        return tuple(row), OPEN

    @property
    def open_pairs(self) -> np.ndarray:
        """The pairs that are not complete."""
        found: np.ndarray = np.logical_or.reduce(self._open_pairs, axis=0)
        return found

    @property
    def possible_pairs(self) -> int:
        """The number of possible pairs."""
        return int(self.pairs.sum()) // 2

    @property
    def coverage(self) -> tuple[Coverage, Coverage]:
        """The coverage of pairs and of triples."""
        pairs, triples = self.possible_pairs, int(np.count_nonzero(self.triples)) // 6
        return (
            Coverage(pairs - int(np.count_nonzero(self.open_pairs)) // 2, pairs),
            Coverage(triples - int(np.count_nonzero(self.open_triples)) // 6, triples),
        )


class _Gain:
    """The gain of each level in a row that is being built: what the row completes with this level."""

    def __init__(self, covering: Covering, wanted: list[int]) -> None:
        self._covering = covering
        self._taken: list[int] = []
        self._is_of_pairs = len(wanted) == 2  # a row is for a triple only when all pairs are complete
        tensors, levels, _ = covering._shows.shape
        # For each tensor, the levels with which the row shows it.
        self._shown = covering._shows.diagonal(axis1=1, axis2=2).copy()
        # For each tensor, the new pairs of the levels that are taken. The pair that the row is for counts for more than
        # all other pairs of a row.
        self._so_far = 1e3 * covering._open_pairs[:, wanted[0], wanted[1]]
        self._pairs = np.zeros((tensors, levels))  # for each tensor, the new pairs of each level with the taken ones
        self._triples_so_far = 0.0
        self._triples = np.zeros(levels)

    @property
    def worth(self) -> np.ndarray:
        """The value of the row with each level, in new triples. What a hiding level hides is lost."""
        kept = np.where(self._covering._hiding, 0.0, self._triples_so_far)
        if not self._is_of_pairs:
            return self._triples + kept
        of_tensors = (self._shown * (self._so_far[:, None] + self._pairs)).sum(axis=0)
        return PAIR / len(self._shown) * of_tensors + self._triples + kept

    def take(self, level: int) -> None:
        """Adds a level to the row."""
        covering, hiding = self._covering, self._covering._hiding
        if self._is_of_pairs:
            self._so_far += self._pairs[:, level]
            self._shown &= covering._shows[:, level] & self._shown[:, level, None]
            self._pairs += covering._open_pairs[:, level]
        self._triples_so_far = 0.0 if hiding[level] else self._triples_so_far + self._triples[level]
        with_it, weight = covering.open_triples[level], covering._weight
        before = [other for other in self._taken if hiding[other]]
        third = before or self._taken
        triples = weight[third] @ with_it[third].astype(np.float32) * weight[level] * (len(before) < 2)
        # From a hiding level on, only the triples that contain it count.
        self._triples = triples if hiding[level] else self._triples + triples
        self._taken.append(level)


def every_four(sizes: Sequence[int], allowed: Allowed) -> list[Row]:
    """Few rows that contain every allowed combination of four levels, for a small number of factors.

    sizes, allowed: as in `Covering`. The construction is the same, without triples: a row starts with a combination
    that no row contains yet, and each further factor takes the level that completes most.
    """
    factors = range(len(sizes))
    left = {
        place: np.ones([sizes[factor] for factor in place], dtype=bool) for place in combinations(factors, STRENGTH)
    }
    of_factor = [
        [
            (tuple(other for other in place if other != factor), place, ones)
            for place, ones in left.items()
            if factor in place
        ]
        for factor in factors
    ]
    rows: list[Row] = []
    for place, open_ones in left.items():
        for chosen in np.argwhere(open_ones).tolist():
            if not open_ones[tuple(chosen)]:
                continue
            row = [OPEN] * len(sizes)
            for factor, level in zip(place, chosen, strict=True):
                row[factor] = level
            if allowed(row, None) and _fill(row, sizes, allowed, of_factor):
                rows.append(tuple(row))
                for others, completed in left.items():
                    completed[tuple(row[factor] for factor in others)] = False
    return rows


# For each factor, every choice of factors with it: the others, all of them, and which of their combinations are open.
_OfFactor = list[list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]]


def _fill(row: list[int], sizes: Sequence[int], allowed: Allowed, of_factor: _OfFactor) -> bool:
    """Gives the open factors of a row their levels. Returns whether it found some for all of them.

    The factor with the fewest levels that are still allowed is first. After a dead end, the last choice is changed.
    """
    choices = {
        factor: [level for level in range(sizes[factor]) if _fits(row, factor, level, allowed)]
        for factor, taken in enumerate(row)
        if taken == OPEN
    }
    if not choices:
        return True
    factor = min(choices, key=lambda factor: len(choices[factor]))
    gains = np.zeros(sizes[factor])
    chosen = {other for other, taken in enumerate(row) if taken != OPEN}
    for others, place, ones in of_factor[factor]:
        if chosen.issuperset(others):
            gains += ones[tuple(slice(None) if other == factor else row[other] for other in place)]
    for level in sorted(choices[factor], key=lambda level: -gains[level]):
        row[factor] = level
        if _fill(row, sizes, allowed, of_factor):
            return True
    row[factor] = OPEN
    return False


def _fits(row: list[int], factor: int, level: int, allowed: Allowed) -> bool:
    row[factor] = level
    fits = allowed(row, factor)
    row[factor] = OPEN
    return fits
