"""What failing cases have in common: it names what separates them from the passing cases, and nothing by chance."""

from collections.abc import Callable
from random import Random

import pytest

from flashproof.cases import Case
from flashproof.impls.spec import DTYPES
from flashproof.reports import common
from flashproof.reports.record import Judgement
from flashproof.tests.suite.reports.building import judgement


def drawn(seed: int) -> Case:
    """Returns a random case."""
    pick = Random(seed).choice
    kv_heads = pick([1, 2, 3])
    return Case(
        heads=kv_heads * pick([1, 1, 2, 3]),
        kv_heads=kv_heads,
        queries=pick([1, 7, 64, 100, 513]),
        keys=pick([1, 7, 64, 100, 513, 1025]),
        dim=pick(range(8, 257, 8)),
        dtype=pick(DTYPES),
        mask=pick(["full", "causal", "causal-br"]),
        dropout=pick([0.0, 0.0, 0.1, 0.85]),
        family=pick(["normal", "spike"]),
        spelled=pick([False, True]),
        seed=seed,
    )


CASES = [drawn(seed) for seed in range(400)]


def judged(fails: Callable[[Case], bool]) -> list[Judgement]:
    """Returns judgements of the output in some cases of the whole space. fails: whether a case fails."""
    return [judgement(case=str(case), dtype=case.dtype, status="failed" if fails(case) else "passed") for case in CASES]


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda case: case.dim >= 136, "a head dim of at least 136 (a case with 128 passes)"),
        (lambda case: case.dtype == "bfloat16", "dtype bfloat16"),
        (
            lambda case: case.mask == "causal-br" and case.heads > case.kv_heads,
            "at least 2 query heads for each key head (a case with 1 passes) and mask causal-br",
        ),
        (lambda case: case.dropout > 0 and case.heads > case.kv_heads, "dropout other than none"),  # some, most
    ],
    ids=["dim", "dtype", "two", "not plain"],
)
def test_what_separates_is_named(fails: Callable[[Case], bool], words: str) -> None:
    found = common.shared(judged(fails))
    assert found is not None
    assert set(words.split(" and ")) <= set(found.words.replace(", ", " and ").split(" and "))
    assert found.failing[0] == found.failing[1] == sum(map(fails, CASES))


def test_the_counts_are_those_of_the_cases() -> None:
    """A fault of half the cases with a head dim leaves the other half as passing cases that have it, too."""
    found = common.shared(judged(lambda case: case.dim >= 200 and case.seed % 2 == 0))
    assert found is not None
    wide = [case for case in CASES if case.dim >= 200]
    assert found.passing == (
        sum(case.seed % 2 for case in wide),
        sum(case.seed % 2 or case.dim < 200 for case in CASES),
    )
    assert str(found).startswith(f"All {found.failing[1]} failing cases have a head dim of at least 200 (")


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


def test_a_property_that_only_repeats_the_draw_is_not_named() -> None:
    """Few passing cases lack it, so without it the sentence would say as much."""
    failing = [judgement(case=f"b1 h1 q{n} k{n} d256 float32", status="failed") for n in range(100, 140)]
    narrow = [judgement(case=f"b1 h1 q{n} k{n} d64 float32") for n in range(100, 200)]
    wide = [judgement(case=f"b1 h1 q{n} k{n} d256 float32") for n in (400, 401)]
    found = common.shared([*failing, *narrow, *wide])
    assert found is not None
    assert str(found) == (
        "All 40 failing cases have a head dim of at least 256 (a case with 64 passes), but so do 2 of 102 passing cases"
    )
    refused = [judgement(case=f"b1 h1 q{n} k{n} d256 float32", status="refused") for n in range(500, 540)]
    assert str(common.shared([*failing, *narrow, *wide, *refused])) == str(found)  # a refusal is no pass
    many = [judgement(case=f"b1 h1 q{n} k{n} d256 float32") for n in range(400, 440)]
    found = common.shared([*failing, *narrow, *many])
    assert found is not None
    assert (
        found.words
        == "at most 139 queries (a case with 400 passes) and a head dim of at least 256 (a case with 64 passes)"
    )
    assert found.passing == (0, 140)


def test_a_property_that_leaves_out_as_many_failing_cases_is_not_named() -> None:
    failing = [judgement(case=f"b1 h1 q{n} k{n} d256 float32", status="failed") for n in range(300, 430)]
    failing += [judgement(case=f"b1 h1 q{n} k{n} d256 float32 v.zero", status="failed") for n in range(6)]
    passing = [judgement(case=f"b1 h1 q{n} k{n} d256 float32 v.zero") for n in range(10, 17)]
    passing += [judgement(case=f"b1 h1 q{n} k{n} d64 float32") for n in range(300, 430)]
    found = common.shared([*failing, *passing])
    assert found is not None
    assert found.words == "a head dim of at least 256 (a case with 64 passes)"


def test_a_property_that_another_one_makes_needless_goes() -> None:
    """The second and third property together exclude what the first one does."""
    failing = [drawn(seed) for seed in range(30)]
    passing = [drawn(seed) for seed in range(30, 200)]
    halves = {case: seed for seed, case in enumerate(passing)}
    first = common.Property("first", lambda case: case in failing or halves[case] < 40)
    second = common.Property("second", lambda case: case in failing or halves[case] % 2 == 0)
    third = common.Property("third", lambda case: case in failing or halves[case] % 2 == 1)
    assert common._needed([first, second, third], failing, passing) == [second, third]


def test_what_is_no_case_is_left_out() -> None:
    """The search and other checks name no case."""
    assert common.shared([judgement(case="12 random cases", status="failed") for _ in range(9)]) is None


def test_large_scores_are_named() -> None:
    """By their magnitude and scale together, because neither alone says how far scores differ."""
    factors = {"failed": ((16, 0.0625), (2, 0.5), (1, 2.0)), "passed": ((16, 0.0078125), (1, 0.0625), (0.25, 0.5))}
    judgements = [
        judgement(case=f"b1 h1 q{n} k{n} d64 float32 full normal x{magnitude} scale{scale}", status=status)
        for status, every in factors.items()
        for magnitude, scale in every
        for n in range(100, 130)
    ]
    found = common.shared(judgements)
    assert found is not None
    assert found.words == "scores that differ by about 8 or more"
    assert found.passing[0] == 0
