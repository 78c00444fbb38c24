"""Tests the e4m3 part of the CPU twin: rounding, products and single numbers in shared memory.

Primitives must have the bits of an H200, as far as other tests hold the emulation to it. `cuda.fa3_fp8` must be inside
its bound on the twin, and mutants of it must be rejected.
"""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashproof.calling import TensorName
from flashproof.impls.cuda import fa3_fp8, launching
from flashproof.impls.cuda.fa3 import Boxes, HopperLaunch
from flashproof.impls.cuda.launching import CudaError
from flashproof.judging import exact_of, judge_tensor
from flashproof.oracles.problem import Problem
from flashproof.subject import FORWARD
from flashproof.tests.suite.kernels.test_cuda_twin import floats
from flashproof.tests.suite.oracles import tensor_core, test_e4m3
from flashproof.tests.suite.oracles.features import problem_of

pytestmark = pytest.mark.skipif(launching.missing("cpu") is not None, reason=launching.missing("cpu") or "")


# ----------------------------------------------------------------------------------------------------------- primitives

PRIMITIVES = """
#include "e4m3.cuh"

extern "C" __global__ void __launch_bounds__(32) round_four(Global<const float> from, Global<unsigned> to, int size) {
    for (int i = threadIdx.x; i < size / 4; i += 32)
        to[i] = pack_four(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
}
EXPORT(round_four)

// The matrices c[0] = a b^T and c[1] = a b^T, with a and b [64, 128]. The left factor of c[1] is in registers.
extern "C" __global__ void __launch_bounds__(128)
    multiply(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Global<float> c, int) {
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared_memory()));
    constexpr int LEFT = 0, RIGHT = 8192, FULL = 16384;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 + lane / 4;
    if (threadIdx.x == 0) {
        barrier_create(memory + FULL, 1);
        barriers_created();
        barrier_arrive_expecting(memory + FULL, 16384);
        copy_box(memory + LEFT, a, memory + FULL, 0, 0, 0, 0);
        copy_box(memory + RIGHT, b, memory + FULL, 0, 0, 0, 0);
    }
    __syncthreads();
    barrier_wait(memory + FULL, 0);
    unsigned left[16];  // four registers for each 32 columns
    for (int i = 0; i < 16; ++i) {
        const int row = first_row + i % 2 * 8, column = i / 4 * 32 + lane % 4 * 4 + i / 2 % 2 * 16;
        const float2 eight = load_two(memory + LEFT + row * 128 + ((column / 16 ^ row % 8) << 4) + column % 16 / 8 * 8);
        const float four = column % 8 ? eight.y : eight.x;
        memcpy(&left[i], &four, 4);
    }
    float sums[2][32];
    products_begin();
    for (int i = 0; i < 128; i += 32) {
        const Matrix right = ahead(matrix(memory + RIGHT), i);
        ProductE4m3<64>::shared(sums[0], ahead(matrix(memory + LEFT), i), right, i > 0);
        ProductE4m3<64>::registers(sums[1], left + i / 8, right, i > 0);
    }
    products_end();
    products_wait<0>();
    for (int i = 0; i < 64; ++i) {
        const int row = first_row + i / 2 % 2 * 8, column = i % 32 / 4 * 8 + lane % 4 * 2 + i % 2;
        c[i / 32 * 4096 + row * 64 + column] = sums[i / 32][i % 32];
    }
}
EXPORT(multiply)

// Warp 0 stores two numbers, and warp 1 one beside them. Then warp 1 reads those of warp 0.
enum { NONE, NO_BARRIER, NOT_WRITTEN, AMONG_OTHERS, WRITTEN_WHILE_READ };
extern "C" __global__ void __launch_bounds__(64) exchange(Global<float> c, int fault) {
    const Address memory = static_cast<Address>(__cvta_generic_to_shared(shared_memory()));
    const int warp = threadIdx.x / 32;
    const bool first = threadIdx.x % 32 == 0;
    if (first) store_float(memory + 4 * (1 + warp), 1.0f + warp);
    if (first && warp == 0) store_float(memory + 12, 3.0f);
    if (fault != NO_BARRIER) __syncthreads();
    if (!first) return;
    if (warp == 0) {
        if (fault == WRITTEN_WHILE_READ) store_float(memory + 8, 4.0f);
        return;
    }
    if (fault == AMONG_OTHERS) load_two(memory + 8);
    c[0] = load_float(memory + 4) + 10.0f * load_float(memory + 12);
    if (fault == NOT_WRITTEN) load_float(memory);
    if (fault == WRITTEN_WHILE_READ) load_float(memory + 8);
}
EXPORT(exchange)
"""

