"""The cases of a check: those of the covering array with the check's way of calling, or a few cases of its own.

A check of one property of attention lists its cases beside its code. All other checks take cases from the space.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice

from flashproof.cases import Call, Case
from flashproof.impls.spec import Dtype
from flashproof.space import Space, steps_of

Grid = Callable[[Space, Dtype], list[Case]]


# Cases that revealed a fault of a kernel or of the suite. The search made them small. The array may lack their
# combination of levels. New finds are added here, without their dtype.
PINNED = """
b1 h2/1 q33 k33 d16 causal x4 expanded     # gradients summed in float16 underflow at every step, and not only once
b1 h1 q18 k18 d16 uniform                  # equal weights and equal gradients of keys: a bias has one sample
b1 h1 q20 k700 d128                        # more tiles of keys than a pipeline has stages
b1 h1 q270 k270 d128 causal                # the same, with query tiles below the diagonal
b1 h71/1 q4 k20 d64 causal                 # as in Falcon: one key head for more query heads than a block holds
b3 h50 q3 k3 d16 causal                    # more programs than a GPU has processors
b1 h1 q1 k8300 d16                         # too many keys for any fixed number of splits
b1 h1 q1 k300 d16 spike x16                # beside a sink, whole tiles have small weights, which are not 0
b1 h1 q149 k70 d36 causal                  # a scale that a 16-bit number cannot hold
b1 h1 q130 k130 d64 blocks0                # no block is visible
b1 h1 q70 k150 d64 causal-br shift-100     # the last tile is hidden from some rows, whose scores are far below 0
"""
_MANY_STEPS = 100  # by `steps_of`; a case with more takes seconds where tiles are slow


def called(call: Call) -> Grid:
    """The cases of the array that call a kernel in this way. Plain calls also have the pinned cases."""

    def of(space: Space, dtype: Dtype) -> list[Case]:
        pinned = _pinned(space, dtype) if call == "plain" and space.room.pairs else []
        return [*(case for case in space.cases if (case.call, case.dtype) == (call, dtype)), *pinned]

    return of


def _pinned(space: Space, dtype: Dtype) -> list[Case]:
    """The pinned cases in a dtype. Where tiles are slow, a case that takes many steps is in the list of one dtype."""
    pinned = _parsed(PINNED, dtype)
    if not space.room.is_of_slow_tiles:
        return list(pinned)
    turn, dtypes = space.dtypes.index(dtype), len(space.dtypes)
    return [case for place, case in enumerate(pinned) if steps_of(case) <= _MANY_STEPS or place % dtypes == turn]


def where(holds: Callable[[Case], bool] = lambda case: True, *, most: int) -> Grid:
    """The first cases of the array that meet a condition, with a plain call and plain numbers.

    Checks that change a tensor and compare two answers use them. holds: the condition. most: the number of cases; half
    as many where tiles are slow.
    """

    def of(space: Space, dtype: Dtype) -> list[Case]:
        ordinary = (_ordinary(case) for case in space.cases if case.dtype == dtype)
        count = most // 2 if space.room.is_of_slow_tiles else most
        return list(islice((case for case in ordinary if not case.is_one_memory and holds(case)), count))

    return of


def _ordinary(case: Case) -> Case:
    """The case with a plain call and plain numbers."""
    numbers = {"family": "normal", "values": "normal", "douts": "normal", "magnitude": 1.0, "shift": 0.0}
    return replace(case, call="plain", wanted="all", **numbers)  # type: ignore[arg-type]


def lines(text: str, cuda: str = "", slow: str = "") -> Grid:
    """The same cases in every dtype, from lines without one. A # starts a comment.

    cuda: more lines for a GPU. slow: the lines where tiles are slow, in place of the others.
    """

    def of(space: Space, dtype: Dtype) -> list[Case]:
        chosen = slow if slow and space.room.is_of_slow_tiles else text
        return list(_parsed(chosen + cuda if space.device == "cuda" else chosen, dtype))

    return of


@cache
def _parsed(text: str, dtype: Dtype) -> tuple[Case, ...]:
    given = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(Case.parse(f"{line} {dtype}") for line in given if line)


# ------------------------------------------------------------------------------------------------------- one axis each


def lengths(space: Space, dtype: Dtype) -> list[Case]:
    """One shape over sequence lengths, for the chart of error against length.

    Where tiles are slow, one dtype has the longest.
    """
    steps = {"cpu": (1, 16, 64, 128, 256, 384, 1100), "cuda": (16, 64, 256, 1024, 4096, 16384)}[space.device]
    if space.room.is_of_slow_tiles and dtype != space.dtypes[-1]:
        steps = steps[:-1]
    return [Case(heads=1, queries=length, dim=64, dtype=dtype, mask="causal", seed=1) for length in steps]


def magnitudes(space: Space, dtype: Dtype) -> list[Case]:
    """One shape over the magnitude of the queries, for the chart of error against score magnitude."""
    powers = (-6, -2, 0, 2, 4, 8)
    return [Case(heads=1, queries=129, dim=64, dtype=dtype, magnitude=2.0**power, seed=2) for power in powers]


def doubling(space: Space, dtype: Dtype) -> list[Case]:
    """Doubling lengths of one head. One dtype represents all: a kernel holds the same tensors in each."""
    if dtype != ("float32" if space.device == "cpu" else "float16"):
        return []
    steps = (256, 512, 1024) if space.room.is_of_slow_tiles else (512, 1024, 2048, 4096, 8192, 16384)
    return [Case(heads=1, queries=length, dim=64, dtype=dtype, seed=9) for length in steps]


# Scores where exponentials overflow and underflow. exp in float32: above 88.7228, below -87.34 (normal) and -103.97
# (subnormal). exp2: at 128 and 127. exp in float16: above 11.09. Also the largest float16, and far larger scores.
# There, kernels with sentinels fail, and kernels that do not subtract the maximum.
_BELOW = (-2.5e5, -1e4, -104.0, -103.9, -87.4, -87.3)
_ABOVE = (11.0, 11.1, 87.0, 88.0, 88.1, 88.7, 88.73, 89.0, 127.9, 128.1, 1e4, 65504.0, 2.5e5)
LANDMARKS = (*_BELOW, 0.0, *_ABOVE)
# Equal scores so large that half an ulp of one is beyond exp's range. A difference of two roundings then gives infinity
# (pytorch#121558). float16 cannot hold the factors of such a product. On a GPU, kernels in common use are known to have
# this fault.
HUGE = 1e10


def shifted(space: Space, dtype: Dtype) -> list[Case]:
    """Every score shifted to a landmark. The exact output is that of the unshifted scores, up to rounding."""
    scores = (*LANDMARKS, HUGE, -HUGE) if space.device == "cpu" and dtype != "float16" else LANDMARKS
    return [Case(heads=1, queries=40, keys=70, dim=32, dtype=dtype, mask="causal", shift=x, seed=3) for x in scores]


def spiked(space: Space, dtype: Dtype) -> list[Case]:
    """One score of each row at a landmark, and ordinary scores elsewhere."""
    one = Case(heads=1, queries=40, keys=70, dim=32, dtype=dtype, family="spike", seed=4)
    return [replace(one, magnitude=score) for score in LANDMARKS if score]
