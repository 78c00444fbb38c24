"""Compiles the Triton kernels for GPUs that are not there, and reads what the compiler says: registers, spilled bytes, shared memory.

Nothing here knows a kernel. The public function of an implementation is called with tensors that have no data, forward and backward, and every launch that it
would make is compiled instead: exactly the kernels, constants and tile sizes that are shipped. This happens in a process of its own, because Triton
decides between compiler and interpreter when a kernel is defined: `python -m tests.contract.compiling RUN` reads jobs as JSON and answers with records.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from impls import catalogue
from impls.spec import Dtype
from reports.record import Resources

if TYPE_CHECKING:
    from impls.triton.primitives import Launch

ROOT = Path(__file__).resolve().parents[2]

# Bytes of shared memory that one block may have, by target. CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


@dataclass(frozen=True)
class Job:
    """The kernels of one implementation, forward and backward, for one target, dtype, head dim and mask."""

    implementation: str  # a name of the catalogue
    target: str  # "sm_90"
    dtype: Dtype
    dim: int
    causal: bool
    max_registers: int | None = None  # instead of what the compiler finds best; then the kernel is not as it is shipped


def resources(jobs: Iterable[Job], run: str) -> list[Resources]:
    """Compiles every kernel of the jobs in a process of its own. Raises RuntimeError with the compiler's words where one does not compile."""
    with tempfile.TemporaryDirectory() as cache:  # empty: of a kernel that is found in a cache the compiler says nothing
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        answer = subprocess.run(
            [sys.executable, "-m", "tests.contract.compiling", run],
            input=json.dumps([asdict(job) for job in jobs]),
            env=environment,
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
    if answer.returncode:
        raise RuntimeError(f"compiling failed\n{answer.stderr}")
    return msgspec.json.decode(answer.stdout, type=list[Resources])


# -------------------------------------------------------------------------------------------------------------- inside the process


def main() -> None:
    """Jobs from the standard input, records to the standard output."""
    compiler = _Compiler()
    records = [record for job in json.load(sys.stdin) for record in compiler.resources(Job(**job), sys.argv[1])]
    sys.stdout.buffer.write(msgspec.json.encode(records))


class _Compiler:
    def __init__(self) -> None:
        self.said: dict[str, str] = {}  # what ptxas said of each kernel: it is asked once, however many jobs share it

    def resources(self, job: Job, run: str) -> Iterator[Resources]:
        from triton.runtime import driver

        driver.set_active(_AbsentGpu(int(job.target.removeprefix("sm_"))))
        for shipped in _launches(job):
            launch = replace(shipped, max_registers=job.max_registers or shipped.max_registers)
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
            said = self.said.setdefault(kernel.hash, log.getvalue())
            yield Resources(
                run=run,
                implementation=job.implementation,
                kernel=kernel.metadata.name,
                target=job.target,
                dtype=job.dtype,
                dim=job.dim,
                causal=job.causal,
                registers=max(_numbers(r"Used (\d+) registers", said)),
                spilled_bytes=sum(_numbers(r"(\d+) bytes spill stores", said)),
                shared_bytes=kernel.metadata.shared,
                shipped=job.max_registers is None,
            )


def _launches(job: Job) -> "list[Launch]":
    """What a forward and a backward would launch on the device of their tensors, were there one."""
    import torch

    from impls.triton.primitives import Launch

    implementation = catalogue.load(job.implementation)
    launches: list[Launch] = []
    query, key, value = (torch.empty((2, 4, 1024, job.dim), dtype=getattr(torch, job.dtype), device="meta", requires_grad=True) for _ in range(3))
    block_mask = {"block_mask": torch.ones((1, 1, 8, 8), dtype=torch.bool, device="meta")} if implementation.supports.block_mask else {}
    with mock.patch.object(Launch, "run", autospec=True, side_effect=launches.append):
        out: Any = implementation.attention(query, key, value, is_causal=job.causal, **block_mask)
        out.backward(torch.empty_like(out))
    return launches


def _numbers(pattern: str, said: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, said)]
    if not found:
        raise RuntimeError(f"ptxas did not say {pattern!r}, but {said!r}")
    return found


class _AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, _device: int) -> int:
        return 0


if __name__ == "__main__":
    main()
