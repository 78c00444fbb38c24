"""Attention from its definition, at any precision, with loops over mpmath numbers.

This code is written to be read, not to be fast. It is the second opinion beside `oracles/ball.py`. The two modules
share the question (Problem, Mask, Dropout) and nothing else. This module uses no running maximum and no shift: the
exponents of mpmath numbers are unbounded, so exp(s) is computed directly. The gradients are the derivatives of the
definition. The derivative of the softmax is its Jacobian dp_j / ds_k = p_j ([j = k] - p_k).

Ten tokens take a few milliseconds. The forward at 64 queries, 64 keys and dim 64 takes about a second.
"""

from typing import NamedTuple

import mpmath
import torch
from mpmath import mp, mpf
from torch import Tensor

from flashproof.oracles.problem import Problem

BITS = 200  # precision of each operation

# Nested lists of mpf, with the same indices as the tensors.
Vector = list[mpf]
Matrix = list[list[mpf]]
Heads = list[list[Matrix]]  # [batch][head][position][dim]


class Forward(NamedTuple):
    """out[batch][head][query][dim] and lse[batch][head][query].

    lse is the natural logarithm of the sum of exp(score). It is -inf where a query sees no key.
    """

    out: Heads
    lse: list[list[Vector]]


class Gradients(NamedTuple):
    """The gradients of sum(out o dout): dq[batch][head][query][dim], dk and dv [batch][kv_head][key][dim]."""

    dq: Heads
    dk: Heads
    dv: Heads


def forward(problem: Problem, bits: int = BITS) -> Forward:
    """Computes the output and the log-sum-exp. Each operation rounds to `bits` bits."""
    with mp.workprec(bits):
        batches, heads, _, _ = problem.query.shape
        answers = [[_Head(problem, batch, head).forward() for head in range(heads)] for batch in range(batches)]
        return Forward(
            [[out for out, _ in by_head] for by_head in answers], [[lse for _, lse in by_head] for by_head in answers]
        )


def gradients(problem: Problem, bits: int = BITS) -> Gradients:
    """Computes the closed-form gradients. Each operation rounds to `bits` bits."""
    batches, heads, _, _ = problem.query.shape
    kv_heads = problem.key.shape[1]
    with mp.workprec(bits):
        dq: Heads = []
        dk: Heads = []
        dv: Heads = []
        for batch in range(batches):
            by_head = [_Head(problem, batch, head).gradients() for head in range(heads)]
            shared = [by_head[kv_head * problem.groups : (kv_head + 1) * problem.groups] for kv_head in range(kv_heads)]
            dq.append([dq_head for dq_head, _, _ in by_head])
            dk.append([_sum([dk_head for _, dk_head, _ in group]) for group in shared])
            dv.append([_sum([dv_head for _, _, dv_head in group]) for group in shared])
        return Gradients(dq, dk, dv)


def as_tensor(numbers: object) -> Tensor:
    """Converts nested lists of mpf to a float64 tensor. Each number is rounded to float64."""

    def rounded(part: object) -> object:
        return [rounded(inner) for inner in part] if isinstance(part, list) else float(part)  # type: ignore[arg-type]

    return torch.tensor(rounded(numbers), dtype=torch.float64)


class _Head:
    """Attention over one query head of one batch entry. The tensors are lists of rows of mpf."""

    def __init__(self, problem: Problem, batch: int, head: int) -> None:
        every_query = torch.arange(problem.query.shape[2])
        kv_head = head // problem.groups
        self.scale = mpf(problem.scale)
        self.query = _exact(problem.query[batch, head])
        self.key = _exact(problem.key[batch, kv_head])
        self.value = _exact(problem.value[batch, kv_head])
        self.dout = _exact(problem.dout[batch, head])
        self.visible: list[list[bool]] = problem.mask.visible(batch, head, every_query).tolist()
        kept = problem.dropout.kept(batch, head, every_query, len(self.key)).tolist()
        survivor = 1 / (1 - mpf(problem.dropout.p))
        self.dropout = [[survivor if keep else mpf(0) for keep in row] for row in kept]

    def exponentials(self, i: int) -> dict[int, mpf]:
        """Returns exp(score) for each key that query i sees, by key position."""
        return {
            j: mpmath.exp(self.scale * _dot(self.query[i], self.key[j]))
            for j, visible in enumerate(self.visible[i])
            if visible
        }

    def forward(self) -> tuple[Matrix, Vector]:
        out, lse = _zeros_like(self.query), []
        for i in range(len(self.query)):
            exponentials = self.exponentials(i)
            total = sum(exponentials.values(), mpf(0))
            lse.append(mpmath.log(total) if exponentials else -mpmath.inf)
            for j, exponential in exponentials.items():
                weight = exponential / total
                for d, value in enumerate(self.value[j]):
                    out[i][d] += self.dropout[i][j] * weight * value
        return out, lse

    def gradients(self) -> tuple[Matrix, Matrix, Matrix]:
        dq, dk, dv = _zeros_like(self.query), _zeros_like(self.key), _zeros_like(self.value)
        for i in range(len(self.query)):
            exponentials = self.exponentials(i)
            total = sum(exponentials.values(), mpf(0))
            weights = {j: exponential / total for j, exponential in exponentials.items()}
            dweights = {j: self.dropout[i][j] * _dot(self.dout[i], self.value[j]) for j in weights}
            mean = sum((weights[j] * dweights[j] for j in weights), mpf(0))
            for j, weight in weights.items():
                dscore = weight * (dweights[j] - mean)
                for d in range(len(self.query[0])):
                    dv[j][d] += self.dropout[i][j] * weight * self.dout[i][d]
                    dq[i][d] += self.scale * dscore * self.key[j][d]
                    dk[j][d] += self.scale * dscore * self.query[i][d]
        return dq, dk, dv


def _exact(matrix: Tensor) -> Matrix:
    """Converts a matrix to mpf. The conversion is exact for float16, bfloat16, float32 and float64."""
    return [[mpf(number) for number in row] for row in matrix.to(torch.float64).tolist()]


def _zeros_like(matrix: Matrix) -> Matrix:
    return [[mpf(0) for _ in row] for row in matrix]


def _dot(left: Vector, right: Vector) -> mpf:
    total = mpf(0)
    for x, y in zip(left, right, strict=True):
        total += x * y
    return total


def _sum(matrices: list[Matrix]) -> Matrix:
    return [[sum(numbers, mpf(0)) for numbers in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
