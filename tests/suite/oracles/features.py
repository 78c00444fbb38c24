"""Tiny cases that mpmath can compute. Together they have every feature of a problem."""

from functools import lru_cache, reduce
from operator import add

from flint import arb, ctx
from mpmath import mpf

from flashproof.cases import Case
from flashproof.oracles import ball, mp
from flashproof.oracles.problem import Problem
from flashproof.tensors import inputs

TENSORS = ("out", "lse", "dq", "dk", "dv")

FEATURES = [
    "b1 h2 q5 k6 d3",
    "b2 h1 q4 k5 d2 float16",
    "b1 h1 q5 k4 d4 bfloat16 causal",
    "b1 h2 q5 k8 d3 causal",
    "b1 h1 q6 k6 d3 causal",
    "b1 h2 q8 k5 d3 causal",
    "b1 h2 q5 k8 d3 causal-br",
    "b1 h1 q6 k6 d3 causal-br",
    "b1 h2 q8 k5 d3 causal-br",  # the first three rows see no key
    "b2 h4/2 q5 k6 d3 causal",
    "b1 h6/2 q4 k5 d2",
    "b1 h3/1 q4 k5 d2 dropout0.3",
    "b1 h1 q129 k130 d1 blocks0.5",
    "b1 h2 q3 k130 d2 causal-br blocks0.5 seed3",
    "b1 h1 q130 k2 d2 blocks0.5 seed2",
    "b1 h1 q4 k5 d2 blocks0",  # no row sees a key
    "b1 h2 q6 k6 d3 dropout0.4",
    "b2 h4/2 q5 k7 d2 causal-br dropout0.25 seed5",
    "b1 h1 q5 k6 d3 scale-0.7",
    "b1 h1 q5 k6 d3 causal scale0",
    "b1 h1 q1 k7 d3",
    "b1 h1 q7 k1 d3 causal",
    "b1 h1 q1 k1 d1",
    "b1 h1 q5 k6 d3 spike x30",
    "b1 h1 q5 k6 d3 causal spike x-88.7",
    "b1 h1 q5 k6 d3 spike x2.5e5",
    "b1 h1 q5 k6 d3 shift100",
    "b1 h1 q5 k6 d3 shift-300",
    "b1 h1 q5 k6 d3 shift-2.5e5",
    "b1 h1 q5 k6 d3 x2.5e5 causal",
    "b1 h1 q4 k5 d3 x1e9 dropout0.5",
    "b1 h1 q5 k6 d3 x1e-9",
    "b1 h1 q5 k8 d3 ties",
    "b1 h1 q5 k6 d3 uniform",
    "b1 h1 q5 k6 d3 sharp",
]


def problem_of(line: str) -> Problem:
    """Returns the problem of the case that a line describes."""
    case = Case.parse(line)
    return inputs(case).problem(case)


def flat(numbers: object) -> list[mpf]:
    """Returns the numbers of nested lists in order."""
    if not isinstance(numbers, list):
        return [numbers]
    return [number for part in numbers for number in flat(part)]


def by_definition(problem: Problem, bits: int = 3 * ball.BITS) -> dict[str, list[arb]]:
    """Computes each tensor with mpmath, flattened, as balls.

    The radius is the change of the result when the precision is a third higher.
    """
    coarse, fine = ((*mp.forward(problem, more), *mp.gradients(problem, more)) for more in (bits, bits * 4 // 3))
    with ctx.workprec(2 * bits):
        return {
            name: [_widened(x, y) for x, y in zip(flat(a), flat(b), strict=True)]
            for name, a, b in zip(TENSORS, coarse, fine, strict=True)
        }


def _widened(coarse: mpf, fine: mpf) -> arb:
    return arb(fine) if coarse == fine else arb(fine, abs(arb(fine) - arb(coarse)))


@lru_cache
def definition_of(line: str) -> dict[str, list[arb]]:
    """Calls `by_definition` for the problem of a line, and keeps the result."""
    return by_definition(problem_of(line))


def in_balls(problem: Problem) -> dict[str, list[arb]]:
    """Computes each tensor with `ball`, flattened, as balls at full precision."""
    answer: dict[str, list[arb]] = {name: [] for name in TENSORS}
    batches, heads, _, _ = problem.query.shape
    for batch in range(batches):
        for first in range(0, heads, problem.groups):
            group = [ball.Head(problem, batch, head) for head in range(first, first + problem.groups)]
            dscores = [head.dscores() for head in group]
            for head, ds in zip(group, dscores, strict=True):
                answer["out"] += head.out.entries()
                answer["lse"] += head.lse.entries()
                answer["dq"] += head.dq(ds).entries()
            with ctx.workprec(2 * ball.BITS):
                answer["dk"] += reduce(add, [head.dk(ds) for head, ds in zip(group, dscores, strict=True)]).entries()
                answer["dv"] += reduce(add, [head.dv() for head in group]).entries()
    return answer
