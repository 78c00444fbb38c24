"""Calls as training and inference make them: an answer does not depend on which gradients are wanted, on when a backward runs and how often, or on which
tensors share their memory. Whatever the way, it is judged by its bound.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import torch

from flashproof import grids, ways
from flashproof.calling import Withheld
from flashproof.registry import check
from flashproof.subject import BACKWARD, FORWARD, Subject
from flashproof.tensors import Inputs, inputs


@check("contract", grid=grids.inferred)
def test_without_gradients(subject: Subject) -> None:
    """Under no_grad and under inference_mode, the output and the LSE are inside the bound too."""
    for case in subject.cases:
        for under, wanted in ((torch.no_grad, BACKWARD), (torch.inference_mode, ())):
            call = subject.forward(case, inputs(case, subject.device), wanted=wanted, run=ways.within(under))
            if call is not None:
                subject.judge_answer(call.answer(), case, FORWARD, note=f"called under torch.{under.__name__}")


@check("contract", grid=grids.partly_trained, claims=("backward",))
def test_some_gradients(subject: Subject) -> None:
    """If only one or two of the three gradients are asked for, these are inside the bound."""
    for case in subject.cases:
        for wanted in (*combinations(BACKWARD, 1), *combinations(BACKWARD, 2)):
            answer = subject.backward(subject.forward(case, inputs(case, subject.device), wanted=wanted))
            if answer is not None:
                subject.judge_answer(answer, case, wanted, note=f"only {' and '.join(wanted)} {'was' if len(wanted) == 1 else 'were'} asked for")


@check("contract", grid=grids.trained, claims=("backward",))
def test_two_forwards(subject: Subject) -> None:
    """Two calls run before the backward of either, as in a network of two layers; each backward belongs to its own call.

    The backwards come in the order of the calls, and in the opposite order. The calls differ in values, scale and
    dropout, in the mask, or in their block masks.
    """
    for case in subject.cases[-1:]:
        supports = subject.implementation.supports
        first = replace(case, dropout=0.25 if supports.dropout else 0.0)
        other = replace(first, seed=case.seed + 1, scale=0.5 if supports.scale != "default" else case.scale)
        pairs = [(first, other), (case, replace(case, mask="full"))]
        if supports.block_mask:
            blocks = replace(case, mask="full", keys=600, blocks=0.5)
            pairs.append((blocks, replace(blocks, seed=case.seed + 1)))
        for pair, (step, order) in product(pairs, ((1, "first"), (-1, "last"))):
            calls = [subject.forward(one, inputs(one, subject.device)) for one in pair]
            for call in calls[::step]:
                answer = subject.backward(call)
                if call is not None and answer is not None:
                    subject.judge_answer(answer, call.case, BACKWARD, note=f"two calls ran before their backwards; the {order} call went back first")


@check("contract", grid=grids.trained, claims=("backward",))
def test_backward_twice(subject: Subject) -> None:
    """Two backwards of one call, with two output gradients, are both right, and the first gradients stay as they were."""
    for case in subject.cases[-1:]:
        given = inputs(case, subject.device)
        other = replace(given, dout=inputs(replace(case, seed=case.seed + 1), subject.device).dout)
        call = subject.forward(case, given)
        first = subject.backward(call, keep=True)
        if first is None:
            continue
        kept = {name: first[name].clone() for name in BACKWARD}
        second = subject.backward(call, dout=other.dout, keep=True)
        if second is None:
            continue
        subject.judge_answer(second, case, BACKWARD, given=other, note="the second backward of one call, with another output gradient")
        for name, tensor in kept.items():
            subject.expect_equal(tensor, first[name], case, name, f"a second backward of the call changed the first one's {name}")


@check("contract", grid=grids.trained, claims=("backward", "strided"))
def test_backward_of_a_sum(subject: Subject) -> None:
    """The backward of a sum is right: there the output gradient is one number, or one row, with strides of 0."""
    for case in subject.cases[-1:]:
        given = inputs(case, subject.device)
        one, row = torch.ones_like(given.dout[:1, :1, :1, :1]), given.dout[:, :, :1].clone()
        for dout, what in ((one, "a sum: one number everywhere, with strides of 0"), (row, "a sum over queries: one row for all queries, with a stride of 0")):
            summed = replace(given, dout=dout.expand(given.dout.shape))
            answer = subject.attend(case, backward=True, given=summed)
            if answer is not None:
                subject.judge_answer(answer, case, BACKWARD, given=summed, note=f"the output gradient is that of {what}")


@check("contract", grid=grids.trained, claims=("backward",))
def test_changed_in_place(subject: Subject) -> None:
    """If the output or an input is changed between forward and backward, the backward raises or is still right."""
    for case in subject.cases[-1:]:
        for number, name in enumerate(("query", "key", "value", "out")):
            call = subject.forward(case, inputs(case, subject.device))
            if call is None or not call.carries_gradient:
                subject.backward(call)  # says so
                return
            with torch.no_grad():
                (*call.leaves, call.tensors["out"])[number].mul_(2.0)
            try:
                answer = subject.backward(call.renewed())
            except Withheld:
                subject.expect(True, case, "")
                continue
            if answer is not None:
                subject.judge_answer(answer, case, BACKWARD, note=f"{name} was changed in place between forward and backward, and the backward did not raise")


@check("contract", grid=grids.trained)
def test_one_memory(subject: Subject) -> None:
    """Tensors may share memory: key and value in one tensor, all three in one, or as columns of one projection."""
    supports = subject.implementation.supports
    for case in subject.cases[-1:]:
        for words, given in _shared(inputs(case, subject.device), strided=supports.strided):
            answer = subject.attend(case, backward=supports.backward, given=given)
            if answer is not None:
                subject.judge_answer(answer, case, subject.tensors, given=given, note=words)


def _shared(given: Inputs, *, strided: bool) -> Iterator[tuple[str, Inputs]]:
    yield "key and value are one tensor", replace(given, value=given.key)
    if given.query.shape != given.key.shape:
        return  # a case of the command line
    yield "query, key and value are one tensor", replace(given, query=given.key, value=given.key)
    if strided:
        # packed: [batch, length, 3, heads, dim], as one projection leaves it
        packed = torch.stack([tensor.transpose(1, 2) for tensor in (given.query, given.key, given.value)], dim=2)
        query, key, value = (packed[:, :, column].transpose(1, 2) for column in range(3))
        yield "query, key and value are columns of one tensor", replace(given, query=query, key=key, value=value)
