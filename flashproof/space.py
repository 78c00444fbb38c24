"""The space of cases: named factors with a few levels that matter, and the covering array that a run takes from it.

A level is a property that a kernel may have separate code for: a class of lengths, a mask, the layout of one tensor, a
way of calling. A fault may need two or three levels together. The cases of a run contain every pair of levels that the
claims allow, and as many triples as the run has room for.

To add a level, add its word to its factor. To add a factor, add it to `FACTORS`: `draw` gives a case its level, and
`of` reads the level from a case. `_RULES` excludes levels that cannot occur together.
"""

import ast
import inspect
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from flashproof import arrays
from flashproof.arrays import Rows
from flashproof.cases import (
    CALLS,
    DETACHED_CALLS,
    DOUTS,
    FAMILIES,
    LAYOUTS,
    OF_DOUT,
    SHARED,
    SHARINGS,
    TENSORS,
    VALUES,
    WITHOUT_BACKWARD,
    Call,
    Case,
    Layouts,
    Masking,
    Wanted,
    not_claimed,
)
from flashproof.covering import OPEN, PAIR, Allowed, Coverage, Covering, Partial, Row, every_four
from flashproof.impls.spec import DTYPES, OWN_KERNELS, Device, Dtype, Implementation, Supports

# The version of the list of cases that a run judges, of the space and of all grids. Bundles name it: `flashproof check`
# makes the list again. Whoever changes a case raises it (tests/suite/space/test_case_set.py says when).
CASE_SET = 18

Fields = dict[str, Any]  # the fields of a case that is being built
Levels = Mapping[str, str]  # the level of each factor
Pick = Callable[[Sequence[Any]], Any]  # chooses one of several values, by the row and the factor


@dataclass(frozen=True)
class Factor:
    """One property of a case.

    levels: the names of the levels, the plain level first. of: reads the level from a case. draw: returns the fields
    that give a case the level, from the fields that earlier factors have set. weight: the weight of a triple with this
    factor; 2 if kernels choose their code by this factor. cost: the cost of each level except the plain one, in new
    triples. costs: the costs of single levels, in place of `cost`. coarse: the levels that hide small faults.
    """

    name: str
    levels: tuple[str, ...]
    of: Callable[[Case], str]
    draw: Callable[[str, Fields, Pick], Fields]
    weight: float = 1.0
    cost: float = 0.0
    costs: Mapping[str, float] = field(default_factory=dict)
    coarse: Sequence[str] = ()

    def cost_of(self, level: str) -> float:
        """The cost of a level."""
        return self.costs.get(level, 0.0 if level == self.levels[0] else self.cost)


def _field(name: str, words: dict[str, Any] | Sequence[str], *, field: str = "", **about: Any) -> Factor:
    """A factor for one field of a case. words: the values by the name of their level, or the values themselves."""
    values = words if isinstance(words, dict) else {word: word for word in words}
    names = {value: word for word, value in values.items()}
    key = field or name
    return Factor(
        name,
        tuple(values),
        lambda case: names.get(getattr(case, key), "another"),
        lambda level, fields, pick: {key: values[level]},
        **about,
    )


def _classes(name: str, classes: Mapping[str, Sequence[int]], field: str, of: Callable[[Case], int]) -> Factor:
    """A factor for a number of heads, a batch size or a head dim. classes: the numbers of each level."""
    return Factor(
        name,
        tuple(classes),
        lambda case: next((word for word, numbers in classes.items() if of(case) in numbers), "another"),
        lambda level, fields, pick: {field: pick(classes[level])},
        weight=2.0,
    )


def _of_tensor(name: str, place: int, field: str, words: Mapping[str, Any]) -> Factor:
    """A factor for one entry of `layouts` or of `offsets`."""
    names, plain = {value: word for word, value in words.items()}, getattr(Case(), field)

    def draw(level: str, fields: Fields, pick: Pick) -> Fields:
        before = fields.get(field, plain)
        return {field: (*before[:place], words[level], *before[place + 1 :])}

    return Factor(name, tuple(words), lambda case: names[getattr(case, field)[place]], draw)


# --------------------------------------------------------------------------------------------------------- lengths

# Tiles of kernels have a length of 16 to 256, and most have 64 or 128. Some kernels split the keys, or change their
# code, at 512, 1024 or 2048.
LENGTHS: dict[str, Sequence[int]] = {
    "past a tile": range(65, 145),
    "1": range(1, 2),
    "2 to 15": range(2, 16),
    "16 to 64": range(16, 65),
    "tiles": range(145, 257),
    "257 to 512": [257, 260, 263, 272, 288, 301, 320, 333, 353, 358, 368, 384, 391, 400, 448, 511, 512],
    "513 to 1024": [513, 514, 528, 533, 576, 640, 655, 700, 768, 896, 1000, 1008, 1023, 1024],
    "over 1024": [1025, 1026, 1039, 1040, 1056, 1088, 1100, 1120, 1152, 1280, 1279, 1536, 1999, 2000, 2032, 2047, 2048],
    "over 2048": [2049, 2050, 2064, 2112, 2560, 3000, 3001, 3072, 3136, 4000, 4080, 4095, 4096],
    "over 4096": [*range(4097, 4165), 4608, 8192, *range(8193, 8261)],
}
_ENDS = {
    1: "1",
    15: "2 to 15",
    64: "16 to 64",
    144: "past a tile",
    256: "tiles",
    512: "257 to 512",
    1024: "513 to 1024",
    2048: "over 1024",
    4096: "over 2048",
}
RESTS: dict[str, Callable[[int], bool]] = {
    "odd": lambda length: length % 2 == 1,
    "even": lambda length: length % 2 == 0 and length % 16 > 0,
    "of 16": lambda length: length % 16 == 0 and length % 64 > 0,
    "of 64": lambda length: length % 64 == 0 and length % 512 > 0,
    "of 512": lambda length: length % 512 == 0,
}
AS_QUERIES = "as queries"
_BY_LENGTH = [*_ENDS.values(), "over 4096"]


def length_class(length: int) -> str:
    """The class of any length."""
    return next((word for end, word in _ENDS.items() if length <= end), "over 4096")


def rest(length: int) -> str:
    """The rest of a length: what it leaves over whole tiles."""
    return next(word for word, holds in RESTS.items() if holds(length))


@cache
def _fitting(length: str, left: str) -> tuple[int, ...]:
    """The lengths of a class that have this rest. If the class has none, such lengths of all classes."""
    every = (number for numbers in LENGTHS.values() for number in numbers if RESTS[left](number))
    return tuple(number for number in LENGTHS[length] if RESTS[left](number)) or tuple(every)


def _keys(level: str, fields: Fields, pick: Pick) -> Fields:
    if fields["_keys"] == AS_QUERIES:
        return {"keys": fields["queries"]}
    return {"keys": pick([number for number in _fitting(fields["_keys"], level) if number != fields["queries"]])}


# ---------------------------------------------------------------------------------------------------------- factors

