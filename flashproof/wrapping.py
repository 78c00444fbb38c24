"""Wrappers: the Python code that an error suggests for a function that cannot be verified directly.

A wrapper runs as printed, and keeps each parameter that flashproof knows. A wrapper of a function from a file belongs
in that file. Any other wrapper imports its function.
"""

import inspect
from collections.abc import Mapping, Sequence

Kind = inspect.Parameter
# The keywords of the attention call that flashproof knows, each with the value that changes nothing.
NEUTRAL = {
    "is_causal": "False",
    "causal_alignment": "'top_left'",
    "scale": "None",
    "enable_gqa": "False",
    "block_mask": "None",
    "dropout_p": "0.0",
    "dropout_seed": "0",
    "return_lse": "False",
}
# The names of these keywords in other libraries.
KNOWN_AS = {
    "causal": "is_causal",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "scaling": "scale",
    "attn_scale": "scale",
}
ROLES = {"q": "query", "query": "query", "k": "key", "key": "key", "v": "value", "value": "value"}
SAME = {role: role for role in ROLES.values()}
VERIFIED = "verified_attention"  # the name of a wrapper
TO_TENSOR = "torch.from_numpy({call}).to(query.dtype)"
DEFAULT_SCALE = "scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale"


def completing(parameters: Sequence[Kind], name: str) -> str:
    """A wrapper of a function that needs more arguments than query, key and value, or has them in another order."""
    return _wrapper(parameters, name, "{call}")


def first_of_tuple(parameters: Sequence[Kind], name: str) -> str:
    """A wrapper of a function that returns a tuple whose first element is the output."""
    return _wrapper(parameters, name, "{call}[0]", without=("return_lse",))


def of_arrays(parameters: Sequence[Kind], name: str) -> str:
    """A wrapper of a function on NumPy arrays. It carries no gradient."""
    arrays = {"query": "q", "key": "k", "value": "v"}
    convert = "q, k, v = (tensor.detach().float().numpy() for tensor in (query, key, value))"
    without = ("return_lse", "block_mask")
    return _wrapper(
        parameters, name, TO_TENSOR, tensors=arrays, first=[convert], imports=["import torch"], without=without
    )


def to_array(parameters: Sequence[Kind], name: str) -> str:
    """A wrapper of a function that takes tensors and returns a NumPy array."""
    return _wrapper(parameters, name, TO_TENSOR, imports=["import torch"], without=("return_lse",))


def claiming(name: str) -> str:
    """An Implementation of a function whose signature does not name its parameters."""
    function = short(name)
    lines = ["from flashproof import Implementation, Supports", *_import_of(name), ""]
    lines += [f"{VERIFIED} = Implementation(", f'    name="{function}",', f"    attention={function},"]
    lines += ['    supports=Supports(causal=("top_left",), scale="positive", cross_lengths=True),', ")"]
    return "\n".join(lines)


def advice(wrapper: str, name: str) -> str:
    """The words that suggest a wrapper of the named function."""
    place = name.rpartition(":")[0]
    what = f"add this to {place}, and give '{place}:{VERIFIED}'" if _is_file(place) else "give this"
    return f"{what}:\n\n{wrapper}"


def needed(parameters: Sequence[Kind]) -> list[str]:
    """The parameters that a call must pass, beside query, key and value."""
    roles = _roles(parameters)
    return [p.name for p in parameters if _is_required(p) and p.name not in roles]


def short(name: str) -> str:
    """The name of a function in its own file: the attribute of a name such as mine.py:attention."""
    attribute = name.rpartition(":")[2]
    return attribute if all(part.isidentifier() for part in attribute.split(".")) else "attention"


def _wrapper(
    parameters: Sequence[Kind],
    name: str,
    result: str,
    *,
    tensors: Mapping[str, str] = SAME,
    first: Sequence[str] = (),
    imports: Sequence[str] = (),
    without: Sequence[str] = (),
) -> str:
    """The code of a wrapper.

    result: the returned expression, with {call} in place of the call. tensors: the arguments for query, key and value.
    first: the first lines of the wrapper. without: keywords that the wrapper does not take.
    """
    roles, names = _roles(parameters), {p.name for p in parameters}
    left_out = {*without, *(() if {"dropout_p", "dropout_seed"} <= names else ("dropout_p", "dropout_seed"))}
    arguments, keywords, unknown = list[str](), list[str](), list[str]()
    in_order = True  # whether every parameter so far is passed, so that the next one may be passed by position
    needs_number = False
    for p in parameters:
        keyword = KNOWN_AS.get(p.name, p.name)
        if p.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) or (p.kind is Kind.POSITIONAL_ONLY and not in_order):
            continue
        if p.name in roles:
            argument = tensors[roles[p.name]]
        elif keyword in NEUTRAL and keyword not in left_out:
            argument = keyword
            keywords.append(keyword)
            needs_number |= keyword == "scale" and p.default is not None
        elif _is_required(p):
            argument = NEUTRAL.get(keyword, "None")
            unknown += [p.name] * (keyword not in NEUTRAL)
        else:
            in_order = False
            continue
        by_place = p.kind is Kind.POSITIONAL_ONLY or (in_order and p.kind is not Kind.KEYWORD_ONLY and _is_required(p))
        arguments.append(argument if by_place else f"{p.name}={argument}")
    defaults = [f"{keyword}={NEUTRAL[keyword]}" for keyword in keywords]
    signature = ", ".join(["query", "key", "value", *(["*", *defaults] if defaults else [])])
    call = f"{short(name)}({', '.join(arguments)})"
    lines = [*(["import math"] * needs_number), *imports, *_import_of(name)]
    lines += ["", ""] if lines else []
    lines.append(f"def {VERIFIED}({signature}):")
    if unknown:
        lines.append(f"    # Put your own value in place of each None: {', '.join(unknown)}.")
    lines += [f"    {line}" for line in [*([DEFAULT_SCALE] * needs_number), *first]]
    lines.append(f"    return {result.format(call=call)}")
    return "\n".join(lines)


def _import_of(name: str) -> list[str]:
    """The import of a function that is an attribute of a module."""
    place, _, attribute = name.rpartition(":")
    root = attribute.partition(".")[0]
    if _is_file(place) or not all(part.isidentifier() for part in f"{place or root}.{root}".split(".")):
        return []
    return [f"from {place} import {root}"] if place else [f"import {root}"] if "." in attribute else []


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _roles(parameters: Sequence[Kind]) -> dict[str, str]:
    """The parameters for query, key and value: those with such names, or else the first three."""
    positional = [p.name for p in parameters if p.kind in (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)]
    named = {name: ROLES[name.lower()] for name in positional if name.lower() in ROLES}
    return (
        named
        if sorted(named.values()) == ["key", "query", "value"]
        else dict(zip(positional, ("query", "key", "value"), strict=False))
    )


def _is_required(parameter: Kind) -> bool:
    return parameter.default is Kind.empty and parameter.kind not in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)
