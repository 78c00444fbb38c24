"""Evidence: the records of one or several runs, merged by implementation and by machine."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from flashproof.reports.record import (
    LAYERS,
    Absence,
    Claim,
    Combined,
    Curve,
    Environment,
    Judge,
    Judgement,
    Manifest,
    Memory,
    Record,
    Resources,
    Specimen,
    Traffic,
    Trial,
    read,
)

DTYPES = ("float32", "float16", "bfloat16")
TENSORS = ("out", "lse", "dq", "dk", "dv")


def size(figure: float | str | None) -> float:
    """The size of a figure, for comparisons.

    A figure that is not finite counts as larger than every number. An absent figure counts as smaller.
    """
    if figure is None:
        return -1.0
    number = abs(float(figure))
    return number if math.isfinite(number) else math.inf


def worst_rho(judgement: Judgement) -> float | str | None:
    """The larger of the two ratios that gate: error over deterministic bound, and error over probabilistic bound.

    It is None for a yes-or-no property.
    """
    return max((rho for rho in (judgement.rho, judgement.rho_statistical) if rho is not None), key=size, default=None)


@dataclass(frozen=True, order=True)
class Machine:
    """The device that a figure comes from: its kind and its name. An empty name means a device that no run had."""

    kind: Literal["cpu", "cuda"]
    name: str

    def __str__(self) -> str:
        return self.name or f"no {self.kind.upper()} device"


NO_DIGIT = {"float32": 2.0**24, "float16": 2.0**11, "bfloat16": 2.0**8}  # ulps: more than the number itself


def in_ulps(judgement: Judgement) -> float | None:
    """The largest error in ulps (`Judgement.ulps`). None if there is no such figure.

    Older records also have a figure where a tensor cancels to nearly 0. There, an error passes although it is larger
    than the largest number of the tensor. Such a figure is left out.
    """
    if judgement.ulps is None:
        return None
    found = size(judgement.ulps)
    return None if judgement.status == "passed" and found > NO_DIGIT.get(judgement.dtype, math.inf) else found


@dataclass(frozen=True)
class Judged:
    """A judgement, and the machine that it was made on."""

    judgement: Judgement
    machine: Machine

    @cached_property
    def rho(self) -> float | str | None:
        """The larger of the two ratios that gate (`worst_rho`); None for a yes-or-no property."""
        return worst_rho(self.judgement)

    @cached_property
    def telling_rho(self) -> float:
        """The size of the rho, for a ranking. A failure at nearly 0 (`is_nearly_zero`) ranks below the others."""
        is_failure = self.judgement.status in ("failed", "known defect")
        return min(size(self.rho), 1.0) if is_failure and is_nearly_zero(self.judgement) else size(self.rho)

    @cached_property
    def severity(self) -> tuple[int, float]:
        """A sort key by which the worst judgement is the largest.

        From worst to best, the statuses are failed, known defect, refused and passed. Equal statuses compare by rho.
        """
        return ("passed", "refused", "known defect", "failed").index(self.judgement.status), self.telling_rho


@dataclass(frozen=True)
class Kernel:
    """Everything that the records hold about one implementation.

    machines: those that judged it, measured its memory or were asked to judge it.
    whole_on: those on which a whole run verified it (`_whole_on`).
    """

    name: str
    claim: Claim | None
    machines: tuple[Machine, ...]
    judged: tuple[Judged, ...]
    absences: tuple[tuple[Absence, Machine], ...]
    memory: tuple[tuple[Memory, Machine], ...]
    traffic: tuple[Traffic, ...]
    resources: tuple[Resources, ...]
    claimed_by: tuple[str, ...] = ()  # the runs that contribute to the claim
    whole_on: frozenset[Machine] = frozenset()

    @cached_property
    def narrowed_on(self) -> tuple[Machine, ...]:
        """The machines that judged it, although no run of it was whole there."""
        return tuple(sorted({judged.machine for judged in self.judged} - self.whole_on))

    @cached_property
    def judged_in(self) -> dict[tuple[Machine, str, str], list[Judged]]:
        """The judgements by machine, dtype and check."""
        of_cell: defaultdict[tuple[Machine, str, str], list[Judged]] = defaultdict(list)
        for judged in self.judged:
            of_cell[judged.machine, judged.judgement.dtype, judged.judgement.check].append(judged)
        return dict(of_cell)

    @cached_property
    def swept(self) -> dict[tuple[Machine, str | None, str, str], list[Judged]]:
        """The judgements that have a rho and a place on an axis, by machine, tensor, dtype and axis."""
        along: defaultdict[tuple[Machine, str | None, str, str], list[Judged]] = defaultdict(list)
        for judged in self.judged:
            if judged.rho is not None:
                for axis in judged.judgement.axes:
                    along[judged.machine, judged.judgement.tensor, judged.judgement.dtype, axis].append(judged)
        return dict(along)


@dataclass(frozen=True)
class Evidence:
    """Everything that a site is made from.

    Environments are in order of date. The order of kernels, curves and checks does not depend on the order of the
    files.
    """

    environments: tuple[Environment, ...]
    kernels: tuple[Kernel, ...]
    curves: tuple[tuple[Curve, Machine], ...]
    checks: tuple[str, ...]  # "accuracy/forward"
    dtypes: tuple[str, ...]  # those with a judgement
    machines: tuple[Machine, ...] = field(default=())
    mutation: "Mutation | None" = None

    @cached_property
    def runs(self) -> frozenset[str]:
        """The runs that this evidence comes from. No other run contributes anything."""
        found = {curve.run for curve, _ in self.curves}
        if self.mutation:
            found |= {self.mutation.environment.run, *(record.run for record in self.mutation.combined)}
        for kernel in self.kernels:
            found |= {judged.judgement.run for judged in kernel.judged}
            found |= {absence.run for absence, _ in kernel.absences} | {record.run for record, _ in kernel.memory}
            found |= {record.run for record in kernel.traffic} | {record.run for record in kernel.resources}
            found |= set(kernel.claimed_by)
        return frozenset(found)


@dataclass(frozen=True)
class Mutation:
    """The trials of the suite itself on mutants and correct kernels, from the last run that made such trials.

    combined: for each set of checks, from the last run that has some.
    """

    environment: Environment
    judges: tuple[Judge, ...]
    specimens: tuple[Specimen, ...]
    trials: tuple[Trial, ...]
    combined: tuple[Combined, ...] = ()


def without_a_gpu(environments: Sequence[Environment], claims: Iterable[Claim]) -> str:
    """Says that no run on a GPU is of the newest commit. Empty if one is, or if no implementation claims GPUs."""
    if not environments or not any("cuda" in _devices(claim) for claim in claims):
        return ""
    ordered = sorted(environments, key=_date)
    commit = _source(ordered[-1])
    gpu = [environment for environment in ordered if environment.kind == "cuda"]
    if any(_source(environment) == commit for environment in gpu):
        return ""
    words = f"No GPU run for this commit ({commit})" if commit else "No GPU run"
    if gpu:
        return f"{words}: the newest one is of commit {_source(gpu[-1]) or 'unknown'}, {gpu[-1].date[:10]}."
    return f"{words}."


def _devices(claim: Claim) -> Sequence[str]:
    devices = claim.supports.get("devices")
    return [str(device) for device in devices] if isinstance(devices, list) else []


def _source(environment: Environment) -> str:
    """The commit that a run is of: that of the project in which it was started, or of flashproof."""
    return environment.project_commit or environment.commit


SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # the least numbers above 0
NEARLY = 1e-3


def is_zero(judgement: Judgement) -> bool:
    """Whether the exact value of the worst element counts as 0: it is below every number of the dtype."""
    return judgement.worst is not None and size(judgement.worst.exact) < SMALLEST.get(judgement.dtype, 0.0)


def is_nearly_zero(judgement: Judgement) -> bool:
    """Whether the exact value of the worst element is nearly 0: less than a thousandth of the error (`NEARLY`).

    The bound may be tiny there, and rho larger than any other. So this rho says little about how wrong the kernel is.
    """
    worst = judgement.worst
    if worst is None or size(worst.got) == math.inf:
        return False
    return is_zero(judgement) or size(worst.exact) < NEARLY * size(worst.error)


def severity(judged: Judged) -> tuple[int, float]:
    """The severity of a judgement, as a key for `max` and `sorted`."""
    return judged.severity


def gather(paths: Iterable[Path], damaged: list[str] | None = None) -> Evidence:
    """Reads record files and merges them.

    A whole run leaves out nothing that an implementation claims. The last whole run of an implementation on a machine
    replaces all earlier runs there. Later, narrower runs add to it: if several runs judged or measured the same thing,
    the run with the latest date wins. Machines of different names stay apart. If one run judged the same thing twice,
    the worst judgement counts.

    damaged: a list for messages about files that cannot be read. If it is given, such a file adds its message to the
        list and is left out.

    Raises OSError for a file that cannot be read. Raises ValueError, which names the file, for a file without records,
    a line that is not a record, a date that is not ISO 8601, a curve with unequal numbers of x and y, and a run that
    has no environment or two different ones.
    """
    environments: dict[str, Environment] = {}
    files: list[tuple[Path, list[Record]]] = []

    def taken(path: Path, step: Callable[[], None]) -> None:
        """Takes a step for a file. If it fails, the file is left out."""
        try:
            step()
        except (OSError, ValueError) as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            files[:] = [(other, records) for other, records in files if other != path]

    def read_whole(path: Path) -> None:
        records = list(read(path))
        if not records:
            raise ValueError(f"{path}: holds no records")
        environments.update(_environments(path, records, environments))
        files.append((path, records))

    for path in {path.resolve(): path for path in paths}.values():  # each file once, under its given name
        taken(path, partial(read_whole, path))
    for path, records in list(files):
        taken(path, partial(_check, path, records, environments))
    return _merged([record for _, records in files for record in records], environments)


def _environments(path: Path, records: list[Record], before: dict[str, Environment]) -> dict[str, Environment]:
    """The environments of a file by their run. Raises ValueError if one is not valid or not the one of its run."""
    own: dict[str, Environment] = {}
    for record in records:
        if isinstance(record, Environment):
            _date(record, path)
            if (before | own).get(record.run, record) != record:
                raise ValueError(
                    f"{path}: the environment of run {record.run!r} differs from the one already read; "
                    "runs need names of their own"
                )
            own[record.run] = record
    return own


def _check(path: Path, records: list[Record], environments: dict[str, Environment]) -> None:
    """Raises ValueError for a curve with unequal numbers of x and y, and for a run without an environment."""
    for record in records:
        if isinstance(record, Curve) and len(record.x) != len(record.y):
            raise ValueError(
                f"{path}: the curve {record.series!r} of chart {record.chart!r} "
                f"has {len(record.x)} x for {len(record.y)} y"
            )
        if record.run not in environments:
            raise ValueError(
                f"{path}: run {record.run!r} has no environment record; "
                "the first line of a run describes where it took place"
            )


def _date(environment: Environment, path: Path | str = "") -> datetime:
    try:
        date = datetime.fromisoformat(environment.date)
    except ValueError as error:
        raise ValueError(f"{path}: the date {environment.date!r} of run {environment.run!r} is not ISO 8601") from error
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _merged(records: list[Record], environments: dict[str, Environment]) -> Evidence:
    dates = {run: _date(environment) for run, environment in environments.items()}
    # The sort is stable, so records with equal dates keep the order of the files.
    records = sorted(records, key=lambda record: dates[record.run])

    def machine(record: Judgement | Absence | Memory | Curve) -> Machine:
        return _machine(record.device, environments[record.run])

    records = _since_the_last_whole_run(records, environments, dates)
    judged = [Judged(r, machine(r)) for r in records if isinstance(r, Judgement)]
    judged = _last_run(judged, lambda j: j.judgement.run, _identity)
    judged = list(_worst_of_each(judged))
    memory = _last_run(
        [(r, machine(r)) for r in records if isinstance(r, Memory)],
        lambda pair: pair[0].run,
        lambda pair: (
            pair[0].implementation,
            pair[1],
            pair[0].dtype,
            pair[0].direction,
            pair[0].length,
            pair[0].heads,
            pair[0].dim,
            pair[0].method,
        ),
    )
    traffic = _last_run(
        [r for r in records if isinstance(r, Traffic)],
        lambda r: r.run,
        lambda r: (r.implementation, r.dtype, r.direction, r.length, r.dim, r.query_tile, r.key_tile),
    )
    resources = _last_run(
        [r for r in records if isinstance(r, Resources)],
        lambda r: r.run,
        lambda r: (r.implementation, r.kernel, r.target, r.dtype, r.dim, r.causal, r.shipped),
    )
    curves = _last_run(
        [(r, machine(r)) for r in records if isinstance(r, Curve)],
        lambda pair: pair[0].run,
        lambda pair: (pair[0].chart, pair[0].series, pair[1]),
    )
    # A run is about the devices that it judged on. For example, `pytest -m gpu` is not about the CPU. Absences with the
    # reason "not claimed" on another device say nothing new, so they are left out.
    about = {(r.run, r.device) for r in records if isinstance(r, Judgement)}
    runs = {run for run, _ in about}
    told = [
        r
        for r in records
        if isinstance(r, Absence) and (r.reason != "not claimed" or r.run not in runs or (r.run, r.device) in about)
    ]
    absences = _last_run(
        [(r, _asked(r, machine(r), environments[r.run])) for r in told],
        lambda pair: pair[0].run,
        lambda pair: (msgspec.structs.replace(pair[0], run=""), pair[1]),
    )
    claims = [r for r in records if isinstance(r, Claim)]
    whole_on = _whole_on(claims, environments)

    named = [r for r in records if not isinstance(r, _OF_NO_KERNEL)]
    kernels = []
    judged_of = defaultdict[str, list[Judged]](list)
    for one in judged:
        judged_of[one.judgement.implementation].append(one)
    for name in sorted({r.implementation for r in named}):
        own = judged_of[name]
        own_absences = [(a, m) for a, m in absences if a.implementation == name]
        own_claims = [c for c in claims if c.implementation == name]
        own_memory = [(r, m) for r, m in memory if r.implementation == name]
        machines = {j.machine for j in own} | {m for _, m in own_memory}
        for _, m in own_absences:
            # A machine without a GPU adds nothing about the GPU if another machine has judged on one.
            if m.name or not any(other.kind == m.kind for other in machines):
                machines.add(m)
        if not machines:
            machines = {Machine(environments[c.run].kind, environments[c.run].device) for c in own_claims}
        kernels.append(
            Kernel(
                name=name,
                claim=_claim(own_claims),
                claimed_by=_claimed_by(own_claims),
                whole_on=frozenset(whole_on[name]),
                machines=tuple(sorted(machines)),
                judged=tuple(own),
                absences=tuple(own_absences),
                memory=tuple(
                    sorted(
                        own_memory,
                        key=lambda pair: (
                            pair[1],
                            dtype_order(pair[0].dtype),
                            pair[0].direction != "forward",
                            pair[0].length,
                        ),
                    )
                ),
                traffic=tuple(
                    sorted(
                        (r for r in traffic if r.implementation == name),
                        key=lambda r: (
                            dtype_order(r.dtype),
                            r.direction != "forward",
                            r.dim,
                            r.query_tile,
                            r.key_tile,
                            r.length,
                        ),
                    )
                ),
                resources=tuple(
                    sorted(
                        (r for r in resources if r.implementation == name),
                        key=lambda r: (not r.shipped, r.kernel, r.target, dtype_order(r.dtype), r.dim, r.causal),
                    )
                ),
            )
        )
    dtypes = {j.judgement.dtype for j in judged}
    checks = {j.judgement.check for j in judged} | {a.check for a, _ in absences if a.check}
    return Evidence(
        environments=tuple(sorted(environments.values(), key=lambda e: (dates[e.run], e.run))),
        kernels=tuple(kernels),
        curves=tuple(
            sorted(curves, key=lambda pair: (pair[0].chart != "overflow", pair[0].chart, pair[1], pair[0].series))
        ),
        checks=tuple(sorted(checks, key=_check_order)),
        dtypes=tuple(sorted(dtypes, key=dtype_order)),
        machines=tuple(
            sorted({machine for kernel in kernels for machine in kernel.machines} | {machine for _, machine in curves})
        ),
        mutation=_mutation(records, environments),
    )


def _mutation(records: list[Record], environments: dict[str, Environment]) -> Mutation | None:
    runs = [record.run for record in records if isinstance(record, Specimen)]
    if not runs:
        return None
    last = [record for record in records if record.run == runs[-1]]
    return Mutation(
        environment=environments[runs[-1]],
        judges=tuple(record for record in last if isinstance(record, Judge)),
        specimens=tuple(record for record in last if isinstance(record, Specimen)),
        trials=tuple(record for record in last if isinstance(record, Trial)),
        combined=_combined(records),
    )


def _combined(records: list[Record]) -> tuple[Combined, ...]:
    """For each set of checks, the records of the last run that has some."""
    found = [record for record in records if isinstance(record, Combined)]
    return tuple(_last_run(found, lambda record: record.run, lambda record: record.suite))


_T = TypeVar("_T")


def _last_run(items: list[_T], run: Callable[[_T], str], identity: Callable[[_T], Hashable]) -> list[_T]:
    """Keeps, of the items with the same identity, those of the last run.

    items: in order of date.
    """
    last = {identity(item): run(item) for item in items}
    return [item for item in items if last[identity(item)] == run(item)]


def _identity(judged: Judged) -> Hashable:
    judgement = judged.judgement
    return judgement.implementation, judgement.check, judgement.case, judgement.dtype, judgement.tensor, judged.machine


def _worst_of_each(judged: list[Judged]) -> Iterable[Judged]:
    groups: defaultdict[Hashable, list[Judged]] = defaultdict(list)
    for one in judged:
        groups[_identity(one)].append(one)
    worst = [max(group, key=severity) if len(group) > 1 else group[0] for group in groups.values()]
    return sorted(
        worst,
        key=lambda j: (
            j.judgement.implementation,
            _check_order(j.judgement.check),
            j.judgement.case,
            j.machine,
            j.judgement.tensor or "",
        ),
    )


def _asked(absence: Absence, machine: Machine, environment: Environment) -> Machine:
    """The machine that an absence is about. A GPU that the run did not have gets no name."""
    return Machine("cuda", "") if (absence.device, environment.kind) == ("cuda", "cpu") else machine


def _claim(claims: list[Claim]) -> Claim | None:
    """The last claim, with the arithmetic and the covered cases of earlier claims (on other machines) added.

    Where several claims describe the same arithmetic or device, the last one wins.
    """
    if not claims:
        return None
    arithmetic = {where: fields for claim in claims for where, fields in claim.arithmetic.items()}
    covered = {device: cases for claim in claims for device, cases in claim.covered.items()}
    return msgspec.structs.replace(claims[-1], arithmetic=arithmetic, covered=covered)


def _claimed_by(claims: list[Claim]) -> tuple[str, ...]:
    """The runs whose claims contribute to the result of `_claim`."""
    last = {where: claim.run for claim in claims for where in (*claim.arithmetic, *claim.covered)}
    return tuple(dict.fromkeys([*last.values(), *(claim.run for claim in claims[-1:])]))


def _whole_on(claims: list[Claim], environments: dict[str, Environment]) -> defaultdict[str, set[Machine]]:
    """By implementation, the machines on which a whole run verified it.

    A run that was interrupted is not whole, and neither is one that died before it wrote a claim.
    """
    found: defaultdict[str, set[Machine]] = defaultdict(set)
    for claim in claims:
        environment = environments[claim.run]
        if claim.ended:
            devices: set[Literal["cpu", "cuda"]] = {"cpu", "cuda"} if environment.whole else set(environment.whole_on)
            found[claim.implementation] |= {_machine(device, environment) for device in devices}
    return found


def _machine(device: Literal["cpu", "cuda"], environment: Environment) -> Machine:
    """A device of the machine of a run."""
    beside = "" if device == environment.kind else f"{device.upper()} beside "
    return Machine(device, f"{beside}{environment.device}")


_OF_NO_KERNEL = Environment | Curve | Specimen | Judge | Trial | Combined | Manifest
_OF_A_VERIFICATION = Judgement | Absence | Memory | Claim  # a whole run replaces these


def _since_the_last_whole_run(
    records: list[Record],
    environments: dict[str, Environment],
    dates: dict[str, datetime],
) -> list[Record]:
    """The records without those that a later whole run of the same implementation on the same machine replaces."""
    whole: dict[tuple[str, Machine], datetime] = {}
    for record in records:
        environment = environments[record.run]
        if isinstance(record, Claim) and record.ended and environment.whole:
            place = record.implementation, Machine(environment.kind, environment.device)
            whole[place] = max(whole.get(place, dates[record.run]), dates[record.run])

    def stands(record: Record) -> bool:
        if not isinstance(record, _OF_A_VERIFICATION):
            return True
        environment = environments[record.run]
        last = whole.get((record.implementation, Machine(environment.kind, environment.device)))
        return last is None or dates[record.run] >= last

    return [record for record in records if stands(record)]


_RUN_FILE = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}\.jsonl")
_GRACE = timedelta(days=1)  # a run that is not closed may go on for this long


def clear(folder: Path, evidence: Evidence, now: datetime | None = None) -> list[Path]:
    """Removes the files of runs that contribute nothing to the evidence. Returns their paths.

    A file stays if its name is not that of a run, if it cannot be read, or if it holds no environment. A file without a
    claim stays for one day, because its run may still go on.

    now: the current time, if not that of the clock.
    """
    removed = []
    for path in sorted(folder.glob("*.jsonl")):
        if not _RUN_FILE.fullmatch(path.name):
            continue
        try:
            records = list(read(path))
        except (OSError, ValueError):
            continue
        found = [record for record in records if isinstance(record, Environment)]
        if not found or any(environment.run in evidence.runs for environment in found):
            continue
        ended = any(isinstance(record, Claim) for record in records)
        if ended or all((now or datetime.now(UTC)) - _date(environment) > _GRACE for environment in found):
            path.unlink()
            removed.append(path)
    return removed


def dtype_order(dtype: str) -> tuple[int, str]:
    """A sort key for dtypes: first those of DTYPES in that order, then all others by name."""
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)), dtype


def _check_order(check: str) -> tuple[int, str]:
    layer = check.partition("/")[0]
    return (LAYERS.index(layer) if layer in LAYERS else len(LAYERS)), check
