"""Tests the CPU twin of the CUDA kernels.

Its primitives must compute the same as those of a GPU. It must report faults that a GPU would not notice, with kernel,
block and thread.
"""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashproof.impls import catalogue
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.launching import CudaError, Launch

NAN = float("nan")


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skips with the reason if the compiler of the host is missing."""
    if reason := launching.missing("cpu"):
        pytest.skip(reason)


def run(
    path: Path, kernel: str, *tensors: Tensor, blocks: int = 1, warps: int = 1, shared_bytes: int = 0, size: int = 0
) -> None:
    """Runs a kernel of a file on the twin. The kernel takes a pointer to each tensor, then the number `size`."""
    arguments = (*(ctypes.c_void_p(x.data_ptr()) for x in tensors), ctypes.c_int(size))
    Launch(str(path), kernel, blocks, warps, shared_bytes, {}, tensors, arguments).run()


# ----------------------------------------------------------------------------------------------------------- primitives

PRIMITIVES = """
#include "primitives.cuh"

template <class T>
DEVICE void round_all(Global<const float> from, Global<T> to, int size) {
    for (int i = thread_index(); i < size; i += 32) to[i] = rounded<T>(from[i]);
}
KERNEL(round_half)(Global<const float> from, Global<half> to, int size) { round_all(from, to, size); }
KERNEL(round_bfloat16)(Global<const float> from, Global<bfloat16> to, int size) { round_all(from, to, size); }
EXPORT(round_half)
EXPORT(round_bfloat16)

KERNEL(widen_half)(Global<const half> from, Global<float> to, int size) {
    for (int i = thread_index(); i < size; i += 32) to[i] = to_float(from[i]);
}
EXPORT(widen_half)

