"""How several failures are shown: the first in full, and the number of others."""

from collections.abc import Iterator, Sequence

from flashproof.reports import wording
from flashproof.reports.causes import capped_rho, is_bias
from flashproof.reports.evidence import worst_rho
from flashproof.reports.record import Judgement

IN_FULL = 3  # failures of each implementation that are shown in full
SHOWN = 10  # further failures that are shown in one line each


def groups(failures: Sequence[Judgement]) -> list[list[Judgement]]:
    """Groups of failures that are shown once: of one check and dtype, or without a figure and in the same words."""
    found: dict[tuple[str, ...], list[Judgement]] = {}
    for one in failures:
        about = (one.check, one.dtype) if one.rho is not None or not one.message else (one.message,)
        found.setdefault((one.implementation, *about), []).append(one)
    return list(found.values())


def told(group: Sequence[Judgement]) -> str:
    """The first failure of a group, and how many others there are."""
    block, others = wording.failure_block(group[0]), len(group) - 1
    if not others:
        return block
    where = len({(one.check, one.dtype) for one in group})
    if group[0].rho is not None:
        return f"{block}\nand {wording.plural(others, 'more failure')} of this check"
    return (
        f"{block}\nand {wording.plural(others, 'more failure')} in the same words, in {wording.plural(where, 'check')}"
    )


def in_short(alike: Sequence[Sequence[Judgement]], most: int = SHOWN) -> Iterator[str]:
    """A line for each group of failures, and one for those beyond the first few."""
    for group in alike[:most]:
        first = group[0]
        figure = wording.bias_line(first) if is_bias(first) else f"rho {capped_rho(worst_rho(first))}"
        said = f"{first.tensor} {figure}" if first.rho is not None else first.message
        where = len({(one.check, one.dtype) for one in group}) - 1
        also = f", and {wording.plural(where, 'check')} more in the same words" if where else ""
        yield f"failed: {first.check}, {first.dtype}: {said.partition(chr(10))[0]}{also}"
    if rest := sum(len(group) for group in alike[most:]):
        yield f"and {wording.plural(rest, 'more failure')}"
