"""What failing cases have in common: it names what separates them from the passing cases, and nothing by chance."""

from collections.abc import Callable

import pytest

from flashproof.cases import Case
from flashproof.reports import common
from flashproof.reports.record import Judgement
from flashproof.tests.suite.mutants.combinations import SPACE
from flashproof.tests.suite.reports.building import judgement


def judged(fails: Callable[[Case], bool]) -> list[Judgement]:
    """Returns judgements of the output in all cases of an array. fails: whether a case fails."""
    return [
        judgement(case=str(case), dtype=case.dtype, status="failed" if fails(case) else "passed")
        for case in SPACE.array
    ]


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda case: case.dim >= 136, "a head dim of at least 136"),
        (lambda case: case.dtype == "bfloat16", "dtype bfloat16"),
        (
            lambda case: case.mask == "causal-br" and case.heads > case.kv_heads,
            "at least 2 query heads for each key head and mask causal-br",
        ),
        (lambda case: case.dropout > 0 and case.heads > case.kv_heads, "dropout other than none"),  # some, most
    ],
    ids=["dim", "dtype", "two", "not plain"],
)
def test_what_separates_is_named(fails: Callable[[Case], bool], words: str) -> None:
    found = common.shared(judged(fails))
    assert found is not None
    assert set(words.split(" and ")) <= set(found.words.replace(", ", " and ").split(" and "))
    assert found.failing[0] == found.failing[1] == sum(map(fails, SPACE.array))


def test_the_counts_are_those_of_the_cases() -> None:
    """A fault of half the cases with a head dim leaves the other half as passing cases that have it, too."""
    found = common.shared(judged(lambda case: case.dim >= 200 and case.seed % 2 == 0))
    assert found is not None
    wide = [case for case in SPACE.array if case.dim >= 200]
    assert found.passing == (
        sum(case.seed % 2 for case in wide),
        sum(case.seed % 2 or case.dim < 200 for case in SPACE.array),
    )
    assert str(found).startswith(f"All {found.failing[1]} failing cases have a head dim of at least 200; ")


@pytest.mark.parametrize(
    "fails",
    [lambda case: False, lambda case: True, lambda case: case.seed in (3, 4), lambda case: case.seed % 3 == 0],
    ids=["none", "every", "two", "by chance"],
)
def test_nothing_is_named_where_nothing_separates(fails: Callable[[Case], bool]) -> None:
    assert common.shared(judged(fails)) is None


def test_cases_that_judge_other_tensors_do_not_count() -> None:
    """A case without gradients cannot show a fault of dK."""
    fails = [judgement(case=f"b1 h1 q{n} k{n} d64 float32", tensor="dk", status="failed") for n in range(200, 210)]
    passes = [judgement(case=f"b1 h1 q{n} k{n} d64 float32", tensor="dk") for n in range(100, 110)]
    others = [judgement(case=f"b1 h1 q{n} k{n} d64 float32", tensor="out") for n in range(200, 230)]
    found = common.shared([*fails, *passes, *others])
    assert found is not None
    assert found.passing == (0, 10)
    assert str(found).endswith("; no passing case has that")


def test_what_is_no_case_is_left_out() -> None:
    """The search and other checks name no case."""
    assert common.shared([judgement(case="12 random cases", status="failed") for _ in range(9)]) is None
