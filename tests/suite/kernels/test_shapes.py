"""Tests that wrong shapes are caught while the tests of the suite itself run, except in the tests of mutants."""

from importlib import import_module

import jaxtyping
import pytest
import torch

from flashproof.cases import Case
from flashproof.impls.call import check_call
from flashproof.impls.tiled import fa2
from flashproof.tensors import inputs
from flashproof.tests.suite import shapes

pytest.importorskip("beartype", reason="beartype: not installed")

CASE = Case.parse("b1 h2 q5 k7 d8 float32")


@pytest.mark.parametrize("module", ["flashproof.oracles.naive", "flashproof.oracles.problem", "flashproof.judging"])
def test_modules_are_wrapped(module: str) -> None:
    """Each module was imported under the hook. A module that was imported earlier would not be wrapped."""
    assert hasattr(import_module(module), "jaxtyping")


def test_a_wrong_shape_is_caught() -> None:
    given = inputs(CASE)
    call = check_call(given.query, given.key, given.value, False, "top_left", None, False, 0.0, 0)
    assert fa2.forward(given.query, given.key, given.value, call)[1].shape == (1, 2, 5)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameter 'value'(.|\n)*batch kv_heads keys dim"):
        fa2.forward(given.query, given.key, given.value[:, :, 1:], call)


def test_a_wrong_dtype_is_caught() -> None:
    given = inputs(CASE)
    out, lse = fa2.attention(given.query, given.key, given.value, return_lse=True)
    call = check_call(given.query, given.key, given.value, False, "top_left", None, False, 0.0, 0)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'lse'"):
        fa2.backward(given.query, given.key, given.value, out, lse.double(), given.dout, call)


def test_a_wrong_field_is_caught() -> None:
    problem = inputs(CASE).problem(CASE)
    with pytest.raises(jaxtyping.TypeCheckError, match="batch heads queries dim"):
        type(problem)(**vars(problem) | {"dout": torch.zeros(1, 2, 6, 8)})


def test_mutants_are_not_held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check must reject a mutant because of its answer."""
    monkeypatch.setattr(request.node, "path", shapes.MUTANTS / "test_mutants.py")
    given = inputs(CASE)
    with shapes.held(request.node):
        assert jaxtyping.config.jaxtyping_disable
        type(given)(given.query, given.key, given.value[:, :, 1:], given.dout, None)