FAULTS = {
    "NO_BARRIER": r"thread 32: reads offset 4 of shared memory, which warp 0 wrote, before it has waited for that",
    "NOT_WRITTEN": r"thread 32: reads offset 0 of shared memory, where nothing has been written",
    "AMONG_OTHERS": r"thread 32: reads offset 8 of shared memory, where single numbers are",
    "WRITTEN_WHILE_READ": r"thread 32: reads offset 8 of shared memory, which warp 0 wrote, before it has waited"
    "|thread 0: writes offset 8 of shared memory, which warp 1 has read, before it has waited for that",
}


@pytest.fixture(scope="module")
def primitives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a file with kernels that use the primitives."""
    path = tmp_path_factory.mktemp("twin") / "e4m3.cu"
    path.write_text(PRIMITIVES)
    return path


def run(path: Path, kernel: str, warps: int, tensors: tuple[Tensor, ...], *boxes: Boxes, last: int = 0) -> None:
    """Runs a kernel that takes boxes, pointers to the other tensors and a last number."""
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in tensors[len(boxes) :])
    arguments = (*boxes, *pointers, ctypes.c_int(last))
    HopperLaunch(str(path), kernel, 1, warps, 16400, {"BF16": 0}, tensors, arguments).run()


def test_rounding_is_to_nearest_and_ties_to_even(primitives: Path) -> None:
    """All numbers have the bits of torch's rounding. A number above 448 becomes 448, also infinity. A NaN stays NaN."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (every[1:] + every[:-1]) / 2
    numbers = torch.cat([every, middle, -middle, floats()])
    numbers = numbers[: len(numbers) // 4 * 4]
    found = torch.empty(len(numbers), dtype=torch.uint8)
    run(primitives, "round_four", 1, (numbers, found), last=len(numbers))
    expected = numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(found, expected)
    run(primitives, "round_four", 1, (torch.tensor([torch.nan] * 4), found), last=4)
    assert found[:4].tolist() == [127] * 4


def some_numbers(seed: int) -> Tensor:
    """Makes a matrix [64, 128] of e4m3 numbers."""
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def products(path: Path, a: Tensor, b: Tensor) -> Tensor:
    """Returns a b^T of the twin, from shared memory and from registers."""
    c = torch.full((2, 64, 64), torch.nan)
    inputs = tuple(x.view(torch.uint8)[None, None] for x in (a, b))
    run(path, "multiply", 4, (*inputs, c), *(Boxes(x, 64) for x in inputs))
    return c


@pytest.mark.parametrize("spread", [0.0, 4.0, 9.0])
def test_products_have_the_bits_of_the_emulation(primitives: Path, spread: float) -> None:
    """An H200 and the emulation give the same bits: see test_cuda_fa3_fp8.py. Large spreads have subnormal numbers."""
    generator = torch.Generator().manual_seed(int(spread))
    powers = torch.exp2(torch.linspace(-spread, 0.8 * spread, 128).round())
    a, b = (
        (torch.randn(64, 128, generator=generator) * powers.roll(41 * i)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        for i in range(2)
    )
    b[5], a[7, 3] = 0.0, 0.0
    expected = tensor_core.product_of_e4m3(a.float(), b.float().T)
    for found in products(primitives, a, b):
        assert torch.equal(found, expected)


def test_a_nan_stays_in_its_row_or_column(primitives: Path) -> None:
    a, b = (some_numbers(seed) for seed in (1, 2))
    a[3, 40], b[9, 100] = torch.nan, torch.nan
    expected = tensor_core.product_of_e4m3(a.float().nan_to_num(), b.float().nan_to_num().T)
    expected[3], expected[:, 9] = torch.nan, torch.nan
    for found in products(primitives, a, b):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_what_lies_outside_a_tensor_is_copied_as_0(primitives: Path) -> None:
    """A panel has 128 columns of e4m3. The tensors have fewer rows and columns."""
    a, b = (some_numbers(seed)[:50, :80].contiguous() for seed in (1, 2))
    padded = (torch.nn.functional.pad(x.float(), (0, 48, 0, 14)) for x in (a, b))
    left, right = padded
    assert torch.equal(products(primitives, a, b)[0], tensor_core.product_of_e4m3(left, right.T))


def test_warps_exchange_single_numbers(primitives: Path) -> None:
    """Four numbers share 16 bytes. Each of them is watched by itself."""
    c = torch.zeros(1)
    run(primitives, "exchange", 2, (c,))
    assert c.item() == 31.0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_with_single_numbers_is_reported(primitives: Path, fault: str) -> None:
    with pytest.raises(CudaError, match=FAULTS[fault]):
        run(primitives, "exchange", 2, (torch.zeros(1),), last=1 + list(FAULTS).index(fault))


# -------------------------------------------------------------------------------------------------- kernels and mutants


def attended(problem: Problem) -> dict[TensorName, Tensor]:
    causal: dict[str, Any] = {"is_causal": True, "causal_alignment": problem.mask.causal} if problem.mask.causal else {}
    answer: Any = fa3_fp8.attention(
        *(problem.query, problem.key, problem.value),
        **causal,
        scale=problem.scale,
        enable_gqa=problem.groups > 1,
        return_lse=True,
    )
    return dict(zip(FORWARD, answer, strict=True))


def rejected(problem: Problem) -> set[TensorName]:
    """Returns the tensors that are outside the bound."""
    answer, truth = attended(problem), exact_of(problem, fa3_fp8.arithmetic("float16", "cpu"), backward=False)
    return {name for name in FORWARD if not judge_tensor(answer[name], name, truth).passed}


LINES = [
    "b1 h2/1 q140 k140 d128 causal bfloat16",
    "b1 h1 q150 k40 d64 causal-br float16",  # the first rows see no key
    "b1 h1 q20 k1 d64 bfloat16",
    "b1 h1 q60 k150 d64 spike x30 float16",
    "b1 h1 q60 k150 d40 ties scale-0.3 float16",
]


@pytest.mark.parametrize("line", LINES)
def test_the_kernels_are_inside_their_bound(line: str) -> None:
    """A few cases. A run of the checks has many more."""
    assert not rejected(problem_of(line))


class Mutant(NamedTuple):
    """Replacements (file, old, new) in the sources, where MUTANT is whether the mutant is asked for.

    says: what the twin reports; "" if the mutant is rejected by its results.
    """

    patches: list[tuple[str, str, str]]
    says: str = ""


MUTANTS = {
    "another swizzle": Mutant(
        [("hopper.cuh", "swizzle = 1;", "swizzle = MUTANT ? 2 : 1;")], r"a descriptor of swizzle 2"
    ),
    "keys multiplied by other columns of the queries": Mutant(
        [("fa3_fp8.cu", "ahead(k, column)", "ahead(k, MUTANT ? column / 2 : column)")]
    ),
    "weights multiplied by other values": Mutant([("fa3_fp8.cu", "p + key / 8", "p + (MUTANT ? key / 16 : key / 8)")]),
    "values in the order of the keys": Mutant(
        [
            (
                "fa3_fp8.cu",
                "lane % 4 * 2 + i / 2 * 8 + i % 2",
                "(MUTANT ? lane % 4 * 4 + i : lane % 4 * 2 + i / 2 * 8 + i % 2)",
            )
        ]
    ),
    "keys with the scale of another block": Mutant(
        [("fa3_fp8.cu", "scales.key[first + tile - 1]", "scales.key[first + tile - (MUTANT ? 0 : 1)]")]
    ),
    "values without their scale": Mutant(
        [
            (
                "fa3_fp8.cu",
                "= scale_of_slot() * 0x1p-8f;\n        products_wait<1>();",
                "= (MUTANT ? 1.0f : scale_of_slot()) * 0x1p-8f;\n        products_wait<1>();",
            )
        ]
    ),
    "scales that are half as large": Mutant([("fa3_fp8.cu", "- 127 - 8", "- 127 - (MUTANT ? 9 : 8)")]),
    "a product that is not rescaled": Mutant(
        [
            (
                "fa3_fp8.cu",
                "{factor * x.rows.rescale[0], factor * x.rows.rescale[1]}",
                "{factor * (MUTANT ? 1.0f : x.rows.rescale[0]), factor * (MUTANT ? 1.0f : x.rows.rescale[1])}",
            )
        ]
    ),
    "a mask that shows one key more": Mutant(
        [("fa3_fp8.cu", "problem.offset + 1;", "problem.offset + (MUTANT ? 2 : 1);")]
    ),
    "a producer in the wrong phase": Mutant(
        [
            (
                "fa3_fp8.cu",
                "SLOT_EMPTY + 8 * slot.place(), slot.parity() ^ 1)",
                "SLOT_EMPTY + 8 * slot.place(), slot.parity() ^ !MUTANT)",
            )
        ],
        r"waits for ever",
    ),
    "workers in the wrong phase": Mutant(
        [
            (
                "fa3_fp8.cu",
                "SLOT_FULL + 8 * slot.place(), slot.parity())",
                "SLOT_FULL + 8 * slot.place(), slot.parity() ^ MUTANT)",
            )
        ],
        r"waits for ever",
    ),
    "scores that are read too early": Mutant(
        [("fa3_fp8.cu", "products_wait<1>();  // the scores", "if (!MUTANT) products_wait<1>();  // the scores")],
        r"uses the sums of a product before it has waited for the product",
    ),
    "keys that are released too early": Mutant(
        [
            (
                "fa3_fp8.cu",
                "slot.next();\n        wait_for_slot();",
                "slot.next();\n        if (MUTANT) release(keys_place);\n        wait_for_slot();",
            ),
            (
                "fa3_fp8.cu",
                "        release(keys_place);\n        const",
                "        if (!MUTANT) release(keys_place);\n        const",
            ),
        ],
        r"(copies to|writes) offset \d+ of shared memory, which (a product of )?warp \d+ (is still reading|has read)",
    ),
    "a scale that comes after its tile": Mutant(
        [
            ("fa3_fp8.cu", "        store_float(memory", "        if (!MUTANT) store_float(memory"),
            (
                "fa3_fp8.cu",
                "        copy_box(to, tensor, full, column, row, head, batch);\n",
                "        copy_box(to, tensor, full, column, row, head, batch);\n"
                "        if (MUTANT) store_float(memory + SCALES + 4 * slot.place(), scale);\n",
            ),
        ],
        r"reads offset \d+ of shared memory, (where nothing has been written|which warp 0 wrote, before it has waited)",
    ),
}


@cache
def problems() -> list[Problem]:
    """Returns the problems that reject mutants. In the first one, scales differ and the ring of tiles goes round."""
    first = test_e4m3.with_blocks("b1 h1 q100 k600 d64 float16")
    return [first, problem_of("b1 h1 q140 k300 d64 causal x4 float16")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the sources and adds all mutants. The variable DROPOUT of the twin, which is free here, selects one.

    So the compiler runs once for all mutants.
    """
    folder = tmp_path_factory.mktemp("mutants") / "cuda"
    shutil.copytree(launching.FOLDER, folder)
    for number, (patches, _) in enumerate(MUTANTS.values(), 1):
        for file, old, new in patches:
            text = (folder / file).read_text()
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
            (folder / file).write_text(text.replace(old, new.replace("MUTANT", f"(DROPOUT == {number})")))
    return folder


@pytest.fixture
def select(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Returns a function that replaces the kernels by a mutant, or by the kernel itself from the same library."""
    chosen = {"DROPOUT": 0}
    run_launch = HopperLaunch.run

    def run_mutant(launch: HopperLaunch) -> None:
        run_launch(replace(launch, constants={**launch.constants, **chosen}))

    def choose(name: str) -> None:
        chosen["DROPOUT"] = ["", *MUTANTS].index(name)

    monkeypatch.setattr(launching, "FOLDER", folder)
    monkeypatch.setattr(HopperLaunch, "run", run_mutant)
    launching._twin.cache_clear()
    yield choose
    launching._twin.cache_clear()


def test_the_mutants_are_mutants_of_a_right_kernel(select: Callable[[str], None]) -> None:
    select("")
    assert not any(map(rejected, problems()))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(name: str, select: Callable[[str], None]) -> None:
    """The twin reports a fault, or the results are outside the bound."""
    select(name)
    if says := MUTANTS[name].says:
        with pytest.raises(CudaError, match=says):
            attended(problems()[0])
    else:
        assert any(map(rejected, problems()))
