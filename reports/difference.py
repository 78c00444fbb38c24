"""`flashproof diff BEFORE AFTER` says what two runs judged differently, and can write it as a page.

It compares the verdict and the rho of the same checks and cases. The exit status is 1 if a verdict became worse, or if
something that was judged before is not judged any more.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.overview import OF_TENSORS
from flashproof.reports.record import Environment, Judgement, read

Key = tuple[str, str, str, str, str, str]
ORDER = ("passed", "refused", "known defect", "failed")  # from best to worst
SHOWN = 20  # at most this many lines of each kind are printed
ON_A_PAGE = 200  # and at most this many stand on a page


@dataclass(frozen=True)
class Run:
    """What a file, or several, hold of a run."""

    environments: list[Environment]
    judgements: list[Judgement]


@dataclass(frozen=True)
class Difference:
    """What changed from one run to the other."""

    both: int  # judged in both runs
    lost: list[Judgement]  # judged in the first run only
    new: list[Judgement]  # judged in the second run only
    worse: list[tuple[Judgement, Judgement]]  # the verdict became worse; the gravest is first
    better: list[tuple[Judgement, Judgement]]  # the verdict became better
    moved: list[
        tuple[Judgement, Judgement]
    ]  # the same verdict, and a rho that prints differently; the largest rise first

    @property
    def is_worse(self) -> bool:
        """Whether a verdict became worse, or is missing."""
        return bool(self.lost or self.worse)


def load(paths: Iterable[Path]) -> Run:
    """Reads the records of a run.

    Raises OSError and ValueError as `record.read` does, and ValueError for files without a judgement.
    """
    files = list(paths)
    records = [record for path in files for record in read(path)]
    judgements = [one for one in records if isinstance(one, Judgement)]
    if not judgements:
        raise ValueError(f"{', '.join(map(str, files))}: holds no judgements")
    return Run([one for one in records if isinstance(one, Environment)], judgements)


def compare(before: Iterable[Judgement], after: Iterable[Judgement]) -> Difference:
    """Compares what two runs judged. If a run judged the same thing twice, the worse judgement counts."""
    first, second = _by_key(before), _by_key(after)
    pairs = [(first[key], second[key]) for key in first if key in second]
    rank = {status: place for place, status in enumerate(ORDER)}
    worse = [(one, two) for one, two in pairs if rank[one.status] < rank[two.status]]
    moved = [(one, two) for one, two in pairs if one.status == two.status and _shown_rho(one) != _shown_rho(two)]
    return Difference(
        both=len(pairs),
        lost=[judgement for key, judgement in first.items() if key not in second],
        new=[judgement for key, judgement in second.items() if key not in first],
        worse=sorted(worse, key=lambda pair: _gravity(pair[1]), reverse=True),
        better=[(one, two) for one, two in pairs if rank[one.status] > rank[two.status]],
        moved=sorted(moved, key=_rise, reverse=True),
    )


def _rise(pair: tuple[Judgement, Judgement]) -> float:
    before, after = (size(worst_rho(one)) for one in pair)
    return 0.0 if before == after else after - before


def _shown_rho(judgement: Judgement) -> str:
    return wording.rho(worst_rho(judgement))


def _by_key(judgements: Iterable[Judgement]) -> dict[Key, Judgement]:
    found: dict[Key, Judgement] = {}
    for one in judgements:
        # The last case of a search depends on what the search has seen. So searches are compared by check only.
        case = "" if one.check.rpartition("/")[2].endswith("search") else one.case
        key = (one.implementation, one.device, one.dtype, one.check, case, one.tensor or "")
        if key not in found or _badness(one) > _badness(found[key]):
            found[key] = one
    return found


def _badness(judgement: Judgement) -> tuple[int, float]:
    return ORDER.index(judgement.status), size(worst_rho(judgement))


def sentence(difference: Difference) -> str:
    """The difference in one sentence: the gravest change, or the largest rise of a rho, or that nothing changed."""
    if difference.worse:
        one, two = difference.worse[0]
        more = len(difference.worse) - 1
        told = f"{_about(two)} {_stated(one, _BEFORE)} and {_stated(two, _NOW)} at {two.case or two.check}"
        return told + (f", and {wording.plural(more, 'more verdict')} became worse." if more else ".")
    if difference.lost:
        lost = wording.plural(len(difference.lost), "judgement")
        return f"The second run misses {lost} of the first, for example of {_about(difference.lost[0])}."
    if difference.better:
        one, two = difference.better[0]
        more = len(difference.better) - 1
        told = f"{_about(two)} {_stated(one, _BEFORE)} and {_stated(two, _NOW)} at {two.case or two.check}"
        return told + (f", and {wording.plural(more, 'more verdict')} became better." if more else ".")
    if difference.moved and _rise(difference.moved[0]) > 0:
        one, two = difference.moved[0]
        return f"No verdict changed; {_about(two)} rises from {_shown_rho(one)} to {_shown_rho(two)} at {two.case}."
    if not difference.both:
        return "The runs have no judgement in common."
    return f"No verdict changed, and no rho rose, in {wording.plural(difference.both, 'judgement')}."


def _about(judgement: Judgement) -> str:
    """What a judgement is about: "dV of triton.fa2 in bfloat16"."""
    words = f"{wording.tensor(judgement)} of {wording.short_name(judgement.implementation)}"
    return f"{words} in {judgement.dtype}" if judgement.dtype else words


_BEFORE = {"passed": "passed", "refused": "was refused", "known defect": "was a known defect", "failed": "failed"}
_NOW = {
    "passed": "passes now",
    "refused": "is refused now",
    "known defect": "is a known defect now",
    "failed": "fails now",
}


def _stated(judgement: Judgement, verbs: dict[str, str]) -> str:
    rho = worst_rho(judgement)
    return verbs[judgement.status] + ("" if rho is None else f" with rho {wording.rho(rho)}")


def words(difference: Difference) -> Iterable[str]:
    """The difference as lines.

    The sentence comes first, then the number of each kind of difference. The lists of worse, better, missing and new
    judgements follow, and last the judgements with another rho.
    """
    yield sentence(difference)
    counts = {
        "worse": len(difference.worse),
        "missing": len(difference.lost),
        "better": len(difference.better),
        "new": len(difference.new),
        "with another rho": len(difference.moved),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    yield f"{wording.plural(difference.both, 'judgement')} in both runs: {told}"
    for title, pairs in (("worse", difference.worse), ("better", difference.better)):
        yield from _shown(title, [f"{_line(one)}: {one.status} before, {two.status} now" for one, two in pairs])
    yield from _shown("missing", map(_line, difference.lost))
    yield from _shown("new", map(_line, difference.new))
    pairs_of_rho = [
        f"{_line(two)}: rho {_shown_rho(one)} before, {_shown_rho(two)} now" for one, two in difference.moved
    ]
    yield from _shown("with another rho", pairs_of_rho)


def _shown(title: str, lines: Iterable[str]) -> Iterable[str]:
    every = list(lines)
    if every:
        yield f"\n{title}:"
        yield from (f"  {line}" for line in every[:SHOWN])
        if len(every) > SHOWN:
            yield f"  and {len(every) - SHOWN:,} more"


def _gravity(judgement: Judgement) -> tuple[bool, int, float]:
    """A sort key: accuracy and gradients of plain calls tell more than special ways of calling."""
    return (judgement.check.partition("/")[0] in OF_TENSORS, *_badness(judgement))


def _line(judgement: Judgement) -> str:
    about = (judgement.implementation, judgement.check, judgement.dtype, judgement.tensor or "")
    return " ".join(part for part in (*about, f"[{judgement.case}]") if part)


def tell(before: Path, after: Path, output: Path | None = None, program: str = "flashproof diff") -> int:
    """Prints the difference of two runs: files, or folders of files.

    Returns the exit status: 0, 1 if the second run is worse (`Difference.is_worse`), or 2 after a line on stderr that
    says what is wrong with a file. output: a folder in which the difference is also written as a page.
    """
    from flashproof.reports.__main__ import files_of

    try:
        runs = [load(files_of([place])) for place in (before, after)]
        difference = compare(runs[0].judgements, runs[1].judgements)
        print("\n".join(words(difference)))
        if output:
            from flashproof.reports.pages import write_difference

            print(f"\npage: {write_difference(difference, runs, output)}")
    except ImportError as error:
        print(
            f"{program}: {error.name} is not installed; pip install 'flashproof[report]' installs it", file=sys.stderr
        )
        return 2
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 1 if difference.is_worse else 0
