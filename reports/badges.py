"""A badge for each implementation: as an SVG, and as JSON for shields.io's endpoint badges."""

import json
from html import escape

from flashproof.reports import tables, wording
from flashproof.reports.evidence import Evidence, Kernel, size

FOLDER = "badges"
COLOURS = {"passed": "#2f6f4f", "failed": "#c62828", "known defect": "#9a5b00"}
OTHERWISE = "#5b6470"


def message(kernel: Kernel, evidence: Evidence) -> str:
    """The words of a badge: the verdict with the largest rho, the version of the cases, and the commit.

    A verdict that comes from a narrowed run says so.
    """
    state = tables.verdict(kernel).state
    worst = max(
        (j for j in kernel.judged if j.judgement.status == state and j.rho is not None),
        key=lambda j: size(j.rho),
        default=None,
    )
    words = {"passed": "holds", "failed": "fails", "known defect": "known defect"}.get(state, str(state))
    words += " in a narrowed run" if kernel.narrowed_on else ""
    runs = {judged.judgement.run for judged in kernel.judged}
    of_runs = [environment for environment in evidence.environments if environment.run in runs]
    last = of_runs[-1] if of_runs else None
    commit = (last.project_commit or last.commit)[:7] if last else ""
    # The commit of flashproof fixes its cases, as far as a run records it.
    cases = last.commit[:7] if last and last.project_commit and last.project_commit != last.commit else ""
    figure = "" if worst is None else f"rho {wording.rho(worst.rho)}"
    return " \u00b7 ".join(part for part in (words, figure, cases and f"cases {cases}", commit) if part)


def endpoint(kernel: Kernel, evidence: Evidence) -> str:
    """The JSON that shields.io makes a badge of."""
    colour = _colour(kernel).removeprefix("#")
    about = {"schemaVersion": 1, "label": "flashproof", "message": message(kernel, evidence), "color": colour}
    return json.dumps(about) + "\n"


def svg(kernel: Kernel, evidence: Evidence) -> str:
    """The badge as an SVG that needs nothing else."""
    label, words = "flashproof", message(kernel, evidence)
    colour = _colour(kernel)
    left, right = (round(6.3 * len(text)) + 12 for text in (label, words))
    whole = f"{label}: {kernel.name} {words}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(whole)}"><title>{escape(whole)}</title>'
        f'<rect width="{left + right}" height="20" rx="3" fill="{colour}"/>'
        f'<path d="M3 0h{left - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#3a3f47"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14" textLength="{left - 10}">{label}</text>'
        f'<text x="{left + right / 2}" y="14" textLength="{right - 10}">{escape(words)}</text></g></svg>\n'
    )


def _colour(kernel: Kernel) -> str:
    """The colour of a badge. Only whole runs give the colour of a pass."""
    state = tables.verdict(kernel).state
    return OTHERWISE if state == "passed" and kernel.narrowed_on else COLOURS.get(state, OTHERWISE)
