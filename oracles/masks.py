"""The one meaning of each mask, and of dropout, written independently of every kernel.

A verifier that shares the kernel's mask code cannot see a fault in it (cutlass#2336), so nothing here is imported by an implementation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashproof.impls.shapes import Bool, Int
from flashproof.impls.spec import Alignment

Which = int | Int[Tensor, " heads"]  # a batch entry or a head, or those of several heads
BLOCK = 128  # scores that share one entry of a block mask: 128 queries by 128 keys


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees. Without `causal` and `blocks`, all of them.

    causal: "top_left" lets query i see keys j <= i (torch), "bottom_right" lets it see j <= i + keys - queries (flash-attn since 2.1).
    blocks: boolean [1 or batch, 1 or heads, ceil(queries/128), ceil(keys/128)]; False hides a whole block of scores.
    """

    queries: int
    keys: int
    causal: Alignment | None = None
    blocks: Bool[Tensor, "b h query_blocks key_blocks"] | None = None

    @property
    def is_one_for_all_heads(self) -> bool:
        """Whether every head of every batch sees the same."""
        return self.blocks is None or self.blocks.shape[:2] == (1, 1)

    def last_seen(self, stop: int) -> int:
        """A number of keys, at least 1, behind which no query before `stop` sees one."""
        if self.causal is None:
            return self.keys
        return max(1, min(self.keys, stop if self.causal == "top_left" else stop + self.keys - self.queries))

    def visible(self, batch: Which, head: Which, rows: Int[Tensor, " rows"], keys: int | None = None) -> Bool[Tensor, "*heads rows keys"]:
        """Whether each of the queries `rows` of a batch and query head sees each of the first `keys`.

        On the device of `rows`. batch, head: numbers, or tensors of them, for as many heads; one mask for all heads has
        no dimension of heads.
        """
        keys = self.keys if keys is None else keys
        query = rows.to(torch.int64)[:, None]
        key = torch.arange(keys, device=rows.device)[None, :]
        seen = torch.ones((len(rows), keys), dtype=torch.bool, device=rows.device)
        if self.causal == "top_left":
            seen &= key <= query
        elif self.causal == "bottom_right":
            # The last query sees every key, the one before it one key fewer, and so on.
            hidden_keys = self.queries - 1 - query
            seen &= key < self.keys - hidden_keys
        if self.blocks is not None:
            blocks = self.blocks.to(rows.device)
            table = blocks[batch if blocks.shape[0] > 1 else 0, head if blocks.shape[1] > 1 else 0]
            seen = seen & table[..., query // BLOCK, key // BLOCK]
        return seen


@dataclass(frozen=True)
class Dropout:
    """Zeroes entries of the normalised weights with probability p and scales the rest by 1/(1-p).

    Philox 4x32-10 (Salmon et al., SC 2011): key the 64-bit seed, low word first; counter (key position, query position, head, batch);
    an entry is dropped when the first word w of the block satisfies w < p 2^32.
    """

    p: float = 0.0
    seed: int = 0

    def kept(self, batch: Which, head: Which, rows: Int[Tensor, " rows"], keys: int) -> Bool[Tensor, "*heads rows keys"]:
        """Whether the weight of each of the queries `rows` on each key is kept. `head` counts query heads.

        batch, head: numbers, or tensors of them, for as many heads.
        """
        batches, heads = (torch.as_tensor(which, device=rows.device)[..., None, None] for which in (batch, head))
        if self.p == 0.0:
            return torch.ones((*heads.shape[:-2], len(rows), keys), dtype=torch.bool, device=rows.device)
        columns = torch.arange(keys, dtype=torch.int64, device=rows.device)
        word = philox_first_word((columns, rows.to(torch.int64)[:, None], heads, batches), self.seed)
        return word >= math.ceil(self.p * 2.0**32)  # p 2^32 is exact in double: w < p 2^32 is w < ceil(p 2^32)


_WORD = 0xFFFFFFFF


def philox_first_word(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> Int[Tensor, "..."]:
    """First output word of Philox 4x32-10 for each counter, in [0, 2^32).

    The words of a counter broadcast. They are held in int64, whose products wrap modulo 2^64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        high0, low0 = (p0 >> 32) & _WORD, p0 & _WORD
        high1, low1 = (p1 >> 32) & _WORD, p1 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0
