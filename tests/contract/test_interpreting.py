"""Triton's interpreter answers the same, bit for bit, whether or not it keeps its descriptions of types."""

import hashlib
import subprocess
import sys

import pytest
import torch

tl = pytest.importorskip("triton.language", reason="Triton: not installed")

from impls import catalogue  # noqa: E402
from impls.triton.primitives import INTERPRETED  # noqa: E402
from tests.cases import Case, inputs  # noqa: E402
from tests.contract.test_catalogue import ROOT, loaded  # noqa: E402
from tests.running import attend  # noqa: E402

# Through all of a kernel's code: tiles that are whole and cut, groups, a padded head dim, dropout. The second for kernels that take block masks.
CASES = ("b1 h2/1 q150 k70 d40 causal-br dropout0.2 {}", "b1 h2/1 q140 k150 d40 causal-br dropout0.2 blocks0.5 {}")

# A process in which the interpreter is left as it is, from before any kernel is loaded.
UNKEPT = """
from impls.triton import interpreting
interpreting.keep_descriptions = lambda: None
from tests.contract.test_interpreting import answers, keeps
assert not keeps()
print(*answers(), sep="\\n")
"""


def keeps() -> bool:
    """Whether descriptions are kept in this process."""
    return tl.block_type.__init__.__module__ == "impls.triton.interpreting"


def answers() -> list[str]:
    """What the Triton kernels make of the cases, in two dtypes: a digest of each tensor."""
    lines = []
    for implementation in map(loaded, catalogue.names(["triton.*"])):
        for dtype in ("float32", "bfloat16"):
            case = Case.parse(CASES[implementation.supports.block_mask].format(dtype))
            answer = attend(implementation, case, inputs(case), backward=True)
            digests = {name: hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12] for name, x in answer.tensors.items()}
            lines.append(f"{implementation.name} {case} {digests}")
    return lines


@pytest.mark.skipif(not INTERPRETED.value, reason="Triton: not interpreted")
def test_kept_descriptions_change_nothing() -> None:
    unkept = subprocess.run([sys.executable, "-c", UNKEPT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert unkept.returncode == 0, unkept.stderr
    assert keeps()
    assert unkept.stdout.splitlines() == answers()
