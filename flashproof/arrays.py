"""The rows of covering arrays: where a run finds them, before it builds them.

An array takes up to ten seconds to build, and it is the same on every machine. So the package contains the arrays of
its own implementations and of functions with usual signatures, on a CPU. A run builds any other array once. The
processes of the run share it, and later runs find it in the user's cache folder.
"""

import fcntl
import gzip
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from flashproof.covering import Coverage, Row

OF_THE_PACKAGE = Path(__file__).with_name("arrays.json.gz")
KEPT = 40  # arrays in the user's cache folder; older ones are deleted


class Rows(msgspec.Struct, frozen=True):
    """The rows of an array, their coverage, and the pairs and triples that were found to be impossible."""

    rows: list[Row]
    ends: list[int]  # the number of rows at the end of each part of the array; the parts have cases of other sizes
    coverage: tuple[Coverage, Coverage]  # the coverage of pairs and of triples
    forgotten: list[list[int]]
    claimed: int  # the number of pairs that the claims allow
    common: list[Row] = []  # the rows of common levels, beside the array


def name_of(about: str) -> str:
    """The name of an array. about: everything that its rows depend on, with the sources that build it."""
    return hashlib.sha256(about.encode()).hexdigest()


_shared: Path | None = None


def share(folder: Path) -> None:
    """Sets the folder through which the processes of a run share rows. Without one, a process builds its arrays."""
    global _shared  # noqa: PLW0603
    _shared = folder


def rows(about: Callable[[], str], build: Callable[[], Rows], *, wait: bool) -> Rows | None:
    """The rows of an array. In a run, they are built only if no file has them.

    about: returns everything that the rows depend on. wait: whether to wait for another process that builds the array.
    If not, the function returns None in this case.
    """
    if _shared is None or not _shared.is_dir():
        return build()
    name = name_of(about())
    if name in of_the_package():
        return of_the_package()[name]
    path = _shared / f"{name}.rows"
    with path.with_suffix(".lock").open("w") as lock:  # the lock ends with the process that holds it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Rows)
        found = _kept(path.name, build)
        if path.parent.is_dir():  # the run may have ended
            _write(path, found)
        return found


@cache
def of_the_package() -> dict[str, Rows]:
    """The arrays that the package contains, by name. None of them is used after a change of the sources."""
    return msgspec.json.decode(gzip.decompress(OF_THE_PACKAGE.read_bytes()), type=dict[str, Rows])


def _kept(name: str, build: Callable[[], Rows]) -> Rows:
    """The rows from the user's cache folder, or new rows, which are kept there for later runs."""
    folder = _cache_folder()
    if folder is None:
        return build()
    with suppress(OSError, msgspec.MsgspecError):  # there is no such file, or it is damaged
        return msgspec.json.decode((folder / name).read_bytes(), type=Rows)
    found = build()
    with suppress(OSError):
        _write(folder / name, found)
        for old in sorted(folder.glob("*.rows"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink()
    return found


def _cache_folder() -> Path | None:
    """The user's cache folder for rows. None if the process cannot have one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashproof" / "arrays"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # a RuntimeError if the user has no home
        return None
    return folder


def _write(path: Path, found: Rows) -> None:
    """Writes a file of rows. A process that dies while it writes leaves no half file."""
    half = path.with_suffix(f".{os.getpid()}")
    half.write_bytes(msgspec.json.encode(found))
    half.replace(path)
