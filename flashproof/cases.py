"""Cases: the description of one input, and the tensors that it stands for.

A case prints as one line, and is rebuilt from this line on any machine, bit for bit. Its numbers come from NumPy's
Philox bit stream by integer arithmetic, and never from a library's generator of normal numbers.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from flashproof.impls.catalogue import close
from flashproof.impls.shapes import Bool, Float
from flashproof.impls.spec import Dtype, Supports
from flashproof.oracles.masks import BLOCK, Dropout, Mask
from flashproof.oracles.problem import Problem

Masking = Literal["full", "causal", "causal-br"]
Family = Literal["normal", "outliers", "sharp", "positive", "onesided", "spike", "rising", "ties", "uniform"]
Layout = Literal["contiguous", "offset", "transposed", "columns", "sliced", "expanded", "mixed"]

FAMILIES: dict[Family, str] = {
    "normal": "standard normal entries",
    "outliers": "standard normal, and one entry in a thousand ten times larger (FlashAttention-3, section 4.3)",
    "sharp": "queries four times larger: a few keys hold each row",
    "positive": "values of one sign",
    "onesided": "values of one sign, and output gradients of one",
    "spike": "one key's score lifted by the magnitude",
    "rising": "scores rise from the first key to the last, by the magnitude",
    "ties": "every key occurs four times: tied maxima",
    "uniform": "queries of zero: every visible key weighs the same",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input. `str(case)` is the line to copy, `Case.parse` reads it.

    magnitude multiplies the queries; in the families spike and rising it is the lift of scores. shift adds a constant
    to every score, through one coordinate.
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 0  # 0: as many as heads
    queries: int = 128
    keys: int = 0  # 0: as many as queries
    dim: int = 64
    dtype: Dtype = "float32"
    mask: Masking = "full"
    blocks: float | None = None  # the share of visible blocks of a random block mask; None: no block mask
    family: Family = "normal"
    magnitude: float = 1.0
    shift: float = 0.0
    scale: float | None = None
    dropout: float = 0.0
    layout: Layout = "contiguous"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "keys", self.keys or self.queries)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads {self.heads}")
        if min(self.batch, self.heads, self.queries, self.keys, self.dim) < 1:
            raise ValueError(f"every size is at least 1 in {self!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: {self.dropout:g} is no probability below 1")
        if self.blocks is not None and not 0.0 <= self.blocks <= 1.0:
            raise ValueError(f"blocks: {self.blocks:g} is no share between 0 and 1")

    def __str__(self) -> str:
        heads = f"h{self.heads}" if self.kv_heads == self.heads else f"h{self.heads}/{self.kv_heads}"
        words = [f"b{self.batch}", heads, f"q{self.queries}", f"k{self.keys}", f"d{self.dim}", self.dtype, self.mask]
        if self.blocks is not None:
            words.append("blocks" + _digits(self.blocks))
        words.append(self.family)
        if self.magnitude != 1.0:
            words.append("x" + _digits(self.magnitude))
        if self.shift:
            words.append("shift" + _digits(self.shift))
        if self.scale is not None:
            words.append("scale" + _digits(self.scale))
        if self.dropout:
            words.append("dropout" + _digits(self.dropout))
        if self.layout != "contiguous":
            words.append(self.layout)
        return " ".join([*words, f"seed{self.seed}"])

    @property
    def numbers(self) -> int:
        """How many its four tensors hold."""
        return 2 * self.batch * self.dim * (self.heads * self.queries + self.kv_heads * self.keys)

    @classmethod
    def parse(cls, line: str) -> "Case":
        """Reads the line of a case. Words may stand in any order, and what is left out has its default.

        Raises ValueError, which names the word.
        """
        fields: dict[str, object] = {}
        for word in line.split():
            found = _parse_word(word)
            if twice := fields.keys() & found.keys():
                raise ValueError(f"the word {word!r} says a second time what {', '.join(sorted(twice))} is")
            fields |= found
        return cls(**fields)  # type: ignore[arg-type]


def _digits(number: float) -> str:
    """The shortest digits that read back as the same number."""
    return repr(number).removesuffix(".0")


_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
_WORDS: tuple[tuple[str, dict[str, type]], ...] = (
    (r"b(\d+)", {"batch": int}),
    (r"h(\d+)", {"heads": int}),
    (r"h(\d+)/(\d+)", {"heads": int, "kv_heads": int}),
    (r"q(\d+)", {"queries": int}),
    (r"k(\d+)", {"keys": int}),
    (r"d(\d+)", {"dim": int}),
    (rf"blocks{_NUMBER}", {"blocks": float}),
    (rf"x{_NUMBER}", {"magnitude": float}),
    (rf"shift{_NUMBER}", {"shift": float}),
    (rf"scale{_NUMBER}", {"scale": float}),
    (rf"dropout{_NUMBER}", {"dropout": float}),
    (r"seed(\d+)", {"seed": int}),
)


_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "dim")


def _parse_word(word: str) -> dict[str, object]:
    for field, kind in (("dtype", Dtype), ("mask", Masking), ("family", Family), ("layout", Layout)):
        if word in get_args(kind):
            return {field: word}
    for pattern, fields in _WORDS:
        if match := re.fullmatch(pattern, word):
            found: dict[str, object] = {
                field: kind(text) for (field, kind), text in zip(fields.items(), match.groups(), strict=True)
            }
            if any(value == 0 for field, value in found.items() if field in _SIZES):
                raise ValueError(f"in the word {word!r} a size is 0; every size is at least 1")
            return found
    known = [
        *(known for kind in (Dtype, Masking, Family, Layout) for known in get_args(kind)),
        "blocks0.5",
        "shift8",
        "scale0.5",
        "dropout0.1",
        "seed0",
    ]
    example = Case(family="spike", magnitude=30.0, seed=7)
    raise ValueError(f"the word {word!r} is unknown{close(word, known)}; a case looks like '{example}'")


def not_claimed(case: Case, supports: Supports) -> str | None:
    """Why a claim leaves this case out, or None when it covers it."""
    rules = (
        (case.dtype in supports.dtypes, f"dtype {case.dtype}"),
        (
            supports.dims[0] <= case.dim <= supports.dims[1] and case.dim % supports.dim_multiple == 0,
            f"head dim {case.dim}",
        ),
        (case.queries == case.keys or supports.cross_lengths, "queries != keys"),
        (case.kv_heads == case.heads or supports.grouped_heads, "grouped heads"),
        (case.mask != "causal" or "top_left" in supports.causal, "causal, top-left"),
        (case.mask != "causal-br" or "bottom_right" in supports.causal, "causal, bottom-right"),
        (case.blocks is None or supports.block_mask, "block mask"),
        (case.scale is None or supports.scale != "default", "scale"),
        (case.scale is None or case.scale > 0 or supports.scale == "finite", "scale that is zero or negative"),
        (not case.dropout or supports.dropout, "dropout"),
        (case.layout in ("contiguous", "offset") or supports.strided, f"{case.layout} inputs"),
        (case.layout != "offset" or supports.unaligned, "tensors that begin anywhere"),
    )
    return next((feature for covered, feature in rules if not covered), None)


# -------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case, on one device. Contiguous ones stand in a larger buffer of NaN, which they do not own."""

    query: Float[Tensor, "batch heads queries dim"]
    key: Float[Tensor, "batch kv_heads keys dim"]
    value: Float[Tensor, "batch kv_heads keys dim"]
    dout: Float[Tensor, "batch heads queries dim"]
    block_mask: Bool[Tensor, "batch heads query_blocks key_blocks"] | None

    def problem(self, case: Case) -> Problem:
        """What the oracles are asked."""
        alignment: dict[str, Literal["top_left", "bottom_right"]] = {"causal": "top_left", "causal-br": "bottom_right"}
        return Problem(
            query=self.query,
            key=self.key,
            value=self.value,
            dout=self.dout,
            scale=1.0 / math.sqrt(case.dim) if case.scale is None else case.scale,
            mask=Mask(case.queries, case.keys, alignment.get(case.mask), self.block_mask),
            dropout=Dropout(case.dropout, dropout_seed(case)),
        )


