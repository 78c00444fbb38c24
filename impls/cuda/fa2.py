"""FlashAttention-2 in CUDA C++: the call, its launches and its claims. The algorithm is in `fa2.cu`.

The kernels are reached through custom operators of torch (`flashproof::cuda_fa2_forward`, `flashproof::cuda_fa2_backward`), which torch.compile takes.
"""

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flashproof.impls.call import Call, check_call
from flashproof.impls.cuda import flash
from flashproof.impls.cuda.launching import call_of, check_scale, missing, one_code, packed_seed
from flashproof.impls.spec import OWN_KERNELS, Alignment, Implementation


class Mask(ctypes.Structure):
    """`Mask` of fa2.cu."""

    _fields_ = (("offset", ctypes.c_int),)


def _masking(call: Call) -> flash.Masking:
    return flash.Masking("fa2.cu", Mask(call.offset))


# ------------------------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("flashproof::cuda_fa2_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, offset: int, dropout_p: float, dropout_seed: int
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    return flash.forward(call, _masking(call), query, key, value)


@torch.library.custom_op("flashproof::cuda_fa2_backward", mutates_args=())
def _backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    return flash.backward(call, _masking(call), _masking(call), dout, query, key, value, out, lse)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


@_backward.register_fake
def _(_dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)


_forward.register_autograd(_differentiate, setup_context=_keep)

# --------------------------------------------------------------------------------------------------------------------------- the call


def attention(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
) -> Float[Tensor, "batch heads queries dim"] | tuple[Float[Tensor, "batch heads queries dim"], Float[Tensor, "batch heads queries"]]:
    """softmax(scale query key^T) value, with gradients for query, key and value.

    scale is 1/sqrt(dim) unless given. With is_causal, query i sees key j when j <= i ("top_left") or j <= i + keys - queries ("bottom_right"). With enable_gqa,
    heads is a multiple of kv_heads. dropout_p of the normalised weights are zeroed and the others divided by 1 - dropout_p, as drawn from dropout_seed. With
    return_lse also the natural log of the sum of the exponentials of each query's scores, float32, which carries no gradient. A query that sees no key has
    output 0, LSE -inf and zero gradients.

    Raises TypeError or ValueError naming the argument that is wrong, and CudaError where a kernel cannot be compiled or launched.
    """
    call = check_call(
        query,
        key,
        value,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    check_scale(call)
    out, lse = _forward(query, key, value, call.scale, call.is_causal, call.offset, call.dropout_p, packed_seed(call.dropout_seed))
    return (out, lse) if return_lse else out


implementation = Implementation(
    name="cuda.fa2",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=flash.arithmetic,
    missing=missing,
    one_code=one_code,
    summary="FlashAttention-2 in CUDA C++: query tiles in parallel, statistics and weights in registers, a backward of two kernels without atomics.",
)
