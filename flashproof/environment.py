"""Where and when a run takes place: the first record of every run."""

import datetime
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

import flashproof
from flashproof.impls.spec import Device
from flashproof.reports.record import Environment

PACKAGE = Path(__file__).resolve().parent


def run_name() -> str:
    """A name for a run, unique on any machine."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def environment(run: str, *, whole_on: Sequence[Device] = (), command: str = "") -> Environment:
    """The environment of this process.

    whole_on: the devices on which the run verifies all that its implementations claim. command: what started the run,
    if not pytest.
    """
    cuda = torch.cuda.is_available()
    versions = {
        "flashproof": str(flashproof.__version__),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for module in ("triton", "hypothesis", "flint", "mpmath"):
        loaded = sys.modules.get(module)
        if loaded is not None and hasattr(loaded, "__version__"):
            versions[module] = str(loaded.__version__)
    if cuda:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)} | _driver()
    return Environment(
        run=run,
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        commit=_commit(PACKAGE) if _in_a_clone() else "",
        project_commit=_commit(Path.cwd()),
        whole=set(whole_on) == {*get_args(Device)},
        whole_on=list(whole_on),
        device=device_name("cuda" if cuda else "cpu"),
        kind="cuda" if cuda else "cpu",
        versions=versions,
        command=command or " ".join(["pytest", *sys.argv[1:]]),
    )


def _in_a_clone() -> bool:
    """Whether flashproof runs from a clone of its own, and not from an installed copy, which may lie inside another
    one.
    """
    return (PACKAGE.parent / "pyproject.toml").is_file() and (PACKAGE / "impls").is_symlink()


def _commit(folder: Path) -> str:
    """The commit that a folder is at, with "+" if its tree has changes. Empty outside a repository."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GITHUB_SHA", "")[:12]


def device_name(device: Device) -> str:
    """The name of the GPU, or of the processor with its number of cores."""
    return torch.cuda.get_device_name() if device == "cuda" else _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.processor() or platform.machine()


def _driver() -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return {"driver": subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]}
    except (OSError, subprocess.CalledProcessError, IndexError):
        return {}
