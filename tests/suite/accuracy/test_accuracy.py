"""Tests `flashproof.judge` and `flashproof.assert_accurate`: the verdict of the suite on tensors from anywhere."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashproof
from flashproof import judging
from flashproof.calling import Answer
from flashproof.cases import Case
from flashproof.impls.spec import DTYPES, Arithmetic, Dtype, arithmetic_of_callables
from flashproof.impls.tiled import block_sparse as tiled_block_sparse
from flashproof.impls.tiled import fa2 as tiled_fa2
from flashproof.oracles import bounds, naive
from flashproof.reports.record import FIRST_POWER, LAST_POWER
from flashproof.tensors import inputs
from flashproof.tests.suite.accuracy.kernels import (
    Kernel,
    answered,
    asked,
    leaking,
    scaled_wrong,
    sdpa,
    without_maximum,
)

block_sparse: Callable[..., Any] = tiled_block_sparse.attention
fa2: Callable[..., Any] = tiled_fa2.attention

SHAPES = [
    "b1 h2 q128 k128 d64",
    "b2 h2 q100 k100 d40 causal",
    "b1 h4/2 q96 k160 d64",
    "b1 h2 q140 k140 d128 causal",
    "b1 h1 q200 k140 d32",
]


def judged(case: Case, kernel: Kernel, *, dv: bool = True) -> flashproof.Verdicts:
    """Returns the verdicts on the answer of a kernel to a case."""
    given, answer = answered(kernel, case)
    out = answer.pop("out")
    if not dv:
        del answer["dv"]
    return flashproof.judge(out, given.query, given.key, given.value, dout=given.dout, **answer, **asked(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_passes(shape: str, dtype: Dtype) -> None:
    verdicts = judged(Case.parse(f"{shape} {dtype}"), sdpa)
    assert verdicts.passed, str(verdicts)
    assert set(verdicts) == {"out", "dq", "dk", "dv"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["b1 h2 q30 k40 d32", "b1 h2 q140 k140 d128 causal"])
def test_the_verdict_is_that_of_the_suite(shape: str, dtype: Dtype) -> None:
    case = Case.parse(f"{shape} {dtype}")
    verdicts = judged(case, sdpa)
    tensors: dict[Any, Tensor] = {name: tensor.detach() for name, tensor in answered(sdpa, case)[1].items()}
    of_suite = judging.judge(
        Answer(tensors, 0.0), case, arithmetic_of_callables(dtype, "cpu"), ("out", "dq", "dk", "dv")
    )
    assert len(of_suite) == len(verdicts)
    for theirs in of_suite:
        ours = verdicts[theirs.tensor]
        found = (ours.rho, ours.bias, ours.worst, ours.certainty, ours.passed)
        assert found == (theirs.rho.value, theirs.bias, theirs.worst, theirs.certainty, theirs.passed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [scaled_wrong, leaking, without_maximum])
def test_wrong_kernels_are_rejected(kernel: Kernel, shape: str, dtype: Dtype) -> None:
    """The wrong scale is tested with large scores, which it changes by more."""
    magnitude = {scaled_wrong: " x8", leaking: "", without_maximum: " x40"}[kernel]
    case = Case.parse(f"{shape} {dtype}{magnitude}")
    # On a CPU, torch sums dV in 16 bit, so its dV may be wrong (tests/known_defects.toml).
    assert not magnitude or judged(case, sdpa, dv=dtype == "float32").passed
    assert not judged(case, kernel, dv=dtype == "float32").passed


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_scale_off_by_a_thousandth_is_seen_in_gradients_alone(dtype: Dtype) -> None:
    case = Case.parse(f"b1 h2 q70 k70 d40 causal {dtype}")
    given, answer = answered(scaled_wrong, case)
    for name in ("dq", "dk", "dv"):
        verdicts = flashproof.judge(
            None, given.query, given.key, given.value, dout=given.dout, **asked(case), **{name: answer[name]}
        )
        assert not verdicts.passed, name


# ------------------------------------------------------------------------------------------------ words


def text_of(out: Tensor | None, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> str:
    """Returns the message of the failed assertion."""
    with pytest.raises(AssertionError) as caught:
        flashproof.assert_accurate(out, query, key, value, **keywords)
    return str(caught.value)


def test_a_failure_reads_as_it_should() -> None:
    case = Case.parse("b1 h4 q100 k100 d64 bfloat16 causal seed7")
    given, answer = answered(sdpa, case)
    wrong = answer["out"].detach().clone()
    wrong[0, 3, 17, 12] += 1.0
    block = text_of(wrong, given.query, given.key, given.value, dout=given.dout, dq=answer["dq"], **asked(case))
    figures = r"out  bfloat16  rho \d+   error 1, bound \d\.\de-3, exact value in float64, some rows certified"
    place = r"worst at \[batch 0, head 3, query 17, dim 12\]: got -?\d\.\d+, exact -?\d\.\d+"
    row = r"the query sees 18 keys; the largest weight is \d+\.?\d* %"
    passed = (
        r"dq  bfloat16  rho 0\.\d+   error \d\.\de-\d, bound \d\.\de-\d, exact value in float64, some rows certified"
    )
    assert re.fullmatch(rf"{figures}\n{place}\n{row}\n\n{passed}", block), block


def test_every_failing_tensor_is_told_of_the_worst_first() -> None:
    case = Case.parse("b1 h2 q40 k40 d32")
    given, answer = answered(sdpa, case)
    answer["dq"], answer["dk"] = answer["dq"] + 1.0, answer["dk"] + math.nan
    keywords: dict[str, Any] = {"dout": given.dout, **{name: answer[name] for name in ("dq", "dk", "dv")}}
    verdicts = flashproof.judge(answer["out"], given.query, given.key, given.value, **keywords, **asked(case))
    assert list(verdicts)[:2] == ["dk", "dq"]
    assert [verdicts[name].passed for name in ("out", "dq", "dk", "dv")] == [True, False, False, True]
    assert verdicts["dk"].worst_rho == math.inf
    assert str(verdicts).index("dk  float32") < str(verdicts).index("dq  float32") < str(verdicts).index("out  float32")
    with pytest.raises(KeyError, match="lse: was not judged; the verdicts are on dk, dq, "):
        verdicts["lse"]


def test_a_bias_is_told_of() -> None:
    case = Case.parse("b1 h2 q130 k130 d64 bfloat16")
    given = inputs(case)
    exact = naive.attention(given.problem(case)).out
    nearest = exact.to(torch.bfloat16)
    beyond = nearest.double().abs() > exact.abs()
    truncated = torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    verdicts = flashproof.judge(truncated, given.query, given.key, given.value, with_bounds=True)
    bias = verdicts["out"].bias
    assert verdicts["out"].rho < 1.0
    assert bias is not None
    assert bias.leans
    assert re.search(r"^bias -0\.\d+ ± 0\.\d+ ulp, \d+(\.\d+)? times its limit$", str(verdicts), re.MULTILINE)
    bound = verdicts["out"].bound
    assert bound is not None
    told = verdicts["out"].exact
    assert told is not None
    own = bounds.evaluate(given.problem(case), [bounds.FLOAT64], backward=False).bounds[0].out
    assert ((told - exact).abs() <= 2.0 * own).all()  # two float64 results, each within the bound
    assert ((truncated.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("zero", "leans"), [(True, None), (False, False)])
def test_a_bias_of_equal_weights_is_not_judged(zero: bool, leans: bool | None) -> None:
    """A kernel may normalise the weights of each part of the keys before it casts them.

    If all scores are 0, all weights of a part are cast in the same direction, so the output leans.
    """
    given = inputs(Case.parse("b1 h2 q128 k256 d64 float16 v.positive"))
    query = torch.zeros_like(given.query) if zero else given.query
    scores = query.double() @ given.key.double().mT / 8.0
    parts = [slice(0, 109), slice(109, None)]
    weights = [torch.softmax(scores[..., part], dim=-1).half().double() for part in parts]
    outs = [of_part @ given.value[:, :, part].double() for of_part, part in zip(weights, parts, strict=True)]
    lse = torch.stack([scores[..., part].logsumexp(dim=-1) for part in parts])
    shares = torch.softmax(lse, dim=0)[..., None]
    out = (shares[0] * outs[0] + shares[1] * outs[1]).half()
    verdict = flashproof.judge(out, query, given.key, given.value)["out"]
    assert verdict.passed
    assert (verdict.bias and verdict.bias.leans) == leans


CAUSAL = "b1 h2 q60 k90 d32 causal"
QUESTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mask forgotten": (CAUSAL, {"is_causal": False}, "without the causal mask"),
    "alignment": (CAUSAL, {"causal_alignment": "bottom_right"}, "with the causal mask aligned at the bottom right"),
    "mask unasked": ("b1 h2 q60 k60 d32", {"is_causal": True}, "with the causal mask aligned at the top left"),
    "scale forgotten": ("b1 h2 q60 k60 d32", {"scale": 1.0}, "with scale 1"),
    "scale": ("b1 h2 q60 k60 d32", {"scale": 0.2}, "with a scale of 0.2, not 0.1768 (1.131 times as large)"),
    "dropout": ("b1 h2 q60 k60 d32 dropout0.2", {"dropout_p": 0.0}, "without dropout"),
}


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("gradient", [False, True])
def test_the_question_that_is_answered_is_named(name: str, gradient: bool) -> None:
    line, other, words = QUESTIONS[name]
    case = Case.parse(line)
    given = inputs(case)
    keywords = {**asked(case), "dropout_p": case.dropout, "dropout_seed": 3}
    leaves = [tensor.clone().requires_grad_() for tensor in (given.query, given.key, given.value)]
    out = fa2(*leaves, **(keywords | other))
    if gradient:
        keywords |= {"dout": given.dout, "dk": torch.autograd.grad(out, leaves[1], given.dout)[0]}
    text = text_of(out, *leaves, **keywords)
    assert f"\nthis is the answer {words}\n" in f"{text}\n", text


def test_tensors_in_the_wrong_place_are_named() -> None:
    case = Case.parse("b2 h4/2 q60 k60 d32")
    given = inputs(case)
    query, key, value = given.query, given.key, given.value
    exchanged = fa2(query, value, key, enable_gqa=True)
    assert "with key and value exchanged" in text_of(exchanged, query, key, value, enable_gqa=True)
    repeated = fa2(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
    assert "with query head h on key head h % 2, not h // 2" in text_of(repeated, query, key, value, enable_gqa=True)
    moved = fa2(query, key, value.roll(1, dims=1), enable_gqa=True)
    assert "with the values of the head before" in text_of(moved, query, key, value, enable_gqa=True)
    of_first = fa2(query, *(tensor[:, :1].expand(tensor.shape) for tensor in (key, value)), enable_gqa=True)
    assert "with the keys and values of the first head" in text_of(of_first, query, key, value, enable_gqa=True)
    over_heads = fa2(*(tensor.transpose(1, 2) for tensor in (query, query, query))).transpose(1, 2)
    assert "for tensors of the layout [batch, length, heads, dim]" in text_of(over_heads, query, query, query)
    memory = fa2(query, query, query).transpose(1, 2).reshape(query.shape)
    assert "this is the answer if its memory is read as [batch, length, heads, dim]" in text_of(
        memory, query, query, query
    )
    out, lse = fa2(query, query, query, return_lse=True)
    lse = lse / math.log(2.0)
    assert "lse is 1.443 times the exact result, which makes it a logarithm to base 2" in text_of(
        out, query, query, query, lse=lse
    )


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ([0, 1], "without the last query head of each key head"),
        ([1, 2], "without the first query head of each key head"),
        ([2], "of the last query head of each key head alone"),
    ],
)
def test_query_heads_that_are_left_out_of_a_gradient_are_named(left: list[int], words: str) -> None:
    """dk is a sum over the query heads of each key head, of which the kernel adds these alone."""
    given = inputs(Case.parse("b1 h6/2 q40 k40 d32"))
    repeated = [tensor.repeat_interleave(3, dim=1) for tensor in (given.key, given.value)]
    leaf = repeated[0].requires_grad_()
    out = fa2(given.query, leaf, repeated[1])
    dk = torch.autograd.grad(out, leaf, given.dout)[0].reshape(1, 2, 3, 40, 32)[:, :, left].sum(dim=2)
    text = text_of(out.detach(), given.query, given.key, given.value, enable_gqa=True, dout=given.dout, dk=dk)
    assert f"dk is the answer {words}" in text or f"this is the answer {words}" in text, text


# ------------------------------------------------------------------------------------------------ what is taken


def test_block_masks_dropout_empty_rows_and_an_lse() -> None:
    case = Case.parse("b2 h2/1 q150 k200 d8 causal-br blocks0.4 dropout0.2")
    given = inputs(case)
    keywords: dict[str, Any] = {
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "enable_gqa": True,
        "block_mask": given.block_mask,
    }
    keywords |= {"dropout_p": 0.2, "dropout_seed": 11}
    leaves = [tensor.clone().requires_grad_() for tensor in (given.query, given.key, given.value)]
    out, lse = block_sparse(*leaves, **keywords, return_lse=True)
    assert (lse == -math.inf).any()
    gradients = zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, given.dout), strict=True)
    of_call: dict[str, Any] = {"lse": lse, "dout": given.dout, **dict(gradients), **keywords}
    flashproof.assert_accurate(out, *leaves, **of_call)
    assert not flashproof.judge(out, *leaves, **keywords | {"dropout_seed": 12}).passed
    assert not flashproof.judge(torch.where(lse.isinf()[..., None], 1e-30, out), *leaves, **keywords).passed
    everywhere = fa2(*leaves, **{name: word for name, word in keywords.items() if name != "block_mask"})
    question = flashproof.judge(everywhere, *leaves, **keywords).question
    assert question == "this is the answer without the block mask"


def test_nan_in_a_key_that_no_query_sees_changes_nothing() -> None:
    query, key, value = (torch.randn(1, 2, 40, 16) for _ in range(3))
    longer = [torch.cat([tensor, torch.full((1, 2, 9, 16), math.nan)], dim=2) for tensor in (key, value)]
    flashproof.assert_accurate(sdpa_causal(query, key, value), query, *longer, is_causal=True)
    with pytest.raises(
        ValueError, match=r"key: holds nan at \[0, 0, 40, 0\], where a result depends on it; give finite numbers"
    ):
        flashproof.judge(query, query, *longer)


def sdpa_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Calls torch's attention with a causal mask."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_the_state_of_the_caller_does_not_matter() -> None:
    case = Case.parse("b1 h2 q70 k70 d16")
    given, answer = answered(sdpa, case)
    leaves = [tensor.clone().requires_grad_() for tensor in (given.query, given.key, given.value)]
    keywords: dict[str, Any] = {"dout": given.dout, "dq": answer["dq"], "with_bounds": True}
    plain = flashproof.judge(answer["out"], *leaves, **keywords)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            inside = flashproof.judge(answer["out"], *leaves, **keywords)
    finally:
        torch.set_default_dtype(before)
    assert [inside[name].worst for name in inside] == [plain[name].worst for name in plain]
    assert torch.equal(inside["dq"].bound, plain["dq"].bound)  # type: ignore[arg-type]
    assert plain["out"].bound is not None
    assert not plain["out"].bound.requires_grad
    assert torch.is_grad_enabled()
    assert all(leaf.grad is None for leaf in leaves)


def test_a_claim_decides() -> None:
    """Torch casts its weights to bfloat16. The default claim allows this, and a finer claim does not."""
    query, key, value = (torch.randn(1, 2, 60, 32).bfloat16() for _ in range(3))
    out = sdpa_causal(query, key, value)
    assert flashproof.judge(out, query, key, value, is_causal=True).passed
    finer = Arithmetic(weights="float32")
    assert not flashproof.judge(out, query, key, value, is_causal=True, arithmetic=finer).passed
    assert not flashproof.judge(out, query, key, value, is_causal=True, arithmetic=lambda dtype, device: finer).passed


def test_long_inputs_take_memory_in_proportion() -> None:
    """Only some rows of scores are in memory at once: as many numbers as keys, times a constant."""
    largest = []
    for length in (2048, 4096):
        case = Case.parse(f"b1 h2 q{length} k{length} d4")
        largest.append(max(rows.weights.numel() for rows in naive.row_blocks(inputs(case).problem(case))))
    assert largest == [128 * 2048, 128 * 4096]


# ------------------------------------------------------------------------------------------------ errors

Q = torch.randn(1, 2, 8, 16)
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"out": None},
        ValueError,
        "out: None was given, and so were lse, dq, dk and dv; give at least one result of the kernel",
    ),
    ({"out": [1.0]}, TypeError, r"out: list is not a tensor; give one of shape \[1, 2, 8, 16\]"),
    ({"out": Q.mT}, ValueError, r"out: shape \[1, 2, 16, 8\] does not fit the inputs; give \[1, 2, 8, 16\]$"),
    ({"out": Q.transpose(1, 2)}, ValueError, r"give \[1, 2, 8, 16\], that is out.transpose\(1, 2\)"),
    ({"out": Q.half()}, TypeError, "out: dtype torch.float16 is not taken; give torch.float32, as query has"),
    ({"lse": Q[..., :1]}, ValueError, r"lse: shape .* give \[1, 2, 8\], that is lse.squeeze\(-1\)"),
    ({"lse": Q[..., 0].half()}, TypeError, "lse: dtype torch.float16 is not taken; give torch.float32"),
    ({"dq": Q}, ValueError, "dout: None was given with dq; give the output gradient that it was computed for"),
    ({"dout": Q}, ValueError, "dout: was given without dq, dk and dv; give at least one of them"),
    ({"dout": Q, "dk": Q[:, :1]}, ValueError, r"dk: shape \[1, 1, 8, 16\] does not fit the inputs"),
    ({"dout": Q[:, :, :4], "dq": Q}, ValueError, r"dout: shape \[1, 2, 4, 16\] does not fit the inputs"),
    ({"query": Q.double()}, TypeError, "query: dtype torch.float64 is not taken; give float32, float16 or bfloat16"),
    (
        {"query": Q * math.inf},
        ValueError,
        r"query: holds (inf|-inf) at \[0, 0, 0, 0\], where a result depends on it; give finite numbers",
    ),
    ({"key": Q[:, :1], "value": Q[:, :1]}, ValueError, "enable_gqa=True"),
    ({"scale": "1"}, TypeError, "scale: '1' is not a number"),
    ({"causal_alignment": "left"}, ValueError, "causal_alignment: 'left' is unknown"),
    ({"arithmetic": "fma"}, TypeError, "arithmetic: 'fma' is not a claim; give a flashproof.Arithmetic, or a function"),
    ({"arithmetic": lambda dtype, device: None}, TypeError, "arithmetic: returned None for .'float32', 'cpu'."),
]


@pytest.mark.parametrize(("changed", "kind", "words"), MISTAKES, ids=lambda value: None)
def test_a_mistake_of_the_caller_is_named(changed: dict[str, Any], kind: type[Exception], words: str) -> None:
    keywords: dict[str, Any] = {"out": Q, "query": Q, "key": Q, "value": Q, **changed}
    positional = [keywords.pop(name) for name in ("out", "query", "key", "value")]
    with pytest.raises(kind, match=words):
        flashproof.judge(*positional, **keywords)


def test_nan_in_an_answer_is_a_verdict() -> None:
    out = replace_first(sdpa_causal(Q, Q, Q), math.nan)
    assert "got nan" in text_of(out, Q, Q, Q, is_causal=True)


def replace_first(tensor: Tensor, number: float) -> Tensor:
    """Returns a copy with another first element."""
    changed = tensor.clone()
    changed[0, 0, 0, 0] = number
    return changed


def test_what_the_readme_says_of_a_wrong_scale() -> None:
    """The scale is wrong by 0.1 %, which allclose does not see. The figures in the README must hold."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, dout = (
        torch.randn(2, 4, 256, 64, generator=generator, requires_grad=number < 3) for number in range(4)
    )

    def answer(scale: float) -> list[Tensor]:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), dout)]

    wrong, right = answer(1.001 / 8.0), answer(1.0 / 8.0)
    largest = max(float((one - other).abs().max()) for one, other in zip(wrong, right, strict=True))
    tensors = (query.detach(), key.detach(), value.detach(), dout, *wrong)
    given: dict[str, Any] = dict(zip(("query", "key", "value", "dout", "out", "dq", "dk", "dv"), tensors, strict=True))
    verdicts = flashproof.judge(**given)
    rho = max(judged.worst_rho for judged in verdicts.values())
    readme = " ".join((Path(__file__).resolve().parents[3] / "README.md").read_text().split())
    limit, times = re.search(  # type: ignore[union-attr]
        r"differ by less than ([0-9.]+)\. .* more than (\d+) times as large", readme
    ).groups()
    assert largest < float(limit)
    assert rho > float(times)


