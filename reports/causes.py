"""The causes of failures, in one screen: what is wrong with an implementation, and why where this is known."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

from flashproof.reports import common, symptoms, wording
from flashproof.reports.evidence import is_nearly_zero, size, worst_rho
from flashproof.reports.record import Judgement

LARGE = 1e6  # a larger figure is shown as such, without its digits
CAUSES = 3  # the number of causes that are shown for an implementation
SHARE = 4  # a known cause leads if it is in at least a fourth of the failing checks, each counted once for each dtype
RARE = 10  # an explained cause with fewer failures than a tenth of those of the first is not shown
_SCALE = re.compile(r"with a scale of .*\((.*) times as large\)")
_SIZES = re.compile(r"b(\d+) h(\d+)(?:/\d+)? q(\d+) k(\d+) d(\d+)\b")
_PLAIN = re.compile(r"float32|float16|bfloat16|full|normal|seed\d+")  # words of a case that make it no more special
_SUBJECT = re.compile(r"^[\w, ]*? (is|are|has|have) ")
_FACTOR = re.compile(r" is (.*) times the exact result")


def causes(failures: Sequence[Judgement]) -> list[list[Judgement]]:
    """Groups of failures with one cause: the same answered question, words or bias, or else the same check.

    Groups with a known cause that is in a real share of the failing checks come first (`leads`). A question that few
    checks answer may be answered by chance, so it comes last. Among the others, the larger groups come first.
    """
    found: dict[tuple[str, str], list[Judgement]] = {}
    factors = {scale[1] for one in failures if (scale := _SCALE.search(one.question))}
    for one in failures:
        if one.question:
            # The scale differs between head dims, but its factor does not. A gradient may show the same factor. Other
            # sentences differ in the tensors that they name, in what follows from the cause, and in fitted numbers.
            by = _SCALE.search(one.question) or _FACTOR.search(one.question)
            words = _SUBJECT.sub("", one.question).partition(":")[0].partition(" in which ")[0]
            cause = "question", by[1] if by and by[1] in factors else words
        elif one.rho is None and one.message:
            cause = "words", without_numbers(one.message.partition("\n")[0])
        elif is_bias(one):
            cause = "bias", f"{one.tensor} in {one.dtype}"
        else:
            cause = "check", one.check
        found.setdefault(cause, []).append(one)
    order = ("question", "bias", "words", "check")

    def rank(cause: tuple[str, str]) -> tuple[int, int, int]:
        kind, group = cause[0], found[cause]
        if kind != "check" and leads(group, failures):
            return 0, order.index(kind), -len(group)
        return (2 if kind == "question" else 1), 0, -len(group)

    return [found[cause] for cause in sorted(found, key=rank)]


def is_bias(failure: Judgement) -> bool:
    """Whether a failure is a bias alone: every element is inside its bound."""
    return 0.0 <= size(worst_rho(failure)) <= 1.0 and wording.leans(failure)


def leads(group: Sequence[Judgement], failures: Sequence[Judgement]) -> bool:
    """Whether a cause is in a real share of the failing checks. Each check counts once for each dtype.

    A cause in few of them may be a coincidence of these cases.
    """
    return len(_places(group)) * SHARE >= len(_places(failures))


def explanations(failures: Sequence[Judgement]) -> list[list[Judgement]]:
    """The groups of `causes` that explain a real share of the failing checks: by another question, or by a bias."""
    return [group for group in _apart(causes(failures)) if _explains(group, failures)]


def headline(failures: Sequence[Judgement]) -> str:
    """The first of the explanations in words (`cause_of`). Empty if there is none."""
    return next((cause_of(group) for group in explanations(failures)), "")


def _explains(group: Sequence[Judgement], failures: Sequence[Judgement]) -> bool:
    return bool(group[0].question or is_bias(group[0])) and leads(group, failures)


def _apart(groups: Sequence[list[Judgement]]) -> list[list[Judgement]]:
    """The groups without those of multiples if there is another scale, which makes multiples of some results."""
    if not any(_SCALE.search(one.question) for group in groups for one in group):
        return list(groups)
    return [group for group in groups if not all(_FACTOR.search(one.question) for one in group)]


def _places(failures: Sequence[Judgement]) -> set[tuple[str, str, str]]:
    return {(one.check, one.dtype, one.device) for one in failures}


def without_numbers(words: str) -> str:
    """A message with 0 in place of each number. Messages of one cause often differ only in their numbers."""
    return re.sub(r"\d+(\.\d+)?", "0", words)


def one_screen(name: str, judgements: Sequence[Judgement]) -> Iterator[str]:
    """What is wrong with an implementation, in a few lines. judgements: all of a run, also those that passed."""
    failures = [one for one in judgements if one.status == "failed"]
    tensors = wording.listed(dict.fromkeys(one.tensor for one in failures if one.tensor))
    dtypes = wording.listed(dict.fromkeys(one.dtype for one in failures))
    named = f": {tensors}" if tensors else ""
    yield f"{name} is wrong{named} in {dtypes}; {wording.failed_checks(failures, ' failed')}"
    needed = common.needs(failures)
    for said in (needed, common.shared(judgements)):
        if said:
            yield f"  {said}"
    for symptom in symptoms.symptoms(judgements):
        if symptom.short:
            yield f"  {symptom.text}"
    alike = _apart(causes(failures))
    explained = [group for group in alike if _explains(group, failures)]
    # The other failures usually follow from these, if these are in most checks.
    is_explained = 2 * len(_places([one for group in explained for one in group])) >= len(_places(failures))
    shown = [group for group in explained if len(group) * RARE >= len(explained[0])]
    if not is_explained:
        shown += [group for group in alike if not _explains(group, failures)]
    shown = shown[:CAUSES]
    for group in shown:
        yield f"  {cause_of(group)}"
        yield f"    {_extent(group, failures)}; the simplest case:"
        needing = [one for one in group if needed and one.case == needed.case and not one.question]
        yield f"    again: {wording.repeat_line(_simplest(needing or group))}"
    if rest := len(failures) - sum(map(len, shown)):
        yield f"  and {wording.plural(rest, 'more failure')}" + (", which may follow from this" if is_explained else "")


def _simplest(group: Sequence[Judgement]) -> Judgement:
    """The failure of a group with the simplest case, among those that tell the cause in the most frequent words."""
    alike = [one for one in group if _SCALE.search(one.question)] or group
    words = [without_numbers(one.question.partition(":")[0]) for one in alike]
    usual = max(words, key=words.count)
    return min(
        (one for one, said in zip(alike, words, strict=True) if said == usual), key=lambda one: complexity(one.case)
    )


def cause_of(group: Sequence[Judgement]) -> str:
    """The cause of a group in the words of its simplest case, or else the largest rho of the group."""
    simplest = _simplest(group)
    if simplest.question:
        return simplest.question
    if simplest.rho is None and simplest.message:
        return simplest.message.partition("\n")[0]
    if is_bias(simplest):
        return f"{wording.leaning(simplest)}: {wording.bias_line(simplest)}"
    worst = max(group, key=lambda one: (not is_nearly_zero(one), size(worst_rho(one))))
    if 0.0 <= size(worst_rho(worst)) <= 1.0:
        return f"{simplest.check}: {wording.reason(worst)}"
    return f"{simplest.check}: the largest rho is {capped_rho(worst_rho(worst))} ({worst.tensor or 'the result'})"


def _extent(group: Sequence[Judgement], failures: Sequence[Judgement]) -> str:
    """In how many of the failing checks, and in which dtypes."""
    count, total = (len({one.check for one in each}) for each in (group, failures))
    # A group without a known cause is one check.
    is_cause = group[0].question or is_bias(group[0]) or (group[0].rho is None and group[0].message)
    of = (
        f"{count:,} of {wording.plural(total, 'check')}"
        if is_cause and count < total
        else wording.plural(count, "check")
    )
    return f"in {of}, {wording.listed(dict.fromkeys(one.dtype for one in group))}"


def complexity(case: str) -> tuple[float, float]:
    """How many words of a case are special, and the size of the case.

    A text that is not a case counts as larger than every case.
    """
    sizes = _SIZES.match(case)
    if not sizes:
        return math.inf, math.inf
    special = [word for word in case[sizes.end() :].split() if not _PLAIN.fullmatch(word)]
    return len(special), math.prod(map(int, sizes.groups()))


def capped_rho(rho: float | str | None) -> str:
    """A rho in a table or a summary (`capped`)."""
    return capped(rho, wording.rho)


def capped(figure: float | str | None, words: Callable[[float | str | None], str] = wording.number) -> str:
    """A figure in a table or a summary, or `>1e6` if it is larger, since its digits then say nothing."""
    return ">1e6" if LARGE < size(figure) < math.inf else words(figure)
