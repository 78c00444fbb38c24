"""Inputs as a kernel sees them that rounds them to e4m3, with one scale for each block of rows.

e4m3 is the FP8 format of 4 exponent bits and 3 bits after the point. Its largest number is 448, its smallest normal
number is 2^-6, and its smallest number is 2^-9. A scale is a power of two, so it rounds nothing itself.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles.problem import Problem

LARGEST = 448.0
LEAST_EXPONENT = -126  # of a scale: its inverse is a float32


def exponents(tensor: Float[Tensor, "batch heads length dim"], rows: int) -> Float[Tensor, "batch heads length"]:
    """The exponent of the scale of each row, in float64. Blocks of `rows` rows share one.

    The scale is the smallest power of two, at least 2^-126, that brings the block into the range of e4m3.
    """
    *sizes, length, _ = tensor.shape
    largest = tensor.abs().amax(dim=3).to(torch.float64)
    blocks = torch.nn.functional.pad(largest, (0, -length % rows)).reshape(*sizes, -1, rows).amax(dim=3)
    mantissa, exponent = torch.frexp(blocks)  # the mantissa is in [0.5, 1), and 448 is 0.875 x 2^9
    found = (exponent - 9 + (mantissa > LARGEST / 2.0**9)).clamp(min=LEAST_EXPONENT)
    return found.repeat_interleave(rows, dim=2)[..., :length].to(torch.float64)


def rounded(tensor: Float[Tensor, "batch heads length dim"], rows: int) -> Float[Tensor, "batch heads length dim"]:
    """The tensor rounded to nearest in e4m3, ties to even, with the scales of its blocks. The result is float64."""
    scale = torch.exp2(exponents(tensor, rows))[..., None]
    return (tensor.to(torch.float64) / scale).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64) * scale


def rounded_inputs(problem: Problem, rows: int) -> Problem:
    """The problem with query, key and value in e4m3."""
    query, key, value = (rounded(tensor, rows) for tensor in (problem.query, problem.key, problem.value))
    return replace(problem, query=query, key=key, value=value)
