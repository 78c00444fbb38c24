"""Judges an answer: the exact result with its certainty, the bound of the claim, rho and bias for every tensor."""

import hashlib
import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashproof.calling import Answer, TensorName
from flashproof.cases import Case, Inputs, inputs
from flashproof.impls.spec import Arithmetic
from flashproof.oracles import ball, bounds, verdict
from flashproof.oracles.naive import Attention
from flashproof.oracles.problem import Problem
from flashproof.reports.record import Certainty

CERTIFIED_PRODUCTS = 2**21  # batch x heads x queries x keys x dim up to which every element is enclosed in a ball
SCORES_FOR_A_GPU = (
    2**21
)  # batch x heads x queries x keys from which the float64 oracle is computed on the kernel's own device
SAMPLED_FROM = 1024  # keys from which rows are sampled and enclosed beside the float64 oracle


@dataclass(frozen=True, eq=False)
class Exact:
    """The exact result of a case, what it may be off by, and the bound of one claim around it."""

    answer: Attention
    error: Attention  # of the oracle itself
    bound: Attention
    statistical: Attention  # the probabilistic bound without 16-bit casts: the unit, or a part, of the bias
    gates: bool  # whether the probabilistic bound gates too
    casts: list[Attention]  # what roundings to nearest, of weights and of the output in delta, do here
    certainty: Certainty


@dataclass(frozen=True)
class Judged:
    """The verdict on one tensor."""

    tensor: TensorName
    rho: verdict.Rho
    statistical: verdict.Rho | None
    bias: verdict.Bias | None
    certainty: Certainty

    @property
    def worst_rho(self) -> float:
        """The larger of the two rhos."""
        both = [self.rho.value] + ([self.statistical.value] if self.statistical else [])
        return math.nan if any(math.isnan(value) for value in both) else max(both)

    @property
    def passed(self) -> bool:
        """Inside the bound, in every form that gates, and not leaning."""
        return self.worst_rho <= 1.0 and not (self.bias and self.bias.leans)


def exact(case: Case, arithmetic: Arithmetic, device: str) -> Exact:
    """What a case is judged by. Remembered, since every implementation and several checks ask for the same; of the long ones, which are large, only a few."""
    if case.batch * case.heads * case.queries * case.keys >= SCORES_FOR_A_GPU:
        return _exact_long(case, arithmetic, device)
    return _exact_short(case, arithmetic, "cpu")


def _exact(case: Case, arithmetic: Arithmetic, device: str) -> Exact:
    """The exact result of a case and the bound of a claim: certified when small, float64 with its own bound otherwise, sampled rows when long.

    The result is on the CPU, whatever the device: that is where they are compared. Only long sequences are computed on a GPU, since many processes share it
    and a small step waits longer for its turn than it takes.
    """
    problem = inputs(case, device).problem(case)
    if case.batch * case.heads * case.queries * case.keys * case.dim <= CERTIFIED_PRODUCTS:
        return _bounded(problem, arithmetic, _enclosed(case))
    bounded = _bounded(problem, arithmetic)
    if case.keys >= SAMPLED_FROM:
        _check_sampled_rows(case, problem, bounded)
        return replace(bounded, certainty="sampled")
    return bounded


def _bounded(problem: Problem, arithmetic: Arithmetic, enclosed: tuple[Attention, Attention] | None = None) -> Exact:
    """The bound around the enclosed result, or around that of float64, which has a bound of its own, whatever the problem."""
    claim = bounds.Claim(arithmetic)
    evaluation = bounds.evaluate(problem, [claim, bounds.without_casts(claim), *([] if enclosed else [bounds.FLOAT64])])
    bound, statistical, *own = (_on_cpu(each) for each in evaluation.bounds)
    answer, error = enclosed or (_on_cpu(evaluation.answer), own[0])
    casts = [_on_cpu(each) for each in evaluation.casts_of(arithmetic)]
    return Exact(
        answer,
        error,
        bound,
        statistical,
        bounds.has_statistical_gate(problem, arithmetic),
        casts,
        "certified" if enclosed else "bounded",
    )


_exact_short = lru_cache(maxsize=256)(_exact)
_exact_long = lru_cache(maxsize=4)(_exact)


_shared: Path | None = None


def share(folder: Path) -> None:
    """Names the folder in which the processes of a run leave one another the enclosures, which take most of an oracle's time."""
    global _shared  # noqa: PLW0603
    _shared = folder


_asked: set[str] = set()


def _is_first(question: str) -> bool:
    """Whether no process of this run has asked this before. Each computes the same float64 answer, so one of them holds it against a ball."""
    if question in _asked:
        return False
    _asked.add(question)
    if _shared is None or not _shared.is_dir():
        return True
    try:
        (_shared / f"{hashlib.sha256(question.encode()).hexdigest()}.asked").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@lru_cache(maxsize=256)
