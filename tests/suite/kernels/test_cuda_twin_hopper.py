"""Tests the Hopper part of the CPU twin (`twin_hopper.h`): mbarriers, bulk copies and products of a warpgroup.

Two kernels multiply small matrices. Their last argument selects a fault. Without a fault the products are exact. The
twin reports each fault with block and thread.
"""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashproof.impls.cuda import launching
from flashproof.impls.cuda.fa3 import Boxes, HopperLaunch
from flashproof.impls.cuda.launching import CudaError
from flashproof.tests.suite.oracles import tensor_core

# The faults of each kernel, and what the twin says about them.
FAULTS = {
    "multiply": {
        "NO_BARRIER_AFTER_CREATION": r"the mbarrier at offset 24576, which warp 0 created, without a barrier of the b",
        "NO_FENCE_AFTER_CREATION": r"thread 0: copies to the mbarrier at offset 24576, .* without barriers_created",
        "PRODUCER_IN_WRONG_PHASE": r"thread 0: waits for ever; warp 0, line \d+: for parity 0 .*offset 24584",
        "WORKER_IN_WRONG_PHASE": r"waits for ever; .*warp 4, line \d+: for parity 1 .*offset 24576 \(phase 1, ",
        "WORKER_IN_OLD_PHASE": r"waits at line \d+ for parity 0 .*offset 24576 once more: .* returns a phase early",
        "A_WARP_DOES_NOT_WAIT": r"thread 1\d\d: multiplies offset 0 of .*, to which a copy is on its way"
        "|thread 0: copies to offset 0 of .*, which warp 4 has read, before it has waited for that",
        "EXPECTS_MORE": r"waits for ever; .*0 of 1 arrivals missing, 16384 of 16400 bytes come",
        "EXPECTS_LESS": r"thread 0: copies bring 16384 bytes to the mbarrier at offset 24576, which expects 16368",
        "RELEASES_EARLY": r"thread 0: copies to offset 0 of .*, which warp \d has read, before it has waited for that",
        "WAITS_LATE": r"thread 0: copies to offset 0 of .*, which a product of warp \d is still reading",
        "RELEASES_FOR_OTHERS": r"thread 0: copies to offset \d+ of .*, which warp \d has read, before it has waited",
        "COPIES_FOR_NOBODY": r"the block ends while 8192 bytes are on their way to the mbarrier at offset 24576",
        "PINS_SUMS": r"thread \d+: uses the sums of a product before it has waited for the product",
        "READS_SUMS": r"thread \d+: uses a sum of a product before it has waited for the product",
        "WRITES_SUMS": r"thread 200: the sums of a product were written before the product was waited for",
        "DOES_NOT_BEGIN": r"a product on registers that may have been touched after the last products_begin",
        "DOES_NOT_WAIT": r"warp \d ends with products that it has not waited for",
        "OTHER_SWIZZLE": r"a descriptor of swizzle 2, where tiles have the swizzle of 128 bytes, 1",
        "OTHER_DISTANCE": r"a descriptor that does not match its tile: at offset 87\d\d it has row 4 .* row 8 ",
        "BEYOND_THE_TILE": r"a descriptor that does not match its tile: at offset 8192 it has row 0 .* row 64 ",
        "WARPS_DIFFER": r"a product that differs from that of another warp of its warpgroup",
        "TOO_MANY_REGISTERS": r"waits for ever.*; warp \d: for \d+ registers for a thread, of which \d+ are spare",
    },
    "exchange": {
        "READS_EARLY": r"thread 0: reads offset 0 of shared memory, to which a copy is on its way",
        "WRITES_EARLY": r"thread \d+: writes offset \d+ of shared memory, to which a copy is on its way",
        "NO_FENCE": r"multiplies offset \d+ of shared memory, which warp \d wrote without shared_written",
        "NO_BARRIER": r"multiplies offset \d+ of shared memory, which warp \d wrote, before it has waited for that",
        "CHANGES_LEFT": r"thread 3: the left operand of a product changed before the product was waited for",
    },
}

