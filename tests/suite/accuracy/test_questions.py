"""Tests that the failures of a check say which other question a wrong answer is the answer to."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashproof import coarser, judging, miscounted, questions
from flashproof.cases import Case
from flashproof.impls.spec import Device, arithmetic_of_callables
from flashproof.reports import wording
from flashproof.reports.record import Judgement, Record
from flashproof.signatures import of_callable
from flashproof.space import space_of
from flashproof.subject import Subject
from flashproof.tensors import inputs
from flashproof.tests.suite.accuracy.kernels import answered, sdpa

SDPA: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
ALL = ("out", "dq", "dk", "dv")


def scale_1(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Forgets the division by sqrt(dim)."""
    return SDPA(query, key, value, is_causal=is_causal, scale=1.0)


def scale_off_by_a_thousandth(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Has a scale that is wrong by 0.1 %. With small scores, the gradients show this and the output does not."""
    return SDPA(query, key, value, is_causal=is_causal, scale=1.001 / math.sqrt(query.shape[-1]))


def no_mask(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Takes a causal mask and ignores it."""
    return SDPA(query, key, value)


def bottom_right(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Aligns the causal mask at the bottom right, as another library does."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return SDPA(query, key, value, attn_mask=seen if is_causal else None)


def next_key(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Shows each query the key after its own, too."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
    return SDPA(query, key, value, attn_mask=seen if is_causal else None)


def own_key_hidden(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Hides the last key that each query should see. The first query sees none, and its output is 0."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(-1)
    return SDPA(query, key, value, attn_mask=seen if is_causal else None)


def other_layout(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Reads its tensors as [batch, length, heads, dim]."""
    turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return SDPA(*turned, is_causal=is_causal).transpose(1, 2)


def exchanged(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Takes key and value in the wrong order."""
    return SDPA(query, value, key, is_causal=is_causal)


SAID: dict[Callable[..., Tensor], tuple[str, str]] = {
    scale_1: ("causal", "this is the answer with scale 1"),
    scale_off_by_a_thousandth: (
        "causal",
        "this is the answer with a scale of 0.177, not 0.1768 (1.001 times as large)",
    ),
    no_mask: ("causal", "this is the answer without the causal mask"),
    bottom_right: ("k60 causal", "this is the answer with the causal mask aligned at the bottom right"),
    next_key: ("causal", "this is the answer with a causal mask that shows each query one key more"),
    own_key_hidden: ("causal", "this is the answer with a causal mask that shows each query one key fewer"),
    other_layout: (
        "",
        "this is the answer for tensors of the layout [batch, length, heads, dim]: it attends over heads",
    ),
    exchanged: ("", "this is the answer with key and value exchanged"),
}


def failures(
    kernel: Callable[..., Tensor], line: str, note: str = "", device: Device = "cpu", *, gives: bool = False
) -> list[Judgement]:
    """Runs a check that judges one case twice. Returns its failures. gives: whether the check passes the tensors."""
    case, records = Case.parse(f"b1 h2 q40 d32 {line}"), list[Record]()
    implementation = of_callable(kernel, kernel.__name__)
    subject = Subject(
        implementation,
        case.dtype,
        device,
        "accuracy/forward",
        space_of(implementation),
        [case],
        run="",
        emit=records.append,
    )
    given = inputs(case, device) if gives else None
    for _ in range(2):
        answer = subject.attend(case, backward=True, given=given)
        assert answer is not None
        subject.judge_answer(answer, case, ALL, note=note, given=given)  # type: ignore[arg-type]
    return subject.failures


def test_a_layout_with_one_head_is_no_gradient_of_zero() -> None:
    """Each query then sees its own key only. So dQ and dK are 0, and dV is not."""
    case, claim = Case.parse("b1 h1 q40 k40 d32"), arithmetic_of_callables("float32", "cpu")
    given, answer = answered(lambda *tensors, **_: other_layout(*tensors), case)
    truth = judging.exact(case, claim, "cpu")
    judged = [judging.judge_tensor(answer[name].detach(), name, truth) for name in ALL]  # type: ignore[arg-type]
    detached = {name: tensor.detach() for name, tensor in answer.items()}
    words = questions.answered(given.problem(case), detached, judged, truth, claim)  # type: ignore[arg-type]
    assert words.startswith("this is the answer for tensors of the layout [batch, length, heads, dim]")


@pytest.mark.parametrize(
    ("line", "wrong", "words"),
    [
        ("q40 k40 d32", {"dk": 0.0}, "dk is 0 everywhere"),  # not the layout, nor key and value exchanged
        ("q40 k40 d32 causal", {"dq": 0.0}, "dq is 0 everywhere"),
        ("q40 k40 d32 causal", {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}, "out, dq, dk and dv are 0 everywhere"),
        ("q9 k1 d32", {"dv": 0.0}, "dv is 0 everywhere"),  # with one key
        ("q40 k40 d32", {"dk": 1e-9}, ""),  # nearly 0
    ],
    ids=str,
)
def test_a_tensor_of_zeros_answers_no_question(line: str, wrong: dict[Any, float], words: str) -> None:
    """For some other questions a gradient is 0. So a tensor of zeros, or of nearly 0, tells no question from others."""
    case, claim = Case.parse(f"b1 h1 {line}"), arithmetic_of_callables("float32", "cpu")
    given, right = answered(sdpa, case)
    answer = {name: tensor.detach() for name, tensor in right.items()}
    answer |= {name: size * torch.randn(answer[name].shape) for name, size in wrong.items()}
    truth = judging.exact(case, claim, "cpu")
    judged = [judging.judge_tensor(answer[name], name, truth) for name in ALL]  # type: ignore[arg-type]
    assert questions.answered(given.problem(case), answer, judged, truth, claim) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", SAID, ids=lambda kernel: kernel.__name__)
def test_the_first_failure_names_the_question(kernel: Callable[..., Tensor]) -> None:
    line, words = SAID[kernel]
    found = failures(kernel, line)
    assert words in wording.failure_block(found[0]).splitlines()
    others = {failure.case for failure in found[1:] if words in failure.message}
    assert len(others) <= 1  # only the first failure names the question, and the simplest case
    assert not others or f"the simplest case that fails: {others.pop()}" in found[0].message


@pytest.mark.gpu
@pytest.mark.parametrize("gives", [False, True])
def test_a_failure_on_a_gpu_names_the_question(*, gives: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("CUDA: no device")
    found = failures(no_mask, "causal", device="cuda", gives=gives)
    assert "this is the answer without the causal mask" in found[0].message


def test_what_a_check_says_stands_beside_the_question() -> None:
    found = failures(no_mask, "causal", note="called in some way")
    said = found[0].message.splitlines()
    assert said[:2] == ["called in some way", "this is the answer without the causal mask"]
    assert found[-1].message == "called in some way"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dq": "no mask"}, "this is the answer without the causal mask"),
        ({"out": "no mask", "dq": "no mask", "dv": "noise"}, "out and dq are the answer without the causal mask"),
        ({"out": "no mask", "dk": "noise"}, "out is the answer without the causal mask"),
        ({"dq": "doubled", "dk": "noise"}, "dq is 2 times the exact result"),
        ({"dq": "zero", "dk": "zero", "dv": "zero"}, "dq, dk and dv are 0 everywhere"),
        ({"dk": "zero", "dv": "noise"}, "dk is 0 everywhere"),
        ({"dk": "noise"}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_tensors_that_answer_another_question_are_told_from_others(wrong: dict[Any, str], words: str) -> None:
    case = Case.parse("b2 h2 q40 k40 d32 causal")
    given, right = answered(sdpa, case)
    unmasked = answered(lambda *tensors, **keywords: sdpa(*tensors, **keywords | {"is_causal": False}), case)[1]
    answer = {name: tensor.detach() for name, tensor in right.items()}
    for name, kind in wrong.items():
        changes = {"no mask": unmasked[name], "doubled": 2.0 * right[name], "zero": 0.0 * right[name]}
        changes["noise"] = torch.randn(right[name].shape)
        answer[name] = changes[kind].detach()
    claim = arithmetic_of_callables("float32", "cpu")
    truth = judging.exact(case, claim, "cpu")
    judged = [judging.judge_tensor(answer[name], name, truth) for name in ALL]  # type: ignore[arg-type]
    assert questions.answered(given.problem(case), answer, judged, truth, claim) == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "query", "words"),
    [("q1 k1 causal", 0, "the query sees one key"), ("q3 k2 causal-br", 0, "the query sees no key")],
)
def test_a_row_of_few_keys_reads_well(line: str, query: int, words: str) -> None:
    case = Case.parse(f"b1 h1 d8 {line}")
    assert judging.describe(inputs(case).problem(case), (0, 0, query, 0)) == words


@pytest.mark.parametrize(
    ("line", "name", "wrong"),
    [
        ("q40 k70 d32 causal shift-250000 seed3", "out", lambda exact: 1e-6 * exact.sign()),  # where the bound is wide
        ("q40 k70 d32 spike x88 seed4", "dq", torch.ones_like),  # where the exact result is nearly 0
        ("q1 k300 d16 spike x16", "lse", torch.ones_like),  # any number is a multiple of any other
        ("q40 k40 d16 v.equal", "dk", lambda exact: 1e30 * exact),  # where the exact result is nearly 0
        ("q40 k70 d32 shift-1000000 seed3", "out", lambda exact: 100.0 * exact),  # where it is smaller than its bound
        ("q40 k40 d32", "dq", lambda exact: 1e6 * exact),  # too large a factor
    ],
)
def test_nothing_is_explained_by_chance(line: str, name: Any, wrong: Callable[[Tensor], Tensor]) -> None:
    case = Case.parse(f"b1 h1 {line}")
    claim = arithmetic_of_callables("float32", "cpu")
    truth = judging.exact(case, claim, "cpu")
    answer = {name: wrong(getattr(truth.answer, name)).float()}
    judged = [judging.judge_tensor(answer[name], name, truth)]
    assert not judged[0].passed
    assert questions.answered(inputs(case).problem(case), answer, judged, truth, claim) == ""


def test_a_lost_key_is_no_other_mask_for_one_query() -> None:
    """One query under a causal mask may lack a key for any reason. So the words name the key, and not the mask."""
    case, claim = Case.parse("b1 h1 q1 k40 d32 causal-br"), arithmetic_of_callables("float32", "cpu")
    given = inputs(case)
    truth = judging.exact(case, claim, "cpu")
    out = sdpa(
        given.query, given.key[:, :, :-1], given.value[:, :, :-1], is_causal=False, scale=32**-0.5, enable_gqa=False
    )
    judged = [judging.judge_tensor(out, "out", truth)]
    words = questions.answered(given.problem(case), {"out": out}, judged, truth, claim)
    assert words == "this is the answer with one key fewer than the query sees"


# ------------------------------------------------------------------------------------------------- coarser arithmetic


def to_tf32(tensor: Tensor) -> Tensor:
    """Rounds to the 11 bits of TF32. Gradients pass unchanged."""
    fraction, exponent = torch.frexp(tensor.detach())
    return tensor + (torch.ldexp(torch.round(fraction * 2.0**11) / 2.0**11, exponent) - tensor.detach())


def flash_in_tf32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Divides by the sum of the weights at the end, as FlashAttention does."""
    scores = to_tf32(query) @ to_tf32(key).mT / math.sqrt(query.shape[-1])
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return to_tf32(weights) @ to_tf32(value) / weights.sum(dim=-1, keepdim=True)


def in_the_dtype(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rounds each product to the dtype of its operands."""
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1) @ value


def in_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Keeps the sum of the output in the dtype of its operands, as a kernel with such an accumulator does."""
    scores = (query.float() @ key.float().mT) / math.sqrt(query.shape[-1])
    peak = torch.full_like(scores[..., :1], -1e30)
    out, weight = torch.zeros_like(query), torch.zeros_like(peak)
    for start in range(0, key.shape[-2], 32):
        tile, values = scores[..., start : start + 32], value[..., start : start + 32, :]
        above = torch.maximum(peak, tile.amax(dim=-1, keepdim=True))
        factor, weights, peak = torch.exp(peak - above), torch.exp(tile - above), above
        out = (out * factor + weights.to(value.dtype).float() @ values.float()).to(value.dtype)
        weight = weight * factor + weights.sum(dim=-1, keepdim=True)
    return (out / weight).to(query.dtype)


def in_bfloat16(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Casts its inputs to bfloat16."""
    return SDPA(query.bfloat16().float(), key.bfloat16().float(), value.bfloat16().float())


def weights_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Returns a kernel that rounds its weights to a dtype, and computes all else in float32."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(query.float() @ key.float().mT / math.sqrt(query.shape[-1]), dim=-1)
        return (weights.to(dtype).float() @ value.float()).to(query.dtype)

    return attention


def repeating(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Repeats the keys and values for each query head before it computes in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return SDPA(query.float(), key.float(), value.float()).to(query.dtype)


def shifted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Has errors as large as those of TF32, of another origin."""
    return SDPA(query, key, value) + 2.0**-12 * SDPA(query, key, value).abs()


@pytest.mark.parametrize(
    ("kernel", "dtype", "words"),
    [
        (flash_in_tf32, "float32", "out has the errors of products in TF32"),
        (in_bfloat16, "float32", "out has the errors of products in bfloat16"),
        (in_the_dtype, "bfloat16", "out has the errors of products that are rounded to bfloat16"),
        (in_the_dtype, "float16", "out has the errors of products that are rounded to float16"),
        (in_tiles, "bfloat16", "out has the errors of running sums that are rounded to bfloat16 after each tile of 32"),
        (in_tiles, "float16", "out has the errors of running sums that are rounded to float16 after each tile of 32"),
        (weights_in(torch.bfloat16), "float32", "out has the errors of weights that are rounded to bfloat16"),
        (weights_in(torch.float16), "float32", "out has the errors of weights that are rounded to float16 or TF32"),
        (weights_in(torch.bfloat16), "float16", "out has the errors of weights that are rounded to bfloat16"),
        (shifted, "float32", ""),
    ],
)
def test_a_coarser_arithmetic_is_told_by_its_errors(kernel: Callable[..., Tensor], dtype: Any, words: str) -> None:
    case = Case.parse(f"b1 h2 q96 k96 d64 {dtype} full sharp")
    given, claim = inputs(case), arithmetic_of_callables(dtype, "cpu")
    truth = judging.exact(case, claim, "cpu")
    answer: dict[Any, Tensor] = {"out": kernel(given.query, given.key, given.value)}
    judged = [judging.judge_tensor(answer["out"], "out", truth)]
    assert not judged[0].passed
    assert questions.answered(given.problem(case), answer, judged, truth, claim) == words


def test_gradients_of_heads_that_are_rounded_are_told_by_their_errors() -> None:
    """The answer is right by another claim, and the words name it."""
    case = Case.parse("b1 h32/1 q64 k64 d64 float16 full normal v.small do.small")
    given, claim = inputs(case), arithmetic_of_callables("float16", "cpu")
    truth = judging.exact(case, claim, "cpu")
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (given.query, given.key, given.value)]
    gradients = torch.autograd.grad(repeating(*leaves), leaves, given.dout)
    answer: dict[Any, Tensor] = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    judged = [judging.judge_tensor(answer[name], name, truth) for name in answer]
    assert [one.passed for one in judged] == [True, True, False]
    words = questions.answered(given.problem(case), answer, judged, truth, claim)
    assert words == (
        "dv has the errors of gradients of each query head that are rounded to float16 before they are summed, which "
        "the claim gradients='heads' allows"
    )


@pytest.mark.parametrize("parts", [False, True])
def test_running_sums_of_one_tile_are_rounded_once(parts: bool) -> None:
    """With one tile, the answer is the correctly rounded one. With several tiles, it is not."""
    case = Case.parse("b1 h1 q96 k128 d16 bfloat16 causal-br")
    problem, claim = inputs(case).problem(case), arithmetic_of_callables("bfloat16", "cpu")
    exact = judging.exact(case, claim, "cpu").answer
    whole = coarser._computed_in_tiles(problem, 128, parts=parts, backward=True)
    tiled = coarser._computed_in_tiles(problem, 16, parts=parts, backward=True)
    for name in ("out", "dq", "dk", "dv"):
        rounded, once, often = (
            answer.bfloat16().view(torch.int16).int() for answer in (getattr(exact, name), whole[name], tiled[name])
        )
        # The scale, 0.25, rounds nothing. The division by the sum of the weights does.
        assert int((once - rounded).abs().max()) <= (1 if name == "out" else 0)
        assert int((often - rounded).abs().median()) <= 1
        assert not torch.equal(often, once)


@pytest.mark.parametrize(
    ("rows", "explained", "is_explained"),
    [
        (coarser.ROWS, coarser.ROWS, True),
        (coarser.ROWS - 1, coarser.ROWS - 1, False),  # so few may agree by chance
        (coarser.ROWS, 1, False),  # the one row has nearly all errors
    ],
)
def test_an_arithmetic_explains_the_errors_of_many_rows(rows: int, explained: int, is_explained: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    exact, noise, other = (torch.randn(1, 1, rows, 32, generator=generator, dtype=torch.float64) for _ in range(3))
    sizes = torch.full((rows, 1), 1e-3, dtype=torch.float64)
    sizes[0] = 0.1
    computed = torch.where(torch.arange(rows)[:, None] < explained, noise, other)
    found = coarser._explains((exact + sizes * noise).float(), (exact + sizes * computed).float(), exact)
    assert found == is_explained


# ---------------------------------------------------------------------------------------------- what is miscounted


def miscounting(
    *, dims: slice = slice(0), values: slice = slice(0), weights: slice = slice(0), factor: float
) -> Callable[..., Tensor]:
    """Returns a kernel in which some dims of the scores, values or weights count `factor` times."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = query.double(), key.double(), value.double().clone()
        query, scale = query.clone(), 1.0 / math.sqrt(query.shape[-1])
        query[..., dims] *= factor
        exponentials = torch.exp(query @ key.mT * scale)
        exponentials[..., weights] *= factor
        value[..., values, :] *= factor
        return exponentials @ value / exponentials.sum(dim=-1, keepdim=True)

    return attention


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (miscounting(dims=slice(48, 64), factor=1.01), "scores in which dims from 48 on count 1.01 times"),
        (
            miscounting(dims=slice(16, 24), factor=0.9),
            "scores in which dims 16 to 23 count 0.901 times",
        ),  # to first order
        (miscounting(values=slice(64, 96), factor=0.5), "a sum in which the values of keys 64 to 95 count 0.5 times"),
        (
            miscounting(weights=slice(0, 16), factor=1.05),
            "a softmax in which the weights of keys up to 15 count 1.05 times",
        ),
        (
            miscounting(weights=slice(112, 120), factor=1.02),
            "a softmax in which the weights of keys from 112 on count 1.02 times",
        ),
    ],
    ids=["last dims", "dims", "values", "weights", "last weights"],
)
def test_what_counts_too_much_or_too_little_is_named(kernel: Callable[..., Tensor], words: str, dtype: Any) -> None:
    case = Case.parse(f"b1 h2/1 q60 k120 d64 {dtype}")
    given, claim = inputs(case), arithmetic_of_callables(dtype, "cpu")
    truth = judging.exact(case, claim, "cpu")
    answer: dict[Any, Tensor] = {"out": kernel(given.query, given.key, given.value).to(given.query.dtype)}
    judged = [judging.judge_tensor(answer["out"], "out", truth)]
    assert not judged[0].passed
    assert questions.answered(given.problem(case), answer, judged, truth, claim) == f"out has the errors of {words}"


def test_what_counts_too_much_in_some_rows_is_named() -> None:
    """The first tile counts 1.5 times where a later key has a much larger score, as with a rescaling that is wrong."""
    case = Case.parse("b1 h1 q300 k200 d64 float32 scale0.7")
    given, claim = inputs(case), arithmetic_of_callables("float32", "cpu")
    truth = judging.exact(case, claim, "cpu")
    scores = 0.7 * given.query.double() @ given.key.double().mT
    late = scores.amax(dim=-1) - scores[..., :64].amax(dim=-1) > 4.0
    weights = torch.softmax(scores, dim=-1)
    weights[..., :64] *= torch.where(late, 1.5, 1.0)[..., None]
    out = (weights / weights.sum(dim=-1, keepdim=True) @ given.value.double()).float()
    count = int(late.count_nonzero())
    assert coarser.ROWS <= count < 300
    judged = [judging.judge_tensor(out, "out", truth)]
    found = questions.answered(given.problem(case), {"out": out}, judged, truth, claim)
    told, _, rows = found.partition(", in ")
    assert told == "out has the errors of a softmax in which the weights of keys up to 63 count 1.5 times"
    assert count - 2 <= int(rows.removesuffix(" of 300 rows")) <= count  # the error of a row may be inside the bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_that_are_cut_off_are_named(dtype: Any) -> None:
    case = Case.parse(f"b1 h1 q80 k80 d64 {dtype}")
    given, claim = inputs(case), arithmetic_of_callables(dtype, "cpu")
    truth = judging.exact(case, claim, "cpu")
    weights = torch.softmax(given.query.float() @ given.key.float().mT / 8.0, dim=-1)
    near = weights.to(given.query.dtype)
    below = torch.nextafter(near, torch.zeros((), dtype=near.dtype))
    out = torch.where(near.float() > weights, below, near).float() @ given.value.float()
    judged = [judging.judge_tensor(out.to(given.query.dtype), "out", truth)]
    answer: dict[Any, Tensor] = {"out": out.to(given.query.dtype)}
    words = f"out has the errors of weights that are cut off to {dtype}, towards 0, instead of rounded"
    assert questions.answered(given.problem(case), answer, judged, truth, claim) == words


@pytest.mark.parametrize("line", ["q60 k120 d64 float32", "q3 k8 d16 float32", "q60 k120 d64 float16"])
def test_noise_is_no_miscount(line: str) -> None:
    """Noise, whether it is the same in all elements of a row or not, is not what some keys or dims contribute."""
    case = Case.parse(f"b1 h1 {line}")
    given, claim = inputs(case), arithmetic_of_callables(case.dtype, "cpu")
    truth = judging.exact(case, claim, "cpu")
    for shape in (truth.answer.out.shape, (*truth.answer.out.shape[:3], 1)):
        noise = 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        out = (truth.answer.out + noise).to(given.query.dtype)
        assert miscounted.errors_of(given.problem(case), out, truth.answer.out, truth.bound.out) == ""