_HEADS: dict[str, Sequence[int]] = {
    "1": [1],
    "2": [2],
    "3 or 4": [3, 4],
    "5 to 9": range(5, 10),
    "16 to 33": range(16, 34),
    "34 to 96": [40, 64, 66, 71, 80, 96],
}
_GROUPS: dict[str, Sequence[int]] = {
    "1": [1],
    "2": [2],
    "3": [3],
    "4": [4],
    "5 to 7": range(5, 8),
    "8": [8],
    "9 to 71": [16, 12, 16, 24, 32, 16, 10, 48, 20, 71, 29, 64],  # 16 most often: the rows of a tile of tensor cores
}
_BATCHES: dict[str, Sequence[int]] = {"1": [1], "2": [2], "3 to 9": [3, 4, 5, 8, 9], "16 to 33": [16, 17, 32, 33]}
MANY = "over 65535 with heads"  # more than the largest grid of a GPU in its second and third dimension
_DIMS: dict[str, Sequence[int]] = {str(dim): [dim] for dim in (64, *(dim for dim in range(8, 257, 8) if dim != 64))}
_DIMS |= {
    "odd": range(1, 64, 2),
    "even": [dim for dim in range(2, 64, 2) if dim % 8],
    "odd over 64": [65, 71, 99, 127, 129, 161, 201, 255],
    "even over 64": [66, 100, 130, 164, 250],
}
_SMALLEST_DIM = {level: min(dims) for level, dims in _DIMS.items()}
_SCALES: dict[str, tuple[Sequence[float | None], str]] = {
    "default": ([None], "float"),
    "given": ([0.3, 192**-0.5, 1.7, 1 / 128, 0.02], "float"),
    "1": ([1.0], "float"),
    "integer": ([1.0, 2.0], "int"),
    "NumPy": ([0.7], "numpy"),
    "negative": ([-0.2, -1.3], "float"),
    "zero": ([0.0], "float"),
}
_DROPOUTS: dict[str, Sequence[float]] = {"none": [0.0], "some": [0.1, 0.15, 0.3, 0.5, 0.05, 0.125], "most": [0.85, 0.6]}
_BLOCKS: dict[str, tuple[float | None, bool]] = {
    "none": (None, False),
    "half": (0.5, False),
    "sparse": (0.15, False),
    "for several heads": (0.5, True),
}
_MAGNITUDES = {"1": 1.0, "small": 2.0**-10, "16": 16.0, "64": 64.0}
_LIFTS = {1.0: 12.0, 2.0**-10: 3.0, 16.0: 30.0, 64.0: 100.0}  # the lift of a spike or a rise, in place of a magnitude
# Inputs that are not plain make some tensors large or zero, and so they hide faults. A very large batch x heads leaves
# no room for any other size. The array takes such a level where a pair needs it, and seldom otherwise.
RARE = 60.0
_DENSE = 0.05  # the share of these costs that counts in dense rows
_SHIFTS = {"none": 0.0, "-100": -100.0, "100": 100.0, "10000": 1e4}


def _scale(case: Case) -> str:
    return next(
        (word for word, (scales, number) in _SCALES.items() if case.scale in scales and case.number == number), "given"
    )


