"""Variants: right kernels that are made differently from the project's own. Every variant must pass.

Each variant is textbook attention with one thing done differently, and its claim describes what it does. Unless a
variant says otherwise, scores, sums and products are in float32, and weights are cast to the dtype of the inputs.
Gradients are summed in float32 and rounded once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashproof.impls.spec import Arithmetic, Device, Dtype, Implementation, Supports

SUPPORTS = Supports(causal=("top_left",), scale="positive", grouped_heads=True, cross_lengths=True, strided=True)

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Computes one head: q, k, v, visible, scale -> out, lse.

q is [queries, dim], k and v are [keys, dim], in the dtype of the inputs. visible is a boolean [queries, keys]. out
[queries, dim] and lse [queries] are in float32.
"""


@dataclass(frozen=True)
class Variant:
    """A right kernel, and the words that say how it differs from the textbook."""

    name: str
    says: str
    implementation: Implementation


_every: list[Variant] = []


def every() -> Sequence[Variant]:
    """Returns all variants, including those of `unusual`."""
    from flashproof.tests.suite.mutants import unusual  # the import adds its variants to the list

    assert unusual
    return tuple(_every)


def _arithmetic(**claims: Any) -> Callable[[Dtype, Device], Arithmetic]:
    return lambda dtype, device: Arithmetic(**claims)


def _by_heads(device: Device) -> Literal["tile"]:
    """Returns "tile": a variant is slow, because it loops over heads in Python, and 65,536 heads are too many."""
    return "tile"


def variant(says: str, *, backward: "Backward | None" = None, **claims: Any) -> Callable[[Forward], Forward]:
    """Returns a decorator that adds a variant to the list. It decorates the forward of one head.

    backward: the backward of one head, `plain_backward` if None. claims: fields of `Arithmetic`.
    """

    def add(forward: Forward) -> Forward:
        name = forward.__name__.replace("_", "-")
        arithmetic = _arithmetic(**claims)
        implementation = Implementation(
            name=name,
            attention=_attention(forward, backward or plain_backward),
            supports=SUPPORTS,
            arithmetic=arithmetic,
            summary=says,
            slow=_by_heads,
        )
        _every.append(Variant(name, says, implementation))
        return forward

    return add


# -------------------------------------------------------------------------------------------- batches, heads, masks


Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""Computes the gradients of one head: q, k, v, out, lse, dout, visible, scale -> dq, dk, dv in float32."""


def _attention(forward: Forward, backward: Backward) -> Callable[..., Tensor]:
    """Returns an attention function that calls a forward and a backward for each head of each batch entry."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
            out, lse = (
                torch.empty_like(query, memory_format=torch.contiguous_format),
                query.new_empty(query.shape[:3], dtype=torch.float32),
            )
            for b, h, g in _heads(query, key):
                one = forward(query[b, h], key[b, g], value[b, g], _visible(query, key, is_causal), scale)
                out[b, h], lse[b, h] = one[0].to(query.dtype), one[1]
            ctx.save_for_backward(query, key, value, out, lse)
            ctx.is_causal, ctx.scale = is_causal, scale
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
            query, key, value, out, lse = ctx.saved_tensors
            dquery, dkey, dvalue = (torch.zeros(tensor.shape, dtype=torch.float32) for tensor in (query, key, value))
            for b, h, g in _heads(query, key):
                visible = _visible(query, key, ctx.is_causal)
                dq, dk, dv = backward(
                    query[b, h], key[b, g], value[b, g], out[b, h], lse[b, h], dout[b, h], visible, ctx.scale
                )
                dquery[b, h] += dq
                dkey[b, g] += dk
                dvalue[b, g] += dv
            return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, is_causal, 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        )

    return attention


