"""The suite put to the test: kernels made wrong on purpose, which it must reject, and right ones of other makes, which it must leave in peace.

faults/*.toml holds the wrong ones, as data: each a small patch of a real implementation, after a real fault. variants.py holds the right ones.
`pytest tests/mutants` asks for each fault the one check that must reject it; `python -m flashproof.tests.suite.mutants`
asks every check, and the rules in use elsewhere.
"""
