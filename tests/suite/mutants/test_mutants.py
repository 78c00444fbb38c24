"""Every mutant is rejected by the check that it names."""

import re

import pytest

# Without a GPU, this module selects Triton's interpreter. It must do so before Triton is imported.
import flashproof.impls.triton  # noqa: F401
from flashproof.tests.suite.mutants import mutant, trial
from flashproof.tests.suite.mutants.mutant import Mutant

# These errors come from a mistake in a patch. They are not the fault that the mutant describes.
SLIPS = re.compile(
    "NameError|UnboundLocalError|SyntaxError|AttributeError|ImportError|CompilationError|NVRTC|C\\+\\+ compiler"
)
COUNTED = [one for one in mutant.every() if not one.survives]


@pytest.mark.parametrize("one", COUNTED, ids=lambda one: one.name)
def test_mutant_is_rejected(one: Mutant) -> None:
    """The check rejects the mutant in at least one dtype, so a run of all dtypes rejects it."""
    if reason := mutant.build(one).missing("cpu"):
        pytest.skip(reason)
    trials = (trial.ask(check, mutant.build(one), dtype) for dtype in one.dtypes for check in mutant.asked(one))
    outcome = next((outcome for outcome in trials if outcome.verdict == "rejected"), None)
    assert outcome, f"{one.name}: {one.says}; {one.check} let it through"
    assert not SLIPS.search(outcome.said), f"{one.name}: its patch is not a kernel: {outcome.said}"
