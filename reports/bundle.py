"""Bundles: record files whose runs are sealed, so that any later change of a line is found.

A run ends with a manifest (`record.Manifest`), which holds a checksum of all its lines and a mark of each. A file of
several sealed runs is a bundle too, so bundles can be joined by `cat`.

A seal is no signature. Anyone who changes a line can also write a new seal. `flashproof.checking` finds what a forger
cannot make right: figures that do not follow from their case, and cases that are missing.
"""

import gzip
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from flashproof.reports import wording
from flashproof.reports.evidence import DTYPES
from flashproof.reports.record import Asked, Manifest, Record, append, decode, encode, lines

MARK = 4  # hexadecimal digits of a line's checksum that a manifest holds
SHOWN = 5  # changed lines that a message names


@dataclass(frozen=True)
class Run:
    """The lines of one run in a file, with their records."""

    path: Path
    first: int  # the number of its first line
    lines: Sequence[bytes]  # without that of the manifest
    records: Sequence[Record]
    manifest: Manifest | None  # None if the run is not sealed

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.manifest.run if self.manifest else self.records[0].run

    def problems(self) -> Iterator[str]:
        """What is wrong with the seal, with file and line. Nothing if no line changed since the run was sealed."""
        seal = self.manifest
        if seal is None:
            yield (
                f"{self.path}: run {self.name!r} is not sealed; the run did not end, or its last line is missing "
                "(`flashproof bundle` seals the records of a run)"
            )
            return
        if others := [number for number, record in self._numbered() if record.run != seal.run]:
            yield f"{self.path}, {_listed(others)}: of another run than the manifest, {seal.run!r}"
        marks = [seal.marks[start : start + MARK] for start in range(0, len(seal.marks), MARK)]
        own = [_mark(line) for line in self.lines]
        if len(own) != seal.lines or len(marks) != seal.lines:
            place = next((i for i, (one, two) in enumerate(zip(own, marks, strict=False)) if one != two), len(own))
            yield (
                f"{self.path}, line {self.first + place}: from here on, lines were left out, added or moved; run "
                f"{seal.run!r} has {wording.plural(len(own), 'line')}, and {seal.lines:,} were sealed"
            )
        elif changed := [self.first + i for i, (one, two) in enumerate(zip(own, marks, strict=True)) if one != two]:
            yield f"{self.path}, {_listed(changed)}: changed since run {seal.run!r} was sealed"
        elif checksum(self.lines, seal) != seal.checksum:
            place = self.first + len(self.lines)
            yield f"{self.path}, line {place}: the checksum of run {seal.run!r} does not fit its lines"

    def _numbered(self) -> Iterator[tuple[int, Record]]:
        return zip(range(self.first, self.first + len(self.records)), self.records, strict=True)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
    return f"{'line' if len(numbers) == 1 else 'lines'} {shown}{more}"


def _mark(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:MARK]


def checksum(sealed: Iterable[bytes], manifest: Manifest) -> str:
    """The checksum of a run's lines and of its manifest, except the manifest's own checksum."""
    found = hashlib.sha256()
    for line in (*sealed, encode(msgspec.structs.replace(manifest, checksum=""))):
        found.update(line + b"\n")
    return found.hexdigest()


def manifest_of(
    sealed: Sequence[bytes],
    run: str,
    *,
    case_set: int = 0,
    effort: Asked = "default",
    dtypes: Sequence[str] = DTYPES,
) -> Manifest:
    """The manifest that seals these lines of a run."""
    bare = Manifest(
        run=run,
        case_set=case_set,
        effort=effort,
        dtypes=list(dtypes),
        lines=len(sealed),
        marks="".join(map(_mark, sealed)),
    )
    return msgspec.structs.replace(bare, checksum=checksum(sealed, bare))


def seal(path: Path, *, case_set: int, effort: Asked, dtypes: Sequence[str]) -> None:
    """Seals the last run of a file, which has ended: appends its manifest. Raises as `runs` does."""
    run = runs(path)[-1]
    append(path, manifest_of(run.lines, run.name, case_set=case_set, effort=effort, dtypes=dtypes))


def runs(path: Path) -> list[Run]:
    """The runs of a file, sealed or not, in order.

    Raises OSError and ValueError as `record.read` does, and ValueError for an incomplete last line and for a file
    without records.
    """
    found, start = list[Run](), 1
    every = lines(path)
    if every.pop():
        raise ValueError(f"{path}, line {len(every) + 1}: is incomplete; the file was cut off here")
    records = [decode(line, path, number) for number, line in enumerate(every, start=1)]
    if not records:
        raise ValueError(f"{path}: holds no records")
    for place, record in enumerate(records, start=1):
        if isinstance(record, Manifest):
            found.append(Run(path, start, every[start - 1 : place - 1], records[start - 1 : place - 1], record))
            start = place + 1
    for _, group in groupby(range(start, len(records) + 1), lambda number: records[number - 1].run):
        numbers = list(group)  # a run that is not sealed ends where another one begins
        begin, end = numbers[0] - 1, numbers[-1]
        found.append(Run(path, numbers[0], every[begin:end], records[begin:end], None))
    return found


def pack(paths: Iterable[Path], output: Path) -> list[Run]:
    """Writes a bundle of all runs in some record files. Runs without a seal are sealed; their case set is unknown.

    A file whose name ends in .gz is compressed. Returns the runs. Raises as `runs` does, and ValueError for a run whose
    seal does not fit.
    """
    found = [run for path in paths for run in runs(path)]
    content = bytearray()
    for run in found:
        if run.manifest and (wrong := next(run.problems(), "")):
            raise ValueError(wrong)
        manifest = run.manifest or manifest_of(run.lines, run.name)
        content += b"".join(line + b"\n" for line in (*run.lines, encode(manifest)))
    output.parent.mkdir(parents=True, exist_ok=True)
    # Without a time, the same runs give the same bytes.
    output.write_bytes(gzip.compress(bytes(content), mtime=0) if output.suffix == ".gz" else content)
    return found


def tell(places: Sequence[Path], output: Path, program: str = "flashproof bundle") -> int:
    """Writes a bundle and says what is in it.

    Returns the exit status: 0, or 2 after a line on stderr that says what is wrong.
    """
    from flashproof.reports.__main__ import files_of

    try:
        found = pack(files_of(places), output)
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    for run in found:
        words = "was sealed" if run.manifest else "is sealed now; its case set is unknown"
        print(f"run {run.name}: {wording.plural(len(run.lines), 'line')}, {words}")
    print(output)
    return 0
