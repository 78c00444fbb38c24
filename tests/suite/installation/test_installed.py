"""flashproof as an installed package: in a repository of others it gives the same verdicts as in this clone."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flashproof.reports.record import Judgement, read
from flashproof.tests.suite.installation.installing import build_wheel, install, site_packages

KERNELS = '''
"""A right kernel, and three wrong ones."""

import math

import torch

from .masks import visible


def attention(query, key, value, *, is_causal=False, scale=None):
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.float() @ key.float().transpose(-2, -1) * factor
    if is_causal:
        scores = scores.masked_fill(~visible(scores), -math.inf)
    return (torch.softmax(scores, dim=-1).to(query.dtype) @ value).to(query.dtype)


def scaled(query, key, value, *, is_causal=False):
    return attention(query, key, value, is_causal=is_causal, scale=1.001 / math.sqrt(query.shape[-1]))


def leaks(query, key, value, *, is_causal=False):
    out = attention(query, key, value, is_causal=is_causal)
    return out + 1e-3 * value.mean(dim=-2, keepdim=True) if is_causal else out


def unshifted(query, key, value):
    weights = torch.exp(query.float() @ key.float().transpose(-2, -1) / math.sqrt(query.shape[-1]))
    return (weights / weights.sum(dim=-1, keepdim=True) @ value.float()).to(query.dtype)
'''
MASKS = """
import torch


def visible(scores):
    return torch.ones_like(scores, dtype=torch.bool).tril()
"""
VERDICTS = {"attention": "passed", "scaled": "failed", "leaks": "failed", "unshifted": "failed"}
CASES = ("b1 h2 q40 k40 d64 float32 causal", "b1 h1 q40 k70 d32 float32 shift1e4")
ASSERTION = """
import flashproof
import pytest
import torch
from mykernels import attn


