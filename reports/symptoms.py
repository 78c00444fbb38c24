"""What the records of failures show beside their figures: which tensors are wrong, where, and what numbers they hold.

Each sentence describes the failing judgements of one implementation, and counts those that it is true of. The sizes and
the bits of errors may point to a cause. A sentence stands only where chance alone would hardly make it true.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Literal, NamedTuple

from flashproof.reports import wording
from flashproof.reports.evidence import TENSORS, dtype_order, is_nearly_zero, size
from flashproof.reports.record import Grid, Judgement

FEWEST = 5  # failing judgements that a sentence describes
SURE = 30  # bits of evidence: by chance, a sentence is true once in 2^SURE times
BITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # significant bits of a number
COARSER = {8: "bfloat16", 11: "float16 or TF32"}
SHORT = 3  # bits by which the length of an axis exceeds that of a stretch, on average
MOST = 0.7  # the share of the failing judgements whose worst element lies in a stretch that is named
ALIKE = 0.9  # the share of the failing judgements in which a tensor is too large by about the same factor
SAME = 4.0  # errors of several dtypes are alike if the largest median is at most so many times the smallest
LONG = 60  # letters of a symptom that stands alone in a headline
RARE = 0.02  # a dtype with at most this share of the failures counts as right
ONE_KEY = "the query sees one key"  # the note of `judging.describe` on such a row
AXES = (("key", ("dk", "dv"), 2), ("query", ("out", "lse", "dq"), 2), ("dim", ("out", "dq", "dk", "dv"), 3))


class Symptom(NamedTuple):
    """short: for a headline, or empty. text: a sentence without its end. about: what it answers.

    brief: a shorter sentence for a page, if there is one.
    """

    short: str
    text: str
    about: Literal["what", "where", "how bad"] = "what"
    brief: str = ""


def symptoms(judgements: Sequence[Judgement]) -> list[Symptom]:
    """What the judgements of an implementation show of its failures, the most telling first."""
    failed = [one for one in judgements if one.status == "failed" and one.tensor]
    return [
        *_miscounts(failed),
        *_one_way(judgements, failed),
        *_only(judgements, failed),
        *_few_bits(failed),
        *_starts(failed),
        *_stretches(failed),
        *_factors(failed),
        *_sizes(judgements, failed),
    ]


def headline(found: Sequence[Symptom]) -> str:
    """The first symptoms in a few words: two of them, or one if it is long. Empty if there are none."""
    told = [one.short for one in found if one.short]
    return ", and ".join(told[: 1 if told and len(told[0]) > LONG else 2])


def _names(tensors: Sequence[str]) -> str:
    return wording.listed(wording.TITLES[name] for name in TENSORS if name in tensors)


def _groups(failed: Sequence[Judgement]) -> Iterator[tuple[str, str, list[Judgement]]]:
    """The failing judgements of each tensor and dtype."""
    groups: defaultdict[tuple[str, str], list[Judgement]] = defaultdict(list)
    for one in failed:
        groups[one.tensor or "", one.dtype].append(one)
    for tensor, dtype in sorted(groups, key=lambda key: (TENSORS.index(key[0]), dtype_order(key[1]))):
        yield tensor, dtype, groups[tensor, dtype]


# ------------------------------------------------------------------------------------------------- what the numbers are


def _miscounts(failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """What counts too much or too little (`miscounted`), if several failures agree in what, and in how much."""
    told = [one.question.partition(", in ")[0] for one in failed if one.question.endswith((" times", " rows"))]
    words, count = Counter(told).most_common(1)[0] if told else ("", 0)
    if count >= FEWEST:
        yield Symptom(words, f"{words}, in {count:,} failures that were explained")


def bits(number: float) -> int:
    """The significant bits of a number: 1 for a power of two, 24 for most numbers of float32."""
    whole = int(math.frexp(abs(number))[0] * 2**53)
    return 53 - ((whole & -whole).bit_length() - 1) if whole else 0


def _few_bits(failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """Answers that have fewer bits than numbers of their dtype."""
    for tensor, dtype, own in _groups(failed):
        name, kind, every = wording.TITLES[tensor], _fewer(own, dtype), sum(one.worst is not None for one in own)
        if kind:
            yield Symptom(
                f"the worst elements of {name} in {dtype} are {kind}",
                f"the worst element of {name} is one of the {kind} in each of {every:,} failing judgements in {dtype}, "
                f"whose numbers have {BITS[dtype]} bits",
            )
            continue
        alone = [one for one in own if one.worst and one.worst.note == ONE_KEY] if tensor == "out" else []
        if kind := _fewer(alone, dtype):
            is_cut = all(one.worst and size(one.worst.got) <= size(one.worst.exact) for one in alone)
            how = "cut off" if is_cut else "rounded"
            yield Symptom(
                f"in {dtype}, the value tensor is {how} to {kind}",
                f"where a query sees one key, out is a value: its worst element is one of the {kind} in each of "
                f"{len(alone):,} such failing judgements in {dtype}, whose numbers have {BITS[dtype]} bits"
                + (", and never larger than the value, so that bits are cut off" if is_cut else ""),
            )


def _fewer(own: Sequence[Judgement], dtype: str) -> str:
    """The numbers of fewer bits than those of a dtype to which all worst elements belong. Empty if there are none."""
    got = {float(one.worst.got) for one in own if one.worst}
    numbers = [number for number in got if math.isfinite(number) and number]
    if dtype not in BITS or len(numbers) < FEWEST:
        return ""
    most, full = max(map(bits, numbers)), BITS[dtype]
    most = next((known for known in COARSER if most <= known < full), most)
    if (full - most) * len(numbers) < SURE:
        return ""
    return f"numbers of {COARSER[most]}" if most in COARSER else f"numbers of {most} significant bits"


def _factors(failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """Tensors that are too large or too small by about the same share at their worst elements."""
    found: defaultdict[tuple[str, str], list[tuple[str, int, int]]] = defaultdict(list)
    for tensor, dtype, own in _groups(failed):
        off = [
            float(one.worst.got) / float(one.worst.exact) - 1.0
            for one in own
            if one.worst and size(one.worst.got) < math.inf and not is_nearly_zero(one)
        ]
        if len(off) < max(FEWEST, ALIKE * len(own)):
            continue
        usual = median(off)
        alike = sum(abs(share - usual) <= 0.3 * abs(usual) for share in off)
        if abs(usual) < 2.0 ** (2 - BITS.get(dtype, 24)) or alike < ALIKE * len(own):
            continue
        words = f"about {_percent(abs(usual))} too {'large' if usual > 0 else 'small'}"
        found[wording.TITLES[tensor], words].append((dtype, alike, len(own)))
    for (name, words), parts in found.items():
        dtypes = wording.listed(dtype for dtype, *_ in parts)
        alike, every = sum(part[1] for part in parts), sum(part[2] for part in parts)
        yield Symptom(
            f"{name} in {dtypes} is {words} at its worst elements",
            f"the worst element of {name} in {dtypes} is {words} in {alike:,} of {every:,} failing judgements",
        )


def _percent(share: float) -> str:
    return f"{wording.number(100.0 * share, 1)} %"


def _sizes(judgements: Sequence[Judgement], failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """How large the errors are, beside the largest number of their tensor."""
    usual: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for tensor, dtype, own in _groups(failed):
        # A unit in the last place is between one and two times 2^-bits of a number.
        shares = [1.5 * size(one.ulps) * 2.0 ** -BITS[dtype] for one in own if one.ulps is not None and dtype in BITS]
        if len(shares) >= FEWEST and (middle := median(shares)) < math.inf:
            usual[tensor][dtype] = middle
    if not usual:
        return
    about = "typical errors of the failing tensors (medians), as shares of the largest number of the tensor"
    dtypes = sorted({dtype for each in usual.values() for dtype in each}, key=dtype_order)
    if len(dtypes) > 1 and all(max(each.values()) <= SAME * min(each.values()) for each in usual.values()):
        told = [f"{wording.TITLES[tensor]} {_percent(median(each.values()))}" for tensor, each in usual.items()]
        said = f"in {wording.listed(dtypes)} alike, so they are no roundings to these dtypes"
        coarser = _holding(judgements, failed, dtypes)
        unit = 2.0 ** -BITS[coarser] if coarser else 0.0
        if all(unit / 16.0 <= share <= unit for each in usual.values() for share in each.values()):
            short = f"errors of the size of roundings to {coarser}"
            yield Symptom(short, f"{about}: {', '.join(told)}; {said}. Roundings to {coarser} have this size")
        else:
            short = f"typical errors: {', '.join(told)}, {said}"
            yield Symptom(short, f"{about}: {', '.join(told)}; {said}", "how bad", _typical(usual))
        return
    parts = [
        f"in {dtype} "
        + ", ".join(f"{wording.TITLES[name]} {_percent(each[dtype])}" for name, each in usual.items() if dtype in each)
        for dtype in dtypes
    ]
    yield Symptom("", f"{about}: {'; '.join(parts)}", "how bad", _typical(usual))


def _typical(usual: Mapping[str, Mapping[str, float]]) -> str:
    """The smallest and the largest typical error, in a sentence without its end."""
    shares = [share for each in usual.values() for share in each.values()]
    few, many = _percent(min(shares)), _percent(max(shares))
    return f"typical errors are {few if few == many else f'{few} to {many}'} of the largest number of a tensor"


def _holding(judgements: Sequence[Judgement], failed: Sequence[Judgement], dtypes: Sequence[str]) -> str:
    """A dtype with fewer bits than these, in which nearly all judgements pass. Empty if there is none."""
    for dtype, own_bits in BITS.items():
        wrong, every = (sum(one.dtype == dtype for one in each) for each in (failed, judgements))
        if own_bits < min(BITS[other] for other in dtypes) and every and wrong <= RARE * len(failed):
            return dtype
    return ""


# ----------------------------------------------------------------------------------------------- where they are wrong


def _only(judgements: Sequence[Judgement], failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """Tensors that hold in the cases in which others fail. A case need not judge every tensor."""
    wrong = {one.tensor or "" for one in failed}
    cases = {one.case for one in failed}
    others = [one for one in judgements if one.status == "passed" and one.tensor and one.case in cases]
    holding = {one.tensor or "" for one in others if one.tensor not in wrong}
    count = len({one.case for one in others if one.tensor in holding})
    if not wrong or not holding or count < FEWEST:
        return
    short = f"only {_names([*wrong])} {'fail' if len(wrong) > 1 else 'fails'}"
    are, them = ("are", "them") if len(holding) > 1 else ("is", "it")
    yield Symptom(short, f"{short}: {_names([*holding])} {are} right in every failing case that judges {them}")


def _one_way(judgements: Sequence[Judgement], failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """One way of calling that alone fails."""
    wrong, checks = {(one.tensor, one.dtype) for one in failed}, {one.check for one in failed}
    others = {one.case for one in judgements if one.status == "passed" and (one.tensor, one.dtype) in wrong}
    others -= {one.case for one in failed}
    if len(checks) == 1 and (check := checks.pop()).startswith("contract/") and len(others) >= FEWEST:
        yield Symptom(
            f"only the check {check} fails",
            f"only the check {check} fails: the same tensors in the same dtypes hold in {len(others):,} other cases",
            about="where",
        )


def _edges(length: int, parts: int) -> list[int]:
    """Where the parts of an axis of a grid begin, and the end of the last one."""
    least, more = divmod(length, parts)
    return [0, *accumulate(least + (part < more) for part in range(parts))]


def _wrong_parts(grid: Grid, is_row: bool) -> tuple[list[bool], list[int]]:
    """Which parts of an axis hold an error above its bound, and where they begin."""
    rows = [[size(rho) > 1.0 for rho in row] for row in grid.rho]
    wrong = [any(row) for row in rows] if is_row else [any(row[at] for row in rows) for at in range(len(rows[0]))]
    return wrong, _edges(grid.rows if is_row else grid.columns, len(wrong))


def _starts(failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """An index from which on all parts of a tensor are wrong, and before which none is."""
    for axis, tensors, place in AXES:
        own = [one for one in failed if one.tensor in tensors and one.grid]
        found = [_wrong_parts(one.grid, place == 2) for one in own if one.grid]
        firsts = [(parts.index(True), parts, edges) for parts, edges in found if any(parts)]
        if not firsts or not all(all(parts[first:]) for first, parts, _ in firsts):
            continue
        least = max(edges[first] for first, _, edges in firsts)  # the first wrong index is in the part of each
        most = min(edges[first + 1] for first, _, edges in firsts) - 1
        if sum(first > 0 for first, _, _ in firsts) < FEWEST or least > most:
            continue
        at = f"{axis} {least:,}" if least == most else f"a {axis} between {least:,} and {most:,}"
        names = _names([one.tensor or "" for one in own])
        are = "are" if " and " in names else "is"
        yield Symptom(
            f"{names} {are} wrong from {at} on",
            f"{names} {are} right before and wrong from {at} on: so it is in the parts of all {len(firsts):,} failing "
            "judgements",
            about="where",
        )


def _stretches(failed: Sequence[Judgement]) -> Iterator[Symptom]:
    """A short stretch of an axis in which most of the worst elements lie."""
    for axis, tensors, place in AXES:
        own = [one for one in failed if one.tensor in tensors and one.grid and one.worst]
        at = [
            (one.worst.index[place], one.grid.rows if place == 2 else one.grid.columns)
            for one in own
            if one.worst and one.grid and len(one.worst.index) > place
        ]
        if len(at) < FEWEST or not (stretch := _stretch(at)):
            continue
        low, high = stretch
        inside = sum(low <= index <= high for index, _ in at)
        names = _names([one.tensor or "" for one in own])
        to = f"{axis} {low:,}" if low == high else f"a {axis} from {low:,} to {high:,}"
        element = "elements" if " and " in names else "element"
        yield Symptom(
            f"the worst elements of {names} lie at {to if low == high else f'{axis}s {low:,} to {high:,}'}",
            f"the worst {element} of {names} {'lie' if element == 'elements' else 'lies'} at {to} in {inside:,} of "
            f"{len(at):,} failing judgements",
            about="where",
        )


def _stretch(at: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The stretch that best tells where the worst elements lie. None if chance may have put them there.

    at: the index of each worst element, and the length of its axis. A stretch is worth the bits by which it makes the
    indices shorter to write. The first index is none, because ties are broken in its favour.
    """
    ordered = sorted(place for place in at if place[0] > 0)
    lengths = [0.0, *accumulate(math.log2(length) for _, length in ordered)]
    best, found = float(SURE), None
    for start, (low, _) in enumerate(ordered):
        for end in range(start + math.ceil(MOST * len(at)), len(ordered) + 1):
            inside, high = end - start, ordered[end - 1][0]
            shorter = lengths[end] - lengths[start] - inside * math.log2(high - low + 1)
            share = inside / len(at)
            doubt = -sum(part * math.log2(part) for part in (share, 1.0 - share) if part)
            worth = shorter - len(at) * doubt
            if worth > best and shorter >= SHORT * inside:
                best, found = worth, (low, high)
    return found
