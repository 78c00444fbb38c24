"""Finds the other question that a wrong answer is right for: another scale, mask, layout, or order of the arguments.

If there is none, it looks for a coarser arithmetic that explains the errors (`coarser`).

Kernels and their callers often confuse two questions. The answer is then right, but for the wrong problem. The name of
that problem helps more than the place of an error. The first failure of a check (`subject`) and
`flashproof.judge` (`accuracy`) use this module.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashproof import coarser, judging, miscounted
from flashproof.calling import GRADIENTS, TENSORS, TensorName
from flashproof.impls.shapes import Bool, Int
from flashproof.impls.spec import Alignment, Arithmetic
from flashproof.judging import Exact, Judged
from flashproof.oracles.masks import Dropout, Mask, Which
from flashproof.oracles.naive import Attention
from flashproof.oracles.problem import Problem
from flashproof.reports import wording

Transform = Callable[[Tensor], Tensor]
_SAMPLE = 256  # queries that serve to estimate another scale
_STEPS = 6  # steps of that estimate
_LEFT = 0.5  # the share of an error that an explanation may leave; a wide bound holds much by chance
_FEW = 16  # elements; fewer of them may be multiples of the exact ones by chance
_LARGEST = 1e4  # the largest factor, and the inverse of the smallest one, of which a result may be a multiple
_ABOVE = 4.0  # an exact result that is this many times its bound is well above it
_CLOSE = 1e-4  # a fitted scale or factor that is closer than this to the right one explains nothing


@dataclass(frozen=True, eq=False)
class _Other:
    """Another question than the one asked: its problem, and how the tensors of the answer map to its tensors."""

    words: str
    problem: Problem
    names: Mapping[TensorName, TensorName] = field(default_factory=dict)  # other names of the answer's tensors
    view: Transform = lambda tensor: tensor  # transforms a tensor of the answer into the other question's form
    only: tuple[TensorName, ...] = TENSORS  # the tensors that can be compared
    limit: float = 1.0  # the largest rho


@dataclass(frozen=True, eq=False)
class _Shifted(Mask):
    """A causal mask in which each query sees what the query `shift` rows below it should see."""

    shift: int = 0

    def visible(
        self, batch: Which, head: Which, rows: Int[Tensor, " rows"], keys: int | None = None
    ) -> Bool[Tensor, "*heads rows keys"]:
        return super().visible(batch, head, rows + self.shift, keys)

    def last_seen(self, stop: int) -> int:
        return super().last_seen(stop + self.shift)


def answered(
    problem: Problem,
    answer: Mapping[TensorName, Tensor],
    judged: Sequence[Judged],
    truth: Exact,
    claim: Arithmetic,
) -> str:
    """The question that the wrong tensors of an answer are right for: "this is the answer without the causal mask".

    judged: the verdicts on tensors of the answer, which are on the problem's device. truth: the exact result and bound
    of these verdicts. Empty if nothing failed or nothing is found. With a single key, there is no other question. If
    every wrong tensor is 0 everywhere, this is said, and no question is tried.
    """
    wrong = [each for each in judged if not each.passed]
    failed = {name: answer[name] for name in TENSORS if any(each.tensor == name for each in wrong)}
    zeros = [name for name, tensor in failed.items() if not tensor.any()]
    if failed and len(zeros) == len(failed):
        return f"{_are(zeros)} 0 everywhere"
    if not failed or problem.key.shape[2] == 1 or not all(map(_has_no_nan, failed.values())):
        return ""
    # A question that is fitted to a wrong answer explains the answer only if it matches much better.
    limit = min(1.0, max(each.worst_rho for each in wrong) / 2.0)
    for other in _others(problem, answer, limit):
        met = _met(other, failed, truth, claim)
        if met and (_is_whole(met, failed, other) or not zeros):  # a part may be right for it just because it is 0
            return f"{'this is' if _is_whole(met, failed, other) else _are(met)} the answer {other.words}"
    if zeros:
        return f"{_are(zeros)} 0 everywhere"
    return _multiple(failed, truth, limit) or _coarser(problem, failed, truth) or _miscounted(problem, failed, truth)


def _has_no_nan(tensor: Tensor) -> bool:
    return not bool(tensor.isnan().any())


def _is_whole(met: list[TensorName], failed: Mapping[TensorName, Tensor], other: _Other) -> bool:
    """Whether all wrong tensors that can be compared match."""
    return all(name in met for name in failed if name in other.only)


def _are(names: Sequence[str]) -> str:
    """Names as the subject of a sentence: "out is", "out, dq and dk are"."""
    return f"{wording.listed(names)} {'are' if len(names) > 1 else 'is'}"


def _met(other: _Other, failed: Mapping[TensorName, Tensor], truth: Exact, claim: Arithmetic) -> list[TensorName]:
    """The wrong tensors that are inside the bounds of the other question. Empty if the first of them is outside.

    Also empty if zeros would be inside in place of each of these tensors: they are then nearly 0 for the other
    question, and do not tell it from others. With one head and another layout, dq and dk are 0.
    """
    asked = {name: _distance(tensor, getattr(truth.answer, name)) for name, tensor in failed.items()}
    names = [name for name in failed if name in other.only]
    # Most other questions already fail in the first head, which is faster to compute.
    for problem in (_of_one_key_head(other.problem), other.problem):
        if not names:
            return []
        exact = judging.exact_of(problem, claim, backward=any(name in GRADIENTS for name in names))
        met = []
        for name in names:
            there = other.names.get(name, name)
            tensor = _part(problem, there, other.view(failed[name]))
            judged = judging.judge_tensor(tensor, there, exact)
            is_near = (
                problem is not other.problem or _distance(tensor, getattr(exact.answer, there)) <= _LEFT * asked[name]
            )
            if judged.passed and judged.worst_rho <= other.limit and is_near:
                met.append(name)
            elif not met:
                return []
        names = met
    return names if any(_is_told_from_zero(failed[name], name, other, exact) for name in names) else []


def _is_told_from_zero(tensor: Tensor, name: TensorName, other: _Other, exact: Exact) -> bool:
    """Whether zeros in place of a tensor of the answer would be outside the bound of the other question."""
    zeros = torch.zeros_like(other.view(tensor))
    return judging.judge_tensor(zeros, other.names.get(name, name), exact).worst_rho > 1.0


def _distance(actual: Tensor, exact: Tensor) -> float:
    """The root mean square of a tensor's errors; inf if an error is not finite."""
    got = actual.to(exact.device, torch.float64)
    apart = torch.where(got == exact, 0.0, (got - exact).abs())
    return float(apart.square().mean().sqrt()) if bool(apart.isfinite().all()) else math.inf


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
    """The part of a tensor that belongs to the heads of a problem."""
    batch, heads = (problem.key if name in ("dk", "dv") else problem.query).shape[:2]
    return tensor[:batch, :heads]


