"""Multi-head attention with any implementation: two linear maps around one call of `attention(query, key, value)`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import flashproof.impls.triton  # noqa: F401  # it must choose the interpreter before an optimizer imports Triton
from flashproof.impls import catalogue
from flashproof.impls.shapes import Bool, Float
from flashproof.impls.spec import Implementation
from flashproof.signatures import of_callable

Masking = Literal["full", "top_left", "bottom_right"]  # which keys a call sees

_WITHOUT_BACKWARD = "use torch.no_grad() for inference, or another attention for training"


class Group(NamedTuple):
    """The batch entries that see the same keys: one call of the implementation."""

    entries: Tensor  # their numbers
    seen: Tensor  # the numbers of the keys
    masking: Masking


class KVCache:
    """The keys and values of all tokens so far, for generation."""

    def __init__(self, capacity: int) -> None:
        """capacity: the largest number of tokens. The memory is allocated at the first call, in its dtype."""
        self.capacity = capacity
        self.length = 0
        self._tensors: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens [batch, kv_heads, tokens, dim]. Returns those of all tokens, as views.

        Raises ValueError if the tokens do not fit or are unlike those of the cache in batch, heads, dim, dtype or
        device, and RuntimeError if a gradient is recorded. The cache is then as before.
        """
        if key.requires_grad:
            raise RuntimeError("cache: is written in place and carries no gradient; use it under torch.no_grad()")
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"cache: {end} tokens do not fit into {self.capacity}")
        if self._tensors is None:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self._tensors = (key.new_empty(shape), value.new_empty(shape))
        held, given = _kind(self._tensors[0]), _kind(key)
        if held != given:
            raise ValueError(
                f"cache: holds {held}, and x has {given}; give a new KVCache, or call cache.clear() before"
            )
        for tensor, new in zip(self._tensors, (key, value), strict=True):
            tensor[:, :, self.length : end] = new
        self.length = end
        return self._tensors[0][:, :, :end], self._tensors[1][:, :, :end]

    def truncate(self, length: int) -> None:
        """Forgets all tokens but the first `length`. An empty cache takes tokens of any batch and dtype."""
        self.length = min(length, self.length)
        if self.length == 0:
            self._tensors = None

    def clear(self) -> None:
        """Forgets all tokens."""
        self.truncate(0)


