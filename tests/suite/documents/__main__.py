"""`python -m flashproof.tests.suite.documents` writes the pages of docs/ that come from the code."""

from flashproof.tests.suite.documents import api, checks

for one in (checks, api):
    one.PAGE.write_text(one.page())
    print(one.PAGE)
