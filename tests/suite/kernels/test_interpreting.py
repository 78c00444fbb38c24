"""Tests that Triton's interpreter gives the same bits as without this project's changes to it.

The changes keep its descriptions of types, convert bfloat16 by shifts, and compute operators and Philox directly.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

tl = pytest.importorskip("triton.language", reason="Triton: not installed")

from flashproof.calling import attend  # noqa: E402
from flashproof.cases import Case  # noqa: E402
from flashproof.impls import catalogue  # noqa: E402
from flashproof.impls.triton.launching import Launch, _as_on_a_gpu  # noqa: E402
from flashproof.impls.triton.primitives import (  # noqa: E402
    INTERPRETED,
    UNIT,
    as_argument,
    first_word,
    head_of,
    kernel,
    place,
    this_program,
    tile_of,
)
from flashproof.tensors import inputs  # noqa: E402
from flashproof.tests.suite.command_line.test_catalogue import ROOT, loaded  # noqa: E402

# These cases reach all code of a kernel: whole and partial tiles, groups, a padded head dim, dropout. The second one is
# for kernels that take block masks.
CASES = ("b1 h2/1 q150 k70 d40 causal-br dropout0.2 {}", "b1 h2/1 q140 k150 d40 causal-br dropout0.2 blocks0.5 {}")

# The program of a process in which the interpreter stays unchanged, also while kernels are loaded.
UNKEPT = """
import contextlib
from flashproof.impls.triton import interpreting
interpreting.described_once = contextlib.nullcontext
from flashproof.tests.suite.kernels.test_interpreting import answers, keeps
assert not keeps()
print(*answers(), sep="\\n")
"""


def keeps() -> bool:
    """Whether the interpreter keeps descriptions while a kernel of this project runs."""
    with _as_on_a_gpu():
        return is_changed()


def is_changed() -> bool:
    """Whether Triton's interpreter is patched now."""
    return tl.block_type.__init__.__module__ == "flashproof.impls.triton.interpreting"


def answers() -> list[str]:
    """Runs the Triton kernels on the cases in two dtypes. Returns lines with a digest of each tensor."""
    lines = []
    for implementation in map(loaded, catalogue.names(["triton.*"])):
        if "cpu" not in implementation.supports.devices:
            continue
        for dtype in ("float32", "bfloat16"):
            case = Case.parse(CASES[implementation.supports.block_mask].format(dtype))
            answer = attend(implementation, case, inputs(case), backward=True)
            digests = {
                name: hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
                for name, x in answer.tensors.items()
            }
            lines.append(f"{implementation.name} {case} {digests}")
    return lines


pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="Triton: not interpreted")


