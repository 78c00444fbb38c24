"""Mutants: real implementations with a small patch that makes them wrong, each after a real fault.

A mutant is data (faults/*.toml) and becomes an implementation by writing the patched source to a temporary copy of its folder and loading it from there:
kernels are compiled from their files. It keeps every claim of what it patches.
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

    old: str  # stands in the file exactly once
    new: str
    file: str = ""  # below the repository's root; "" for the implementation's own


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong kernel: what it is, where its fault comes from, and which check must reject it.

    A mutant with `survives` is not rejected by any check; the text says why, and the report shows it. It is not counted.
    """

    name: str
    origin: str  # ids of BUGS.md, or another reference
    says: str  # the fault in one sentence
    of: str  # the implementation that it patches, by its name in the catalogue
    patches: list[Patch]
    dtypes: list[Dtype]  # those in which it shows, the one that is tried first in front
    check: str = ""  # that must reject it; "array": any check that draws its cases from the covering array
    survives: str = ""
    fault: str = ""  # its class: the name of its file


ARRAY = "array"


def asked(mutant: Mutant) -> list[Check]:
    """The checks of which one must reject it, the likeliest first."""
    if mutant.check != ARRAY:
        return [checks()[mutant.check]]
    of_array = [check for check in checks().values() if check.call]
    return sorted(of_array, key=lambda check: check.call not in ("plain", "forward"))


def every() -> list[Mutant]:
    """All mutants, by class of fault. Raises ValueError naming the file of an entry that is none, and a name that occurs twice."""
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
    """The file of an implementation of the catalogue, below the repository's root."""
    return _path(CATALOGUE[name].partition(":")[0]) + ".py"


def _path(module: str) -> str:
    """The path of a module or package below the repository's root."""
    return module.removeprefix("flashproof.").replace(".", "/")


def patched(mutant: Mutant) -> dict[str, str]:
    """The patched files, by their path below the root. Raises ValueError naming the mutant where a text does not stand exactly once."""
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
    """Where patched sources live as long as this process does."""
    path = Path(tempfile.mkdtemp(prefix="flashproof-mutants-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def build(mutant: Mutant) -> Implementation:
    """The mutant as an implementation, loaded from patched sources. Raises ValueError where a patch does not fit."""
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
    # torch keeps one operator of a name: those of a mutant have a name space of their own, or they would take the place of the real ones.
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace('"flashproof::', f'"flashproof_{mutant.name.replace("-", "_")}::'))
    with _package_at(package, folder):
        implementation: Implementation = getattr(importlib.import_module(module), attribute)
    return replace(implementation, name=mutant.name, summary=mutant.says)


@contextmanager
def _package_at(name: str, folder: Path) -> Iterator[None]:
    """Inside, the package's modules are loaded afresh, from another folder; afterwards everything is as it was."""
    package = importlib.import_module(name)
    path, attributes = list(package.__path__), dict(vars(package))
    loaded = {key: module for key, module in sys.modules.items() if key.startswith(f"{name}.")}
    for key in loaded:
        del sys.modules[key]
        vars(package).pop(key.rpartition(".")[2], None)  # `from package import module` looks here first
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
