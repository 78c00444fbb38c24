"""Finds the coarser arithmetic whose errors a wrong answer has.

It may be TF32, products in 16 bit, weights that are rounded or cut off, running sums in 16 bit, or gradients of each
query head that are rounded before they are summed.

The attention of one key head is computed in the coarser arithmetic, forward and backward. Most of its errors are those
of the wrong answer if the kernel does the same. An error of another origin is not explained by chance: the computed
errors would then only add to it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flashproof.calling import GRADIENTS, TensorName
from flashproof.oracles.naive import Attention
from flashproof.oracles.problem import Problem

LEFT = 0.5  # the share of the mean square error that an explanation may leave
TILES = (16, 32, 64, 128)  # of keys, or of queries
ROWS = 16  # in fewer rows, errors may agree by chance
_LOWEST = -1e30  # below every score; its differences are finite
_TF32_LOST = 13  # bits of a float32 that TF32 does not have

Rounding = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


def errors_of(problem: Problem, failed: Mapping[TensorName, Tensor], exact: Attention) -> tuple[list[TensorName], str]:
    """The wrong tensors whose errors a coarser arithmetic explains, and this arithmetic in words.

    problem: of one key head, without dropout. failed: the wrong tensors of its heads. exact: the exact result of the
    same heads. Returns an empty list and an empty text if no arithmetic explains the first wrong tensor.
    """
    given: dict[TensorName, Tensor] = {name: tensor for name, tensor in failed.items() if name != "lse"}
    if not given or problem.dropout.p:
        return [], ""
    for words, computed in _answers(problem, backward=any(name in GRADIENTS for name in given)):
        met = [
            name for name in given if name in computed and _explains(given[name], computed[name], getattr(exact, name))
        ]
        if met and met[0] == next(iter(given)):
            return met, words
    return [], ""


def _explains(got: Tensor, computed: Tensor, exact: Tensor) -> bool:
    """Whether at most `LEFT` is left of the mean square error of the tensor, and of that of at least half of its rows.

    All elements of a row may share one error, so the computed one may agree with it by chance. A tensor with fewer than
    `ROWS` wrong rows is not explained. An error is the distance from the correctly rounded result. All kernels make the
    last rounding, so it explains nothing.
    """
    rounded = exact.to(got.dtype).to(torch.float64)
    left, error = (
        (got.to(exact.device, torch.float64) - other.to(exact.device, torch.float64)).square().flatten(0, -2).sum(dim=1)
        for other in (computed, rounded)
    )
    is_wrong = error > 0.0
    if int(is_wrong.sum()) < ROWS or not bool(error.isfinite().all()):
        return False
    shares = left[is_wrong] / error[is_wrong]
    return bool(left.sum() <= LEFT * error.sum()) and bool(shares.median() <= LEFT)


def _answers(problem: Problem, *, backward: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The answers of coarser arithmetics, with their names."""
    dtype = problem.query.dtype
    if backward and problem.query.shape[1] > 1 and dtype != torch.float32:
        words = f"gradients of each query head that are rounded to {_name(dtype)} before they are summed"
        computed = _computed(problem, _EXACT, _unchanged, backward=True, by_heads=True)
        yield f"{words}, which the claim gradients='heads' allows", computed
    for words, product in _products(problem):
        yield words, _computed(problem, product, backward=backward)
    for words, rounding in _roundings_of_weights(problem):
        yield f"weights that are {words}", _computed(problem, _EXACT, rounding, backward=backward)
    if dtype == torch.float32:
        return
    for size in TILES:
        if size < max(problem.query.shape[2], problem.key.shape[2]):
            for parts in (False, True):
                words = f"running sums that are rounded to {_name(dtype)} after each tile of {size}"
                yield words, _computed_in_tiles(problem, size, parts=parts, backward=backward)


def _products(problem: Problem) -> Iterator[tuple[str, Product]]:
    """Coarser products of matrices, with their names."""
    dtype = problem.query.dtype
    if dtype == torch.float32:
        for words, rounding in (
            ("TF32", _to_tf32),
            ("TF32, which truncates its operands", _truncated_to_tf32),
            ("float16", _to_float16),
            ("bfloat16", _to_bfloat16),
        ):
            yield f"products in {words}", _rounded(rounding)
        return
    yield f"products that are rounded to {_name(dtype)}", torch.matmul


