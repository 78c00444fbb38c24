"""Compares the bytes that the Triton kernels of FlashAttention-1 and 2 read and write with the formulas of the papers.

The formulas are for one head of N queries and N keys of dim d. An element has e bytes (2 or 4), the statistics are in
float32, and a tile has B_r queries or B_c keys. The papers give asymptotic formulas. Here they have all constants, so
the test compares the counted and the computed number with ==.

FlashAttention-1 (Dao et al. 2022, Theorem 2: Theta(N^2 d^2 / M) accesses with B_c = M / 4d):

- Forward: K and V are read once. For each of the N / B_c key tiles, every Q is read, and O (in float32, 4 bytes an
  element), m and l are read and rewritten.
- Backward (Algorithm 4): K and V are read once. For each key tile, Q, dO and O are read with m and l, and dQ (float32)
  is read and rewritten. dK and dV are written once.

FlashAttention-2 (Dao 2023, section 3.1: the loops are exchanged, the output is written once, only L is kept):

- Forward: Q is read once, and O and L are written once. For each of the N / B_r query tiles, K and V are read.
- Backward, in three kernels. The kernel of delta reads O and dO and writes N numbers. The kernel of dK and dV reads K
  and V once, and reads Q, dO, L and delta for each of the N / B_c key tiles. The kernel of dQ reads Q, dO, L and delta
  once, and reads K and V for each query tile. Each gradient is written once.

With a causal mask, a tile that no query sees is never visited. So each sum runs over the pairs of tiles that touch the
diagonal or lie below it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from flashproof.impls.spec import Dtype
from flashproof.reports.record import Traffic
from flashproof.subject import Recorder
from flashproof.tests.suite.kernels.traffic import Bytes, counted

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Shape:
    """Self-attention of one sequence, and the sizes of its tiles."""

    implementation: str
    direction: Direction
    length: int
    query_tile: int = 64
    key_tile: int = 64
    dtype: Dtype = "float16"
    causal: bool = False
    heads: int = 2
    dim: int = 64

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.implementation}-{self.direction}-{self.dtype}"
            f"-n{self.length}-{self.query_tile}x{self.key_tile}-{mask}"
        )

    @property
    def element(self) -> int:
        """The bytes of one element of the inputs."""
        return 4 if self.dtype == "float32" else 2

    @property
    def matrix(self) -> int:
        """The bytes of Q of one head. K, V, O and each gradient have as many."""
        return self.length * self.dim * self.element

    @property
    def rows(self) -> int:
        """The number of visited queries, summed over the key tiles.

        A key tile visits whole query tiles, from the first one that sees it.
        """
        firsts = range(0, self.length, self.key_tile)
        return sum(self.length - (first // self.query_tile * self.query_tile if self.causal else 0) for first in firsts)

    @property
    def columns(self) -> int:
        """The number of visited keys, summed over the query tiles.

        A query tile visits whole key tiles, up to the last one that it sees.
        """
        lasts = (min(first + self.query_tile, self.length) for first in range(0, self.length, self.query_tile))
        return sum(
            min(math.ceil(last / self.key_tile) * self.key_tile, self.length) if self.causal else self.length
            for last in lasts
        )


def fa1_forward(s: Shape) -> Bytes:
    """K and V are read once. For each key tile, Q, O, m and l are read, and O, m and l are written."""
    return Bytes(
        read=s.heads * (2 * s.matrix + s.rows * (s.dim * s.element + 4 * s.dim + 8)),
        written=s.heads * s.rows * (4 * s.dim + 8),
    )


def fa1_backward(s: Shape) -> Bytes:
    """K and V are read, dK and dV written once. Per key tile, Q, dO, O, dQ, m, l are read and dQ is written."""
    return Bytes(
        read=s.heads * (2 * s.matrix + s.rows * (3 * s.dim * s.element + 4 * s.dim + 8)),
        written=s.heads * (s.rows * 4 * s.dim + 2 * s.matrix),
    )


def fa2_forward(s: Shape) -> Bytes:
    """Q is read once. For each query tile, K and V are read. O and L are written once."""
    return Bytes(
        read=s.heads * (s.matrix + s.columns * 2 * s.dim * s.element),
        written=s.heads * (s.matrix + 4 * s.length),
    )


def fa2_backward(s: Shape) -> Bytes:
    """One kernel reads O and dO for delta. One reads K and V once, and Q, dO, L and delta for each key tile. One reads
    Q, dO, L and delta once, and K and V for each query tile. delta and each gradient are written once."""
    statistics = 8  # bytes of L and delta of one query
    delta = 2 * s.matrix
    of_keys = 2 * s.matrix + s.rows * (2 * s.dim * s.element + statistics)
    of_queries = 2 * s.matrix + s.length * statistics + s.columns * 2 * s.dim * s.element
    return Bytes(
        read=s.heads * (delta + of_keys + of_queries),
        written=s.heads * (4 * s.length + 3 * s.matrix),
    )


FORMULAS: dict[tuple[str, Direction], Callable[[Shape], Bytes]] = {
    ("triton.fa1", "forward"): fa1_forward,
    ("triton.fa1", "backward"): fa1_backward,
    ("triton.fa2", "forward"): fa2_forward,
    ("triton.fa2", "backward"): fa2_backward,
}
SOURCES = {
    "triton.fa1": "FlashAttention (2022), Theorem 2 with its constants",
    "triton.fa2": "FlashAttention-2 (2023), section 3.1 with its constants",
}
EVERY = pytest.mark.parametrize(("implementation", "direction"), FORMULAS)


@functools.cache
def count(shape: Shape) -> Bytes:
    """Runs the kernels with the tiles of the shape, and counts their bytes. Skips if Triton does not interpret."""
    from flashproof.impls.triton import fa1, fa2, flash
    from flashproof.impls.triton.primitives import INTERPRETED

    if not INTERPRETED.value:
        pytest.skip("Triton: not interpreted")
    tile = flash.Tile(shape.query_tile, shape.key_tile, num_warps=4, num_stages=1)
    sizes: dict[str, tuple[Any, Any]] = {
        "triton.fa1": (fa1, fa1.Tiles(shape.query_tile, shape.key_tile)),
        "triton.fa2": (fa2, flash.Tiles(tile, tile, tile)),
    }
    module, tiles = sizes[shape.implementation]
    generator = torch.Generator().manual_seed(0)
    size = (1, shape.heads, shape.length, shape.dim)
    query, key, value, dout = (torch.randn(size, generator=generator).to(getattr(torch, shape.dtype)) for _ in range(4))
    with mock.patch.object(module, "tiles", return_value=tiles):
        with counted() as forward:
            out = module.attention(
                query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), is_causal=shape.causal
            )
        if shape.direction == "forward":
            return forward
        with counted() as backward:
            out.backward(dout)
    return backward


# The grid has growing lengths, which are multiples of the tiles or not; tall, wide and square tiles; dtypes; masks; and
# a single query and key.
GRID = [
    shape
    for implementation, direction in FORMULAS
    for full in [Shape(implementation, direction, 256)]
    for shape in (
        replace(full, length=128),
        full,
        replace(full, length=512),
        replace(full, dtype="bfloat16"),
        replace(full, dtype="float32"),
        replace(full, query_tile=32),
        replace(full, key_tile=32),
        replace(full, length=200, key_tile=32),
        replace(full, length=200, query_tile=32, dtype="float32", causal=True),
        replace(full, key_tile=32, causal=True),
        replace(full, length=1, dtype="float32"),
    )
]


@pytest.mark.parametrize("shape", GRID, ids=str)
def test_every_byte_is_the_formulas(shape: Shape, recorder: Recorder) -> None:
    formula = FORMULAS[shape.implementation, shape.direction]
    found, expected = count(shape), formula(shape)
    if not shape.causal:
        recorder.add(
            Traffic(
                run=recorder.run,
                implementation=shape.implementation,
                dtype=shape.dtype,
                direction=shape.direction,
                length=shape.length,
                dim=shape.dim,
                query_tile=shape.query_tile,
                key_tile=shape.key_tile,
                read_bytes=found.read,
                written_bytes=found.written,
                formula=f"{formula.__doc__} {SOURCES[shape.implementation]}.",
                formula_read_bytes=expected.read,
                formula_written_bytes=expected.written,
            )
        )
    assert found == expected


@EVERY
def test_twice_the_length(implementation: str, direction: Direction) -> None:
    """With twice the length, FA1 writes four times as much, because it rewrites the output or dQ for each key tile.

    FA2 writes each result once, so it writes twice as much.
    """
    short = Shape(implementation, direction, 128)
    once, twice = count(short), count(replace(short, length=256))
    if implementation == "triton.fa2":
        assert twice.written == 2 * once.written
    elif direction == "forward":
        assert twice.written == 4 * once.written
    else:  # dK and dV are written once, so they only double
        assert twice.written - 4 * once.written == -2 * short.heads * 2 * short.matrix
    assert 3 * once.read < twice.read < 4 * once.read  # quadratic, except for what is read once


@EVERY
def test_twice_the_key_tile(implementation: str, direction: Direction) -> None:
    """With key tiles of twice the size, FA1 visits the queries half as often. The forward of FA2 does not change."""
    narrow = Shape(implementation, direction, 256, key_tile=32)
    small, large = count(narrow), count(replace(narrow, key_tile=64))
    gradients = 2 * narrow.heads * narrow.matrix  # K and V are read, dK and dV written once, whatever the tile
    if implementation == "triton.fa1":
        once = Bytes(read=gradients, written=gradients if direction == "backward" else 0)
        assert small.read - once.read == 2 * (large.read - once.read)
        assert small.written - once.written == 2 * (large.written - once.written)
    elif direction == "forward":
        assert small == large
    else:
        assert small.read > large.read
        assert small.written == large.written


@EVERY
def test_twice_the_query_tile(implementation: str, direction: Direction) -> None:
    """With query tiles of twice the size, FA2 reads keys and values half as often. FA1 does not change."""
    flat = Shape(implementation, direction, 256, query_tile=32)
    small, large = count(flat), count(replace(flat, query_tile=64))
    if implementation == "triton.fa1":
        assert small == large
    else:
        assert small.written == large.written
        assert small.read - large.read == flat.heads * (256 // 32 - 256 // 64) * 2 * flat.matrix


def test_the_output_crosses_once_in_fa2_and_once_per_key_tile_in_fa1() -> None:
    """With four key tiles, FA1 writes the float32 output four times. FA2 writes the 16-bit output once.

    This is the main improvement of FlashAttention-2.
    """
    statistics = 2 * 256
    first = count(Shape("triton.fa1", "forward", 256)).written - 4 * 2 * 4 * statistics
    second = count(Shape("triton.fa2", "forward", 256)).written - 4 * statistics
    assert first == 4 * 2 * second


def test_masked_lanes_do_not_count_and_nothing_stays_wrapped() -> None:
    """Tests the counter on a kernel with known traffic: 10 of 16 lanes, and an atomic that reads and writes."""
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_builder

    from flashproof.impls.triton.primitives import INTERPRETED

    if not INTERPRETED.value:
        pytest.skip("Triton: not interpreted")

    @triton.jit
    def kernel(source, target, total, length):  # type: ignore[no-untyped-def]
        lanes = tl.arange(0, 16)
        x = tl.load(source + lanes, mask=lanes < length)
        tl.store(target + lanes, x, mask=lanes < length)
        tl.atomic_add(total, tl.sum(x, 0))

    source, target, total = torch.ones(10, dtype=torch.float16), torch.zeros(10), torch.zeros(1)
    before = interpreter_builder.create_masked_load
    with counted() as found:
        kernel[(1,)](source, target, total, 10)
    assert found == Bytes(read=10 * 2 + 4, written=10 * 4 + 4)
    assert interpreter_builder.create_masked_load == before
    kernel[(1,)](source, target, total, 10)
    assert found == Bytes(read=24, written=44)