def dropout_seed(case: Case) -> int:
    """The 64-bit dropout seed of a case; both of its words are in use."""
    return (case.seed + 1) * 0x9E3779B97F4A7C15 % 2**64


def inputs(case: Case, device: str | torch.device = "cpu", outside: float = math.nan) -> Inputs:
    """Builds the tensors of a case. Values are exact in the case's dtype and do not depend on the machine.

    outside: what the memory around the tensors and between their rows holds.
    """
    tensors = [
        _laid_out(tensor, _MIXED[name] if case.layout == "mixed" else case.layout, device, outside)
        for name, tensor in zip(("query", "key", "value", "dout"), _tensors(case), strict=True)
    ]
    query, key, value, dout = tensors
    return Inputs(query, key, value, dout, _block_mask(case, device))


SMALL = 2**18  # numbers, 1 MiB in float32, up to which many cases are remembered


def _tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers of a case in its dtype, contiguous, on the CPU: query, key, value, dout. Others get copies of them.

    They are remembered. A case is built several times in a row: for the kernel, for the oracle, for rows that are
    looked at again. A small case is built by every implementation and by several checks.
    """
    return (_small if case.numbers <= SMALL else _large)(case)


def _made(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = _normal(case, 0, (case.batch, case.heads, case.queries, case.dim))
    key = _normal(case, 1, (case.batch, case.kv_heads, case.keys, case.dim))
    value = _normal(case, 2, (case.batch, case.kv_heads, case.keys, case.dim))
    dout = _normal(case, 3, (case.batch, case.heads, case.queries, case.dim))
    scale = 1.0 / math.sqrt(case.dim) if case.scale is None else case.scale
    match case.family:
        case "outliers":
            query, key, value, dout = (_with_outliers(case, i, x) for i, x in enumerate((query, key, value, dout)))
        case "sharp":
            query = query * 4.0
        case "positive":
            value = np.abs(value)
        case "onesided":
            value, dout = np.abs(value), np.abs(dout)
        case "ties":
            key = key[:, :, np.arange(case.keys) // 4]
        case "uniform":
            query = np.zeros_like(query)
        case "spike":
            # The last coordinate is the same in every query, and is 0 in all keys but one: the scores of this key
            # rise by the magnitude.
            query[..., -1], lift = _factors(case.magnitude, scale)
            key[..., -1] = 0.0
            key[:, :, case.keys // 3, -1] = lift
        case "rising":
            query[..., -1], lift = _factors(case.magnitude, scale)
            key[..., -1] = lift * (np.arange(case.keys) / case.keys)
    if case.family not in ("spike", "rising"):
        query = query * case.magnitude
    if case.shift:
        # The first coordinate is the same in every query and in every key: it adds one constant to all scores.
        query[..., 0], key[..., 0] = _factors(case.shift, scale)
    dtype = getattr(torch, case.dtype)
    return (
        _rounded("query", query, dtype),
        _rounded("key", key, dtype),
        _rounded("value", value, dtype),
        _rounded("dout", dout, dtype),
    )


_small = lru_cache(maxsize=256)(_made)
_large = lru_cache(maxsize=8)(_made)


def _factors(score: float, scale: float) -> tuple[float, float]:
    """Two numbers of about one size whose scaled product is the score; the first is a power of two."""
    if not score or not scale:
        return 0.0, 0.0
    product = score / scale
    if not math.isfinite(product):
        raise ValueError(
            f"a score of {score:g} over a scale of {scale:g} is beyond float64; a smaller magnitude or shift would do"
        )
    power = 2.0 ** math.floor(math.log2(abs(product)) / 2)
    return power, product / power


def _raw(case: Case, stream: int, count: int) -> np.ndarray:
    return np.random.Philox(key=case.seed * 1000 + stream).random_raw(count)


def _normal(case: Case, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal numbers with mean 0 and variance 1, of at most 4.9: sums of eight 16-bit uniform numbers
    (Irwin-Hall).

    They are exact on every machine.
    """
    count = math.prod(shape)
    uniforms = _raw(case, stream, 2 * count).view(np.uint16).reshape(count, 8)
    centred = np.einsum("ij->i", uniforms, dtype=np.int64) - 8 * 65535 // 2  # faster along so short an axis than sum()
    return (centred * (math.sqrt(12.0 / 8.0) / 65536.0)).reshape(shape)


