"""Every mutant is rejected by the check that it names."""

import re

import pytest

import flashproof.impls.triton  # noqa: F401, interpreted, where there is no GPU: it is decided before Triton is imported
from flashproof.tests.suite.mutants import mutant, trial
from flashproof.tests.suite.mutants.mutant import Mutant

SLIPS = re.compile("NameError|UnboundLocalError|SyntaxError|AttributeError|ImportError|CompilationError|NVRTC|C\\+\\+ compiler")  # of a patch, not of a kernel
COUNTED = [one for one in mutant.every() if not one.survives]


@pytest.mark.parametrize("one", COUNTED, ids=lambda one: one.name)
def test_mutant_is_rejected(one: Mutant) -> None:
    """In one dtype at least. A run of all dtypes then rejects it."""
    if reason := mutant.build(one).missing("cpu"):
        pytest.skip(reason)
    trials = (trial.ask(check, mutant.build(one), dtype) for dtype in one.dtypes for check in mutant.asked(one))
    outcome = next((outcome for outcome in trials if outcome.verdict == "rejected"), None)
    assert outcome, f"{one.name}: {one.says}; {one.check} let it through"
    assert not SLIPS.search(outcome.said), f"{one.name}: its patch is no kernel: {outcome.said}"
