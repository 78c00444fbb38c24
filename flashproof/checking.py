"""`flashproof check BUNDLE`: what anyone can check of a run, without its kernel and without its machine.

- **The seal**: no line was changed, left out or added since the run ended (`reports.bundle`).
- **The cases**: the list of cases that the claims ask for is made again, and each must have been judged. So a partial
  run cannot look like a whole one, whoever wrote its seal.
- **The figures**: a sample of the certified figures is computed again from the lines of their cases alone.

The answers of the kernel cannot be checked: for those, the kernel must run again.
"""

import random
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from flashproof import ways
from flashproof.cases import Case
from flashproof.impls.spec import DTYPES, Device, Dtype, Implementation, Supports
from flashproof.recomputing import Claimed, about, contradiction, disagreement, is_enclosed
from flashproof.registry import Check, checks
from flashproof.reports import bundle, wording
from flashproof.reports.bundle import Run
from flashproof.reports.record import Absence, Claim, Environment, Judgement, Manifest
from flashproof.space import CASE_SET, Effort, space_of

SHOWN = 10  # problems of a kind that are listed
NAMED = 3  # checks that judged nothing
ALL = "all"  # as a sample
OWN_NUMBERS = ("accuracy", "gradients", "stability")  # layers that judge their cases by their own numbers alone
SEARCH = "accuracy/search"  # but this one draws its cases
Records = Mapping[tuple[str, Device], Sequence[Judgement]]  # by implementation and device


@dataclass
class Found:
    """What the check of a bundle found.

    problems: why the bundle is refused. told: lines about each run, with a heading each. wholes: for each run with
    judgements, whether it judged all that its claims ask for; None if this could not be checked. certified, sampled,
    agree: how many certified figures there are, how many were computed again, and how many of these agree.
    """

    problems: list[str] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    wholes: list[bool | None] = field(default_factory=list)
    certified: int = 0
    sampled: int = 0
    agree: int = 0

    def fail(self, problems: Sequence[str]) -> None:
        """Adds problems of one kind. If there are many, only the first are listed."""
        self.problems += problems[:SHOWN]
        if (more := len(problems) - SHOWN) > 0:
            self.problems.append(f"and {more:,} more of this kind")

    def tell(self, heading: str, words: str) -> None:
        """Adds a line."""
        self.told.append((heading, words))

    @property
    def whole(self) -> bool | None:
        """Whether every run is whole. None if this could not be checked, or if no run judged anything."""
        return False if False in self.wholes else True if self.wholes and None not in self.wholes else None


def check(path: Path, sample: int | None, seed: int) -> Found:
    """Checks a bundle. Raises OSError and ValueError, which name the file and the line, for one that cannot be read.

    sample: how many certified figures are computed again; None for all. seed: of the choice of the sample.
    """
    found, certified = Found(), list[tuple[Judgement, Claimed]]()
    for run in bundle.runs(path):
        _describe(run, found)
        problems = list(run.problems())
        words = "see below" if problems else "none was changed since the run ended"
        found.tell("seal", f"{wording.plural(len(run.lines), 'line')}; {words}")
        found.fail(problems)
        kernels = {record.implementation: Claimed(record) for record in run.records if isinstance(record, Claim)}
        judged = [record for record in run.records if isinstance(record, Judgement)]
        unclaimed = dict.fromkeys(one.implementation for one in judged if one.implementation not in kernels)
        found.fail([f"{name}: was judged, and the run holds no claim of it" for name in unclaimed])
        found.fail([f"{about(one)}: {words}" for one in judged if (words := contradiction(one))])
        known = [(one, kernels[one.implementation]) for one in judged if one.implementation in kernels]
        if judged:
            found.wholes.append(_check_cases(run, kernels, [one for one, _ in known], found))
        certified += [(one, kernel) for one, kernel in known if one.certainty == "certified"]
    _check_figures(certified, sample, seed, found)
    return found


def _describe(run: Run, found: Found) -> None:
    """Says where a run comes from, and what it says of itself."""
    environment = next((record for record in run.records if isinstance(record, Environment)), None)
    found.tell(f"run {run.name}", environment.date if environment else "without an environment")
    if environment:
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
        found.tell("machine", environment.device)
        found.tell("versions", f"commit {environment.commit or 'unknown'}, {versions}")
        found.tell("command", environment.command)
    else:
        found.fail([f"{run.path}, line {run.first}: run {run.name!r} has no environment"])
    counts = Counter(record.status for record in run.records if isinstance(record, Judgement))
    if counts:
        found.tell("judgements", ", ".join(f"{count:,} {status}" for status, count in counts.most_common()))
    verdicts = dict.fromkeys(record.verdict for record in run.records if isinstance(record, Claim) and record.verdict)
    for words in verdicts:
        found.tell("verdict", words)
        if words.startswith("verified") and counts["failed"]:
            found.fail([f"the verdict is {words!r}, and {wording.plural(counts['failed'], 'judgement')} failed"])


# ------------------------------------------------------------------------------------------------------------- cases