@pytest.mark.parametrize("kernel", [attn.attention, attn.scaled])
def test_accuracy(kernel):
    torch.manual_seed(0)
    query, key, value, dout = (torch.randn(1, 2, 70, 64) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = kernel(*leaves, is_causal=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    flashproof.assert_accurate(out, query, key, value, is_causal=True, dout=dout, dq=dq, dk=dk, dv=dv)
"""
# A project whose packages have the names of flashproof's folders. It adds options of its own to pytest. Its settings
# would change the behaviour of checks.
UNFRIENDLY = {
    "pyproject.toml": """
[tool.pytest.ini_options]
testpaths = ["tests"]
python_files = ["check_*.py"]
python_functions = ["check_*"]
filterwarnings = ["error"]
addopts = ["--strict-markers"]
""",
    "conftest.py": """
import pytest


def pytest_addoption(parser):
    for option in ("--device", "--dtype", "--case", "--records"):
        parser.addoption(option)


@pytest.fixture(autouse=True)
def double():
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
""",
    "tests/__init__.py": "",
    "tests/check_own.py": "def check_own():\n    assert True\n",
    "impls/__init__.py": "raise ImportError('not for flashproof')\n",
    "oracles/__init__.py": "raise ImportError('not for flashproof')\n",
    "reports/__init__.py": "raise ImportError('not for flashproof')\n",
    "mykernels/__init__.py": "",
    "mykernels/attn.py": KERNELS,
    "mykernels/masks.py": MASKS,
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that contains flashproof and its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    return install(build_wheel(folder), folder / "environment")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the files of `UNFRIENDLY`."""
    return write(tmp_path / "elsewhere", UNFRIENDLY)


def write(folder: Path, files: dict[str, str]) -> Path:
    """Writes files into a folder. Returns the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(python: Path | str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python command in a folder, without the environment variables of this run."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(python), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def verdicts(records: Path) -> Counter[tuple[str, ...]]:
    """Counts the judgements of a record file by kernel, check, case, tensor and status."""
    found = [record for record in read(records) if isinstance(record, Judgement)]
    return Counter((one.implementation, one.check, one.case, str(one.tensor), one.status) for one in found)


def test_one_name_in_site_packages(installed: Path) -> None:
    """The wheel adds only the name `flashproof` to an environment. It contains no test of the suite itself."""
    site = site_packages(installed.parents[1])
    own = {path.name for path in site.iterdir() if not path.is_symlink()}
    assert {name for name in own if not name.endswith(".dist-info")} == {"flashproof"}
    assert not (site / "flashproof" / "tests" / "suite").exists()
    assert list((site / "flashproof" / "impls").rglob("*.cu"))


def test_the_same_verdicts_as_in_the_clone(installed: Path, repository: Path, tmp_path: Path) -> None:
    """The installed pytest plugin, the installed command and the clone give the same checks, cases and verdicts.

    The checks of the contract are left out, because they take most of the time.
    """
    names = [f"mykernels.attn:{kernel}" for kernel in VERDICTS]
    narrow = ["-k", "not contract", *(word for case in CASES for word in ("--case", case))]
    targets = [word for name in names for word in ("--impl", name)]
    quiet = ["-q", "-n2", "-p", "no:cacheprovider"]
    commands = {
        "pytest": (installed, ["-m", "pytest", *targets, *narrow, *quiet]),
        "command": (installed, ["-m", "flashproof", *names, *narrow, "-n", "2"]),
        "clone": (Path(sys.executable), ["-m", "pytest", *targets, *narrow, *quiet, f"--rootdir={repository}"]),
    }
    found = {}
    for name, (python, words) in commands.items():
        records = tmp_path / f"{name}.jsonl"
        ended = run(python, repository, *words, f"--records={records}")
        assert ended.returncode == 1, ended.stdout + ended.stderr
        found[name] = verdicts(records)
        for kernel, verdict in VERDICTS.items():
            statuses = {key[-1] for key in found[name] if key[0] == f"mykernels.attn:{kernel}"}
            assert ("failed" in statuses) == (verdict == "failed"), f"{name}, {kernel}: {statuses}"
            assert "passed" in statuses
    assert found["pytest"] == found["command"] == found["clone"]


def test_the_same_number_of_checks(installed: Path, repository: Path) -> None:
    """The package contains all checks of the clone."""
    collected = []
    for python in (installed, Path(sys.executable)):
        ended = run(python, repository, "-m", "pytest", "--impl=mykernels.attn:attention", "--collect-only", "-q")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        collected.append(sorted(re.findall(r"^\S+::(\S+)$", ended.stdout, re.MULTILINE)))
    assert collected[0] == collected[1]
    assert len(collected[0]) > 60


def test_the_report_and_the_records_are_the_callers(installed: Path, repository: Path) -> None:
    """Report and records go into the caller's folder. A second run with another case adds to the report."""
    words = ["-m", "pytest", "--impl=mykernels.attn:attention", "-q", "-n0", "-p", "no:cacheprovider"]
    for case in CASES:
        ended = run(installed, repository, *words, "--case", case)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "report:  flashproof-report/index.html" in ended.stdout
    assert len(list((repository / "flashproof-report" / "runs").glob("*.jsonl"))) == 2
    pages = "".join(page.read_text() for page in (repository / "flashproof-report").glob("*.html"))
    assert all(case.partition(" float32 ")[0] in pages for case in CASES)


def test_assert_accurate_in_a_test_of_theirs(installed: Path, repository: Path) -> None:
    """The assertion accepts the right kernel. It rejects the kernel whose scale is 0.1 % too large, and says why."""
    (repository / "tests" / "check_accuracy.py").write_text(ASSERTION.replace("def test_", "def check_"))
    ended = run(installed, repository, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest")
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout + ended.stderr
    assert re.search(r"^E\s+.*\brho \d", ended.stdout, re.MULTILINE), ended.stdout


UNRELATED = """
import sys
import threading

import pytest

seen = []


@pytest.mark.parametrize("number", range(3))
def test_order(number):
    seen.append(number)
    assert seen == list(range(number + 1))


def test_nothing_is_loaded(request):
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"torch", "triton", "numpy", "hypothesis", "msgspec"}
    assert {name for name in sys.modules if name.startswith("flashproof")} <= {"flashproof", "flashproof.pytest_plugin"}
    assert threading.active_count() == 1
    assert not request.config.pluginmanager.has_plugin("flashproof-verification")


def test_options_are_free(pytestconfig):
    assert pytestconfig.getoption("--device") == "tpu"
    assert pytestconfig.getoption("--case") is None


def test_warnings_stay_warnings():
    with pytest.warns(UserWarning):
        import warnings

        warnings.warn("mine", stacklevel=1)
"""


def test_an_unrelated_project_notices_nothing(installed: Path, tmp_path: Path) -> None:
    """The tests of an unrelated project run in their order and with the project's own options.

    Neither PyTorch nor a module of the verifier is loaded.
    """
    options = 'def pytest_addoption(parser):\n    for option in ("--device", "--case", "--search"):\n'
    files = {"conftest.py": f"{options}        parser.addoption(option)\n", "test_unrelated.py": UNRELATED}
    write(tmp_path, files)
    ended = run(
        installed, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--device=tpu"
    )
    assert "6 passed" in ended.stdout, ended.stdout + ended.stderr
