"""Pages of docs/ that are made from the code, and the tests that keep them current."""
