"""Judges an answer: the exact result with its certainty, the bound of the claim, rho and bias for every tensor."""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from flashproof.calling import GRADIENTS, TENSORS, Answer, TensorName
from flashproof.cases import OF_DOUT, Case
from flashproof.impls.spec import Arithmetic
from flashproof.oracles import ball, bounds, naive, stagnation, verdict
from flashproof.oracles.naive import Attention
from flashproof.oracles.problem import Problem
from flashproof.reports.record import FIRST_POWER, LAST_POWER, Certainty, Element, Elements, Grid, figure
from flashproof.tensors import Inputs, inputs

CERTIFIED_PRODUCTS = 2**15  # up to this batch x heads x queries x keys x dim, every element is enclosed in a ball
FEWER_PRODUCTS = 2**12  # the same, in a thorough run
CERTIFIED_HEADS = 64  # the same, up to this batch x heads, because balls take one head after another
# From this number of scores (batch x heads x queries x keys), the kernel's own device computes the float64 oracle.
SCORES_FOR_A_GPU = 2**21
BY_ROWS: tuple[TensorName, ...] = ("out", "lse", "dq")  # tensors with a row for each query
SAMPLED_FROM = 2048  # from this number of keys, some rows are also enclosed, beside the float64 oracle


@dataclass(frozen=True, eq=False)
class Exact:
    """The exact result of a problem, the error of the oracle, and the bound of one claim."""

    answer: Attention
    error: Attention  # the error of the oracle itself
    bound: Attention
    gates: bool  # whether the probabilistic bound decides too
    even: tuple[TensorName, ...]  # the tensors in which a correct kernel makes errors of both signs: a bias is a fault
    certainty: Certainty
    # Few verdicts need these, so they are computed on demand. In float32, most need the first.
    statistical: Callable[[], Attention]  # the probabilistic bound without 16-bit casts
    casts: Callable[[], list[Attention]]  # what roundings to nearest do, of the weights and of the output in delta
    lost: Callable[[], Attention]  # the small terms that sums may lose; added to the probabilistic bound
    lost_at: Callable[[TensorName, tuple[int, ...]], float]  # the same for one element, which takes less time

    def on_cpu(self) -> "Exact":
        """The same, moved to the CPU."""
        return replace(
            self,
            answer=_on_cpu(self.answer),
            error=_on_cpu(self.error),
            bound=_on_cpu(self.bound),
            statistical=lambda: _on_cpu(self.statistical()),
            casts=lambda: [_on_cpu(each) for each in self.casts()],
            lost=lambda: _on_cpu(self.lost()),
        )

    def times(self, factor: float) -> "Exact":
        """The same for results that are a multiple of these."""

        def multiple(answer: Attention) -> Attention:
            return _each(answer, lambda tensor: factor * tensor)

        def larger(answer: Attention) -> Attention:
            return _each(answer, lambda tensor: abs(factor) * tensor)

        return replace(
            self,
            answer=multiple(self.answer),
            error=larger(self.error),
            bound=larger(self.bound),
            statistical=lambda: larger(self.statistical()),
            casts=lambda: [multiple(each) for each in self.casts()],
            lost=lambda: larger(self.lost()),
            lost_at=lambda name, index: abs(factor) * self.lost_at(name, index),
        )


@dataclass(frozen=True)
class Judged:
    """The verdict on one tensor."""

    tensor: TensorName
    rho: verdict.Rho
    statistical: verdict.Rho | None
    bias: verdict.Bias | None
    ulps: float | None  # the largest error, in ulps (`verdict.largest_ulps`); None for the LSE
    certainty: Certainty
    grid: Grid | None = None  # where the errors lie, if rho is above 1

    @property
    def worst_rho(self) -> float:
        """The larger of the two rhos."""
        both = [self.rho.value] + ([self.statistical.value] if self.statistical else [])
        return math.nan if any(math.isnan(value) for value in both) else max(both)

    @property
    def passed(self) -> bool:
        """Whether the tensor is inside every bound that decides, and without bias."""
        return self.worst_rho <= 1.0 and not (self.bias and self.bias.leans)

    @property
    def worst(self) -> verdict.Worst:
        """The worst element by the bound with the larger rho."""
        is_statistical = self.statistical is not None and not self.rho.value >= self.statistical.value
        return self.statistical.worst if self.statistical is not None and is_statistical else self.rho.worst

    def figures(self, note: str = "") -> dict[str, object]:
        """The fields of a record that state this verdict. note: the properties of the row of the worst element."""
        worst = self.worst
        return {
            "tensor": self.tensor,
            "rho": figure(self.rho.value),
            "rho_statistical": figure(self.statistical.value) if self.statistical else None,
            "bias": self.bias.value if self.bias else None,
            "bias_error": self.bias.standard_error if self.bias else None,
            "bias_allowance": self.bias.allowance if self.bias else None,
            "ulps": None if self.ulps is None else figure(self.ulps),
            "certainty": self.certainty,
            "grid": self.grid,
            "worst": Element(
                index=worst.index,
                got=figure(worst.got),
                exact=figure(worst.exact),
                error=figure(worst.error),
                bound=figure(worst.bound),
                note=note,
            ),
        }