def _batch(level: str, fields: Fields, pick: Pick) -> Fields:
    return {"batch": 65536 // fields["heads"] + 1 if level == MANY else pick(_BATCHES[level])}


def _magnitude(level: str, fields: Fields, pick: Pick) -> Fields:
    magnitude = _MAGNITUDES[level]
    return {"magnitude": _LIFTS[magnitude] if fields["family"] in ("spike", "rising") else magnitude}


def _magnitude_of(case: Case) -> str:
    known = _LIFTS if case.family in ("spike", "rising") else {value: value for value in _MAGNITUDES.values()}
    return next((word for word, value in _MAGNITUDES.items() if known[value] == case.magnitude), "another")


def _batch_of(case: Case) -> str:
    if case.batch * case.heads > 65535:
        return MANY
    return next((word for word, numbers in _BATCHES.items() if case.batch in numbers), "another")


FACTORS: tuple[Factor, ...] = (
    _field("dtype", DTYPES, weight=2.0, coarse=["bfloat16"]),
    _field("call", [*CALLS], weight=2.0, costs={"compiled": RARE}),
    _field("wanted", get_args(Wanted), cost=RARE),
    _classes("key heads", _HEADS, "kv_heads", lambda case: case.kv_heads),
    Factor(
        "group",
        tuple(_GROUPS),
        lambda case: next((word for word, sizes in _GROUPS.items() if case.heads // case.kv_heads in sizes), "another"),
        lambda level, fields, pick: {"heads": fields["kv_heads"] * pick(_GROUPS[level])},
        weight=2.0,
    ),
    Factor("batch", (*_BATCHES, MANY), _batch_of, _batch, costs={MANY: RARE}),
    Factor(
        "queries",
        tuple(LENGTHS),
        lambda case: length_class(case.queries),
        lambda level, fields, pick: {"_queries": level},
        weight=2.0,
    ),
    Factor(
        "queries' rest",
        tuple(RESTS),
        lambda case: rest(case.queries),
        lambda level, fields, pick: {"queries": pick(_fitting(fields["_queries"], level))},
    ),
    Factor(
        "keys",
        (AS_QUERIES, *LENGTHS),
        lambda case: AS_QUERIES if case.keys == case.queries else length_class(case.keys),
        lambda level, fields, pick: {"_keys": level},
        weight=2.0,
        costs={"1": RARE},
    ),
    Factor("keys' rest", tuple(RESTS), lambda case: rest(case.keys), _keys),
    _classes("head dim", _DIMS, "dim", lambda case: case.dim),
    _field("mask", ("full", "causal", "causal-br"), weight=2.0),
    Factor(
        "block mask",
        tuple(_BLOCKS),
        lambda case: next((word for word, of in _BLOCKS.items() if of == (case.blocks, case.one_mask)), "another"),
        lambda level, fields, pick: dict(zip(("blocks", "one_mask"), _BLOCKS[level], strict=True)),
        weight=2.0,
    ),
    Factor(
        "scale",
        tuple(_SCALES),
        _scale,
        lambda level, fields, pick: {"scale": pick(_SCALES[level][0]), "number": _SCALES[level][1]},
        costs={"zero": RARE},
    ),
    Factor(
        "dropout",
        tuple(_DROPOUTS),
        lambda case: next((word for word, shares in _DROPOUTS.items() if case.dropout in shares), "another"),
        lambda level, fields, pick: {"dropout": pick(_DROPOUTS[level])},
        weight=2.0,
    ),
    _field("LSE", {"asked": True, "not asked": False}, field="lse", costs={"not asked": RARE}),
    _field("keywords", {"needed": False, "all": True}, field="spelled"),
    _field("sharing", [*SHARINGS]),
    *(
        _of_tensor(
            f"layout of {tensor}",
            place,
            "layouts",
            {layout: layout for layout in LAYOUTS if tensor == "do" or layout not in OF_DOUT},
        )
        for place, tensor in enumerate(TENSORS)
    ),
    *(
        _of_tensor(f"address of {tensor}", place, "offsets", {"aligned": False, "offset": True})
        for place, tensor in enumerate(TENSORS)
    ),
    _field("scores", [*FAMILIES], field="family", cost=RARE),
    Factor("magnitude", tuple(_MAGNITUDES), _magnitude_of, _magnitude, cost=RARE),
    _field("shift", _SHIFTS, cost=RARE),
    _field("values", [*VALUES], cost=RARE),
    _field("output gradient", [*DOUTS], field="douts", cost=RARE),
)

GRADIENTS = ("dq", "dk", "dv")
_SMALL = ("small faults of out", "small faults of gradients")
_HIDE: tuple[tuple[Mapping[str, str], Collection[str]], ...] = (
    *(({"call": call}, GRADIENTS) for call in WITHOUT_BACKWARD),
    *(({"wanted": wanted}, set(GRADIENTS).difference(wanted.split("-"))) for wanted in get_args(Wanted)[1:]),
    ({"LSE": "not asked"}, ("lse",)),
    # The weight of a single key is 1, whatever its score is.
    ({"keys": "1"}, ("dq", "dk")),
    ({"queries": "1", "keys": AS_QUERIES}, ("dq", "dk")),
    ({"queries": "1", "mask": "causal"}, ("dq", "dk")),
    ({"scale": "zero"}, ("dq", "dk")),
    ({"scores": "uniform"}, ("dk",)),
    ({"scores": "nokeys"}, ("dq",)),
    ({"values": "equal"}, ("dq", "dk")),
    ({"values": "zero"}, ("out", "dq", "dk")),
    ({"output gradient": "zero"}, GRADIENTS),
    # Bounds are wide where 16 bits hold scores, where scores are very large, and where results are subnormal.
    ({"call": "autocast"}, _SMALL),
    ({"shift": "10000"}, _SMALL),
    ({"dtype": "float16", "values": "small"}, _SMALL),
    ({"dtype": "float16", "output gradient": "small"}, _SMALL[1:]),
)


def _with_small_faults(tensors: Collection[str]) -> set[str]:
    """These tensors, and the small faults of those in which no fault shows."""
    of = (("out",), GRADIENTS)
    return {*tensors, *(small for small, names in zip(_SMALL, of, strict=True) if set(names) & set(tensors))}


# What hides the faults of other levels: one level or two, and the tensors in which they do.
HIDES = tuple((known, _with_small_faults(tensors)) for known, tensors in _HIDE)


def levels(case: Case) -> dict[str, str]:
    """The level that a case has of each factor, by the factor's name. "another" if the factor has no such level."""
    return {factor.name: factor.of(case) for factor in FACTORS}


def case_of(row: Levels, number: int, *, turn: int = 0, smallest: Sequence[str] = ()) -> Case:
    """A case with these levels.

    number: the number of the row; it chooses among the values of a level, and it is the seed of the case. turn: another
    turn chooses other values. smallest: the factors that take their smallest values.
    """
    fields: Fields = {}
    for factor in FACTORS:

        def pick(values: Sequence[Any], name: str = factor.name) -> Any:
            if name in smallest:
                return min(values)
            return values[zlib.crc32(f"{number} {name}{turn or ''}".encode()) % len(values)]

        fields |= factor.draw(row[factor.name], fields, pick)
    return Case(**{name: value for name, value in fields.items() if not name.startswith("_")}, seed=number)


PLAIN: dict[str, str] = {factor.name: factor.levels[0] for factor in FACTORS}

# ------------------------------------------------------------------------------------------------------------ rules

Known = Mapping[str, str]  # the levels that are chosen so far
_OF_DOUT = ("layout of do", "address of do", "output gradient", "wanted")
_OF_LENGTH = ("queries", "queries' rest", "keys", "keys' rest")
_OF_WIDTH = ("key heads", "group", "batch", "head dim")
_OF_SIZE = (*_OF_WIDTH, *_OF_LENGTH, "sharing")


@dataclass(frozen=True)
class Rule:
    """A rule that excludes levels that cannot occur together.

    factors: the factors that the rule reads. holds: whether the chosen levels of these factors are allowed together.
    """

    factors: tuple[str, ...]
    holds: Callable[[Known], bool]


_RULES: list[Rule] = []


def _rule(*factors: str) -> Callable[[Callable[[Known], bool]], Callable[[Known], bool]]:
    def add(holds: Callable[[Known], bool]) -> Callable[[Known], bool]:
        _RULES.append(Rule(factors, holds))
        return holds

    return add


def _is_plain(known: Known, *factors: str) -> bool:
    """Whether each of these factors has its plain level, or no level yet."""
    return all(known.get(factor, PLAIN[factor]) == PLAIN[factor] for factor in factors)


@cache
def _lengths(length: str | None, *rests: str | None) -> tuple[int, ...]:
    """The lengths of a class, or of all classes, that have all of these rests, in ascending order."""
    numbers = LENGTHS[length] if length else [number for numbers in LENGTHS.values() for number in numbers]
    return tuple(sorted(number for number in numbers if all(RESTS[left](number) for left in rests if left)))


@cache
def _shortest(
    queries: str | None, queries_rest: str | None, keys: str | None, keys_rest: str | None, sharing: str | None
) -> tuple[int, int] | None:
    """The smallest numbers of queries and of keys that have these levels. None if no lengths have them.

    The two lengths differ, unless the levels force as many keys as queries.
    """
    if keys == AS_QUERIES or (sharing != "dense" and "q" in SHARED.get(sharing or "", "")):
        both = _lengths(queries, queries_rest, keys_rest)
        return (both[0], both[0]) if both and keys in (None, AS_QUERIES) else None
    of_queries, of_keys = _lengths(queries, queries_rest), _lengths(keys, keys_rest)
    if not of_queries or not of_keys or (of_queries == of_keys and len(of_keys) == 1):
        return None
    return of_queries[0], of_keys[0]


def _shortest_of(known: Known) -> tuple[int, int] | None:
    return _shortest(*(known.get(factor) for factor in (*_OF_LENGTH, "sharing")))


@_rule(*_OF_LENGTH, "sharing")
def _lengths_exist(known: Known) -> bool:
    """The classes contain lengths with these rests."""
    return _shortest_of(known) is not None


@_rule("mask", "queries", "keys")
def _causal_masks_show_the_lengths(known: Known) -> bool:
    """Few queries see few keys under a mask that is aligned at the top left, and few keys are seen by few queries.

    So a longer class of keys, or of queries, would change nothing that is computed.
    """
    queries, keys = known.get("queries"), known.get("keys", AS_QUERIES)
    if queries is None or keys == AS_QUERIES:
        return True
    longer = _BY_LENGTH.index(keys) - _BY_LENGTH.index(queries)
    return {"causal": longer <= 0, "causal-br": longer >= -1}.get(known.get("mask", "full"), True)


@_rule("call", *_OF_DOUT)
def _gradients_need_backward(known: Known) -> bool:
    """Without a backward, the factors of the output gradient are plain. Some calls always have a backward."""
    call, wanted = known.get("call"), known.get("wanted", "all")
    if wanted == "none":
        return (call is None or call in DETACHED_CALLS) and _is_plain(known, *_OF_DOUT[:-1])
    return call not in WITHOUT_BACKWARD or _is_plain(known, *_OF_DOUT)


@_rule("sharing", "group", *(f"{of} of {tensor}" for tensor in TENSORS[:3] for of in ("layout", "address")))
def _memory_can_be_shared(known: Known) -> bool:
    """Tensors that share memory have no layout or address of their own, and in some sharings as many heads."""
    sharing = known.get("sharing", "")
    own = (f"{of} of {tensor}" for tensor in SHARED.get(sharing, "") for of in ("layout", "address"))
    return _is_plain(known, *own) and (sharing not in ("one-qkv", "packed-heads") or _is_plain(known, "group"))


@_rule("sharing", "key heads")
def _layouts_of_heads_have_several(known: Known) -> bool:
    """Layouts that place heads between rows, or beside one another, differ from others only with several heads."""
    of_heads = known.get("sharing") in ("dense", "packed-kv-heads")
    return not of_heads or known.get("key heads") != "1"


@_rule("batch", "key heads", "group", *(f"layout of {tensor}" for tensor in TENSORS))
def _expansion_is_of_several(known: Known) -> bool:
    """An expanded tensor needs several batch entries or several heads."""
    expanded = [tensor for tensor in TENSORS if known.get(f"layout of {tensor}") == "expanded"]
    if known.get("batch") != "1" or known.get("key heads") != "1":
        return True
    return not ({"k", "v"} & set(expanded)) and not (expanded and known.get("group") == "1")


@_rule("queries", "keys", "key heads", "group", *(f"layout of {tensor}" for tensor in TENSORS))
def _transposed_tensors_have_two_axes(known: Known) -> bool:
    """[batch, length, heads, dim] differs from [batch, heads, length, dim] only if there are several heads and rows."""
    one_row = {"k": known.get("keys", "64"), "q": known.get("queries", "64")}
    one_row["k"] = one_row["q"] if one_row["k"] == AS_QUERIES else one_row["k"]
    one_head = {"k": known.get("key heads", "2") == "1", "q": known.get("group", "2") == "1"}
    one_head["q"] &= one_head["k"]
    return not any(
        known.get(f"layout of {tensor}") == "transposed" and (one_head[like] or one_row[like] == "1")
        for tensor, like in (("q", "q"), ("k", "k"), ("v", "k"), ("do", "q"))
    )


@_rule("queries", "keys", "batch", *(f"layout of {tensor}" for tensor in TENSORS))
def _length_first_differs(known: Known) -> bool:
    """[length, batch, heads, dim] differs from other layouts only if there are several batch entries and rows."""
    rows = known.get("queries"), known.get("keys", AS_QUERIES)
    one_row = {"q": rows[0] == "1", "k": "1" in (rows[0] if rows[1] == AS_QUERIES else "", rows[1])}
    return not any(
        known.get(f"layout of {tensor}") == "length-first" and (known.get("batch") == "1" or one_row[like])
        for tensor, like in (("q", "q"), ("k", "k"), ("v", "k"), ("do", "q"))
    )


@_rule("queries", "layout of do")
def _pool_is_of_several(known: Known) -> bool:
    """A pooled output gradient, with one row for all queries, needs several queries."""
    return known.get("queries") != "1" or known.get("layout of do") != "pooled"


@_rule("layout of do", "output gradient")
def _one_row_has_no_pattern(known: Known) -> bool:
    """A pooled output gradient has one row for all queries. Each number of a summed one is 1."""
    if known.get("layout of do") == "summed":
        return _is_plain(known, "output gradient")
    return known.get("layout of do") != "pooled" or known.get("output gradient") not in ("onehot", "somerows")


@_rule("dtype", "sharing", "shift")
def _shift_is_of_scores_alone(known: Known) -> bool:
    """A shift is one large coordinate of all keys. Values that are the keys contain it too, and float16 overflows."""
    is_value = known.get("sharing") in ("one-kv", "one-qkv")
    return not is_value or known.get("dtype") != "float16" or known.get("shift", "none") == "none"


@_rule("sharing", "values", "scores", "magnitude", "shift")
def _numbers_are_used(known: Known) -> bool:
    """Values that are the keys have the numbers of the keys. Queries that are the keys have them, too."""
    sharing = known.get("sharing", "")
    if sharing not in ("one-kv", "one-qkv"):
        return True
    of_queries = sharing == "one-kv" or (
        known.get("scores") not in ("sharp", "spike", "rising", "uniform") and _is_plain(known, "magnitude", "shift")
    )
    return _is_plain(known, "values") and of_queries


@_rule("scores", "shift")
def _zeros_are_not_shifted(known: Known) -> bool:
    """A shift is one coordinate of all keys, so with a shift, keys of zero would no longer be zero."""
    return known.get("scores") not in ("padded", "nokeys") or known.get("shift", "none") == "none"


@_rule("call", "batch", "queries", "keys")
def _compilation_ends(known: Known) -> bool:
    """Compilers unroll a loop over tiles or heads. With hundreds of them, a right kernel would take minutes."""
    sizes = {known.get("batch"), known.get("queries"), known.get("keys")}
    return known.get("call") != "compiled" or sizes.isdisjoint((MANY, "over 1024", "over 2048", "over 4096"))


@_rule("call", "dtype")
def _autocast_keeps_the_dtype(known: Known) -> bool:
    """Under autocast, the output for float32 inputs would have another dtype."""
    return known.get("call") != "autocast" or known.get("dtype") != "float32"


@_rule("call", "dtype", "shift", "scale")
def _autocast_does_not_overflow(known: Known) -> bool:
    """Autocast rounds products to float16 before the scale is applied.

    A score of 10000 may come from a product of 160000, or of 500000.
    """
    of_float16 = known.get("call") == "autocast" and known.get("dtype") == "float16"
    return not of_float16 or known.get("shift") != "10000" or known.get("scale", "1") not in ("default", "given")


@_rule("dtype", "output gradient", "scores", "magnitude", "shift", "scale", "sharing")
def _large_gradients_do_not_overflow(known: Known) -> bool:
    """In float16, products of large output gradients with large queries, keys or scales overflow."""
    if known.get("dtype") != "float16" or known.get("output gradient") != "large":
        return True
    is_small = known.get("scores", "normal") in ("normal", "ties", "padded", "uniform", "nokeys")
    is_small &= known.get("scale", "default") in ("default", "given", "zero")
    return is_small and known.get("magnitude", "1") in ("1", "small") and _is_plain(known, "shift", "sharing")


@_rule("call", "sharing", "queries", "keys")
def _a_cache_can_grow(known: Known) -> bool:
    """The earlier call has one key less, so there are several keys. They are not the values or queries as well."""
    if known.get("call") != "grown":
        return True
    lengths = known.get("keys", "64"), known.get("queries", "64")
    is_one = lengths[0] == "1" or (lengths[0] == AS_QUERIES and lengths[1] == "1")
    return not is_one and not known.get("sharing", "").startswith("one-")


# ------------------------------------------------------------------------------------------------------------ array


# Cases of plain numbers, in each dtype. A bias shows in them. In most cases of a small array, the numbers or the shape
# hide it. Scales, and the factors of dropout, are those that 16 bits do not hold. The third case has no gradients under
# autocast, which the array has seldom. In the last case, the block mask and the causal mask together hide every key.
PLAIN_CASES = (
    "b1 h2/1 q130 k130 d40 causal scale0.3",
    "b2 h1 q100 k100 d56",
    "b1 h2 q40 k70 d40 causal autocast detached",
    "b1 h1 q120 k120 d24 dropout0.15",
    "b1 h1 q140 k270 d24 causal blocks0.3 seed24",
)
# Ordinary sizes that are too large for the array, in each dtype: a batch of images, a batch of texts, an image that
# attends to a text, a long text with grouped heads, and one query whose scores are all very negative. Beside them, one
# query that sees only the first of many keys, and the layers of a deep network: while tensors are small, many calls can
# wait for their backward. Then batches of texts with grouped heads, in four ways of calling; many heads, many
# sequences, and the heads of a small model; a short last part of many keys; and more than 128 rows of queries that
# share one key head. Then cosine attention, which has a large scale; axes of size 1 with the strides of a layout; one
# key more and one query more, aligned at the bottom right; three query heads for each key head; adapters of queries and
# values with several tiles of keys; eight query heads for each key head in a batch with few keys; and generation with
# 16 query heads for one key head, and from long texts in a batch. Then two query heads for each key head, and four with
# the largest head dim; a fused projection of grouped heads; whole tiles of grouped heads; and prompts without a loss.
LARGE_CASES = (
    "b3 h8 q197 k197 d64",
    "b2 h2 q520 k520 d16 causal",
    "b1 h4 q1024 k77 d40",
    "b1 h2/1 q800 k800 d16 causal inference",
    "b1 h1 q1 k600 d64 shift-10000 inference",
    "b1 h2 q1 k100 d64 causal inference",
    "b1 h2/1 q66 k66 d64 causal two-forwards seed1",
    "b1 h1 q16 k16 d16 two-forwards",
    "b2 h4/2 q300 k300 d16 causal",
    "b2 h4/2 q290 k290 d16 causal inference",
    "b2 h4/2 q280 k280 d16 causal deterministic",
    "b2 h4/2 q270 k270 d16 causal checkpointed",
    "b1 h32/8 q140 k140 d16 causal",
    "b9 h2 q140 k140 d16",
    "b65 h2 q66 k66 d16",
    "b70 h4/2 q1 k130 d16 inference",
    "b2 h12 q70 k70 d64 causal",
    "b1 h2 q8 k1155 d64 causal-br inference",
    "b1 h71/1 q4 k200 d64 causal-br inference",
    "b2 h2 q70 k70 d32 scale10 x0.0625",
    "b1 h2 q40 k70 d64 length-first",
    "b2 h4/1 q70 k70 d64 dense",
    "b1 h1 q70 k71 d32 causal-br",
    "b1 h1 q71 k70 d32 causal-br",
    "b1 h3/1 q70 k70 d128 causal",
    "b1 h2/1 q66 k140 d128 only-dq-dv",
    "b2 h8/1 q192 k16 d64 causal",
    "b1 h16/1 q1 k600 d128 inference",
    "b2 h2/1 q1 k2100 d64 inference",
    "b1 h4/2 q130 k130 d128 causal",
    "b1 h4/1 q70 k70 d256 causal",
    "b2 h4/2 q70 k70 d128 causal packed",
    "b1 h4/2 q192 k192 d64 causal",
    "b2 h2 q100 k100 d64 causal do.somerows seed1",
)
# The same, each in one dtype, because they take longer: more than 65,535 rows of queries, more tiles than the units of
# a GPU, long sequences with several heads, generation after long texts, more heads than a byte can count, and a mask of
# dropout with more than 2^20 numbers.
LONGER_CASES = (
    "b8 h96 q90 k66 d8 float32",
    "b5 h27 q128 k128 d64 causal bfloat16",
    "b1 h4/1 q600 k600 d128 causal float16",
    "b1 h2 q1100 k1100 d64 float32",
    "b1 h8/2 q1 k6000 d128 bfloat16 inference",
    "b2 h8/2 q1 k1500 d64 float16 inference",
    "b4 h66 q66 k66 d64 causal float16",
    "b1 h1 q1050 k1050 d16 dropout0.1 float32",
)
# Levels that most users meet. Kernels have code for several of them together, so the run contains every combination of
# four. All other factors are plain.
COMMON: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "call": ("plain", "inference", "deterministic", "autocast"),
    "wanted": ("all", "none", "dq-dv"),
    "key heads": ("1", "2"),
    "group": ("1", "4"),
    "batch": ("1", "2"),
    "queries": ("257 to 512", "1", "2 to 15"),
    "keys": (AS_QUERIES, "past a tile", "513 to 1024"),
    "head dim": ("64", "80", "128"),
    "mask": ("full", "causal", "causal-br"),
    "dropout": ("none", "some"),
    "LSE": ("asked", "not asked"),
    "sharing": ("apart", "dense"),
    "scores": ("normal", "rising"),
}
# The attention shapes of widely used models: query heads, key heads and head dim. Kernels have code for exactly these
# shapes. With the dtype, a shape is a combination of several levels, so the array contains few of each.
MODELS = {
    "GPT-2": (12, 12, 64),
    "SigLIP": (16, 16, 72),
    "Phi-3 mini": (32, 32, 96),
    "Llama 3 8B": (32, 8, 128),
    "Llama 3 70B": (64, 8, 128),
    "Qwen2.5 7B": (28, 4, 128),
    "Gemma 2 9B": (16, 8, 256),
    "Falcon 7B": (71, 1, 64),
}
# The ways in which the sequences of models are called: in training, as a prompt, in training that must be repeatable,
# and in training of adapters of queries and values.
_PROMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"call": "inference", "sharing": "dense"},
    {"call": "deterministic"},
    {"wanted": "dq-dv", "sharing": "dense"},
)
_AS_PROJECTED: Layouts = ("contiguous", "transposed", "transposed", "contiguous")
_CALLS_OF_A_BATCH: tuple[Call, ...] = ("plain", "inference", "deterministic", "checkpointed", "autocast")
TURNS = 6  # how often the numbers of a row are chosen anew; the first choice that has room is taken
TILE = 64  # the queries, and the keys, of a tile that may take milliseconds


