"""Measures how the memory beyond inputs and outputs grows with the sequence length, forward and backward.

It must grow linearly for the implementations that claim this. For the naive kernel, it grows quadratically.

The table of the report shows the sequence length, the bytes of the full attention matrix and the measured bytes.
"""

import time
from typing import Literal

import torch

from flashproof import grids
from flashproof.calling import arguments, calling
from flashproof.cases import Case
from flashproof.diagnosis import told
from flashproof.registry import check
from flashproof.reports.record import Memory
from flashproof.subject import Recorder, Subject
from flashproof.tensors import inputs
from flashproof.tests.memory.measuring import method, peak_bytes

Direction = Literal["forward", "backward"]
# The check stops after a length whose measurement took longer than this, once it has measured two lengths.
SECONDS = 0.5
# It also stops before a length whose full attention matrix is larger than this, unless linear memory is claimed.
MATRIX_BYTES = {"cpu": 2**28, "cuda": 2**34}


@check("memory", grid=grids.doubling, single=False, every=False)
def test_memory_growth(subject: Subject, recorder: Recorder) -> None:
    """Memory beyond inputs and outputs at most doubles when the sequence doubles, where linear memory is claimed."""
    before: dict[Direction, int] = {}
    for case in subject.cases:
        if _matrix_bytes(case) > MATRIX_BYTES[subject.device] and not subject.implementation.supports.linear_memory:
            break
        if not before and subject.attend(case, backward=subject.implementation.supports.backward) is None:
            break  # there is no answer to measure; if there is one, kernels are now compiled and caches are filled
        started = time.perf_counter()
        try:
            with calling(case):
                measured = _measure(subject, case)
        except Exception as error:
            subject.fail(case, f"raised {told(error)}")
            break
        for direction, count in measured:
            recorder.add(
                Memory(
                    run=recorder.run,
                    implementation=subject.implementation.name,
                    device=subject.device,
                    dtype=subject.dtype,
                    direction=direction,
                    length=case.queries,
                    heads=case.batch * case.heads,
                    dim=case.dim,
                    matrix_bytes=_matrix_bytes(case),
                    measured_bytes=count,
                    method=method(subject.device),
                )
            )
            if subject.implementation.supports.linear_memory and direction in before:
                message = (
                    f"{direction}: {count} bytes beyond inputs and outputs at length {case.queries},"
                    f" more than twice the {before[direction]} at half of it"
                )
                subject.expect(count <= 2 * before[direction], case, message)
            else:
                subject.judged += 1
        is_compared, before = bool(before), dict(measured)
        if is_compared and time.perf_counter() - started > SECONDS:
            break


def _matrix_bytes(case: Case) -> int:
    size = 4 if case.dtype == "float32" else 2
    return case.batch * case.heads * case.queries * case.keys * size


def _measure(subject: Subject, case: Case) -> list[tuple[Direction, int]]:
    """Measures the bytes beyond inputs and outputs in each direction. Gradients are the outputs of the backward."""
    given, implementation = inputs(case, subject.device), subject.implementation
    leaves = [
        tensor.detach().requires_grad_(implementation.supports.backward)
        for tensor in (given.query, given.key, given.value)
    ]
    keywords = arguments(case, implementation.supports, given)
    peak, returned = peak_bytes(lambda: implementation.attention(*leaves, **keywords), subject.device)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    measured: list[tuple[Direction, int]] = [("forward", peak - _bytes(outputs))]
    if implementation.supports.backward and outputs[0].requires_grad:
        peak, gradients = peak_bytes(lambda: torch.autograd.grad(outputs[0], leaves, given.dout), subject.device)
        measured.append(("backward", peak - _bytes(gradients)))
    return measured


def _bytes(tensors: tuple[object, ...]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))


def test_the_gate_rejects_the_textbook() -> None:
    """Negative control: the check rejects attention that holds its whole score matrix in memory.

    Its memory more than doubles when the sequence doubles: it quadruples.
    """

    def textbook(length: int) -> int:
        query = torch.ones(length, 64)
        return peak_bytes(lambda: torch.softmax(query @ query.T, dim=-1) @ query, "cpu")[0]

    assert textbook(1024) > 2 * textbook(512)
    matrix = 1024 * 1024 * 4
    assert textbook(1024) >= 2 * matrix  # the scores and their softmax are in memory at once


def test_peak_counts_what_was_released() -> None:
    """The peak counts the memory that was held at once, also if it was released before the call returned."""

    def call() -> torch.Tensor:
        large = torch.ones(2**20)
        return large[:4].clone()

    assert peak_bytes(call, "cpu")[0] >= 4 * 2**20