def exact(case: Case, arithmetic: Arithmetic, device: str) -> Exact:
    """The exact result and bound that judge a case. They are cached, since many implementations and checks use them."""
    is_long = _scores(case) >= SCORES_FOR_A_GPU
    about = (_of_numbers(case), arithmetic, device if is_long else "cpu")
    found = _remembered.pop(about, None) or _exact(*about)
    _remembered[about] = found  # the latest is last
    while len(_remembered) > 1 and sum(case.numbers for case, *_ in _remembered) > REMEMBERED:
        del _remembered[next(iter(_remembered))]
    return found


REMEMBERED = 2**22  # elements of all cases whose exact results are cached, at about 50 bytes each
_remembered: dict[tuple[Case, Arithmetic, str], "Exact"] = {}


def _of_numbers(case: Case) -> Case:
    """The representative of all cases with the same exact result: a plain or forward call, in plain memory."""
    expanding = ("expanded", *OF_DOUT)
    layouts = tuple(layout if layout in expanding else "contiguous" for layout in case.layouts)
    return replace(
        case,
        call="plain" if case.backward else "forward",
        wanted="all",
        lse=True,
        spelled=False,
        number="float",
        layouts=layouts,  # type: ignore[arg-type]
        offsets=Case().offsets,
        sharing=case.sharing if case.sharing.startswith("one-") else "apart",
    )


def _exact(case: Case, arithmetic: Arithmetic, device: str) -> Exact:
    """The exact result of a case and the bound of a claim.

    Small problems are certified. For other problems, float64 computes the result, with its own bound, and in long ones
    some rows are enclosed. The result is always on the CPU, where answers are compared. Only long sequences are
    computed on a GPU: many processes share the GPU, and a small step would wait longer than it runs.
    """
    problem, known = _prepared(case, device)
    enclosed = _enclosed(case) if is_certified(problem) else None
    found = exact_of(problem, arithmetic, enclosed, backward=case.backward, known=known).on_cpu()
    return found if enclosed or case.keys < SAMPLED_FROM else replace(found, certainty="sampled")


PREPARED = 2**19  # scores of all problems whose `bounds.Shared` is cached; one problem has at most an eighth of them
_prepared_problems: dict[tuple[Case, str], tuple[Problem, bounds.Shared]] = {}


def _prepared(case: Case, device: str) -> tuple[Problem, bounds.Shared | None]:
    """The problem of a case. If it is small, also what the bounds of all claims on it share.

    The cache helps because implementations with the same cases and different claims are verified one after another.
    """
    found = _prepared_problems.pop((case, device), None)
    if found is None:
        problem = inputs(case, device).problem(case)
        if _scores(case) > PREPARED // 8:
            return problem, None
        found = problem, bounds.shared(problem, backward=case.backward)
    _prepared_problems[case, device] = found  # the latest is last
    while sum(_scores(case) for case, _ in _prepared_problems) > PREPARED:
        del _prepared_problems[next(iter(_prepared_problems))]
    return found


def _scores(case: Case) -> int:
    return case.batch * case.heads * case.queries * case.keys


_certified = CERTIFIED_PRODUCTS


def certify_fewer() -> None:
    """Encloses only the smallest problems from now on.

    A thorough run has many thousands of small problems, and their balls take five times as long as everything else.
    """
    global _certified  # noqa: PLW0603
    _certified = FEWER_PRODUCTS


