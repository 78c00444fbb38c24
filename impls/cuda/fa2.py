"""FlashAttention-2 in CUDA C++: the call, its launches and its claims. The algorithm is in `fa2.cu`.

Two custom operators of torch, `flashproof::cuda_fa2_forward` and `flashproof::cuda_fa2_backward`, launch the kernels.
torch.compile supports such operators.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from flashproof.impls.call import Attention, Call, Keys, Queries, Rows
from flashproof.impls.cuda import flash
from flashproof.impls.cuda.launching import call_of, check_scale, missing, packed_seed, slow
from flashproof.impls.spec import OWN_KERNELS, Implementation


class Mask(ctypes.Structure):
    """The argument of type `Mask` of fa2.cu."""

    _fields_ = (("offset", ctypes.c_int),)


def _masking(call: Call) -> flash.Masking:
    return flash.Masking("fa2.cu", Mask(call.offset))


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("flashproof::cuda_fa2_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor]:
    """The forward: returns (out, lse)."""
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
    """The backward: returns (dquery, dkey, dvalue)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    return flash.backward(call, _masking(call), _masking(call), dout, query, key, value, out, lse)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(query.shape[:3], dtype=torch.float32, device=query.device),
    )


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

# ------------------------------------------------------------------------------------------------------------- the call


@Attention
def attention(query: Queries, key: Keys, value: Keys, call: Call) -> tuple[Queries, Rows]:
    """FlashAttention-2: returns (out, lse), with gradients for query, key and value.

    Raises ValueError if the scale is beyond float32, and CudaError if a kernel cannot be compiled or launched.
    """
    check_scale(call)
    options = (call.scale, call.is_causal, call.offset, call.dropout_p, packed_seed(call.dropout_seed))
    out, lse = _forward(query, key, value, *options)
    return out, lse


implementation = Implementation(
    name="cuda.fa2",
    attention=attention,
    supports=OWN_KERNELS,
    arithmetic=flash.arithmetic,
    missing=missing,
    slow=slow,
    summary=(
        "FlashAttention-2 in CUDA C++: query tiles in parallel, statistics and weights in registers, "
        "a backward of two kernels without atomics."
    ),
)
