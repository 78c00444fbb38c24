"""The end of a run: whether everything that was selected is verified, and the last lines."""

import os
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from flashproof import diagnosis, quick
from flashproof.cases import not_claimed
from flashproof.impls.spec import Implementation
from flashproof.registry import checks
from flashproof.reports import wording
from flashproof.reports.evidence import worst_rho
from flashproof.session import Session


class Line(NamedTuple):
    """A line for the terminal."""

    text: str
    color: str = ""  # "red", "yellow" or none


def unverified(session: Session) -> list[str]:
    """Selected implementations of which nothing passed.

    One that was named counts although it cannot run here; one that a glob selected does not. If nothing passed at all,
    every selected one counts: a run that verified nothing is no success.
    """
    selection = session.selection
    named = [name for name in selection.names if not any(letter in name for letter in "*?[")]
    reasons = {target.name: target.missing for target in selection.targets}
    untouched = [name for name in named if name not in reasons]  # no dtype or device that was asked for is claimed
    without = [
        name for name, missing in reasons.items() if not session.passed.get(name) and (missing is None or name in named)
    ]
    everything = [] if any(session.passed.values()) else list(reasons) or selection.names
    return untouched + without or everything


def settle(session: Session, tests: pytest.Session, exitstatus: int) -> None:
    """Writes the last records, and makes a run that did not verify all that was selected a failure."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist
        output["flashproof_absences"] = [msgspec.json.encode(absence).decode() for absence in session.absences]
    if session.role != "main" or session.config.option.collectonly:
        return
    stopped = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    session.close(ended=not (stopped or tests.shouldstop or tests.shouldfail))
    passed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.asked and not session.times and passed and unverified(session):
        tests.exitstatus = pytest.ExitCode.TESTS_FAILED


def last_lines(session: Session) -> Iterator[Line]:
    """What a run says at its end, before the places of its records and report."""
    if session.asked and not session.times:
        yield from _verdict(session)
    if session.clock:
        yield Line(quick.left_out(len(checks())), "yellow")
    searched = getattr(session.config.option, "flashproof_search", None)
    for (name, dtype), found in session.found.items() if searched else ():
        of = f", {found.worst.note}" if found.worst and found.status == "passed" else ""
        figure = f"rho {wording.rho(worst_rho(found))} of {found.tensor}{of}"
        yield Line(f"search: {name}, {dtype}: {figure}: {found.case}")


def places(session: Session) -> Iterator[Line]:
    """Writes the report, and says where it and the records are."""
    if not session.written:
        return
    yield Line(f"records: {os.path.relpath(session.path)}")
    if not session.site:
        return
    folder, damaged = session.path.parent, list[str]()
    try:
        from flashproof.reports.evidence import clear, gather
        from flashproof.reports.pages import write_pages

        evidence = gather(sorted(folder.glob("*.jsonl")), damaged)
        index = write_pages(evidence, session.site)
    except ImportError as error:
        yield Line(f"report:  not written: {error.name} is not installed (pip install 'flashproof[report]')", "yellow")
        return
    except (OSError, ValueError) as error:  # the verdict of the run stands
        yield Line(f"report:  not written: {error}", "yellow")
        return
    for words in damaged:
        yield Line(f"left out of the report: {words}", "yellow")
    if folder == session.settings.records:
        clear(folder, evidence)
    yield Line(f"report:  {os.path.relpath(index)}")


def _verdict(session: Session) -> Iterator[Line]:
    selection = session.selection
    for name in unverified(session):
        yield Line(f"not verified: {name} ({reason(session, name)})", "red")
    left_out = {name for name, _ in session.left_out}
    for loaded in selection.loaded if not selection.cases else ():
        if not loaded.is_external or not loaded.implementation or loaded.name in left_out:
            continue
        if unnamed := _unnamed(loaded.implementation):
            parameters = ", ".join(unnamed)
            yield Line(
                f"not claimed: {loaded.name} has no parameter {parameters}; nothing that these ask for was verified"
            )
    for loaded in selection.loaded:
        if loaded.changed:
            changed = ", ".join(loaded.changed)
            yield Line(f"put back: {loaded.name} changed {changed} when it was imported", "yellow")
    for (name, words), dtypes in _refusals(session).items():
        if name not in left_out:  # else it is said above
            times = wording.plural(sum(dtypes.values()), "time")
            yield Line(f"refused: {name}, {', '.join(dtypes)}, {times}, first with: {words}", "yellow")


def _refusals(session: Session) -> dict[tuple[str, str], dict[str, int]]:
    """How often an implementation refused in each dtype, by what it said first."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for (name, dtype), said in session.refused.items():
        found.setdefault((name, said[0]), {})[dtype] = len(said)
    return found


def reason(session: Session, name: str) -> str:
    """Why nothing of an implementation passed."""
    selection = session.selection
    missing = [target.missing for target in selection.targets if target.name == name and target.missing]
    missing += [_ending(words) for (left_out, _), words in session.left_out.items() if left_out == name]
    if missing:
        return missing[0]
    implementation = next((loaded.implementation for loaded in selection.loaded if loaded.name == name), None)
    if implementation is None:
        return "no case passed"
    supports = implementation.supports
    features = [feature for case in selection.cases if (feature := not_claimed(case, supports))]
    if features:
        return f"does not claim the case: {', '.join(dict.fromkeys(features))}"
    if selection.device and selection.device not in supports.devices:
        return f"does not claim {selection.device}"
    if not set(selection.dtypes) & set(supports.dtypes):
        return f"does not claim {', '.join(selection.dtypes)}"
    return "no case passed"


def _ending(words: str) -> str:
    """How every call of an implementation ends, without the advice of a failure that was shown."""
    words = words.partition("; ")[0]
    if not diagnosis.GPU_ALONE.search(words) or torch.cuda.is_available():
        return words
    advice = "; TRITON_INTERPRET=1 runs Triton's kernels on the CPU" if "active drivers" in words else ""
    return f"CUDA: no device; {words.partition('. ')[0]}{advice}"


def _unnamed(implementation: Implementation) -> list[str]:
    """The parameters that a bare callable could have and does not have. It may take them by **kwargs or other names."""
    supports = implementation.supports
    claimed = {
        "is_causal": bool(supports.causal),
        "causal_alignment": "bottom_right" in supports.causal,
        "scale": supports.scale != "default",
        "enable_gqa": supports.grouped_heads,
        "block_mask": supports.block_mask,
        "dropout_p with dropout_seed": supports.dropout,
        "return_lse": supports.lse,
    }
    return [parameter for parameter, named in claimed.items() if implementation.bare and not named]
