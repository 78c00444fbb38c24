"""The tensors of a case: the same numbers on every machine, in the memory layouts that the case asks for.

The numbers are computed from NumPy's Philox bit stream by integer arithmetic, and never by a library's generator of
normal numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flashproof.cases import Case, Layout
from flashproof.impls.shapes import Bool, Float
from flashproof.oracles.masks import BLOCK, Dropout, Mask
from flashproof.oracles.problem import Problem


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case, on one device. Each contiguous tensor is a part of a larger buffer, filled with NaN."""

    query: Float[Tensor, "batch heads queries dim"]
    key: Float[Tensor, "batch kv_heads keys dim"]
    value: Float[Tensor, "batch kv_heads keys dim"]
    dout: Float[Tensor, "batch heads queries dim"]
    block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None

    def problem(self, case: Case) -> Problem:
        """The problem that the oracles solve."""
        blocks = self.block_mask
        blocks = blocks if blocks is None else blocks.expand(case.batch, case.heads, *blocks.shape[2:])
        alignment: dict[str, Literal["top_left", "bottom_right"]] = {"causal": "top_left", "causal-br": "bottom_right"}
        return Problem(
            query=self.query,
            key=self.key,
            value=self.value,
            dout=self.dout,
            scale=1.0 / math.sqrt(case.dim) if case.scale is None else case.scale,
            mask=Mask(case.queries, case.keys, alignment.get(case.mask), blocks),
            dropout=Dropout(case.dropout, dropout_seed(case)),
        )

    def on_cpu(self) -> "Inputs":
        """The same tensors, moved to the CPU."""
        blocks = self.block_mask
        return Inputs(
            self.query.cpu(),
            self.key.cpu(),
            self.value.cpu(),
            self.dout.cpu(),
            blocks if blocks is None else blocks.cpu(),
        )


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """Query, key, value and output gradient, and the block mask if there is one."""
    tensors = (inputs.query, inputs.key, inputs.value, inputs.dout)
    return tensors if inputs.block_mask is None else (*tensors, inputs.block_mask)