def _heads(query: Tensor, key: Tensor) -> Iterator[tuple[int, int, int]]:
    groups = query.shape[1] // key.shape[1]
    return ((b, h, h // groups) for b in range(query.shape[0]) for h in range(query.shape[1]))


def _visible(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    full = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return full.tril() if is_causal else full


def _cast(weights: Tensor, like: Tensor) -> Tensor:
    """Rounds weights to the dtype of `like`, as an operand of a matrix product is rounded."""
    return weights.to(like.dtype).float()


def plain_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the backward of FlashAttention in one tile."""
    weights = torch.exp(scale * (q.float() @ k.float().T) - lse[:, None]).masked_fill(~visible, 0.0)
    delta = (dout.float() * out.float()).sum(dim=1, keepdim=True)
    dscores = _cast(weights * (dout.float() @ v.float().T - delta), q)
    return scale * (dscores @ k.float()), scale * (dscores.T @ q.float()), _cast(weights, q).T @ dout.float()


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Returns the scores before the scale, with -inf where the key is hidden."""
    return (q.float() @ k.float().T).masked_fill(~visible, -math.inf)


# ------------------------------------------------------------------------------------------------- one tile of keys


@variant("weights normalised before they are cast")
def normalised_before_the_cast(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = scale * _scores(q, k, visible)
    lse = torch.logsumexp(scores, dim=1)
    return _cast(torch.softmax(scores, dim=1), q) @ v.float(), lse


@variant("weights normalised after the product")
def normalised_after_the_product(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - maximum) * scale)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, (maximum * scale + torch.log(total))[:, 0]


@variant("multiplied by the reciprocal of the sum")
def reciprocal_of_the_sum(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - maximum) * scale)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) * (1.0 / total), (maximum * scale + torch.log(total))[:, 0]


LOG2_E = math.log2(math.e)


@variant("exponentials of base 2, the scale folded with log2(e)")
def base_two(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp2((scores - maximum) * (scale * LOG2_E))
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, ((maximum * (scale * LOG2_E) + torch.log2(total)) / LOG2_E)[:, 0]


@variant("two passes over the keys: the LSE first, then weights that are normalised from the start")
def two_passes(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    total = torch.exp((scores - maximum) * scale).sum(dim=1, keepdim=True)
    out = torch.zeros(q.shape, dtype=torch.float32)
    for start in range(0, len(k), 48):
        part = slice(start, start + 48)
        out += _cast(torch.exp((scores[:, part] - maximum) * scale) / total, q) @ v[part].float()
    return out, (maximum * scale + torch.log(total))[:, 0]


@variant("weights exp(S - LSE), which nothing divides", normaliser="lse")
def normalised_by_lse(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = scale * _scores(q, k, visible)
    lse = torch.logsumexp(scores, dim=1, keepdim=True)
    return _cast(torch.exp(scores - lse), q) @ v.float(), lse[:, 0]


@variant("the maximum rounded up to bfloat16: any number near the largest score may be subtracted")
def rounded_maximum(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, visible)
    maximum = scores.amax(dim=1, keepdim=True)
    # If the maximum is large, its rounding error would be too large. Then the maximum itself is subtracted.
    near = torch.where(maximum.abs() * scale < 64.0, maximum.bfloat16().float(), maximum)
    weights = torch.exp((scores - near) * scale)
    total = weights.sum(dim=1, keepdim=True)
    return (_cast(weights, q) @ v.float()) / total, (near * scale + torch.log(total))[:, 0]


def double_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes everything again in float64."""
    q, k, v, dout = q.double(), k.double(), v.double(), dout.double()
    weights = torch.softmax((scale * (q @ k.T)).masked_fill(~visible, -math.inf), dim=1)
    dweights = dout @ v.T
    dscores = weights * (dweights - (weights * dweights).sum(dim=1, keepdim=True))
    dq, dk, dv = scale * (dscores @ k), scale * (dscores.T @ q), weights.T @ dout
    return dq.float(), dk.float(), dv.float()


@variant("float64 inside, one rounding at the end", backward=double_backward)
def double_inside(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (scale * (q.double() @ k.double().T)).masked_fill(~visible, -math.inf)
    return (torch.softmax(scores, dim=1) @ v.double()).float(), torch.logsumexp(scores, dim=1).float()


@variant("weights stay in float32 for the second product", weights="input")
def weights_in_float32(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = scale * _scores(q, k, visible)
    return torch.softmax(scores, dim=1) @ v.float(), torch.logsumexp(scores, dim=1)


# ---------------------------------------------------------------------------------------------------- tiles of keys


def online(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, tiles: Sequence[slice], lag: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the online softmax over some tiles of keys, in their order.

    Returns the accumulator [queries, dim], which is not divided by the sum yet, and the maximum and the sum, both
    [queries, 1]. lag: how far the largest scaled score may rise above the maximum before the maximum is renewed (lazy
    rescaling).
    """
    acc = torch.zeros(q.shape, dtype=torch.float32)
    maximum, total = (
        torch.full((len(q), 1), -math.inf, dtype=torch.float32),
        torch.zeros(len(q), 1, dtype=torch.float32),
    )
    for tile in tiles:
        scores = _scores(q, k[tile], visible[:, tile])
        highest = torch.maximum(maximum, scores.amax(dim=1, keepdim=True))
        if lag:
            highest = torch.where((highest - maximum) * scale > lag, highest, maximum)
        subtracted = torch.where(highest == -math.inf, 0.0, highest)
        rescale = torch.where(maximum == -math.inf, 0.0, torch.exp((maximum - subtracted) * scale))
        weights = torch.exp((scores - subtracted) * scale)
        total = rescale * total + weights.sum(dim=1, keepdim=True)
        acc = rescale * acc + _cast(weights, q) @ v[tile].float()
        maximum = highest
    return acc, maximum, total


def tiles(length: int, size: int) -> list[slice]:
    """Returns slices of `size` that cover [0, length). The last one may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def finished(parts: tuple[Tensor, Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Divides the accumulator by the sum. Returns the output and the LSE."""
    acc, maximum, total = parts
    return acc / total, (maximum * scale + torch.log(total))[:, 0]


def _tiled_backward(size: int, order: Callable[[list[slice]], list[slice]]) -> Backward:
    """Returns the plain backward by tiles of keys. dQ is the sum over the tiles, added in a given order."""

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, visible: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.zeros(q.shape, dtype=torch.float32)
        dk, dv = torch.zeros(k.shape, dtype=torch.float32), torch.zeros(k.shape, dtype=torch.float32)
        for tile in order(tiles(len(k), size)):
            share, dk[tile], dv[tile] = plain_backward(q, k[tile], v[tile], out, lse, dout, visible[:, tile], scale)
            dq += share
        return dq, dk, dv

    return backward


def _shuffled(pieces: list[slice]) -> list[slice]:
    return [pieces[i] for i in torch.randperm(len(pieces), generator=_chance).tolist()]


_chance = torch.Generator().manual_seed(0)  # gives another order at each call, like the arrival of atomics


@variant("tiles of 16 keys")
def tiles_of_16(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 16)), scale)


@variant("tiles of 96 keys, which no length of the grid is a multiple of")
def tiles_of_96(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 96)), scale)


