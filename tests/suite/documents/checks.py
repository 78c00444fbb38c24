"""docs/checks.md: every check, what it asks, its cases, and the mutants that it rejects first or alone."""

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

flashproof runs these checks over every implementation whose claims cover a case of them. A check is a Python function in
[tests](../tests); the layers stand in the order in which each one assumes those before it.

- **Cases**: how many cases the check has for one dtype, on a CPU and on a GPU. An implementation is given those that it
  claims.
- **Needs**: a claim without which the check is not run.
- **Mutants**: kernels that were made wrong on purpose, and that this check rejects *first*, before all other checks, or
  *alone*, when no other check rejects them. They are the reason why the check exists.

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
    return f"{len(first)} first, {len(alone)} alone: {shown}"


def _caught() -> dict[str, tuple[list[str], list[str]]]:
    """The mutants that each check rejects first, and alone."""
    mutation = gather([MATRIX]).mutation
    first: defaultdict[str, list[str]] = defaultdict(list)
    alone: defaultdict[str, list[str]] = defaultdict(list)
    for row in mutants.rows(mutation) if mutation else ():
        for name in row.first if row.counts else ():
            first[name].append(row.specimen.name)
        for name in row.alone if row.counts else ():
            alone[name].append(row.specimen.name)
    return {name: (first[name], alone[name]) for name in checks()}
