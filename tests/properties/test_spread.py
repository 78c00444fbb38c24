"""The errors of a tensor all together: their mean square is what the claimed arithmetic spreads, where no single error is beyond its bound."""

from functools import lru_cache
from typing import get_args

import pytest

from flashproof import grids, judging
from flashproof.calling import TENSORS
from flashproof.cases import Case
from flashproof.impls.spec import Arithmetic, Dtype
from flashproof.oracles import spread, verdict
from flashproof.registry import check
from flashproof.subject import Subject
from flashproof.tensors import inputs
from flashproof.tests.properties.probing import answer_to, expect_rms

FAMILIES = ("normal", "outliers", "sharp", "positive", "onesided")
LARGEST_MAGNITUDE = 64.0


@check("properties", grid=grids.general_position)
def test_spread(subject: Subject) -> None:
    """The mean square of all errors of a tensor is not larger than the claimed arithmetic makes it.

    It shows exponentials, products and sums of fewer digits, casts that truncate, and a delta or LSE of fewer digits.
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
    """Whether the model holds: of a case from the command line it may not."""
    generic = case.family in FAMILIES and not case.shift and case.scale != 0.0 and case.magnitude <= LARGEST_MAGNITUDE
    return generic and spread.is_modelled(inputs(case).problem(case), arithmetic)


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_every_case_of_the_grid_is_in_general_position(dtype: Dtype) -> None:
    """None is left out unseen."""
    cases = grids.general_position(dtype, "cuda")
    assert [case for case in cases if not in_general_position(case, Arithmetic())] == []


@lru_cache(maxsize=64)
def _variances(case: Case, arithmetic: Arithmetic) -> spread.Variances:
    return spread.variances(inputs(case).problem(case), arithmetic)