def steps_of(case: Case) -> int:
    """The time of a case whose tiles are slow, in tiles. The beginning and the end of a head take as long as three."""
    return 3 * case.batch * case.heads + _tiles_of(case)


def _tiles_of(case: Case) -> int:
    """The tiles of scores in all heads of a case."""
    return case.batch * case.heads * math.ceil(case.queries / TILE) * math.ceil(case.keys / TILE)


@dataclass(frozen=True)
class Room:
    """The limits on the cases of a run.

    work: the largest batch x heads x queries x keys x (dim + 64) of one case. numbers: the most elements of its four
    tensors. many: the same limit, for a batch x heads over 65535. usual: the share of work and numbers that most cases
    have at most; the other cases complete the pairs that need more. cases: the least number of cases. steps: the
    largest time of one case by `steps_of`, where tiles are slow. tiles: the most tiles of scores in one case, where
    they are slow. dims: the head dims. odd: the only odd head dim, for a kernel that is compiled for each. pairs:
    whether the run has as many cases as all pairs need. shows: what each pair needs cases for: one that shows each
    tensor of the answer, one that shows the forward and one that shows the backward, or one that may show neither.
    common: whether the run has every combination of four common levels. triples: the room of the further cases, which
    complete every triple that fits in that room. dense: whether each row completes as many triples as it can: levels
    cost little. few: the ways of calling of which a run has a few cases, and not all pairs.
    """

    work: float
    numbers: float
    many: float
    cases: int
    usual: float = 0.5
    steps: float = math.inf
    tiles: float = math.inf
    dims: tuple[str, ...] = tuple(_DIMS)
    pairs: bool = True
    shows: Literal["tensors", "directions", "any"] = "directions"
    common: bool = True
    odd: int | None = None
    triples: "Room | None" = None
    dense: bool = False
    few: tuple[Call, ...] = ()

    @property
    def is_of_slow_tiles(self) -> bool:
        """Whether each tile of a case takes milliseconds."""
        return self.steps < math.inf

    def holds(self, case: Case) -> bool:
        """Whether a case fits in this room."""
        work = case.batch * case.heads * case.queries * case.keys * (case.dim + 64)
        numbers = self.numbers if case.batch * case.heads <= 65535 else self.many
        is_small = case.numbers <= numbers and work <= self.work
        return is_small and steps_of(case) <= self.steps and _tiles_of(case) <= self.tiles