def _enclosed(case: Case) -> tuple[Attention, Attention]:
    """The exact result and what it may be off by, as one process of the run has enclosed them."""
    path = _shared and _shared / f"{hashlib.sha256(str(case).encode()).hexdigest()}.pt"
    if path and path.exists():
        tensors = torch.load(path, weights_only=True)
        return Attention(*tensors[:5]), Attention(*tensors[5:])
    enclosure = ball.attention(inputs(case).problem(case))
    balls = [getattr(enclosure, name) for name in ("out", "lse", "dq", "dk", "dv")]
    mid, radius = [each.mid for each in balls], [each.radius for each in balls]
    if path and path.parent.is_dir():
        half = path.with_suffix(f".{os.getpid()}")
        torch.save(mid + radius, half)
        half.replace(path)  # whole or not at all
    return Attention(*mid), Attention(*radius)


def _on_cpu(answer: Attention) -> Attention:
    return Attention(*(tensor.cpu() for tensor in (answer.out, answer.lse, answer.dq, answer.dk, answer.dv)))


def _check_sampled_rows(case: Case, problem: Problem, truth: Exact) -> None:
    """The float64 oracle, held against balls at the rows where tiles begin and end. A disagreement is a fault of the suite and ends the run."""
    length = case.queries
    rows = sorted({row for row in (0, 1, 63, 64, length // 2, length - 2, length - 1) if 0 <= row < length})
    if _is_first(f"{case} on {problem.query.device.type}"):
        check_rows(problem, truth.answer, truth.error, 0, case.heads - 1, rows)


def check_rows(problem: Problem, answer: Attention, error: Attention, batch: int, head: int, rows: list[int]) -> None:
    """Raises AssertionError if a row of the float64 oracle lies outside its own bound around the ball."""
    enclosed = ball.rows(problem, batch, head, torch.tensor(rows))
    for name in ("out", "lse", "dq"):
        sure = getattr(enclosed, name)
        ours, allowed = getattr(answer, name)[batch, head, rows].cpu(), getattr(error, name)[batch, head, rows].cpu()
        apart = torch.where(ours == sure.mid, 0.0, (ours - sure.mid).abs() - sure.radius)
        if not bool((apart <= allowed).all()):
            raise AssertionError(
                f"the float64 oracle is outside its own bound in {name}, batch {batch}, head {head}, rows {rows}"
            )


def judge(
    answer: Answer, case: Case, arithmetic: Arithmetic, names: tuple[TensorName, ...], given: Inputs | None = None
) -> list[Judged]:
    """The verdict on each of the named tensors that the answer has. `given`: the tensors that it answered, where they are not the case's own."""
    truth = _bounded(given.problem(case), arithmetic) if given else exact(case, arithmetic, answer["out"].device.type)
    verdicts = [_judge_tensor(answer[name].cpu(), name, truth) for name in names if name in answer]
    if truth.certainty == "sampled":
        _check_worst_row(verdicts, case, truth)
    return verdicts


def _check_worst_row(verdicts: list[Judged], case: Case, truth: Exact) -> None:
    """Holds the oracle against balls at the row where the kernel is furthest off. Gradients of keys have no rows of their own to enclose."""
    by_rows = [judged for judged in verdicts if judged.tensor in ("out", "lse", "dq")]
    if by_rows:
        batch, head, row = place = max(by_rows, key=lambda judged: judged.rho.value).rho.worst.index[:3]
        if _is_first(f"{case} at {place}"):
            check_rows(inputs(case).problem(case), truth.answer, truth.error, batch, head, [row])


def _judge_tensor(actual: Tensor, name: TensorName, truth: Exact) -> Judged:
    true, error, bound, statistical = (
        getattr(part, name) for part in (truth.answer, truth.error, truth.bound, truth.statistical)
    )
    return Judged(
        tensor=name,
        rho=verdict.rho(actual, true, bound, error),
        statistical=verdict.rho(actual, true, statistical, error) if truth.gates else None,
        bias=verdict.bias(actual, true, statistical, [getattr(cast, name) for cast in truth.casts])
        if name != "lse"
        else None,
        certainty=truth.certainty,
    )


def describe_row(case: Case, device: str, index: tuple[int, ...], tensor: TensorName) -> str:
    """In words, what the row of an element of out, lse or dq looks like: how many keys it sees and how much its heaviest holds."""
    if tensor in ("dk", "dv"):
        return ""
    problem = inputs(case, device).problem(case)
    batch, head, row = index[:3]
    query = problem.query[batch, head, row].to(torch.float64)
    key = problem.key[batch, head // problem.groups].to(torch.float64)
    visible = problem.mask.visible(batch, head, torch.tensor([row], device=query.device))[0]
    count = int(visible.sum())
    if count == 0:
        return "the row sees no key"
    weights = torch.softmax((problem.scale * (key @ query)).masked_fill(~visible, -math.inf), dim=0)
    return f"one of {count} visible keys holds {100.0 * float(weights.max()):.3g} % of the row"
