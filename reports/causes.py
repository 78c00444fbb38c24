"""The causes of failures, in one screen: what is wrong with an implementation, and why where this is known."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Judgement

LARGE = 1e6  # a larger figure is shown as such, without its digits
CAUSES = 3  # the number of causes that are shown for an implementation
RARE = 10  # an explained cause with fewer failures than a tenth of those of the first is not shown
_SCALE = re.compile(r"with a scale of .*\((.*) times as large\)")
_SIZES = re.compile(r"b(\d+) h(\d+)(?:/\d+)? q(\d+) k(\d+) d(\d+)\b")
_PLAIN = re.compile(r"float32|float16|bfloat16|full|normal|seed\d+")  # words of a case that make it no more special
_SUBJECT = re.compile(r"^[\w, ]*? (is|are|has|have) ")
_FACTOR = re.compile(r" is (.*) times the exact result")


def causes(failures: Sequence[Judgement]) -> list[list[Judgement]]:
    """Groups of failures with one cause: the same answered question, or else the same words, or else the same check.

    Groups with a known cause come first. Among the others, the larger groups come first.
    """
    found: dict[tuple[str, str], list[Judgement]] = {}
    factors = {scale[1] for one in failures if (scale := _SCALE.search(one.question))}
    for one in failures:
        if one.question:
            # The scale differs between head dims, but its factor does not. A gradient may show the same factor. Other
            # sentences differ in the tensors that they name, and in what follows from the cause.
            by = _SCALE.search(one.question) or _FACTOR.search(one.question)
            cause = "question", by[1] if by and by[1] in factors else _SUBJECT.sub("", one.question).partition(":")[0]
        elif one.rho is None and one.message:
            cause = "words", without_numbers(one.message.partition("\n")[0])
        else:
            cause = "check", one.check
        found.setdefault(cause, []).append(one)
    order = ("question", "words", "check")
    return [found[cause] for cause in sorted(found, key=lambda cause: (order.index(cause[0]), -len(found[cause])))]


def without_numbers(words: str) -> str:
    """A message with 0 in place of each number. Messages of one cause often differ only in their numbers."""
    return re.sub(r"\d+(\.\d+)?", "0", words)


def one_screen(name: str, failures: Sequence[Judgement]) -> Iterator[str]:
    """What is wrong with an implementation, in a few lines."""
    failed = len({(one.check, one.dtype) for one in failures})
    tensors = wording.listed(dict.fromkeys(one.tensor for one in failures if one.tensor))
    dtypes = wording.listed(dict.fromkeys(one.dtype for one in failures))
    named = f": {tensors}" if tensors else ""
    yield f"{name} is wrong{named} in {dtypes}; {wording.plural(failed, 'check')} failed"
    alike = causes(failures)
    explained = [group for group in alike if group[0].question]
    if any(_SCALE.search(one.question) for one in failures):  # another scale makes other multiples of some results
        explained = [group for group in explained if not all(_FACTOR.search(one.question) for one in group)]
    # The other failures usually follow from these, if these are in most checks.
    is_explained = 2 * len({(one.check, one.dtype) for group in explained for one in group}) >= failed
    shown = [group for group in explained if len(group) * RARE >= len(explained[0])]
    shown = (shown if is_explained else [*shown, *(group for group in alike if not group[0].question)])[:CAUSES]
    for group in shown:
        simplest = _simplest(group)
        yield f"  {_cause(simplest, group)}"
        yield f"    {_extent(group)}; the simplest case:"
        yield f"    again: {wording.repeat_line(simplest)}"
    if rest := len(failures) - sum(map(len, shown)):
        yield f"  and {wording.plural(rest, 'more failure')}" + (", which may follow from this" if is_explained else "")


def _simplest(group: Sequence[Judgement]) -> Judgement:
    """The failure of a group with the simplest case, among those that tell the cause in the most frequent words."""
    alike = [one for one in group if _SCALE.search(one.question)] or group
    words = [without_numbers(one.question.partition(":")[0]) for one in alike]
    usual = max(words, key=words.count)
    return min((one for one, said in zip(alike, words, strict=True) if said == usual), key=_complexity)


def _cause(simplest: Judgement, group: Sequence[Judgement]) -> str:
    """The cause of a group in the words of its simplest case, or else the largest rho of the group."""
    if simplest.question:
        return simplest.question
    if simplest.rho is None and simplest.message:
        return simplest.message.partition("\n")[0]
    worst = max(group, key=lambda one: size(worst_rho(one)))
    return f"{simplest.check}: the largest rho is {capped_rho(worst_rho(worst))} ({worst.tensor or 'the result'})"


def _extent(group: Sequence[Judgement]) -> str:
    """How often, and in which dtypes."""
    places = {(one.check, one.dtype) for one in group}
    return f"in {wording.plural(len(places), 'check')}, {wording.listed(dict.fromkeys(one.dtype for one in group))}"


def _complexity(failure: Judgement) -> tuple[float, float]:
    """How many words of a case are special, and the size of the case.

    A text that is not a case counts as larger than every case.
    """
    sizes = _SIZES.match(failure.case)
    if not sizes:
        return math.inf, math.inf
    special = [word for word in failure.case[sizes.end() :].split() if not _PLAIN.fullmatch(word)]
    return len(special), math.prod(map(int, sizes.groups()))


def capped_rho(rho: float | str | None) -> str:
    """A rho in a table or a summary (`capped`)."""
    return capped(rho, wording.rho)


def capped(figure: float | str | None, words: Callable[[float | str | None], str] = wording.number) -> str:
    """A figure in a table or a summary, or `>1e6` if it is larger, since its digits then say nothing."""
    return ">1e6" if LARGE < size(figure) < math.inf else words(figure)