Effort = Literal["quick", "default", "thorough"]
_OF_A_CPU = Room(work=2.0**25.1, numbers=2.0**18.1, many=2.0**21.1, cases=600, shows="tensors")
_OF_A_GPU = replace(_OF_A_CPU, shows="directions")
_FEW_DIMS = ("64", "16", "32", "40", "128", "256", "odd")  # the head dims of the grids, and a few more
_OF_SLOW_SHAPES = replace(_OF_A_GPU, cases=120, dims=_FEW_DIMS, odd=33, common=False)
# These calls change what is around a kernel, not the kernel. A kernel with slow tiles has a few cases of each. For such
# a kernel, a pair of levels also counts in a case that shows no fault of the pair. Where Triton and CUDA kernels run on
# a GPU, their tiles are fast, and cases show each pair.
_AROUND: tuple[Call, ...] = ("accumulated", "compiled", "default16", "default64", "parallel", "projected", "thread")
_CASES_OF_FEW = 2  # in each dtype
_OF_SLOW_TILES = replace(_OF_SLOW_SHAPES, work=2.0**24, usual=1.0, steps=16, tiles=8, shows="any", few=_AROUND)
_OF_SLOW_CALLS = replace(_OF_SLOW_SHAPES, cases=40, pairs=False)
_OF_FEW_TILES = replace(_OF_SLOW_TILES, pairs=False, few=())
_CASES_OF_A_QUICK_RUN = 60