def _with_outliers(case: Case, stream: int, numbers: np.ndarray) -> np.ndarray:
    one_in_a_thousand = (_raw(case, 20 + stream, numbers.size) % 1000 == 0).reshape(numbers.shape)
    return numbers + 10.0 * one_in_a_thousand * _normal(case, 10 + stream, numbers.shape)


def _rounded(name: str, numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(numbers).to(dtype)
    if not torch.isfinite(tensor).all():
        raise ValueError(
            f"{name} reaches {np.abs(numbers).max():.3g}, beyond {dtype}; "
            "a smaller magnitude, shift or 1/scale would do"
        )
    return tensor


def _block_mask(case: Case, device: str | torch.device) -> Tensor | None:
    if case.blocks is None:
        return None
    shape = (case.batch, case.heads, math.ceil(case.queries / BLOCK), math.ceil(case.keys / BLOCK))
    share = _raw(case, 4, math.prod(shape)).astype(np.float64) / 2.0**64
    mask = torch.from_numpy((share < case.blocks).reshape(shape)).to(device)
    return mask.mT.contiguous().mT if case.layout == "transposed" else mask


# Tensors of one shape with different strides. Only this shows a kernel that reads dout by the strides of query, or
# value by those of key, and one that looks at the query alone to find out whether rows are contiguous.
_MIXED: dict[str, Layout] = {"query": "contiguous", "key": "columns", "value": "transposed", "dout": "sliced"}

GUARD = 1024  # elements of NaN on either side of a contiguous tensor; keeps the alignment that kernels ask for


def _laid_out(tensor: Tensor, layout: Layout, device: str | torch.device, outside: float) -> Tensor:
    batch, heads, length, dim = tensor.shape
    tensor = tensor.to(device)
    view: Tensor
    match layout:
        case "contiguous":
            buffer = torch.full((tensor.numel() + 2 * GUARD,), outside, dtype=tensor.dtype, device=device)
            view = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        case "offset":  # begins one element behind an address that vector loads ask for, as a slice may
            buffer = torch.full((tensor.numel() + 2 * GUARD,), outside, dtype=tensor.dtype, device=device)
            view = buffer[GUARD + 1 : GUARD + 1 + tensor.numel()].view(tensor.shape)
        case "transposed":  # [batch, length, heads, dim], as projections leave it
            buffer = torch.full((batch, length + 1, heads, dim), outside, dtype=tensor.dtype, device=device)
            view = buffer[:, :length].transpose(1, 2)
        case "columns":  # [batch, heads, dim, length]
            buffer = torch.full((batch, heads, dim, length + 1), outside, dtype=tensor.dtype, device=device)
            view = buffer[..., :length].transpose(2, 3)
        case "sliced":  # every second row and every second column of a larger buffer
            buffer = torch.full((batch, heads, 2 * length, 2 * dim), outside, dtype=tensor.dtype, device=device)
            view = buffer[:, :, ::2, ::2]
        case "expanded":  # one batch entry for all, or one head for all, with a stride of 0
            one = tensor[:1] if batch > 1 else tensor[:, :1]
            return one.clone().expand(batch, heads, length, dim)
        case "mixed":
            raise ValueError("layout: mixed is of four tensors, not of one")
    return view.copy_(tensor)


def laid_out_as(like: Tensor, values: Tensor) -> Tensor:
    """The values in memory like that of another tensor of their shape: equal strides, equal place in an equal buffer.

    Compilers choose code by all of these. Calls whose bits are compared get tensors that differ in nothing but values.
    Entries that share memory cannot hold different values; then the values are returned as they are.
    """
    buffer = torch.empty(0, dtype=like.dtype, device=like.device).set_(like.untyped_storage()).clone()
    view = buffer.as_strided(like.shape, like.stride(), like.storage_offset())
    shared = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())
    view[shared].copy_(values[shared])
    return view if 0 not in like.stride() or torch.equal(view, values) else values
