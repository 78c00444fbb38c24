"""Tests each mask against matrices that are written by hand.

Dropout is tested against the published vectors of Random123 and a second implementation of Philox.
"""

import math

import pytest
import torch

from flashproof.impls.spec import Alignment
from flashproof.oracles.masks import BLOCK, Dropout, Mask, philox_first_word


def drawn(mask: Mask, batch: int = 0, head: int = 0) -> list[str]:
    """Draws a mask as text: one line for each query, with # where the query sees the key."""
    visible = mask.visible(batch, head, torch.arange(mask.queries))
    return ["".join("#" if seen else "." for seen in row) for row in visible.tolist()]


CAUSAL: dict[tuple[Alignment, str], list[str]] = {
    ("top_left", "queries < keys"): [
        "#....",
        "##...",
        "###..",
    ],
    ("bottom_right", "queries < keys"): [
        "###..",
        "####.",
        "#####",
    ],
    ("top_left", "queries = keys"): [
        "#...",
        "##..",
        "###.",
        "####",
    ],
    ("bottom_right", "queries = keys"): [
        "#...",
        "##..",
        "###.",
        "####",
    ],
    ("top_left", "queries > keys"): [
        "#..",
        "##.",
        "###",
        "###",
        "###",
    ],
    ("bottom_right", "queries > keys"): [
        "...",
        "...",
        "#..",
        "##.",
        "###",
    ],
    ("top_left", "one key"): ["#", "#", "#"],
    ("bottom_right", "one key"): [".", ".", "#"],
    ("top_left", "one query"): ["#..."],
    ("bottom_right", "one query"): ["####"],
}


@pytest.mark.parametrize(("causal", "shape"), CAUSAL)
def test_causal(causal: Alignment, shape: str) -> None:
    expected = CAUSAL[causal, shape]
    assert drawn(Mask(len(expected), len(expected[0]), causal)) == expected


def test_without_a_mask_every_query_sees_every_key() -> None:
    assert drawn(Mask(2, 3)) == ["###", "###"]


def test_rows_are_asked_for_by_position() -> None:
    mask = Mask(5, 5, "top_left")
    assert torch.equal(mask.visible(0, 0, torch.tensor([3, 0])), mask.visible(0, 0, torch.arange(5))[[3, 0]])


def test_a_block_hides_the_scores_of_its_128_queries_and_128_keys() -> None:
    assert BLOCK == 128
    blocks = torch.tensor([[True, False, True], [False, True, True]])
    visible = Mask(130, 258, blocks=blocks[None, None]).visible(0, 0, torch.arange(130))
    expected = torch.zeros(130, 258, dtype=torch.bool)
    expected[:128, :128] = True
    expected[128:, 128:256] = True
    expected[:, 256:] = True
    assert torch.equal(visible, expected)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_blocks_and_causal_hide_together(causal: Alignment) -> None:
    blocks = torch.tensor([[True, True], [False, True]])[None, None]
    rows = torch.arange(200)
    both = Mask(200, 250, causal, blocks).visible(0, 0, rows)
    assert torch.equal(
        both, Mask(200, 250, causal).visible(0, 0, rows) & Mask(200, 250, None, blocks).visible(0, 0, rows)
    )
    assert both.any()
    assert not both[128:, :128].any()


def test_block_masks_of_batches_and_heads() -> None:
    blocks = torch.tensor([[True, False], [False, True]])[:, :, None, None]  # [batch, heads, 1, 1]
    assert [[drawn(Mask(1, 1, blocks=blocks), b, h) for h in (0, 1)] for b in (0, 1)] == [
        [["#"], ["."]],
        [["."], ["#"]],
    ]
    assert [[drawn(Mask(1, 1, blocks=blocks[:1]), b, h) for h in (0, 1)] for b in (0, 1)] == [
        [["#"], ["."]],
        [["#"], ["."]],
    ]
    assert [[drawn(Mask(1, 1, blocks=blocks[:, :1]), b, h) for h in (0, 1)] for b in (0, 1)] == [
        [["#"], ["#"]],
        [["."], ["."]],
    ]


# -------------------------------------------------------------------------------------------------------------- dropout

# Each line holds counter, key and result, from Random123 (D. E. Shaw Research), tests/kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1",
]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Computes Philox 4x32-10 with the integers of Python.

    Source: section 3.3 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    a, b, c, d = counter
    for step in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        bumped = [(word + step * weyl) % 2**32 for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        a, b, c, d = (right >> 32) ^ b ^ bumped[0], right % 2**32, (left >> 32) ^ d ^ bumped[1], left % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter, key, result = words[:4], words[4:6], words[6:]
    assert philox(counter, key) == result
    tensors = [torch.tensor([word]) for word in counter]
    assert (
        philox_first_word((tensors[0], tensors[1], tensors[2], tensors[3]), key[0] + (key[1] << 32)).tolist()
        == result[:1]
    )


SEED = 0x0123456789ABCDEF


def words_of(batch: int, head: int, queries: int, keys: int) -> list[list[int]]:
    """Computes the first Philox word of each score, by the project's definition of dropout.

    The counter is (key position, query position, head, batch). The key is the seed, with its low word first.
    """
    return [
        [philox([key, query, head, batch], [SEED % 2**32, SEED >> 32])[0] for key in range(keys)]
        for query in range(queries)
    ]


def test_dropout_draws_from_the_counter_of_key_query_head_and_batch() -> None:
    batch, head, queries, keys = 3, 5, 7, 11
    kept = Dropout(0.3, SEED).kept(batch, head, torch.arange(queries), keys)
    assert kept.tolist() == [[word >= 0.3 * 2**32 for word in row] for row in words_of(batch, head, queries, keys)]
    assert kept.any()
    assert not kept.all()
    assert torch.equal(Dropout(0.3, SEED).kept(batch, head, torch.tensor([6, 2]), keys), kept[[6, 2]])


def test_several_heads_at_once_are_those_heads() -> None:
    batches, heads, rows = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2]), torch.arange(130)
    dropout = Dropout(0.3, SEED)
    blocks = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(1)) < 0.5
    mask = Mask(130, 140, "top_left", blocks)
    for place, (batch, head) in enumerate(zip(batches.tolist(), heads.tolist(), strict=True)):
        assert torch.equal(dropout.kept(batches, heads, rows, 140)[place], dropout.kept(batch, head, rows, 140))
        assert torch.equal(mask.visible(batches, heads, rows)[place], mask.visible(batch, head, rows))


def test_a_word_equal_to_the_threshold_is_kept() -> None:
    word = words_of(0, 0, 1, 1)[0][0]
    at, above = word / 2**32, math.nextafter(word / 2**32, 1.0)
    assert Dropout(at, SEED).kept(0, 0, torch.tensor([0]), 1).item()
    assert not Dropout(above, SEED).kept(0, 0, torch.tensor([0]), 1).item()


def test_without_dropout_everything_is_kept() -> None:
    assert Dropout(0.0, SEED).kept(0, 0, torch.arange(4), 5).all()


def test_positions_beyond_32_bits_of_product_do_not_wrap_early() -> None:
    """A counter near 2^32 leads to products near 2^64. An int64 holds them modulo 2^64."""
    counter = [2**32 - 1, 2**31, 2**32 - 2, 2**31 + 1]
    tensors = [torch.tensor([word]) for word in counter]
    assert (
        philox_first_word((tensors[0], tensors[1], tensors[2], tensors[3]), SEED).tolist()
        == philox(counter, [SEED % 2**32, SEED >> 32])[:1]
    )
