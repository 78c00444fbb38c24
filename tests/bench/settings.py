"""What is timed: the settings of a run, for each device.

A setting is a case. On a GPU, a batch holds 16384 tokens, and the width (heads x head dim) is 2048, as in the
FlashAttention papers. Where a tile is slow (`Implementation.slow`), as in an interpreter, settings are small.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashproof.cases import Case, not_claimed
from flashproof.impls.spec import DTYPES, SIXTEEN_BIT, Device, Dtype, Implementation
from flashproof.selection import Selection

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DIMS = (64, 128, 256)
MASKS = ("full", "causal")
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)  # of the blocks that a block mask keeps
USUAL: tuple[Dtype, ...] = ("float32", "float16")  # the dtypes of a quick run

NOT_ASKED = "timed when asked for: --benchmark-only"  # why a benchmark is left out of other runs

Setting = tuple[str, Sequence[Dtype]]  # the line of a case without its dtype, and the dtypes that are timed in it


@dataclass(frozen=True)
class Plan:
    """The settings on a device, and those for implementations whose tiles are slow there."""

    usual: Sequence[Setting]
    small: Sequence[Setting]


def line(length: int, dim: int, mask: str) -> str:
    """The setting of a length on a GPU."""
    return f"b{TOKENS // length} h{WIDTH // dim} q{length} k{length} d{dim} {mask}"


def _masked(sizes: str, dtypes: Sequence[Dtype], masks: Sequence[str] = MASKS) -> list[Setting]:
    return [(f"{sizes} {mask}", dtypes) for mask in masks]


def _blocks(sizes: str, dtypes: Sequence[Dtype], shares: Sequence[float] = SHARES) -> list[Setting]:
    return _masked(sizes, dtypes, [f"full blocks{share:g}" for share in shares])


_SMALL_CPU, _SMALL_GPU, _BLOCKS_CPU, _BLOCKS_GPU = (
    "b1 h1 q256 k256 d64",
    "b1 h1 q1024 k1024 d64",
    "b1 h1 q512 k512 d64",
    "b2 h16 q8192 k8192 d128",
)
QUICK: dict[Device, Plan] = {
    "cpu": Plan(
        usual=_masked("b1 h4 q1024 k1024 d64", USUAL) + _masked(_SMALL_CPU, USUAL),
        small=_masked(_SMALL_CPU, USUAL) + _blocks(_BLOCKS_CPU, ("float32",), [0.25]),
    ),
    "cuda": Plan(
        usual=[(line(4096, 128, mask), USUAL) for mask in MASKS] + _blocks(_BLOCKS_GPU, ("float16",), [0.25]),
        small=_masked(_SMALL_GPU, USUAL, ["causal"]),
    ),
}
THOROUGH: dict[Device, Plan] = {
    "cpu": Plan(
        usual=[
            (f"b{1024 // length} h{256 // dim} q{length} k{length} d{dim} {mask}", DTYPES)
            for dim in DIMS[:2]
            for mask in MASKS
            for length in LENGTHS[:2]
        ]
        + _masked(_SMALL_CPU, DTYPES),
        small=_masked(_SMALL_CPU, DTYPES) + _blocks(_BLOCKS_CPU, DTYPES),
    ),
    "cuda": Plan(
        usual=[(line(length, dim, mask), DTYPES) for dim in DIMS for mask in MASKS for length in LENGTHS]
        + _blocks(_BLOCKS_GPU, SIXTEEN_BIT),
        small=_masked(_SMALL_GPU, DTYPES),
    ),
}


def device_of(selection: Selection) -> Device:
    """The device that is timed: the GPU if there is one, unless `--device` says otherwise."""
    return selection.device or ("cuda" if torch.cuda.is_available() else "cpu")


def settings_of(implementation: Implementation, dtype: Dtype, selection: Selection) -> list[Case]:
    """The settings in which an implementation is timed in a dtype: those of its plan that it claims.

    A dtype that `--dtype` names is timed in all of them, also in a quick run.
    """
    device = device_of(selection)
    plan = (THOROUGH if selection.thorough else QUICK)[device]
    chosen = plan.small if implementation.slow(device) in ("tile", "variant") else plan.usual
    is_named = set(selection.dtypes) != set(DTYPES)
    cases = [Case.parse(f"{words} {dtype}") for words, dtypes in chosen if is_named or dtype in dtypes]
    return [case for case in cases if not_claimed(case, implementation.supports) is None]
