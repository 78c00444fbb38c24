"""The definitions of the masks and of dropout, written independently of every kernel.

A verifier that shares the mask code of a kernel cannot see a fault in that code (cutlass#2336). For this reason, no
implementation imports this module.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashproof.impls.shapes import Bool, Int
from flashproof.impls.spec import Alignment

Which = int | Int[Tensor, " heads"]  # one batch entry or head, or those of several heads
BLOCK = 128  # one entry of a block mask covers 128 queries by 128 keys


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees. Without `causal` and `blocks`, each query sees every key.

    causal: "top_left": query i sees the keys j <= i (torch). "bottom_right": query i sees the keys
        j <= i + keys - queries (flash-attn since 2.1).
    blocks: boolean [1 or batch, 1 or heads, ceil(queries/128), ceil(keys/128)]. False hides a whole block of scores.
    """

    queries: int
    keys: int
    causal: Alignment | None = None
    blocks: Bool[Tensor, "b h query_blocks key_blocks"] | None = None

    @property
    def is_one_for_all_heads(self) -> bool:
        """Whether all heads of all batch entries have the same mask."""
        return self.blocks is None or self.blocks.shape[:2] == (1, 1)

    def last_seen(self, stop: int) -> int:
        """A number n >= 1 such that no query before `stop` sees a key at position n or later."""
        if self.causal is None:
            return self.keys
        return max(1, min(self.keys, stop if self.causal == "top_left" else stop + self.keys - self.queries))

    def visible(
        self, batch: Which, head: Which, rows: Int[Tensor, " rows"], keys: int | None = None
    ) -> Bool[Tensor, "*heads rows keys"]:
        """Whether each query in `rows` sees each of the first `keys` keys (None: all keys).

        batch, head: a batch entry and a query head, or tensors with one number for each of several heads.
        The result is on the device of `rows`. It has a heads dimension only if the mask depends on such a tensor.
        """
        keys = self.keys if keys is None else keys
        query = rows.to(torch.int64)[:, None]
        key = torch.arange(keys, device=rows.device)[None, :]
        seen = torch.ones((len(rows), keys), dtype=torch.bool, device=rows.device)
        if self.causal == "top_left":
            seen &= key <= query
        elif self.causal == "bottom_right":
            # The last query sees every key. Each earlier query sees one key fewer than the next one.
            hidden_keys = self.queries - 1 - query
            seen &= key < self.keys - hidden_keys
        if self.blocks is not None:
            blocks = self.blocks.to(rows.device)
            table = blocks[batch if blocks.shape[0] > 1 else 0, head if blocks.shape[1] > 1 else 0]
            seen = seen & table[..., query // BLOCK, key // BLOCK]
        return seen


@dataclass(frozen=True)
class Dropout:
    """Sets each normalised weight to 0 with probability p and multiplies the other weights by 1/(1-p).

    The random numbers come from Philox 4x32-10 (Salmon et al., SC 2011). The key is the 64-bit seed, low word first.
    The counter is (key position, query position, head, batch). A weight is dropped if the first output word w of its
    counter satisfies w < p 2^32.
    """

    p: float = 0.0
    seed: int = 0

    def kept(
        self, batch: Which, head: Which, rows: Int[Tensor, " rows"], keys: int
    ) -> Bool[Tensor, "*heads rows keys"]:
        """Whether dropout keeps the weight of each query in `rows` on each of the first `keys` keys.

        batch, head: a batch entry and a query head, or tensors with one number for each of several heads.
        """
        batches, heads = (torch.as_tensor(which, device=rows.device)[..., None, None] for which in (batch, head))
        if self.p == 0.0:
            return torch.ones((*heads.shape[:-2], len(rows), keys), dtype=torch.bool, device=rows.device)
        columns = torch.arange(keys, dtype=torch.int64, device=rows.device)
        word = philox_first_word((columns, rows.to(torch.int64)[:, None], heads, batches), self.seed)
        # p 2^32 is exact in float64, and w is an integer, so w < p 2^32 is equivalent to w < ceil(p 2^32).
        return word >= math.ceil(self.p * 2.0**32)


_WORD = 0xFFFFFFFF


def philox_first_word(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> Int[Tensor, "..."]:
    """The first output word of Philox 4x32-10 for each counter, in [0, 2^32).

    The four words of the counter broadcast against each other. They are int64 tensors, whose products wrap modulo 2^64.
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
