"""The journal of a check: what a process of pytest-xdist leaves behind when it dies in the check.

Kernels of the catalogue run in such processes. pytest-xdist reports in which test a process died, and starts another
process. The journal tells which case it was, and what was found before.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from flashproof.cases import Case
from flashproof.reports.record import Judgement, Record

SPOILT = 87  # the exit status of a process that a kernel left unusable, after the process recorded the failure
Kind = Literal["about", "given", "returned", "record"]


class Journal:
    """Writes one line at a time, so that every line before a crash is readable. It observes the calls of a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def begin(self, test: str, about: Judgement) -> None:
        """Opens the journal of a check. about: what to record if the process dies in the check."""
        self._file = _path(self._folder, test).open("wb", buffering=0)
        self._write("about", msgspec.json.encode(about).decode())

    def end(self) -> None:
        """Removes the journal of a check that the process survived."""
        if self._file:
            self._file.close()
            Path(os.fsdecode(self._file.name)).unlink()
            self._file = None

    def record(self, line: str) -> None:
        """Writes a record, as JSON."""
        self._write("record", line)

    def given(self, case: Case) -> None:
        """Writes that a kernel is called for a case."""
        self._write("given", str(case))

    def returned(self) -> None:
        """Writes that the kernel returned."""
        self._write("returned")

    def spoilt(self) -> None:
        """Ends the process."""
        os._exit(SPOILT)

    def _write(self, kind: Kind, content: str = "") -> None:
        if self._file:
            self._file.write(msgspec.json.encode((kind, content)) + b"\n")


@dataclass(frozen=True)
class Unfinished:
    """The content of a journal of a check in which a process died."""

    about: Judgement  # what to record about the death itself
    records: list[Record]
    case: str  # the last case that a kernel received
    last: Kind  # the kind of the last line

    def findings(self) -> list[Record]:
        """The records and the death, or the records alone if the process ended itself after it recorded a failure."""
        told = self.records[-1] if self.records and self.last == "record" else None
        if isinstance(told, Judgement) and told.status in ("failed", "known defect"):
            return self.records
        how = "the process died in the call"
        if self.last != "given":
            how = "the process died after the call had returned: its memory was damaged"
        return [*self.records, msgspec.structs.replace(self.about, case=self.case, message=how)]


def read(folder: Path, test: str) -> Unfinished | None:
    """The content of a check's journal, or None if there is none."""
    path = _path(folder, test)
    if not path.exists():
        return None
    lines = [msgspec.json.decode(line, type=tuple[Kind, str]) for line in path.read_bytes().splitlines()]
    if not lines:
        return None
    cases = [content for kind, content in lines if kind == "given"]
    return Unfinished(
        about=msgspec.json.decode(lines[0][1], type=Judgement),
        records=[msgspec.json.decode(content, type=Record) for kind, content in lines if kind == "record"],
        case=cases[-1] if cases else "",
        last=lines[-1][0],
    )


def _path(folder: Path, test: str) -> Path:
    return folder / f"{hashlib.sha256(test.encode()).hexdigest()}.journal"
