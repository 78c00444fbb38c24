"""Symmetries of attention: powers of two as factors, the order of keys, and the places of batch entries and heads."""

from dataclasses import replace

import torch
from torch import Tensor

from flashproof import grids
from flashproof.calling import TensorName
from flashproof.cases import Case
from flashproof.impls.spec import Dtype
from flashproof.registry import check
from flashproof.subject import Subject
from flashproof.tensors import Inputs, inputs, laid_out_as
from flashproof.tests.properties.probing import answer_to, expect_inside_bound, in_float64

# The range of float16 has no room for larger factors. Its small numbers lose digits, so there the answer is only judged
# by its bound.
FACTORS: dict[Dtype, tuple[float, float]] = {
    "float32": (2.0**20, 2.0**-40),
    "bfloat16": (2.0**20, 2.0**-40),
    "float16": (2.0**11, 2.0**-8),
}


# The numbers of these cases stay in the range of the dtype if they are multiplied by the factors.
PLAIN = "b1 h2/1 q40 k70 d64\nb1 h1 q66 k66 d40 causal"


@check("properties", grid=grids.lines(PLAIN))
def test_power_of_two(subject: Subject) -> None:
    """If V is multiplied by a power of two, so are the output, dQ and dK, bit for bit. If dO is multiplied by one, so
    are all gradients.

    If K is multiplied by a power of two and Q is divided by it, the scores stay the same. Then dQ is multiplied by it,
    and dK is divided by it.

    Every operation on these tensors is a product or a sum. Rounding commutes with a power of two, except at underflow,
    which these factors avoid. So the equality is bitwise for every kernel that gives the same bits twice. It is not
    asked in float16, where small numbers are subnormal. This check finds absolute thresholds in a kernel.
    """
    for number, case in enumerate(case for case in subject.cases if _has_room(case)):
        given = inputs(case, subject.device)
        factor = FACTORS[case.dtype][number % 2]
        first = None if case.dtype == "float16" else answer_to(subject, case, given)
        query, key, value, dout = given.query, given.key, given.value, given.dout
        values = replace(given, value=laid_out_as(value, value * factor))
        gradients = replace(given, dout=laid_out_as(dout, dout * factor))
        keys = replace(given, key=laid_out_as(key, key * factor), query=laid_out_as(query, query / factor))
        multiples: tuple[tuple[str, Inputs, dict[TensorName, float]], ...] = (
            (f"values are multiplied by {factor:g}", values, {"out": factor, "dq": factor, "dk": factor}),
            (f"output gradients are multiplied by {factor:g}", gradients, {"dq": factor, "dk": factor, "dv": factor}),
            (f"keys are multiplied by {factor:g} and queries divided by it", keys, {"dq": factor, "dk": 1.0 / factor}),
        )
        for what, other, factors in multiples:
            second = answer_to(subject, case, other)
            if second is None:
                continue
            expect_inside_bound(subject, case, second, other, what)
            for name in first.tensors if first else ():
                if first is None or name not in second:
                    continue
                expected, found = in_float64(first[name]) * factors.get(name, 1.0), in_float64(second[name])
                if not torch.equal(expected, found) and subject.varies(
                    case, name, (given, first[name]), (other, second[name])
                ):
                    continue
                message = f"where {what}, the result is not the plain one times its power of two"
                subject.expect_equal(expected, found, case, name, message)


def _has_room(case: Case) -> bool:
    """Whether all intermediate numbers stay in range with such a factor.

    They may leave it in a case from the command line.
    """
    return (
        case.family == "normal"
        and not case.shift
        and case.magnitude <= 1.0
        and (case.scale is None or abs(case.scale) <= 1.0)
    )


@check("properties", grid=grids.lines("b1 h2/1 q40 k150 d32"))  # more keys than a tile holds
def test_order_of_keys(subject: Subject) -> None:
    """Keys and values in another order give the same output, inside the bound.

    The keys are reversed, or are sorted by the score of the first query, the smallest first. The order of sums follows
    the order of keys, so the results need not agree bitwise.
    """
    for case in subject.cases:
        if case.mask != "full" or case.blocks is not None or case.dropout:
            continue
        given = inputs(case, subject.device)
        first_query = given.query[:, :: case.heads // case.kv_heads, :1]
        rising = (
            (first_query.float() @ given.key.float().transpose(2, 3))
            .argsort(dim=3)
            .transpose(2, 3)
            .expand(given.key.shape)
        )
        for key, value, what in (
            (given.key.flip(2), given.value.flip(2), "keys are in the opposite order"),
            (
                given.key.gather(2, rising),
                given.value.gather(2, rising),
                "keys are in the order of the first query's scores",
            ),
        ):
            other = replace(given, key=key, value=value)
            answer = answer_to(subject, case, other)
            if answer is not None:
                expect_inside_bound(subject, case, answer, other, what)


@check("properties", grid=grids.lines("b2 h4/2 q40 k40 d32 causal"))
def test_batch_and_heads(subject: Subject) -> None:
    """Batch entries and heads in another order, or one entry by itself, give the same rows.

    The rows agree bitwise for an implementation that claims to be deterministic and independent of the batch. For other
    implementations, the order of sums may depend on the place in the batch, so the answer must only be inside the
    bound. A group of heads moves as a whole, since its heads are summed into dK and dV in their order.
    """
    bitwise = subject.implementation.supports.batch_invariant and subject.implementation.supports.deterministic
    for case in subject.cases:
        if case.dropout:
            continue  # the dropout mask depends on the indices of the batch entry and the head
        given = inputs(case, subject.device)
        entries = torch.arange(case.batch, device=given.query.device).roll(1)
        groups = torch.arange(case.kv_heads, device=given.query.device).flip(0)
        size = case.heads // case.kv_heads
        heads = (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()
        moved = Inputs(
            *_taken(given, entries, heads, groups),
            None if given.block_mask is None else given.block_mask[entries][:, heads],
        )
        alone = _last(given)
        first = answer_to(subject, case, given) if bitwise else None
        for other, of, what in (
            (moved, case, "batch entries and groups of heads are permuted"),
            (alone, replace(case, batch=1), "the last batch entry is alone"),
        ):
            answer = answer_to(subject, of, other)
            if answer is None:
                continue
            expect_inside_bound(subject, of, answer, other, what)
            for name in first.tensors if first is not None else ():
                assert first is not None
                here = (
                    first[name][entries][:, groups if name in ("dk", "dv") else heads]
                    if other is moved
                    else first[name][-1:]
                )
                subject.expect_equal(here, answer[name], case, name, f"the answer changes where {what}")


def _taken(given: Inputs, entries: Tensor, heads: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = ((given.query, heads), (given.key, groups), (given.value, groups), (given.dout, heads))
    query, key, value, dout = (tensor[entries][:, which] for tensor, which in pairs)
    return query, key, value, dout


def _last(given: Inputs) -> Inputs:
    """Returns the tensors of the last batch entry."""
    mask = None if given.block_mask is None else given.block_mask[-1:]
    return Inputs(given.query[-1:], given.key[-1:], given.value[-1:], given.dout[-1:], mask)
