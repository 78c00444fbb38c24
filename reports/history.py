"""`flashproof history RECORDS... -o FILE` adds runs to a history of rho, and says what rose since the last one.

A history is a small JSON file: for each published run its commit, its machine, and the largest rho of each tensor and
dtype of each implementation. A run is compared with the last run on the same machine with the same list of cases. Times
are not compared: they say nothing about accuracy, and machines of a CI differ.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Environment, Judgement, Manifest, Record, read

RISE = 0.1  # how far a rho may rise before the gate closes, as a share of the bound
NARROW = 0.9  # a run that judged less than this share of a later one is too narrow to be compared with it
DIGITS = 4  # of a rho
SHOWN = 20  # lines of each kind


class Entry(msgspec.Struct, kw_only=True, frozen=True):
    """One run in a history."""

    run: str
    date: str  # ISO 8601
    commit: str  # of flashproof, if it ran from its clone
    project_commit: str  # of the repository in which the run was started
    device: str  # "NVIDIA H200" or the CPU's name
    kind: str  # cpu or cuda
    case_set: int  # 0 if unknown
    effort: str  # quick, default, thorough or given
    # By implementation, then by device, tensor and dtype ("cuda dv float16"): the largest rho. Those that are not
    # finite are text.
    rho: dict[str, dict[str, float | str]]
    judged: dict[str, int]  # by implementation: the number of judgements
    failed: dict[str, int]  # by implementation: how many of them failed


class History(msgspec.Struct, kw_only=True, frozen=True):
    """The published runs, in the order in which they were added."""

    version: int = 1
    runs: list[Entry] = []


def load(path: Path) -> History:
    """Reads a history. One that does not exist is empty. Raises ValueError, which names the file, for a foreign one."""
    if not path.exists():
        return History()
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: not a history of flashproof ({error})") from error


def save(history: History, path: Path) -> None:
    """Writes a history, each run on a line of its own. Makes the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = b",\n".join(map(msgspec.json.encode, history.runs))
    path.write_bytes(b'{"version": %d, "runs": [\n%b\n]}\n' % (history.version, runs))


def entries(records: Sequence[Record]) -> Iterator[Entry]:
    """The entries of all runs with judgements in some records, in order of date."""
    environments = {one.run: one for one in records if isinstance(one, Environment)}
    manifests = {one.run: one for one in records if isinstance(one, Manifest)}
    for run, environment in sorted(environments.items(), key=lambda item: item[1].date):
        judged = [one for one in records if isinstance(one, Judgement) and one.run == run]
        if not judged:
            continue
        manifest = manifests.get(run)
        yield Entry(
            run=run,
            date=environment.date,
            commit=environment.commit,
            project_commit=environment.project_commit,
            device=environment.device,
            kind=environment.kind,
            case_set=manifest.case_set if manifest else 0,
            effort=manifest.effort if manifest else "",
            rho=_worst(judged),
            judged=dict(Counter(one.implementation for one in judged)),
            failed=dict(Counter(one.implementation for one in judged if one.status == "failed")),
        )


def _worst(judged: Sequence[Judgement]) -> dict[str, dict[str, float | str]]:
    found: dict[str, dict[str, float | str]] = {}
    for one in judged:
        rho = worst_rho(one)
        # What a search finds depends on its budget, and the figures of a known defect are known.
        if rho is None or one.tensor is None or one.check.endswith("search") or one.status == "known defect":
            continue
        of, place = found.setdefault(one.implementation, {}), f"{one.device} {one.tensor} {one.dtype}"
        if place not in of or size(rho) > size(of[place]):
            of[place] = float(f"{float(rho):.{DIGITS}g}") if size(rho) < math.inf else rho
    return found


def before(history: History, entry: Entry) -> Entry | None:
    """The last run that an entry can be compared with: on the same machine, with the same list of cases."""
    alike = [
        one
        for one in history.runs
        if (one.device, one.kind, one.case_set, one.effort) == (entry.device, entry.kind, entry.case_set, entry.effort)
        and one.run != entry.run
    ]
    return alike[-1] if alike else None


def worse(old: Entry, new: Entry, rise: float = RISE) -> Iterator[str]:
    """What became worse from one run to another, in words. rise: as `RISE`."""
    for name, failed in new.failed.items():
        if name in old.judged and not old.failed.get(name):
            yield f"{name} fails now: {wording.plural(failed, 'judgement')}"
    for name, place, one, two in _pairs(old, new):
        if size(two) - size(one) > rise and size(one) < size(two):
            yield f"{name} {place}: rho {wording.rho(two)}, and {wording.rho(one)} at commit {_commit(old)}"


def _pairs(old: Entry, new: Entry) -> Iterator[tuple[str, str, float | str, float | str]]:
    """The figures that both runs have: implementation, place, and both rhos."""
    for name, places in new.rho.items():
        if old.judged.get(name, 0) < NARROW * new.judged[name]:
            continue
        for place, rho in places.items():
            if (last := old.rho.get(name, {}).get(place)) is not None:
                yield name, place, last, rho


def _commit(entry: Entry) -> str:
    return entry.project_commit or entry.commit or "unknown"


def tell(
    places: Sequence[Path], path: Path, *, gate: bool = False, rise: float = RISE, program: str = "flashproof history"
) -> int:
    """Adds the runs of some record files to a history, and says what became worse.

    gate: whether a run that became worse is not added, and makes the exit status 1. rise: as `RISE`.
    Returns the exit status: 0, 1 for a closed gate, or 2 after a line on stderr that says what is wrong.
    """
    from flashproof.reports.__main__ import files_of

    try:
        history = load(path)
        records = [record for file in files_of(places) for record in read(file)]
        found = list(entries(records))
        if not found:
            raise ValueError(f"{', '.join(map(str, places))}: holds no judgements")
        kept, closed = list(history.runs), False
        for entry in found:
            words = list(_said(history, entry, rise))
            print("\n".join(words))
            is_worse = len(words) > 1
            closed |= is_worse
            if not (gate and is_worse):
                kept = [one for one in kept if one.run != entry.run] + [entry]
        save(History(runs=kept), path)
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 1 if gate and closed else 0


def _said(history: History, entry: Entry, rise: float) -> Iterator[str]:
    """The comparison of a run with the last one, as lines. There is one line if nothing became worse."""
    about = f"{entry.device}, commit {_commit(entry)}"
    last = before(history, entry)
    if last is None:
        yield f"{about}: the first run on this machine with these cases; there is nothing to compare it with"
        return
    found = list(worse(last, entry, rise))
    if not found:
        compared = wording.plural(sum(1 for _ in _pairs(last, entry)), "figure")
        yield f"{about}: {compared} compared with commit {_commit(last)}; no rho rose by more than {rise:g}"
        return
    yield f"{about}: worse than commit {_commit(last)}"
    yield from (f"  {words}" for words in found[:SHOWN])
    if more := len(found) - SHOWN:
        yield from [f"  and {more:,} more"] if more > 0 else []
