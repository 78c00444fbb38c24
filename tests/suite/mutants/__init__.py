"""Tests of the suite itself: mutants, which it must reject, and variants, which must pass.

A mutant is a kernel made wrong on purpose. faults/*.toml holds the mutants as data: each one is a small patch of a real
implementation, modelled on a real fault. A variant is a right kernel made differently. variants.py and unusual.py hold
the variants.

`pytest tests/suite/mutants` runs the check that must reject each mutant.
`python -m flashproof.tests.suite.mutants` also runs the other checks, and the rules that other projects use.
"""
