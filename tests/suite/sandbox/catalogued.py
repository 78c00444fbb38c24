"""A plugin of pytest that puts a kernel that crashes into the catalogue, where a run takes it for one of its own."""

from flashproof.impls import catalogue
from flashproof.signatures import of_callable
from flashproof.tests.suite.sandbox import kernels

crashing = of_callable(kernels.segfaults_on_odd_lengths, "crashing")
catalogue.CATALOGUE["crashing"] = f"{__name__}:crashing"
