"""The tables of the page about mutants: what each judge rejects. All functions are pure, from trials to rows."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from flashproof.reports.evidence import Mutation
from flashproof.reports.record import Judge, Specimen, Trial

Verdict = Literal["rejected", "in some dtypes", "let through", "false alarm", "accepted", "not tried"]

VERDICTS: dict[Verdict, str] = {
    "rejected": "a mutant, in every dtype in which it was tried",
    "in some dtypes": "a mutant, in at least one of them",
    "let through": "a mutant, in every dtype",
    "accepted": "a kernel that is right",
    "false alarm": "a kernel that is right, rejected in at least one dtype",
    "not tried": "it does not claim what the check is for",
}

Key = tuple[str, str]  # the name and the inputs of a judge


def key(judge: Judge) -> Key:
    """The identity of a judge: its name and its inputs."""
    return judge.name, judge.inputs


@dataclass(frozen=True)
class Cell:
    """The result of one judge on one specimen, over all dtypes."""

    verdict: Verdict
    dtypes: tuple[str, ...] = ()  # those in which the specimen was rejected
    tried: int = 0  # the number of trials
    said: str = ""  # the case and the message of the first rejection


@dataclass(frozen=True)
class Row:
    """The row of one specimen.

    dtypes: those in which it was tried.
    first: for each dtype, the first check that rejects it.
    """

    specimen: Specimen
    dtypes: tuple[str, ...]
    cells: dict[Key, Cell]
    first: frozenset[str]

    @property
    def is_killed(self) -> bool:
        """Whether some check of the suite rejects the specimen."""
        return bool(self.first)

    @property
    def counts(self) -> bool:
        """Whether the specimen is a mutant that the suite must reject."""
        return self.specimen.kind == "mutant" and not self.specimen.survives


def rows(mutation: Mutation) -> list[Row]:
    """The rows of all specimens: first the mutants by class of fault, then the variants, then the kernels."""
    trials: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in mutation.trials:
        trials[trial.specimen].append(trial)
    kinds = ("mutant", "variant", "kernel")
    order = sorted(mutation.specimens, key=lambda specimen: (kinds.index(specimen.kind), specimen.fault))
    return [_row(specimen, trials[specimen.name], mutation.judges) for specimen in order]


def _row(specimen: Specimen, trials: list[Trial], judges: tuple[Judge, ...]) -> Row:
    of_judge: defaultdict[Key, list[Trial]] = defaultdict(list)
    for trial in trials:
        of_judge[trial.judge, trial.inputs].append(trial)
    checks = [judge.name for judge in judges if judge.kind == "check"]
    first: set[str] = set()
    dtypes = tuple(dict.fromkeys(trial.dtype for trial in trials))
    for dtype in dtypes:
        rejecting = [
            name for name in checks if any(trial.rejected and trial.dtype == dtype for trial in of_judge[name, "ours"])
        ]
        first.update(rejecting[:1])
    cells = {key(judge): _cell(specimen, of_judge[key(judge)]) for judge in judges}
    return Row(specimen, dtypes, cells, frozenset(first))


def _cell(specimen: Specimen, trials: list[Trial]) -> Cell:
    rejected = [trial for trial in trials if trial.rejected]
    if not trials:
        return Cell("not tried")
    verdict: Verdict
    if specimen.kind == "mutant":
        verdict = "let through" if not rejected else "rejected" if len(rejected) == len(trials) else "in some dtypes"
    else:
        verdict = "false alarm" if rejected else "accepted"
    said = f"{rejected[0].case}: {rejected[0].said}" if rejected else ""
    return Cell(verdict, tuple(trial.dtype for trial in rejected), len(trials), said)


@dataclass(frozen=True)
class Score:
    """How many mutants, and which correct kernels, a judge or the whole suite rejects."""

    judge: Judge | None  # None for the whole suite
    killed: int  # mutants that it rejects in at least one dtype
    # Killed mutants that a judge rejects in a dtype in which it accepts the original kernel. For the whole suite:
    # killed mutants whose original kernel raises no alarm in any dtype.
    told: int
    mutants: int  # mutants that it was tried on
    first: int  # mutants that it rejects before every other check
    named: int  # mutants that it must reject
    # Correct kernels that a judge rejects, and the dtypes in which it does. For the whole suite: all dtypes tried.
    alarms: tuple[tuple[str, tuple[str, ...]], ...]
    right: int  # correct kernels that it was tried on


def scores(mutation: Mutation, table: list[Row]) -> tuple[Score, list[Score], list[Score]]:
    """The score of the whole suite, the scores of its checks, and those of the rules in use elsewhere."""
    of_each = {key(judge): _score(judge, table) for judge in mutation.judges}
    checks = [of_each[key(judge)] for judge in mutation.judges if judge.kind == "check"]
    others = [of_each[key(judge)] for judge in mutation.judges if judge.kind == "rule"]
    counted, right = [row for row in table if row.counts], [row for row in table if row.specimen.kind != "mutant"]
    killed = [row for row in counted if row.is_killed]
    alarms = tuple((row.specimen.name, row.dtypes) for row in right if row.is_killed)
    told = len([row for row in killed if row.specimen.of not in {name for name, _ in alarms}])
    return (
        Score(
            judge=None,
            killed=len(killed),
            told=told,
            mutants=len(counted),
            first=0,
            named=0,
            alarms=alarms,
            right=len(right),
        ),
        checks,
        others,
    )


def telling(judge: Judge, table: list[Row]) -> dict[str, str]:
    """What a judge does with each specimen that is a mutant.

    "told": it rejects the mutant in a dtype in which it accepts the original kernel. "alike": it rejects both.
    "missed": it lets the mutant through. "": it was not tried.
    """
    right = _right(judge, table)
    found = {}
    for row in table:
        if row.specimen.kind == "mutant":
            cell = row.cells[key(judge)]
            told = set(cell.dtypes) - set(_original(row, right).dtypes)
            word = "told" if told else "alike" if cell.dtypes else "missed" if cell.tried else ""
            found[row.specimen.name] = word
    return found


def _right(judge: Judge, table: list[Row]) -> dict[str, Cell]:
    return {row.specimen.name: row.cells[key(judge)] for row in table if row.specimen.kind != "mutant"}


def _score(judge: Judge, table: list[Row]) -> Score:
    counted = [row for row in table if row.counts]
    right = _right(judge, table)
    return Score(
        judge=judge,
        killed=sum(bool(row.cells[key(judge)].dtypes) for row in counted),
        told=sum(bool(set(row.cells[key(judge)].dtypes) - set(_original(row, right).dtypes)) for row in counted),
        mutants=sum(bool(row.cells[key(judge)].tried) for row in counted),
        first=sum(judge.name in row.first for row in counted),
        named=sum(judge.name == row.specimen.check for row in counted),
        alarms=tuple((name, cell.dtypes) for name, cell in right.items() if cell.dtypes),
        right=sum(bool(cell.tried) for cell in right.values()),
    )


def _original(row: Row, right: dict[str, Cell]) -> Cell:
    """The result of a judge on the kernel that a mutant is made from.

    A Triton kernel that runs in the interpreter, and a CUDA kernel on the CPU twin, may not be among the specimens. The
    result is then that on the same algorithm in plain PyTorch (`tiled.*`).
    """
    of = row.specimen.of
    _, _, algorithm = of.partition(".")
    return right.get(of) or right.get(f"tiled.{algorithm}") or Cell("not tried")