def _others(problem: Problem, answer: Mapping[TensorName, Tensor], limit: float) -> Iterator[_Other]:
    """The questions that kernels and their callers confuse with the one that is asked."""
    mask, queries = problem.mask, problem.query.shape[2]
    alignments: dict[Alignment, str] = {"top_left": "top left", "bottom_right": "bottom right"}
    if mask.causal:
        yield _Other("without the causal mask", replace(problem, mask=replace(mask, causal=None)))
    for causal, words in alignments.items():
        if causal != mask.causal and (queries != mask.keys or not mask.causal):
            yield _Other(
                f"with the causal mask aligned at the {words}", replace(problem, mask=replace(mask, causal=causal))
            )
        if not mask.causal and queries == mask.keys:
            break  # the two alignments are one mask
    if mask.causal and mask.blocks is None:
        for shift, keys in ((1, "one key more"), (-1, "one key fewer")):
            words = f"with a causal mask that shows each query {keys}"
            if queries == 1:  # a lost key has the same answer
                words = f"with {keys} than the query sees"
            yield _Other(words, replace(problem, mask=_Shifted(queries, mask.keys, mask.causal, shift=shift)))
    if mask.blocks is not None:
        yield _Other("without the block mask", replace(problem, mask=replace(mask, blocks=None)))
    if problem.dropout.p:
        yield _Other("without dropout", replace(problem, dropout=Dropout()))
    yield from _other_scales(problem, answer, limit)
    if not torch.equal(problem.key, problem.value):
        swapped: dict[TensorName, TensorName] = {"dk": "dv", "dv": "dk"}
        yield _Other("with key and value exchanged", replace(problem, key=problem.value, value=problem.key), swapped)
    yield from _other_layouts(problem)
    yield from _other_heads(problem)


