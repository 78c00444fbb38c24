"""The table of the worst known errors of each implementation, tensor and dtype.

rho is an error relative to the bound of the implementation's own claim, so it does not rank implementations. The table
therefore also has the largest and the median error on the common cases: those that all implementations were given.
These errors are in ulps and absolute, and they rank implementations.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from flashproof.reports.evidence import TENSORS, Evidence, Judged, Kernel, Machine, in_ulps, size

SHARED_CASES = 8  # the least number of common cases; an implementation that shares fewer is not compared


@dataclass(frozen=True)
class Spread:
    """The errors on the common cases: for each case its largest error.

    absolute, ulps: the largest and the median. ulps leaves out a case if a judgement of it has no figure in ulps. It is
    None if no case is left, as for the LSE.
    """

    cases: int
    absolute: tuple[float, float]
    ulps: tuple[float, float] | None


@dataclass(frozen=True)
class Row:
    """The worst known error of one tensor in one dtype.

    alike: other implementations whose worst case, worst element and answer are the same, bit for bit.
    """

    kernel: Kernel
    machine: Machine
    dtype: str
    tensor: str
    worst: Judged
    ulps: float | None
    spread: Spread | None
    alike: tuple[str, ...]


def rows(evidence: Evidence) -> list[Row]:
    """All rows: by dtype, then by tensor, then by name."""
    found: defaultdict[tuple[str, str | None], _Groups] = defaultdict(dict)
    for kernel in evidence.kernels:
        for judged in kernel.judged:
            one = judged.judgement
            if judged.rho is not None:
                groups = found[one.dtype, one.tensor]
                groups.setdefault((kernel.name, judged.machine), (kernel, []))[1].append(judged)
    return [
        row
        for dtype in evidence.dtypes
        for tensor in TENSORS
        for row in _of_tensor(found[dtype, tensor], dtype, tensor)
    ]


_Groups = dict[tuple[str, Machine], tuple[Kernel, list[Judged]]]  # by implementation and machine


def _of_tensor(groups: _Groups, dtype: str, tensor: str) -> list[Row]:
    common = _common({place: own for place, (_, own) in groups.items()})
    worst = {
        place: max(own, key=lambda judged: (judged.telling_rho, size(judged.rho))) for place, (_, own) in groups.items()
    }
    without = {
        judged.judgement.case for _, own in groups.values() for judged in own if in_ulps(judged.judgement) is None
    }
    alike = _alike(worst)
    rows = []
    for (name, machine), (kernel, own) in groups.items():
        ulps = [figure for judged in own if (figure := in_ulps(judged.judgement)) is not None]
        spread = _spread(own, common[name, machine], without)
        rows.append(
            Row(
                kernel,
                machine,
                dtype,
                tensor,
                worst[name, machine],
                max(ulps, default=None),
                spread,
                tuple(other for other in alike[_answer(worst[name, machine])] if other != name),
            )
        )
    return rows


def _common(groups: dict[tuple[str, Machine], list[Judged]]) -> dict[tuple[str, Machine], set[str]]:
    """For each group, the cases that all compared groups share.

    The groups are added one by one, the largest first. A group is not compared, and gets no cases, if fewer than
    SHARED_CASES common cases would be left with it.
    """
    cases = {
        place: {judged.judgement.case for judged in own if judged.judgement.worst} for place, own in groups.items()
    }
    taking: list[tuple[str, Machine]] = []
    shared: set[str] = set()
    for place in sorted(cases, key=lambda place: (-len(cases[place]), place)):
        rest = shared & cases[place] if taking else cases[place]
        if len(rest) >= SHARED_CASES:
            shared = rest
            taking.append(place)
    return {place: shared if place in taking and len(taking) > 1 else set() for place in groups}


def _spread(own: list[Judged], common: set[str], without: set[str]) -> Spread | None:
    """The errors on the common cases. without: cases in which a judgement of some implementation has no ulps."""
    absolute: defaultdict[str, float] = defaultdict(float)
    ulps: defaultdict[str, float] = defaultdict(float)
    for judged in own:
        one = judged.judgement
        if one.case in common and one.worst:
            absolute[one.case] = max(absolute[one.case], size(one.worst.error))
            if one.case not in without:
                ulps[one.case] = max(ulps[one.case], in_ulps(one) or 0.0)
    if not absolute:
        return None
    return Spread(len(absolute), _extent(absolute.values()), _extent(ulps.values()) if ulps else None)


def _extent(figures: Iterable[float]) -> tuple[float, float]:
    every = list(figures)
    return max(every), median(every)


def _answer(judged: Judged) -> tuple[object, ...]:
    """The case, the element and the answer of a worst error.

    Two kernels for which all three are equal run the same code, or add in the same order.
    """
    one = judged.judgement
    element = one.worst
    return (one.case, element.index, str(element.got)) if element else (one.case, one.implementation)


def _alike(worst: dict[tuple[str, Machine], Judged]) -> dict[tuple[object, ...], list[str]]:
    groups: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for (name, _), judged in worst.items():
        answer = _answer(judged)
        if name not in groups[answer]:
            groups[answer].append(name)
    return groups
