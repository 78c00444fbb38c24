"""Tests the public call of the project's own implementations.

The call is written once. In each implementation, it must behave as a plain function would.
"""

import copy
import inspect
import pickle

import pytest
import torch

from flashproof.impls import catalogue
from flashproof.signatures import of_callable
from flashproof.tests.suite.command_line.test_catalogue import loaded

OWN = catalogue.names(["tiled.*", "triton.*", "cuda.*"])
KEYWORDS = ["is_causal", "causal_alignment", "scale", "enable_gqa", "dropout_p", "dropout_seed"]


@pytest.mark.parametrize("name", OWN)
def test_its_signature_can_be_read(name: str) -> None:
    """The signature has the names in order and the shapes, and no parameter that the implementation does not take."""
    implementation = loaded(name)
    parameters = inspect.signature(implementation.attention).parameters
    block_mask = ["block_mask"] if implementation.supports.block_mask else []
    assert list(parameters) == ["query", "key", "value", *KEYWORDS, *block_mask, "return_lse"]
    assert "batch kv_heads keys dim" in str(parameters["key"])


@pytest.mark.parametrize("name", OWN)
def test_its_signature_is_its_claim(name: str) -> None:
    """As a bare callable, the function would be verified for exactly what it claims. It may refuse dropout."""
    claimed, read = loaded(name).supports, of_callable(loaded(name).attention, name).supports
    words = ["causal", "grouped_heads", "cross_lengths", "strided", "unaligned", "block_mask", "lse"]
    assert [getattr(claimed, word) for word in words] == [getattr(read, word) for word in words]
    if not claimed.dropout:
        x = torch.zeros(1, 1, 4, 8, dtype=getattr(torch, claimed.dtypes[0]))
        with pytest.raises(NotImplementedError, match=rf"^dropout_p: 0\.1 is not taken by {name}"):
            loaded(name).attention(x, x, x, dropout_p=0.1)


@pytest.mark.parametrize("name", OWN)
def test_it_is_pickled_by_its_name(name: str) -> None:
    attention = loaded(name).attention
    assert pickle.loads(pickle.dumps(attention)) is attention
    assert copy.deepcopy(attention) is attention
