"""`python -m flashproof.tests.suite.documents` writes the pages of docs/ that are made from the code."""

from flashproof.tests.suite.documents import checks

checks.PAGE.write_text(checks.page())
print(checks.PAGE)
