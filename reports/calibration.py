"""How close correct kernels come to each gate, as tables in Markdown.

Run `python -m flashproof.reports.calibration RECORDS... [-o FILE]`.

The allowances of `oracles/bounds.py` for the bias and for the mean square are derived. A derivation may overlook
something that correct kernels do. So this table compares the records of known kernels with the allowances. A figure
near 1 means that a correct kernel is close to a false alarm.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashproof.oracles.bounds import BIAS_STANDARD_ERRORS, RMS_ALLOWANCE, RMS_STANDARD_ERRORS
from flashproof.reports import wording
from flashproof.reports.evidence import DTYPES, TENSORS, Evidence, Judged, Machine, gather, size

HEAD = """\
# Calibration

This page shows how close right kernels come to each gate. Each figure is the largest one over all cases of a run. A
figure above 1 is a failure or a known defect. The page is made from the committed records:

    python -m flashproof.reports.calibration reports/records/*.jsonl.gz -o docs/calibration.md

- *out* to *dv*: rho, the largest error over the bound. In float32, where two bounds are gates, this is the larger rho.
- *rms*: the root of (mean square - {rms:g} standard errors), over its allowance of {allowance:g}.
- *bias*: (|bias| - {bias:g} standard errors), over its allowance.

The records are of these runs:

"""
BIASES = """
The largest biases are these. An item has the bias, its standard error, its allowance, the tensor and the case. The unit
of the first three is the ulp of the output in 16 bit, and the bound in float32.

"""
TITLE = "| implementation | dtype | out | lse | dq | dk | dv | rms | bias |\n|" + " --- |" * 9 + "\n"


@dataclass(frozen=True)
class Lean:
    """A judgement and the share of its allowance that its bias takes (`share_of_bias`)."""

    share: float
    judged: Judged

    def __str__(self) -> str:
        found = self.judged.judgement
        return (
            f"{found.bias:+.3f} ± {found.bias_error:.3f}, allowance {found.bias_allowance:.3f}, "
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


def section(evidence: Evidence, machine: Machine) -> str:
    """The table of a machine, and its largest biases. Empty if no rho was judged on it."""
    rows, leans = list[str](), list[str]()
    for kernel in evidence.kernels:
        for dtype in DTYPES:
            here = [one for one in kernel.judged if one.machine == machine and one.judgement.dtype == dtype]
            if all(judged.rho is None for judged in here):
                continue
            lean = _lean(here)
            share = f"{lean.share:.2f}" if lean else ""
            rows.append(f"| {kernel.name} | {dtype} | {_rhos(here)} | {_rms(here)} | {share} |\n")
            if lean:
                leans.append(wording.item(f"{kernel.name}, {dtype}: {lean}"))
    if not rows:
        return ""
    return "".join([f"\n## {machine}\n\n", TITLE, *rows, BIASES if leans else "", *leans])


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


def _lean(judged: list[Judged]) -> Lean | None:
    leans = [Lean(share, one) for one in judged if (share := share_of_bias(one)) is not None]
    return max(leans, key=lambda lean: lean.share, default=None)


def table(paths: Sequence[Path]) -> str:
    """The page for these record files. Raises the exceptions of `evidence.gather`."""
    evidence = gather(paths)
    head = HEAD.format(bias=BIAS_STANDARD_ERRORS, rms=RMS_STANDARD_ERRORS, allowance=RMS_ALLOWANCE)
    judging = {judged.judgement.run for kernel in evidence.kernels for judged in kernel.judged}
    runs = [
        wording.item(
            f"{one.date[:10]}, {one.device}, commit {one.commit}, "
            f"{', '.join(f'{name} {version}' for name, version in one.versions.items())}: `{one.command}`"
        )
        for one in evidence.environments
        if one.run in judging
    ]
    machines = dict.fromkeys(machine for kernel in evidence.kernels for machine in kernel.machines)
    return "".join([head, *runs, *(section(evidence, machine) for machine in machines)])


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
