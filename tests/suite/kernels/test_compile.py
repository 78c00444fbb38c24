"""Tests that every Triton kernel compiles for GPUs that this machine does not have, with the shipped tile sizes.

A kernel must spill no register up to head dim 128, and must fit the shared memory of the chip. Kernels of float32 may
spill on sm_90, where most of those with the fastest tiles do, and on sm_100, where each of six tiles spilled.

The jobs for sm_90 cover every padded head dim, and a head dim that is smaller than its tile. A kernel is the same for
calls with and without a causal mask. The other targets, and bfloat16, differ only in the instructions of the matrix
units, so a few jobs are enough for them. An implementation whose module names its targets (`TARGETS`) has jobs for
these alone, and each has jobs for the dtypes that it takes alone.
"""

import importlib

import pytest

from flashproof.impls import catalogue
from flashproof.reports.record import Resources
from flashproof.subject import Recorder
from flashproof.tests.suite.kernels.compiling import SHARED_LIMIT, Job, resources

pytest.importorskip("triton", reason="Triton: not installed")


def jobs(name: str) -> list[Job]:
    """Returns the jobs of one implementation."""
    module = importlib.import_module(catalogue.CATALOGUE[name].partition(":")[0])
    targets, dtypes = getattr(module, "TARGETS", tuple(SHARED_LIMIT)), catalogue.load(name).supports.dtypes
    every = [
        *(Job(name, "sm_90", "float16", dim, causal=True) for dim in (64, 96, 128, 256)),
        *(Job(name, "sm_90", "float32", dim, causal=True) for dim in (64, 128)),
        *(Job(name, target, "bfloat16", 128, causal=True) for target in SHARED_LIMIT),
        *(Job(name, target, "bfloat16", 64, causal=True) for target in ("sm_80", "sm_100")),
        *(Job(name, target, "float32", 128, causal=True) for target in ("sm_80", "sm_100")),
    ]
    return [job for job in every if job.target in targets and job.dtype in dtypes]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", catalogue.names(["triton.*"]))
def test_kernels_compile_spill_nothing_and_fit(name: str, recorder: Recorder) -> None:
    wanted = jobs(name)
    found = resources(wanted, recorder.run)
    for record in found:
        recorder.add(record)
    for job in wanted:
        kernels = [
            r for r in found if (r.target, r.dtype, r.dim, r.causal) == (job.target, job.dtype, job.dim, job.causal)
        ]
        assert len(kernels) >= 2, (
            f"{job}: a forward and a backward need two kernels at least, found {[r.kernel for r in kernels]}"
        )
    may_spill = {("sm_90", "float32"), ("sm_100", "float32")}
    assert not [_line(r) for r in found if r.spilled_bytes and r.dim <= 128 and (r.target, r.dtype) not in may_spill]
    assert not [_line(r) for r in found if r.shared_bytes > SHARED_LIMIT[r.target]]


def test_a_kernel_held_to_64_registers_is_seen_to_spill() -> None:
    """Shows that the gate above can fail."""
    found = resources([Job("triton.fa1", "sm_90", "float16", 64, causal=True, max_registers=64)], run="")
    assert all(r.registers <= 64 and r.spilled_bytes > 0 and not r.shipped for r in found)
    assert len(found) == 2


def _line(r: Resources) -> str:
    mask = "causal" if r.causal else "full"
    job = f"{r.implementation} {r.kernel} {r.target} {r.dtype} dim {r.dim} {mask}"
    return f"{job}: {r.registers} registers, {r.spilled_bytes} bytes spilled, {r.shared_bytes} bytes shared"