def _check_cases(run: Run, kernels: Mapping[str, Claimed], judged: Sequence[Judgement], found: Found) -> bool | None:
    """Checks that a run judged what it had to judge. Returns whether it is whole; None if this cannot be known."""
    records: dict[tuple[str, Device], list[Judgement]] = defaultdict(list)
    for record in judged:
        records[record.implementation, record.device].append(record)
    manifest = run.manifest
    _tell_not_judged(run, records, found)
    try:
        effort = manifest.effort if manifest else "default"
        found.fail([words for (name, _), own in records.items() for words in _torn(kernels[name], own, effort)])
        if manifest is None:
            return False
        if manifest.case_set == CASE_SET:
            return _check_list(run, manifest, kernels, records, found)
    except ValueError as error:
        found.fail([str(error)])
        return False
    made = f"of case set {manifest.case_set}" if manifest.case_set else "of an unknown case set"
    found.tell("cases", f"{made}; this flashproof makes case set {CASE_SET}, so the list of cases was not checked,")
    found.tell("", "and a line may stand for other tensors: only the flashproof of the run's commit checks all of it")
    return None


def _tell_not_judged(run: Run, records: Records, found: Found) -> None:
    """Says which implementations were claimed and not judged, and why."""
    reasons = {
        record.implementation: record.message
        for record in run.records
        if isinstance(record, Absence) and record.reason == "not possible here" and not record.check
    }
    claimed = [record.implementation for record in run.records if isinstance(record, Claim)]
    without = dict.fromkeys(name for name in (*claimed, *reasons) if name not in {name for name, _ in records})
    if without:
        words = ", ".join(f"{name} ({reasons.get(name) or 'no reason is given'})" for name in without)
        found.tell("not judged", words)


@dataclass
class Counted:
    """How many cases of the list a run judged.

    lacking: the cases that it did not judge, of checks that it ran. absent: checks of which nothing was judged.
    optional: the number of checks that may leave out cases; their cases are not counted.
    """

    judged: int = 0
    asked: int = 0
    lacking: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    optional: int = 0


def _check_list(run: Run, manifest: Manifest, kernels: Mapping[str, Claimed], records: Records, found: Found) -> bool:
    """Makes the list of cases that the claims ask for, and compares the records with it."""
    dtypes = [dtype for dtype in DTYPES if dtype in manifest.dtypes]
    effort: Effort = "thorough" if manifest.effort == "thorough" else "default"
    total = Counted()
    for (name, device), own in records.items():
        compare(kernels[name].implementation, device, own, total, dtypes, effort)
    judged = {name: kernels[name] for name, _ in records}
    devices = " and ".join(sorted({device for _, device in records}))
    words = f"case set {CASE_SET} asks for {total.asked:,} cases of {wording.plural(len(judged), 'implementation')}"
    words += f" on {devices}" + (f" in {', '.join(dtypes)}" if len(dtypes) < len(DTYPES) else "")
    found.tell("cases", f"{words}; {total.judged:,} were judged")
    if total.optional:
        found.tell("", f"{wording.plural(total.optional, 'more check')} may leave out cases, and are not counted")
    if total.absent:
        listed = ", ".join(total.absent[:NAMED]) + (", ..." if len(total.absent) > NAMED else "")
        found.tell("", f"nothing was judged by {wording.plural(len(total.absent), 'check')}: {listed}")
    ended = all(kernel.claim.ended for kernel in judged.values())
    if not ended:
        found.tell("", "the run was interrupted")
    elif manifest.effort in ("default", "thorough"):
        # A quick run ends with its time, and a run of given cases judges no others. Neither has a list to keep.
        found.fail([f"not judged: {words}" for words in total.lacking])
        # After a kernel has answered no call, its other checks are left out.
        answers = not any(record.of_every_call for own in records.values() for record in own)
        if answers and any(isinstance(record, Environment) and record.whole for record in run.records):
            found.fail([f"the run says that it is whole, and {words} judged nothing" for words in total.absent])
    claimed = {dtype for kernel in judged.values() for dtype in kernel.implementation.supports.dtypes}
    return ended and manifest.effort in ("default", "thorough") and total.judged == total.asked and claimed <= {*dtypes}


