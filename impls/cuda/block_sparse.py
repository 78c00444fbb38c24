"""Block-sparse FlashAttention in CUDA C++: the call, its lists of blocks and its claims.

The algorithm is in `block_sparse.cu` and in `fa2.cu`. Two custom operators of torch,
`flashproof::cuda_block_sparse_forward` and `flashproof::cuda_block_sparse_backward`, launch the kernels. torch.compile
supports such operators.
"""

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashproof.impls.call import BLOCK, BlockMask, BlockSparseAttention, Call, Keys, Queries, Rows
from flashproof.impls.cuda import flash
from flashproof.impls.cuda.launching import call_of, check_scale, missing, packed_seed, slow
from flashproof.impls.shapes import Bool, Int
from flashproof.impls.spec import OWN_KERNELS, Implementation

# ---------------------------------------------------------------------------------------------------------------- lists


class Mask(ctypes.Structure):
    """The argument of type `Mask` of block_sparse.cu."""

    _fields_ = (
        ("offset", ctypes.c_int),
        ("lists", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("batch", "head", "row")),
    )


def _masking(call: Call, lists: Int[Tensor, "batch_or_1 heads_or_1 rows columns"]) -> flash.Masking:
    """The mask of lists with 2 + blocks columns, in the form of `_lists`.

    If the first or second size is 1, all batch entries or all heads read the same list.
    """
    strides = [stride if size > 1 else 0 for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)]
    return flash.Masking("block_sparse.cu", Mask(call.offset, lists.data_ptr(), *strides, lists.stride(2)), (lists,))


def visible_blocks(call: Call, block_mask: BlockMask | None, device: torch.device) -> BlockMask:
    """The blocks in which some query sees some key. Both the block mask and the causal mask count."""
    first_query, first_key = _corners(call, device)
    last_query = torch.clamp(first_query + BLOCK, max=call.queries) - 1
    reached = first_key <= last_query + call.offset
    if not call.is_causal:
        reached = torch.ones_like(reached)
    return reached[None, None] if block_mask is None else block_mask & reached


def lists_of_keys(call: Call, visible: BlockMask) -> Int[Tensor, "batch_or_1 heads_or_1 query_blocks 2+key_blocks"]:
    """For each block of queries, the list of the blocks of keys that it sees.

    A block is partial if the diagonal or the end of the keys cuts it. Otherwise it is whole.
    """
    first_query, first_key = _corners(call, visible.device)
    whole = first_key + BLOCK <= call.keys
    if call.is_causal:
        whole = whole & (first_key + BLOCK - 1 <= first_query + call.offset)
    return _lists(visible, visible & whole)


def lists_of_queries(call: Call, visible: BlockMask) -> Int[Tensor, "batch_or_1 heads_or_1 key_blocks 2+query_blocks"]:
    """For each block of keys, the list of the blocks of queries that see it.

    A block is partial if the diagonal or the end of the queries cuts it. Otherwise it is whole.
    """
    first_query, first_key = _corners(call, visible.device)
    whole = first_query + BLOCK <= call.queries
    if call.is_causal:
        whole = whole & (first_key + BLOCK - 1 <= first_query + call.offset)
    return _lists(visible.mT, (visible & whole).mT)


def _corners(call: Call, device: torch.device) -> tuple[Int[Tensor, "query_blocks 1"], Int[Tensor, "1 key_blocks"]]:
    """The first query of each block of queries, and the first key of each block of keys."""
    first_query = torch.arange(0, call.queries, BLOCK, device=device)
    first_key = torch.arange(0, call.keys, BLOCK, device=device)
    return first_query[:, None], first_key[None, :]


def _lists(
    visible: Bool[Tensor, "*batch rows blocks"], whole: Bool[Tensor, "*batch rows blocks"]
) -> Int[Tensor, "*batch rows 2+blocks"]:
    """The lists, int32, in the form that block_sparse.cu reads.

    The last dimension holds the number of whole blocks, the number of visible blocks, and then the numbers of the
    blocks: first the whole ones, then the partial ones, then the hidden ones.
    """
    rank = 2 - visible.to(torch.int32) - whole.to(torch.int32)
    order = torch.argsort(rank, dim=-1, stable=True)
    return torch.cat((whole.sum(-1, keepdim=True), visible.sum(-1, keepdim=True), order), dim=-1).to(torch.int32)


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("flashproof::cuda_block_sparse_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor | None,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor]:
    """The forward: returns (out, lse)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    lists = lists_of_keys(call, visible_blocks(call, block_mask, query.device))
    return flash.forward(call, _masking(call, lists), query, key, value)


@torch.library.custom_op("flashproof::cuda_block_sparse_backward", mutates_args=())
def _backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: Tensor | None,
    scale: float,
    is_causal: bool,
    offset: int,
    dropout_p: float,
    dropout_seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward: returns (dquery, dkey, dvalue)."""
    call = call_of(query, key, scale, is_causal, offset, dropout_p, dropout_seed)
    visible = visible_blocks(call, block_mask, query.device)
    by_query, by_key = _masking(call, lists_of_keys(call, visible)), _masking(call, lists_of_queries(call, visible))
    return flash.backward(call, by_query, by_key, dout, query, key, value, out, lse)


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
    query, key, value, block_mask, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, block_mask)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, *ctx.saved_tensors, *ctx.options), None, *(None for _ in ctx.options)


_forward.register_autograd(_differentiate, setup_context=_keep)

# ------------------------------------------------------------------------------------------------------------- the call


@BlockSparseAttention
def attention(query: Queries, key: Keys, value: Keys, block_mask: BlockMask | None, call: Call) -> tuple[Queries, Rows]:
    """Block-sparse FlashAttention-2: returns (out, lse), with gradients for query, key and value.

    Raises ValueError if the scale is beyond float32, and CudaError if a kernel cannot be compiled or launched.
    """
    check_scale(call)
    options = (call.scale, call.is_causal, call.offset, call.dropout_p, packed_seed(call.dropout_seed))
    out, lse = _forward(query, key, value, block_mask, *options)
    return out, lse


implementation = Implementation(
    name="cuda.block_sparse",
    attention=attention,
    supports=replace(OWN_KERNELS, block_mask=True, linear_memory=False),
    arithmetic=flash.arithmetic,
    missing=missing,
    slow=slow,
    summary="Block-sparse FlashAttention in CUDA C++: FlashAttention-2 over lists of visible 128 x 128 blocks.",
)