def is_certified(problem: Problem) -> bool:
    """Whether a problem is small enough to enclose every element in a ball."""
    batch, heads, queries, dim = problem.query.shape
    return batch * heads <= CERTIFIED_HEADS and batch * heads * queries * problem.key.shape[2] * dim <= _certified


def exact_of(
    problem: Problem,
    arithmetic: Arithmetic,
    enclosed: tuple[Attention, Attention] | None = None,
    *,
    backward: bool = True,
    known: bounds.Shared | None = None,
) -> Exact:
    """The bound of a claim around the enclosed result, or around the float64 result, which has a bound of its own.

    The result stays on the problem's device. enclosed: the exact result and its radii, on the CPU. backward: whether
    gradients are asked for; otherwise they are 0. known: as in `bounds.evaluate`.
    """
    claim = bounds.Claim(arithmetic)
    of_chance = bounds.without_casts(claim)
    is_needed = problem.query.dtype == torch.float32  # in 16 bit, only a bias may need it
    claims = [claim, of_chance] if is_needed else [claim]
    share = None if enclosed else bounds.share(problem, bounds.FLOAT64, claims[-1])
    if not enclosed and share is None:
        claims.append(bounds.FLOAT64)
    evaluation = bounds.evaluate(problem, claims, backward=backward, known=known)
    bound, own = evaluation.bounds[0], evaluation.bounds[-1]

    def statistical() -> Attention:
        if is_needed:
            return evaluation.bounds[1]
        return bounds.evaluate(problem, [of_chance], backward=backward).bounds[0]

    if enclosed:
        device = problem.query.device
        answer, error = (_each(part, lambda tensor: tensor.to(device)) for part in enclosed)
    else:
        answer = evaluation.answer
        error = own if share is None else _each(own, lambda tensor: share * tensor)
    return Exact(
        answer,
        error,
        bound,
        bounds.has_statistical_gate(problem, arithmetic),
        _even(problem, arithmetic),
        "certified" if enclosed else "bounded",
        cache(statistical),
        cache(lambda: bounds.casts(problem, arithmetic, backward=backward)),
        cache(lambda: stagnation.lost(problem, backward=backward)),
        partial(stagnation.lost_at, problem),
    )


def _even(problem: Problem, arithmetic: Arithmetic) -> tuple[TensorName, ...]:
    """The tensors in which a correct kernel makes errors of both signs.

    If products are rounded to 16 bit, all scores near 10000 may be rounded in one direction. Numbers in e4m3 are so
    coarse that the roundings of few weights or values lean by many units of a 16-bit result. A running sum in 16 bit
    may round in one direction again and again, if its terms are nearly equal. So may a sum in float32, if its terms are
    equal; the rounding of a result to 16 bit hides this error. Equal weights that are cast to 16 bit have the same
    error. Its size depends on the number by which a kernel divides them before the cast, which may be the sum of a part
    of the keys.
    """
    if arithmetic.products in ("input", "e4m3"):
        return ()
    if problem.query.dtype != torch.float32:
        casts_shares = arithmetic.weights == "input" and arithmetic.normaliser == "lse"
        if casts_shares and bounds.has_equal_weights(problem):
            return ()
        return ("out",) if arithmetic.gradients == "input" else ("out", *GRADIENTS)
    over_keys, over_queries = bounds.sums_equal_terms(problem)
    of_keys: tuple[TensorName, ...] = () if over_keys else ("out", "dq")
    return of_keys if over_queries else (*of_keys, "dk", "dv")


_shared: Path | None = None


def share(folder: Path) -> None:
    """Sets the folder through which the processes of a run share enclosures.

    The enclosures take most of an oracle's time.
    """
    global _shared  # noqa: PLW0603
    _shared = folder


_asked: set[str] = set()


def _is_first(question: str) -> bool:
    """Whether no process of this run has asked this question before.

    All processes compute the same float64 result, so only one of them compares it with a ball.
    """
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


