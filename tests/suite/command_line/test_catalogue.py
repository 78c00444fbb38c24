"""The catalogue: every entry loads, and every implementation of the project has an entry."""

import subprocess
import sys
from pathlib import Path

import pytest

from flashproof.impls import catalogue
from flashproof.impls.spec import Implementation

ROOT = Path(__file__).resolve().parents[3]
# The files of these folders are implementations, or code that implementations share.
OWN = ("tiled", "triton", "cuda")


def loaded(name: str) -> Implementation:
    """Loads an implementation. Skips the test if its backend is not installed.

    A missing module of flashproof itself is an error.
    """
    try:
        return catalogue.load(name)
    except ImportError as error:
        if (error.name or "flashproof").partition(".")[0] == "flashproof":
            raise
        pytest.skip(f"{error.name}: not installed")


@pytest.mark.parametrize("name", catalogue.CATALOGUE)
def test_entry_loads(name: str) -> None:
    """Each line of the catalogue loads an implementation of that name.

    The implementation has a summary, and an arithmetic for each dtype and device that it supports.
    """
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
    """Every file of the project that defines an implementation has a line in the catalogue."""
    targets = set(catalogue.CATALOGUE.values())
    defining = [
        path
        for path in sorted((ROOT / "impls" / folder).glob("*.py"))
        if "\nimplementation = Implementation(" in path.read_text()
    ]
    assert defining
    for path in defining:
        assert f"flashproof.impls.{folder}.{path.stem}:implementation" in targets


def test_globs() -> None:
    """Globs select entries in the order of the catalogue, each entry once."""
    assert catalogue.names(["tiled.*"]) == ["tiled.fa1", "tiled.fa2", "tiled.block_sparse"]
    assert catalogue.names(["tiled.fa2", "t*.fa2"]) == ["tiled.fa2", "triton.fa2"]
    assert catalogue.names(["*"]) == list(catalogue.CATALOGUE)
    assert catalogue.names([]) == []


def test_a_glob_without_match() -> None:
    """A glob that matches nothing is an error. The error names the glob and similar entries."""
    with pytest.raises(ValueError, match=r"tiled\.fa3: .*close: .*tiled\.fa2"):
        catalogue.names(["triton.*", "tiled.fa3"])


def test_names_import_nothing() -> None:
    """Listing names imports neither PyTorch nor Triton."""
    code = (
        "import sys; from flashproof.impls import catalogue; catalogue.names(['*']); "
        "print(sorted({'torch', 'triton', 'jax', 'cuda'} & set(sys.modules)))"
    )
    assert _python(code).stdout.strip() == "[]"


ABSENT = 'import sys; sys.modules["triton"] = None\n'  # an import of this module then raises ModuleNotFoundError


def test_loading_without_triton() -> None:
    """Without Triton, its kernels raise ImportError and the other kernels load."""
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
    """Without Triton, pytest still collects the checks of the other kernels."""
    code = (
        "import pytest; raise SystemExit(pytest.main("
        '["--collect-only", "-q", "-p", "no:cacheprovider", "tests/accuracy"]))'
    )
    assert "[tiled.fa2-float32-cpu]" in _python(ABSENT + code).stdout


def _python(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
