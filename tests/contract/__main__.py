"""`python -m tests.contract`: runs the compile gates, which ask compilers about every kernel, and writes what they say to reports/compilers.json.gz.

In one process, since what other processes heard is in the user's cache folder.
"""

import sys
from pathlib import Path

import pytest

from tests.contract import said

said.heard = {}
failed = pytest.main(["-n0", "-q", *(str(Path(__file__).with_name(gates)) for gates in ("test_compile.py", "test_cuda_compile.py"))])
if not failed:
    said.write(said.heard)
sys.exit(failed)
