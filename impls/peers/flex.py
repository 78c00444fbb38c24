"""FlexAttention (`torch.nn.attention.flex_attention`), compiled.

PyTorch generates Triton kernels for the mask of a call. This implementation is for CUDA only, because FlexAttention has
no backward pass on a CPU. It compiles once for each kind of call, for all lengths at once (`dynamic`), because a
compilation takes seconds. Such a kernel tests every index against the length, also where all tiles are whole, and is
slower than that of a user. A measurement is made within `as_users_call`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from flashproof.impls.call import BLOCK
from flashproof.impls.spec import Alignment, Device, Implementation, Supports


@cache
def compiled(dynamic: bool) -> Any:
    """FlexAttention as a compiled kernel: one for all lengths (dynamic), or one for each.

    Without compilation, FlexAttention would be textbook attention. So code that cannot be compiled is an error
    (`fullgraph`).
    """
    return torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlexAttention with the call of this project. Its log-sum-exp uses the natural logarithm."""
    mask = _block_mask(query, key, is_causal, causal_alignment, block_mask)
    kernel = compiled(dynamic=_kept.get() is None)
    # Each kind of call needs its own kernel. With the default limits, torch.compile gives up after a few kernels.
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        if not return_lse:
            out: Tensor = kernel(query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
            return out
        out, aux = kernel(
            query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse


# The masks that `as_users_call` keeps, by what they are made of. None outside of it.
_kept: ContextVar[dict[object, BlockMask | None] | None] = ContextVar("kept", default=None)


@contextmanager
def as_users_call() -> Iterator[None]:
    """Calls FlexAttention as its users do, until the context ends. This is for measurements.

    A kernel is compiled for the lengths of a call. A mask is made once, because this takes longer than the attention,
    and a causal mask reads no tensor. Within the context, block masks must not change.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _block_mask(
    query: Tensor, key: Tensor, is_causal: bool, alignment: Alignment, blocks: Tensor | None
) -> BlockMask | None:
    kept = _kept.get()
    if kept is None:
        return _made(query, key, is_causal, alignment, blocks)
    asked = (query.shape[:3], key.shape[2], is_causal, alignment, None if blocks is None else id(blocks))
    if asked not in kept:
        if is_causal and alignment == "top_left" and blocks is None:
            kept[asked] = create_block_mask(
                _earlier, None, None, query.shape[2], key.shape[2], device=query.device.type, BLOCK_SIZE=BLOCK
            )
        else:
            kept[asked] = _made(query, key, is_causal, alignment, blocks)
    return kept[asked]


def _earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def _made(query: Tensor, key: Tensor, is_causal: bool, alignment: Alignment, blocks: Tensor | None) -> BlockMask | None:
    if not is_causal and blocks is None:
        return None
    batch, heads, queries, _ = query.shape
    keys, device = key.shape[2], query.device
    # The mask reads tensors. A number would be part of the kernel, and each new number would cause a new compilation.
    offset = torch.tensor((keys - queries if alignment == "bottom_right" else 0) if is_causal else keys, device=device)
    sizes = (-(-queries // BLOCK), -(-keys // BLOCK))
    table = (torch.ones(sizes, dtype=torch.bool, device=device) if blocks is None else blocks).expand(
        batch, heads, *sizes
    )

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + offset) & table[b, h, i // BLOCK, j // BLOCK]

    return create_block_mask(seen, batch, heads, queries, keys, device=device.type, BLOCK_SIZE=BLOCK)


def missing(device: Device) -> str | None:
    """The reason why the kernel cannot run on a device, or None if it can."""
    return "CUDA: no device" if device == "cuda" and not torch.cuda.is_available() else None


implementation = Implementation(
    name="flex",
    attention=attention,
    # FlexAttention supports more than this. But the compilation of each kind of call takes about ten seconds, and the
    # verification of a claim may only take minutes.
    supports=Supports(
        dtypes=("float16", "bfloat16"),
        devices=("cuda",),
        causal=("top_left",),
        block_mask=True,
        lse=True,
        dims=(64, 128),
        dim_multiple=64,
    ),
    slow=lambda device: "call",
    summary="PyTorch's FlexAttention, compiled for the mask; claimed for 16 bit, usual head dims and block masks only.",
    missing=missing,
    bare=True,
)