def compare(
    implementation: Implementation,
    device: Device,
    records: Sequence[Judgement],
    total: Counted,
    dtypes: Sequence[Dtype] = DTYPES,
    effort: Effort = "default",
) -> None:
    """Compares what was judged of an implementation on a device with what its claims ask for, and adds up the counts.

    dtypes, effort: those of the run.
    """
    space = space_of(implementation, dtypes, device, effort=effort)
    by_check: dict[tuple[str, str], dict[str, list[Judgement]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_check[record.check, record.dtype][record.case].append(record)
    for check in checks().values():
        for dtype in dtypes:
            cases = [] if check.asked and effort != "thorough" else check.cases(implementation, dtype, space)
            if not check.every:
                total.optional += bool(cases)
                continue
            total.asked += len(cases)
            own = by_check.get((check.name, dtype))
            if own is None:
                total.absent += [f"{implementation.name} {check.name} {dtype}"] if cases else []
                continue
            lacking = [case for case in cases if _is_lacking(check, case, implementation.supports, own.get(str(case)))]
            total.judged += len(cases) - len(lacking)
            # A failure may end a check. Then the verdict says that the kernel failed, and the run is not whole.
            if not any(one.status == "failed" or one.of_every_call for part in own.values() for one in part):
                total.lacking += [f"{implementation.name} {check.name} {device} [{case}]" for case in lacking]


def _is_lacking(check: Check, case: Case, supports: Supports, records: Sequence[Judgement] | None) -> bool:
    """Whether a case has no record, or none of a tensor that it asks for."""
    return not records or (_judges_all(check) and bool(_lacking_tensors(case, supports, records)))


def _judges_all(check: Check) -> bool:
    """Whether a check judges each tensor that a case asks for. Checks of properties judge what they need."""
    return check.call is not None or check.layer in OWN_NUMBERS


def _lacking_tensors(case: Case, supports: Supports, records: Sequence[Judgement]) -> list[str]:
    """The tensors that a case asks for and that have no record. If there was no answer, nothing is lacking."""
    if any(record.tensor is None and record.status != "passed" for record in records):
        return []
    asked = ["out", *(["lse"] if supports.lse and case.lse else []), *(ways.wanted(case) if supports.backward else ())]
    return [name for name in asked if name not in {record.tensor for record in records}]


def _torn(kernel: Claimed, records: Sequence[Judgement], effort: str) -> Iterator[str]:
    """What is wrong with the records of single cases. This needs no list of cases.

    A tensor may have no record, and a figure may not be certified although its case is small.
    """
    groups: dict[tuple[str, str], list[Judgement]] = defaultdict(list)
    for record in records:
        check = checks().get(record.check)
        if check and _judges_all(check) and record.case:  # a check that ended in an error has no case
            groups[record.check, record.case].append(record)
    for (name, line), group in groups.items():
        place = f"{kernel.claim.implementation} {name} {group[0].device} [{line}]"
        try:
            case = Case.parse(line)
        except ValueError as error:
            yield f"{place}: the case cannot be read ({error})"
            continue
        lacking = _lacking_tensors(case, kernel.implementation.supports, group)
        if lacking and case.call != "threads":  # the second of two threads has a call of its own, without a backward
            yield f"{place}: no record of {', '.join(lacking)}"
        if name.startswith(OWN_NUMBERS) and name != SEARCH and is_enclosed(case, effort):
            for record in group:
                if record.rho is not None and record.certainty != "certified":
                    yield f"{place}: {record.tensor} is not certified, although the case is small"


# ----------------------------------------------------------------------------------------------------------- figures


def _check_figures(certified: Sequence[tuple[Judgement, Claimed]], sample: int | None, seed: int, found: Found) -> None:
    """Computes a sample of certified figures again, and says how many agree."""
    chosen = list(certified)
    if sample is not None and sample < len(chosen):
        chosen = random.Random(seed).sample(chosen, sample)
    chosen.sort(key=lambda pair: pair[0].case)  # records of one case share its exact result
    wrong = [f"{about(one)}: {words}" for one, kernel in chosen if (words := disagreement(one, kernel))]
    found.certified, found.sampled, found.agree = len(certified), len(chosen), len(chosen) - len(wrong)
    if certified:
        which = "all of them" if len(chosen) == len(certified) else f"of {len(certified):,}; --seed {seed} repeats this"
        found.tell("figures", f"{found.agree:,} of {found.sampled:,} certified figures agree ({which})")
    found.fail(wrong)


# ------------------------------------------------------------------------------------------------------- the command


def tell(path: Path, sample: str, seed: int | None, *, must_be_whole: bool) -> int:
    """Checks a bundle and prints what was found. Returns the exit status: 0 if it is accepted, else 1.

    sample: a number, or "all". seed: of the choice of the sample; None for a new one. must_be_whole: whether a bundle
    that is not a whole run is refused. Raises ValueError for a sample that is no number.
    """
    count = None if sample == ALL else int(sample)
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(1)  # the cases are small
    try:
        found = check(path, count, secrets.randbelow(10**6) if seed is None else seed)
    except (OSError, ValueError) as error:
        console.print(f"[red]rejected: {escape(str(error))}[/]")
        return 1
    if must_be_whole and not found.whole:
        found.problems.append("--whole: the run is not whole, or this could not be checked")
    for heading, words in found.told:
        console.print(f"[bold]{escape(heading):<11}[/] {escape(words)}")
    for problem in found.problems:
        console.print(f"[red]{escape(problem)}[/]")
    if found.problems:
        console.print("[bold red]rejected[/]")
        return 1
    console.print(f"[bold green]accepted: {ACCEPTED[found.whole]}[/]")
    return 0


ACCEPTED = {
    True: "a whole run; every case that its claims ask for was judged",
    False: "a part of a run; not every case that its claims ask for was judged",
    None: "nothing was changed; whether every case was judged could not be checked",
}
