"""The end of a run: whether everything that was selected is verified, and the last lines."""

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from flashproof import diagnosis, signatures
from flashproof.cases import not_claimed
from flashproof.failures import IN_FULL, groups, in_short, told
from flashproof.impls.spec import DTYPES, Implementation
from flashproof.reports import wording
from flashproof.reports.causes import capped_rho, without_numbers
from flashproof.reports.evidence import worst_rho
from flashproof.session import Session
from flashproof.targets import Loaded

ENDS = {"passed": "passed", "failed": "failed", "known defect": "with a known defect", "skipped": "left out"}
QUICK = "quick: each check ran some of its cases, and there was no search; a run without --quick verifies the kernel"
SHOWN_COVERAGE = 3  # a run with more implementations does not show the coverage of each


class Line(NamedTuple):
    """A line for the terminal."""

    text: str
    color: str = ""  # "red", "yellow", "green" or none


def unverified(session: Session) -> list[str]:
    """Selected implementations of which nothing passed.

    An implementation that was named counts although it cannot run here. One that a glob selected does not count. If
    nothing passed at all, every selected one counts, because a run that verified nothing is not a success.
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
    passed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    verifies = session.asked and not session.times
    if verifies and passed and (unverified(session) or lacking(session) or (session.strict and _doubts(session))):
        tests.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.status = int(tests.exitstatus)
    session.close(
        ended=not (stopped or tests.shouldstop or tests.shouldfail),
        verdict=verdict(session).text if verifies and session.written else "",
    )


def verdict(session: Session) -> Line:
    """The last line of a run: the verdict, the number of checks, and how these ended.

    A check counts once for each dtype and device. Only a run that nothing narrows verifies an implementation.
    """
    narrowed, forward = narrowing(session), forward_only(session)
    unused = list(dict.fromkeys(parameter for never in _never_given(session).values() for parameter in never))
    ended, whole = session.outcomes.total(), session.selection.whole()
    is_part = (narrowed or ended < whole) and not session.has_paths  # a path may hold checks of the user's own
    of = f" of {whole:,}" if is_part else ""
    words = f"{_claim(session, unused)}: {ended:,}{of} {'check' if (whole if of else ended) == 1 else 'checks'}"
    words += f", narrowed by {', '.join(narrowed)}" if narrowed else ""
    counts = [f"{session.outcomes[key]:,} {how}" for key, how in ENDS.items() if session.outcomes[key]]
    words += f": {', '.join(counts)}" if counts else ""
    words += f" ({_reasons(session)})" if session.reasons else ""
    if forward:
        cases = wording.plural(sum(len(session.without_gradient[pair]) for pair in forward), "case")
        words += f"; {cases} refused a backward, and no gradient was judged"
        words += f" of {_listed(forward)}" if session.passed_in - set(forward) else ""
    if session.status != pytest.ExitCode.OK:
        return Line(words, "red")
    return Line(words, "yellow" if unused or forward else "green")


def _claim(session: Session, unused: list[str]) -> str:
    """The first words of a verdict. unused: the parameters that no call was given."""
    of_others = session.status == pytest.ExitCode.TESTS_FAILED and session.others and not session.outcomes["failed"]
    if session.status != pytest.ExitCode.OK and not of_others:
        return "failed" if session.outcomes["failed"] else "not verified"
    said = "passed" if narrowing(session) else "verified"
    if not session.outcomes["passed"] and session.outcomes["known defect"]:
        said = "nothing passed, and every failure is known"
    if session.clock:
        said = "no fault found by a quick run"
    if forward := forward_only(session):
        scope = "in part forward only" if session.passed_in - set(forward) else "forward only"
        said += f", {scope}" if session.clock else f" {scope}"
    return f"{said}, without the parameter{'s' * (len(unused) > 1)} {', '.join(unused)}" if unused else said


def narrowing(session: Session) -> list[str]:
    """The options, as the user gave them, that make a run less than the whole verification of its implementations."""
    selection, options = session.selection, session.config.option
    found = ["--quick"] if session.clock else []
    found += ["--case"] if selection.cases else []
    found += [f"-k {shlex.quote(options.keyword)}"] if options.keyword else []
    if not selection.cases and set(selection.dtypes) != set(DTYPES):
        found += [f"--dtype {dtype}" for dtype in selection.dtypes]
    found += [f"--device {selection.device}"] if selection.device else []
    found += ["the paths that were given"] if session.has_paths else []
    found += [] if found or session.is_whole else ["options of pytest"]
    if session.clock or selection.cases or session.outcomes.total() < session.selection.whole():
        return found
    return []


def forward_only(session: Session) -> list[tuple[str, str]]:
    """Implementations and dtypes that refused every backward, so that their output alone was verified."""
    return [of for of in session.without_gradient if of in session.passed_in and of not in session.with_gradient]


def _listed(pairs: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}, {', '.join(dtype for of, dtype in pairs if of == name)}" for name in dict(pairs))


def _reasons(session: Session) -> str:
    """Why checks were left out: each reason, the most frequent one first. All refusals count as one reason."""
    found: Counter[str] = Counter()
    for reason, count in session.reasons.items():
        head, colon, _ = reason.partition(": ")
        found[head if colon and head in ("refused", "no case in this run") else reason] += count
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{count:,} {reason}" for reason, count in found.most_common())


def failures(session: Session) -> Iterator[Line]:
    """The failures of each implementation: a few in full, and a line for others."""
    for error in session.errors:
        yield Line(error, "red")
    for name in dict.fromkeys(one.implementation for one in session.failures):
        alike = groups([one for one in session.failures if one.implementation == name])
        for group in alike[:IN_FULL]:
            yield Line("")
            yield from (Line(line, "red") for line in told(group).splitlines())
        yield from (Line(line, "red") for line in in_short(alike[IN_FULL:]))
    if session.failures:
        yield Line("")


def last_lines(session: Session) -> Iterator[Line]:
    """What a run says at its end, before the places of its records and report."""
    if session.asked and not session.times:
        yield from _verdict(session)
    if session.clock:
        yield Line(QUICK, "yellow")
    searched = getattr(session.config.option, "flashproof_search", None)
    for (name, dtype), found in session.found.items() if searched else ():
        of = f", {found.worst.note}" if found.worst and found.status == "passed" else ""
        figure = f"rho {capped_rho(worst_rho(found))} of {found.tensor}{of}"
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
    except ModuleNotFoundError as error:
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
    for name, features in lacking(session).items():
        yield Line(f"required, and not verified: {', '.join(features)} of {name}", "red")
    for loaded in _external(session):
        if loaded.implementation and (unnamed := _unnamed(loaded.implementation)):
            parameters = ", ".join(unnamed)
            yield Line(f"not claimed: {loaded.name} has no parameter {parameters}; what these ask for was not verified")
    yield from _doubts(session)
    for loaded in selection.loaded:
        if loaded.changed:
            changed = ", ".join(loaded.changed)
            yield Line(f"put back: {loaded.name} changed {changed} when it was imported", "yellow")
    stopped = any(reason.startswith("not run") for reason in session.reasons)  # most of the cases were not run
    if len(selection.loaded) <= SHOWN_COVERAGE and not stopped:
        for loaded in selection.loaded:
            for device, covered in session.covered(loaded).items():
                yield Line(f"covered: {loaded.name} on {device}: {wording.covered(covered)}")


def _external(session: Session) -> list[Loaded]:
    """The external kernels that answered calls."""
    selection, left_out = session.selection, {name for name, _ in session.left_out}
    return [
        loaded
        for loaded in (selection.loaded if not selection.cases else ())
        if loaded.is_external and loaded.implementation and loaded.name not in left_out
    ]


def _never_given(session: Session) -> dict[str, list[str]]:
    """The parameters of each external kernel that no call was given."""
    found = {
        loaded.name: signatures.never_given(loaded.implementation)
        for loaded in _external(session)
        if loaded.implementation
    }
    return {name: never for name, never in found.items() if never}


def lacking(session: Session) -> dict[str, list[str]]:
    """The features of `--require` that each implementation was not verified with."""
    names = dict.fromkeys([loaded.name for loaded in session.selection.loaded])
    return {name: missing for name in names if (missing := session.exercised.missing(name))}


def _doubts(session: Session) -> list[Line]:
    """What a run could not verify: parameters that no call was given, refused cases, gradients that were not there.

    With `--strict`, each of these makes the run a failure.
    """
    color, left_out = "red" if session.strict else "yellow", {name for name, _ in session.left_out}
    found = [
        f"never given: {', '.join(never)} (parameters of {name}){signatures.renaming(never)}"
        for name, never in _never_given(session).items()
    ]
    for (name, words), dtypes in _refusals(session).items():
        if name not in left_out:  # otherwise another line says it
            times = wording.plural(sum(dtypes.values()), "time")
            found.append(f"refused: {name}, {', '.join(dtypes)}, {times}; the first message: {words}")
    if session.strict and (forward := forward_only(session)):
        found.append(f"no gradient was judged: {_listed(forward)}")
    return [Line(words, color) for words in found]


def _refusals(session: Session) -> dict[tuple[str, str], dict[str, int]]:
    """How often an implementation refused in each dtype, by the message of the first refusal.

    Messages that differ only in their numbers count as one.
    """
    found: dict[tuple[str, str], dict[str, int]] = {}
    first: dict[tuple[str, str], str] = {}
    for (name, dtype), said in session.refused.items():
        words = first.setdefault((name, without_numbers(said[0])), said[0])
        found.setdefault((name, words), {})[dtype] = len(said)
    return found


def reason(session: Session, name: str) -> str:
    """Why nothing of an implementation passed."""
    selection = session.selection
    missing = [target.missing for target in selection.targets if target.name == name and target.missing]
    missing += [_ending(words) for (left_out, _), words in session.left_out.items() if left_out == name]
    if missing:
        return missing[0]
    implementation = next((loaded.implementation for loaded in selection.loaded if loaded.name == name), None)
    if implementation and (unclaimed := _unclaimed(session, implementation)):
        return f"does not claim {unclaimed}"
    if failed := sum(one.implementation == name for one in session.failures):
        return f"{wording.plural(failed, 'failure')}, and no case passed"
    if any(of == name for of, _ in session.refused):
        return "it refused every case"
    if session.outcomes["known defect"]:
        return "no case passed, and a known defect is not a success"
    return "no case passed" if session.outcomes else "no check has a case for it"


def _unclaimed(session: Session, implementation: Implementation) -> str:
    """What was asked for and is not claimed by an implementation. Empty if it claims everything."""
    selection, supports = session.selection, implementation.supports
    features = [feature for case in selection.cases if (feature := not_claimed(case, supports))]
    if features:
        return f"the case: {', '.join(dict.fromkeys(features))}"
    if selection.device and selection.device not in supports.devices:
        return selection.device
    return "" if set(selection.dtypes) & set(supports.dtypes) else ", ".join(selection.dtypes)


def _ending(words: str) -> str:
    """How every call of an implementation ends. The advice is left out, because a failure has shown it."""
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
        "dropout_p and dropout_seed": supports.dropout,
        "return_lse": supports.lse,
    }
    return [parameter for parameter, named in claimed.items() if implementation.bare and not named]
