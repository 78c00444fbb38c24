"""The causes of failures, in one screen: what is wrong with an implementation, and why where this is known."""

import math
import re
from collections.abc import Iterator, Sequence

from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Judgement

CAUSES = 3  # the number of causes that are shown for an implementation
RARE = 10  # an explained cause with fewer failures than a tenth of those of the first is not shown
_SCALE = re.compile(r"with a scale of .*\((.*) times as large\)")
_SIZES = re.compile(r"b(\d+) h(\d+)(?:/\d+)? q(\d+) k(\d+) d(\d+)\b")
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
    # The other failures usually follow from these, if these are in most checks.
    is_explained = 2 * len({(one.check, one.dtype) for group in explained for one in group}) >= failed
    shown = [group for group in explained if len(group) * RARE >= len(explained[0])]
    shown = (shown if is_explained else [*shown, *(group for group in alike if not group[0].question)])[:CAUSES]
    for group in shown:
        yield f"  {_cause(group)}"
        yield f"    {_extent(group)}; the smallest case:"
        yield f"    again: {wording.repeat_line(min(group, key=_work))}"
    if rest := len(failures) - sum(map(len, shown)):
        yield f"  and {wording.plural(rest, 'more failure')}" + (", which may follow from this" if is_explained else "")


def _cause(group: Sequence[Judgement]) -> str:
    first, questions = group[0], [one.question for one in group]
    if first.question:
        alike = [words for words in questions if _SCALE.search(words)] or questions
        return max(alike, key=alike.count)
    if first.rho is None and first.message:
        return first.message.partition("\n")[0]
    worst = max(group, key=lambda one: size(worst_rho(one)))
    times = wording.rho(worst_rho(worst))
    return f"{first.check}: the error of {worst.tensor or 'the result'} is {times} times the bound"


def _extent(group: Sequence[Judgement]) -> str:
    """How often, and in which dtypes."""
    places = {(one.check, one.dtype) for one in group}
    return f"in {wording.plural(len(places), 'check')}, {wording.listed(dict.fromkeys(one.dtype for one in group))}"


def _work(failure: Judgement) -> float:
    """The size of a case. A text that is not a case counts as larger than every case."""
    sizes = _SIZES.match(failure.case)
    return math.prod(map(int, sizes.groups())) if sizes else math.inf
