"""How close correct kernels come to each gate, as a table in Markdown.

Run `python -m flashproof.reports.calibration RECORDS... [-o FILE]`.

The allowances of `oracles/bounds.py` for the bias and for the mean square are derived. A derivation may overlook
something that correct kernels do. So this table compares the records of known kernels with the allowances. A figure
near 1 means that a correct kernel is close to a false alarm.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashproof.oracles.bounds import BIAS_STANDARD_ERRORS, RMS_ALLOWANCE, RMS_STANDARD_ERRORS
from flashproof.reports.evidence import DTYPES, TENSORS, Evidence, Judged, gather, size

HEAD = (
    "# Calibration\n"
    "\n"
    "How close kernels that are right come to each gate, at their worst over every case of a run. 1 is the gate. "
    "Made from the committed records:\n"
    "\n"
    "    python -m flashproof.reports.calibration reports/records/*.jsonl.gz -o docs/calibration.md\n"
    "\n"
    "- rho: the largest error over the bound; of float32, where two bounds gate, the larger.\n"
    "- bias: (|bias| - {bias:g} standard errors) over its allowance; a lean is anything above 1. "
    "Beside it the bias, its standard error and its allowance, in ulps of\n"
    "  the output (16 bit) or over the bound (float32), the tensor and the case.\n"
    "- rms: the root of (mean square - {rms:g} standard errors), over its allowance of {allowance:g}.\n"
)


@dataclass(frozen=True)
class Lean:
    """A judgement and the share of its allowance that its bias takes (`share_of_bias`)."""

    share: float
    judged: Judged

    def __str__(self) -> str:
        found = self.judged.judgement
        return (
            f"{self.share:.2f} | {found.bias:+.3f} ± {found.bias_error:.3f} of {found.bias_allowance:.3f}, "
            f"{found.tensor}, `{found.case}`"
        )


def share_of_bias(judged: Judged) -> float | None:
    """(|bias| - BIAS_STANDARD_ERRORS standard errors) / allowance, and at least 0. None if no bias was judged.

    Above 1, the bias fails.
    """
    found = judged.judgement
    if found.bias is None or found.bias_error is None or not found.bias_allowance:
        return None
    return max(0.0, abs(found.bias) - BIAS_STANDARD_ERRORS * found.bias_error) / found.bias_allowance


def share_of_rms(judged: Judged) -> float | None:
    """sqrt(rms^2 - RMS_STANDARD_ERRORS standard errors) / RMS_ALLOWANCE. None if no root mean square was judged.

    The standard error is that of rms^2. A negative difference counts as 0. Above 1, the root mean square fails.
    """
    found = judged.judgement
    if found.rms is None or found.rms_error is None:
        return None
    return math.sqrt(max(0.0, size(found.rms) ** 2 - RMS_STANDARD_ERRORS * found.rms_error)) / RMS_ALLOWANCE


def rows(evidence: Evidence) -> Iterator[str]:
    """One line of the table for each implementation, machine and dtype with a judged rho."""
    for kernel in evidence.kernels:
        for machine in kernel.machines:
            for dtype in DTYPES:
                here = [
                    judged for judged in kernel.judged if judged.machine == machine and judged.judgement.dtype == dtype
                ]
                if any(judged.rho is not None for judged in here):
                    yield f"| {kernel.name} | {machine} | {dtype} | {_rhos(here)} | {_rms(here)} | {_lean(here)} |"


def _rhos(judged: list[Judged]) -> str:
    largest = {
        tensor: max(
            (one.rho for one in judged if one.judgement.tensor == tensor and one.rho is not None),
            key=size,
            default=None,
        )
        for tensor in TENSORS
    }
    return " | ".join("" if rho is None else f"{float(rho):.2f}" for rho in largest.values())


def _rms(judged: list[Judged]) -> str:
    largest = max((share for one in judged if (share := share_of_rms(one)) is not None), default=None)
    return "" if largest is None else f"{largest:.2f}"


def _lean(judged: list[Judged]) -> str:
    leans = [Lean(share, one) for one in judged if (share := share_of_bias(one)) is not None]
    return str(max(leans, key=lambda lean: lean.share)) if leans else " | "


def table(paths: Sequence[Path]) -> str:
    """The page for these record files. Raises the exceptions of `evidence.gather`."""
    evidence = gather(paths)
    head = HEAD.format(bias=BIAS_STANDARD_ERRORS, rms=RMS_STANDARD_ERRORS, allowance=RMS_ALLOWANCE)
    judging = {judged.judgement.run for kernel in evidence.kernels for judged in kernel.judged}
    runs = "".join(
        f"- {one.date[:10]}, {one.device}, commit {one.commit}, "
        f"{', '.join(f'{name} {version}' for name, version in one.versions.items())}: `{one.command}`\n"
        for one in evidence.environments
        if one.run in judging
    )
    title = (
        "| implementation | device | dtype | rho out | lse | dq | dk | dv | rms | bias | of which |\n|" + " --- |" * 11
    )
    return "\n".join([head, runs, title, *rows(evidence), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table. Returns the exit status: 0, or 2 after a line on stderr that says what is wrong with a file."""
    parser = argparse.ArgumentParser(
        prog="python -m flashproof.reports.calibration",
        description="How close the kernels of some records come to each gate.",
    )
    parser.add_argument(
        "records", nargs="+", type=Path, metavar="RECORDS", help="record files (JSON lines), as pytest writes them"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where the table goes; the standard output unless given"
    )
    options = parser.parse_args(arguments)
    try:
        text = table(options.records)
        if options.output:
            options.output.write_text(text)
        else:
            print(text, end="")
    except (OSError, ValueError) as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
