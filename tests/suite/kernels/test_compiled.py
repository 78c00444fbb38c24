"""Tests that the checks which compare bits accept a kernel that chooses its code by the form of its tensors.

A correct kernel may run different code for tensors of a different form. A function from torch.compile does so.
"""

import math

import pytest
import torch
from torch import Tensor

from flashproof import registry
from flashproof.cases import Case
from flashproof.signatures import of_callable
from flashproof.tensors import inputs, laid_out_as
from flashproof.tests.suite.mutants import trial

Form = tuple[tuple[int, ...], tuple[int, ...], int, int]


def form(tensor: Tensor) -> Form:
    """Returns the form of a tensor, which is all but its values: shape, strides, place in the buffer, alignment."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.data_ptr() % 64


class Compiled:
    """A kernel that computes in float32 or in float64, in turn for each new form of its tensors.

    Both are correct. Their bits differ.
    """

    def __init__(self) -> None:
        self.forms: list[tuple[Form, ...]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
        forms = (form(query), form(key), form(value))
        if forms not in self.forms:
            self.forms.append(forms)
        dtype = (torch.float32, torch.float64)[self.forms.index(forms) % 2]
        scores = query.to(dtype) @ key.to(dtype).mT / math.sqrt(query.shape[-1])
        if is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
        return (torch.softmax(scores, dim=-1) @ value.to(dtype)).to(query.dtype)


@pytest.mark.parametrize(
    "check", ["masks/hidden_keys_change_nothing", "masks/memory_outside_changes_nothing", "properties/power_of_two"]
)
def test_code_may_depend_on_the_form_of_tensors(check: str) -> None:
    outcome = trial.ask(registry.checks()[check], of_callable(Compiled(), "compiled"), "float32")
    assert outcome.verdict == "accepted", outcome


@pytest.mark.parametrize(
    "layout", ["contiguous", "offset", "transposed", "columns", "sliced", "k.columns v.transposed"]
)
def test_other_values_in_memory_of_the_same_form(layout: str) -> None:
    """The new tensor has the strides, place and surroundings of the other one, whose memory does not change."""
    given = inputs(Case.parse(f"b2 h2 q5 k7 d16 {layout}"))
    for tensor in (given.query, given.key, given.value, given.dout):
        before, values = tensor.clone(), 2.0 * tensor
        found = laid_out_as(tensor, values)
        assert torch.equal(found, values)
        assert form(found)[:3] == form(tensor)[:3]
        assert torch.equal(tensor, before)
        assert count_nan(found) == count_nan(tensor) > 0


def count_nan(tensor: Tensor) -> int:
    """Counts the NaN in the whole buffer of a tensor."""
    return int(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).isnan().sum())


def test_values_of_entries_that_share_memory() -> None:
    """Entries with equal values share memory again. Entries with different values cannot."""
    key = inputs(Case.parse("b2 h2 q5 k7 d16 expanded")).key
    doubled, apart = laid_out_as(key, 2.0 * key), 2.0 * key
    apart[0] += 1.0
    assert torch.equal(doubled, 2.0 * key)
    assert doubled.stride() == key.stride()
    assert torch.equal(laid_out_as(key, apart), apart)