def memory(tensor: Tensor) -> Tensor:
    """All bytes of the buffer that contains a tensor, also those outside the tensor.

    A comparison of bytes compares NaN by its bits.
    """
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def dropout_seed(case: Case) -> int:
    """The dropout seed of a case. Most seeds use both words of 64 bits, some fit in 31 bits, some need the 32nd bit."""
    seed = (case.seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    return {0: seed >> 33, 1: seed >> 33 | 2**31}.get(case.seed % 5, seed)


def inputs(case: Case, device: str | torch.device = "cpu", outside: float = math.nan) -> Inputs:
    """Builds the tensors of a case. Their values are exact in the case's dtype and do not depend on the machine.

    outside: the value of the memory around the tensors and between their rows.
    """
    numbers = tuple(tensor.to(device) for tensor in _numbers(case))
    if case.douts == "large" and case.layouts[3] == "pooled":
        largest = 2.0 ** math.floor(math.log2(LARGE_SUM / case.queries))
        numbers = (*numbers[:3], numbers[3] * min(1.0, largest / LARGE_DOUT))
    memory = Memory(outside)
    apart = [
        memory.laid_out(tensor, layout, offset=offset, seed=case.seed + place)
        for place, (tensor, layout, offset) in enumerate(zip(numbers, case.layouts, case.offsets, strict=True))
    ]
    query, key, value, dout = apart
    match case.sharing:
        case "one-kv":
            value = key
        case "one-qkv":
            query = value = key
        case "dense":
            query, key, value = (memory.packed((tensor,))[0] for tensor in numbers[:3])
        case "packed":
            query, key, value = memory.packed(numbers[:3])
        case "packed-heads":
            query, key, value = memory.packed_in_heads(numbers[:3])
        case "packed-kv":
            key, value = memory.packed(numbers[1:3])
        case "packed-kv-heads":
            key, value = memory.packed_in_heads(numbers[1:3])
        case "stacked-kv":
            key, value = memory.stacked(numbers[1:3])
    return Inputs(query, key, value, dout, block_mask(case, device))


# -------------------------------------------------------------------------------------------------------- numbers

SMALL = 2**18  # elements, 1 MiB in float32; up to this size, many cases are cached
SMALL_NUMBERS = 2.0**-16  # the factor of small values and output gradients; float16 is subnormal below 2^-14
LARGE_DOUT = 2.0**8  # the factor of large output gradients
# The largest such factor of a pooled output gradient, times the number of queries. All rows of a pooled one are the
# same, so dV of a single key is their number times one row, and the sum of one query head must not overflow float16.
LARGE_SUM = 2.0**13
Numbers = tuple[Tensor, Tensor, Tensor, Tensor]


# The fields of a case that its numbers depend on.
_OF_NUMBERS: tuple[str, ...] = ("batch", "heads", "kv_heads", "queries", "keys", "dim", "dtype", "scale", "seed")
_OF_NUMBERS += ("family", "magnitude", "shift", "values", "douts")


def _numbers(case: Case) -> Numbers:
    """The numbers of a case in its dtype, contiguous, on the CPU: query, key, value, dout. Callers receive copies.

    The numbers are cached. A case is built several times in a row: for the kernel, for the oracle, for rows that are
    compared again. These cases may differ in their layouts, mask or call, which do not change the numbers. Every
    implementation and several checks build a small case.
    """
    same = Case(**{name: getattr(case, name) for name in _OF_NUMBERS})
    return (_small if case.numbers <= SMALL else _large)(same)


def _made(case: Case) -> Numbers:
    scale = 1.0 / math.sqrt(case.dim) if case.scale is None else case.scale
    of_queries = (case.batch, case.heads, case.queries, case.dim)
    of_keys = (case.batch, case.kv_heads, case.keys, case.dim)
    query, key, value, dout = (
        _normal(case, stream, shape) for stream, shape in enumerate((of_queries, of_keys, of_keys, of_queries))
    )
    lifted = case.keys // 3  # the key whose score a spike lifts
    match case.family:
        case "outliers":
            query, key, value, dout = (_with_outliers(case, i, x) for i, x in enumerate((query, key, value, dout)))
            if case.seed % 2:  # as the bias of a projection: every 16th channel of a key head has a constant of its own
                key[..., ::16] += 3.0 * _normal(case, 4, (1, case.kv_heads, 1, -(-case.dim // 16)))
        case "sharp":
            query = query * 4.0
        case "ties":
            key = key[:, :, np.arange(case.keys) // 4]
        case "padded":
            key[:, :, case.keys - case.keys // 4 :] = 0.0
        case "uniform":
            query = np.zeros_like(query)
        case "nokeys":
            key = np.zeros_like(key)
        case "spike":
            # The last coordinate is equal in all queries, and is 0 in all keys except one: the scores of this key rise
            # by the magnitude.
            query[..., -1], lift = _factors(case.magnitude, scale)
            key[..., -1] = 0.0
            key[:, :, lifted, -1] = lift
        case "rising":
            query[..., -1], lift = _factors(case.magnitude, scale)
            key[..., -1] = lift * (np.arange(case.keys) / case.keys)
    if case.family not in ("spike", "rising"):
        query = query * case.magnitude
    if case.family == "sharp" and case.seed % 2 and case.heads > 1:
        query[:, 0] /= 4.0 * case.magnitude
    if case.shift:
        # The first coordinate is equal in all queries and in all keys: it adds one constant to all scores.
        query[..., 0], key[..., 0] = _factors(case.shift, scale)
    match case.values:
        case "positive":
            value = np.abs(value)
        case "equal":
            value = np.repeat(value[:, :, :1], case.keys, axis=2)
        case "sink":
            value[:, :, lifted] = 0.0
        case "small":
            value = value * SMALL_NUMBERS
        case "zero":
            value = np.zeros_like(value)
    match case.douts:
        case "positive":
            dout = np.abs(dout)
        case "onehot":
            dout = (np.arange(case.dim) == np.arange(case.queries)[:, None] % case.dim) * np.ones_like(dout)
        case "somerows":
            rows, entries = np.arange(case.queries), np.arange(case.batch)[:, None]
            prompts = rows < 3 * case.queries // 4 >> entries  # [batch, queries]
            groups = np.broadcast_to(rows // 16 % 2 == 1, prompts.shape)
            hidden = prompts if case.seed % 2 else groups
            dout[np.broadcast_to(hidden[:, None], dout.shape[:3])] = 0.0
        case "small":
            dout = dout * SMALL_NUMBERS
        case "large":
            dout = dout * LARGE_DOUT
        case "zero":
            dout = np.zeros_like(dout)
    dtype = getattr(torch, case.dtype)
    named = zip(("query", "key", "value", "dout"), (query, key, value, dout), strict=True)
    rounded = tuple(_rounded(name, numbers, dtype) for name, numbers in named)
    return rounded[0], rounded[1], rounded[2], rounded[3]


_small = lru_cache(maxsize=256)(_made)
_large = lru_cache(maxsize=8)(_made)


def _factors(score: float, scale: float) -> tuple[float, float]:
    """Two numbers of similar size whose scaled product is the score. The first is a power of two."""
    if not score or not scale:
        return 0.0, 0.0
    product = score / scale
    if not math.isfinite(product):
        raise ValueError(
            f"a score of {score:g} over a scale of {scale:g} is beyond float64; a smaller magnitude or shift would do"
        )
    power = 2.0 ** math.floor(math.log2(abs(product)) / 2)
    return power, product / power


_EVERY_SECOND = np.uint64(0x0000_FFFF_0000_FFFF)  # of the four 16-bit numbers in 64 bits


def _raw(case: Case, stream: int, count: int) -> np.ndarray:
    return np.random.Philox(key=case.seed * 1000 + stream).random_raw(count)


def _normal(case: Case, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal numbers with mean 0 and variance 1, at most 4.9 in magnitude.

    Each is a sum of eight uniform 16-bit numbers (Irwin-Hall), so it is exact on every machine.
    """
    words = _raw(case, stream, 2 * math.prod(shape))  # each contains four of these numbers
    halves = (words & _EVERY_SECOND) + (words >> np.uint64(16) & _EVERY_SECOND)  # two sums of two numbers in each word
    first, second, third, fourth = halves.view(np.int32).reshape(-1, 4).T  # faster than sum() along so short an axis
    sums = first + second + third + fourth
    return ((sums - 8 * 65535 // 2) * (math.sqrt(12.0 / 8.0) / 65536.0)).reshape(shape)


def _with_outliers(case: Case, stream: int, numbers: np.ndarray) -> np.ndarray:
    one_in_a_thousand = (_raw(case, 20 + stream, numbers.size) % 1000 == 0).reshape(numbers.shape)
    return numbers + 10.0 * one_in_a_thousand * _normal(case, 10 + stream, numbers.shape)


def _rounded(name: str, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(numbers).to(dtype)
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise ValueError(
            f"{name} reaches {np.abs(numbers).max():.3g}, beyond {dtype}; "
            "a smaller magnitude, shift or 1/scale would do"
        )
    return tensor


def block_mask(case: Case, device: str | torch.device) -> Tensor | None:
    """The block mask of a case, [1|batch, 1|heads, blocks of queries, blocks of keys]. None if it has none."""
    if case.blocks is None:
        return None
    entries = (case.batch, case.heads)
    if case.one_mask:
        entries = ((1, 1), (1, case.heads), (case.batch, 1))[(case.queries + case.keys) % 3]
    shape = (*entries, math.ceil(case.queries / BLOCK), math.ceil(case.keys / BLOCK))
    share = _raw(case, 4, math.prod(shape)).astype(np.float64) / 2.0**64
    drawn = (share < case.blocks).reshape(shape)
    if not drawn.any():  # an answer of zeros alone would hide every fault
        drawn[:, :, 0, 0] = drawn[:, :, -1, -1] = True
    if case.seed % 8:  # In most cases, the last query of the last head sees a key. Else faults of last rows are hidden.
        last_key = min(case.keys, case.queries) - 1 if case.mask == "causal" else case.keys - 1
        drawn[-1, -1, -1, last_key // BLOCK] = True
    mask = torch.from_numpy(drawn).to(device)
    return mask.mT.contiguous().mT if case.layouts[0] == "transposed" else mask


# --------------------------------------------------------------------------------------------------------- memory

FORMS = 4  # seeds after which the forms of layouts and addresses repeat
GUARD = 1024  # elements on either side of a contiguous tensor; keeps the alignment that kernels need


@dataclass(frozen=True)
class Memory:
    """Places tensors in buffers. outside: the value of a buffer around the tensors and between their rows."""

    outside: float

    def _buffer(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, self.outside, dtype=like.dtype, device=like.device)

    def _guarded(self, like: Tensor, shape: tuple[int, ...], begin: int = 0) -> Tensor:
        """A contiguous tensor with a guard on either side. begin: the number of elements after an aligned address."""
        count = math.prod(shape)
        start = GUARD + begin
        return self._buffer(like, (count + 2 * GUARD,))[start : start + count].view(shape)

    def laid_out(self, tensor: Tensor, layout: Layout, *, offset: bool = False, seed: int = 0) -> Tensor:
        """A tensor [batch, heads, length, dim] in a layout. The layouts with strides of 0 change the numbers.

        seed: chooses among the forms of a layout, which repeat after `FORMS` seeds. A layout that orders the axes in
        another way has gaps or none, the larger buffer of a tensor has more columns or more heads, and an offset is of
        one element, of 8 bytes or of 16. If the buffer has one more column, every row begins at another offset. Of a
        longer tensor, the last or the first rows are left out; the first only if vectors of 16 bytes still fit.
        """
        batch, heads, length, dim = tensor.shape
        size = tensor.element_size()
        begin = (1, 8 // size, 1, 16 // size)[seed % FORMS] if offset and layout != "wider" else 0
        gap = 1 - seed // 2 % 2
        view: Tensor
        match layout:
            case "contiguous":
                view = self._guarded(tensor, tensor.shape, begin)
            case "transposed":
                view = self._guarded(tensor, (batch, length + gap, heads, dim), begin)[:, :length].transpose(1, 2)
            case "length-first":
                view = self._guarded(tensor, (length + gap, batch, heads, dim), begin)[:length].permute(1, 2, 0, 3)
            case "columns":
                view = self._guarded(tensor, (batch, heads, dim, length + gap), begin)[..., :length].transpose(2, 3)
            case "cropped":
                first = 1 if seed % 2 and dim * size % 16 == 0 else 0
                view = self._guarded(tensor, (batch, heads, length + 3, dim), begin)[:, :, first : first + length]
            case "sliced":
                view = self._guarded(tensor, (batch, heads, 2 * length, 2 * dim), begin)[:, :, ::2, ::2]
            case "wider":
                more, columns = (heads, dim + 1) if offset else ((heads, 2 * dim), (2 * heads, dim))[seed % 2]
                view = self._guarded(tensor, (batch, more, length, columns), begin)[:, :heads, :, :dim]
            case "expanded" | "pooled" | "summed":
                of_heads = batch == 1 or (heads > 1 and length % 2 == 0)  # which of the two axes has a stride of 0
                parts: dict[Layout, Callable[[], Tensor]] = {
                    "expanded": lambda: tensor[:, :1] if of_heads else tensor[:1],
                    "pooled": lambda: tensor[:, :, :1],
                    "summed": lambda: torch.ones_like(tensor[:1, :1, :1, :1]),
                }
                part = parts[layout]()
                return self._guarded(tensor, tuple(part.shape), begin).copy_(part).expand(tensor.shape)
        return view.copy_(tensor)

    def packed(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Tensors as columns of one projection: [batch, length, all heads, dim]."""
        batch, _, length, dim = tensors[0].shape
        heads = [tensor.shape[1] for tensor in tensors]
        buffer = self._guarded(tensors[0], (batch, length, sum(heads), dim))
        views = [part.transpose(1, 2) for part in torch.split(buffer, heads, dim=2)]
        return [view.copy_(tensor) for view, tensor in zip(views, tensors, strict=True)]

    def stacked(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Tensors of one shape, one after another in one buffer: [tensors, batch, heads, length, dim]."""
        buffer = self._guarded(tensors[0], (len(tensors), *tensors[0].shape))
        return [view.copy_(tensor) for view, tensor in zip(buffer, tensors, strict=True)]

    def packed_in_heads(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Tensors beside one another in each head: [batch, length, heads, tensors, dim]."""
        batch, heads, length, dim = tensors[0].shape
        buffer = self._guarded(tensors[0], (batch, length, heads, len(tensors), dim))
        views = [part.transpose(1, 2) for part in buffer.unbind(dim=3)]
        return [view.copy_(tensor) for view, tensor in zip(views, tensors, strict=True)]


def laid_out_as(like: Tensor, values: Tensor) -> Tensor:
    """The values, in memory like that of another tensor of their shape: the same strides and place in an equal buffer.

    Compilers choose code by all of these. Calls whose bits are compared receive tensors that differ only in their
    values. Elements that share memory cannot have different values; then the values are returned unchanged.
    """
    buffer = torch.empty(0, dtype=like.dtype, device=like.device).set_(like.untyped_storage()).clone()
    view = buffer.as_strided(like.shape, like.stride(), like.storage_offset())
    shared = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())
    view[shared].copy_(values[shared])
    return view if 0 not in like.stride() or torch.equal(view, values) else values
