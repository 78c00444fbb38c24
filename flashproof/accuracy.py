"""The derived bound inside anyone's own test: `flashproof.judge` and `flashproof.assert_accurate`.

Both take what a kernel answered, and what it was asked in the words of torch's `scaled_dot_product_attention`. The
verdict is that of the suite (`judging`): the deterministic bound, in float32 on FMA units the probabilistic one too,
and the test for bias. Sources of the bound: `oracles/bounds.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from flashproof import judging
from flashproof.calling import GRADIENTS, TENSORS, TensorName
from flashproof.impls.call import Call, check_call
from flashproof.impls.shapes import Bool, Float, Float32, Float64
from flashproof.impls.spec import Alignment, Arithmetic, Device, Dtype, arithmetic_of_callables
from flashproof.judging import Exact, Judged
from flashproof.oracles.masks import Dropout, Mask
from flashproof.oracles.problem import Problem
from flashproof.oracles.verdict import Bias, Worst
from flashproof.reports import wording
from flashproof.reports.record import Certainty, Judgement

Claimed = Arithmetic | Callable[[Dtype, Device], Arithmetic]
Transform = Callable[[Tensor], Tensor]

_CERTIFIED_PRODUCTS = 2**18  # as of `judging`, but less: balls of more take longer than a test may
_SAMPLE = 256  # queries looked at together, and those from which another scale is estimated
_STEPS = 6  # of that estimate
_CLOSE = 1e-4  # a scale, or a factor, that is fitted to a wrong answer and nearer to the right one explains nothing


@dataclass(frozen=True, eq=False)
class Verdict:
    """The verdict on one tensor."""

    tensor: TensorName
    dtype: str
    rho: float  # the largest error over the deterministic bound; inf where nothing excuses it, as NaN
    rho_statistical: float | None  # over the probabilistic bound, where it gates: float32 on FMA units
    worst: Worst  # the element with the larger of the two: index, got, exact, error, bound
    bias: Bias | None  # None where it is not judged: of lse, of few rows or columns
    certainty: (
        Certainty  # "certified": inside balls; "sampled": float64, rows of it held against balls; "bounded": float64
    )
    passed: bool
    row: str  # what the row of the worst element looks like, where the tensor failed
    bound: Float64[Tensor, "*shape"] | None  # of every element, where it was asked for
    exact: Float64[Tensor, "*shape"] | None  # the exact result, where it was asked for
    _judgement: Judgement = field(repr=False)

    @property
    def worst_rho(self) -> float:
        """The larger of the two rhos: up to 1 passes."""
        return max(self.rho, self.rho_statistical or 0.0)

    def __str__(self) -> str:
        """The tensor's block: rho, error and bound, and where it failed the worst element, its row and the bias."""
        lines = wording.finding(self._judgement, self.tensor, self.dtype)
        return lines[0] if self.passed else "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Verdicts(Mapping[TensorName, Verdict]):
    """The verdicts on all tensors that were given: `verdicts["dq"].rho`. They come worst first."""

    by_tensor: Mapping[TensorName, Verdict]
    question: str  # which question the failed tensors do answer, where it was found; else ""

    @property
    def passed(self) -> bool:
        """Whether every tensor passed."""
        return all(each.passed for each in self.values())

    def __getitem__(self, tensor: TensorName) -> Verdict:
        if tensor not in self.by_tensor:
            raise KeyError(f"{tensor}: not judged; {', '.join(self.by_tensor)} were")
        return self.by_tensor[tensor]

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.by_tensor)

    def __len__(self) -> int:
        return len(self.by_tensor)

    def __str__(self) -> str:
        """A block for each tensor that failed, the worst first, and a line for each that passed."""
        failed = [str(each) for each in self.values() if not each.passed]
        passed = [str(each) for each in self.values() if each.passed]
        if failed and self.question:
            failed[0] += f"\n{self.question}"
        return "\n\n".join([*failed, "\n".join(passed)] if passed else failed)