def _other_scales(problem: Problem, answer: Mapping[TensorName, Tensor], limit: float) -> Iterator[_Other]:
    dim = problem.query.shape[3]
    known = {"the default scale, 1/sqrt(dim)": 1.0 / math.sqrt(dim), "scale 1": 1.0, "scale 1/dim": 1.0 / dim}
    for words, scale in known.items():
        if not math.isclose(scale, problem.scale, rel_tol=1e-12):
            yield _Other(f"with {words}", replace(problem, scale=scale))
    found = _fitted_scale(problem, answer)
    if found is not None and not math.isclose(found, problem.scale, rel_tol=_CLOSE):
        apart, given = wording.told_apart(found, problem.scale)
        times = f" ({found / problem.scale:.4g} times as large)" if problem.scale else ""
        yield _Other(f"with a scale of {apart}, not {given}{times}", replace(problem, scale=found), limit=limit)


def _other_layouts(problem: Problem) -> Iterator[_Other]:
    """The questions for tensors that are read as [batch, length, heads, dim] by mistake."""
    (batch, heads, queries, dim), keys = problem.query.shape, problem.key.shape[2]
    if queries == 1 or problem.dropout.p or problem.mask.blocks is not None:
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
        seen = "it attends over heads" if heads > 1 else "with one head, each query sees only its own key"
        yield _Other(f"for tensors of the layout [batch, length, heads, dim]: {seen}", other, view=transposed)
    if heads not in (1, queries):
        yield _Other(
            "if its memory is read as [batch, length, heads, dim]",
            problem,
            view=lambda tensor: tensor.reshape(batch, queries, heads, dim).transpose(1, 2),
            only=("out", "dq"),
        )


def _other_heads(problem: Problem) -> Iterator[_Other]:
    """The questions in which heads are exchanged, or left out of a sum."""
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    forward: tuple[TensorName, ...] = ("out", "lse", "dq")  # dk and dv of these questions belong to other heads
    if 1 < problem.groups < heads:
        repeated = [tensor.repeat(1, problem.groups, 1, 1) for tensor in (problem.key, problem.value)]
        words = f"with query head h on key head h % {kv_heads}, not h // {problem.groups}"
        yield _Other(words, replace(problem, key=repeated[0], value=repeated[1]), only=forward)
    if problem.groups > 1:
        for which, place in (("first", 0), ("last", problem.groups - 1)):
            chosen = torch.arange(heads, device=problem.dout.device) % problem.groups == place
            head = f"the {which} query head of each key head"
            for words, kept in ((f"without {head}", ~chosen), (f"of {head} alone", chosen)):
                dout = problem.dout * kept[:, None, None]  # a head without an output gradient adds nothing
                yield _Other(words, replace(problem, dout=dout), only=("dk", "dv"))
    if kv_heads > 1:
        wrong: dict[str, Transform] = {
            "the head before": lambda tensor: tensor.roll(1, dims=1),
            "the next head": lambda tensor: tensor.roll(-1, dims=1),
            "the first head": lambda tensor: tensor[:, :1].expand(tensor.shape),
        }
        for whose, other in wrong.items():
            key, value = other(problem.key), other(problem.value)
            yield _Other(f"with the values of {whose}", replace(problem, value=value), only=forward)
            yield _Other(f"with the keys of {whose}", replace(problem, key=key), only=forward)
            yield _Other(f"with the keys and values of {whose}", replace(problem, key=key, value=value), only=forward)


