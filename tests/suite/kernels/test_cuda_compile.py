"""Tests that every CUDA kernel compiles for GPUs that this machine does not have, with the shipped tile sizes.

A kernel must spill no register up to head dim 128, and must fit the shared memory of the chip.

This module knows no kernel. It calls the public function of an implementation, forward and backward. Instead of running
a launch, it compiles the kernel with NVRTC, which needs no GPU.

A GPU of capability 9.0 gets code for sm_90, but this module compiles for sm_90a. The code is the same, because these
kernels do not use what "a" adds (wgmma, the copies of whole tiles). A test checks this. Kernels that do use it name
their targets (`TARGETS` of their module), and a GPU gets the code that is compiled here.

The code of a kernel depends on the call: on dropout, on rows that are not vectors and on the sign of the scale. All
combinations with the masks, dtypes, head dims and targets would take an hour. So only calls that need many registers
are compiled:

- All plain calls, because their speed was measured.
- For implementations that claim dropout, calls with dropout, with strided rows and with both. For the chip of the
  measurements, all three are compiled. For the other chips, only the third is, because it has the most code.
  - The mask is causal, because it needs more comparisons.
  - The scale is negative. This needs a change of sign. With a scale of 0, the compiler could leave out zeros.
  - The dtypes are float16 and float32. bfloat16 needs the same registers as float16.

So these calls are a sample. `cuda.fa3` has no dropout and copies rows that are not vectors. `test_cuda_fa3.py` compiles
its other calls.

The answers of the assembler are kept under a hash of everything that they depend on, with sources and compiler
(`said.py`).
"""

import hashlib
import importlib
import inspect
import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from flashproof.impls import catalogue
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.fa3 import check_assembled
from flashproof.impls.cuda.launching import Launch
from flashproof.impls.spec import Dtype
from flashproof.reports.record import Resources
from flashproof.subject import Recorder
from flashproof.tests.suite.kernels import said
from flashproof.tests.suite.kernels.compiling import SHARED_LIMIT

# Each target of the compiler, with the chip whose shared memory the kernels must fit.
TARGETS = {"sm_80": "sm_80", "sm_90a": "sm_90", "sm_100": "sm_100"}
CAPABILITIES = {"sm_80": 80, "sm_90a": 90, "sm_100": 100}
NAMES = catalogue.names(["cuda.*"])
WITH_DROPOUT = [name for name in NAMES if catalogue.load(name).supports.dropout]
MEASURED = "sm_90a"  # the chip whose speed the README reports


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    """Skips with the reason if NVRTC is missing."""
    if reason := launching.no_nvrtc():
        pytest.skip(reason)


@dataclass(frozen=True)
class Variant:
    """The properties of a call that change the code of its kernels, in addition to the mask.

    strided: the rows are not vectors.
    """

    scale: float | None = None
    dropout_p: float = 0.0
    strided: bool = False


def targets(name: str) -> tuple[str, ...]:
    """Returns the targets of the kernels of an implementation: those that its module names, or all."""
    module = importlib.import_module(catalogue.CATALOGUE[name].partition(":")[0])
    return getattr(module, "TARGETS", tuple(TARGETS))


GATES = [
    (name, dtype, target)
    for name in NAMES
    for dtype in catalogue.load(name).supports.dtypes
    for target in targets(name)
]

PLAIN = Variant()
DROPOUT, STRIDED, BOTH = Variant(-1.0, 0.5), Variant(-1.0, strided=True), Variant(-1.0, 0.5, True)


def launches(
    name: str, dtype: Dtype, dim: int, causal: bool, variant: Variant = PLAIN, target: str = MEASURED
) -> list[Launch]:
    """Returns what a forward and a backward would launch on a GPU. Nothing is computed."""
    implementation = catalogue.load(name)
    found: list[Launch] = []
    row = dim + 1 if variant.strided else dim  # with one more element, not every row begins at a multiple of 16 bytes
    query, key, value = (
        torch.zeros((1, 4, 256, row), dtype=getattr(torch, dtype), requires_grad=True)[..., :dim] for _ in range(3)
    )
    block_mask = (
        {"block_mask": torch.ones((1, 1, 2, 2), dtype=torch.bool)} if implementation.supports.block_mask else {}
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launching, "on_twin", return_value=False))
        stack.enter_context(mock.patch.object(launching, "chip_of", return_value=divmod(CAPABILITIES[target], 10)))
        for kind in (Launch, *Launch.__subclasses__()):
            stack.enter_context(mock.patch.object(kind, "run", autospec=True, side_effect=found.append))
        out: Any = implementation.attention(
            query, key, value, is_causal=causal, scale=variant.scale, dropout_p=variant.dropout_p, **block_mask
        )
        if implementation.supports.backward:
            out.backward(torch.zeros_like(out))
    return found


def compiled(
    run: str, launch: Launch, name: str, target: str, dtype: Dtype, dim: int, causal: bool, **others: int
) -> Resources:
    """Returns what the kernel of a launch takes of a chip. others: constants that the shipped kernel does not have."""
    registers, spilled_bytes = taken(launch, target, **others)
    return Resources(
        run=run,
        implementation=name,
        kernel=launch.kernel,
        target=target,
        dtype=dtype,
        dim=dim,
        causal=causal,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=launch.shared_bytes,
        shipped=not others,
    )


