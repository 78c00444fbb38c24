"""`python -m flashproof.tests.suite.mutants` tries every mutant and every right kernel.

    python -m flashproof.tests.suite.mutants [NAME ...] [-o RECORDS] [-j PROCESSES] [--in-turn | --quick]

It tries them by the checks of the suite and by the rules that other projects use, and writes records and their page.
The checks that try a mutant stop at the first check that rejects it.

With `--quick`, it tries them by the checks and cases of a quick run alone, without the time limit of a quick run. It
counts the rejections and writes no records.

The exit status is 0 if every mutant was rejected in a dtype that it names, by a check that it names, and if no right
kernel was rejected. Otherwise it is 1.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

# Without a GPU, this module selects Triton's interpreter. It must do so before Triton is imported.
import flashproof.impls.triton  # noqa: F401
from flashproof import quick, registry
from flashproof.cases import Case
from flashproof.environment import environment, run_name
from flashproof.impls import catalogue
from flashproof.impls.spec import DTYPES, Dtype, Implementation
from flashproof.reports.pages import write_site
from flashproof.reports.record import Judge, Record, Specimen, Trial, append
from flashproof.settings import Settings
from flashproof.space import space_of
from flashproof.tests.suite.mutants import mutant, rules, trial, variants

# Right kernels: three of this project, and torch's SDPA on a CPU.
KERNELS = ("tiled.fa1", "tiled.fa2", "tiled.block_sparse", "sdpa.math")
# Triton's interpreter or the CPU twin runs these kernels. Their mutants are tried in one dtype. The rules try them only
# on the inputs of their own suites.
SLOW = ("triton.", "cuda.")
MEMORY_CASES = 2  # lengths at which the checks of memory measure


@dataclass(frozen=True)
class Job:
    """One specimen in one dtype."""

    specimen: Specimen
    dtype: Dtype
    patched: mutant.Mutant | None = None

    def implementation(self) -> Implementation:
        """Returns the implementation of the specimen, newly built or loaded."""
        if self.patched:
            return mutant.build(self.patched)
        if self.specimen.kind == "variant":
            return next(variant.implementation for variant in variants.every() if variant.name == self.specimen.name)
        return catalogue.load(self.specimen.name)


def jobs(run: str, names: Sequence[str], *, in_turn: bool = False) -> list[Job]:
    """Returns everything that is to be tried, ordered so that neighbours share exact results.

    names: parts of names of specimens; all specimens if empty. in_turn: tries each variant in one dtype.

    Raises ValueError for a name that is part of no specimen's name.
    """
    found = []
    for one in mutant.every():
        patch = "\n".join(
            f"{patch.file or mutant.source_of(one.of)}\n- {_indented(patch.old, '- ')}\n+ {_indented(patch.new, '+ ')}"
            for patch in one.patches
        )
        about = {
            "fault": one.fault,
            "origin": one.origin,
            "says": one.says,
            "of": one.of,
            "check": one.check,
            "survives": one.survives,
        }
        specimen = Specimen(run=run, name=one.name, kind="mutant", patch=patch, **about)
        of_mutant = one.dtypes[:1] if _is_slow(one.of) else one.dtypes
        found += [Job(specimen, dtype, one) for dtype in of_mutant]
    for number, variant in enumerate(variants.every()):
        dtypes = DTYPES[number % 3 :][:1] if in_turn else DTYPES
        found += [
            Job(Specimen(run=run, name=variant.name, kind="variant", says=variant.says), dtype) for dtype in dtypes
        ]
    for name in KERNELS:
        found += [
            Job(Specimen(run=run, name=name, kind="kernel", says=catalogue.load(name).summary), dtype)
            for dtype in DTYPES
        ]
    for name in names:
        if not any(name in job.specimen.name for job in found):
            raise ValueError(
                f"{name}: no specimen has this in its name{catalogue.close(name, {job.specimen.name for job in found})}"
            )
    chosen = [job for job in found if not names or any(name in job.specimen.name for name in names)]
    return sorted(
        chosen, key=lambda job: (DTYPES.index(job.dtype), job.specimen.of or job.specimen.kind, job.specimen.name)
    )


def _is_slow(name: str) -> bool:
    return name.startswith(SLOW)


def _cases(check: registry.Check, job: Job, implementation: Implementation) -> list[Case]:
    """Returns the cases of a check that a specimen is tried on: all of them, or fewer if they would take too long."""
    cases = check.cases(implementation, job.dtype, space_of(implementation))
    return cases[:MEMORY_CASES] if check.name.startswith("memory/") else cases


def _indented(text: str, sign: str) -> str:
    return text.strip("\n").replace("\n", f"\n{sign}")


def judges(run: str) -> list[Judge]:
    """Returns the checks in their order, and then the rules."""
    of_suite = [
        Judge(run=run, name=check.name, kind="check", says=(check.function.__doc__ or "").partition("\n")[0])
        for check in registry.checks().values()
    ]
    of_others = [
        Judge(run=run, name=rule.name, kind="rule", inputs=inputs, says=rule.says, source=rule.source)
        for inputs in ("theirs", "ours")
        for rule in rules.RULES
    ]
    return of_suite + of_others


def tried(job: Job) -> list[Trial]:
    """Returns what the judges say of a specimen in one dtype.

    The specimen is loaded again for each check, because its fault may be in state that the process keeps. The checks
    that a mutant names try it first, then all others, until one rejects it.
    """
    specimen, dtype = job.specimen, job.dtype
    found: list[Trial] = []
    named = mutant.asked(job.patched) if job.patched and not specimen.survives else []
    for check in [*named, *(check for check in registry.checks().values() if check not in named)]:
        if job.patched and any(one.rejected for one in found):
            break
        implementation = job.implementation()
        outcome = trial.ask(check, implementation, dtype, _cases(check, job, implementation))
        if outcome.verdict != "not claimed":
            rejected = outcome.verdict == "rejected"
            found.append(
                Trial(
                    run=specimen.run,
                    specimen=specimen.name,
                    judge=check.name,
                    dtype=dtype,
                    rejected=rejected,
                    case=outcome.case,
                    said=outcome.said,
                )
            )
    plain = registry.checks()["gradients/backward"]
    ours = [] if _is_slow(specimen.of) else plain.cases(job.implementation(), dtype, space_of(job.implementation()))
    for inputs, cases in (("theirs", rules.their_inputs(dtype, "cpu")), ("ours", ours)):
        if not cases:
            continue
        rejections = rules.ask(job.implementation(), cases)
        for rule in rules.RULES:
            case, said = rejections.get(rule.name, ("", ""))
            about = {
                "run": specimen.run,
                "specimen": specimen.name,
                "judge": rule.name,
                "inputs": inputs,
                "dtype": dtype,
            }
            found.append(
                Trial(**about, rejected=rule.name in rejections, case=str(case), said=said),  # type: ignore[arg-type]
            )
    return found


def quickly(job: Job) -> str:
    """Returns the first check of a quick run that rejects a specimen; empty if none does."""
    implementation = job.implementation()
    space = space_of(implementation, effort="quick")
    for name, count in quick.CHECKS.items():
        check = registry.checks()[name]
        if not all(getattr(implementation.supports, claim) for claim in check.claims):
            continue
        cases = check.cases(implementation, job.dtype, space)[:count]
        if cases and trial.ask(check, job.implementation(), job.dtype, cases).verdict == "rejected":
            return name
    return ""


def all_tried_quickly(work: list[Job], processes: int) -> int:
    """Prints how many mutants a quick run rejects, and which ones it misses. Returns the number of false alarms."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        found = list(zip(work, pool.imap(quickly, work, chunksize=1), strict=True))
    mutants = dict.fromkeys((job.specimen.name for job, _ in found if job.patched and not job.specimen.survives), "")
    alarms = []
    for job, check in found:
        if job.specimen.name in mutants:
            mutants[job.specimen.name] = mutants[job.specimen.name] or check
        elif check and not job.patched:
            alarms.append(f"{job.specimen.name}, {job.dtype}: {check}")
    missed = [name for name, check in mutants.items() if not check]
    print(f"missed: {', '.join(missed)}")
    print(f"a quick run rejects {len(mutants) - len(missed)} of {len(mutants)} mutants")
    print(f"false alarms: {'; '.join(alarms) or 'none'}")
    return len(alarms)


