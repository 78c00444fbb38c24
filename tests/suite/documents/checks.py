"""Generates docs/checks.md: every check, what it asks, its cases, and the mutants that it rejects first."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flashproof.impls.spec import DTYPES, OWN_KERNELS, Device, Implementation
from flashproof.registry import Check, checks
from flashproof.reports import mutants
from flashproof.reports.evidence import gather
from flashproof.reports.record import LAYERS, Combined, read
from flashproof.reports.wording import SUITES, item
from flashproof.space import COMMON, FACTORS, MODELS, space_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "checks.md"
MATRIX = ROOT / "reports" / "records" / "mutants.jsonl.gz"
COMBINATIONS = ROOT / "reports" / "records" / "combinations.jsonl.gz"
# A kernel with all claims that cases depend on.
KERNEL = Implementation(name="", attention=lambda *_: None, supports=replace(OWN_KERNELS, block_mask=True))
SHOWN = 6  # for each check, the page shows the names of at most so many mutants
SPACE = """
## The space of cases

A case is a point in a space of factors. A factor has levels. A level is a value for which a kernel may have its own
code. The checks that are named after a way of calling share one covering array of the space. The array has every pair
of levels that the claims allow, and that a run has room for, in some case. `--thorough` adds every triple of levels
that fits in cases of a quarter of the size.

Some levels hide the faults of others in some tensors of the answer. A call without a backward shows no gradient.
Values of zero make out, dQ and dK zero. A scale of zero makes dQ and dK zero. So a pair needs a case for each tensor
that it does not hide itself: a case in which no other level hides this tensor. Small faults of out, and of the
gradients, count as two more tensors: autocast and very large scores hide them.

The factors and their levels:

"""
COVERED = """
These are {factors} factors with {levels} levels.
The array of a kernel that claims all of them has {cases} cases on a CPU.
The cases have all {pairs} pairs, and {share} % of the {triples} triples.

A few cases of plain numbers are added to the array, because a bias is easiest to see in them. Such a kernel is also
called as models call it, for training and for one token of generation. A run of three dtypes makes each of these calls
in one of them.
The models are {models}.

Most users meet only some of the levels, and kernels have code for several of these together. So {common} further cases
contain every combination of *four* common levels that fits in one case. A kernel that is interpreted, or compiled for
each shape, does not get them. The levels are:

{levels_of_common}"""
COMBINED = """
### Combination mutants

A combination mutant is a right kernel that is wrong only where two or three properties of a call meet, or beyond a
size. It is wrong in one tensor, by 1 % of every number, by a few bits, in its last row or in one head. Its condition is
drawn at random and not from the array.
`python -m flashproof.tests.suite.mutants.combinations --thorough` draws new ones.

The table says how many mutants each set of checks rejects. All rows are of one seed. A few mutants differ between the
rows, because some conditions depend on addresses that the system chooses. The lists by hand are those of commit
42d61d8.

| checks | two properties meet | three properties meet | a size is beyond a limit |
| --- | --- | --- | --- |
"""
HEAD = """\
# The checks

flashproof runs a check for every implementation that claims one of its cases. A check is a Python function in
[tests](../tests). The checks of a layer assume that those of the layers above it pass. For each check, this page has:

- *Cases*: how many cases the check has for one dtype, on a CPU and on a GPU. An implementation gets those that it
  claims.
- *Needs*: claims without which the check is not run.
- *Mutants*: kernels with one deliberate fault each. They are the reason why a check exists. A mutant names the check
  that must reject it. "3 named, 7 first" says that three mutants name this check, and that this check is the first one
  to reject seven mutants in some dtype.

This page is generated: `python -m flashproof.tests.suite.documents` writes it from the checks and from the last full
trial of the mutants.
"""


def page() -> str:
    """Returns the text of the page."""
    caught = _caught()
    parts = [
        HEAD,
        SPACE,
        *(item(f"**{factor.name}**: {_listed(factor.levels)}") for factor in FACTORS),
        _covered(),
        _combined(),
    ]
    for layer in LAYERS:
        parts.append(f"\n## {layer.capitalize()}\n\n")
        parts += [_described(check, *caught[check.name]) for check in checks().values() if check.layer == layer]
    return "".join(parts)


def _listed(levels: Sequence[str]) -> str:
    """Returns the levels of a factor as text. Ten or more multiples of eight are given as a range."""
    eighths = [level for level in levels if level.isdigit() and int(level) % 8 == 0]
    if len(eighths) < 10:
        return ", ".join(levels)
    ends = f"each multiple of 8 from {min(map(int, eighths))} to {max(map(int, eighths))}"
    return ", ".join([ends, *(level for level in levels if level not in eighths)])


def _covered() -> str:
    """Describes what the array contains for a kernel that claims everything, on a CPU."""
    space = space_of(KERNEL)
    pairs, triples = space.coverage
    common = "".join(item(f"**{name}**: {', '.join(levels)}") for name, levels in COMMON.items())
    return COVERED.format(
        common=len(space.common),
        levels_of_common=common,
        factors=len(FACTORS),
        levels=sum(len(factor.levels) for factor in FACTORS),
        cases=len(space.array),
        pairs=pairs.possible,
        share=f"{100.0 * triples.share:.0f}",
        triples=triples.possible,
        models=f"{', '.join([*MODELS][:-1])} and {[*MODELS][-1]}",
    )


def _combined() -> str:
    """Returns the table of combination mutants that the checks of each suite rejected. Empty without a measurement."""
    if not COMBINATIONS.exists():
        return ""
    records = [record for record in read(COMBINATIONS) if isinstance(record, Combined)]
    lines = [COMBINED]
    for suite, said in SUITES.items():
        of_kind = {record.kind: record for record in records if record.suite == suite and record.kind}
        if not of_kind:
            continue
        cells = [f"{of_kind[kind].rejected} of {of_kind[kind].tried}" for kind in ("pairs", "triples", "thresholds")]
        lines.append(f"| {said} | {' | '.join(cells)} |\n")
    return "".join(lines)


def _described(check: Check, first: list[str], named: list[str]) -> str:
    parts = [f"`{check.name}`: {check.says} *Cases*: {_cases(check)}."]
    if check.claims:
        parts.append(f"*Needs*: {', '.join(f'`{claim}`' for claim in check.claims)}.")
    if first or named:
        parts.append(f"*Mutants*: {_mutants(first, named)}.")
    return item(" ".join(parts))


def _cases(check: Check) -> str:
    def count(device: Device) -> str:
        space = space_of(KERNEL, device=device)
        counts = sorted({len(check.grid(space, dtype)) for dtype in DTYPES})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    on_cpu, on_gpu = count("cpu"), count("cuda")
    return on_cpu if on_cpu == on_gpu else f"{on_cpu}; GPU {on_gpu}"


def _mutants(first: list[str], named: list[str]) -> str:
    names = [*named, *(name for name in first if name not in named)]
    shown = ", ".join(names[:SHOWN]) + (" and others" if len(names) > SHOWN else "")
    return f"{len(named)} named, {len(first)} first: {shown}"


def _caught() -> dict[str, tuple[list[str], list[str]]]:
    """Returns, for each check, the mutants that it is the first to reject, and those that name it."""
    mutation = gather([MATRIX]).mutation
    first: defaultdict[str, list[str]] = defaultdict(list)
    named: defaultdict[str, list[str]] = defaultdict(list)
    for row in mutants.rows(mutation) if mutation else ():
        for name in row.first if row.counts else ():
            first[name].append(row.specimen.name)
        if row.counts:
            named[row.specimen.check].append(row.specimen.name)
    return {name: (first[name], named[name]) for name in checks()}
