"""Compiles the Triton kernels for GPUs that this machine does not have, and reads the output of the compiler.

The output gives registers, spilled bytes and shared memory.

This module knows no kernel. It calls the public function of an implementation, forward and backward, with tensors that
have no data. Instead of running a launch, it compiles the kernel. So it compiles exactly the kernels, constants and
tile sizes that are shipped.

Triton chooses between compiler and interpreter when a kernel is defined. For this reason, a separate process compiles:
`python -m flashproof.tests.suite.kernels.compiling` reads jobs as JSON and answers with records.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from flashproof.impls import catalogue
from flashproof.impls.cuda.launching import cache_folder
from flashproof.impls.spec import Dtype
from flashproof.reports.record import Resources
from flashproof.tests.suite.kernels import said

if TYPE_CHECKING:
    from flashproof.impls.triton.launching import Launch

ROOT = Path(__file__).resolve().parents[3]

# The largest shared memory of one block in bytes, by target. Source: CUDA C++ Programming Guide, technical
# specifications per compute capability.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


@dataclass(frozen=True)
class Job:
    """The kernels of one implementation to compile, forward and backward, for one target, dtype, head dim and mask."""

    implementation: str  # a name in the catalogue
    target: str  # for example "sm_90"
    dtype: Dtype
    dim: int
    causal: bool
    max_registers: int | None = None  # a limit for the compiler; with a limit, the kernel is not the shipped one


def resources(jobs: Iterable[Job], run: str) -> list[Resources]:
    """Returns what every kernel of the jobs takes: registers, spilled bytes and shared memory.

    Compilation takes minutes. So answers are kept by job, sources and compiler: in the repository (`said.py`) and in
    the user's cache folder.

    run: the run that the records belong to.
    Raises RuntimeError with the output of the compiler if a kernel does not compile, and ValueError if an answer
    differs from the one in the repository.
    """
    keys = {job: _key(job) for job in jobs}
    words = {job: kept for job, key in keys.items() if (kept := said.recall(key) or _cached(key)) is not None}
    missing = [job for job in keys if job not in words]
    for job, found in zip(missing, _compiled(missing), strict=True):
        words[job] = msgspec.json.encode(found).decode()
        unfinished = _place(keys[job]).with_suffix(f".{os.getpid()}")
        unfinished.write_text(words[job])
        unfinished.replace(_place(keys[job]))
    for job, answer in words.items():
        said.hold(keys[job], answer)
    return [
        msgspec.structs.replace(record, run=run)
        for job in keys
        for record in msgspec.json.decode(words[job], type=list[Resources])
    ]


_OF_THE_INTERPRETER = {"interpreting.py", "operators.py"}  # these modules reach no compiler


def _key(job: Job) -> str:
    """Returns a hash of everything that the answer depends on."""
    sources = [
        ROOT / "impls" / "call.py",
        ROOT / "impls" / "spec.py",
        *sorted(path for path in (ROOT / "impls" / "triton").glob("*.py") if path.name not in _OF_THE_INTERPRETER),
    ]
    # The part after "+" names the CUDA version that torch was built for. It does not matter here.
    versions = metadata.version("triton"), metadata.version("torch").partition("+")[0]
    options = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith("TRITON_") and name not in {"TRITON_INTERPRET", "TRITON_CACHE_DIR"}
    )
    depends = (
        job,
        versions,
        options,
        Resources.__struct_fields__,
        [(path.name, _code(path)) for path in [*sources, Path(__file__)]],
    )
    return hashlib.sha256(repr(depends).encode()).hexdigest()


def _code(path: Path) -> str:
    """Returns the code of a file without comments, docstrings and layout. None of these reaches a compiler."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) and body:
            del body[0]
    return ast.dump(tree)


def _place(key: str) -> Path:
    return cache_folder() / f"{key}.resources"


def _cached(key: str) -> str | None:
    """Returns the answer in the user's cache folder, or None if there is none or it cannot be read."""
    try:
        words = _place(key).read_text()
        msgspec.json.decode(words, type=list[Resources])
    except (OSError, msgspec.DecodeError):
        return None
    return words


def _compiled(jobs: list[Job]) -> list[list[Resources]]:
    """Compiles the kernels of each job in a separate process."""
    if not jobs:
        return []
    # The cache is empty, because the compiler prints nothing about a kernel that it finds in a cache.
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        answer = subprocess.run(
            [sys.executable, "-m", "flashproof.tests.suite.kernels.compiling"],
            input=json.dumps([asdict(job) for job in jobs]),
            env=environment,
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
    if answer.returncode:
        raise RuntimeError(f"compiling failed\n{answer.stderr}")
    return msgspec.json.decode(answer.stdout, type=list[list[Resources]])


# ------------------------------------------------------------------------------------------------------ in that process


def main() -> None:
    """Reads jobs from the standard input and writes records to the standard output."""
    compiler = _Compiler()
    records = [list(compiler.resources(Job(**job))) for job in json.load(sys.stdin)]
    sys.stdout.buffer.write(msgspec.json.encode(records))


class _Compiler:
    def __init__(self) -> None:
        # The output of ptxas for each kernel. ptxas runs once for a kernel, even if several jobs share the kernel.
        self.logs: dict[str, str] = {}

    def resources(self, job: Job) -> Iterator[Resources]:
        from triton.runtime import driver

        driver.set_active(_AbsentGpu(int(job.target.removeprefix("sm_"))))
        for shipped in _launches(job):
            launch = replace(shipped, max_registers=job.max_registers or shipped.max_registers)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
            log = self.logs.setdefault(kernel.hash, printed.getvalue())
            yield Resources(
                run="",
                implementation=job.implementation,
                kernel=kernel.metadata.name,
                target=job.target,
                dtype=job.dtype,
                dim=job.dim,
                causal=job.causal,
                registers=max(_numbers(r"Used (\d+) registers", log)),
                spilled_bytes=sum(_numbers(r"(\d+) bytes spill stores", log)),
                shared_bytes=kernel.metadata.shared,
                shipped=job.max_registers is None,
            )


def _launches(job: Job) -> "list[Launch]":
    """Returns what a forward and a backward would launch on a GPU. The tensors are on the device "meta"."""
    import torch

    from flashproof.impls.triton.launching import _PLANS, Launch

    implementation = catalogue.load(job.implementation)
    launches: list[Launch] = []
    query, key, value = (
        torch.empty((2, 4, 1024, job.dim), dtype=getattr(torch, job.dtype), device="meta", requires_grad=True)
        for _ in range(3)
    )
    block_mask = (
        {"block_mask": torch.ones((1, 1, 8, 8), dtype=torch.bool, device="meta")}
        if implementation.supports.block_mask
        else {}
    )
    # Without plans, every launch is described: a plan of another target has the same key.
    with (
        mock.patch.dict(_PLANS, clear=True),
        mock.patch.object(Launch, "run", autospec=True, side_effect=launches.append),
    ):
        out: Any = implementation.attention(query, key, value, is_causal=job.causal, **block_mask)
        out.backward(torch.empty_like(out))
    return launches


def _numbers(pattern: str, log: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, log)]
    if not found:
        raise RuntimeError(f"ptxas did not say {pattern!r}, but {log!r}")
    return found


class _AbsentGpu:
    """Answers what Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device, so each target needs its own number

    def get_current_stream(self, _device: int) -> int:
        return 0


if __name__ == "__main__":
    main()