@variant("key tiles from right to left: with a causal mask, the first one is hidden from many rows")
def right_to_left(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 32)[::-1]), scale)


@variant("dQ added up in another order at every call, as atomics do", backward=_tiled_backward(32, _shuffled))
def order_of_atomics(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 64)), scale)


def _splits(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Computes output [splits, queries, dim] and LSE [splits, queries, 1] of each split of the keys, at most three.

    Where a row sees no key of a split, the output is 0 and the LSE is -inf.
    """
    outs, lses = [], []
    for split in tiles(len(k), -(-len(k) // 3)):
        within = [
            slice(split.start + tile.start, split.start + tile.stop) for tile in tiles(split.stop - split.start, 64)
        ]
        acc, maximum, total = online(q, k, v, visible, scale, within)
        empty = total == 0.0
        outs.append(acc / torch.where(empty, 1.0, total))
        lses.append(torch.where(empty, -math.inf, maximum * scale + torch.log(total)))
    return torch.stack(outs), torch.stack(lses)


@variant(
    "three splits of the keys, merged about the largest LSE and divided by the sum of their shares, as FlashInfer does"
)
def split_keys(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    outs, lses = _splits(q, k, v, visible, scale)
    largest = lses.amax(dim=0)
    shares = torch.exp(lses - largest)
    total = shares.sum(dim=0)
    return (shares * outs).sum(dim=0) / total, (largest + torch.log(total))[:, 0]


@variant(
    "three splits of the keys, merged by exp(their LSE - the LSE of all), as FlashAttention's decoding does",
    normaliser="lse",
)
def merged_by_lse(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    outs, lses = _splits(q, k, v, visible, scale)
    lse = torch.logsumexp(lses, dim=0)
    return (torch.exp(lses - lse) * outs).sum(dim=0), lse[:, 0]


@variant("lazy rescaling: the maximum is renewed when it has risen by more than 8 log 2")
def lazy_rescaling(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return finished(online(q, k, v, visible, scale, tiles(len(k), 32), lag=8.0 * math.log(2.0)), scale)


@variant("keys padded to the tile with zeros, and masked")
def padded_keys(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    past = -len(k) % 64
    k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, past)) for tensor in (k, v))
    visible = torch.nn.functional.pad(visible, (0, past), value=False)
    return finished(online(q, k, v, visible, scale, tiles(len(k), 64)), scale)


@variant("head dim padded with zeros to a power of two")
def padded_dim(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    dim = q.shape[1]
    q, k, v = (torch.nn.functional.pad(tensor, (0, max(16, 1 << (dim - 1).bit_length()) - dim)) for tensor in (q, k, v))
    acc, maximum, total = online(q, k, v, visible, scale, tiles(len(k), 64))
    return finished((acc[:, :dim], maximum, total), scale)


@variant("query rows in tiles of 8, from the last to the first")
def rows_last_to_first(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty(q.shape, dtype=torch.float32), torch.empty(len(q), dtype=torch.float32)
    for rows in reversed(tiles(len(q), 8)):
        out[rows], lse[rows] = finished(online(q[rows], k, v, visible[rows], scale, tiles(len(k), 128)), scale)
    return out, lse


def backward_of_split_products(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the plain backward with the scores of the forward."""
    weights = torch.exp(scale * _product_of_halves(q.float(), k.float().T) - lse[:, None]).masked_fill(~visible, 0.0)
    delta = (dout.float() * out.float()).sum(dim=1, keepdim=True)
    dscores = _cast(weights * (_product_of_halves(dout.float(), v.float().T) - delta), q)
    return scale * (dscores @ k.float()), scale * (dscores.T @ q.float()), _cast(weights, q).T @ dout.float()


@variant(
    "products of float32 operands as three products of their halves (3xTF32)",
    backward=backward_of_split_products,
    products="3xtf32",
)
def split_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _product_of_halves(q.float(), k.float().T).masked_fill(~visible, -math.inf)
    maximum = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - maximum) * scale)
    total = weights.sum(dim=1, keepdim=True)
    return _product_of_halves(_cast(weights, q), v.float()) / total, (maximum * scale + torch.log(total))[:, 0]


def _product_of_halves(a: Tensor, b: Tensor) -> Tensor:
    """Computes a @ b from products of TF32 numbers.

    Each operand is split into a large half and a rest. The product of the two rests is left out.
    """
    (large_a, rest_a), (large_b, rest_b) = (
        (large, (x - large)) for x in (a.contiguous(), b.contiguous()) for large in [_tf32(x)]
    )
    return _tf32(rest_a) @ large_b + large_a @ _tf32(rest_b) + large_a @ large_b


def _tf32(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def materialised(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes textbook attention in float32. Autograd provides the backward."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query.float() @ key.transpose(2, 3)) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~_visible(query, key, True), -math.inf)
    return (torch.softmax(scores, dim=3) @ value).to(query.dtype)


_every.append(
    Variant(
        "autograd-of-the-textbook",
        "the textbook in float32, differentiated by autograd: a bare function",
        Implementation(
            name="autograd-of-the-textbook",
            attention=materialised,
            supports=SUPPORTS,
            summary="The textbook.",
            bare=True,
        ),
    )
)
