"""What an implementation claims, in words."""

from typing import Any

from flashproof.reports.record import Claim
from flashproof.reports.wording import listed

_ALIGNMENTS = {"top_left": "aligned at the top left", "bottom_right": "aligned at the bottom right"}
_FEATURES = {
    "grouped_heads": "grouped heads",
    "cross_lengths": "more or fewer keys than queries",
    "strided": "strided tensors",
    "unaligned": "tensors at any address",
    "block_mask": "block masks",
    "dropout": "dropout",
    "lse": "the LSE as a second result",
}
_PROMISES = {
    "deterministic": "the same bits in every run",
    "batch_invariant": "the same bits for a batch entry alone",
    "masked_nan": "NaN in hidden keys changes nothing",
    "linear_memory": "memory that grows with the length and not with its square",
}
_SUMS = {
    "fma": "on FMA units",
    "tensor_core": "on tensor cores, which truncate",
    "float64": "in float64",
}


def sentences(claim: Claim) -> list[str]:
    """The claims as sentences: what it takes, what it promises, what it does not claim, and its arithmetic."""
    supports: dict[str, Any] = claim.supports
    told = [_takes(supports)]
    causal = supports.get("causal") or []
    features = [f"causal masks {listed(_ALIGNMENTS.get(str(a), str(a)) for a in causal)}"] if causal else []
    features += [words for field, words in _FEATURES.items() if supports.get(field) is True]
    if features:
        told.append(f"Features: {'; '.join(features)}.")
    if promised := [words for field, words in _PROMISES.items() if supports.get(field) is True]:
        told.append(f"It promises {listed(promised)}.")
    absent = [] if causal else ["causal masks"]
    absent += [words for field, words in (_FEATURES | _PROMISES).items() if supports.get(field) is False]
    if absent:
        told.append(f"Not claimed: {'; '.join(absent)}.")
    alike: dict[str, list[str]] = {}
    for where, fields in claim.arithmetic.items():
        alike.setdefault(_arithmetic(fields), []).append(where)
    told += [f"Arithmetic of {listed(places)}: {words}." for words, places in alike.items() if words]
    return [words for words in told if words]


def _takes(supports: dict[str, Any]) -> str:
    dtypes, devices = listed(supports.get("dtypes", [])), listed(supports.get("devices", []))
    words = f"It takes {dtypes}" + (f" on {devices}" if devices else "")
    words += (
        ", forward and backward" if supports.get("backward") else ", forward only" if "backward" in supports else ""
    )
    dims = supports.get("dims")
    if isinstance(dims, list) and len(dims) == 2:
        words += f", with head dims from {dims[0]} to {dims[1]}"
        if isinstance(multiple := supports.get("dim_multiple"), int) and multiple > 1:
            words += f" in steps of {multiple}"
    return words + "." if dtypes else ""


def _arithmetic(fields: dict[str, Any]) -> str:
    parts = []
    if accumulate := fields.get("accumulate"):
        parts.append(f"float32 sums {_SUMS.get(str(accumulate), f'({accumulate})')}")
    if weights := fields.get("weights"):
        parts.append(
            "weights rounded to the input dtype before the second product"
            if weights == "input"
            else f"weights in {weights}"
        )
    if fields.get("dscores_from") == "cast":
        parts.append("dS computed from the rounded weights")
    if gradients := fields.get("gradients"):
        parts.append(f"gradients summed in {'the input dtype' if gradients == 'input' else gradients}")
    if isinstance(ulps := fields.get("exp_ulps"), int | float):
        parts.append(f"an exponential within {ulps:g} ulps")
    tiles = [
        f"{fields[name]} {words}"
        for name, words in (("query_tile", "queries"), ("key_tile", "keys"))
        if fields.get(name)
    ]
    if tiles:
        parts.append(f"tiles of {' by '.join(tiles)}")
    return ", ".join(parts)
