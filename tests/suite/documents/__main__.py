"""`python -m flashproof.tests.suite.documents` writes the pages of docs/ that come from the code."""

from flashproof.tests.suite.documents import checks

checks.PAGE.write_text(checks.page())
print(checks.PAGE)
