"""All errors of a tensor together: their mean square must not be larger than the claimed arithmetic makes it.

This finds faults that bring no single error beyond its bound. `oracles.spread` says which mean square is expected.
"""

from functools import lru_cache
from typing import get_args

import pytest

from flashproof import grids, judging
from flashproof.calling import TENSORS
from flashproof.cases import Case
from flashproof.impls.spec import Arithmetic, Dtype, Supports
from flashproof.oracles import spread, verdict
from flashproof.registry import check
from flashproof.space import Space
from flashproof.subject import Subject
from flashproof.tensors import inputs
from flashproof.tests.properties.probing import answer_to, expect_rms

FAMILIES = ("normal", "outliers", "sharp")
VALUES = ("normal", "positive")
LARGEST_MAGNITUDE = 64.0


# In these cases, the errors are independent of one another, so their mean square is known. Each case shows the effect
# of a different rounding.
SIXTEEN_BIT = """
b1 h1 q32 k4000 d16           # many tiles of keys: what is summed in 16 bit between them
b1 h1 q4000 k20 d16           # many tiles of queries
b1 h1 q32 k700 d128           # the same of the usual head dim
b1 h1 q700 k32 d128
b1 h1 q1300 k1300 d8 causal   # and of causal kernels
b1 h8/1 q64 k64 d32           # many heads to a key head: what is summed in 16 bit between them
b1 h1 q140 k140 d64 causal sharp
b1 h1 q140 k140 d64 v.positive
b1 h1 q140 k140 d64 v.positive do.positive  # what cancels in dP - delta: dP that is rounded before
"""
# Where tiles are slow, the sums are half as long.
SLOW_SIXTEEN_BIT = SIXTEEN_BIT.replace("4000", "2000")
SINGLE = """
b1 h2 q500 k2 d8 x0.25        # two keys: hardly anything but the exponential rounds
b1 h2 q128 k16 d16 x0.25
b1 h1 q140 k140 d8 sharp      # scores, and the digits of what they are products of
b1 h1 q140 k140 d64 causal
b1 h1 q140 k140 d64 v.positive
"""
LONG = "b1 h2 q1000 k1000 d128\nb2 h2 q700 k1300 d64"  # further cases on a GPU


def general_position(space: Space, dtype: Dtype) -> list[Case]:
    """Returns the cases of a dtype. Their inputs are in general position: see `oracles.spread`."""
    if dtype == "float32":
        return grids.lines(SINGLE, cuda=LONG)(space, dtype)
    return grids.lines(SIXTEEN_BIT, cuda=LONG, slow=SLOW_SIXTEEN_BIT)(space, dtype)


@check("properties", grid=general_position, every=False)  # it leaves out arithmetic that has no model
def test_spread(subject: Subject) -> None:
    """The mean square of all errors of a tensor is not larger than the claimed arithmetic makes it.

    This check finds exponentials, products and sums with fewer digits, casts that truncate, and a delta or LSE with
    fewer digits.
    """
    arithmetic = subject.implementation.arithmetic(subject.dtype, subject.device)
    for case in subject.cases:
        answer = answer_to(subject, case) if in_general_position(case, arithmetic) else None
        if answer is None:
            continue
        exact, variances = judging.exact(case, arithmetic, subject.device).answer, _variances(case, arithmetic).elements
        for name in TENSORS:
            if name in answer:
                found = verdict.rms(answer[name].cpu(), getattr(exact, name), getattr(variances, name))
                expect_rms(subject, case, name, found, name)


def in_general_position(case: Case, arithmetic: Arithmetic) -> bool:
    """Whether the model of the spread holds for a case. It may not hold for a case from the command line."""
    is_normal = case.family in FAMILIES and case.values in VALUES and case.douts in VALUES
    generic = is_normal and not case.shift and case.scale != 0.0 and case.magnitude <= LARGEST_MAGNITUDE
    return generic and spread.is_modelled(inputs(case).problem(case), arithmetic)


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_every_case_of_the_grid_is_in_general_position(dtype: Dtype) -> None:
    """`test_spread` skips a case that is not in general position. It must skip none of its own cases."""
    cases = general_position(Space(Supports(), device="cuda"), dtype)
    assert [case for case in cases if not in_general_position(case, Arithmetic())] == []


@lru_cache(maxsize=64)
def _variances(case: Case, arithmetic: Arithmetic) -> spread.Variances:
    return spread.variances(inputs(case).problem(case), arithmetic)
