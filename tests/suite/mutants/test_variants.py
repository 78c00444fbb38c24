"""The variants, right kernels made differently, pass the checks."""

import pytest

from flashproof import registry
from flashproof.impls.spec import DTYPES, Dtype
from flashproof.tests.suite.mutants import trial, variants
from flashproof.tests.suite.mutants.variants import Variant

CHECKS = ("contract/answers", "accuracy/forward", "gradients/backward", "stability/shifted_scores", "properties/spread")
NAMES = [variant.name for variant in variants.every()]


@pytest.mark.parametrize("variant", variants.every(), ids=NAMES)
def test_variant_passes(variant: Variant) -> None:
    """Each variant passes some checks in one dtype.

    The first third of the variants takes the first dtype, and so on. `python -m flashproof.tests.suite.mutants` tries
    all three dtypes and all checks.
    """
    dtype: Dtype = DTYPES[NAMES.index(variant.name) * 3 // len(NAMES)]
    for name in CHECKS:
        outcome = trial.ask(registry.checks()[name], variant.implementation, dtype)
        assert outcome.verdict != "rejected", f"{name}, {outcome.case}: {outcome.said}"


def test_there_are_enough() -> None:
    assert len(NAMES) == len(set(NAMES)) > 30
