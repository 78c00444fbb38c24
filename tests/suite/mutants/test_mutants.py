"""Every mutant is rejected by the check that must, in one dtype in which it shows."""

import re

import pytest

import flashproof.impls.triton  # noqa: F401, interpreted, where there is no GPU: it is decided before Triton is imported
from flashproof import registry
from flashproof.cases import Case
from flashproof.tests.suite.mutants import mutant, trial
from flashproof.tests.suite.mutants.mutant import Mutant

SLIPS = re.compile("NameError|UnboundLocalError|SyntaxError|AttributeError|ImportError|CompilationError|NVRTC|C\\+\\+ compiler")  # of a patch, not of a kernel
COUNTED = [one for one in mutant.every() if not one.survives]


@pytest.mark.parametrize("one", COUNTED, ids=lambda one: one.name)
def test_mutant_is_rejected(one: Mutant) -> None:
    """On the case that shows it, where one is named; the whole check otherwise."""
    dtype, check = one.dtypes[0], registry.checks()[one.check]
    implementation = mutant.build(one)
    if reason := implementation.missing("cpu"):
        pytest.skip(reason)
    cases = check.cases(implementation, dtype)
    if one.case:
        own = Case.parse(f"{one.case} {dtype}")
        assert own in cases, f"{one.name}: {own} is no case of {one.check}"
        cases = [own]
    outcome = trial.ask(check, implementation, dtype, cases)
    assert outcome.verdict == "rejected", f"{one.name}: {one.says}; {one.check} let it through in {dtype}"
    assert not SLIPS.search(outcome.said), f"{one.name}: its patch is no kernel: {outcome.said}"
