"""`python -m flashproof.reports.difference BEFORE AFTER` prints what two runs judged differently.

It compares the verdict and the rho of the same checks and cases. The exit status is 1 if a verdict became worse, or if
something that was judged before is not judged any more.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Judgement, read

Key = tuple[str, str, str, str, str, str]
ORDER = ("passed", "refused", "known defect", "failed")  # from best to worst
SHOWN = 20  # at most this many lines of each kind are printed


@dataclass(frozen=True)
class Difference:
    """What changed from one run to the other."""

    both: int  # judged in both runs
    lost: list[Judgement]  # judged in the first run only
    new: list[Judgement]  # judged in the second run only
    worse: list[tuple[Judgement, Judgement]]  # the verdict became worse
    better: list[tuple[Judgement, Judgement]]  # the verdict became better
    moved: list[tuple[Judgement, Judgement]]  # the same verdict, and a rho that prints differently

    @property
    def is_worse(self) -> bool:
        """Whether a verdict became worse, or is missing."""
        return bool(self.lost or self.worse)


def compare(before: Iterable[Judgement], after: Iterable[Judgement]) -> Difference:
    """Compares what two runs judged. If a run judged the same thing twice, the worse judgement counts."""
    first, second = _by_key(before), _by_key(after)
    pairs = [(first[key], second[key]) for key in first if key in second]
    rank = {status: place for place, status in enumerate(ORDER)}
    return Difference(
        both=len(pairs),
        lost=[judgement for key, judgement in first.items() if key not in second],
        new=[judgement for key, judgement in second.items() if key not in first],
        worse=[(one, two) for one, two in pairs if rank[one.status] < rank[two.status]],
        better=[(one, two) for one, two in pairs if rank[one.status] > rank[two.status]],
        moved=[(one, two) for one, two in pairs if one.status == two.status and _shown_rho(one) != _shown_rho(two)],
    )


def _shown_rho(judgement: Judgement) -> str:
    return wording.rho(worst_rho(judgement))


def _by_key(judgements: Iterable[Judgement]) -> dict[Key, Judgement]:
    found: dict[Key, Judgement] = {}
    for one in judgements:
        # The last case of a search depends on what the search has seen. So searches are compared by check only.
        case = "" if one.check.endswith("_search") else one.case
        key = (one.implementation, one.device, one.dtype, one.check, case, one.tensor or "")
        if key not in found or _badness(one) > _badness(found[key]):
            found[key] = one
    return found


def _badness(judgement: Judgement) -> tuple[int, float]:
    return ORDER.index(judgement.status), size(worst_rho(judgement))


def words(difference: Difference) -> Iterable[str]:
    """The difference as lines.

    The first line counts each kind of difference. The lists of worse, better, missing and new judgements follow, and
    last the judgements with another rho.
    """
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
    moved = sorted(difference.moved, key=lambda pair: size(worst_rho(pair[0])) - size(worst_rho(pair[1])))
    pairs_of_rho = [f"{_line(two)}: rho {_shown_rho(one)} before, {_shown_rho(two)} now" for one, two in moved]
    yield from _shown("with another rho", pairs_of_rho)


def _shown(title: str, lines: Iterable[str]) -> Iterable[str]:
    every = list(lines)
    if every:
        yield f"\n{title}:"
        yield from (f"  {line}" for line in every[:SHOWN])
        if len(every) > SHOWN:
            yield f"  and {len(every) - SHOWN:,} more"


def _line(judgement: Judgement) -> str:
    about = (judgement.implementation, judgement.check, judgement.dtype, judgement.tensor or "")
    return " ".join(part for part in (*about, f"[{judgement.case}]") if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the difference.

    Returns the exit status: 0, 1 if the second run is worse (`Difference.is_worse`), or 2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(prog="python -m flashproof.reports.difference", description="Compares two runs.")
    parser.add_argument("before", type=Path, help="the records of the first run")
    parser.add_argument("after", type=Path, help="the records of the second run")
    options = parser.parse_args(arguments)
    try:
        runs = [[one for one in read(path) if isinstance(one, Judgement)] for path in (options.before, options.after)]
    except (OSError, ValueError) as error:
        print(f"difference: {error}", file=sys.stderr)
        return 2
    difference = compare(*runs)
    print("\n".join(words(difference)))
    return 1 if difference.is_worse else 0


if __name__ == "__main__":
    sys.exit(main())
