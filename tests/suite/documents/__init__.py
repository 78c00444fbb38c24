"""Generates the pages of docs/ that come from the code, and tests that they are current."""