def room_of(implementation: Implementation, device: Device, effort: Effort = "default") -> Room:
    """The room that a run has for the cases of an implementation."""
    room = _OF_A_GPU if device == "cuda" else _OF_A_CPU
    slow = {"tile": _OF_SLOW_TILES, "variant": _OF_FEW_TILES, "shape": _OF_SLOW_SHAPES, "call": _OF_SLOW_CALLS}
    room = slow.get(implementation.slow(device) or "", room)
    if room is _OF_SLOW_TILES and device == "cuda":  # the loops run in Python, as on a CPU
        room = _OF_FEW_TILES
    if effort == "quick":
        return replace(room, cases=_CASES_OF_A_QUICK_RUN, pairs=False, shows="any", common=False, few=())
    if effort == "thorough":
        return replace(room, triples=_smaller(room))
    return room


def _smaller(room: Room) -> Room:
    """The room of the cases that complete triples. It has about a quarter of the work and of the numbers.

    The last rows of an array complete few new triples each. If rare levels cost more than that, each row has only one
    of them, and three times as many rows are needed. A room of twice the numbers needs as many rows, and each row takes
    longer. It has 3 % more triples.
    """
    room = replace(room, work=min(room.work, 2.0**23), numbers=2.0**16, many=2.0**16, usual=1.0)
    return replace(room, cases=0, common=False, dense=True)


def _smallest(known: Known) -> Case:
    """The smallest sizes that a case with these levels can have. Lengths with these levels must exist."""
    kv_heads = min(_HEADS[known.get("key heads", "1")])
    heads = kv_heads * min(_GROUPS[known.get("group", "1")])
    batch = known.get("batch", "1")
    lengths = _shortest_of(known)
    assert lengths is not None
    return _of_sizes(
        65536 // heads + 1 if batch == MANY else min(_BATCHES[batch]),
        *(heads, kv_heads, *lengths),
        _SMALLEST_DIM[known.get("head dim", "8")],
    )


@cache
def _of_sizes(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int) -> Case:
    return Case(batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, dim=dim)


@cache
def _sources() -> str:
    """The sources of everything that the rows of an array depend on, apart from the claims and the room.

    They are syntax trees, which have no comments.
    """
    files = [Path(inspect.getfile(part)) for part in (Space, Case, Covering, Supports)]
    return "".join(ast.dump(ast.parse(file.read_text())) for file in files)


