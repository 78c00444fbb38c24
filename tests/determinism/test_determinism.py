"""Bitwise repeatability and independence of the batch, of implementations that claim them."""

import time
from dataclasses import replace

import torch

from flashproof import grids
from flashproof.registry import check
from flashproof.subject import Subject
from flashproof.tensors import Inputs, inputs

RUNS = {"cpu": 2, "cuda": 10}
SECONDS = 2.0  # of further runs, after which the one under way is the last


@check("determinism", grid=grids.repeated, claims=("deterministic",))
def test_run_to_run(subject: Subject) -> None:
    """The same call again gives the same bits, gradients included."""
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        given = inputs(case, subject.device)
        first = subject.attend(case, backward=backward, given=given)
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


@check("determinism", grid=grids.repeated, claims=("batch_invariant",))
def test_slice_of_a_batch(subject: Subject) -> None:
    """An entry of a batch by itself gives the bits that it gives within the batch, without dropout."""
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        if case.dropout:
            continue
        given = inputs(case, subject.device)
        last = slice(case.batch - 1, case.batch)
        alone = Inputs(given.query[last], given.key[last], given.value[last], given.dout[last], None if given.block_mask is None else given.block_mask[last])
        whole = subject.attend(case, backward=backward, given=given)
        part = subject.attend(replace(case, batch=1), backward=backward, given=alone)
        if whole is None or part is None:
            continue
        for name in whole.tensors:
            subject.expect_equal(whole[name][last], part[name], case, name, "an entry of a batch by itself differs from the same entry within the batch")
