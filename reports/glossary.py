"""What the words of a case mean: a short explanation of each word that stands on a page.

Most explanations come from `flashproof.cases`, which defines the words. This module adds those of sizes, masks and
numbers.
"""

import re
from collections.abc import Iterable

from flashproof.cases import CALLS, DOUTS, FAMILIES, LAYOUTS, SHARINGS, VALUES
from flashproof.impls.spec import DTYPES

_LINE = re.compile(r"b\d+ h\d+(?:/\d+)? q\d+ k\d+ d\d+(?: [a-z][\w.+-]*)*? seed\d+")  # a case as it prints
_SIZES = re.compile(r"b(\d+) h(\d+)(?:/(\d+))? q(\d+) k(\d+) d(\d+)")
_OF_TENSOR = re.compile(r"(q|k|v|do)\.(.*)")
_NAMED: dict[str, str] = {
    **dict.fromkeys(DTYPES, "the dtype of query, key, value and output gradient"),
    "full": "mask: each query sees each key",
    "causal": "mask: query i sees key j if j <= i, aligned at the top left",
    "causal-br": "mask: causal, aligned at the bottom right: the last query sees the last key",
    **{word: f"inputs: {said}" for word, said in FAMILIES.items()},
    **{word: f"memory: {said}" for word, said in SHARINGS.items()},
    **{word: f"call: {said}" for word, said in CALLS.items()},
    "readdressed": "call: after one or four calls with other tensors at the same addresses",
    **{word: f"layout: {said}" for word, said in LAYOUTS.items()},
    **{f"v.{word}": said for word, said in VALUES.items()},
    **{f"do.{word}": said for word, said in DOUTS.items()},
    "offset": "address: the tensor, or each of its rows, begins at an address that is not aligned for vector loads",
    "detached": "no input wants a gradient",
    "nolse": "the call does not ask for the LSE",
    "spelled": "the call spells out keywords that change nothing",
}
_NUMBERED = (
    ("blocks.*one", "the share of the blocks that a random block mask keeps, the same for several heads"),
    ("blocks.*", "the share of the blocks that a random block mask keeps"),
    (r"x[\d.].*", "magnitude: the queries are so many times larger; in spike and rising, scores rise by it"),
    ("shift.*", "a number that is added to each score"),
    ("scale.*int", "the scale of the scores, given as an int"),
    ("scale.*numpy", "the scale of the scores, given as a NumPy number"),
    ("scale.*", "the scale of the scores, in place of 1/sqrt(head dim)"),
    ("dropout.*", "the share of the weights that dropout removes"),
    ("only-.*", "the gradients that are wanted"),
    ("seed.*", "the seed of the random numbers"),
)


def entries(texts: Iterable[str]) -> list[tuple[list[str], str]]:
    """The words of all cases in some texts, each with its explanation. Words with the same explanation are together.

    A word that is unknown here, such as one of a newer version, is left out. The sizes of the first case are explained
    as an example.
    """
    lines = dict.fromkeys(line for text in texts for line in _LINE.findall(text))
    found: dict[str, list[str]] = {}
    for line in list(lines)[:1]:
        if sizes := _SIZES.match(line):
            found[_sizes(sizes)] = [sizes[0]]
    words = {word for line in lines for word in line.split()[5:]}
    for word in sorted(words, key=_order):
        if said := explained(word):
            found.setdefault(said, []).append(word)
    if tensors := [f"{tensor}." for tensor in ("q", "k", "v", "do") if any(w.startswith(f"{tensor}.") for w in words)]:
        found["before another word: of the query, key, value or output gradient alone"] = tensors
    # A number says little, and the first of several is enough.
    return [(each[:1] if _number(each[0]) else each, said) for said, each in found.items()]


def explained(word: str) -> str:
    """What a word of a case means. Empty if it is unknown, and for a size."""
    if word in _NAMED:
        return _NAMED[word]
    if (of := _OF_TENSOR.fullmatch(word)) and of[2] in {*LAYOUTS, "offset"}:
        return _NAMED[of[2]]
    return _number(word)


def _number(word: str) -> str:
    """What a word with a number means. Empty if it has none."""
    if word in _NAMED:
        return ""
    return next((said for pattern, said in _NUMBERED if re.fullmatch(pattern, word)), "")


def _order(word: str) -> tuple[int, str]:
    """The order of the explanations is that of the words in a case: dtype, mask, scores, ..., seed."""
    said = explained(word)
    every = [*_NAMED.values(), *(said for _, said in _NUMBERED)]
    return every.index(said) if said else -1, word


def _sizes(sizes: re.Match[str]) -> str:
    batch, heads, kv_heads, queries, keys, dim = sizes.groups()
    of = f"{heads} of the query and {kv_heads} of key and value" if kv_heads else heads
    return f"batch {batch}, heads {of}, queries {queries}, keys {keys}, head dim {dim}"
