"""Memory that a call is handed: it holds what was left there, and the answer does not depend on it."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.utils.deterministic

from flashproof import grids
from flashproof.calling import Answer
from flashproof.cases import Case
from flashproof.registry import check
from flashproof.subject import Subject
from flashproof.tensors import Inputs, inputs
from flashproof.tests.properties.probing import answer_to

BLOCKS = 8  # of each size: an allocator hands out again what was freed last, and a call allocates several of one size


# Small tensors: an allocator hands small blocks out again. Lengths leave tails to be padded; a split of keys may have
# none that a query sees.
SMALL = "b1 h2 q65 k65 d64 causal\nb1 h1 q20 k70 d40\nb1 h1 q20 k300 d16 causal"


@check("properties", grid=grids.lines(SMALL))
def test_allocated_memory(subject: Subject) -> None:
    """The results are bitwise the same whether outputs, accumulators and buffers are allocated in memory that holds NaN or
    zeros.

    This shows what is allocated and not written whole: rows of an output, a padded LSE, a sum that begins with 0 times
    what was there.
    """
    for case in subject.cases:
        given = inputs(case, subject.device)
        clean, poisoned = (_handed(subject, case, given, poison=poison) for poison in (False, True))
        if clean is None or poisoned is None:
            continue
        subject.judge_answer(poisoned, case, subject.tensors)
        for name in clean.tensors:
            if name not in poisoned:
                continue
            one, two = clean[name], poisoned[name]
            differs = not torch.equal(one, two) and not bool(two.isnan().any())
            if differs and subject.varies(case, name, (given, one), (given, two)):
                continue
            message = "the result changed where memory that the call allocated held NaN"
            subject.expect_equal(one, two, case, name, message)


def _handed(subject: Subject, case: Case, given: Inputs, *, poison: bool) -> Answer | None:
    """The answer of a call that is handed NaN, or zeros: in what torch allocates for it, and in blocks of its tensors' sizes that were freed just before."""
    largest = 4 * max(given.query.numel(), given.key.numel())
    sizes = {size * count for size in (2, 4, 8) for count in (given.query.numel(), given.key.numel(), given.query.numel() // case.dim)}
    sizes |= {2**power for power in range(6, largest.bit_length() + 1)}
    # Bytes of ones alone are NaN in every dtype.
    held = [torch.full((size,), 255 if poison else 0, dtype=torch.uint8, device=given.query.device) for size in sorted(sizes) for _ in range(BLOCKS)]
    last = torch.empty(64, dtype=torch.uint8)  # above them on the heap, so that they are not given back to the system
    del held
    with _allocations(filled_with_nan=poison):
        answer = answer_to(subject, case, given)
    del last
    return answer


@contextmanager
def _allocations(*, filled_with_nan: bool) -> Generator[None]:
    """Inside, what torch.empty and its kin allocate holds NaN, or what it holds. Torch fills in deterministic mode only, so both ways are in it."""
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = filled_with_nan  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
