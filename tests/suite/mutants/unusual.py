"""More variants: kernels that are as right as those of `variants`, with unusual arithmetic."""

import math

import torch
from torch import Tensor

from flashproof.tests.suite.mutants.variants import _cast, _scores, finished, online, plain_backward, tiles, variant


@variant("the output is a compensated sum over tiles of 16 keys")
def compensated_sum(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = scale * _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp(scores - maximum)
    out, lost = torch.zeros(q.shape, dtype=torch.float32), torch.zeros(q.shape, dtype=torch.float32)
    for tile in tiles(len(k), 16):
        term = _cast(weights[:, tile], q) @ v[tile].float() - lost
        total = out + term
        lost = (total - out) - term
        out = total
    sums = weights.sum(dim=1, keepdim=True)
    return out / sums, (maximum + torch.log(sums))[:, 0]


def _exponential(x: Tensor) -> Tensor:
    """Computes exp(x) as 2^n times a polynomial of degree 7 on [-log(2) / 2, log(2) / 2]."""
    x = x.clamp(min=-200.0)
    power = torch.round(x * (1.0 / math.log(2.0)))
    rest = (x - power * 0.693359375) - power * -2.12194440e-4  # log 2 in two parts (Cody and Waite)
    found = torch.ones_like(x)
    for number in range(7, 0, -1):
        found = 1.0 + found * rest / number
    return torch.ldexp(found, power.clamp(min=-149.0).int()) * (x > -103.0)


@variant("exponentials from a polynomial, without the unit for special functions", exp_ulps=4.0)
def polynomial_exponential(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = _exponential((scores - maximum) * scale)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, (maximum * scale + torch.log(total))[:, 0]


@variant("the query is scaled in float32 before its product")
def scaled_query(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = ((q.float() * scale) @ k.float().T).masked_fill(~visible, -math.inf)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp(scores - maximum)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, (maximum + torch.log(total))[:, 0]


@variant("tiles of 32 keys by themselves, merged two by two as in a tournament")
def merged_as_a_tree(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    parts = [online(q, k, v, visible, scale, [tile]) for tile in tiles(len(k), 32)]
    while len(parts) > 1:
        merged = []
        for (acc, maximum, total), (other_acc, other_maximum, other_total) in zip(
            parts[::2], parts[1::2], strict=False
        ):
            highest = torch.maximum(maximum, other_maximum)
            near = torch.where(highest == -math.inf, 0.0, highest)
            own, other = (torch.exp((each - near) * scale) for each in (maximum, other_maximum))
            merged.append((own * acc + other * other_acc, highest, own * total + other * other_total))
        parts = merged + parts[len(merged) * 2 :]
    return finished(parts[0], scale)


def _backward_of_weights(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the backward with delta as the sum of P o dP over a row, instead of the sum of dO o O."""
    weights = torch.exp(scale * (q.float() @ k.float().T) - lse[:, None]).masked_fill(~visible, 0.0)
    dweights = dout.float() @ v.float().T
    delta = (weights * dweights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
    dscores = _cast(weights * (dweights - delta), q)
    return scale * (dscores @ k.float()), scale * (dscores.T @ q.float()), _cast(weights, q).T @ dout.float()


@variant("delta from the weights and their gradients, not from the output", backward=_backward_of_weights)
def delta_of_weights(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 64)), scale)


def _backward_in_two_sums(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dK and dV separately for the even and for the odd queries, and adds the two at the end."""
    dq = torch.zeros(q.shape, dtype=torch.float32)
    dk, dv = torch.zeros(k.shape, dtype=torch.float32), torch.zeros(v.shape, dtype=torch.float32)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        about = (out[part], lse[part], dout[part], visible[part])
        dq[part], own_dk, own_dv = plain_backward(q[part], k, v, *about, scale)
        dk, dv = dk + own_dk, dv + own_dv
    return dq, dk, dv


@variant("gradients of keys in two sums, of the even and of the odd queries", backward=_backward_in_two_sums)
def even_and_odd_queries(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 128)), scale)


@variant("scores summed over pieces of eight coordinates, from the last to the first")
def coordinates_from_the_last(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = torch.zeros(len(q), len(k), dtype=torch.float32)
    for piece in tiles(q.shape[1], 8)[::-1]:
        scores += q[:, piece].float() @ k[:, piece].float().T
    scores = scores.masked_fill(~visible, -math.inf)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - maximum) * scale)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, (maximum * scale + torch.log(total))[:, 0]


@variant("products in float64, each rounded to float32; the rest in float32")
def products_in_float64(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q.double() @ k.double().T).float().masked_fill(~visible, -math.inf)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - maximum) * scale)
    total = weights.sum(dim=1, keepdim=True)
    out = (_cast(weights, q).double() @ v.double()).float()
    return out / total, (maximum * scale + torch.log(total))[:, 0]


@variant("hidden scores are a large negative number, not minus infinity")
def large_negative_scores(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = torch.where(visible, scale * (q.float() @ k.float().T), -1e30)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp(scores - maximum)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, (maximum + torch.log(total))[:, 0]


@variant("sums of weights in float64, over products in float32")
def sums_in_float64(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - maximum) * scale)
    total = weights.double().sum(dim=1, keepdim=True)
    out = ((_cast(weights, q) @ v.float()).double() / total).float()
    return out, (maximum.double() * scale + torch.log(total)).float()[:, 0]
