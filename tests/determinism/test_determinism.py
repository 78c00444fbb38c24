"""Bitwise repeatability and independence of the batch, for implementations that claim them."""

import time
from dataclasses import replace

import torch

from flashproof import grids
from flashproof.cases import Case
from flashproof.impls.spec import Dtype
from flashproof.registry import check
from flashproof.space import Space
from flashproof.subject import Subject
from flashproof.tensors import Inputs, inputs

RUNS = {"cpu": 2, "cuda": 10}  # of each case, at most
SECONDS = 0.5  # once the further runs of a case have taken this long, no other run follows


GPU = "b2 h4 q1000 k1000 d128 causal\nb3 h4/2 q700 k700 d64"  # many blocks add to one gradient


OPTIONS = """
b1 h1 q140 k270 d32
b2 h1 q70 k70 d64 causal dropout0.2
b2 h1 q260 k260 d32 blocks0.5
"""


def _repeated(space: Space, dtype: Dtype) -> list[Case]:
    return grids.where(most=4)(space, dtype) + grids.lines(OPTIONS, cuda=GPU)(space, dtype)


@check("determinism", grid=_repeated, claims=("deterministic",))
def test_run_to_run(subject: Subject) -> None:
    """The same call again gives the same bits, gradients included."""
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        given = inputs(case, subject.device)
        first = subject.attend(case, backward=backward, given=given)
        if first is not None:
            subject.judge_answer(first, case, subject.tensors)
        started = time.monotonic()
        for run in range(2, RUNS[subject.device] + 1):
            again = subject.attend(case, backward=backward, given=given)
            if first is None or again is None:
                break
            same = all(torch.equal(first[name], again[name]) for name in first.tensors)
            if not same or run == RUNS[subject.device] or time.monotonic() - started > SECONDS:
                for name in first.tensors:
                    subject.expect_equal(first[name], again[name], case, name, f"run {run} differs from run 1")
                break


def _batches(space: Space, dtype: Dtype) -> list[Case]:
    several = grids.where(lambda case: case.batch > 1 and not case.dropout, most=4)
    return several(space, dtype) + grids.lines("b2 h1 q140 k140 d64 causal\nb2 h1 q260 k260 d32 blocks0.5")(
        space, dtype
    )


@check("determinism", grid=_batches, claims=("batch_invariant",))
def test_slice_of_a_batch(subject: Subject) -> None:
    """Without dropout, a batch entry alone gives the same bits as within its batch."""
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        if case.dropout:
            continue
        given = inputs(case, subject.device)
        last = slice(case.batch - 1, case.batch)
        mask = given.block_mask
        if mask is not None and mask.shape[0] > 1:  # else one mask is for all batch entries
            mask = mask[last]
        alone = Inputs(given.query[last], given.key[last], given.value[last], given.dout[last], mask)
        whole = subject.attend(case, backward=backward, given=given)
        part = subject.attend(replace(case, batch=1), backward=backward, given=alone)
        if whole is None or part is None:
            continue
        subject.judge_answer(whole, case, subject.tensors)
        message = "an entry of a batch differs from the same entry computed alone"
        for name in whole.tensors:
            subject.expect_equal(whole[name][last], part[name], case, name, message)
