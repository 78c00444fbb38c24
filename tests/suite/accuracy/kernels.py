"""Attention kernels for the tests: torch's own, and wrong ones."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashproof.cases import Case
from flashproof.tensors import Inputs, inputs

Kernel = Callable[..., Tensor]


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool) -> Tensor:
    """Calls torch's attention."""
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def scaled_wrong(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """Has a scale that is wrong by 0.1 %, or in bfloat16 by 0.4 %: bfloat16 itself rounds by up to 0.4 %."""
    wrong = 1.004 if query.dtype == torch.bfloat16 else 1.001
    return sdpa(query, key, value, is_causal=is_causal, scale=wrong * scale, enable_gqa=enable_gqa)


def leaking(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool) -> Tensor:
    """Shows one key too many to each query.

    A key of zeros is added after the last one, as padding. Under a causal mask, each query also sees the next key.
    """
    key, value = (torch.cat([tensor, torch.zeros_like(tensor[:, :, :1])], dim=2) for tensor in (key, value))
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    mask = seen.tril(1) if is_causal else seen
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


def without_maximum(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """Does not subtract the maximum of the scores. The exponentials overflow above 88.7."""
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = scale * (query.float() @ key.float().mT)
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.exp()
    return ((weights / weights.sum(dim=-1, keepdim=True)) @ value.float()).to(query.dtype)


def asked(case: Case) -> dict[str, Any]:
    """Returns the keywords of a case, for a kernel and for `judge`."""
    scale = 1.0 / math.sqrt(case.dim) if case.scale is None else case.scale
    return {"is_causal": case.mask == "causal", "scale": scale, "enable_gqa": case.heads != case.kv_heads}


def answered(kernel: Kernel, case: Case) -> tuple[Inputs, dict[str, Any]]:
    """Returns the tensors of a case and the answer of a kernel: out, dq, dk, dv."""
    given = inputs(case)
    leaves = [tensor.detach().requires_grad_() for tensor in (given.query, given.key, given.value)]
    out = kernel(*leaves, **asked(case))
    gradients = torch.autograd.grad(out, leaves, given.dout)
    return given, {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