def judge(
    out: Float[Tensor, "batch heads queries dim"] | None,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    lse: Float32[Tensor, "batch heads queries"] | None = None,
    dout: Float[Tensor, "batch heads queries dim"] | None = None,
    dq: Float[Tensor, "batch heads queries dim"] | None = None,
    dk: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    dv: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    arithmetic: Claimed | None = None,
    with_bounds: bool = False,
) -> Verdicts:
    """Judges what an attention kernel answered: is it as accurate as the arithmetic that it claims allows?

    Any subset of out, lse, dq, dk and dv is judged; None is not given. dq, dk and dv are the gradients of sum(out dout)
    for query, key and value. query, key and value are all float32, float16 or bfloat16 on one device, a CPU or a CUDA
    GPU, with dim up to 256; the results have their dtype, lse float32. No gradient is recorded, and nothing is changed.

    - is_causal, scale, enable_gqa: as of `torch.nn.functional.scaled_dot_product_attention`. causal_alignment:
      "top_left" (torch) lets query i see keys j <= i, "bottom_right" (flash-attn) keys j <= i + keys - queries.
    - block_mask: False hides a block of 128 queries by 128 keys. dropout_p, dropout_seed: the weights that Philox
      4x32-10 drops (`oracles.masks.Dropout`). A query that sees no key has output 0, lse -inf and no gradient.
    - arithmetic: the claim, or a function of dtype and device that makes it. None is FlashAttention's: scores and sums
      in float32 (IEEE, no TF32), weights cast to the input's dtype before the second product.
    - with_bounds: the verdicts hold the bound and the exact result of every element, in float64.

    The exact result is float64's, which has a bound of its own. On a CPU, small problems are certified in balls, and
    rows of long ones are held against balls; on a GPU, and between, only a row that fails is. Memory is linear in the
    length.

    Raises TypeError, ValueError or NotImplementedError for an argument that cannot be judged, naming it. A wrong
    number in a result, NaN too, is no error but a verdict that did not pass.
    """
    keywords = (is_causal, causal_alignment, scale, enable_gqa, dropout_p, dropout_seed, block_mask)
    call = check_call(query, key, value, *keywords)
    if query.device.type not in ("cpu", "cuda"):
        raise ValueError(f"query: device {query.device} is not taken; give tensors on the CPU or on a CUDA device")
    answer = _checked_answer({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, query, key, dout)
    claim = _claim(arithmetic, query)
    with torch.no_grad():
        problem = _problem(query, key, value, dout, call, causal_alignment, block_mask)
        return _judge(
            problem, {name: tensor.detach() for name, tensor in answer.items()}, claim, with_bounds=with_bounds
        )


def assert_accurate(
    out: Float[Tensor, "batch heads queries dim"] | None,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    lse: Float32[Tensor, "batch heads queries"] | None = None,
    dout: Float[Tensor, "batch heads queries dim"] | None = None,
    dq: Float[Tensor, "batch heads queries dim"] | None = None,
    dk: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    dv: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    arithmetic: Claimed | None = None,
) -> None:
    """Raises AssertionError if a kernel's answer is less accurate than the arithmetic that it claims allows.

    The arguments are those of `judge`. The message tells of every tensor that failed, the worst first: rho, error and
    bound, the worst element, what its row looks like, a bias, and which other question the answer is right for.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    verdicts = judge(
        out,
        query,
        key,
        value,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        scale=scale,
        enable_gqa=enable_gqa,
        block_mask=block_mask,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        lse=lse,
        dout=dout,
        dq=dq,
        dk=dk,
        dv=dv,
        arithmetic=arithmetic,
    )
    if not verdicts.passed:
        raise AssertionError(str(verdicts))


# ------------------------------------------------------------------------------------------------ what was given


def _checked_answer(
    given: dict[TensorName, Tensor | None], query: Tensor, key: Tensor, dout: Tensor | None
) -> dict[TensorName, Tensor]:
    """The tensors to judge. Raises TypeError or ValueError for what is no answer to these inputs, whatever it holds."""
    answer = {name: tensor for name, tensor in given.items() if tensor is not None}
    gradients = [name for name in GRADIENTS if name in answer]
    if gradients and dout is None:
        raise ValueError(f"dout: None was given with {gradients[0]}; give the output gradient that it was computed for")
    if dout is not None and not gradients:
        raise ValueError(
            "dq, dk, dv: None was given for all three, with dout; give a gradient, as query.grad is after a backward, "
            "or no dout"
        )
    if not answer:
        raise ValueError("out: None was given, and no lse, dq, dk or dv; give what the kernel answered")
    like = {"out": query, "dout": query, "lse": query[..., 0], "dq": query, "dk": key, "dv": key}
    tensors: dict[str, object] = {str(name): tensor for name, tensor in answer.items()}
    if dout is not None:
        tensors["dout"] = dout
    for name, tensor in tensors.items():
        shape, dtype = like[name].shape, torch.float32 if name == "lse" else query.dtype
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} is not a tensor; give one of shape {list(shape)}")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: layout {tensor.layout} is not taken; give a dense tensor, as to_dense() makes one"
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)} does not fit the inputs; "
                f"give {list(shape)}{_hint(name, tensor, shape)}"
            )
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} is not taken; give {dtype}{'' if name == 'lse' else ', as query has'}"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: device {tensor.device} differs from query's {query.device}; put all tensors on one device"
            )
    return answer


def _hint(name: str, tensor: Tensor, shape: torch.Size) -> str:
    """What may have been meant by another shape."""
    if tensor.ndim == 4 and tensor.transpose(1, 2).shape == shape:
        return f", that is {name}.transpose(1, 2)"
    if name == "lse" and tensor.ndim == 4 and tensor.shape[:3] == shape and tensor.shape[3] == 1:
        return ", that is lse.squeeze(-1)"
    return ""


def _claim(arithmetic: object, query: Tensor) -> Arithmetic:
    dtype, device = cast(Dtype, str(query.dtype).removeprefix("torch.")), cast(Device, query.device.type)
    if arithmetic is None:
        return arithmetic_of_callables(dtype, device)
    if isinstance(arithmetic, Arithmetic):
        return arithmetic
    if not callable(arithmetic) or isinstance(arithmetic, type):
        raise TypeError(
            f"arithmetic: {arithmetic!r} is no claim; "
            "give a flashproof.Arithmetic, or a function of dtype and device that returns one"
        )
    claim = arithmetic(dtype, device)
    if not isinstance(claim, Arithmetic):
        raise TypeError(
            f"arithmetic: returned {claim!r} for ({dtype!r}, {device!r}); it must return a flashproof.Arithmetic"
        )
    return claim


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor | None,
    call: Call,
    causal_alignment: Alignment,
    block_mask: Tensor | None,
) -> Problem:
    """What the oracles are asked. Raises ValueError for a number that is not finite where it matters."""
    problem = Problem(
        query=query.detach(),
        key=key.detach(),
        value=value.detach(),
        dout=query.detach().new_zeros(()).expand_as(query) if dout is None else dout.detach(),
        scale=call.scale,
        mask=Mask(call.queries, call.keys, causal_alignment if call.is_causal else None, block_mask),
        dropout=Dropout(call.dropout_p, call.dropout_seed),
    )
    named = {"query": problem.query, "key": problem.key, "value": problem.value, "dout": problem.dout}
    if bool(torch.stack([tensor.isfinite().all() for tensor in named.values()]).all()):
        return problem
    # NaN and infinities in a key that no query sees, and in a query that sees no key, change nothing: read as 0.
    sees, seen = _visibility(problem)
    used = {"query": sees, "key": seen, "value": seen, "dout": sees}
    for name, tensor in named.items():
        wrong = (~tensor.isfinite() & used[name][..., None]).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ValueError(
                f"{name}: holds {tensor[index].item()} at {list(index)}, where it is seen; "
                "give finite numbers, since the exact result is not defined for others"
            )
    cleaned: dict[str, Any] = {name: torch.where(used[name][..., None], tensor, 0.0) for name, tensor in named.items()}
    return replace(problem, **cleaned)


def _visibility(problem: Problem) -> tuple[Bool[Tensor, "batch heads queries"], Bool[Tensor, "batch kv_heads keys"]]:
    """Which queries see a key, and which keys are seen by a query."""
    device, (batches, heads, queries, _) = problem.query.device, problem.query.shape
    sees = torch.zeros((batches, heads, queries), dtype=torch.bool, device=device)
    seen = torch.zeros(problem.key.shape[:3], dtype=torch.bool, device=device)
    for batch in range(batches):
        for head in range(heads):
            for start in range(0, queries, _SAMPLE):
                rows = torch.arange(start, min(start + _SAMPLE, queries), device=device)
                visible = problem.mask.visible(batch, head, rows)
                sees[batch, head, rows] = visible.any(dim=1)
                seen[batch, head // problem.groups] |= visible.any(dim=0)
    return sees, seen


# ------------------------------------------------------------------------------------------------ verdicts


def _judge(problem: Problem, answer: dict[TensorName, Tensor], claim: Arithmetic, *, with_bounds: bool) -> Verdicts:
    backward = any(name in GRADIENTS for name in answer)
    truth = _exact(problem, claim, backward=backward)
    judged = [judging.judge_tensor(answer[name], name, truth) for name in TENSORS if name in answer]
    judged.sort(key=lambda each: (each.passed, -each.worst_rho))
    failed = [each for each in judged if not each.passed]
    if failed and truth.certainty != "certified":
        truth = _enclose_worst_row(problem, truth, failed, backward=backward)
        judged = [replace(each, certainty=truth.certainty) for each in judged]
    verdicts = {
        each.tensor: _verdict(each, answer[each.tensor], problem, truth, with_bounds=with_bounds) for each in judged
    }
    wrong = {each.tensor: answer[each.tensor] for each in failed}
    # What is fitted to a wrong answer explains it only if it meets it much better.
    limit = min(1.0, max((each.worst_rho for each in failed), default=0.0) / 2.0)
    return Verdicts(verdicts, _question(problem, wrong, truth, claim, limit))


def _exact(problem: Problem, claim: Arithmetic, *, backward: bool) -> Exact:
    """What the answer is judged by, with certainty as in the suite, but that a GPU does not wait for balls."""
    if problem.query.is_cuda:
        return judging.exact_of(problem, claim, backward=backward)
    if judging.is_certified(problem, _CERTIFIED_PRODUCTS):
        with torch.device("cpu"):  # whatever the caller's default is
            enclosed = judging.enclose(problem, backward=backward)
        return judging.exact_of(problem, claim, enclosed, backward=backward)
    truth = judging.exact_of(problem, claim, backward=backward)
    if problem.key.shape[2] < judging.SAMPLED_FROM:
        return truth
    head = problem.query.shape[1] - 1
    return _held_against_balls(problem, truth, 0, head, judging.sampled_rows(problem.query.shape[2]), backward=backward)


def _enclose_worst_row(problem: Problem, truth: Exact, failed: list[Judged], *, backward: bool) -> Exact:
    """Before a kernel is said to be wrong, the oracle is held against a ball where it is furthest off."""
    place = judging.worst_row(failed)
    return truth if place is None else _held_against_balls(problem, truth, *place[:2], [place[2]], backward=backward)


def _held_against_balls(
    problem: Problem, truth: Exact, batch: int, head: int, rows: list[int], *, backward: bool
) -> Exact:
    names: tuple[TensorName, ...] = ("out", "lse", "dq") if backward else ("out", "lse")
    with torch.device("cpu"):
        judging.check_rows(problem, truth.answer, truth.error, batch, head, rows, names)
    return replace(truth, certainty="sampled")


def _verdict(judged: Judged, actual: Tensor, problem: Problem, truth: Exact, *, with_bounds: bool) -> Verdict:
    dtype = str(actual.dtype).removeprefix("torch.")
    row = "" if judged.passed or judged.tensor in ("dk", "dv") else judging.describe(problem, judged.worst.index)
    judgement = Judgement(
        run="",
        implementation="",
        check="",
        case="",
        dtype=dtype,
        device=cast(Device, actual.device.type),
        status="passed" if judged.passed else "failed",
        **judged.figures(row),  # type: ignore[arg-type]
    )
    return Verdict(
        tensor=judged.tensor,
        dtype=dtype,
        rho=judged.rho.value,
        rho_statistical=judged.statistical.value if judged.statistical else None,
        worst=judged.worst,
        bias=judged.bias,
        certainty=judged.certainty,
        passed=judged.passed,
        row=row,
        bound=getattr(truth.bound, judged.tensor) if with_bounds else None,
        exact=getattr(truth.answer, judged.tensor) if with_bounds else None,
        _judgement=judgement,
    )


# ------------------------------------------------------------------------------------------------ another question


@dataclass(frozen=True, eq=False)
class _Other:
    """Another question than was asked: its problem, and where its answer stands in the tensors that were given."""

    words: str
    problem: Problem
    names: Mapping[TensorName, TensorName] = field(default_factory=dict)  # of a tensor that was given: what it is there
    view: Transform = lambda tensor: tensor  # of a tensor that was given: as it is there
    only: tuple[TensorName, ...] = TENSORS  # what can be compared
    limit: float = 1.0  # of rho


def _question(problem: Problem, failed: dict[TensorName, Tensor], truth: Exact, claim: Arithmetic, limit: float) -> str:
    """What wrong tensors are the right answer to; "" where nothing is found. Among one key, there is no question.

    limit: the largest rho of an answer to a question that is fitted.
    """
    if not failed or problem.key.shape[2] == 1:
        return ""
    finite = [tensor.isfinite().all() if name != "lse" else (~tensor.isnan()).all() for name, tensor in failed.items()]
    if not bool(torch.stack(finite).all()):
        return ""
    for other in _others(problem, failed, limit):
        if set(failed) <= set(other.only) and _answers(other, failed, claim):
            return f"this is the answer {other.words}"
    return _multiple(failed, truth, limit)


def _answers(other: _Other, failed: dict[TensorName, Tensor], claim: Arithmetic) -> bool:
    """Whether the wrong tensors are inside the bounds of the other question."""
    tensors = {other.names.get(name, name): other.view(tensor) for name, tensor in failed.items()}
    parts = [(_of_one_key_head(other.problem), {name: _part(other.problem, name, tensors[name]) for name in tensors})]
    parts += [(other.problem, tensors)] * (other.problem.key.shape[:2] != (1, 1))
    for problem, answer in parts:  # most other questions are not met by one head already, which is sooner known
        truth = judging.exact_of(problem, claim, backward=any(name in GRADIENTS for name in answer))
        for name, tensor in answer.items():
            judged = judging.judge_tensor(tensor, name, truth)
            if not judged.passed or judged.worst_rho > other.limit:
                return False
    return True


def _of_one_key_head(problem: Problem) -> Problem:
    """The first key head of the first batch, with the query heads that share it."""
    blocks = problem.mask.blocks
    return replace(
        problem,
        query=problem.query[:1, : problem.groups],
        key=problem.key[:1, :1],
        value=problem.value[:1, :1],
        dout=problem.dout[:1, : problem.groups],
        mask=replace(problem.mask, blocks=None if blocks is None else blocks[:1, : problem.groups]),
    )


def _part(problem: Problem, name: TensorName, tensor: Tensor) -> Tensor:
    """What of a tensor belongs to that head."""
    return tensor[:1, : 1 if name in ("dk", "dv") else problem.groups]


def _others(problem: Problem, failed: dict[TensorName, Tensor], limit: float) -> Iterator[_Other]:
    """The questions that kernels and their callers take for the one that is asked."""
    mask, (_, heads, queries, _) = problem.mask, problem.query.shape
    alignments: dict[Alignment, str] = {"top_left": "top left", "bottom_right": "bottom right"}
    if mask.causal:
        yield _Other("without the causal mask", replace(problem, mask=replace(mask, causal=None)))
    for causal, words in alignments.items():
        if causal != mask.causal and (queries != mask.keys or not mask.causal):
            yield _Other(
                f"with the causal mask aligned at the {words}", replace(problem, mask=replace(mask, causal=causal))
            )
        if not mask.causal and queries == mask.keys:
            break  # the two are one mask
    if mask.blocks is not None:
        yield _Other("without the block mask", replace(problem, mask=replace(mask, blocks=None)))
    if problem.dropout.p:
        yield _Other("without dropout", replace(problem, dropout=Dropout()))
    yield from _other_scales(problem, failed, limit)
    if not torch.equal(problem.key, problem.value):
        swapped: dict[TensorName, TensorName] = {"dk": "dv", "dv": "dk"}
        yield _Other("with key and value exchanged", replace(problem, key=problem.value, value=problem.key), swapped)
    yield from _other_layouts(problem)
    if 1 < problem.groups < heads:
        repeated = [tensor.repeat(1, problem.groups, 1, 1) for tensor in (problem.key, problem.value)]
        words = f"with query head h on key head h % {heads // problem.groups}, not h // {problem.groups}"
        yield _Other(words, replace(problem, key=repeated[0], value=repeated[1]), only=("out", "lse", "dq"))


def _other_scales(problem: Problem, failed: dict[TensorName, Tensor], limit: float) -> Iterator[_Other]:
    dim = problem.query.shape[3]
    known = {"the default scale, 1/sqrt(dim)": 1.0 / math.sqrt(dim), "scale 1": 1.0, "scale 1/dim": 1.0 / dim}
    for words, scale in known.items():
        if not math.isclose(scale, problem.scale, rel_tol=1e-12):
            yield _Other(f"with {words}", replace(problem, scale=scale))
    found = _fitted_scale(problem, failed)
    if found is not None and not math.isclose(found, problem.scale, rel_tol=_CLOSE):
        apart, given = wording.told_apart(found, problem.scale)
        yield _Other(f"with a scale of {apart}, not {given}", replace(problem, scale=found), limit=limit)


def _other_layouts(problem: Problem) -> Iterator[_Other]:
    """What lies in memory as [batch, length, heads, dim], and is not."""
    (batch, heads, queries, dim), keys = problem.query.shape, problem.key.shape[2]
    if heads == 1 or queries == 1 or problem.dropout.p or problem.mask.blocks is not None:
        return

    def transposed(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2)

    if queries == keys:
        other = Problem(
            query=transposed(problem.query),
            key=transposed(problem.key),
            value=transposed(problem.value),
            dout=transposed(problem.dout),
            scale=problem.scale,
            mask=Mask(heads, problem.key.shape[1], problem.mask.causal),
        )
        yield _Other("over [batch, length, heads, dim]: heads and length are exchanged", other, view=transposed)
    if heads != queries:
        yield _Other(
            "in memory of the layout [batch, length, heads, dim], read as [batch, heads, length, dim]",
            problem,
            view=lambda tensor: tensor.reshape(batch, queries, heads, dim).transpose(1, 2),
            only=("out", "dq"),
        )


def _fitted_scale(problem: Problem, failed: dict[TensorName, Tensor]) -> float | None:
    """The scale at which some rows of a wrong output are best met; None where there is none, or no output.

    Gauss and Newton's method (Nocedal and Wright, Numerical Optimization, 10.3), by
    d out / d scale = sum_j P_j (s_j - mean s) V_j, with s = Q K^T.
    """
    if "out" not in failed or problem.dropout.p:
        return None
    rows = torch.arange(max(0, problem.query.shape[2] - _SAMPLE), problem.query.shape[2], device=problem.query.device)
    query, key, value = (tensor[0, 0].to(torch.float64) for tensor in (problem.query, problem.key, problem.value))
    hidden = ~problem.mask.visible(0, 0, rows)
    products, got, scale = query[rows] @ key.T, failed["out"][0, 0, rows].to(torch.float64), problem.scale
    for _ in range(_STEPS):
        weights = torch.softmax((scale * products).masked_fill(hidden, -math.inf), dim=1).nan_to_num(nan=0.0)
        slope = (weights * (products - (weights * products).sum(dim=1, keepdim=True))) @ value
        step = ((got - weights @ value) * slope).sum() / slope.square().sum()
        scale += float(step.clamp(-abs(scale) / 2.0, abs(scale) / 2.0))
        if not math.isfinite(scale):
            return None
    return scale


def _multiple(failed: dict[TensorName, Tensor], truth: Exact, limit: float) -> str:
    """Whether wrong tensors are multiples of the exact ones, as an lse to base 2, or a gradient without the scale."""
    said = []
    for name, tensor in failed.items():
        exact = getattr(truth.answer, name)
        kept = exact.isfinite() & tensor.isfinite()
        numbers, got = (part.to(torch.float64).masked_fill(~kept, 0.0) for part in (exact, tensor))
        factor = float((got * numbers).sum() / numbers.square().sum())
        if not math.isfinite(factor) or not factor or math.isclose(factor, 1.0, rel_tol=_CLOSE):
            return ""
        judged = judging.judge_tensor(tensor, name, truth.times(factor))
        if not judged.passed or judged.worst_rho > limit:
            return ""
        is_base_2 = name == "lse" and math.isclose(factor, 1.0 / math.log(2.0), rel_tol=_CLOSE)
        words = wording.told_apart(factor, 1.0)[0]
        said.append(
            f"{name} is {words} times the exact result" + (", as a logarithm to base 2 is" if is_base_2 else "")
        )
    return "; ".join(said)