@lru_cache(maxsize=64)
def _enclosed(case: Case) -> tuple[Attention, Attention]:
    """The exact result and its radii. The processes of a run share one enclosure."""
    path = _shared and _shared / f"{hashlib.sha256(str(case).encode()).hexdigest()}.pt"
    if path and path.exists():
        tensors = torch.load(path, weights_only=True)
        return Attention(*tensors[:5]), Attention(*tensors[5:])
    mid, radius = enclose(inputs(case).problem(case), backward=case.backward)
    if path and path.parent.is_dir():
        half = path.with_suffix(f".{os.getpid()}")
        torch.save([getattr(part, name) for part in (mid, radius) for name in TENSORS], half)
        half.replace(path)  # another process reads the whole file or none
    return mid, radius


def enclose(problem: Problem, *, backward: bool = True) -> tuple[Attention, Attention]:
    """The exact result, enclosed in balls, and the radii, on the CPU. backward: as in `exact_of`."""
    enclosure = ball.attention(problem) if backward else ball.forward(problem)
    nothing = naive.empty_answer(problem)
    balls = [getattr(enclosure, name, ball.Ball(*[getattr(nothing, name).cpu()] * 2)) for name in TENSORS]
    return Attention(*(each.mid for each in balls)), Attention(*(each.radius for each in balls))


def _each(answer: Attention, change: Callable[[Tensor], Tensor]) -> Attention:
    return Attention(*(change(getattr(answer, name)) for name in TENSORS))


def _on_cpu(answer: Attention) -> Attention:
    return _each(answer, Tensor.cpu)


