"""A plugin of pytest that adds a crashing kernel to the catalogue, so that a run treats it as its own kernel."""

from flashproof.impls import catalogue
from flashproof.signatures import of_callable
from flashproof.tests.suite.sandbox import kernels

crashing = of_callable(kernels.segfaults_on_odd_lengths, "crashing")
catalogue.CATALOGUE["crashing"] = f"{__name__}:crashing"