def _calls_of_model(model: Case, number: int, turn: int) -> list[Case]:
    """The calls of a model in one dtype.

    Long cases have one or two key heads, each with up to eight query heads. Some have whole tiles, some are a batch in
    the layout that a projection returns, and some a batch of generated texts, with a cache in that layout. number:
    chooses among such forms. turn: chooses the call of a batch.
    """
    group = min(model.heads // model.kv_heads, 8)
    texts = replace(model, batch=8, kv_heads=2, heads=2 * group, layouts=_AS_PROJECTED)
    one, two = (replace(model, kv_heads=count, heads=count * group) for count in (1, 2))
    size, of_batch = (2, 2) if number % 2 else (5, 1)
    batch = replace(model, batch=size, kv_heads=of_batch, heads=of_batch * min(group, 4))
    chunk = replace(one, batch=2, heads=min(group, 4)) if number % 2 else one
    past = LENGTHS["past a tile"][number % 8]
    length = 300 + number if number % 2 else 256
    cache: Layouts = ("contiguous", "cropped", "cropped", "contiguous")
    kept = (129, 257, 513)[number // 2 % 3]  # the call before ends with a whole tile
    return [
        replace(model, queries=past, keys=past, mask="causal", **_PROMPTS[number % 4]),
        replace(texts if number % 2 else model, queries=1, keys=258 + number, call="inference"),
        replace(one, queries=length, keys=length, mask="causal"),
        replace(
            batch,
            queries=130 + number,
            keys=130 + number,
            mask="causal",
            sharing="dense",
            call=_CALLS_OF_A_BATCH[turn % len(_CALLS_OF_A_BATCH)],
        ),
        replace(chunk, queries=66, keys=1100 + number, mask="causal-br", call="inference"),
        replace(two, queries=1, keys=2500 + number, call="inference"),  # generation after a long text
        replace(two, queries=4, keys=300 + number, mask="causal-br", call="inference"),  # a draft
        replace(two, batch=2, queries=1, keys=kept, layouts=cache, call="grown"),
    ]


class Space:
    """The part of the space that an implementation claims and that a run has room for."""

    def __init__(
        self,
        supports: Supports,
        dtypes: Sequence[Dtype] = DTYPES,
        device: Device = "cpu",
        room: Room = _OF_A_CPU,
    ) -> None:
        self.supports = supports
        self.device = device
        self.room = room
        self.dtypes = [dtype for dtype in DTYPES if dtype in dtypes and dtype in supports.dtypes]
        own = {
            "dtype": tuple(self.dtypes),
            # If no head dim of the space is claimed, `_case` replaces any head dim by a claimed one.
            "head dim": self._dims(room.dims) or self._dims(tuple(_DIMS)) or ("8",),
        }
        self.plain = PLAIN | {name: levels[0] for name, levels in own.items()}
        self.levels = {
            factor.name: own.get(factor.name)
            or tuple(level for level in factor.levels if level not in room.few and self._is_claimed(factor.name, level))
            for factor in FACTORS
        }

    def _dims(self, levels: Sequence[str]) -> tuple[str, ...]:
        """The levels of the head dim that contain a claimed head dim."""
        return tuple(level for level in levels if any(map(self._is_dim, _DIMS[level])))

    def _case(self, row: Levels, number: int, *, turn: int = 0, smallest: Sequence[str] = ()) -> Case:
        """`case_of`, with a claimed head dim in place of one that is not claimed."""
        case, multiple = case_of(row, number, turn=turn, smallest=smallest), self.supports.dim_multiple
        if row["head dim"] == "odd" and self.room.odd:
            case = replace(case, dim=self.room.odd)
        if self._is_dim(case.dim):
            return case
        claimed = [dim for dim in _DIMS[row["head dim"]] if self._is_dim(dim)]
        claimed = claimed or [-(-self.supports.dims[0] // multiple) * multiple]
        return replace(case, dim=min(claimed) if "head dim" in smallest else claimed[number % len(claimed)])

    def _is_dim(self, dim: int) -> bool:
        smallest, largest = self.supports.dims
        return smallest <= dim <= largest and dim % self.supports.dim_multiple == 0

    def _is_claimed(self, factor: str, level: str) -> bool:
        if level == self.plain[factor]:
            return self.supports.backward or factor != "call"
        if factor == "LSE":
            return self.supports.lse
        if level == "parallel" and self.device == "cuda":
            return False
        # Without a backward, the registry takes the gradients out of the cases of other calls.
        calls = (*WITHOUT_BACKWARD, *DETACHED_CALLS)
        if not self.supports.backward and (factor in _OF_DOUT or (factor == "call" and level not in calls)):
            return False
        return not_claimed(self._case(self.plain | {factor: level}, 0), self.supports) is None

    def _rules(self) -> list[Rule]:
        """The rules of the space, and the rules that these claims and this room add."""

        def aligned(known: Known) -> bool:
            packed = known.get("sharing", "").startswith(("packed", "stacked", "dense"))
            return self.supports.unaligned or not packed or not known.get("head dim", "").startswith(("odd", "even"))

        def square(known: Known) -> bool:
            return self.supports.cross_lengths or known.get("keys", AS_QUERIES) == AS_QUERIES

        def has_room(known: Known) -> bool:
            known = known if self.supports.cross_lengths else {"keys": AS_QUERIES, **known}
            return _lengths_exist(known) and self.room.holds(_smallest(known))

        return [*_RULES, Rule(("sharing", "head dim"), aligned), Rule(("keys",), square), Rule(_OF_SIZE, has_room)]

    @cached_property
    def allowed(self) -> Allowed:
        """Whether a part of a row is allowed. Each rule is evaluated once for each combination of its levels."""
        places = {factor.name: place for place, factor in enumerate(FACTORS)}
        words = [self.levels[factor.name] for factor in FACTORS]
        rules = [
            (mine, itemgetter(*mine), rule, dict[object, bool]())
            for rule in self._rules()
            for mine in [[places[name] for name in rule.factors]]
        ]
        of_place = [[rule for rule in rules if place in rule[0]] for place in range(len(FACTORS))]

        def allowed(row: Partial, new: int | None) -> bool:
            for mine, levels_of, rule, known in rules if new is None else of_place[new]:
                asked = levels_of(row)
                if asked not in known:
                    chosen = {FACTORS[place].name: words[place][row[place]] for place in mine if row[place] >= 0}
                    known[asked] = rule.holds(chosen)
                if not known[asked]:
                    return False
            return True

        return allowed

    def _nothing_covered(self) -> Covering:
        sizes = [len(self.levels[factor.name]) for factor in FACTORS]
        costs = [[self._cost_of(factor, level) for level in self.levels[factor.name]] for factor in FACTORS]
        places = {factor.name: place for place, factor in enumerate(FACTORS)}
        hides = [
            ([(places[name], self.levels[name].index(level)) for name, level in known.items()], self._hidden(tensors))
            for known, tensors in HIDES
            if all(level in self.levels[name] for name, level in known.items())
        ]
        coarse = [[level in factor.coarse for level in self.levels[factor.name]] for factor in FACTORS]
        return Covering(
            sizes, self.allowed, [factor.weight for factor in FACTORS], costs, hides, coarse, self.room.dense
        )

    def _hidden(self, tensors: Collection[str]) -> Collection[str]:
        """What is hidden, by tensor or by direction."""
        if self.room.shows == "any":
            return ()
        if self.room.shows == "tensors":
            return tensors
        of_directions = {"forward": ("out", "lse"), "backward": GRADIENTS}
        return [name for name, of_direction in of_directions.items() if set(of_direction) <= set(tensors)]

    def _cost_of(self, factor: Factor, level: str) -> float:
        """The cost of a level, in new triples. Where tiles are slow, each further tile of a level costs a new pair."""
        cost = factor.cost_of(level) * (_DENSE if self.room.dense else 1.0)
        if not self.room.is_of_slow_tiles or factor.name not in _OF_SIZE:
            return cost
        return cost + PAIR * (steps_of(_smallest({factor.name: level})) / steps_of(_smallest({})) - 1)

    @cached_property
    def _covering(self) -> Covering:
        """A covering that contains the rows of the array."""
        covering = self._nothing_covered()
        for row in self._rows.rows:
            covering.add(row)
        for levels in self._rows.forgotten:
            covering.forget(levels)
        return covering

    @cached_property
    def _rows(self) -> Rows:
        """The rows of the array, in the order of their construction. The processes of a run share one result."""
        found = arrays.rows(self.about, self.built_rows, wait=True)
        assert found is not None
        return found

    def build(self) -> bool:
        """Builds the rows of the array, unless another process of the run is building them. Returns whether they exist.

        The processes of a run thus build different arrays at the same time.
        """
        if "_rows" not in self.__dict__ and (found := arrays.rows(self.about, self.built_rows, wait=False)):
            self._rows = found
        return "_rows" in self.__dict__

    def about(self) -> str:
        """Everything that the rows depend on."""
        return f"{self.supports} {self.levels} {self.room} {_sources()}"

    def built_rows(self) -> Rows:
        """Builds the rows."""
        rows, ends, coverings = list[Row](), list[int](), list[Covering]()
        for space in self._parts:
            coverings.append(covering := space._nothing_covered())
            for row in rows:
                covering.add(row)
            while space._needs_more(covering, len(rows)) and (new := covering.next_row()) is not None:
                rows.append(new)
            ends.append(len(rows))
        whole = coverings[self._parts.index(self) :]  # what has no room in a small case may have room in another
        coverage = whole[0].coverage[0], whole[-1].coverage[1]
        forgotten = [levels for covering in whole for levels in covering.forgotten]
        claimed = _possible_pairs(self.supports, tuple(self.dtypes), self.device)
        common = self._common_rows() if self.room.common else []
        return Rows(rows, ends, coverage, forgotten, claimed, common)

    def _needs_more(self, covering: Covering, rows: int) -> bool:
        """Whether an array of so many rows needs another one: for a pair, for a triple or for the number of cases."""
        return self.room.dense or rows < self.room.cases or (self.room.pairs and bool(covering.open_pairs.any()))

    def case(self, row: Row, number: int) -> Case:
        levels = {factor.name: self.levels[factor.name][level] for factor, level in zip(FACTORS, row, strict=True)}
        cases = (
            self._case(levels, number, turn=turn, smallest=smallest)
            for smallest in ((), _OF_WIDTH)
            for turn in range(TURNS)
        )
        return next(filter(self.room.holds, cases), None) or self._case(levels, number, smallest=_OF_SIZE)

    @property
    def cases(self) -> list[Case]:
        """The cases of a run: the array, common levels, sequences too long for the array, and the shapes of models."""
        return self.array + self.common + self._beside

    @property
    def size(self) -> int:
        """The number of cases. Counting takes no time once the rows are known; building the cases takes a second."""
        return len(self._rows.rows) + len(self._rows.common) + len(self._beside)

    @cached_property
    def array(self) -> list[Case]:
        """The cases of the covering array."""
        rows, starts = self._rows.rows, [0, *self._rows.ends[:-1]]
        return [
            space.case(rows[number], number)
            for space, start, end in zip(self._parts, starts, self._rows.ends, strict=True)
            for number in range(start, end)
        ]

    @cached_property
    def _parts(self) -> list["Space"]:
        """The same space with the room that each part of the array has, in the order of construction.

        Most cases are small. Then come those for the pairs that do not fit in small cases, and those for triples.
        """
        room = self.room
        small = replace(room, work=room.usual * room.work, numbers=room.usual * room.numbers, usual=1.0)
        before = [Space(self.supports, self.dtypes, self.device, small)] if room.usual < 1 else []
        after = [Space(self.supports, self.dtypes, self.device, room.triples)] if room.triples else []
        return [*before, self, *after]

    def _long(self) -> list[Case]:
        """Plain cases of the longest classes, with as many keys as queries, one of them causal."""
        found = []
        for number, length in enumerate(("over 1024", "over 2048", "over 4096")):
            dtypes = self.levels["dtype"]
            chosen = {"queries": length, "keys": AS_QUERIES, "dtype": dtypes[number % len(dtypes)]}
            smallest = min(self.levels["head dim"], key=lambda level: min(_DIMS[level]))
            case = self._case(self.plain | chosen | {"head dim": smallest}, number, smallest=_OF_SIZE)
            rows = LENGTHS[length][3]  # some more than the smallest number, after which a kernel may first count wrong
            mask: Masking = "causal" if length == "over 2048" else "full"
            found.append(replace(case, heads=1, kv_heads=1, queries=rows, keys=rows, mask=mask))
        return found

    @cached_property
    def _beside(self) -> list[Case]:
        """The cases beside the array."""
        if not self.room.pairs:
            return []
        found = [Case.parse(f"{line} {dtype}") for line in PLAIN_CASES for dtype in self.dtypes]
        if not self.room.is_of_slow_tiles:
            found += [
                Case.parse(f"{line} {dtype}")
                for number, line in enumerate(LARGE_CASES)
                for place, dtype in enumerate(self.dtypes)
                if len(self.dtypes) < len(DTYPES) or place != number % len(DTYPES)
            ]
            found += [case for case in map(Case.parse, LONGER_CASES) if case.dtype in self.dtypes]
            found += self._long() + self._models()
        found += self._few()
        found = [case for case in found if (case.call, case.dtype) != ("autocast", "float32")]
        return [case for case in found if not_claimed(case, self.supports) is None]

    def _few(self) -> list[Case]:
        """The cases of the calls that do not meet all pairs: cases of the array, called in another way."""
        calls = [call for call in self.room.few if self.supports.backward for _ in range(_CASES_OF_FEW)]
        found = list[Case]()
        if not calls:
            return found
        for dtype in self.dtypes:
            alike = [case for case in self.array if case.dtype == dtype and case.backward and case.wanted == "all"]
            alike = [case for case in alike if case.call != "autocast"]
            step = max(1, len(alike) // len(calls))
            chosen = cycle(alike[step // 2 :: step])
            found += [replace(case, call=call) for call, case in zip(calls, chosen, strict=False)]
        return found

    @cached_property
    def common(self) -> list[Case]:
        """The cases that contain every combination of four common levels."""
        return [self.case(row, number) for number, row in enumerate(self._rows.common)]

    def _common_rows(self) -> list[Row]:
        """The rows of these cases. Where no common level of a factor is claimed, the first claimed level serves."""
        own = [
            tuple(level for level in levels if level in self.levels[name]) or self.levels[name][:1]
            for name, levels in COMMON.items()
        ]
        places = [place for place, factor in enumerate(FACTORS) if factor.name in COMMON]
        known = [
            [self.levels[FACTORS[place].name].index(word) for word in words]
            for place, words in zip(places, own, strict=True)
        ]
        plain = [0] * len(FACTORS)  # the first level is the plain one, if it is claimed

        def whole(part: Partial) -> list[int]:
            """A row of all factors."""
            row = list(plain)
            for place, numbers, level in zip(places, known, part, strict=True):
                row[place] = OPEN if level == OPEN else numbers[level]
            return row

        def allowed(part: Partial, new: int | None) -> bool:
            return self.allowed(whole(part), None if new is None else places[new])

        rows = every_four([len(words) for words in own], allowed)
        return [tuple(whole(row)) for row in rows]

    def _models(self) -> list[Case]:
        """The attention shapes of models, as training and inference call them.

        These cases take long. If a run has three dtypes, each call of a model is made in one of them.
        """
        shapes = [(dtype, *shape) for shape in MODELS.values() for dtype in self.dtypes]
        dtypes = len(self.dtypes)
        found = list[Case]()
        for number, (dtype, heads, kv_heads, dim) in enumerate(shapes):
            model = Case(heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=number)
            calls = _calls_of_model(model, number, number // dtypes)
            turn = number + number // dtypes
            found += [call for place, call in enumerate(calls) if dtypes < len(DTYPES) or (place + turn) % dtypes == 0]
        return found

    @property
    def coverage(self) -> tuple[Coverage, Coverage]:
        """The coverage of the array: of the pairs and of the triples that are claimed and fit."""
        return self._rows.coverage

    @cached_property
    def left_out(self) -> tuple[int, int]:
        """The number of pairs that the claims forbid, and the number of claimed pairs that do not fit in the run."""
        everything = _possible_pairs(_EVERYTHING, DTYPES, self.device)
        return everything - self._rows.claimed, self._rows.claimed - self.coverage[0].possible

    def row(self, case: Case) -> Row | None:
        """The row of a case. None if the case has a level that this space does not contain."""
        found = levels(case)
        if any(found[factor.name] not in self.levels[factor.name] for factor in FACTORS):
            return None
        return tuple(self.levels[factor.name].index(found[factor.name]) for factor in FACTORS)

    def completed(self, cases: Sequence[Case]) -> tuple[int, int]:
        """The number of pairs and of triples that these cases contain and the array does not."""
        rows = [row for case in cases if (row := self.row(case))]
        return self._covering.completed(rows)

    def drawn(self, choose: Callable[[Sequence[int]], int], **fixed: str) -> Row | None:
        """An allowed row, built one level at a time. None at a dead end.

        choose: chooses one of several levels; the plain level comes first. fixed: the levels of some factors.
        """
        row = [OPEN] * len(FACTORS)
        for place, factor in sorted(enumerate(FACTORS), key=lambda at: at[1].name not in _OF_SIZE):
            options, words = [], self.levels[factor.name]
            for level, word in enumerate(words):
                row[place] = level
                options += [level] if fixed.get(factor.name, word) == word and self.allowed(row, place) else []
            if not options:
                return None
            row[place] = choose(options)
        return tuple(row)


_EVERYTHING = replace(OWN_KERNELS, block_mask=True)


@lru_cache(maxsize=64)
def _possible_pairs(supports: Supports, dtypes: tuple[Dtype, ...], device: Device) -> int:
    """The number of pairs of levels that these claims allow, with unlimited room."""
    boundless = Room(work=math.inf, numbers=math.inf, many=math.inf, cases=0)
    return Space(supports, dtypes, device, boundless)._nothing_covered().possible_pairs


class Sketch(Space):
    """A space whose cases show each level once. It shows quickly which checks have cases at all."""

    @property
    def common(self) -> list[Case]:
        return []

    @cached_property
    def array(self) -> list[Case]:
        """Plain cases of each dtype, each with one level that may differ."""
        rows = [
            self.plain | {"dtype": dtype} | {name: level}
            for dtype in self.dtypes
            for name, levels in self.levels.items()
            for level in levels
        ]
        rules = self._rules()
        return [self._case(row, place) for place, row in enumerate(rows) if all(rule.holds(row) for rule in rules)]


@lru_cache(maxsize=64)
def _made(supports: Supports, dtypes: tuple[Dtype, ...], device: Device, room: Room, *, is_sketch: bool) -> Space:
    return (Sketch if is_sketch else Space)(supports, dtypes, device, room)


def space_of(
    implementation: Implementation,
    dtypes: Sequence[Dtype] = DTYPES,
    device: Device = "cpu",
    *,
    effort: Effort = "default",
    is_sketch: bool = False,
) -> Space:
    """The space of an implementation in a run, or a sketch of the space.

    Implementations whose claims about inputs are equal share one space.
    """
    supports = replace(implementation.supports, **_SAYS_NOTHING_OF_INPUTS)  # type: ignore[arg-type]
    return _made(supports, tuple(dtypes), device, room_of(implementation, device, effort), is_sketch=is_sketch)


_SAYS_NOTHING_OF_INPUTS = {
    "devices": ("cpu", "cuda"),
    **dict.fromkeys(("masked_nan", "deterministic", "batch_invariant", "linear_memory"), False),
}


@dataclass(frozen=True)
class Simplest:
    """A case that fails, with as many factors as possible at their plain level.

    needs: the factors without which it passes. They were tried one by one, in the case as it is.
    """

    case: Case
    needs: tuple[str, ...] = ()


def simplest(case: Case, fails: Callable[[Case], bool]) -> Simplest:
    """A case that fails as this case does, with as many factors as possible at their plain level.

    fails: whether a case fails. Each round calls it at most once for each factor, last for factors that choose a
    kernel's code. The last round finds nothing to make plain.
    """
    row = levels(case)
    if "another" in row.values():
        return Simplest(case)
    while True:
        before, needs = row, []
        for factor in sorted(FACTORS, key=lambda factor: factor.weight):
            if row[factor.name] == PLAIN[factor.name]:
                continue
            simpler = row | {factor.name: PLAIN[factor.name]}
            for rule in _RULES:
                if not rule.holds(simpler):  # the rule also needs its other factors at their plain level
                    simpler |= {name: PLAIN[name] for name in rule.factors}
            if not all(rule.holds(simpler) for rule in _RULES):
                continue
            if fails(case_of(simpler, case.seed)):
                row = simpler
            else:
                needs.append(factor.name)
        if row == before:
            return Simplest(case_of(row, case.seed) if row != levels(case) else case, tuple(needs))