def all_tried(work: list[Job], processes: int) -> Iterator[tuple[Job, list[Trial]]]:
    """Yields each job with its trials. They run in this process, or in several."""
    if processes == 1:
        for job in work:
            yield job, tried(job)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from zip(work, pool.imap(tried, work, chunksize=1), strict=True)


def wrong(job: Job, trials: list[Trial]) -> str | None:
    """Returns what the suite got wrong about a specimen, in words; None for nothing. trials: those in all dtypes."""
    rejections = {one.judge: one for one in trials if one.rejected and one.judge in registry.checks()}
    if job.specimen.kind != "mutant":
        return "; ".join(f"false alarm of {name}: {one.case}: {one.said}" for name, one in rejections.items()) or None
    if job.specimen.survives:
        return f"no longer survives: {', '.join(rejections)}" if rejections else None
    if not rejections:
        return "survives"
    named = {check.name for check in mutant.asked(job.patched)} if job.patched else set()
    return None if named & set(rejections) else f"not rejected by {job.specimen.check}, but by {', '.join(rejections)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trials, writes the records and the report, and prints where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m flashproof.tests.suite.mutants", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only specimens whose name holds this")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="RECORDS",
        help="where the records go, instead of a file of its own in reports/runs",
    )
    parser.add_argument("-j", "--processes", type=int, default=1, metavar="PROCESSES", help="1 unless given")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--in-turn", action="store_true", help="variants in one dtype each, which takes half as long")
    how.add_argument("--quick", action="store_true", help="by the checks and cases of a quick run; writes no records")
    options = parser.parse_args(arguments)
    run = run_name()
    try:
        work = jobs(run, options.names, in_turn=options.in_turn)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    for name in sorted({job.patched.of for job in work if job.patched}):
        if reason := catalogue.load(name).missing("cpu"):
            parser.exit(2, f"{name}: {reason}; without it the mutants of {name} cannot be tried\n")
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")
    if options.quick:
        return 1 if all_tried_quickly(work, options.processes) else 0
    settings = Settings.of(mutant.ROOT)
    path = options.output or settings.records / f"{run}.jsonl"
    started, faults = time.monotonic(), 0
    command = " ".join(
        ["python -m flashproof.tests.suite.mutants", *(sys.argv[1:] if arguments is None else arguments)]
    )
    records: list[Record] = [environment(run, command=command), *judges(run)]
    for record in records:
        append(path, record)
    told: dict[str, tuple[Job, list[Trial]]] = {}
    for job, trials in all_tried(work, options.processes):
        if job.specimen.name not in told:
            append(path, job.specimen)
        told.setdefault(job.specimen.name, (job, []))[1].extend(trials)
        for one in trials:
            append(path, one)
    for name, (job, trials) in told.items():
        if words := wrong(job, trials):
            faults += 1
            print(f"{name}: {words}", flush=True)
    print(f"{len(told)} specimens in {time.monotonic() - started:.0f} s, {faults} of which the suite is wrong")
    print(f"records: {path}\nreport:  {write_site([path], settings.report)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