def test_the_grid_of_a_failure_shows_where_it_lies() -> None:
    ratios = torch.zeros(2, 3, 40, 7)
    ratios[1, 2, 39, 6] = 7.0
    grid = judging.grid(ratios)
    assert (grid.rows, grid.columns, len(grid.rho), len(grid.rho[0])) == (40, 7, 16, 7)
    assert grid.rho[15][6] == 7.0
    assert sum(float(value) for row in grid.rho for value in row) == 7.0
    answer = torch.zeros(1, 1, 4, 2)
    truth = judging.exact(Case.parse("b1 h1 q4 k4 d2"), arithmetic_of_callables("float32", "cpu"), "cpu")
    assert judging.judge_tensor(answer, "out", truth).grid is not None
    assert judging.judge_tensor(truth.answer.out.to(torch.float32), "out", truth).grid is None


def test_elements_are_counted_by_their_ulps() -> None:
    """An element that is off by k ulps of its own exact number is counted where k is, and the floor has no error."""
    case = Case.parse("b1 h1 q16 k16 d16 float16")
    truth = judging.exact(case, Arithmetic(), "cpu")
    rounded = truth.answer.out.to(torch.float16)
    found = judging.elements(rounded, "out", truth)
    assert found.counts == found.floor
    assert sum(found.counts) == 256
    assert sum(found.counts[:-FIRST_POWER]) == 256  # below half an ulp, where no two numbers are equally near
    off = rounded.clone()
    off[0, 0, 0, 0] += 8 * torch.finfo(torch.float16).eps * 2.0 ** math.floor(math.log2(abs(float(off[0, 0, 0, 0]))))
    off[0, 0, 0, 1] = math.nan
    counts = judging.elements(off, "out", truth).counts
    assert [place + FIRST_POWER - 1 for place, count in enumerate(counts) if place > -FIRST_POWER and count] in (
        [2, LAST_POWER],
        [3, LAST_POWER],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_that_cancels_has_no_figure_in_ulps(dtype: Dtype) -> None:
    """If all values are equal, dQ and dK are 0. The rounding errors of a right kernel are no ulps of that."""
    case = Case.parse(f"b1 h2 q40 k40 d32 {dtype} full normal v.equal seed0")
    truth = judging.exact(case, arithmetic_of_callables(dtype, "cpu"), "cpu")
    _, answer = answered(sdpa, case)
    found = {name: judging.judge_tensor(answer[name].detach(), name, truth).ulps for name in ("out", "dq", "dk", "dv")}
    assert {name: figure is None for name, figure in found.items()} == {
        "out": False,
        "dq": True,
        "dk": True,
        "dv": False,
    }
