"""Reproducible dropout masks from Philox 4x32-10.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

Philox is a counter-based generator. The word for a weight depends only on the seed and on the position of the weight.
So a tile can be drawn at any time and in any order, and the backward pass draws the same mask as the forward pass.
"""

import torch
from torch import Tensor

from flashproof.impls.shapes import Bool

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after each round
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


def kept(
    seed: int, threshold: int, batch: int, head: int, rows: slice, cols: slice, device: torch.device
) -> Bool[Tensor, "rows cols"]:
    """Whether the weights of queries `rows` on keys `cols` are kept.

    A weight is kept if the first word of the block at the counter (key, query, head, batch) is at least `threshold`.
    """
    key = torch.arange(cols.start, cols.stop, device=device)[None, :]
    query = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return _first_word((key, query, head, batch), seed) >= threshold


def _first_word(counter: tuple[Tensor, Tensor, int, int], seed: int) -> Tensor:
    """The first output word, in [0, 2^32).

    Words broadcast. So the early rounds work on one row, one column or one number.
    """
    c0: Tensor | int
    c1: Tensor | int
    c2: Tensor | int
    c3: Tensor | int
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK32, seed >> 32
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    assert isinstance(c0, Tensor)
    return c0


def _product(multiplier: int, word: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """The high and the low word of a 64-bit product.

    The int64 of a tensor wraps around 2^64, so its bits are those of the product. The shift extends its sign, and the
    mask removes that.
    """
    product = word * multiplier
    return (product >> 32) & _MASK32, product & _MASK32
