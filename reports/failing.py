"""What the page of an implementation says about its failures: what is wrong, where, how bad, and how to repeat it."""

from collections.abc import Sequence
from typing import NamedTuple

from flashproof.reports import causes, common, overview, symptoms, tables, wording
from flashproof.reports.evidence import TENSORS, Evidence, Judged, Kernel, Machine, dtype_order, size
from flashproof.reports.record import Judgement

Kind = tuple[str, str | None, str, Machine]  # check, tensor, dtype and machine


class Told(NamedTuple):
    """One failure of a check, tensor, dtype and machine.

    block: its text. more: how many more failures of this kind there are. key: the fold that holds them. also: other
    checks whose failures are folded into this one.
    """

    judged: Judged
    block: str
    more: int
    key: str
    also: tuple[str, ...] = ()


class First(NamedTuple):
    """The failures to look at first. worst: None if the simplest failure is also the worst."""

    simplest: Told
    worst: Told | None


class Answers(NamedTuple):
    """What a reader asks first about an implementation that fails, each answered in a few sentences."""

    what: str
    where: str
    how_bad: str
    command: str  # repeats the simplest failing case


def answers(kernel: Kernel, where: common.Shared | None, told: str = "") -> Answers:
    """What is wrong with an implementation that fails, where, how bad it is, and how to repeat it.

    told: what the headline above has said, which is not repeated.
    """
    simplest, gravest = overview.simplest_failure(kernel), overview.worst_failure(kernel)
    assert simplest is not None, "only an implementation that fails is asked about"
    assert gravest is not None
    seen = symptoms_of(kernel)
    known = cause(kernel)
    more = [one.text for one in seen if one.about == "what" and not (one.short and one.short in f"{known} {told}")]
    what = [wording.sentence(one) for one in (known, *more) if one and one not in told]
    places = [wording.sentence(one.text) for one in seen if one.about == "where"]
    bad = f"In the simplest failing case, {_how_bad(simplest.judgement)}."
    if size(simplest.rho) > 1 and gravest.telling_rho > size(simplest.rho):
        bad += f" In another case, {wording.reason(gravest.judgement)}."
    bad = " ".join([bad, *(f"{wording.sentence(one.brief)}." for one in seen if one.about == "how bad")])
    shared = in_common(kernel, where)
    return Answers(
        _sentences(
            _what([judged.judgement for judged in overview.failed(kernel)]) or wording.reason(simplest.judgement), *what
        ),
        " ".join(one for one in (_sentences(*places), shared) if one) or f"It fails{overview.of_cases(kernel)}.",
        bad,
        wording.repeat_line(simplest.judgement),
    )


def _sentences(*texts: str) -> str:
    return " ".join(f"{text}." for text in texts)


def _what(failures: Sequence[Judgement]) -> str:
    """The tensors that fail, with their dtypes: "out is wrong in bfloat16; dK and dV are wrong in float32"."""
    dtypes: dict[tuple[str, ...], list[str]] = {}  # the tensors that fail in the same dtypes
    for name in TENSORS:
        of_tensor = {one.dtype for one in failures if one.tensor == name}
        if of_tensor:
            dtypes.setdefault(tuple(sorted(of_tensor, key=dtype_order)), []).append(wording.TITLES[name])
    return "; ".join(
        f"{wording.listed(names)} {'are' if len(names) > 1 else 'is'} wrong in {wording.listed(where)}"
        for where, names in dtypes.items()
    )


def _how_bad(one: Judgement) -> str:
    """How far off the worst element of a failure is, beside what is allowed."""
    told = wording.instance(one)
    if causes.is_bias(one):
        return f"{told}. Each element is inside its bound, and their mean is not"
    if one.worst is None or told == wording.reason(one):
        return told
    error, bound = wording.sizes(one.worst)
    return f"{told}. This is an error of {error}, and {bound} is allowed"


def shared(kernel: Kernel) -> common.Shared | None:
    """What the failing cases of an implementation have in common (`common.shared`)."""
    return common.shared([judged.judgement for judged in kernel.judged])


def symptoms_of(kernel: Kernel) -> list[symptoms.Symptom]:
    """What the records show of the failures (`symptoms.symptoms`)."""
    return symptoms.symptoms([judged.judgement for judged in kernel.judged])


def cause(kernel: Kernel) -> str:
    """The cause of the failures, as the page tells it (`causes.headline`). Empty if none is known."""
    return causes.headline([judged.judgement for judged in overview.failed(kernel)])


def first(kernel: Kernel, where: common.Shared | None) -> First:
    """The simplest failure (`overview.simplest_failure`), which the sentence at the top tells, and the worst one."""
    every, gravest, simplest = (
        overview.failed(kernel),
        overview.worst_failure(kernel),
        overview.simplest_failure(kernel),
    )
    assert gravest is not None, "only the page of an implementation that fails asks"
    assert simplest is not None
    groups = _groups(every)
    return First(
        _told(simplest, groups, kernel, where),
        None if simplest is gravest else _told(gravest, groups, kernel, where),
    )


def told(
    failures: Sequence[Judged], kernel: Kernel, where: common.Shared | None = None, shown: Sequence[Told] = ()
) -> list[Told]:
    """One failure of each check, tensor, dtype and machine: one whose cause was found, or else the worst.

    failures: sorted, worst first. where: what all failing cases have in common. shown: failures whose kind is left out.
    """
    leading = causes.explanations([judged.judgement for judged in failures])
    explained = {id(one) for group in leading for one in group if one.question}
    before = {_kind(one.judged) for one in shown}
    groups = _groups(failures)
    repeats = [kind for kind in _repeats(groups, explained, where) if kind not in before]
    found = [
        _told(next((j for j in group if id(j.judgement) in explained), group[0]), groups, kernel, where)
        for kind, group in groups.items()
        if kind not in before and kind not in repeats[1:]
    ]
    if len(repeats) > 1:
        place = next(at for at, one in enumerate(found) if _kind(one.judged) == repeats[0])
        also = tuple(dict.fromkeys(check for check, *_ in repeats[1:] if check != repeats[0][0]))
        found[place] = found[place]._replace(more=sum(len(groups[kind]) for kind in repeats) - 1, also=also)
    return found


