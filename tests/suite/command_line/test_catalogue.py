"""The catalogue: what it lists exists, and what exists is listed."""

import subprocess
import sys
from pathlib import Path

import pytest

from flashproof.impls import catalogue
from flashproof.impls.spec import Implementation

ROOT = Path(__file__).resolve().parents[3]
OWN = ("tiled", "triton", "cuda")  # folders in which a file is an implementation, or something that implementations share


def loaded(name: str) -> Implementation:
    """The implementation, or a skip where its backend is not installed; a file of this project is never "not installed"."""
    try:
        return catalogue.load(name)
    except ImportError as error:
        if (error.name or "flashproof").partition(".")[0] == "flashproof":
            raise
        pytest.skip(f"{error.name}: not installed")


@pytest.mark.parametrize("name", catalogue.CATALOGUE)
def test_entry_loads(name: str) -> None:
    """Each line of the catalogue leads to an implementation of that name, with a sentence about it and an arithmetic for all that it supports."""
    implementation = loaded(name)
    assert implementation.name == name
    assert implementation.summary.endswith(".")
    supports = implementation.supports
    assert supports.dtypes
    assert supports.devices
    for dtype in supports.dtypes:
        for device in supports.devices:
            assert implementation.arithmetic(dtype, device).exp_ulps > 0
            assert implementation.missing(device) is None or ": " in str(implementation.missing(device))


@pytest.mark.parametrize("folder", OWN)
def test_folders_are_listed(folder: str) -> None:
    """Every file of the project that defines an implementation has its line."""
    targets = set(catalogue.CATALOGUE.values())
    defining = [path for path in sorted((ROOT / "impls" / folder).glob("*.py")) if "\nimplementation = Implementation(" in path.read_text()]
    assert defining
    for path in defining:
        assert f"flashproof.impls.{folder}.{path.stem}:implementation" in targets


def test_globs() -> None:
    """Globs name entries in the catalogue's order, each once."""
    assert catalogue.names(["tiled.*"]) == ["tiled.fa1", "tiled.fa2", "tiled.block_sparse"]
    assert catalogue.names(["tiled.fa2", "t*.fa2"]) == ["tiled.fa2", "triton.fa2"]
    assert catalogue.names(["*"]) == list(catalogue.CATALOGUE)
    assert catalogue.names([]) == []


def test_a_glob_without_match() -> None:
    """It is an error that says which, and what is close."""
    with pytest.raises(ValueError, match=r"tiled\.fa3: .*close: .*tiled\.fa2"):
        catalogue.names(["triton.*", "tiled.fa3"])


def test_names_import_nothing() -> None:
    """Listing names imports neither PyTorch nor Triton."""
    code = "import sys; from flashproof.impls import catalogue; catalogue.names(['*']); print(sorted({'torch', 'triton', 'jax', 'cuda'} & set(sys.modules)))"
    assert _python(code).stdout.strip() == "[]"


ABSENT = 'import sys; sys.modules["triton"] = None\n'  # what the import system makes of a module that is not there


def test_loading_without_triton() -> None:
    """Where Triton is missing, its kernels say so and the others load."""
    code = """
from flashproof.impls import catalogue
try:
    catalogue.load("triton.fa2")
except ImportError as error:
    print(error.name.partition(".")[0])  # "triton.language" where that is imported first
print(catalogue.load("tiled.fa2").name)
"""
    assert _python(ABSENT + code).stdout.split() == ["triton", "tiled.fa2"]


def test_collecting_without_triton() -> None:
    """Where Triton is missing, checks are collected all the same, for the others too."""
    code = 'import pytest; raise SystemExit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/accuracy"]))'
    assert "[tiled.fa2-float32-cpu]" in _python(ABSENT + code).stdout


def _python(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