def _fitted_scale(problem: Problem, answer: Mapping[TensorName, Tensor]) -> float | None:
    """The scale that fits some rows of an output best. None if there is no such scale, or no output.

    The method is Gauss-Newton (Nocedal and Wright, Numerical Optimization, 10.3), with
    d out / d scale = sum_j P_j (s_j - mean s) V_j, where s = Q K^T.
    """
    if "out" not in answer or not bool(answer["out"].isfinite().all()) or problem.dropout.p:
        return None
    rows = torch.arange(max(0, problem.query.shape[2] - _SAMPLE), problem.query.shape[2], device=problem.query.device)
    query, key, value = (tensor[0, 0].to(torch.float64) for tensor in (problem.query, problem.key, problem.value))
    hidden = ~problem.mask.visible(0, 0, rows)
    products, got, scale = query[rows] @ key.T, answer["out"][0, 0, rows].to(torch.float64), problem.scale
    for _ in range(_STEPS):
        weights = torch.softmax((scale * products).masked_fill(hidden, -math.inf), dim=1).nan_to_num(nan=0.0)
        slope = (weights * (products - (weights * products).sum(dim=1, keepdim=True))) @ value
        step = ((got - weights @ value) * slope).sum() / slope.square().sum()
        scale += float(step.clamp(-abs(scale) / 2.0, abs(scale) / 2.0))
        if not math.isfinite(scale):
            return None
    return scale


def _multiple(failed: Mapping[TensorName, Tensor], truth: Exact, limit: float) -> str:
    """The wrong tensors that are multiples of the exact ones, in words, such as an lse to base 2."""
    said: dict[str, list[str]] = {}
    for name, wrong in failed.items():
        exact = getattr(truth.answer, name)
        tensor = wrong.to(exact.device)
        kept = exact.isfinite() & tensor.isfinite()
        numbers, got = (part.to(torch.float64).masked_fill(~kept, 0.0) for part in (exact, tensor))
        factor = float((got * numbers).sum() / numbers.square().sum())
        is_sane = 1.0 / _LARGEST <= abs(factor) <= _LARGEST  # False for NaN
        if not is_sane or math.isclose(factor, 1.0, rel_tol=_CLOSE) or not _stands_out(numbers, name, truth):
            continue
        multiple = truth.times(factor)
        judged = judging.judge_tensor(tensor, name, multiple)
        is_near = _distance(tensor, getattr(multiple.answer, name)) <= _LEFT * _distance(tensor, exact)
        if int(kept.sum()) < _FEW or not is_near or not judged.passed or judged.worst_rho > limit:
            continue
        words = f"{wording.told_apart(factor, 1.0)[0]} times the exact result"
        if name == "lse" and math.isclose(factor, 1.0 / math.log(2.0), rel_tol=_CLOSE):
            words += ", which makes it a logarithm to base 2"
        said.setdefault(words, []).append(name)
    return "; ".join(f"{_are(names)} {words}" for words, names in said.items())


def _stands_out(exact: Tensor, name: TensorName, truth: Exact) -> bool:
    """Whether enough elements of an exact result are well above their bounds. A multiple of nearly 0 says nothing."""
    bound = getattr(truth.bound, name).to(exact.device, torch.float64)
    return int((exact.abs() > _ABOVE * bound).sum()) >= _FEW


def _coarser(problem: Problem, failed: Mapping[TensorName, Tensor], truth: Exact) -> str:
    """The coarser arithmetic whose errors wrong tensors have, in words."""
    one = _of_one_key_head(problem)
    exact = Attention(*(_part(one, name, getattr(truth.answer, name)) for name in TENSORS))
    names, words = coarser.errors_of(one, {name: _part(one, name, tensor) for name, tensor in failed.items()}, exact)
    return f"{wording.listed(names)} {'have' if len(names) > 1 else 'has'} the errors of {words}" if names else ""


def _miscounted(problem: Problem, failed: Mapping[TensorName, Tensor], truth: Exact) -> str:
    """The keys or dims that count too much or too little in a wrong output, in words."""
    if "out" not in failed:
        return ""
    one = _of_one_key_head(problem)
    out, exact, bound = (_part(one, "out", tensor) for tensor in (failed["out"], truth.answer.out, truth.bound.out))
    words = miscounted.errors_of(one, out, exact, bound)
    return f"out has the errors of {words}" if words else ""