@kernel
def offsets_kernel(query, query_strides, rows, offsets, heads, groups, queries):  # type: ignore[no-untyped-def]
    """Stores the distance, in bytes, from the first element of a tensor to another one.

    The position of the other element comes from `place`, from the number of the program, and from a loaded row.
    """
    _, head, batch = place(queries, heads, 16, False)
    start, _, _ = head_of(query, query_strides, batch, head, 16, 16, False)
    tl.store(offsets, start.to(tl.int64) - query.to(tl.int64))
    program = this_program()
    start, _, _ = head_of(query, query_strides, program // heads, program % heads, 16, 16, False)
    tl.store(offsets + 1, start.to(tl.int64) - query.to(tl.int64))
    row = tl.load(rows)
    corner = tl.min(tl.min(tile_of(head_of(query, query_strides, 0, 0, 16, 16, False), row).to(tl.int64), 1), 0)
    tl.store(offsets + 2, corner - query.to(tl.int64))


def test_addresses_have_64_bits() -> None:
    """Batch entries, heads and rows may begin at offsets that need more than 32 bits."""
    query, offsets = torch.zeros(1, dtype=torch.float16), torch.zeros(3, dtype=torch.int64)
    arguments = {
        "query": query,
        "query_strides": tuple(as_argument(stride // UNIT) for stride in (2**31 + 8, 2**30, 2**24)),
        "rows": torch.tensor([256], dtype=torch.int32),
        "offsets": offsets,
    }
    Launch(offsets_kernel, (8,), arguments | {"heads": 4, "groups": 1, "queries": 16}, num_warps=4, num_stages=1).run()
    of_the_last = 2 * (1 * (2**31 + 8) + 3 * 2**30)  # batch entry 1, head 3
    assert offsets.tolist() == [of_the_last, of_the_last, 2 * 256 * 2**24]


@kernel
def words_kernel(  # type: ignore[no-untyped-def]
    out,
    seed: tl.uint64,  # type: ignore[name-defined]
    QUERIES: tl.constexpr,  # type: ignore[name-defined]
    KEYS: tl.constexpr,  # type: ignore[name-defined]
):
    """Stores the first words of tl.philox [QUERIES, KEYS], those of `first_word`, and those of a transposed block."""
    row, column = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    # Positions from 0, and positions around 2^31, which have negative bits in 32 bits.
    key_at, query_at = column * 33554432 + column, row + 2147483584
    head = tl.load(out).to(tl.int32) + 5  # a value of the kernel; the batch is a plain number
    place = row * KEYS + column
    expected, _, _, _ = tl.philox(seed, key_at, query_at, head, 3)
    tl.store(out + place, expected.to(tl.int64))
    found = first_word(seed, key_at, query_at, head, 3)
    tl.store(out + QUERIES * KEYS + place, found.to(tl.int64))
    transposed = first_word(seed, tl.trans(key_at), tl.trans(query_at), head, 3)
    tl.store(out + 2 * QUERIES * KEYS + tl.trans(place), transposed.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**32 - 2, 2**32 + 1, 0xFEDC_BA98_7654_3210])
def test_words_are_those_of_triton(seed: int) -> None:
    out = torch.zeros(3, 128, 64, dtype=torch.int64)
    Launch(words_kernel, (1,), {"out": out, "seed": seed, "QUERIES": 128, "KEYS": 64}, num_warps=4, num_stages=1).run()
    expected, found, transposed = out
    assert expected.unique().numel() > 8000
    assert torch.equal(found, expected)
    assert torch.equal(transposed, expected)


def test_kept_descriptions_change_nothing() -> None:
    # This process has one thread, and so must the other: the sums of several threads differ.
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    unkept = subprocess.run(
        [sys.executable, "-c", UNKEPT], capture_output=True, text=True, cwd=ROOT, env=one_thread, check=False
    )
    assert unkept.returncode == 0, unkept.stderr
    assert keeps()
    assert unkept.stdout.splitlines() == answers()
    assert not is_changed()  # so kernels of other projects run in Triton's own interpreter


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton: compiles where there is a GPU")
@pytest.mark.parametrize(
    ("first", "missing"),
    [
        ("flashproof.impls.tiled.fa2", "None"),
        ("triton", "Triton: imported before flashproof chose its interpreter; set TRITON_INTERPRET=1"),
    ],
)
def test_triton_was_imported_before(first: str, missing: str) -> None:
    """Triton makes its own functions when it is imported. torch.compile imports it, too."""
    code = f"import {first}\nfrom flashproof.impls import catalogue\nprint(catalogue.load('triton.fa2').missing('cpu'))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.stdout == f"{missing}\n", done.stderr


def test_conversions_have_the_interpreters_bits() -> None:
    """Every bfloat16, and float32 numbers of all sizes, are converted as by the interpreter itself."""
    from triton.runtime import interpreter

    from flashproof.impls.triton.interpreting import _by_shifts

    every = np.arange(2**16, dtype=np.uint16)
    some = (np.arange(2**21, dtype=np.uint64) * 2039 % 2**32).astype(np.uint32)  # 2039 is prime
    formats = ((every, tl.bfloat16, tl.float32), (some, tl.float32, tl.bfloat16))
    for numbers, given, wanted in formats:
        for part in np.array_split(numbers, 1024):  # a part with subnormal numbers goes to the interpreter
            expected = interpreter._convert_float(part, given, wanted, None)
            found = _by_shifts(interpreter._convert_float)(part, given, wanted, None)
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


def _values(dtype: Any, elements: Sequence[float]) -> list[Any]:
    """A block [4, 4], a column, a row and a scalar of these 16 elements."""
    from triton.runtime import interpreter

    data = np.array(elements).astype(interpreter._get_np_dtype(dtype)).reshape(4, 4)
    blocks = [data, data.T, data[:, :1], data[:1]]
    values = [tl.tensor(interpreter.TensorHandle(x, dtype), tl.block_type(dtype, list(x.shape))) for x in blocks]
    return [*values, tl.tensor(interpreter.TensorHandle(data[1, 1:2], dtype), dtype)]


def _operands() -> dict[str, list[tuple[object, ...]]]:
    """The operands of every operator by its name, of types that are computed directly and of types that are not."""
    tiny, huge, inf, nan = 1e-40, 3e38, float("inf"), float("nan")
    floats = [nan, inf, -inf, -0.0, 0.0, 1.5, -1.5, tiny, -tiny, huge, -huge, 1.0, 2.5, 7.0, 0.1, 65520.0]
    integers = [0, 1, 2, 3, 5, 8, 13, 2**31 - 1, 9, 15, 16, 17, 31, 64, 100, 2**20]
    kinds: dict[Any, Sequence[float]] = {
        tl.float32: floats,
        tl.float16: floats,
        tl.int32: integers,
        tl.int64: integers,
        tl.uint32: integers,
    }
    values = [value for kind, elements in kinds.items() for value in _values(kind, elements)]
    booleans = _values(tl.int1, [True, False, False, True] * 4)
    numbers = [0, 1, -1, 3, 2**31 - 1, 2**31, True, 1.5, 0.0, -0.0, tiny, 1e39, inf, -inf, tl.constexpr(-inf)]
    pointers = _values(tl.pointer_type(tl.float32), [2.0**40 + 16 * number for number in integers])
    pairs = [(x, y) for x in values + booleans for y in [*values, *booleans, *numbers]]
    pairs += [(x, y) for x in pointers for y in [*values, *numbers]]
    few = [*values[:5], 0.0, -inf, 2]
    indices = [(slice(None), None), (None, slice(None)), (slice(None), slice(None), None), slice(None), None]
    matrices = _values(tl.float32, floats[3:] + floats[:3])[:2]
    return {
        "__getitem__": [(x, index) for x in [*values, *pointers, *booleans] for index in indices],
        "to": [(x, kind) for x in [*values, *booleans] for kind in (*kinds, tl.bfloat16)],
        "arange": [(0, 16), (16, 32), (3, 7), (0, 12), (4, 4), (0, tl.constexpr(64))],
        "dot": [(x, y, *acc) for x in matrices for y in matrices for acc in [(), (None,), (matrices[0],)]],
        "fma": [(x, y, z) for x in few for y in few for z in few],
        "where": [(condition, x, y) for condition in booleans for x in few for y in [*few, values[-1]]],
        # A shift of a signed integer changes its operands in the interpreter, so there are no signed ones.
        "__rshift__": [(x, y) for x in values[-5:] for y in [*values[-5:], 0, 1, 16, 1.5]],
        "load": [],  # `test_kept_descriptions_change_nothing` loads
        "": pairs,
    }


def _outcome(function: object, operands: tuple[object, ...]) -> object:
    """What an operator returns, with all its types, or the type of what it raises."""
    try:
        found = function(*operands)  # type: ignore[operator]
    except Exception as error:
        return type(error)
    data = np.ascontiguousarray(found.handle.data)
    return data.tobytes(), data.dtype, data.shape, found.type.name, found.handle.dtype.name


def test_operators_have_the_interpreters_bits() -> None:
    from triton.runtime import interpreter

    from flashproof.impls.triton.operators import OPERATORS

    scope = interpreter._patch_lang(words_kernel.fn)
    try:
        with np.errstate(all="ignore"):
            every = _operands()
            for owner, name, function in OPERATORS:
                if owner is interpreter.TensorDescHandle:
                    continue  # `test_kept_descriptions_change_nothing` loads through descriptors
                interpreted = getattr(owner, name)
                for operands in every.get(name, every[""]):
                    assert _outcome(function, operands) == _outcome(interpreted, operands), (name, operands)
    finally:
        scope.restore()