def _repeats(groups: dict[Kind, list[Judged]], explained: set[int], where: common.Shared | None) -> list[Kind]:
    """The kinds of failures of special calls that repeat what plain calls show.

    Plain calls fail in the same tensor, and the failing cases have what all failing cases have in common, or the cause.
    """
    plain = {kind[1] for kind in groups if kind[0].partition("/")[0] in overview.OF_TENSORS}

    def is_alike(group: Sequence[Judged]) -> bool:
        if any(id(judged.judgement) in explained for judged in group):
            return True
        return where is not None and _share([judged.judgement for judged in group], where) >= common.HELD

    calls = [kind for kind in groups if kind[0].startswith("contract/") and kind[1] in plain]
    return [kind for kind in calls if is_alike(groups[kind])]


class Ran(NamedTuple):
    """What was run of an implementation that fails. commands: those of its runs that were not whole."""

    words: str
    commands: list[str]


def ran(kernel: Kernel, evidence: Evidence) -> Ran:
    """On which devices and in which dtypes cases were run, how many failed, and what was claimed and not run."""
    told = []
    for machine in kernel.machines:
        parts = []
        for dtype in sorted({j.judgement.dtype for j in kernel.judged if j.machine == machine} - {""}, key=dtype_order):
            own = [j.judgement for j in kernel.judged if (j.machine, j.judgement.dtype) == (machine, dtype)]
            wrong = {one.case for one in own if one.status == "failed"} - {""}
            parts.append(f"{len(wrong):,} of {len({one.case for one in own} - {''}):,} in {dtype}")
        if parts:
            told.append(f"{wording.listed(parts)} on {machine}")
    words = f"Cases that failed: {'; '.join(told)}."
    if not kernel.narrowed_on:
        return Ran(words, [])
    judged = {j.judgement.run for j in kernel.judged if j.machine in kernel.narrowed_on}
    commands = [one.command for one in evidence.environments if one.run in judged and not one.whole]
    if any("--quick" in command.split() for command in commands):
        words += " The run was quick, which leaves out most of the cases."
    words += f" {wording.sentence(overview.not_whole(kernel))}"
    if missing := _not_run(kernel):
        words += f": {missing} {'were' if ' and ' in missing else 'was'} not run, although claimed"
    if kernel.claim and not kernel.claim.ended:
        words += ". The run was interrupted"
    return Ran(f"{words}.", list(dict.fromkeys(commands)))


def _not_run(kernel: Kernel) -> str:
    """The dtypes and kinds of devices that are claimed and in which nothing was judged."""
    if not kernel.claim:
        return ""
    supports = kernel.claim.supports
    dtypes, kinds = {j.judgement.dtype for j in kernel.judged}, {j.machine.kind for j in kernel.judged}
    missing = [dtype for dtype in _texts(supports.get("dtypes")) if dtype not in dtypes]
    return wording.listed([*missing, *(kind.upper() for kind in _texts(supports.get("devices")) if kind not in kinds)])


def _texts(field: object) -> list[str]:
    return [str(one) for one in field] if isinstance(field, list) else []


def _kind(judged: Judged) -> Kind:
    one = judged.judgement
    return one.check, one.tensor, one.dtype, judged.machine


def _groups(failures: Sequence[Judged]) -> dict[Kind, list[Judged]]:
    groups: dict[Kind, list[Judged]] = {}
    for judged in failures:
        groups.setdefault(_kind(judged), []).append(judged)
    return groups


def _told(judged: Judged, groups: dict[Kind, list[Judged]], kernel: Kernel, where: common.Shared | None) -> Told:
    one = judged.judgement
    block = wording.failure_block(one, tables.threshold(judged, kernel))
    if where:
        block = common.without_needs(block)
    return Told(judged, block, len(groups[_kind(judged)]) - 1, overview.key_of(one))


def in_common(kernel: Kernel, where: common.Shared | None) -> str:
    """What the failing cases have in common, in sentences. Empty if nothing is known.

    What was tried, by leaving it out of a case, says more than as many properties that the cases happen to have.
    """
    needed = common.needs([judged.judgement for judged in overview.failed(kernel)])
    is_richer = where is not None and (needed is None or where.count > len(needed.everywhere))
    told = where if is_richer else needed
    return f"{told}." if told else ""


def _share(failures: Sequence[Judgement], where: common.Shared) -> float:
    """The share of the failing cases of a column that have what all failing cases have in common."""
    cases = {one.case for one in failures}
    return len(cases & where.cases) / len(cases)


def of_charts(kernel: Kernel, drawn: set[str]) -> str:
    """Says how many failing cases the charts show. Empty if they show all. drawn: the cases of the points that fail."""
    cases = {judged.judgement.case for judged in overview.failed(kernel)}
    if cases <= drawn:
        return ""
    shown = len(cases & drawn)
    number = f"{shown:,}" if shown else "none"
    says = f"show {number} of the {len(cases):,} failing cases" if len(cases) > 1 else "do not show the failing case"
    return f"The charts have cases of their own, in which one property varies. They {says}."
