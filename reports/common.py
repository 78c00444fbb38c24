"""What the failing cases of an implementation have in common, and few of its passing cases have: where it is wrong.

One case rarely shows where a fault is: it has many properties, and most of them do not matter. All cases together do.
The statement names few properties together, such as `mask causal-br and at least 1,025 keys`. It describes the cases of
a run, and counts them. It is no proof that the fault needs these properties.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from flashproof.cases import SHARED, Case
from flashproof.reports import wording
from flashproof.reports.record import Judgement
from flashproof.space import FACTORS, PLAIN, levels

Holds = Callable[[Case], bool]  # whether a case has a property
MOST = 4  # properties of a statement
HELD = 0.9  # the share of the failing cases that must have all of them; a check may also call with another case
EXCLUDED = 0.5  # the least share of the remaining passing cases that a further property excludes
FIRST, FURTHER = 8.0, 20.0  # bits of evidence (`_evidence`) for the first property, and for each further one
MORE = 3  # times as many passing as failing cases lack a property
COMMON = 0.05  # the share of passing cases from which on a property is said not to decide
SPREAD = 1.5  # scores that differ by more are large
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
    """The properties, in words, and how many of the failing and of the passing cases have all of them.

    cases: the lines of the failing cases that have them.
    """

    words: str
    failing: tuple[int, int]  # of how many
    passing: tuple[int, int]
    cases: frozenset[str] = frozenset()
    count: int = 1  # of the properties

    def __str__(self) -> str:
        (failing, failed), (passing, passed) = self.failing, self.passing
        who = f"All {failed:,}" if failing == failed else f"{failing:,} of {failed:,}"
        is_one = " and " not in self.words
        if not passing:
            return f"{who} failing cases have {self.words}; no passing case has {'that' if is_one else 'them'}"
        others = f"but so do {passing:,} of {passed:,} passing cases"
        if passing > COMMON * passed:
            others += f": {'this alone does' if is_one else 'these alone do'} not decide"
        return f"{who} failing cases have {self.words}, {others}"


_parsed = lru_cache(maxsize=None)(Case.parse)


def shared(judgements: Sequence[Judgement]) -> Shared | None:
    """What the failing cases have in common. None if nothing tells them from the passing cases.

    Cases in which no failing tensor was judged are left out: they cannot show the fault. A failure without a tensor,
    such as a changed input, can show in every case.
    """
    failures = [one for one in judgements if one.status == "failed" and one.case]
    wrong = {one.case for one in failures}
    tensors = {one.tensor for one in failures}
    right = {
        one.case
        for one in judgements
        if one.status == "passed" and one.case and (None in tensors or one.tensor in tensors)
    } - wrong
    lines = {line: case for line in sorted(wrong) if (case := _case(line))}
    failing, passing = list(lines.values()), [case for line in sorted(right) if (case := _case(line))]
    if len(failing) < FEWEST or not passing:
        return None
    candidates = list(_candidates(failing))
    chosen = _needed(_chosen(candidates, failing, passing), failing, passing)
    if not chosen:
        return None
    left, others = (_all_held(cases, chosen) for cases in (failing, passing))
    counts = (len(left), len(failing)), (len(others), len(passing))
    held = set(left)
    rests = [[other for other in chosen if other is not one] for one in chosen]
    words = wording.listed(
        one.words + _next_size(one, rest, failing, passing) for one, rest in zip(chosen, rests, strict=True)
    )
    return Shared(words, *counts, frozenset(line for line, case in lines.items() if case in held), len(chosen))


@dataclass(frozen=True)
class Property:
    """A property of cases, in words. size, least, most: those of a property that is a range of sizes."""

    words: str
    holds: Holds
    size: Callable[[Case], int] | None = None
    least: float = 1
    most: float = math.inf


def _next_size(one: Property, rest: Sequence[Property], failing: Sequence[Case], passing: Sequence[Case]) -> str:
    """The next size outside a range, in words, if cases with the other properties were run in it, and all passed."""
    if not one.size or not all(map(one.holds, failing)):
        return ""
    outside = [one.size(case) for case in _all_held(passing, rest) if not one.holds(case)]
    if not outside:
        return ""
    return f" (a case with {max(outside) if one.least > 1 else min(outside):,} passes)"


def _chosen(candidates: Sequence[Property], failing: Sequence[Case], passing: Sequence[Case]) -> list[Property]:
    """Properties that failing cases share, one by one: each excludes the most passing cases that are left."""
    chosen: list[Property] = []
    left, others = failing, passing
    while others and len(chosen) < MOST:
        fitting = [one for one in candidates if _held(left, one.holds) >= HELD * len(failing)]
        best = max(fitting, key=lambda one: _worth(left, others, one.holds), default=None)
        least = FURTHER if chosen else FIRST
        if best is None or _held(others, best.holds) > (1.0 - EXCLUDED) * len(others):
            break
        lost = [len(cases) - _held(cases, best.holds) for cases in (left, others)]
        if _evidence(left, others, best.holds) < least or lost[1] < MORE * lost[0]:
            break
        chosen.append(best)
        left, others = ([case for case in cases if best.holds(case)] for cases in (left, others))
    return chosen


def _needed(chosen: list[Property], failing: Sequence[Case], passing: Sequence[Case]) -> list[Property]:
    """The properties without those that, beside the others, exclude too few passing cases (`FURTHER`).

    Such a property repeats another one, or only how the failing cases were drawn.
    """
    for one in reversed(chosen):
        rest = [other for other in chosen if other is not one]
        if rest and _evidence(_all_held(failing, rest), _all_held(passing, rest), one.holds) < FURTHER:
            return _needed(rest, failing, passing)
    return chosen


def _all_held(cases: Sequence[Case], properties: Sequence[Property]) -> list[Case]:
    return [case for case in cases if all(one.holds(case) for one in properties)]


def _evidence(failing: Sequence[Case], passing: Sequence[Case], holds: Holds) -> float:
    """The bits of evidence that a property separates failing from passing cases.

    If it does not, so many passing cases lack it by chance once in two to this power (Fisher's exact test).
    """
    wrong, right = len(failing), len(passing)
    excluded = right - _held(passing, holds)
    outside = excluded + wrong - _held(failing, holds)
    ways = sum(math.comb(right, more) * math.comb(wrong, outside - more) for more in range(excluded, outside + 1))
    return math.log2(math.comb(wrong + right, outside)) - math.log2(ways)


class Needs(NamedTuple):
    """A failing case that was made as simple as possible, and the properties without each of which it passes, in words.

    everywhere: those that all failing cases have. here: those that some lack.
    """

    case: str
    everywhere: tuple[str, ...]
    here: tuple[str, ...] = ()

    def __str__(self) -> str:
        each = ("that", "either")[len(self.everywhere) - 1] if len(self.everywhere) < 3 else "any one of these"
        told = f"All failing cases have {wording.listed(self.everywhere)}"
        told += f". The simplest one, {self.case}, passes without {each}"
        return told + (f", and also without {wording.listed(self.here, 'or')}" if self.here else "")


_WORDS = {
    "group": "{} query heads for each key head",
    "key heads": "{} key heads",
    "batch": "a batch of {}",
    "head dim": "a head dim of {}",
}
_RESTS = {
    "of 64": "that is a multiple of 64",
    "of 16": "that is a multiple of 16",
    "even": "that is a multiple of 2",
    "odd": "that is odd",
}
_DIVISORS = {"of 64": 64, "of 16": 16, "even": 2}


def _in_words(name: str, level: str) -> str:
    """A level of a factor, such as `even` of `keys' rest`, in plainer words."""
    if name in _WORDS:
        return _WORDS[name].format(level)
    of_what = name.removesuffix("' rest")
    return f"a number of {of_what} {_RESTS[level]}" if of_what != name else f"{name} {level}"


def _of_all(name: str, level: str, failing: Sequence[Case]) -> str:
    """What all failing cases have of a level that one of them needs, in words. Empty if they have nothing of it."""
    if all(_levels(case)[name] == level for case in failing):
        return _in_words(name, level)
    words = _WORDS.get(name, "")
    if words in SIZES and (least := min(map(SIZES[words], failing))) > 1:
        return words.format(f"at least {least:,}")
    if name.endswith("' rest") and level in _DIVISORS:
        sizes = [case.keys if name.startswith("keys") else case.queries for case in failing]
        common = next((rest for rest, divisor in _DIVISORS.items() if not any(size % divisor for size in sizes)), "")
        return _in_words(name, common) if common else ""
    return ""


FEW = 5  # properties of a case that a sentence can name


def needs(judgements: Sequence[Judgement]) -> Needs | None:
    """What all failing cases have of what the simplest one needs. None if this is nothing, or if each needs much."""
    failures = [one for one in judgements if one.status == "failed" and one.case]
    found = [(case, words.split(", ")) for one in failures for case, words in _NEEDS.findall(one.message)]
    case, needed = min(found, key=lambda one: (len(one[1]), one[0]), default=("", []))
    failing = [parsed for line in sorted({one.case for one in failures}) if (parsed := _case(line))]
    if not 0 < len(needed) <= FEW or not failing:
        return None
    everywhere, here = list[str](), list[str]()
    names = sorted((factor.name for factor in FACTORS), key=len, reverse=True)
    for one in needed:
        name = next((name for name in names if one.startswith(f"{name} ")), "")
        level = one.removeprefix(f"{name} ")
        shared = _of_all(name, level, failing) if name else ""
        (everywhere if shared else here).append(shared or _in_words(name, level))
    return Needs(case, tuple(everywhere), tuple(here)) if everywhere else None


_NEEDS = re.compile(r"(?m)^the simplest case that fails: (.*?); it needs (.*)$")


def without_needs(text: str) -> str:
    """The text of a failure without the properties that its single case needs.

    Another failure may need others, so where all of them have something in common, these words contradict it.
    """
    return re.sub(r"(?m)^(the simplest case that fails: .*); it needs .*$", r"\1", text)


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


def _candidates(failing: Sequence[Case]) -> Iterator[Property]:
    """Properties that most of these cases have."""
    for words, size in SIZES.items():
        sizes = sorted(map(size, failing))
        few = int((1.0 - HELD) * len(sizes))
        for least in {sizes[0], sizes[few]}:
            yield _range(words.format(f"at least {least:,}"), size, least, math.inf)
        for most in {sizes[-1], sizes[-1 - few]}:
            yield _range(words.format(f"at most {most:,}"), size, 1, most)
    spreads = sorted(map(_spread, failing))
    for spread in {spreads[0], spreads[int((1.0 - HELD) * len(spreads))]}:
        if spread >= SPREAD:
            yield Property(f"scores that differ by about {spread:.2g} or more", _spreads_by(spread))
    for multiple in (8, 16, 64):
        yield Property(f"a head dim that is no multiple of {multiple}", _is_no_multiple(multiple))
    for words, size in (("queries", _queries), ("keys", _keys)):
        for multiple in (2, 16, 64):
            yield Property(f"a number of {words} that is a multiple of {multiple}", _is_multiple(size, multiple))
            yield Property(
                f"a number of {words} that is no multiple of {multiple}", _is_multiple(size, multiple, not_=True)
            )
    for place, name in enumerate("qkv"):
        yield Property(f"the heads of {name} interleaved in memory", _is_interleaved(place))
    yield Property("no gradients", lambda case: not case.backward)
    yield Property("gradients turned off", lambda case: not case.backward and case.call != "forward")
    yield Property("as many keys as queries", lambda case: case.keys == case.queries)
    yield Property("another number of keys than of queries", lambda case: case.keys != case.queries)
    for factor in FACTORS:
        if factor.name in _BY_SIZE:
            continue
        found = {_levels(case)[factor.name] for case in failing}
        for level in sorted(found):
            yield Property(f"{factor.name} {level}", _has(factor.name, {level}))
        if len(found) < 2:
            continue
        every, plain = {*factor.levels, "another"}, PLAIN[factor.name]
        if factor.name != "dtype":
            yield Property(f"{factor.name} other than {plain}", _has(factor.name, every - {plain}))
            continue
        for other in factor.levels:  # "float32 or float16" says more than "other than bfloat16"
            listed = wording.listed((level for level in factor.levels if level in found - {other}), "or")
            yield Property(f"dtype {listed}", _has("dtype", every - {other}))


def _spread(case: Case) -> float:
    """About how far the scores of a row differ: their standard deviation, or what raises a score above the others."""
    scale = abs(case.scale) if case.scale is not None else 1.0 / math.sqrt(case.dim)
    if case.family in ("uniform", "nokeys"):
        return 0.0
    usual = scale * math.sqrt(case.dim) * (4.0 if case.family == "sharp" else 1.0)
    return max(usual, case.magnitude) if case.family in ("spike", "rising") else usual * case.magnitude


def _spreads_by(least: float) -> Holds:
    return lambda case: _spread(case) >= least


def _range(words: str, size: Callable[[Case], int], least: float, most: float) -> Property:
    return Property(words, lambda case: least <= size(case) <= most, size, least, most)


def _is_no_multiple(number: int) -> Holds:
    return lambda case: case.dim % number > 0


def _queries(case: Case) -> int:
    return case.queries


def _keys(case: Case) -> int:
    return case.keys


def _is_multiple(size: Callable[[Case], int], number: int, *, not_: bool = False) -> Holds:
    return lambda case: (size(case) % number > 0) is not_


def _is_interleaved(place: int) -> Holds:
    """Whether the rows of several heads of a tensor alternate in memory. place: 0 for q, 1 for k, 2 for v."""

    def holds(case: Case) -> bool:
        heads, length = (case.heads, case.queries) if place == 0 else (case.kv_heads, case.keys)
        is_packed = case.sharing == "dense" or (
            case.sharing.startswith("packed") and "qkv"[place] in SHARED[case.sharing]
        )
        return heads > 1 and length > 1 and (is_packed or case.layouts[place] in ("transposed", "length-first"))

    return holds


def _has(factor: str, levels: Set[str]) -> Holds:
    return lambda case: _levels(case)[factor] in levels


@cache
def _levels(case: Case) -> dict[str, str]:
    return levels(case)
