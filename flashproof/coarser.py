"""Finds the coarser arithmetic whose errors a wrong answer has: products in TF32, or products in 16 bit.

The attention of one key head is computed with a coarser product of matrices, forward and backward. Most of its errors
are those of the wrong answer if the kernel does the same. An error of another origin is not explained by chance: the
computed errors would then only add to it.
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
ROWS = 16  # in fewer rows, errors may agree by chance
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
    for words, product in _products(problem):
        computed = _computed(problem, product, backward=any(name in GRADIENTS for name in given))
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


def _products(problem: Problem) -> Iterator[tuple[str, Product]]:
    """Coarser products of matrices, with their names."""
    dtype = problem.query.dtype
    if dtype == torch.float32:
        for words, rounding in (
            ("TF32", _to_tf32),
            ("TF32, which truncates its operands", _truncated_to_tf32),
            ("float16", lambda tensor: tensor.half().float()),
            ("bfloat16", lambda tensor: tensor.bfloat16().float()),
        ):
            yield f"products in {words}", _rounded(rounding)
        return
    yield f"products that are rounded to {str(dtype).removeprefix('torch.')}", torch.matmul


def _computed(problem: Problem, product: Product, *, backward: bool) -> dict[str, Tensor]:
    """The answer to a problem with one product in place of all, in the dtype of the problem."""
    with torch.inference_mode(False), torch.enable_grad():  # a caller may have turned gradients off
        leaves = [
            tensor.detach().clone().requires_grad_(backward) for tensor in (problem.query, problem.key, problem.value)
        ]
        query, key, value = leaves
        rows = torch.arange(query.shape[2], device=query.device)
        visible = torch.stack([problem.mask.visible(0, head, rows) for head in range(query.shape[1])])[None]
        scores = (product(query, key.mT.expand(-1, query.shape[1], -1, -1)) * problem.scale).masked_fill(
            ~visible, -math.inf
        )
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0)
        out = product(weights, value.expand(-1, query.shape[1], -1, -1))
        if not backward:
            return {"out": out}
        gradients = torch.autograd.grad(out, leaves, problem.dout.to(out.dtype))
        return {"out": out.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


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


def _to_tf32(tensor: Tensor) -> Tensor:
    """Rounds float32 numbers to nearest in TF32, as PyTorch's kernels do."""
    return _truncated_to_tf32(tensor, 1 << (_TF32_LOST - 1))


def _truncated_to_tf32(tensor: Tensor, more: int = 0) -> Tensor:
    """Drops the bits of float32 numbers that TF32 does not have, as a tensor core does by itself."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + more) & -(1 << _TF32_LOST)).view(torch.float32)