// c = a b: a [16, 16], b [16, 8], through shared memory, ldmatrix and mma.
KERNEL(multiply)(Global<const half> a, Global<const half> b, Global<float> c, int) {
    half* shared = reinterpret_cast<half*>(shared_memory());
    const int lane = lane_index();
    for (int i = lane; i < 48; i += 32)  // 16 bytes at a time: the rows of a, then those of b
        copy_async<16>(spot_of(shared + 8 * i), i < 32 ? a + 8 * i : b + 8 * (i - 32), true);
    copies_wait();
    barrier();
    Registers<unsigned, 4> left, right;
    ldmatrix(left, spot_of(shared + lane % 16 * 16 + lane / 16 * 8));
    ldmatrix_transposed(right, spot_of(shared + 256 + lane % 16 * 8));
    Registers<float, 4> sums;
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    mma<half>(sums, left, right[0], right[1]);
    for (int i = 0; i < 4; ++i) c[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
EXPORT(multiply)

KERNEL(reduce)(Global<const float> x, Global<float> sums, Global<float> maxima, int) {
    sums[thread_index()] = quad_sum(x[thread_index()]);
    maxima[thread_index()] = quad_maximum(x[thread_index()]);
}
EXPORT(reduce)
"""


@pytest.fixture(scope="module")
def primitives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a file with kernels that are one primitive each."""
    path = tmp_path_factory.mktemp("twin") / "primitives.cu"
    path.write_text(PRIMITIVES)
    return path


def floats() -> Tensor:
    """Makes numbers in float32 that are hard to round.

    They are every finite float16, the midpoints between neighbours, the numbers just beside the midpoints, and float32
    numbers from the smallest to the largest.
    """
    half = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    half = half[half.isfinite()]
    middle = (half[1:] + half[:-1]) / 2
    near = [middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(torch.inf))]
    every = torch.arange(0, 2**31 - 2**23, 65521, dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([half, *near, every, torch.tensor([65519.9, 65520.0, 65536.0, torch.inf, 3.4028234e38])])
    return torch.cat([numbers, -numbers])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_and_ties_to_even(primitives: Path, dtype: torch.dtype) -> None:
    """The result has the same bits as torch's rounding, for subnormal numbers, ties and overflow. A NaN stays NaN."""
    numbers = floats()
    found = torch.empty(len(numbers), dtype=dtype)
    run(primitives, "round_half" if dtype == torch.float16 else "round_bfloat16", numbers, found, size=len(numbers))
    assert torch.equal(found.view(torch.int16), numbers.to(dtype).view(torch.int16))
    nan = torch.empty(1, dtype=dtype)
    run(primitives, "round_half" if dtype == torch.float16 else "round_bfloat16", torch.tensor([NAN]), nan, size=1)
    assert nan.isnan().all()


def test_widening_is_exact(primitives: Path) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    found = torch.empty(len(every))
    run(primitives, "widen_half", every, found, size=len(every))
    assert torch.equal(found.isnan(), every.isnan())
    numbers = ~every.isnan()
    assert torch.equal(found[numbers], every.float()[numbers])


def test_a_product_of_matrices(primitives: Path) -> None:
    """Tests ldmatrix, its transposed form and mma in the layouts of the PTX manual. Small integers multiply exactly."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, shape, generator=generator).half() for shape in ((16, 16), (16, 8)))
    a, b = (x.clone() for x in (a, b))
    c = torch.full((16, 8), NAN)
    run(primitives, "multiply", a, b, c, shared_bytes=1024)
    assert torch.equal(c, a.float() @ b.float())


def test_reductions(primitives: Path) -> None:
    x, sums, maxima = torch.randperm(32).float(), torch.empty(32), torch.empty(32)
    run(primitives, "reduce", x, sums, maxima)
    assert torch.equal(sums, x.view(8, 4).sum(1).repeat_interleave(4))
    assert torch.equal(maxima, x.view(8, 4).amax(1).repeat_interleave(4))


# --------------------------------------------------------------------------------------------------------------- faults

FAULTS = """
#include "primitives.cuh"

#define FAULT(name) KERNEL(name)(Global<float> x, int size)
DEVICE float* numbers() { return reinterpret_cast<float*>(shared_memory()); }

FAULT(reads_past) { if (block_index() == 1 && thread_index() == 5) x[0] = x[size]; }
FAULT(writes_before) { x[thread_index() == 3 ? -1 : thread_index()] = 0.0f; }
FAULT(copies_past) { copy_async<4>(spot_of(numbers() + thread_index()), x + (size - 31 + thread_index()), true); \
copies_wait(); }
FAULT(copies_askew) { if (thread_index() == 0) copy_async<16>(spot_of(numbers()), x + 1, true); copies_wait(); }
FAULT(leaves_shared_memory) { write(numbers() + thread_index() + (thread_index() == 31), 1.0f); }
FAULT(some_at_a_barrier) { if (thread_index() < 40) barrier(); }
FAULT(warps_at_a_barrier) { if (warp_index() == 0) barrier(); }
FAULT(lanes_part) { if (thread_index() < 16) from_lane(1.0f, 0); else barrier(); }
FAULT(races) { write(numbers() + thread_index(), 1.0f); \
x[thread_index()] = read(numbers() + (thread_index() + 32) % 64); }
FAULT(overwrites) {
    write(numbers() + thread_index(), 1.0f);
    barrier();
    x[thread_index()] = read(numbers() + (thread_index() + 32) % 64);
    write(numbers() + thread_index(), 2.0f);
}
FAULT(lanes_at_two_barriers) {
    if (thread_index() < 16)
        barrier();
    else
        barrier();
}
FAULT(warps_at_two_barriers) {
    if (warp_index() == 0)
        barrier();
    else
        barrier();
}
FAULT(lanes_at_two_shuffles) {
    if (thread_index() < 16)
        x[thread_index()] = from_lane(1.0f, 0);
    else
        x[thread_index()] = from_lane(2.0f, 0);
}
FAULT(copies_twice) {
    copy_async<4>(spot_of(numbers() + thread_index()), x + thread_index(), true);
    copy_async<4>(spot_of(numbers() + thread_index()), x, true);
}
FAULT(reads_before_the_wait) { copy_async<4>(spot_of(numbers() + thread_index()), x, true); \
x[thread_index()] = read(numbers() + thread_index()); }
FAULT(writes_before_the_wait) { copy_async<4>(spot_of(numbers() + thread_index()), x, true); \
write(numbers() + thread_index(), 1.0f); }
FAULT(others_read_before_the_wait) {
    if (warp_index() == 0) copy_async<16>(spot_of(numbers() + 4 * thread_index()), x, true);
    barrier();
    if (warp_index() == 1) x[thread_index()] = read(numbers() + thread_index() - 32);
}
FAULT(reads_askew) { x[thread_index()] = \
Global<float>{reinterpret_cast<float*>(reinterpret_cast<char*>(x.pointer) + 2)}[0]; }
FAULT(register_past) {
    Registers<float, 4> registers;
    for (int i = 0; i < size / 16; ++i) registers[i + 1] = 1.0f;
}
FAULT(never_writes) { x[thread_index()] = read(numbers() + thread_index()); }
FAULT(never_sets) { Registers<float, 1> register_; x[thread_index()] = register_[0]; }
FAULT(is_right) {
    write(numbers() + thread_index(), x[thread_index()]);
    barrier();
    const float sum = read(numbers() + (thread_index() + 32) % 64) + 1.0f;
    for (int i = 0; i < 2; ++i) {  \
// a copy beside numbers that are read, waited for, and a place that another copy then takes
        copy_async<4>(spot_of(numbers() + 64 + thread_index()), x + thread_index(), true);
        if (read(numbers() + thread_index()) != x[thread_index()]) return;
        copies_wait();
        for (int j = 0; j < 2; ++j) barrier();
    }
    x[thread_index()] = sum;
}
DEVICE int partner() { return thread_index() ^ 32; }
FAULT(waits_alone) { if (warp_index() == 0) barrier_of<64>(1); }
FAULT(lanes_at_two_numbers) { barrier_of<64>(1 + lane_index() / 31); }
FAULT(warps_at_two_sizes) { if (warp_index() == 0) barrier_of<64>(1); else barrier_of<96>(1); }
FAULT(number_of_the_block) { barrier_of<64>(0); }
FAULT(number_past) { barrier_of<64>(16); }
FAULT(one_number_for_two_pairs) {
    write(numbers() + thread_index(), 1.0f);
    barrier_of<64>(1);
    x[thread_index() % 64] = read(numbers() + partner());
}
FAULT(reads_of_the_other_pair) {
    write(numbers() + thread_index(), 1.0f);
    barrier_of<64>(1 + warp_index() / 2);
    x[thread_index() % 64] = read(numbers() + (thread_index() ^ 64));
}
FAULT(overwrites_in_a_pair) {
    for (int i = 0; i < 2; ++i) {
        write(numbers() + thread_index(), 1.0f);
        barrier_of<64>(1 + warp_index() / 2);
        x[thread_index() % 64] = read(numbers() + partner());
    }
}
FAULT(overwrites_after_another_pair) {
    const float first = read(numbers());
    barrier_of<64>(1 + warp_index() / 2);
    if (thread_index() == 0) write(numbers(), first);
}
FAULT(pairs_are_right) {
    for (int i = 0; i < 2; ++i) {
        write(numbers() + thread_index(), x[thread_index()]);
        barrier_of<64>(1 + warp_index() / 2);
        const float other = read(numbers() + partner());
        barrier_of<64>(1 + warp_index() / 2);
        write(numbers() + partner(), other);  // all reads of the pair are over
        barrier();
        x[thread_index()] = read(numbers() + (thread_index() ^ 64));
        // Other pairs may take a number after a barrier of all. The last warp learns of the first one from the others.
        if (thread_index() == 0) write(numbers() + 128, 1.0f + i);
        if (warp_index() <= 1) barrier_of<64>(3);
        if (warp_index() >= 1 && warp_index() <= 2) barrier_of<64>(2);
        if (warp_index() >= 2) barrier_of<64>(4);
        if (thread_index() == 127) x[size] = read(numbers() + 128);
        barrier();
    }
}
EXPORT(waits_alone) EXPORT(lanes_at_two_numbers) EXPORT(warps_at_two_sizes) EXPORT(number_of_the_block) \
EXPORT(number_past) EXPORT(one_number_for_two_pairs) EXPORT(reads_of_the_other_pair) EXPORT(overwrites_in_a_pair) \
EXPORT(overwrites_after_another_pair) EXPORT(pairs_are_right)
EXPORT(reads_past) EXPORT(writes_before) EXPORT(copies_past) EXPORT(copies_askew) EXPORT(leaves_shared_memory) \
EXPORT(some_at_a_barrier)
EXPORT(warps_at_a_barrier) EXPORT(lanes_part) EXPORT(races) EXPORT(overwrites) EXPORT(never_writes) EXPORT(never_sets) \
EXPORT(is_right)
EXPORT(lanes_at_two_barriers) EXPORT(warps_at_two_barriers) EXPORT(lanes_at_two_shuffles) EXPORT(copies_twice) \
EXPORT(reads_before_the_wait)
EXPORT(writes_before_the_wait) EXPORT(others_read_before_the_wait) EXPORT(reads_askew) EXPORT(register_past)
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a file with kernels that have one fault each, and one kernel without a fault."""
    path = tmp_path_factory.mktemp("twin") / "faults.cu"
    path.write_text(FAULTS)
    return path


RACE = (
    r"reads offset \d+ of shared memory, which warp \d wrote since the last barrier of both"
    r"|writes offset \d+ of shared memory, which warp \d (read|wrote) since the last barrier of both"
)


@pytest.mark.parametrize(
    ("kernel", "warps", "shared_bytes", "words"),
    [
        ("reads_past", 1, 0, r"block 1, thread 5: .*in no tensor of the launch"),
        ("writes_before", 1, 0, r"block 0, thread 3: .*in no tensor of the launch"),
        ("copies_past", 1, 128, r"thread 31: .*in no tensor of the launch"),
        ("copies_askew", 1, 128, r"thread 0: 16 bytes of device memory .*not aligned"),
        ("reads_askew", 1, 0, r"thread 0: 4 bytes of device memory .*not aligned"),
        ("register_past", 1, 0, r"thread 0: register 4 of 4"),
        ("leaves_shared_memory", 1, 128, r"thread 31: 4 bytes at offset 128 of shared memory, which has 128"),
        ("some_at_a_barrier", 2, 0, r"at 'the kernel's end', where other lanes of its warp are at 'barrier'"),
        ("warps_at_a_barrier", 2, 0, r"1 of 2 warps wait at a barrier that the others never reach"),
        ("lanes_part", 1, 0, r"thread 16: at 'barrier', where other lanes of its warp are at 'shuffle'"),
        (
            "lanes_at_two_barriers",
            1,
            0,
            r"thread 16: at 'barrier' of line \d+, where other lanes of its warp are at that of line \d+",
        ),
        (
            "warps_at_two_barriers",
            2,
            0,
            r"thread 63: at the barrier of line \d+, where other warps wait at that of line \d+",
        ),
        (
            "lanes_at_two_shuffles",
            1,
            0,
            r"thread 16: at 'shuffle' of line \d+, where other lanes of its warp are at that of line \d+",
        ),
        ("copies_twice", 1, 128, r"thread 0: offset 0 of shared memory, to which a copy is on its way"),
        ("reads_before_the_wait", 1, 128, r"thread 0: offset 0 of shared memory, to which a copy is on its way"),
        ("writes_before_the_wait", 1, 128, r"thread 0: offset 0 of shared memory, to which a copy is on its way"),
        ("others_read_before_the_wait", 2, 512, r"offset \d+ of shared memory, to which a copy is on its way"),
        ("races", 2, 256, RACE),
        ("overwrites", 2, 256, RACE),
        ("waits_alone", 2, 0, r"1 of 2 warps wait at barrier 1 of line \d+, which the others never reach"),
        (
            "lanes_at_two_numbers",
            2,
            0,
            r"thread 31: at barrier 2 of 2 warps, where lane 0 of its warp is at barrier 1 of 2",
        ),
        ("warps_at_two_sizes", 2, 0, r"at barrier 1 of 3 warps, where other warps wait at it as one of 2"),
        ("number_of_the_block", 2, 0, r"at barrier 0, which is that of all warps"),
        ("number_past", 2, 0, r"at barrier 16, where a block has 16"),
        ("one_number_for_two_pairs", 4, 512, r"at barrier 1, which warp \d has passed without this warp"),
        ("reads_of_the_other_pair", 4, 512, RACE),
        ("overwrites_in_a_pair", 4, 512, RACE),
        ("overwrites_after_another_pair", 4, 512, RACE),
    ],
)
def test_a_fault_is_reported(faults: Path, kernel: str, warps: int, shared_bytes: int, words: str) -> None:
    with pytest.raises(CudaError, match=rf"({words}).*faults\.cu {kernel} <<<2, {32 * warps}, {shared_bytes}>>>"):
        run(faults, kernel, torch.zeros(64), blocks=2, warps=warps, shared_bytes=shared_bytes, size=64)


@pytest.mark.parametrize("kernel", ["never_writes", "never_sets"])
def test_what_was_not_written_is_nan(faults: Path, kernel: str) -> None:
    """Shared memory and registers hold NaN until they are written."""
    x = torch.zeros(32)
    run(faults, kernel, x, shared_bytes=128)
    assert x.isnan().all()


def test_a_right_kernel_passes(faults: Path) -> None:
    x = torch.arange(64.0)
    run(faults, "is_right", x, warps=2, shared_bytes=512)
    assert torch.equal(x, (torch.arange(64.0) + 32) % 64 + 1)


def test_right_pairs_pass(faults: Path) -> None:
    """Pairs of warps have barriers of their own. What a warp knows of others, it passes on."""
    x = torch.arange(129.0)
    run(faults, "pairs_are_right", x, warps=4, shared_bytes=1024, size=128)
    once = (torch.arange(128) ^ 64).float()
    assert torch.equal(x, torch.cat([once[torch.arange(128) ^ 64], torch.tensor([2.0])]))


@pytest.mark.parametrize(
    "body",
    [
        "float sum; for (int i = 0; i < size; ++i) sum += 1.0f; x[0] = sum;",
        "float sum; if (thread_index() < size) sum = x[0]; x[thread_index()] = sum;",
        "int next; if (size > 3) next = size / 2; x[next] = 0.0f;",
    ],
    ids=["sum", "branch", "index"],
)
def test_a_local_that_may_be_read_before_it_is_set(tmp_path: Path, body: str) -> None:
    """The compilation fails, because the twin cannot fill a local variable with NaN."""
    path = tmp_path / "local.cu"
    path.write_text(
        f'#include "primitives.cuh"\nKERNEL(local)(Global<float> x, int size) {{ {body} }}\nEXPORT(local)\n'
    )
    with pytest.raises(CudaError, match=r"(?s)C\+\+ compiler: .*local\.cu does not compile .*uninitialized"):
        run(path, "local", torch.zeros(64), size=64)


def test_arguments_of_another_size(faults: Path) -> None:
    """The types of the parameters of a kernel are written in Python, too. A difference raises an error, not a crash."""
    x = torch.zeros(32)
    with pytest.raises(CudaError, match=r"is_right: takes parameters of \[8, 4\] bytes, given \[8, 8\]"):
        Launch(str(faults), "is_right", 1, 1, 0, {}, (x,), (ctypes.c_void_p(x.data_ptr()), ctypes.c_longlong(1))).run()


# ------------------------------------------------------------------------------------------------------ what is missing


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason begins with the name of what is missing. The error of a call says the same."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(launching, "_twin", launching._twin.__wrapped__)
    assert str(launching.missing("cpu")).startswith("C++ compiler: none found")
    implementation = catalogue.load("cuda.fa2")
    assert implementation.missing("cpu") == launching.missing("cpu")
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(CudaError, match=r"C\+\+ compiler: none found"):
        implementation.attention(x, x, x)


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """The error contains the output of the compiler."""
    path = tmp_path / "wrong.cu"
    path.write_text("nonsense")
    with pytest.raises(
        CudaError,
        match=r"(?s)C\+\+ compiler: .*wrong\.cu does not compile for the CPU twin"
        r".*nonsense.*when loading .*wrong\.cu is_right <<<",
    ):
        run(path, "is_right", torch.zeros(32))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", r"does not say its version.*exit status 1"),
        (
            '[ "$1" = --version ] && exit 0; echo no such header >&2; exit 3',
            r"does not compile .*exit status 3.*no such header",
        ),
        ("exit 0", r"the compiler wrote nothing"),
    ],
    ids=["no-version", "fails", "writes-nothing"],
)
def test_a_compiler_that_is_none(
    primitives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """The program that CXX names may do anything. The result is always a CudaError."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(launching, "_twin", launching._twin.__wrapped__)
    with pytest.raises(CudaError, match=rf"(?s){words}.*when loading .*primitives\.cu reduce"):
        run(primitives, "reduce", torch.zeros(32))
