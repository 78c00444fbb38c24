"""docs/checks.md: every check, what it asks, its cases, and the mutants that it rejects first."""

from collections import defaultdict
from pathlib import Path

from flashproof.impls.spec import DTYPES, Device
from flashproof.registry import Check, checks
from flashproof.reports import mutants
from flashproof.reports.evidence import gather
from flashproof.reports.record import LAYERS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "checks.md"
MATRIX = ROOT / "reports" / "records" / "mutants.jsonl.gz"
SHOWN = 6  # mutants of a check whose names the page shows
HEAD = """\
# The checks

flashproof runs a check for every implementation that claims one of its cases. A check is a Python function in
[tests](../tests). The checks of a layer assume that those of the layers above it pass.

- **Cases**: how many cases the check has for one dtype, on a CPU and on a GPU. An implementation is given those that it
  claims.
- **Needs**: a claim without which the check is not run.
- **Mutants**: kernels with a deliberate fault each, the reason why a check exists. Every check was tried on every
  mutant, in each dtype. "7 first, 2 only here" says that this check rejects seven mutants that pass all checks above it
  in some dtype, and that two of the seven pass all other checks there.

This page is generated: `python -m flashproof.tests.suite.documents` writes it from the checks and from the last full
trial of the mutants.
"""


def page() -> str:
    """The text of the page."""
    caught = _caught()
    parts = [HEAD]
    for layer in LAYERS:
        parts.append(f"\n## {layer.capitalize()}\n")
        parts.append("\n| check | what it asks | cases | needs | mutants |\n| --- | --- | --- | --- | --- |\n")
        parts += [_row(check, *caught[check.name]) for check in checks().values() if check.layer == layer]
    return "".join(parts)


def _row(check: Check, first: list[str], alone: list[str]) -> str:
    needs = ", ".join(f"`{claim}`" for claim in check.claims)
    cells = [f"`{check.name}`", check.says, _cases(check), needs, _mutants(first, alone)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _cases(check: Check) -> str:
    def count(device: Device) -> str:
        counts = sorted({len(check.grid(dtype, device)) for dtype in DTYPES})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    on_cpu, on_gpu = count("cpu"), count("cuda")
    return on_cpu if on_cpu == on_gpu else f"{on_cpu}; GPU {on_gpu}"


def _mutants(first: list[str], alone: list[str]) -> str:
    if not first and not alone:
        return ""
    names = [*alone, *(name for name in first if name not in alone)]
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    only = f", {len(alone)} only here" if alone else ""
    return f"{len(first)} first{only}: {shown}"


def _caught() -> dict[str, tuple[list[str], list[str]]]:
    """The mutants that each check rejects first, and those of them that no other check rejects."""
    mutation = gather([MATRIX]).mutation
    first: defaultdict[str, list[str]] = defaultdict(list)
    alone: defaultdict[str, list[str]] = defaultdict(list)
    for row in mutants.rows(mutation) if mutation else ():
        for name in row.first if row.counts else ():
            first[name].append(row.specimen.name)
        for name in row.alone if row.counts else ():
            alone[name].append(row.specimen.name)
    return {name: (first[name], alone[name]) for name in checks()}