@contextmanager
def restored_on_failure(caches: Sequence[KVCache]) -> Iterator[None]:
    """Any exception leaves the caches as they were before."""
    lengths = [cache.length for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length in zip(caches, lengths, strict=True):
            cache.truncate(length)
        raise


class MultiHeadAttention(nn.Module):
    """Self-attention of several heads, by any implementation.

    It computes out_proj(attention(query, key, value)), where query, key and value are the parts of in_proj(x). The
    parameters have the names and the layout of `torch.nn.MultiheadAttention`, so a state dict of that module (one with
    `kdim` and `vdim` of embed_dim, and without `add_bias_kv`) can be loaded. A state dict holds neither the number of
    heads nor `add_zero_attn`. So give the same num_heads, and load no state dict of a module with `add_zero_attn=True`:
    that module gives other results. The inputs are batch first.

    An attention that is an `nn.Module` is the submodule `attention`. A pickle holds an implementation of
    the catalogue by its name, and any other attention as pickle stores its functions.
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

        - num_heads: a divisor of embed_dim.
        - num_kv_heads: the number of key heads, a divisor of num_heads. None: as many as num_heads.
        - dropout: the probability that a weight is dropped in training, at least 0 and below 1. The seed of each call
          comes from PyTorch's generator for the CPU.
        - attention: a name of the catalogue, an `Implementation`, or a callable. The parameters of a callable say what
          it takes, as in a verification.

        Raises ValueError for sizes that do not fit together, and for what the implementation does not take.
        """
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1:
            raise ValueError(f"num_heads: {num_heads}; give at least 1")
        if embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: {embed_dim}; give a multiple of num_heads, {num_heads}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: {kv_heads}; give a divisor of num_heads, {num_heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: {dropout}; give a probability of at least 0 and below 1")
        self.implementation = _loaded(attention)
        self.attention = _module_of(self.implementation.attention)  # None: no module, so nothing to register
        self.embed_dim, self.dim, self.dropout = embed_dim, embed_dim // num_heads, dropout
        self.heads, self.kv_heads = num_heads, kv_heads
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
            raise ValueError(
                f"dropout: {name} takes no dropout_p with a dropout_seed; give dropout=0.0, or an implementation that "
                "takes dropout_p with dropout_seed, such as tiled.fa2"
            )

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

        The gradient flows through the implementation. One without a backward is refused where a gradient is recorded.

        Raises ValueError for x of another shape or without elements, for a mask that no call can express, for tokens
        that do not fit the cache, for what the implementation does not take (of a bare callable, dtypes and devices are
        unknown), and for an attention that does not return one tensor like query. Raises RuntimeError for a cache where
        a gradient is recorded. After an exception, the cache is as before.
        """
        if x.ndim != 3 or x.shape[2] != self.embed_dim or 0 in x.shape:
            raise ValueError(
                f"x: {list(x.shape)}; give [batch, length, embed_dim] with embed_dim {self.embed_dim}, not empty"
            )
        projected = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        by_head = projected.view(*projected.shape[:2], -1, self.dim)  # [batch, tokens, heads + 2 kv_heads, dim]
        parts = torch.split(by_head, [self.heads, self.kv_heads, self.kv_heads], dim=2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        self._check_tensor(query)
        keys = x.shape[1] if cache is None else cache.length + x.shape[1]
        plan = self._planned(key_padding_mask, x.shape[0], x.shape[1], keys, is_causal=is_causal)
        if cache is None:
            return self._merged(self._by_plan(plan, query, key, value))
        with restored_on_failure([cache]):
            return self._merged(self._by_plan(plan, query, *cache.append(key, value)))

    def _check_tensor(self, query: Tensor) -> None:
        """Raises ValueError for a dtype, a device or a gradient that the implementation does not take."""
        supports, name = self.implementation.supports, self.implementation.name
        dtype, device = str(query.dtype).removeprefix("torch."), query.device.type
        if not self.implementation.bare:  # what a callable takes is unknown
            if dtype not in supports.dtypes:
                raise ValueError(f"x: {name} takes no {dtype} for query, key and value; give {_any(supports.dtypes)}")
            if device not in supports.devices:
                raise ValueError(f"x: {name} takes no tensors on {device}; give them on {_any(supports.devices)}")
        if query.requires_grad and not supports.backward:
            raise ValueError(f"attention: {name} has no backward; {_WITHOUT_BACKWARD}")

    def _planned(
        self, hidden: Tensor | None, batch: int, queries: int, keys: int, *, is_causal: bool
    ) -> Masking | list[Group]:
        """The calls for a mask: one on all keys, or one for each different row of `hidden`, without the hidden keys.

        Raises ValueError for a call that the implementation does not take.
        """
        if hidden is None:
            masking = _masking(queries, keys, None, is_causal=is_causal)
            self._check_call(queries, keys, masking)
            return masking
        if hidden.shape != (batch, keys) or hidden.dtype != torch.bool:
            raise ValueError(
                f"key_padding_mask: {hidden.dtype} {list(hidden.shape)} does not fit; give booleans [{batch}, {keys}]"
            )
        rows, row_of = torch.unique(hidden, dim=0, return_inverse=True)
        groups = []
        for number, row in enumerate(rows):
            entries, seen = (row_of == number).nonzero()[:, 0], (~row).nonzero()[:, 0]
            if len(seen):
                masking = _masking(queries, keys, seen, is_causal=is_causal)
                self._check_call(queries, len(seen), masking)
                groups.append(Group(entries, seen, masking))
        return groups

    def _check_call(self, queries: int, keys: int, masking: Masking) -> None:
        supports, name = self.implementation.supports, self.implementation.name
        if queries != keys and not supports.cross_lengths:
            raise ValueError(f"x: {name} takes as many queries as keys, and there are {queries} queries, {keys} keys")
        if masking != "full" and masking not in supports.causal:
            raise ValueError(
                f"is_causal: {name} takes no causal mask aligned at the {masking.replace('_', ' ')}; "
                "padding on the left needs the bottom right, and so do several tokens after those of a cache"
            )

    def _by_plan(self, plan: Masking | list[Group], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The outputs of the calls, together [batch, heads, tokens, dim]. 0 where no key is seen."""
        if not isinstance(plan, list):
            return self._call(query, key, value, plan)
        # Zeros that depend on query, so that a gradient exists even if no entry sees a key.
        out = query.masked_fill(torch.ones((), dtype=torch.bool, device=query.device), 0.0)
        for entries, seen, masking in plan:
            out[entries] = self._call(query[entries], key[entries][:, :, seen], value[entries][:, :, seen], masking)
        return out

    def _call(self, query: Tensor, key: Tensor, value: Tensor, masking: Masking) -> Tensor:
        """One call of the implementation, with the keywords that it needs."""
        supports, name = self.implementation.supports, self.implementation.name
        keywords: dict[str, object] = {}
        if masking != "full":
            keywords["is_causal"] = True
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
        if not isinstance(out, Tensor):
            raise ValueError(f"attention: {name} returned a {type(out).__name__}; it must return the output alone")
        if out.shape != query.shape or out.dtype != query.dtype:
            raise ValueError(
                f"attention: {name} returned {out.dtype} {list(out.shape)}; "
                f"the output must be like query, {query.dtype} {list(query.shape)}"
            )
        if query.requires_grad and not out.requires_grad:
            raise ValueError(f"attention: {name} returned an output without a gradient; {_WITHOUT_BACKWARD}")
        return out

    def _merged(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle, torch.save and copies, with what `_unpacked` takes for the implementation."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"implementation": _packed(self.implementation)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises ImportError if the backend of an implementation of the catalogue is not installed."""
        restored = state | {"implementation": _unpacked(state["implementation"])}
        super().__setstate__(restored)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The sizes and the implementation, for print."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, dim={self.dim}, attention={self.implementation.name}"


def _loaded(attention: str | Implementation | Callable[..., object]) -> Implementation:
    if isinstance(attention, str):
        return catalogue.load(attention)
    if isinstance(attention, Implementation):
        return attention
    return of_callable(attention, getattr(attention, "__name__", type(attention).__name__))


def _module_of(attention: Callable[..., object]) -> nn.Module | None:
    """The module that is called, also inside of a functools.partial. None for any other callable."""
    called = getattr(attention, "func", attention)
    return called if isinstance(called, nn.Module) else None


def _packed(implementation: Implementation) -> str | dict[str, Any]:
    """What a pickle holds of an implementation: its name in the catalogue, or the fields that are not the defaults."""
    name = implementation.name
    if name in catalogue.CATALOGUE and catalogue.load(name) is implementation:
        return name
    values = {field: getattr(implementation, field.name) for field in fields(implementation)}
    return {field.name: value for field, value in values.items() if value is not field.default}


def _unpacked(packed: str | dict[str, Any]) -> Implementation:
    return catalogue.load(packed) if isinstance(packed, str) else Implementation(**packed)


def _kind(key: Tensor) -> str:
    """What all keys of a cache have in common, in words."""
    return f"batch {key.shape[0]}, {key.shape[1]} key heads of dim {key.shape[3]}, {key.dtype} on {key.device}"


def _any(names: Sequence[str]) -> str:
    return " or ".join(names)


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
