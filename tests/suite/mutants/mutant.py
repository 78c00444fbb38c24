"""Mutants: real implementations with a small patch that makes them wrong. Each one is modelled on a real fault.

A mutant is data (faults/*.toml). It becomes an implementation in two steps: the patched source is written to a
temporary copy of its folder, and then loaded from there, because kernels are compiled from their files. A mutant keeps
every claim of the implementation that it patches.
"""

import atexit
import importlib
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from flashproof.impls.catalogue import CATALOGUE
from flashproof.impls.spec import Dtype, Implementation
from flashproof.registry import Check, checks

ROOT = Path(__file__).resolve().parents[3]
FAULTS = Path(__file__).parent / "faults"


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replacement in one file."""

    old: str  # occurs in the file exactly once
    new: str
    file: str = ""  # relative to the repository's root; "" for the file of the implementation


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong kernel: what it is, where its fault comes from, and which check must reject it.

    No check rejects a mutant with `survives`. The text of `survives` says why, and the report shows it. The mutant is
    not counted.
    """

    name: str
    origin: str  # ids of BUGS.md, or another reference
    says: str  # the fault in one sentence
    of: str  # the implementation that it patches, by its name in the catalogue
    patches: list[Patch]
    dtypes: list[Dtype]  # those in which the fault shows; the first one is tried first
    check: str = ""  # the check that must reject it; "array": any check that takes its cases from the covering array
    survives: str = ""
    fault: str = ""  # the class of the fault, which is the name of its file


ARRAY = "array"


def asked(mutant: Mutant) -> list[Check]:
    """Returns the checks of which one must reject a mutant, the most likely one first."""
    if mutant.check != ARRAY:
        return [checks()[mutant.check]]
    of_array = [check for check in checks().values() if check.call]
    return sorted(of_array, key=lambda check: check.call not in ("plain", "forward"))


def every() -> list[Mutant]:
    """Returns all mutants, ordered by the class of their fault.

    Raises ValueError for an entry that is not a mutant, with the name of its file, and for a name that occurs twice.
    """
    found: list[Mutant] = []
    for path in sorted(FAULTS.glob("*.toml")):
        try:
            of_file = msgspec.convert(tomllib.loads(path.read_text()), dict[str, list[Mutant]])["mutant"]
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, KeyError) as error:
            raise ValueError(f"{path.name}: {error}") from error
        found += [msgspec.structs.replace(mutant, fault=path.stem) for mutant in of_file]
    names = [mutant.name for mutant in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"mutants with one name: {', '.join(sorted(twice))}")
    return found


def source_of(name: str) -> str:
    """Returns the file of an implementation of the catalogue, relative to the repository's root."""
    return _path(CATALOGUE[name].partition(":")[0]) + ".py"


def _path(module: str) -> str:
    """Returns the path of a module or package without suffix, relative to the repository's root."""
    return module.removeprefix("flashproof.").replace(".", "/")


def patched(mutant: Mutant) -> dict[str, str]:
    """Returns the texts of the patched files, by their path relative to the repository's root.

    Raises ValueError, with the name of the mutant, if an old text does not occur exactly once or if a patch changes
    nothing.
    """
    files: dict[str, str] = {}
    for patch in mutant.patches:
        file = patch.file or source_of(mutant.of)
        text = files.get(file) or (ROOT / file).read_text()
        if (times := text.count(patch.old)) != 1:
            raise ValueError(f"{mutant.name}: the text it replaces stands {times} times in {file}:\n{patch.old}")
        if patch.old == patch.new:
            raise ValueError(f"{mutant.name}: changes nothing in {file}")
        files[file] = text.replace(patch.old, patch.new)
    return files


@cache
def _workshop() -> Path:
    """Creates a folder for patched sources, which is removed at the end of this process."""
    path = Path(tempfile.mkdtemp(prefix="flashproof-mutants-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def build(mutant: Mutant) -> Implementation:
    """Returns a mutant as an implementation, loaded from patched sources.

    Raises ValueError if a patch does not fit its file, or if the file lies outside the implementation's folder.
    """
    files = patched(mutant)
    module, _, attribute = CATALOGUE[mutant.of].partition(":")
    package = module.rpartition(".")[0]
    folder = _workshop() / mutant.name
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(ROOT / _path(package), folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in files.items():
        path = Path(file)
        if path.parent != Path(_path(package)):
            raise ValueError(f"{mutant.name}: {file} lies outside the folder of {mutant.of}")
        (folder / path.name).write_text(text)
    # torch keeps only one operator of each name. So the operators of a mutant get a namespace of their own. Otherwise
    # they would replace the real ones.
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace('"flashproof::', f'"flashproof_{mutant.name.replace("-", "_")}::'))
    with _package_at(package, folder):
        implementation: Implementation = getattr(importlib.import_module(module), attribute)
    return replace(implementation, name=mutant.name, summary=mutant.says)


@contextmanager
def _package_at(name: str, folder: Path) -> Iterator[None]:
    """While this is open, the modules of a package are loaded again, from another folder.

    Afterwards everything is as it was.
    """
    package = importlib.import_module(name)
    path, attributes = list(package.__path__), dict(vars(package))
    loaded = {key: module for key, module in sys.modules.items() if key.startswith(f"{name}.")}
    for key in loaded:
        del sys.modules[key]
        vars(package).pop(key.rpartition(".")[2], None)  # `from package import module` looks up this attribute first
    package.__path__[:] = [str(folder)]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for key in [key for key in sys.modules if key.startswith(f"{name}.")]:
            del sys.modules[key]
        sys.modules.update(loaded)
        package.__path__[:] = path
        for key in set(vars(package)) - set(attributes):
            delattr(package, key)
        vars(package).update(attributes)