KERNELS = """
#include "hopper.cuh"

enum { NONE, NAMES };
constexpr int LEFT = 0, RIGHT = 8192, WRITTEN = 16384, FULL = 24576, EMPTY = FULL + 8, ROUNDS = 3;

DEVICE void store(Global<float> c, const float (&sums)[32]) {
    for (int i = 0; i < 32; ++i) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        c[row * 64 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = sums[i];
    }
}

// c = a b^T, with a and b [64, 192]. Warpgroup 0 copies tiles of 64 columns, and warpgroup 1 multiplies.
extern "C" __global__ void __launch_bounds__(256)
    multiply(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Global<float> c, int fault) {
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared_memory()));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_create(memory + FULL, 1);
        barrier_create(memory + EMPTY, fault == RELEASES_FOR_OTHERS ? 1 : 4);
        if (fault != NO_FENCE_AFTER_CREATION) barriers_created();
    }
    if (fault != NO_BARRIER_AFTER_CREATION) __syncthreads();
    if (warp < 4) {
        if (fault != TOO_MANY_REGISTERS) registers_reduce<96>();
        if (threadIdx.x > 0) return;
        for (int round = 0; round < ROUNDS; ++round) {
            barrier_wait(memory + EMPTY, (round + (fault != PRODUCER_IN_WRONG_PHASE)) % 2);
            const int wrong = fault == EXPECTS_MORE ? 16 : fault == EXPECTS_LESS ? -16 : 0;
            barrier_arrive_expecting(memory + FULL, 16384 + wrong);
            copy_box(memory + LEFT, a, memory + FULL, 64 * round, 0, 0, 0);
            copy_box(memory + RIGHT, b, memory + FULL, 64 * round, 0, 0, 0);
        }
        if (fault != COPIES_FOR_NOBODY) return;
        copy_box(memory + WRITTEN, a, memory + FULL, 0, 0, 0, 0);
        return;
    }
    registers_increase<256>();
    float sums[32];
    for (int round = 0; round < ROUNDS; ++round) {
        const int parity = fault == WORKER_IN_OLD_PHASE ? 0 : (round + (fault == WORKER_IN_WRONG_PHASE)) % 2;
        if (fault != A_WARP_DOES_NOT_WAIT || warp != 4 || round < ROUNDS - 1)
            barrier_wait(memory + FULL, parity);
        if (fault != DOES_NOT_BEGIN || round == 0) products_begin();
        for (int column = 0; column < 64; column += 16) {
            Matrix left = ahead(matrix(memory + LEFT), 2 * column), right = ahead(matrix(memory + RIGHT), 2 * column);
            if (fault == OTHER_SWIZZLE) right ^= 3ull << 62;
            if (fault == OTHER_DISTANCE) right ^= 96ull << 32;  // 512 bytes instead of 1024
            if (fault == BEYOND_THE_TILE) left = ahead(left, 1024);
            if (fault == WARPS_DIFFER && warp == 5) right = left;
            Product<64>::shared<0, 0>(sums, left, right, round + column > 0);
        }
        products_end();
        const bool early = fault == RELEASES_EARLY || fault == WAITS_LATE;
        if (early && lane == 0) barrier_arrive(memory + EMPTY);
        if (fault == WAITS_LATE) barrier_wait(memory + FULL, (round + 1) % 2);
        if (fault == PINS_SUMS) pin(sums);
        if (fault == READS_SUMS) sums[1] = exp2_of(-sums[0]);
        if (fault == WRITES_SUMS && threadIdx.x == 200) sums[5] = 0.0f;
        if (fault != DOES_NOT_WAIT || round < ROUNDS - 1) products_wait<0>();
        if (!early && lane == 0 && (fault != RELEASES_FOR_OTHERS || warp == 7)) barrier_arrive(memory + EMPTY);
    }
    if (fault != DOES_NOT_WAIT) store(c, sums);
}
EXPORT(multiply)

// c = p b^T, p b and p^T b, with b [64, 64] and p [64, 64]. The threads write p to shared memory.
extern "C" __global__ void __launch_bounds__(128)
    exchange(const __grid_constant__ TensorMap p, const __grid_constant__ TensorMap b, Global<float> c, int fault) {
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared_memory()));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_create(memory + FULL, 1);
        barriers_created();
        barrier_arrive_expecting(memory + FULL, 16384);
        copy_box(memory + LEFT, p, memory + FULL, 0, 0, 0, 0);
        copy_box(memory + RIGHT, b, memory + FULL, 0, 0, 0, 0);
        if (fault == READS_EARLY) load_two(memory + LEFT);
    }
    __syncthreads();
    if (fault != WRITES_EARLY) barrier_wait(memory + FULL, 0);
    unsigned left[16];  // the warp's 16 rows of p, for each 16 columns as in a left operand
    for (int i = 0; i < 16; ++i) {
        const int row = warp * 16 + lane / 4 + i % 2 * 8, column = i / 4 * 16 + lane % 4 * 2 + i / 2 % 2 * 8;
        const Address at = memory + LEFT + row * 128 + ((column / 8 ^ row % 8) << 4) + column / 4 % 2 * 8;
        const float2 four = fault == WRITES_EARLY ? float2{} : load_two(at);
        const float two = column % 4 ? four.y : four.x;
        memcpy(&left[i], &two, 4);
    }
    for (int column = 0; column < 64; column += 16) {
        const int row = warp * 16 + lane % 16, piece = column / 8 + lane / 16;
        const int place = fault == WRITES_EARLY ? LEFT : WRITTEN;
        store_matrices(memory + place + row * 128 + ((piece ^ row % 8) << 4), left + column / 4);
    }
    if (fault != NO_FENCE) shared_written();
    if (fault != NO_BARRIER || warp > 0) __syncthreads();
    float sums[3][32];
    products_begin();
    for (int i = 0; i < 64; i += 16) {
        const Matrix written = matrix(memory + WRITTEN), right = matrix(memory + RIGHT);
        Product<64>::shared<0, 0>(sums[0], ahead(written, 2 * i), ahead(right, 2 * i), i > 0);
        if (i == 0)
            for (float& sum : sums[1]) sum = 0.0f;
        Product<64>::registers<1>(sums[1], left + i / 4, ahead(right, 128 * i));
        Product<64>::shared<1, 1>(sums[2], ahead(written, 128 * i), ahead(right, 128 * i), i > 0);
    }
    products_end();
    if (fault == CHANGES_LEFT && threadIdx.x == 3) left[6] ^= 1;
    products_wait<0>();
    for (int i = 0; i < 3; ++i) store(c + 4096 * i, sums[i]);
}
EXPORT(exchange)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the file of the two kernels. Skips with the reason if the compiler of the host is missing."""
    if reason := launching.missing("cpu"):
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("twin") / "hopper.cu"
    path.write_text(KERNELS.replace("NAMES", ", ".join(fault for faults in FAULTS.values() for fault in faults)))
    return path