def taken(launch: Launch, target: str, **others: int) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes that it spills, from the kept answers or from the assembler.

    Registers cannot hold an array that is indexed by a variable. The assembler reports such an array as a stack frame
    and not as a spill. It is as slow as a spill, so it counts as one.

    Raises CudaError if the assembler warns that it serialises the products of warpgroups.
    """
    code = launch.source, launch.kernel, tuple({**launch.constants, **others}.items()), target
    # The sources of the functions that ask the assembler and read its answer.
    how = "".join(
        inspect.getsource(function) for function in (launching.compile_cubin, taken, check_assembled, _numbers)
    )
    key = hashlib.sha256((launching.identity(*code) + how).encode()).hexdigest()
    answer = said.recall(key)
    if answer is None:
        log = launching.said_of(*code)
        check_assembled(log, str(launch))
        registers = max(_numbers(r"Used (\d+) registers", log))
        spilled_bytes = max(
            sum(_numbers(r"(\d+) bytes spill stores", log)), sum(_numbers(r"(\d+) bytes stack frame", log))
        )
        answer = f"{registers} {spilled_bytes}"
        said.hold(key, answer)
    registers, spilled_bytes = map(int, answer.split())
    return registers, spilled_bytes


def _numbers(pattern: str, log: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, log)]
    assert found, f"the assembler did not say {pattern!r}, but {log!r}"
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "dtype", "target"), GATES)
def test_kernels_compile_spill_nothing_and_fit(name: str, dtype: Dtype, target: str, recorder: Recorder) -> None:
    """Compiles every kernel with every head dim and mask."""
    found = []
    for dim in (dim for dim in (64, 128, 256) if dim <= catalogue.load(name).supports.dims[1]):
        for causal in (False, True):
            wanted = launches(name, dtype, dim, causal, target=target)
            assert len(wanted) >= 2, f"every call needs two kernels at least, found {[x.kernel for x in wanted]}"
            found += [compiled(recorder.run, launch, name, target, dtype, dim, causal) for launch in wanted]
    for resources in found:
        recorder.add(resources)
    assert not [_line(r) for r in found if r.spilled_bytes and r.dim <= 128]
    assert not [_line(r) for r in found if r.shared_bytes > SHARED_LIMIT[TARGETS[target]]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_kernels_of_other_calls_spill_nothing_and_fit(name: str, dtype: Dtype, target: str) -> None:
    """Compiles calls with dropout, strided rows and both, up to head dim 128.

    They are not recorded, because the report shows the registers of a plain call.
    """
    found = []
    for variant in (DROPOUT, STRIDED, BOTH) if target == MEASURED else (BOTH,):
        for dim in (64, 128):
            for launch in launches(name, dtype, dim, True, variant, target):
                resources = compiled("", launch, name, target, dtype, dim, True)
                if resources.spilled_bytes or resources.shared_bytes > SHARED_LIMIT[TARGETS[target]]:
                    found.append(f"{variant}: {_line(resources)}")
    assert not found


@pytest.mark.parametrize(
    ("variant", "constants"),
    [
        (PLAIN, {"DROPOUT": 0, "VECTOR": 1}),
        (DROPOUT, {"DROPOUT": 1, "VECTOR": 1}),
        (STRIDED, {"DROPOUT": 0, "VECTOR": 0}),
        (BOTH, {"DROPOUT": 1, "VECTOR": 0}),
    ],
)
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_call_makes_the_code_that_it_is_to_make(name: str, variant: Variant, constants: dict[str, int]) -> None:
    """Shows that the gates above compile the variants that they name."""
    for launch in launches(name, "float16", 64, True, variant):
        if launch.kernel != "delta":
            assert constants.items() <= launch.constants.items()


def test_code_for_the_architecture_is_the_code_that_runs() -> None:
    """The code for sm_90a, which is compiled here, takes the same resources as the code for sm_90, which a GPU runs."""
    for launch in launches(NAMES[0], "float16", 64, True):
        gated, run = (
            launching.said_of(launch.source, launch.kernel, tuple(launch.constants.items()), target)
            for target in ("sm_90a", "sm_90")
        )
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores"):
            assert _numbers(pattern, gated) == _numbers(pattern, run)


def test_a_kernel_held_to_64_registers_is_seen_to_spill() -> None:
    """Shows that the gate above can fail."""
    launch = launches(NAMES[0], "float16", 64, True)[0]
    eight_blocks = 8 * 4 // launch.warps  # 32 warps share the 65536 registers of a multiprocessor
    found = compiled("", launch, NAMES[0], "sm_90a", "float16", 64, True, BLOCKS=eight_blocks)
    assert found.registers <= 64
    assert found.spilled_bytes > 0


def test_a_fault_in_a_kernel_names_it() -> None:
    """If a kernel does not compile, the error gives its name, target and constants, and the output of the compiler."""
    launch = launches(NAMES[0], "float16", 64, True)[0]
    with pytest.raises(
        launching.CudaError, match=rf"(?s)NVRTC: {launch.source} {launch.kernel} .*sm_90a .*DIM=64.*nonsense"
    ):
        launching.compile_cubin(launch.source, launch.kernel, {**launch.constants, "Element": "nonsense"}, "sm_90a")


def _line(r: Resources) -> str:
    mask = "causal" if r.causal else "full"
    job = f"{r.implementation} {r.kernel} {r.target} {r.dtype} dim {r.dim} {mask}"
    return f"{job}: {r.registers} registers, {r.spilled_bytes} bytes spilled, {r.shared_bytes} bytes shared"
