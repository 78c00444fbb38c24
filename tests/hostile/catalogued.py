"""A plugin of pytest that puts a kernel that crashes into the catalogue, where a run takes it for one of its own."""

from impls import catalogue

catalogue.CATALOGUE["crashing"] = "tests.hostile.kernels:segfaults_on_odd_lengths"
