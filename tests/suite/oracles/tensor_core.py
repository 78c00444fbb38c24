"""Emulates products on a tensor core of Hopper, which sums with truncation: of bfloat16 parts, and of e4m3 numbers.

One step of the tensor core adds 16 products to a sum. It aligns the 17 numbers to the largest exponent among them, and
truncates each of them 25 bits below that exponent. It adds the results exactly, and truncates the sum to 24 bits. Of
e4m3 numbers, a step adds 32 products. It truncates them 13 bits below the largest exponent, and the sum to 14 bits.
Sources: Khattak and Mikaitis, arXiv 2512.07004; Xie et al., arXiv 2511.10909.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """How one step of a tensor core adds."""

    products: int  # that it adds to a sum
    below: int  # bits that it keeps below the largest exponent
    bits: int  # of the sum


OF_BFLOAT16 = Step(16, 25, 24)
OF_E4M3 = Step(32, 13, 14)
STEP = OF_BFLOAT16.products
LARGEST = torch.finfo(torch.bfloat16).max
# The pairs of parts that are multiplied, in the order of their use. Small products come first.
PAIRS = ((0, 2), (1, 1), (0, 1), (2, 0), (1, 0), (0, 0))


def parts(x: Tensor) -> list[Tensor]:
    """Returns three float32 tensors of bfloat16 numbers whose sum is x, apart from underflow.

    Numbers that round to infinity get the largest finite first part.
    """
    found = []
    for _ in range(3):
        part = x.clamp(-LARGEST, LARGEST).bfloat16().float()
        found.append(part)
        x = x - part
    return found


def step(a: Tensor, b: Tensor, total: Tensor, how: Step = OF_BFLOAT16) -> Tensor:
    """Adds a @ b to total, as one step of a tensor core.

    a [m, up to how.products] and b [up to how.products, n] hold bfloat16 or e4m3 numbers, and total [m, n] float32
    numbers, all in float64.
    """
    products = torch.cat([a[:, :, None] * b[None], total[:, None]], dim=1)
    of_a, of_b, of_total = (torch.frexp(x).exponent - 1 for x in (a, b, total))
    nothing = -1000  # the exponent of 0
    exponents = (of_a.masked_fill(a == 0, nothing)[:, :, None] + of_b.masked_fill(b == 0, nothing)[None]).amax(dim=1)
    largest = torch.maximum(exponents, of_total.masked_fill(total == 0, nothing))[:, None].clamp(min=-900)
    unit = _power_of_two(largest - how.below)
    added = (torch.trunc(products / unit) * unit).sum(dim=1)
    last_place = _power_of_two((torch.frexp(added).exponent - how.bits).clamp(min=-149))
    return torch.trunc(added / last_place) * last_place


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)


def product(a: Tensor, b: Tensor, terms: int = 64) -> Tensor:
    """Computes a [m, k] @ b [k, n] in float32.

    A tensor core sums `terms` products of each element afresh, and float32 additions add up these sums.
    """
    of_a, of_b = ([part.double() for part in parts(x)] for x in (a, b))
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    for first in range(0, a.shape[1], terms):
        last = min(first + terms, a.shape[1])
        fresh = torch.zeros(total.shape, dtype=torch.float64)
        for i, j in PAIRS:
            for k in range(first, last, STEP):
                some = slice(k, min(k + STEP, last))
                fresh = step(of_a[i][:, some], of_b[j][some], fresh)
        total += fresh.float()
    return total


def product_of_e4m3(a: Tensor, b: Tensor, terms: int = 128) -> Tensor:
    """Computes a [m, k] @ b [k, n] in float32, for float32 tensors of e4m3 numbers. terms: as for `product`."""
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    for first in range(0, a.shape[1], terms):
        fresh = torch.zeros(total.shape, dtype=torch.float64)
        for k in range(first, min(first + terms, a.shape[1]), OF_E4M3.products):
            some = slice(k, min(k + OF_E4M3.products, first + terms))
            fresh = step(a[:, some].double(), b[some].double(), fresh, OF_E4M3)
        total += fresh.float()
    return total
