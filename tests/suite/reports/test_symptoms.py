"""What records show of failures: each sentence stands where it is true of them, and not where chance may explain it."""

import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest

from flashproof.reports import causes, symptoms, wording
from flashproof.reports.causes import one_screen
from flashproof.reports.pages import write_site
from flashproof.reports.record import Grid, Judgement, TensorName
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement


def failed(seed: int = 0, **fields: Any) -> Judgement:
    """Returns a failure in a case of its own. fields: of the judgement, or of its worst element."""
    draw = Random(seed)
    element = {name: fields.pop(name) for name in ("got", "exact", "index", "error", "note") if name in fields}
    values: dict[str, Any] = {"got": draw.gauss(0.0, 1.0), "exact": draw.gauss(0.0, 1.0), "error": 1.0}
    case = f"b1 h1 q{8 + seed} k{8 + seed} d64 float32 full normal seed0"
    return judgement(status="failed", rho=9.0, worst=building.worst(9.0, **(values | element)), case=case, **fields)


def in_float(number: float) -> float:
    """Returns a number as float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def in_bits(number: float, bits: int) -> float:
    """Returns a number that is rounded to some bits."""
    mantissa, exponent = float(number).hex().split("p")
    return round(float.fromhex(mantissa) * 2 ** (bits - 1)) / 2 ** (bits - 1) * 2.0 ** int(exponent)


def texts(judgements: list[Judgement]) -> list[str]:
    return [one.text for one in symptoms.symptoms(judgements)]


@pytest.mark.parametrize(("number", "count"), [(0.0, 0), (1.0, 1), (-1.5, 2), (0.1, 52), (257.0, 9)])
def test_bits_are_counted(number: float, count: int) -> None:
    assert symptoms.bits(number) == count


@pytest.mark.parametrize(
    ("dtype", "bits", "says"),
    [
        ("float16", 8, "numbers of bfloat16"),
        ("float32", 8, "numbers of bfloat16"),
        ("float32", 11, "numbers of float16 or TF32"),
        ("float32", 16, "numbers of 16 significant bits"),
    ],
)
def test_numbers_of_fewer_bits_are_named(dtype: str, bits: int, says: str) -> None:
    rounded = [failed(i, dtype=dtype, got=in_bits(Random(i).gauss(0.0, 1.0), bits)) for i in range(20)]
    (found,) = symptoms.symptoms(rounded)
    assert found.short == f"the worst elements of out in {dtype} are {says}"
    assert f"is one of the {says} in each of 20 failing judgements in {dtype}" in found.text
    assert symptoms.symptoms([*rounded, failed(99, dtype=dtype, got=in_bits(0.1, symptoms.BITS[dtype]))]) == []


@pytest.mark.parametrize(("step", "says"), [(0.0, "cut off"), (0.5, "rounded")])
def test_values_of_fewer_bits_are_named_where_a_query_sees_one_key(step: float, says: str) -> None:
    """Elsewhere the output is a mean of values, and has all bits."""
    values = [in_float(Random(i).uniform(1.0, 2.0)) for i in range(20)]
    alone = [
        failed(i, got=int(value * 2**11 + step) / 2**11, exact=value, note=symptoms.ONE_KEY)
        for i, value in enumerate(values)
    ]
    others = [failed(i, got=in_float(Random(i).gauss(0.0, 1.0))) for i in range(20, 40)]
    (found,) = symptoms.symptoms([*alone, *others])
    assert found.short == f"in float32, the value tensor is {says} to numbers of 12 significant bits"
    assert "in each of 20 such failing judgements in float32" in found.text


def test_few_numbers_of_fewer_bits_say_nothing() -> None:
    """Four numbers of float16 are numbers of bfloat16 once in 4,096 times, and equal ones count once."""
    few = [failed(i, dtype="float16", got=in_bits(Random(i).gauss(0.0, 1.0), 8)) for i in range(4)]
    assert symptoms.symptoms(few) == []
    assert symptoms.symptoms([failed(i, dtype="float16", got=0.5) for i in range(40)]) == []
    full = [failed(i, got=in_float(Random(i).gauss(0.0, 1.0))) for i in range(20)]
    assert symptoms.symptoms(full) == []


def test_a_stretch_with_most_of_the_worst_elements_is_named() -> None:
    def at(place: int, seed: int, tensor: TensorName = "dk") -> Judgement:
        grid = Grid(rows=2000, columns=64, rho=[[9.0] * 16] * 16)
        return failed(seed, tensor=tensor, index=(0, 0, place, seed % 64), grid=grid)

    inside = [at(1024 + i % 16, i, "dk" if i % 2 else "dv") for i in range(32)]
    outside = [at(Random(i).randrange(2000), i) for i in range(40, 44)]
    (text,) = texts([*inside, *outside])
    assert text == "the worst elements of dK and dV lie at a key from 1,024 to 1,039 in 32 of 36 failing judgements"
    assert texts([at(Random(i).randrange(2000), i) for i in range(50)]) == []
    assert texts(inside[:4]) == []
    assert texts([at(0, i) for i in range(50)]) == [], "ties are broken in favour of the first element"


def test_the_index_from_which_on_a_tensor_is_wrong_is_named() -> None:
    def of(dims: int, start: int, seed: int) -> Judgement:
        edges = symptoms._edges(dims, 16)
        row: list[float | str] = [9.0 if edges[part + 1] > start else 0.5 for part in range(16)]
        return failed(seed, index=(0, 0, 0, 0), grid=Grid(rows=64, columns=dims, rho=[row] * 4))

    wrong = [of(dims, 128, dims) for dims in range(130, 257, 2)]
    (text,) = texts(wrong)
    assert text.startswith("out is right before and wrong from dim 128 on: so it is in the parts of all 64 failing")
    assert texts([*wrong, of(256, 30, 300)]) == []
    assert texts([of(dims, 0, dims) for dims in range(130, 257, 2)]) == []


def test_tensors_that_hold_in_the_failing_cases_are_named() -> None:
    wrong = [failed(i) for i in range(6)]
    right = [judgement(tensor=tensor, case=one.case) for one in wrong for tensor in ("dq", "dk")]
    (found,) = symptoms.symptoms([*wrong, *right])
    assert found.short == "only out fails"
    assert found.text == "only out fails: dQ and dK are right in every failing case that judges them"
    assert symptoms.symptoms([*wrong, *(judgement(tensor="dq", case="another") for _ in right)]) == []


def test_a_tensor_that_is_too_large_is_named() -> None:
    def off(share: float, seed: int) -> Judgement:
        exact = Random(seed).gauss(0.0, 1.0)
        return failed(seed, exact=exact, got=exact * (1.0 + share), error=abs(exact * share))

    (text,) = texts([off(0.03 + 0.0001 * i, i) for i in range(9)])
    assert text == "the worst element of out in float32 is about 3 % too large in 9 of 9 failing judgements"
    (text,) = texts([off(-0.03, i) for i in range(9)])
    assert "about 3 % too small" in text
    assert texts([off(0.03 * (-1) ** i, i) for i in range(9)]) == []


def test_one_factor_of_several_dtypes_is_one_sentence() -> None:
    wrong = [
        failed(i, dtype=dtype, exact=1.0, got=0.5, error=0.5) for i in range(9) for dtype in ("float16", "float32")
    ]
    (text,) = texts(wrong)
    assert text == (
        "the worst element of out in float32 and float16 is about 50 % too small in 18 of 18 failing judgements"
    )


def test_typical_errors_are_told_as_shares_of_the_largest_number() -> None:
    wrong = [failed(i, ulps=2.0**20 if i < 8 else 1e30) for i in range(9)]
    (text,) = texts(wrong)
    assert text.endswith("of the largest number of the tensor: in float32 out 9 %")
    larger = [failed(i, ulps=2.0**10, dtype="float16") for i in range(9)]
    (text,) = texts([*wrong, *larger])
    assert text.endswith(": in float32 out 9 %; in float16 out 75 %")


def test_errors_of_one_size_in_several_dtypes_are_no_roundings_to_them() -> None:
    """If another dtype is right, and the errors have the size of its roundings, it is named."""

    def off(dtype: str, share: float, count: int = 9) -> list[Judgement]:
        return [failed(i, ulps=share * 2.0 ** symptoms.BITS[dtype] / 1.5, dtype=dtype) for i in range(count)]

    (found,) = symptoms.symptoms([*off("float32", 0.002), *off("float16", 0.003)])
    assert found.short.startswith("typical errors: out 0.2 %, in float32 and float16 alike")
    assert found.text.endswith(": out 0.2 %; in float32 and float16 alike, so they are no roundings to these dtypes")
    right = [judgement(dtype="bfloat16") for _ in range(9)]
    (found,) = symptoms.symptoms([*off("float32", 0.002), *off("float16", 0.003), *right])
    assert found.short == "errors of the size of roundings to bfloat16"
    (found,) = symptoms.symptoms([*off("float32", 0.02), *off("float16", 0.03), *right])
    assert "bfloat16" not in found.text
    wrong = off("bfloat16", 0.002, 4)
    (found,) = symptoms.symptoms([*off("float32", 0.002), *off("float16", 0.003), *right, *wrong])
    assert "of the size of roundings" not in found.short


@pytest.mark.parametrize(("count", "is_told"), [(symptoms.FEWEST, True), (symptoms.FEWEST - 1, False)])
def test_what_several_failures_miscount_is_named(count: int, is_told: bool) -> None:
    """They may differ in their rows. Another explanation of one failure, which chance may make, does not count."""
    words = "out has the errors of a softmax in which the weights of keys up to 63 count 1.5 times"
    wrong = [failed(i, question=words + f", in {20 + i} of 99 rows" * (i % 2)) for i in range(count)]
    other = failed(99, question="out has the errors of scores in which dims 16 to 23 count 1.03 times")
    found = [one.short for one in symptoms.symptoms([*wrong, other])]
    assert (words in found) == is_told
    assert not any("dims" in short for short in found)


def test_symptoms_are_in_the_headline_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    wrong = [failed(i) for i in range(6)]
    right = [judgement(tensor="dq", case=one.case) for one in wrong]
    records = building.write(tmp_path / "run.jsonl", [environment(), *wrong, *right])
    site = write_site([records], tmp_path / "site").parent
    page = (site / f"{wording.stem('triton.fa2')}.html").read_text()
    assert "in all 6 cases: only out fails." in page
    assert "in all 6 cases: only out fails." in (site / "index.html").read_text()
    assert "  only out fails: dQ is right" in "\n".join(one_screen("triton.fa2", [*wrong, *right]))


def test_a_fitted_cause_is_one_whatever_its_numbers_are() -> None:
    """Each case fits its own numbers. The cause is told in the most frequent words."""
    ranges = ["1,024 to 1,039 count 0.5", "1,024 to 1,039 count 0.5", "from 1,024 on count 0.49"]
    wrong = [
        failed(i, question=f"out has the errors of a sum in which the values of keys {said} times")
        for i, said in enumerate(ranges)
    ]
    assert [len(group) for group in causes.explanations(wrong)] == [3]
    assert causes.headline(wrong).endswith("keys 1,024 to 1,039 count 0.5 times")
