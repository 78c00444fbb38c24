"""Tests that the rules of other projects do what their sources do: known errors get known verdicts."""

import pytest
import torch

from flashproof import signatures
from flashproof.calling import TensorName
from flashproof.cases import Case
from flashproof.impls import catalogue
from flashproof.impls.spec import DTYPES, Dtype
from flashproof.tests.suite.mutants import rules
from flashproof.tests.suite.mutants.rules import RULES, Compared

BY_NAME = {rule.name: rule for rule in RULES}
EXACT = torch.linspace(-2.0, 2.0, 64, dtype=torch.float64)
EAGER = EXACT.to(torch.float16) + 0.001


def accepts(rule: str, error: float, name: TensorName = "out") -> bool:
    """Returns whether a rule accepts a float16 tensor that has the same error in every element.

    The error of eager attention is about 0.001.
    """
    return BY_NAME[rule].accepts(Compared(name, (EXACT + error).to(torch.float16), EXACT, EAGER))


@pytest.mark.parametrize(
    ("rule", "name", "largest", "too_large"),
    [
        ("allclose 1e-2", "out", 0.009, 0.012),
        ("twice eager", "out", 0.0015, 0.004),
        ("SDPA, newer", "out", 0.004, 0.008),
        ("SDPA, newer", "dq", 0.15, 0.4),
        ("assert_close", "out", 0.0, 0.004),
        ("FlashMLA", "out", 0.0008, 0.03),
    ],
)
def test_a_rule_parts_small_errors_from_large_ones(
    rule: str, name: TensorName, largest: float, too_large: float
) -> None:
    assert accepts(rule, largest, name)
    assert not accepts(rule, too_large, name)


def test_the_older_rule_accepts_a_gradient_of_zero() -> None:
    """The rtol of this rule is a multiple of the largest relative error of eager attention.

    It exceeds 1 if an element is close to 0.
    """
    exact = torch.tensor([1.0, -1.0, 1e-6, 0.5], dtype=torch.float64)
    eager = (exact + 1e-5).to(torch.float32)
    assert BY_NAME["SDPA, older"].accepts(Compared("dq", torch.zeros(4), exact, eager))
    assert not BY_NAME["SDPA, newer"].accepts(Compared("dq", torch.zeros(4), exact, eager))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_nan_is_accepted_by_none(rule: rules.Rule) -> None:
    actual = EXACT.to(torch.float16)
    assert not rule.accepts(Compared("out", torch.where(actual > 1.9, torch.nan, actual), EXACT, EAGER))


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_is_attention(dtype: Dtype) -> None:
    """The reference of the rules is close to the exact result, also with masks, with dropout and in the gradients."""
    for line in ("b1 h4/2 q20 k33 d32 causal-br", "b1 h2 q33 k20 d32 causal-br dropout0.3", "b2 h1 q20 k20 d16 causal"):
        exact, eager = rules.references(Case.parse(f"{line} {dtype}"))
        for name, tensor in eager.items():
            torch.testing.assert_close(tensor.double(), getattr(exact, name), atol=0.1, rtol=0.1)


def test_a_rule_rejects_what_raises() -> None:
    def broken(query: object, key: object, value: object) -> None:
        raise ArithmeticError("no")

    implementation = signatures.of_callable(broken, "broken")
    assert set(rules.ask(implementation, rules.their_inputs("float32", "cpu")[:1])) == set(BY_NAME)


def test_a_case_that_eager_attention_cannot_answer_does_not_count() -> None:
    """The products overflow before they are scaled, so every weight of eager attention is NaN."""
    case = Case.parse("b1 h1 q4 k4 d8 float16 shift50000")
    assert rules.references(case)[1]["out"].isnan().all()
    assert rules.ask(catalogue.load("tiled.fa2"), [case]) == {}