def sampled_rows(length: int) -> list[int]:
    """The rows of a long sequence that are enclosed: the rows where tiles begin and end."""
    return sorted({row for row in (0, 1, 63, 64, length // 2, length - 2, length - 1) if 0 <= row < length})


def check_rows(
    problem: Problem,
    answer: Attention,
    error: Attention,
    batch: int,
    head: int,
    rows: list[int],
    names: tuple[TensorName, ...] = BY_ROWS,
) -> None:
    """Raises AssertionError if a row of the float64 oracle lies outside its own bound around the ball."""
    enclosed = ball.rows(problem, batch, head, torch.tensor(rows))
    for name in names:
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
    """The verdict on each of the named tensors that the answer contains.

    given: the input tensors, if they are not the case's own.
    """
    truth = truth_of(answer, case, arithmetic, given)
    verdicts = [judge_tensor(answer[name].cpu(), name, truth) for name in names if name in answer]
    if truth.certainty == "sampled":
        _check_some_rows(verdicts, case, truth)
    return verdicts


def truth_of(answer: Answer, case: Case, arithmetic: Arithmetic, given: Inputs | None = None) -> Exact:
    """The exact result and bound that judge an answer, on the CPU. given: as in `judge`."""
    if given:
        return exact_of(given.problem(case), arithmetic, backward=case.backward).on_cpu()
    return exact(case, arithmetic, answer["out"].device.type)


def _check_some_rows(verdicts: list[Judged], case: Case, truth: Exact) -> None:
    """Compares the float64 oracle with balls in the head with the kernel's largest error.

    The rows are the row with that error, and one of the rows where tiles begin and end. A disagreement is a
    fault of the suite and ends the run. Gradients of keys and values are not compared, because they have no row for
    each query.
    """
    place = worst_row(verdicts)
    if place and _is_first(f"{case} at {place}"):
        batch, head, row = place
        edges = sampled_rows(case.queries)
        names = BY_ROWS if case.backward else BY_ROWS[:2]
        rows = sorted({row, edges[case.seed % len(edges)]})
        check_rows(inputs(case).problem(case), truth.answer, truth.error, batch, head, rows, names)


def worst_row(verdicts: Sequence[Judged]) -> tuple[int, int, int] | None:
    """The batch, head and query of an answer's largest error, among the tensors with a row for each query."""
    by_rows = [judged for judged in verdicts if judged.tensor in BY_ROWS]
    if not by_rows:
        return None
    batch, head, row = max(by_rows, key=lambda judged: judged.rho.value).rho.worst.index[:3]
    return batch, head, row


def judge_tensor(actual: Tensor, name: TensorName, truth: Exact) -> Judged:
    """The verdict on one tensor of an answer, on the device of the exact result."""
    true, error, bound = (getattr(part, name) for part in (truth.answer, truth.error, truth.bound))
    rho = verdict.rho(actual, true, bound, error)
    of_chance = verdict.rho(actual, true, getattr(truth.statistical(), name), error) if truth.gates else None
    if of_chance and rho.value <= 1.0 < of_chance.value < math.inf:
        of_chance = _of_chance(actual, name, truth, of_chance)
    return Judged(
        tensor=name,
        rho=rho,
        statistical=of_chance,
        bias=_bias(actual, name, truth) if name in truth.even else None,
        ulps=None if name == "lse" else verdict.largest_ulps(actual, true, bound),
        certainty=truth.certainty,
        grid=None if rho.value <= 1.0 else grid(verdict.ratios(actual, true, bound, error)),
    )


def _of_chance(actual: Tensor, name: TensorName, truth: Exact, without: verdict.Rho) -> verdict.Rho:
    """The rho of the probabilistic bound, with what sums may lose.

    The amounts take long, so the element with the largest rho comes first. If it fails, its rho is the result, although
    that of another element may be larger. without: the rho without these amounts.
    """
    true, error, bound = (getattr(part, name) for part in (truth.answer, truth.error, truth.statistical()))
    index = without.worst.index
    of_one = torch.full_like(bound, math.inf)
    of_one[index] = bound[index] + truth.lost_at(name, index)
    found = verdict.rho(actual, true, of_one, error)
    return found if found.value > 1.0 else verdict.rho(actual, true, bound + getattr(truth.lost(), name), error)


def elements(actual: Tensor, name: TensorName, truth: Exact) -> Elements:
    """How many elements of a tensor have an error of so many units in the last place."""
    true = getattr(truth.answer, name)

    def counts(of: Tensor) -> list[int]:
        errors = verdict.ulps(of, true).nan_to_num(nan=math.inf).flatten()
        edges = torch.exp2(torch.arange(FIRST_POWER, LAST_POWER + 1, dtype=torch.float64))
        return torch.bincount(torch.bucketize(errors, edges, right=True), minlength=len(edges) + 1).tolist()

    return Elements(counts=counts(actual), floor=counts(true.to(actual.dtype)))


def _bias(actual: Tensor, name: TensorName, truth: Exact) -> verdict.Bias | None:
    """The bias of one tensor.

    In 16 bit, float32 and the casts explain a part of it. The code computes this part only if the bias is too large
    without it.
    """
    true = getattr(truth.answer, name)
    if actual.dtype in (torch.float16, torch.bfloat16):
        found = verdict.bias(actual, true)
        if not (found and found.leans):
            return found
    casts = [getattr(each, name) for each in truth.casts()]
    return verdict.bias(actual, true, getattr(truth.statistical(), name), casts)


PARTS = 16  # of rows and of columns, at most


def grid(ratios: Tensor) -> Grid:
    """The largest ratio in each part of a tensor, over all batch entries and heads.

    ratios: [batch, head, row, dim], or [batch, head, query] of the LSE.
    """
    flat = ratios.flatten(0, 1).amax(0).cpu()
    flat = flat.unsqueeze(-1) if flat.dim() == 1 else flat
    bands = flat.tensor_split(min(PARTS, flat.shape[0]))
    parts = [[float(part.max()) for part in band.tensor_split(min(PARTS, band.shape[1]), 1)] for band in bands]
    return Grid(rows=flat.shape[0], columns=flat.shape[1], rho=[[_short(value) for value in row] for row in parts])


def _short(value: float) -> float | str:
    """A rho with three digits, which are enough for a picture."""
    return figure(float(f"{value:.3g}"))


def describe(problem: Problem, index: tuple[int, ...]) -> str:
    """Describes the row of a query: the number of keys that it sees, and the largest weight.

    index: batch, head, query and further entries, as of an element of out, lse or dq.
    """
    batch, head, row = index[:3]
    query = problem.query[batch, head, row].to(torch.float64)
    key = problem.key[batch, head // problem.groups].to(torch.float64)
    visible = problem.mask.visible(batch, head, torch.tensor([row], device=query.device))[0]
    count = int(visible.sum())
    if count == 0:
        return "the query sees no key"
    if count == 1:
        return "the query sees one key"
    weights = torch.softmax((problem.scale * (key @ query)).masked_fill(~visible, -math.inf), dim=0)
    return f"the query sees {count} keys; the largest weight is {100.0 * float(weights.max()):.3g} %"
