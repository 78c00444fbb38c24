"""What the failing cases of an implementation have in common, and few of its passing cases have: where it is wrong.

One case rarely shows where a fault is: it has many properties, and most of them do not matter. All cases together do.
The statement names few properties together, such as `mask causal-br and at least 1,025 keys`. It describes the cases of
a run, and counts them. It is no proof that the fault needs these properties.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache

from flashproof.cases import Case
from flashproof.reports import wording
from flashproof.reports.record import Judgement
from flashproof.space import FACTORS, PLAIN, levels

Holds = Callable[[Case], bool]  # whether a case has a property
MOST = 3  # properties of a statement
HELD = 0.9  # the share of the failing cases that must have all of them; a check may also call with another case
EXCLUDED = 0.5  # the least share of the remaining passing cases that a further property excludes
FEWEST = 3  # failing cases; fewer of them have many properties in common by chance
# Sizes for which a property is a least or a largest number, in words. {}: "at least 8".
SIZES: dict[str, Callable[[Case], int]] = {
    "a batch of {}": lambda case: case.batch,
    "{} key heads": lambda case: case.kv_heads,
    "{} query heads for each key head": lambda case: case.heads // case.kv_heads,
    "{} queries": lambda case: case.queries,
    "{} keys": lambda case: case.keys,
    "a head dim of {}": lambda case: case.dim,
}
_BY_SIZE = {"batch", "key heads", "group", "queries", "keys", "head dim", "queries' rest", "keys' rest"}  # factors


@dataclass(frozen=True)
class Shared:
    """The properties, in words, and how many of the failing and of the passing cases have all of them."""

    words: str
    failing: tuple[int, int]  # of how many
    passing: tuple[int, int]

    def __str__(self) -> str:
        (failing, failed), (passing, passed) = self.failing, self.passing
        who = f"All {failed:,}" if failing == failed else f"{failing:,} of {failed:,}"
        that = "them" if " and " in self.words else "that"
        others = (
            f"{passing:,} of {passed:,} passing cases have {that}, too" if passing else f"no passing case has {that}"
        )
        return f"{who} failing cases have {self.words}; {others}"


_parsed = lru_cache(maxsize=None)(Case.parse)


def shared(judgements: Sequence[Judgement]) -> Shared | None:
    """What the failing cases have in common. None if nothing tells them from the passing cases.

    Cases in which no failing tensor was judged are left out: they cannot show the fault. A failure without a tensor,
    such as a changed input, can show in every case.
    """
    failures = [one for one in judgements if one.status == "failed" and one.case]
    wrong = {one.case for one in failures}
    tensors = {one.tensor for one in failures}
    right = {one.case for one in judgements if one.case and (None in tensors or one.tensor in tensors)} - wrong
    failing, passing = ([case for line in lines if (case := _case(line))] for lines in (sorted(wrong), sorted(right)))
    if len(failing) < FEWEST or not passing:
        return None
    candidates = list(_candidates(failing))
    chosen: list[str] = []
    left, others = failing, passing
    while others and len(chosen) < MOST:
        best = max(
            ((words, holds) for words, holds in candidates if _held(left, holds) >= HELD * len(failing)),
            key=lambda one: _worth(left, others, one[1]),
            default=None,
        )
        if best is None or _held(others, best[1]) > (1.0 - EXCLUDED) * len(others):
            break
        chosen.append(best[0])
        left, others = ([case for case in cases if best[1](case)] for cases in (left, others))
    if not chosen:
        return None
    return Shared(wording.listed(chosen), (len(left), len(failing)), (len(others), len(passing)))


def _case(line: str) -> Case | None:
    try:
        return _parsed(line)
    except ValueError:
        return None


def _held(cases: Sequence[Case], holds: Holds) -> int:
    return sum(map(holds, cases))


def _worth(failing: Sequence[Case], passing: Sequence[Case], holds: Holds) -> float:
    """The share of the passing cases that a property excludes, less twice that of the failing cases."""
    return 2.0 * _held(failing, holds) / len(failing) - _held(passing, holds) / len(passing)


def _candidates(failing: Sequence[Case]) -> Iterator[tuple[str, Holds]]:
    """Properties that most of these cases have, each with its words."""
    for words, size in SIZES.items():
        sizes = sorted(map(size, failing))
        few = int((1.0 - HELD) * len(sizes))
        for least in {sizes[0], sizes[few]}:
            yield words.format(f"at least {least:,}"), _is_within(size, least, math.inf)
        for most in {sizes[-1], sizes[-1 - few]}:
            yield words.format(f"at most {most:,}"), _is_within(size, 1, most)
    for multiple in (8, 16, 64):
        yield f"a head dim that is no multiple of {multiple}", _is_no_multiple(multiple)
    yield "as many keys as queries", lambda case: case.keys == case.queries
    yield "another number of keys than of queries", lambda case: case.keys != case.queries
    for factor in FACTORS:
        if factor.name in _BY_SIZE:
            continue
        found = {_levels(case)[factor.name] for case in failing}
        for level in sorted(found):
            yield f"{factor.name} {level}", _has(factor.name, {level})
        others = {*factor.levels, "another"} - {plain := PLAIN[factor.name]}
        if len(found) > 1:
            yield f"{factor.name} other than {plain}", _has(factor.name, others)


def _is_within(size: Callable[[Case], int], least: float, most: float) -> Holds:
    return lambda case: least <= size(case) <= most


def _is_no_multiple(number: int) -> Holds:
    return lambda case: case.dim % number > 0


def _has(factor: str, levels: Set[str]) -> Holds:
    return lambda case: _levels(case)[factor] in levels


@cache
def _levels(case: Case) -> dict[str, str]:
    return levels(case)
