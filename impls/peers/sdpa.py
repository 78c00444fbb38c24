"""PyTorch's `scaled_dot_product_attention`, one implementation for each of its kernels.

PyTorch chooses a kernel by device, dtype and shape, and falls back silently. Here, `sdpa_kernel` pins each kernel. If
the pinned kernel does not support a call, the call is refused with PyTorch's reasons. The pin also covers the backward
pass, because the forward pass writes the backward kernel into the graph.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashproof.impls.spec import Arithmetic, Device, Dtype, Implementation, Supports, arithmetic_of_flash


def pinned(backend: SDPBackend) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention` on one kernel.

    The returned function raises NotImplementedError, with PyTorch's reasons, for a call that the kernel does not
    support.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        with warnings.catch_warnings(record=True) as reasons, sdpa_kernel(backend):
            warnings.simplefilter("always")
            try:
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
                )
            except RuntimeError as error:
                if not str(error).startswith("No "):  # "No available kernel", "No viable backend"
                    raise
                why = "; ".join(str(reason.message).partition(" (Triggered")[0] for reason in reasons)
                raise NotImplementedError(f"{backend.name} does not take this call: {why or error}") from error

    return attention


def unit_stride(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Copies an input if its last stride is not 1.

    The fused kernels require that the elements of a row are adjacent in memory. For other inputs, PyTorch falls back to
    math. `contiguous` is not enough: it keeps any stride of a head dim of 1.
    """

    def adjacent(tensor: Tensor) -> Tensor:
        return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)

    def with_copies(query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        return attention(*map(adjacent, (query, key, value)), **keywords)

    return with_copies


def contiguous_gradient(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes the output gradient contiguous.

    cuDNN's backward pass reads an output gradient with the strides of another one, and returns NaN (pytorch#134001).
    """

    def with_copies(query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        out = attention(query, key, value, **keywords)
        copied: Tensor = _Contiguous.apply(out)  # type: ignore[no-untyped-call]
        return copied

    return with_copies


class _Contiguous(torch.autograd.Function):
    """Returns the tensor itself, and makes its gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def not_on_cuda(device: Device) -> str | None:
    """The reason why a kernel cannot run on a device, or None if it can."""
    return "CUDA: no device" if device == "cuda" and not torch.cuda.is_available() else None


def arithmetic_of_math(dtype: Dtype, device: Device) -> Arithmetic:
    """Whole matrices in float32 (aten `_scaled_dot_product_attention_math`).

    16-bit inputs are cast to float32, and only the results are cast back.
    """
    return Arithmetic(accumulate="fma", weights="float32", exp_ulps=2.0)


def arithmetic_of_flash_cpu(dtype: Dtype, device: Device) -> Arithmetic:
    """Key tiles of 512, query tiles of 32 to 256.

    In 16 bit, the contribution of a tile is added to the 16-bit gradient itself, not to a float32 sum.

    The exponential is the fast one of the vector library, with an error of 20 ulps (aten `FlashAttentionKernel.cpp`).
    It computes 2^n as 2 x 2^(n - 1), with n rounded to nearest. 2^-127 is flushed to 0, so every exponential below
    2^-125.5 is 0. Measured: exp(x) is 0 up to x = -86.98997, which is -125.5 ln 2.
    """
    gradients: Literal["float32", "input"] = "float32" if dtype == "float32" else "input"
    return Arithmetic(
        accumulate="fma", exp_ulps=20.0, exp_smallest=2.0**-125.5, key_tile=512, query_tile=32, gradients=gradients
    )


def arithmetic_by_heads(dtype: Dtype, device: Device) -> Arithmetic:
    """FlashAttention's arithmetic, except for the gradients of grouped heads.

    The dK and dV of each query head are rounded to the input dtype before the heads of a group are added. Source:
    `mha_bwd` in aten's `flash_api.cpp` (`dk_expanded`, `dv_expanded`).

    cuDNN returns the same bits where these roundings are visible. For example, two heads share a key, and their dV is
    2.8 units of the smallest float16 in total. cuDNN returns 2 units, not 3.
    """
    return replace(arithmetic_of_flash(dtype, device), gradients="heads")


def arithmetic_of_efficient(dtype: Dtype, device: Device) -> Arithmetic:
    """Tensor cores in every dtype. A float32 product is three TF32 products (CUTLASS `OpMultiplyAddFastF32`).

    In 16 bit, the backward computes dS from the cast P. Measured on an H200: one dQ in bfloat16 is off by 0.9 %, and
    equals, bit for bit, what these roundings give (tests/suite/oracles/test_bounds.py).
    """
    products: Literal["3xtf32", "exact"] = "3xtf32" if dtype == "float32" else "exact"
    return Arithmetic(accumulate="tensor_core", products=products, dscores_from="cast")


math = Implementation(
    name="sdpa.math",
    attention=pinned(SDPBackend.MATH),
    supports=Supports(
        causal=("top_left",), scale="finite", grouped_heads=True, cross_lengths=True, strided=True, unaligned=True
    ),
    arithmetic=arithmetic_of_math,
    summary="PyTorch's textbook attention: whole matrices in float32.",
    missing=not_on_cuda,
)

# The claim excludes scales of 0 or below. With a causal mask, this kernel multiplies the -inf of hidden scores by the
# scale. Then it returns NaN, or hidden keys become visible.
flash_cpu = Implementation(
    name="sdpa.flash_cpu",
    attention=unit_stride(pinned(SDPBackend.FLASH_ATTENTION)),
    supports=Supports(
        devices=("cpu",),
        causal=("top_left",),
        scale="positive",
        grouped_heads=True,
        cross_lengths=True,
        strided=True,
        unaligned=True,
    ),
    arithmetic=arithmetic_of_flash_cpu,
    summary="PyTorch's fused kernel for the CPU.",
)

# The CUDA kernels are bare (`bare`). They refuse, with a clear exception, some calls that no claim can describe.
# Examples are causal masks with queries != keys (flash, whose own alignment is bottom-right) and a single key (cuDNN).
#
# The CUDA kernels do not claim unaligned tensors. For these, flash, and efficient in float32, end in a CUDA error
# (misaligned address), and the process loses its device (pytorch#183484). flash does the same if only the rows of an
# aligned tensor are unaligned, as in the first columns of a buffer with one more. cuDNN refuses the backward pass.
flash = Implementation(
    name="sdpa.flash",
    attention=unit_stride(pinned(SDPBackend.FLASH_ATTENTION)),
    supports=Supports(
        dtypes=("float16", "bfloat16"),
        devices=("cuda",),
        causal=("top_left",),
        scale="positive",
        grouped_heads=True,
        cross_lengths=True,
        strided=True,
    ),
    arithmetic=arithmetic_by_heads,
    summary="FlashAttention-2 as shipped with PyTorch.",
    missing=not_on_cuda,
    bare=True,
)

efficient = Implementation(
    name="sdpa.efficient",
    attention=unit_stride(pinned(SDPBackend.EFFICIENT_ATTENTION)),
    supports=Supports(
        devices=("cuda",),
        causal=("top_left",),
        scale="positive",
        cross_lengths=True,
        strided=True,
        dims=(8, 256),
        dim_multiple=8,
    ),
    arithmetic=arithmetic_of_efficient,
    summary="xFormers' memory-efficient kernel (CUTLASS) as shipped with PyTorch.",
    missing=not_on_cuda,
    bare=True,
)

cudnn = Implementation(
    name="sdpa.cudnn",
    attention=contiguous_gradient(unit_stride(pinned(SDPBackend.CUDNN_ATTENTION))),
    supports=Supports(
        dtypes=("float16", "bfloat16"),
        devices=("cuda",),
        causal=("top_left",),
        scale="positive",
        grouped_heads=True,
        cross_lengths=True,
        strided=True,
        dims=(8, 128),
        dim_multiple=8,
    ),
    arithmetic=arithmetic_by_heads,
    summary="cuDNN's fused attention, through PyTorch.",
    missing=not_on_cuda,
    bare=True,
)
