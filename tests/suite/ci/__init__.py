"""Tests of the workflows in .github, and of the action that verifies kernels of other repositories."""