def _roundings_of_weights(problem: Problem) -> Iterator[tuple[str, Rounding]]:
    """The roundings of weights that are coarser than those to the dtype of the problem, with their names."""
    if problem.query.dtype == torch.float32:
        yield "rounded to float16 or TF32", _to_tf32  # most weights have the same value in both
    else:
        dtype = _name(problem.query.dtype)
        yield f"cut off to {dtype}, towards 0, instead of rounded", _CUTS[problem.query.dtype]
    if problem.query.dtype != torch.bfloat16:
        yield "rounded to bfloat16", _to_bfloat16


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _computed(
    problem: Problem,
    product: Product,
    rounding: Rounding | None = None,
    *,
    backward: bool,
    by_heads: bool = False,
) -> dict[str, Tensor]:
    """The answer to a problem with one product in place of all.

    rounding: of the weights. Then float32 holds all else. Otherwise the dtype of the problem does. by_heads: whether
    each query head has a copy of the keys and values in the dtype of the problem, so that its gradients are rounded.
    """
    with torch.inference_mode(False), torch.enable_grad():  # a caller may have turned gradients off
        leaves = [
            tensor.detach().clone().requires_grad_(backward) for tensor in (problem.query, problem.key, problem.value)
        ]
        heads = problem.query.shape[1] if by_heads else -1  # -1: as many as there are
        query, key, value = (tensor.expand(-1, heads, -1, -1) for tensor in leaves)
        if rounding:
            query, key, value = query.float(), key.float(), value.float()
        visible = visible_keys(problem)
        scores = (product(query, key.mT.expand(-1, query.shape[1], -1, -1)) * problem.scale).masked_fill(
            ~visible, -math.inf
        )
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0)
        if rounding and backward:  # as PyTorch does, the backward rounds the gradient of the rounded weights
            weights = rounding(weights.detach()) + (weights - weights.detach())
            weights.register_hook(rounding)  # type: ignore[no-untyped-call]
        elif rounding:
            weights = rounding(weights)
        out = product(weights, value.expand(-1, query.shape[1], -1, -1)).to(problem.query.dtype)
        if not backward:
            return {"out": out}
        gradients = torch.autograd.grad(out, leaves, problem.dout.to(out.dtype))
        return {"out": out.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def _computed_in_tiles(problem: Problem, size: int, *, parts: bool, backward: bool) -> dict[str, Tensor]:
    """The answer to a problem whose running sums have its 16-bit dtype. All else is exact.

    size: the keys of a tile in the sums of out and dq, the queries of a tile in those of dk and dv. parts: whether the
    rescaled sum and the product of a tile are rounded too, before they are added.
    """
    dtype, group = problem.query.dtype, problem.query.shape[1]
    query, key, value, dout = (
        tensor.double().expand(-1, group, -1, -1)
        for tensor in (problem.query, problem.key, problem.value, problem.dout)
    )

    def added(total: Tensor, more: Tensor) -> Tensor:
        if parts:
            total, more = total.to(dtype).double(), more.to(dtype).double()
        return (total + more).to(dtype).double()

    def product(left: Tensor, right: Tensor) -> Tensor:
        """left: [1, heads, n, tokens]. right: [1, heads, tokens, dim]. One sum passes through all heads."""
        total = torch.zeros((), dtype=torch.float64, device=left.device)
        for left_head, right_head in zip(_tiles(left, 1, 1), _tiles(right, 1, 1), strict=True):
            for tile, other in zip(_tiles(left_head, size, 3), _tiles(right_head, size, 2), strict=True):
                total = added(total, tile @ other)
        return total

    scores = (query @ key.mT * problem.scale).masked_fill(~visible_keys(problem), -math.inf)
    peak = torch.full_like(scores[..., :1], _LOWEST)
    out, weight = torch.zeros_like(peak), torch.zeros_like(peak)
    for tile, values in zip(_tiles(scores, size, 3), _tiles(value, size, 2), strict=True):
        above = torch.maximum(peak, tile.amax(dim=3, keepdim=True))
        factor, weights = torch.exp(peak - above), torch.exp(tile - above)
        out, weight = added(out * factor, weights @ values), weight * factor + weights.sum(dim=3, keepdim=True)
        peak = above
    answer = {"out": (out / weight).nan_to_num(0.0)}
    if backward:
        weights = torch.exp(scores - peak) / weight.clamp(min=torch.finfo(torch.float64).tiny)
        slopes = weights * (dout @ value.mT - (dout * (weights @ value)).sum(dim=3, keepdim=True))
        answer["dq"] = torch.cat([product(slopes[:, [head]], key[:, [head]]) for head in range(group)], dim=1)
        answer["dk"], answer["dv"] = product(slopes.mT, query), product(weights.mT, dout)
        for name in ("dq", "dk"):
            answer[name] = answer[name] * problem.scale
    return {name: tensor.to(dtype) for name, tensor in answer.items()}


def _tiles(tensor: Tensor, size: int, dim: int) -> Iterator[Tensor]:
    """The parts of a tensor along one dimension. The last part may be smaller."""
    for start in range(0, tensor.shape[dim], size):
        yield tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))


def visible_keys(problem: Problem) -> Tensor:
    """Which keys each query sees, [1, heads, queries, keys]."""
    rows = torch.arange(problem.query.shape[2], device=problem.query.device)
    return torch.stack([problem.mask.visible(0, head, rows) for head in range(problem.query.shape[1])])[None]


def _rounded(rounding: Rounding) -> Product:
    """A product of matrices whose operands are rounded first. Its sums are float64."""

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return (rounding(left).double() @ rounding(right).double()).float()

    class Multiplied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
            ctx.save_for_backward(left, right)
            return multiply(left, right)

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
            left, right = ctx.saved_tensors
            return multiply(slopes[0], right.mT), multiply(left.mT, slopes[0])

    product: Product = Multiplied.apply
    return product


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


_EXACT = _rounded(_unchanged)


def _to_float16(tensor: Tensor) -> Tensor:
    return tensor.half().float()


def _to_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def _to_tf32(tensor: Tensor) -> Tensor:
    """Rounds float32 numbers to nearest in TF32, as PyTorch's kernels do."""
    return _truncated(tensor, _TF32_LOST, more=1 << (_TF32_LOST - 1))


def _truncated_to_tf32(tensor: Tensor) -> Tensor:
    """Drops the bits of float32 numbers that TF32 does not have, as a tensor core does by itself."""
    return _truncated(tensor, _TF32_LOST)


def _truncated_to_bfloat16(tensor: Tensor) -> Tensor:
    return _truncated(tensor, 16)


def _truncated(tensor: Tensor, lost: int, more: int = 0) -> Tensor:
    """Drops the last bits of float32 numbers. more: what is added to the bits before."""
    return ((tensor.contiguous().view(torch.int32) + more) & -(1 << lost)).view(torch.float32)


# float16 has as many significant bits as TF32.
_CUTS: dict[torch.dtype, Rounding] = {torch.float16: _truncated_to_tf32, torch.bfloat16: _truncated_to_bfloat16}
