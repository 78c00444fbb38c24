"""Multi-head attention with any implementation: two linear maps around one call of `attention(query, key, value)`."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import flashproof.impls.triton  # noqa: F401  # it must choose the interpreter before an optimizer imports Triton
from flashproof.impls import catalogue
from flashproof.impls.shapes import Bool, Float
from flashproof.impls.spec import Implementation
from flashproof.signatures import of_callable

Masking = Literal["full", "top_left", "bottom_right"]  # which keys a call sees


class KVCache:
    """The keys and values of all tokens so far, for generation."""

    def __init__(self, capacity: int) -> None:
        """capacity: the largest number of tokens. The memory is allocated at the first call, in its dtype."""
        self.capacity = capacity
        self.length = 0
        self._tensors: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens [batch, kv_heads, tokens, dim]. Returns those of all tokens, as views.

        Raises ValueError if the tokens do not fit, and RuntimeError if a gradient is recorded.
        """
        if key.requires_grad:
            raise RuntimeError("cache: is written in place and carries no gradient; use it under torch.no_grad()")
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"cache: {end} tokens do not fit into {self.capacity}")
        if self._tensors is None:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self._tensors = (key.new_empty(shape), value.new_empty(shape))
        for tensor, new in zip(self._tensors, (key, value), strict=True):
            tensor[:, :, self.length : end] = new
        self.length = end
        return self._tensors[0][:, :, :end], self._tensors[1][:, :, :end]


