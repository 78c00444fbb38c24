"""Tests of the workflows in .github, and of the action that verifies the kernels of others."""
