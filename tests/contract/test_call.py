"""The contract of the call: what comes back, and what must not change."""

from dataclasses import replace

import pytest

from tests import grids
from tests.cases import inputs
from tests.subject import Subject


@pytest.mark.check(grid=grids.small)
def test_answers(subject: Subject) -> None:
    """Shape, dtype and device of the output (and of the lse) are those of the contract, for a plain call."""
    for case in subject.cases:
        answer = subject.attend(case, backward=subject.implementation.supports.backward)  # a wrong form is a fault, recorded there
        if answer is not None:
            subject.expect(all(tensor.isfinite().all() for tensor in answer.tensors.values()), case, "an ordinary input gives NaN or inf")


@pytest.mark.check(grid=grids.small)
def test_inputs_stay(subject: Subject) -> None:
    """The inputs and the output gradient hold the same bits after the call as before."""
    for case in subject.cases:
        given = inputs(case, subject.device)
        before = [tensor.clone() for tensor in (given.query, given.key, given.value, given.dout)]
        if subject.attend(case, backward=subject.implementation.supports.backward, given=given) is None:
            continue
        for name, old, new in zip(("query", "key", "value", "dout"), before, (given.query, given.key, given.value, given.dout), strict=True):
            subject.expect_equal(old, new, case, name, f"the call changed its {name}")


@pytest.mark.check(grid=grids.small)
def test_output_is_its_own(subject: Subject) -> None:
    """The output shares no memory with an input, and a second call leaves the first one's output as it was."""
    for case in subject.cases:
        given = inputs(case, subject.device)
        first = subject.attend(case, backward=False, given=given)
        if first is None:
            continue
        owned = {tensor.untyped_storage().data_ptr() for tensor in (given.query, given.key, given.value)}
        subject.expect(first["out"].untyped_storage().data_ptr() not in owned, case, "the output shares memory with an input")
        kept = first["out"].clone()
        if subject.attend(replace(case, seed=case.seed + 1), backward=False) is not None:
            subject.expect_equal(kept, first["out"], case, "out", "a second call changed the first one's output")
