"""Tests the forms of a layout, of an address and of an output gradient. The seed of a case chooses among them."""

from typing import get_args

import pytest
import torch

from flashproof.cases import Case, Layout
from flashproof.tensors import FORMS, inputs, tensors_of


def strides(words: str) -> set[tuple[int, ...]]:
    """The strides of the queries over some seeds. Their numbers are those of contiguous queries."""
    found = set()
    for seed in range(6):
        given, plain = (inputs(Case.parse(f"b2 h3 q4 k4 d8 float16 {each} seed{seed}")) for each in (words, ""))
        assert torch.equal(given.query, plain.query)
        found.add(given.query.stride())
    return found


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("contiguous", {(96, 32, 8, 1)}),
        ("q.transposed", {(96, 8, 24, 1), (120, 8, 24, 1)}),
        ("q.length-first", {(24, 8, 48, 1)}),
        ("q.columns", {(96, 32, 1, 4), (120, 40, 1, 5)}),
        ("q.wider", {(192, 64, 16, 1), (192, 32, 8, 1)}),
        ("q.wider q.offset", {(108, 36, 9, 1)}),  # every row begins at another offset
    ],
)
def test_the_forms_of_a_layout(layout: str, expected: set[tuple[int, ...]]) -> None:
    assert strides("" if layout == "contiguous" else layout) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offset_is_of_one_element_or_of_8_or_16_bytes(dtype: str) -> None:
    size = 4 if dtype == "float32" else 2
    addresses = {
        inputs(Case.parse(f"b1 h1 q4 k4 d8 {dtype} v.offset seed{seed}")).value.storage_offset() * size % 64
        for seed in range(FORMS)
    }
    assert addresses == {size, 8, 16}


def test_the_loss_leaves_out_single_groups_of_rows_or_a_prompt() -> None:
    def zero_rows(seed: int, sequence: int = 0) -> list[int]:
        dout = inputs(Case.parse(f"b2 h1 q40 k40 d8 float32 do.somerows seed{seed}")).dout
        return [row for row in range(40) if not dout[sequence, 0, row].any()]

    assert zero_rows(seed=4) == [*range(16, 32)]
    assert zero_rows(seed=5) == [*range(30)]
    assert zero_rows(seed=5, sequence=1) == [*range(15)]


@pytest.mark.parametrize("queries", [8, 100, 4096, 16384])
def test_the_sum_of_a_large_pooled_gradient_fits_in_float16(queries: int) -> None:
    """With one key, dV is this sum."""
    dout = inputs(Case.parse(f"b1 h4 q{queries} k1 d8 float16 do.large do.pooled")).dout
    largest = dout.float().sum(dim=2).abs().max()
    assert 1024.0 < largest < torch.finfo(torch.float16).max


@pytest.mark.parametrize("layout", [layout for layout in get_args(Layout) if layout not in ("pooled", "summed")])
def test_forms_repeat(layout: Layout) -> None:
    """Calls that fill the same tensors with other numbers take them from a seed of the same forms."""

    def forms(seed: int) -> list[tuple[object, ...]]:
        case = Case(queries=4, keys=6, heads=3, seed=seed, layouts=(layout,) * 4, offsets=(True, False, True, False))
        return [(tensor.stride(), tensor.storage_offset()) for tensor in tensors_of(inputs(case))]

    for seed in range(FORMS):
        assert forms(seed) == forms(seed + FORMS)
