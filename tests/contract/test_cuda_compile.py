"""Every CUDA kernel compiles for GPUs that are not there, at the tile sizes that are shipped; it spills no register up to head dim 128 and fits the chip.

Nothing here knows a kernel: the public function of an implementation is called, forward and backward, and every launch that it would make on a GPU is
compiled instead, by NVRTC, which needs no GPU.
"""

import functools
import re
from typing import Any, get_args
from unittest import mock

import pytest
import torch

from impls import catalogue
from impls.cuda import launching
from impls.cuda.launching import Launch
from impls.spec import Dtype
from reports.record import Resources
from tests.contract.compiling import SHARED_LIMIT
from tests.plugin import Recorder

TARGETS = {"sm_80": "sm_80", "sm_90a": "sm_90", "sm_100": "sm_100"}  # what is compiled for, and the chip whose memory it must fit
NAMES = catalogue.names(["cuda.*"])


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    """The compiler, or a skip with its reason."""
    if reason := launching.no_nvrtc():
        pytest.skip(reason)


def launches(name: str, dtype: Dtype, dim: int, causal: bool) -> list[Launch]:
    """What a forward and a backward would launch on a GPU. Nothing is computed."""
    implementation = catalogue.load(name)
    found: list[Launch] = []
    query, key, value = (torch.zeros((1, 4, 256, dim), dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
    block_mask = {"block_mask": torch.ones((1, 1, 2, 2), dtype=torch.bool)} if implementation.supports.block_mask else {}
    with mock.patch.object(Launch, "run", autospec=True, side_effect=found.append), mock.patch.object(launching, "on_twin", return_value=False):
        out: Any = implementation.attention(query, key, value, is_causal=causal, **block_mask)
        out.backward(torch.zeros_like(out))
    return found


def compiled(run: str, launch: Launch, name: str, target: str, dtype: Dtype, dim: int, causal: bool, **others: int) -> Resources:
    """What the assembler says of a launch's kernel; with other constants it is not as it is shipped."""
    said = _said(launch.source, launch.kernel, tuple({**launch.constants, **others}.items()), target)
    return Resources(
        run=run,
        implementation=name,
        kernel=launch.kernel,
        target=target,
        dtype=dtype,
        dim=dim,
        causal=causal,
        registers=max(_numbers(r"Used (\d+) registers", said)),
        spilled_bytes=sum(_numbers(r"(\d+) bytes spill stores", said)),
        shared_bytes=launch.shared_bytes,
        shipped=not others,
    )


@functools.cache
def _said(source: str, kernel: str, constants: tuple[tuple[str, int | str], ...], target: str) -> str:
    """What the assembler said. Some kernels do not depend on the mask: they are compiled once."""
    return launching.compile_cubin(source, kernel, dict(constants), target)[1]


def _numbers(pattern: str, said: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, said)]
    assert found, f"the assembler did not say {pattern!r}, but {said!r}"
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_spill_nothing_and_fit(name: str, dtype: Dtype, target: str, recorder: Recorder) -> None:
    """Every kernel, head dim and mask."""
    found = []
    for dim in (64, 128, 256):
        for causal in (False, True):
            wanted = launches(name, dtype, dim, causal)
            assert len(wanted) >= 2, f"a forward and a backward need two kernels at least, found {[x.kernel for x in wanted]}"
            found += [compiled(recorder.run, launch, name, target, dtype, dim, causal) for launch in wanted]
    for resources in found:
        recorder.add(resources)
    assert not [_line(r) for r in found if r.spilled_bytes and r.dim <= 128]
    assert not [_line(r) for r in found if r.shared_bytes > SHARED_LIMIT[TARGETS[target]]]


def test_a_kernel_held_to_64_registers_is_seen_to_spill() -> None:
    """The gate above can fail."""
    launch = launches(NAMES[0], "float16", 64, True)[0]
    eight_blocks = 8 * 4 // launch.warps  # of 4 warps, on a multiprocessor with 65536 registers
    found = compiled("", launch, NAMES[0], "sm_90a", "float16", 64, True, BLOCKS=eight_blocks)
    assert found.registers <= 64
    assert found.spilled_bytes > 0


def test_a_fault_in_a_kernel_names_it() -> None:
    """A kernel that does not compile is reported with its name, target and constants, and with the compiler's words."""
    launch = launches(NAMES[0], "float16", 64, True)[0]
    with pytest.raises(launching.CudaError, match=rf"(?s)NVRTC: {launch.source} {launch.kernel} .*sm_90a .*DIM=64.*nonsense"):
        launching.compile_cubin(launch.source, launch.kernel, {**launch.constants, "Element": "nonsense"}, "sm_90a")


def _line(r: Resources) -> str:
    mask = "causal" if r.causal else "full"
    job = f"{r.implementation} {r.kernel} {r.target} {r.dtype} dim {r.dim} {mask}"
    return f"{job}: {r.registers} registers, {r.spilled_bytes} bytes spilled, {r.shared_bytes} bytes shared"
