"""Cases: the description of one input, and of how the kernel is called with it.

A case prints as one line, and `Case.parse` reads the line. `tensors.inputs` builds the tensors that a case describes. A
case is a point in a space of factors: `space` names the factors, and draws cases from the space.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashproof.impls.catalogue import close
from flashproof.impls.spec import Dtype, Supports

Masking = Literal["full", "causal", "causal-br"]
Family = Literal["normal", "outliers", "sharp", "spike", "rising", "ties", "padded", "uniform", "nokeys"]
Values = Literal["normal", "positive", "equal", "sink", "small", "zero"]
Douts = Literal["normal", "positive", "onehot", "somerows", "small", "large", "zero"]
Layout = Literal[
    "contiguous", "transposed", "length-first", "columns", "cropped", "sliced", "wider", "expanded", "pooled", "summed"
]
Sharing = Literal[
    "apart", "dense", "one-kv", "one-qkv", "packed", "packed-heads", "packed-kv", "packed-kv-heads", "stacked-kv"
]
Number = Literal["float", "int", "numpy"]
Call = Literal[
    "plain",
    "forward",
    "no_grad",
    "inference",
    "accumulated",
    "projected",
    "twice",
    "two-forwards",
    "after-another",
    "renewed",
    "readdressed",
    "grown",
    "checkpointed",
    "compiled",
    "thread",
    "threads",
    "parallel",
    "default64",
    "default16",
    "deterministic",
    "autocast",
]
Wanted = Literal["all", "none", "dq", "dk", "dv", "dq-dk", "dq-dv", "dk-dv"]

FAMILIES: dict[Family, str] = {
    "normal": "standard normal entries",
    "outliers": "standard normal, and one entry in a thousand ten times larger (FlashAttention-3, section 4.3); "
    "for odd seeds, some channels of each key head have a constant of their own",
    "sharp": "queries four times larger, for odd seeds not those of the first head: few keys have most of the weight",
    "spike": "the score of one key is raised by the magnitude",
    "rising": "scores rise from the first key to the last, by the magnitude",
    "ties": "every key occurs four times: tied maxima",
    "padded": "the last quarter of the keys is zero, like padding that no mask hides",
    "uniform": "queries of zero: every visible key weighs the same",
    "nokeys": "keys of zero: every visible key weighs the same",
}
VALUES: dict[Values, str] = {
    "normal": "standard normal values",
    "positive": "values of one sign",
    "equal": "one value for all keys",
    "sink": "the key that a spike raises has a value of zero",
    "small": "values so small that many are subnormal in float16",
    "zero": "values of zero",
}
DOUTS: dict[Douts, str] = {
    "normal": "standard normal output gradients",
    "positive": "output gradients of one sign",
    "onehot": "one entry of each row of the output gradient is 1, and the others are 0",
    "somerows": "the output gradient is zero in every second group of 16 rows, or in the rows of a prompt: the first "
    "three quarters in the first sequence, and half as many in each later one",
    "small": "output gradients so small that many are subnormal in float16",
    "large": "output gradients 256 times larger, as with a scaled loss; pooled ones at most 8192 / queries times",
    "zero": "output gradients of zero",
}
LAYOUTS: dict[Layout, str] = {
    "contiguous": "[batch, heads, length, dim]",
    "transposed": "[batch, length, heads, dim], as a projection returns it",
    "length-first": "[length, batch, heads, dim], as torch.nn.MultiheadAttention has it",
    "columns": "[batch, heads, dim, length]",
    "cropped": "the first rows of a longer buffer, as a cache leaves them, or the rows from its second on",
    "sliced": "every second row and every second column of a larger buffer",
    "wider": "the first columns of a buffer with twice as many, or the first half of its heads",
    "expanded": "one batch entry for all, or one head for all, with a stride of 0",
    "pooled": "of the output gradient: one row for all queries, as in the backward of a mean over them",
    "summed": "of the output gradient: one number with strides of 0, as in the backward of a sum",
}
SHARINGS: dict[Sharing, str] = {
    "apart": "each tensor has its own memory",
    "dense": "query, key and value are [batch, length, heads, dim] without gaps, each in its own memory",
    "one-kv": "key and value are one tensor",
    "one-qkv": "query, key and value are one tensor",
    "packed": "query, key and value are columns of one projection, [batch, length, all heads, dim]",
    "packed-heads": "query, key and value are beside one another in each head, [batch, length, heads, 3, dim]",
    "packed-kv": "key and value are columns of one projection, [batch, length, 2, heads, dim]",
    "packed-kv-heads": "key and value are beside one another in each head, [batch, length, heads, 2, dim]",
    "stacked-kv": "key and value are the halves of one buffer, [2, batch, heads, length, dim]",
}
CALLS: dict[Call, str] = {
    "plain": "forward, then backward",
    "forward": "forward alone; no input wants a gradient",
    "no_grad": "under torch.no_grad",
    "inference": "under torch.inference_mode",
    "accumulated": "a backward that adds to gradients that are already there",
    "projected": "with inputs that are results of other operations, as in a network; some copy what the call saves",
    "twice": "two backwards of one forward",
    "two-forwards": "up to 129 other calls run between forward and backward; the first of them has other options",
    "after-another": "after a call with other options",
    "renewed": "after one or four calls with other values in the same tensors; the first of four has no gradients",
    "readdressed": "the same, but with other tensors at the same addresses",
    "grown": "under torch.no_grad, after a call or a prompt without the last keys, as with a cache that grows",
    "checkpointed": "under torch.utils.checkpoint",
    "compiled": "under torch.compile",
    "thread": "in another thread",
    "threads": "in two threads at once",
    "parallel": "with six threads for PyTorch's own loops",
    "default64": "under a default dtype of float64",
    "default16": "under a default dtype of bfloat16, as in programs that load a model in 16 bit",
    "deterministic": "under torch.use_deterministic_algorithms",
    "autocast": "under torch.autocast",
}
WITHOUT_BACKWARD: tuple[Call, ...] = ("forward", "no_grad", "inference", "grown")
# Calls that are plain themselves, although other calls or backwards run before or after them.
PLAIN_CALLS: tuple[Call, ...] = (
    "plain",
    "accumulated",
    "projected",
    "twice",
    "two-forwards",
    "after-another",
    "renewed",
    "readdressed",
)
# Calls that are also tried with inputs of which none wants a gradient. Those with one forward are then made under
# torch.inference_mode, as in generation.
DETACHED_CALLS: tuple[Call, ...] = (
    "two-forwards",
    "after-another",
    "renewed",
    "readdressed",
    "compiled",
    "thread",
    "threads",
    "parallel",
    "default64",
    "default16",
    "deterministic",
    "autocast",
)
OF_DOUT: tuple[Layout, ...] = ("pooled", "summed")  # layouts that only an output gradient has

_WANTED_WORDS: dict[Wanted, list[str]] = {
    wanted: {"all": [], "none": ["detached"]}.get(wanted, [f"only-{wanted}"]) for wanted in get_args(Wanted)
}
TENSORS = ("q", "k", "v", "do")  # query, key, value and output gradient, as in the words of a case
SHARED = {
    "dense": "qkv",
    "one-kv": "kv",
    "packed-kv": "kv",
    "packed-kv-heads": "kv",
    "stacked-kv": "kv",
    "one-qkv": "qkv",
    "packed": "qkv",
    "packed-heads": "qkv",
}
Layouts = tuple[Layout, Layout, Layout, Layout]
Offsets = tuple[bool, bool, bool, bool]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input, and how the kernel is called with it. `str(case)` is the line to copy, and `Case.parse` reads it.

    magnitude multiplies the queries; in the families spike and rising it is how far scores are raised. shift adds a
    constant to every score, through one coordinate. layouts and offsets are those of query, key, value and output
    gradient. A tensor with an offset begins one element, or eight bytes, after an address that is aligned for vector
    loads; a "wider" one begins at such an address, and is part of a buffer with one more column, so its rows begin
    anywhere. The seed chooses between the forms of an offset, of a call, and of a layout: with or without a gap.
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
    one_mask: bool = False  # whether the block mask has one entry for all heads, for the whole batch, or for both
    family: Family = "normal"
    magnitude: float = 1.0
    shift: float = 0.0
    scale: float | None = None
    number: Number = "float"  # the type in which the scale is given
    dropout: float = 0.0
    values: Values = "normal"
    douts: Douts = "normal"
    layouts: Layouts = ("contiguous", "contiguous", "contiguous", "contiguous")
    offsets: Offsets = (False, False, False, False)
    sharing: Sharing = "apart"
    call: Call = "plain"
    wanted: Wanted = "all"  # the gradients that the case asks for; "none": no input wants one
    lse: bool = True  # whether the case asks for the LSE, if the LSE is claimed
    spelled: bool = False  # whether the call spells out keywords that change nothing
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "keys", self.keys or self.queries)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads {self.heads}")
        if min(self.batch, self.heads, self.queries, self.keys, self.dim) < 1:
            raise ValueError(f"every size must be at least 1 in {self!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: {self.dropout:g} is not a probability below 1")
        if self.blocks is not None and not 0.0 <= self.blocks <= 1.0:
            raise ValueError(f"blocks: {self.blocks:g} is not a share between 0 and 1")
        if self.one_mask and self.blocks is None:
            raise ValueError("one_mask: there is no block mask; give blocks too")
        if self.number == "int" and not float(self.scale or 0.5).is_integer():
            raise ValueError(f"scale: {self.scale} is not an integer; give one, as in scale2int")
        if wrong := [TENSORS[i] for i in range(3) if self.layouts[i] in OF_DOUT]:
            raise ValueError(f"layouts: {wrong[0]} cannot be {self.layouts[TENSORS.index(wrong[0])]}; only do can be")
        if lacking := self._lacking_to_share():
            raise ValueError(f"sharing: {self.sharing} needs {lacking}")

    def _lacking_to_share(self) -> str:
        """What the sharing of memory needs and the case does not have; an empty string if nothing is missing."""
        shared = SHARED.get(self.sharing, "")
        for tensor in shared:
            place = TENSORS.index(tensor)
            if self.layouts[place] != "contiguous" or self.offsets[place]:
                return f"{tensor} to have no layout and no offset of its own"
        if "q" in shared and self.sharing != "dense" and self.queries != self.keys:
            return "as many queries as keys"
        if self.sharing in ("one-qkv", "packed-heads") and self.kv_heads != self.heads:
            return "as many key heads as query heads"
        return ""

    def __str__(self) -> str:
        heads = f"h{self.heads}" if self.kv_heads == self.heads else f"h{self.heads}/{self.kv_heads}"
        words = [f"b{self.batch}", heads, f"q{self.queries}", f"k{self.keys}", f"d{self.dim}", self.dtype, self.mask]
        if self.blocks is not None:
            words.append("blocks" + _digits(self.blocks) + ("one" if self.one_mask else ""))
        words.append(self.family)
        if self.magnitude != 1.0:
            words.append("x" + _digits(self.magnitude))
        if self.shift:
            words.append("shift" + _digits(self.shift))
        if self.scale is not None:
            words.append("scale" + _digits(self.scale) + ("" if self.number == "float" else self.number))
        if self.dropout:
            words.append("dropout" + _digits(self.dropout))
        words += [f"v.{self.values}"] if self.values != "normal" else []
        words += [f"do.{self.douts}"] if self.douts != "normal" else []
        words += _by_tensor([layout if layout != "contiguous" else "" for layout in self.layouts])
        words += _by_tensor(["offset" if offset else "" for offset in self.offsets])
        words += [self.sharing] if self.sharing != "apart" else []
        words += [self.call] if self.call != "plain" else []
        words += _WANTED_WORDS[self.wanted]
        words += [word for word, is_so in (("nolse", not self.lse), ("spelled", self.spelled)) if is_so]
        return " ".join([*words, f"seed{self.seed}"])

    @property
    def numbers(self) -> int:
        """The number of elements of the four tensors."""
        return 2 * self.batch * self.dim * (self.heads * self.queries + self.kv_heads * self.keys)

    @property
    def backward(self) -> bool:
        """Whether the case has a backward."""
        return self.call not in WITHOUT_BACKWARD and self.wanted != "none"

    @property
    def is_one_memory(self) -> bool:
        """Whether several elements of a tensor are one element of memory, so that none of them can change alone."""
        return bool({"expanded", *OF_DOUT} & set(self.layouts)) or self.sharing.startswith("one-")

    @classmethod
    def parse(cls, line: str) -> "Case":
        """Reads the line of a case. The words may be in any order, and a missing word means the default.

        Raises ValueError, which names the word.
        """
        fields: dict[str, object] = {}
        by_tensor: dict[str, dict[str, object]] = {"layouts": {}, "offsets": {}}
        for word in line.split():
            found = _parse_word(word)
            for field, value in found.items():
                known = by_tensor.get(field, fields)
                new = value if isinstance(value, dict) else {field: value}
                if twice := new.keys() & known.keys():
                    raise ValueError(f"the word {word!r} gives {', '.join(sorted(twice))} a second time")
                known |= new
        for field, given in by_tensor.items():
            if given:
                plain = "contiguous" if field == "layouts" else False
                fields[field] = tuple(given.get(tensor, plain) for tensor in TENSORS)
        return cls(**fields)  # type: ignore[arg-type]


def _by_tensor(words: Sequence[str]) -> list[str]:
    """A word for each tensor that has one, or a single word if all tensors have the same."""
    if len(set(words)) == 1:
        return [words[0]] if words[0] else []
    return [f"{tensor}.{word}" for tensor, word in zip(TENSORS, words, strict=True) if word]


def _digits(number: float) -> str:
    """The shortest digits that parse to the same number."""
    return repr(number).removesuffix(".0")


_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
_PATTERNS: tuple[tuple[str, dict[str, type]], ...] = (
    (r"b(\d+)", {"batch": int}),
    (r"h(\d+)", {"heads": int}),
    (r"h(\d+)/(\d+)", {"heads": int, "kv_heads": int}),
    (r"q(\d+)", {"queries": int}),
    (r"k(\d+)", {"keys": int}),
    (r"d(\d+)", {"dim": int}),
    (rf"blocks{_NUMBER}", {"blocks": float}),
    (rf"blocks{_NUMBER}(one)", {"blocks": float, "one_mask": bool}),
    (rf"x{_NUMBER}", {"magnitude": float}),
    (rf"shift{_NUMBER}", {"shift": float}),
    (rf"scale{_NUMBER}", {"scale": float}),
    (rf"scale{_NUMBER}(int|numpy)", {"scale": float, "number": str}),
    (rf"dropout{_NUMBER}", {"dropout": float}),
    (r"seed(\d+)", {"seed": int}),
)
_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "dim")


def _words() -> dict[str, dict[str, object]]:
    """The fields that each word without a number sets."""
    found: dict[str, dict[str, object]] = {"nolse": {"lse": False}, "spelled": {"spelled": True}}
    kinds = {"dtype": Dtype, "mask": Masking, "family": Family, "sharing": Sharing, "call": Call}
    found |= {word: {field: word} for field, kind in kinds.items() for word in get_args(kind)}
    found |= {word: {"wanted": wanted} for wanted, words in _WANTED_WORDS.items() for word in words}
    found |= {f"v.{word}": {"values": word} for word in get_args(Values)}
    found |= {f"do.{word}": {"douts": word} for word in get_args(Douts)}
    for words, tensors in (("", TENSORS), *((f"{tensor}.", (tensor,)) for tensor in TENSORS)):
        for layout in get_args(Layout):
            if layout not in OF_DOUT or tensors == ("do",):
                found[words + layout] = {"layouts": dict.fromkeys(tensors, layout)}
        found[f"{words}offset"] = {"offsets": dict.fromkeys(tensors, True)}
    return found


_WORDS = _words()


def _parse_word(word: str) -> dict[str, object]:
    if word in _WORDS:
        return _WORDS[word]
    for pattern, fields in _PATTERNS:
        if match := re.fullmatch(pattern, word):
            found: dict[str, object] = {
                field: kind(text) for (field, kind), text in zip(fields.items(), match.groups(), strict=True)
            }
            if any(value == 0 for field, value in found.items() if field in _SIZES):
                raise ValueError(f"in the word {word!r} a size is 0; every size must be at least 1")
            return found
    known = [*_WORDS, "blocks0.5", "shift8", "scale0.5", "dropout0.1", "seed0"]
    example = Case(family="spike", magnitude=30.0, seed=7)
    raise ValueError(f"the word {word!r} is unknown{close(word, known)}; a case looks like '{example}'")


def without_backward(case: Case) -> Case:
    """The case with as much of its way of calling as goes without a backward."""
    if not case.backward:
        return case
    detached = replace(case, wanted="none")
    return detached if case.call in DETACHED_CALLS else replace(case, call="forward", wanted="all")


def not_claimed(case: Case, supports: Supports) -> str | None:
    """The feature of a case that a claim does not cover, or None if the claim covers the case."""
    packed = case.sharing == "dense" or case.sharing.startswith("packed")
    strided = next((layout for layout in case.layouts if layout != "contiguous"), case.sharing if packed else "")
    anywhere = any(case.offsets) or ((packed or case.sharing == "stacked-kv") and case.dim % 8 > 0)
    rules = (
        (case.dtype in supports.dtypes, f"dtype {case.dtype}"),
        (
            supports.dims[0] <= case.dim <= supports.dims[1] and case.dim % supports.dim_multiple == 0,
            f"head dim {case.dim}",
        ),
        (case.queries == case.keys or supports.cross_lengths, "queries != keys"),
        (case.call != "grown" or (supports.cross_lengths and supports.strided), "keys that grow in their memory"),
        (case.kv_heads == case.heads or supports.grouped_heads, "grouped heads"),
        (case.mask != "causal" or "top_left" in supports.causal, "causal, top-left"),
        (case.mask != "causal-br" or "bottom_right" in supports.causal, "causal, bottom-right"),
        (case.blocks is None or supports.block_mask, "block mask"),
        (case.scale is None or supports.scale != "default", "scale"),
        (case.scale is None or case.scale > 0 or supports.scale == "finite", "scale that is zero or negative"),
        (not case.dropout or supports.dropout, "dropout"),
        (not strided or supports.strided, f"{strided} inputs"),
        (not anywhere or supports.unaligned, "tensors that begin anywhere"),
    )
    return next((feature for covered, feature in rules if not covered), None)