class MultiHeadAttention(nn.Module):
    """Self-attention of several heads, by any implementation.

    It computes out_proj(attention(query, key, value)), where query, key and value are the parts of in_proj(x). The
    parameters have the names and the layout of `torch.nn.MultiheadAttention`, so a state dict of that module (one with
    `kdim` and `vdim` of embed_dim, and without `add_bias_kv`) can be loaded. The inputs are batch first.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        attention: str | Implementation | Callable[..., object] = "triton.fa2",
    ) -> None:
        """Makes the module.

        - num_kv_heads: the number of key heads, a divisor of num_heads. None: as many as num_heads.
        - dropout: the probability that a weight is dropped in training. The seed of each call comes from PyTorch's
          generator for the CPU.
        - attention: a name of the catalogue, an `Implementation`, or a callable. The parameters of a callable say what
          it takes, as in a verification.

        Raises ValueError for sizes that do not fit together, and for what the implementation does not take.
        """
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim % num_heads or num_heads % kv_heads:
            raise ValueError(
                f"num_heads: {num_heads} must divide embed_dim {embed_dim}, and num_kv_heads {kv_heads} must divide it"
            )
        self.implementation = _loaded(attention)
        self.heads, self.kv_heads, self.dim, self.dropout = num_heads, kv_heads, embed_dim // num_heads, dropout
        self._check_claims()
        width = (num_heads + 2 * kv_heads) * self.dim
        self.in_proj_weight = nn.Parameter(torch.empty(width, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def _check_claims(self) -> None:
        supports, name = self.implementation.supports, self.implementation.name
        (low, high), multiple = supports.dims, supports.dim_multiple
        if not low <= self.dim <= high or self.dim % multiple:
            raise ValueError(f"embed_dim: {name} takes no head dim of {self.dim}")
        if self.kv_heads != self.heads and not supports.grouped_heads:
            raise ValueError(f"num_kv_heads: {name} takes no grouped heads")
        if self.dropout and not supports.dropout:
            raise ValueError(f"dropout: {name} takes no dropout_p with a dropout_seed")

    def forward(
        self,
        x: Float[Tensor, "batch tokens embed_dim"],
        *,
        is_causal: bool = False,
        key_padding_mask: Bool[Tensor, "batch keys"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch tokens embed_dim"]:
        """Attention of each token to all tokens, or to those up to itself.

        - is_causal: a token sees itself and the tokens before it.
        - key_padding_mask: True hides a key, as in `torch.nn.MultiheadAttention`. A token that sees no key gets an
          attention output of 0, where that module returns NaN.
        - cache: the tokens before x. x is added to them, and `keys` counts all of them.

        Implementations take no mask of single keys. So the hidden keys are left out: each group of batch entries that
        hide the same keys is one call, on the keys that remain. This copies these keys, and waits for the device once.
        The result is that of a mask. With is_causal, the remaining keys must be the last ones (padding on the left) or
        the first ones (padding on the right), because the calls know only these two causal masks.

        Raises ValueError for a mask that no call can express, and for what the implementation does not take.
        """
        projected = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        by_head = projected.view(*projected.shape[:2], -1, self.dim)  # [batch, tokens, heads + 2 kv_heads, dim]
        parts = torch.split(by_head, [self.heads, self.kv_heads, self.kv_heads], dim=2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        if cache is not None:
            key, value = cache.append(key, value)
        if key_padding_mask is None:
            out = self._call(query, key, value, _masking(query.shape[2], key.shape[2], None, is_causal=is_causal))
        else:
            out = self._call_without(key_padding_mask, query, key, value, is_causal=is_causal)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _call_without(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """The output without the hidden keys: one call for each different row of the mask."""
        if hidden.shape != (key.shape[0], key.shape[2]) or hidden.dtype != torch.bool:
            raise ValueError(
                f"key_padding_mask: {hidden.dtype} {list(hidden.shape)} does not fit; "
                f"give booleans [{key.shape[0]}, {key.shape[2]}]"
            )
        rows, row_of = torch.unique(hidden, dim=0, return_inverse=True)
        out = torch.zeros_like(query)
        for number, row in enumerate(rows):
            entries, seen = (row_of == number).nonzero()[:, 0], (~row).nonzero()[:, 0]
            if len(seen):
                masking = _masking(query.shape[2], key.shape[2], seen, is_causal=is_causal)
                out[entries] = self._call(query[entries], key[entries][:, :, seen], value[entries][:, :, seen], masking)
        return out

    def _call(self, query: Tensor, key: Tensor, value: Tensor, masking: Masking) -> Tensor:
        """One call of the implementation, with the keywords that it needs."""
        supports, name = self.implementation.supports, self.implementation.name
        keywords: dict[str, object] = {}
        if query.shape[2] != key.shape[2] and not supports.cross_lengths:
            raise ValueError(f"x: {name} takes as many queries as keys, and there are {key.shape[2]} keys")
        if masking != "full":
            keywords["is_causal"] = True
            if masking not in supports.causal:
                raise ValueError(
                    f"is_causal: {name} takes no causal mask aligned at the {masking.replace('_', ' ')}; "
                    "padding on the left needs the bottom right, and so do several tokens after those of a cache"
                )
            if masking == "bottom_right":
                keywords["causal_alignment"] = masking
        if self.kv_heads != self.heads:
            keywords["enable_gqa"] = True
        if self.dropout and self.training:
            keywords |= {"dropout_p": self.dropout, "dropout_seed": int(torch.randint(2**63 - 1, (), device="cpu"))}
        if not supports.strided:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        with torch.autocast(query.device.type, enabled=False):  # it would round inside of the implementation, too
            out = self.implementation.attention(query, key, value, **keywords)
        assert isinstance(out, Tensor)
        return out

    def extra_repr(self) -> str:
        """The sizes and the implementation, for print."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, dim={self.dim}, attention={self.implementation.name}"


def _loaded(attention: str | Implementation | Callable[..., object]) -> Implementation:
    if isinstance(attention, str):
        return catalogue.load(attention)
    if isinstance(attention, Implementation):
        return attention
    return of_callable(attention, getattr(attention, "__name__", type(attention).__name__))


def _masking(queries: int, keys: int, seen: Tensor | None, *, is_causal: bool) -> Masking:
    """The mask of a call on the keys `seen` (None: all of them). The queries are the last tokens of all keys."""
    first, last = (0, keys - 1) if seen is None else (int(seen[0]), int(seen[-1]))
    if not is_causal or last <= keys - queries:  # the first query is the token of key number keys - queries
        return "full"
    is_run = seen is None or last - first + 1 == len(seen)
    if is_run and first == 0 and queries == keys:
        return "top_left"
    if is_run and last == keys - 1:
        return "bottom_right"
    raise ValueError(
        "key_padding_mask: with is_causal, the hidden keys of a batch entry must be its first ones or, without a "
        "cache, its last ones"
    )
