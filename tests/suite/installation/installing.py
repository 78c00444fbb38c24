"""Builds the wheel of this clone and installs it with the dependencies that it declares, and no others."""

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "flashproof", "impls", "oracles", "reports", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "records", "runs", "site", "benchmarks", "*.gz", "suite")


def build_wheel(folder: Path) -> Path:
    """Builds the wheel in a folder. It uses a copy of the sources, because a build leaves files behind."""
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=LEFT_OUT)
        else:
            shutil.copy(source, copy)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path) -> Path:
    """Creates an environment that contains the wheel and its dependencies. Returns the path of its Python.

    The dependencies are links to the packages of this environment. A package that the wheel does not declare is not
    there.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    site = site_packages(folder)
    own = metadata.Distribution.at(next(site.glob("flashproof-*.dist-info")))
    for name in sorted(_closure(own.requires or [])):
        for top in {file.parts[0] for file in metadata.distribution(name).files or () if file.parts[0] != ".."}:
            target = Path(str(metadata.distribution(name).locate_file(top)))
            if top != "__pycache__" and not (site / top).exists():
                (site / top).symlink_to(target)
    return python


def site_packages(folder: Path) -> Path:
    """Returns the folder in which an environment keeps its packages."""
    return next((folder / "lib").glob("python*")) / "site-packages"


def _closure(requirements: list[str]) -> set[str]:
    """Returns the names of all distributions that these requirements need, without the optional extras."""
    found: set[str] = set()
    front = [requirement for requirement in requirements if "extra ==" not in requirement]
    while front:
        requirement = Requirement(front.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        extras = [*requirement.extras, ""]
        for further in metadata.requires(requirement.name) or ():
            needed = Requirement(further)
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                front.append(further.partition(";")[0])
    return found


def _pip(*words: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
