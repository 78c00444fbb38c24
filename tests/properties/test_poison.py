"""Newly allocated memory holds whatever was left there. The answer must not depend on it."""

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

# How many blocks of each size are freed before a call. An allocator reuses the blocks that were freed last, and a call
# may allocate several blocks of one size.
BLOCKS = 8


# The tensors are small, because an allocator reuses small blocks. The lengths leave tails that need padding. In the
# last case, a split of the keys may hold no key that a query sees.
SMALL = "b1 h2 q65 k65 d64 causal\nb1 h1 q20 k70 d40\nb1 h1 q20 k300 d16 causal"


@check("properties", grid=grids.lines(SMALL))
def test_allocated_memory(subject: Subject) -> None:
    """The results are bitwise the same whether outputs, accumulators and buffers are allocated in memory that holds
    NaN or zeros.

    This check finds memory that is allocated but not completely written: rows of an output, a padded LSE, or a sum that
    begins with 0 times what the memory held.
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
    """Returns the answer of a call whose new memory holds NaN (poison), or zeros where it reuses a freed block.

    Just before the call, blocks of the sizes of its tensors are filled with NaN or zeros and freed. With poison, torch
    also fills every tensor that it allocates with NaN.
    """
    largest = 4 * max(given.query.numel(), given.key.numel())
    sizes = {
        size * count
        for size in (2, 4, 8)
        for count in (given.query.numel(), given.key.numel(), given.query.numel() // case.dim)
    }
    sizes |= {2**power for power in range(6, largest.bit_length() + 1)}
    # A number whose bits are all 1 is NaN in every floating-point dtype.
    held = [
        torch.full((size,), 255 if poison else 0, dtype=torch.uint8, device=given.query.device)
        for size in sorted(sizes)
        for _ in range(BLOCKS)
    ]
    # This block lies above the others on the heap, so that they are not returned to the system when they are freed.
    last = torch.empty(64, dtype=torch.uint8)
    del held
    with _allocations(filled_with_nan=poison):
        answer = answer_to(subject, case, given)
    del last
    return answer


@contextmanager
def _allocations(*, filled_with_nan: bool) -> Generator[None]:
    """Makes torch.empty and similar functions return memory that holds NaN, or memory as the allocator left it.

    torch fills memory only in deterministic mode. So this mode is on in both settings, and only the filling differs.
    """
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = filled_with_nan  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
