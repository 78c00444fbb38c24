"""The public call of the project's own kernels: its arguments, their checks and their defaults.

The algorithm of an implementation is a function of checked arguments. `Attention` or `BlockSparseAttention` turns it
into the public call. Every error message contains the argument, its value and the valid values.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashproof.impls.triton  # noqa: F401  # it must choose the interpreter before torch.compiler imports Triton
from flashproof.impls.shapes import Bool, Float, Float32
from flashproof.impls.spec import Alignment

BLOCK = 128  # a block mask has one entry for each block of 128 x 128 scores
MAX_DIM = 256
# Kernels count rows in 32 bits. They count up to 256 rows past the end: the rest of a tile of 128, and the next tile.
MAX_LENGTH = 2**31 - 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# The tensors of a call, by shape.
Queries = Float[Tensor, "batch heads queries dim"]  # also the output and the gradients of queries
Keys = Float[Tensor, "batch kv_heads keys dim"]  # also values, and the gradients of keys and values
Rows = Float32[Tensor, "batch heads queries"]  # one number for each query, such as its LSE
BlockMask = Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"]


class Call(NamedTuple):
    """A checked call. All sizes are positive. `groups` query heads share each key head."""

    batch: int
    heads: int
    kv_heads: int
    groups: int
    queries: int
    keys: int
    dim: int
    scale: float
    is_causal: bool
    offset: int  # with is_causal, query i sees key j if j <= i + offset; top-left: 0, bottom-right: keys - queries
    dropout_p: float
    dropout_seed: int

    @property
    def unseeded(self) -> "Call":
        """The call with the seed 0. Calls that differ only in their seeds are then equal."""
        return self._replace(dropout_seed=0) if self.dropout_seed else self

    @property
    def dropout_threshold(self) -> int:
        """A weight is dropped if its first Philox word w is less than this threshold, that is, if w < p 2^32."""
        return math.ceil(self.dropout_p * 2.0**32)


# ------------------------------------------------------------------------------------------------- the public call


Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Makes torch.compile call a function without tracing it.

    Tracing would unroll the Python loops over heads and tiles into one graph, which takes minutes. In addition,
    torch.compile cannot determine which tensors a Triton kernel with Philox writes. It then copies every tensor, and
    fails on a tensor with a stride of 0.
    """
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class _Named:
    """A callable made from a function. It replaces the function in its module."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.__name__, self.__qualname__, self.__module__ = (
            function.__name__,
            function.__qualname__,
            function.__module__,
        )

    def __reduce__(self) -> str:
        """Pickles the callable by its name, as a function is pickled."""
        return self.__qualname__


class Attention(_Named):
    """The public call of an algorithm.

    The algorithm is a function of (query, key, value, call) that returns (out, lse).
    """

    def __init__(self, algorithm: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]) -> None:
        super().__init__(algorithm)
        self.algorithm = algorithm

    def __call__(
        self,
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
    ) -> (
        Float[Tensor, "batch heads queries dim"]
        | tuple[Float[Tensor, "batch heads queries dim"], Float32[Tensor, "batch heads queries"]]
    ):
        """Computes softmax(scale query key^T) value, with gradients for query, key and value.

        query, key and value have the same dtype: float32, float16 or bfloat16. They may have any strides, and dim is at
        most 256. The output has the shape and the dtype of query.

        - is_causal: query i sees key j only if j <= i ("top_left") or j <= i + keys - queries ("bottom_right").
        - scale: any finite number. None means 1/sqrt(dim).
        - enable_gqa: heads may be a multiple of kv_heads. Then heads / kv_heads consecutive query heads share a key
          head.
        - dropout_p: the probability, in [0, 1), that a normalised weight is set to 0. The other weights are divided by
          1 - dropout_p.
        - dropout_seed: an integer in [0, 2^64). Philox 4x32-10 (Salmon et al., SC 2011) draws the dropped weights from
          it. The same seed drops the same weights.
        - return_lse: returns (out, lse). lse [batch, heads, queries] is float32. It is the natural logarithm of the sum
          of the exponentials of the scaled scores of a query. It carries no gradient.

        A query that sees no key has output 0, LSE -inf and zero gradients.

        Raises TypeError for an argument of the wrong type, ValueError for an argument with a wrong value, and
        NotImplementedError for a tensor with a tangent. If a compiler or a device refuses the call, the error is a
        RuntimeError.
        """
        call = check_call(query, key, value, is_causal, causal_alignment, scale, enable_gqa, dropout_p, dropout_seed)
        out, lse = self.algorithm(query, key, value, call)
        return (out, lse) if return_lse else out


class BlockSparseAttention(_Named):
    """The public call of an algorithm over a block mask.

    The algorithm is a function of (query, key, value, block_mask, call) that returns (out, lse).
    """

    def __init__(
        self, algorithm: Callable[[Tensor, Tensor, Tensor, Tensor | None, Call], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(algorithm)
        self.algorithm = algorithm

    def __call__(
        self,
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
        block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None = None,
        return_lse: bool = False,
    ) -> (
        Float[Tensor, "batch heads queries dim"]
        | tuple[Float[Tensor, "batch heads queries dim"], Float32[Tensor, "batch heads queries"]]
    ):
        """Computes softmax(scale query key^T) value over the visible blocks, with gradients for query, key and value.

        block_mask is a boolean tensor [1 or batch, 1 or heads, ceil(queries / 128), ceil(keys / 128)]. If an entry is
        False, the queries of the block do not see its keys. If block_mask is None, all blocks are visible. The other
        arguments, the results and the errors are as in `Attention.__call__`.
        """
        call = check_call(
            query, key, value, is_causal, causal_alignment, scale, enable_gqa, dropout_p, dropout_seed, block_mask
        )
        out, lse = self.algorithm(query, key, value, block_mask, call)
        return (out, lse) if return_lse else out


# ------------------------------------------------------------------------------------- the checks of its arguments


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    causal_alignment: Alignment,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    dropout_seed: int,
    block_mask: Tensor | None = None,
) -> Call:
    """Checks the arguments of a public call and fills in its defaults. Raises the errors of `Attention.__call__`."""
    _check_tensors(query, key, value)
    _check_sizes(query, key, value, enable_gqa)
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_alignment: {causal_alignment!r} is unknown; give 'top_left' or 'bottom_right'")
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    scale = _checked_scale(scale, dim)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: {_short(is_causal)} is not a bool; give True or False")
    _check_dropout(dropout_p, dropout_seed)
    if block_mask is not None:
        _check_block_mask(block_mask, query, keys)
    offset = keys - queries if causal_alignment == "bottom_right" else 0
    return Call(
        batch,
        heads,
        kv_heads,
        heads // kv_heads,
        queries,
        keys,
        dim,
        scale,
        is_causal,
        offset,
        float(dropout_p),
        dropout_seed,
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks each tensor. Then checks that dtypes and devices agree."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: {type(tensor).__name__} is not a tensor; "
                "give a torch.Tensor of shape [batch, heads, length, dim]"
            )
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: layout {tensor.layout} is not taken; give a dense tensor, as to_dense() makes one"
            )
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)} has {tensor.ndim} dimensions; "
                "give four, [batch, heads, length, dim]"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: dtype {tensor.dtype} is not taken; give float32, float16 or bfloat16")
        if 0 in tensor.shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)} is empty; every size is at least 1")
        if tensor.shape[2] > MAX_LENGTH:
            raise ValueError(f"{name}: length {tensor.shape[2]} is larger than {MAX_LENGTH}, the largest taken")
        if (
            not torch.compiler.is_compiling()
            # A tensor with a tangent asks for forward-mode differentiation.
            and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        ):
            raise NotImplementedError(
                f"{name}: has a tangent, and forward-mode differentiation is not implemented; differentiate backwards"
            )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: dtype {tensor.dtype} differs from query's {query.dtype}; give all three the same")
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: device {tensor.device} differs from query's {query.device}; put all three on one device"
            )


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    if key.shape[0] != batch:
        raise ValueError(f"key: batch {key.shape[0]} differs from query's {batch}")
    if key.shape[3] != dim:
        raise ValueError(f"key: head dim {key.shape[3]} differs from query's {dim}")
    if value.shape != key.shape:
        raise ValueError(f"value: shape {list(value.shape)} differs from key's {list(key.shape)}; they must be equal")
    if dim > MAX_DIM:
        raise ValueError(f"query: head dim {dim} is larger than {MAX_DIM}, the largest taken")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"key: {kv_heads} heads for query's {heads}; give equal numbers, or enable_gqa=True to share key heads"
        )
    if heads % kv_heads:
        raise ValueError(
            f"key: {kv_heads} heads do not divide query's {heads}; "
            "with enable_gqa query's heads are a multiple of key's"
        )


def _checked_scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(dim)
    # Under torch.compile, a NumPy number is not an instance of float, but float() converts it.
    if isinstance(scale, bool) or not isinstance(scale, int | float | numpy.floating | numpy.ndarray):
        raise TypeError(f"scale: {_short(scale)} is not a number; give a finite float, or None for 1/sqrt(dim)")
    scale = scale if isinstance(scale, int) else float(scale)
    # math.isfinite does not accept integers beyond float64, and torch.compile cannot trace it.
    if not -sys.float_info.max <= scale <= sys.float_info.max:
        raise ValueError(f"scale: {scale} is not finite; give a finite float, or None for 1/sqrt(dim)")
    return float(scale) + 0.0  # the sum makes -0.0 to 0.0, so that equal scales are the same scale


def _check_dropout(dropout_p: float, dropout_seed: int) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: {_short(dropout_p)} is not a number; give a float in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: {dropout_p} is outside [0, 1)")
    if isinstance(dropout_seed, bool) or not isinstance(dropout_seed, int):
        raise TypeError(f"dropout_seed: {_short(dropout_seed)} is not an integer; give one in [0, 2^64)")
    if not 0 <= dropout_seed < 2**64:
        raise ValueError(f"dropout_seed: {dropout_seed} is outside [0, 2^64)")


def _check_block_mask(block_mask: Tensor, query: Tensor, keys: int) -> None:
    if not isinstance(block_mask, Tensor) or block_mask.dtype != torch.bool:
        kind = getattr(block_mask, "dtype", type(block_mask).__name__)
        raise TypeError(f"block_mask: {kind} is not boolean; give a torch.bool tensor")
    batch, heads, queries, _ = query.shape
    blocks = (math.ceil(queries / BLOCK), math.ceil(keys / BLOCK))
    shape = tuple(block_mask.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != blocks:
        raise ValueError(
            f"block_mask: shape {list(shape)} does not fit; "
            f"give [1 or {batch}, 1 or {heads}, {blocks[0]}, {blocks[1]}], "
            f"an entry for each {BLOCK} x {BLOCK} block of scores"
        )
    if block_mask.device != query.device:
        raise ValueError(f"block_mask: device {block_mask.device} differs from query's {query.device}")


def _short(argument: object) -> str:
    """An argument as an error message shows it.

    A tensor is shown by its shape, because its numbers would fill the screen.
    """
    return f"a tensor of shape {list(argument.shape)}" if isinstance(argument, Tensor) else repr(argument)