def run(path: Path, kernel: str, left: Tensor, right: Tensor, fault: str = "NONE", **constants: int) -> Tensor:
    """Returns what a kernel computes of two matrices, which it reads in boxes of 64 rows and 64 columns."""
    c = torch.full((3, 64, 64), float("nan"))
    number = ["NONE", *(fault for faults in FAULTS.values() for fault in faults)].index(fault)
    boxes = (Boxes(left[None, None], 64), Boxes(right[None, None], 64))
    arguments = (*boxes, ctypes.c_void_p(c.data_ptr()), ctypes.c_int(number))
    warps = 8 if kernel == "multiply" else 4
    HopperLaunch(str(path), kernel, 1, warps, 24592, {"BF16": 0} | constants, (left, right, c), arguments).run()
    return c


def integers(rows: int, columns: int, seed: int) -> Tensor:
    """Makes small integers, whose products and sums are exact."""
    return torch.randint(-4, 5, (rows, columns), generator=torch.Generator().manual_seed(seed)).half()


def padded(x: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(x.float(), (0, columns - x.shape[1], 0, 64 - x.shape[0]))


@pytest.mark.parametrize(("rows", "columns"), [(64, 192), (50, 168), (3, 8)])
def test_tiles_are_copied_and_multiplied(path: Path, rows: int, columns: int) -> None:
    """Three tiles pass through one place. What lies outside the tensor arrives as 0."""
    a, b = integers(rows, columns, 1), integers(64, columns, 2)
    assert torch.equal(run(path, "multiply", a, b)[0], padded(a, 192) @ padded(b, 192).T)


def test_products_in_every_form(path: Path) -> None:
    """The left factor is in shared memory, by rows or by columns, or in registers. So is the right one, or by rows."""
    p, b = integers(64, 64, 3), integers(64, 64, 4)
    wide, right = p.float(), b.float()
    assert torch.equal(run(path, "exchange", p, b), torch.stack([wide @ right.T, wide @ right, wide.T @ right]))


@pytest.mark.parametrize(("low", "high"), [(-6, 7), (-60, 60), (-133, -60), (-133, 60)])
def test_sums_are_cut_off_as_by_a_tensor_core(path: Path, low: int, high: int) -> None:
    """With TRUNCATES, twelve steps have the bits of the emulation, also where numbers and sums are subnormal."""
    generator = torch.Generator().manual_seed(high)

    def numbers() -> Tensor:
        powers = torch.randint(low, high, (64, 192), generator=generator).float()
        kept = torch.rand(64, 192, generator=generator) < 0.9
        return (torch.randn(64, 192, generator=generator) * torch.exp2(powers) * kept).bfloat16()

    a, b = numbers(), numbers()
    total = torch.zeros(64, 64, dtype=torch.float64)
    for first in range(0, 192, tensor_core.STEP):
        step = slice(first, first + tensor_core.STEP)
        total = tensor_core.step(a[:, step].double(), b[:, step].double().T, total)
    assert torch.equal(run(path, "multiply", a, b, BF16=1, TRUNCATES=1)[0], total.float())


@pytest.mark.parametrize(("kernel", "fault"), [(kernel, fault) for kernel in FAULTS for fault in FAULTS[kernel]])
def test_a_fault_is_reported(path: Path, kernel: str, fault: str) -> None:
    """The error names block, thread and launch."""
    words = rf"block 0, thread \d+: .*of .*hopper\.cu {kernel} <<<1, "
    with pytest.raises(CudaError, match=words) as error:
        run(path, kernel, integers(64, 192, 1), integers(64, 192, 2), fault)
    assert error.match(FAULTS[kernel][fault])
