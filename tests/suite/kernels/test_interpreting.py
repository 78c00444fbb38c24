"""Triton's interpreter answers the same, bit for bit, whether or not it keeps its descriptions of types."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

tl = pytest.importorskip("triton.language", reason="Triton: not installed")

from flashproof.calling import attend  # noqa: E402
from flashproof.cases import Case  # noqa: E402
from flashproof.impls import catalogue  # noqa: E402
from flashproof.impls.triton.primitives import INTERPRETED, Launch, _as_on_a_gpu, head_of, kernel, place, this_program, tile_of  # noqa: E402
from flashproof.tensors import inputs  # noqa: E402
from flashproof.tests.suite.command_line.test_catalogue import ROOT, loaded  # noqa: E402

# Through all of a kernel's code: tiles that are whole and cut, groups, a padded head dim, dropout. The second for kernels that take block masks.
CASES = ("b1 h2/1 q150 k70 d40 causal-br dropout0.2 {}", "b1 h2/1 q140 k150 d40 causal-br dropout0.2 blocks0.5 {}")

# A process in which the interpreter is left as it is, from before any kernel is loaded.
UNKEPT = """
import contextlib
from flashproof.impls.triton import interpreting
interpreting.described_once = contextlib.nullcontext
from flashproof.tests.suite.kernels.test_interpreting import answers, keeps
assert not keeps()
print(*answers(), sep="\\n")
"""


def keeps() -> bool:
    """Whether descriptions are kept while a kernel of this project runs."""
    with _as_on_a_gpu():
        return is_changed()


def is_changed() -> bool:
    """Whether Triton's interpreter is not as it is."""
    return tl.block_type.__init__.__module__ == "flashproof.impls.triton.interpreting"


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


pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="Triton: not interpreted")


@kernel
def offsets_kernel(query, query_strides, rows, offsets, heads, groups, queries):  # type: ignore[no-untyped-def]
    """How many bytes behind a tensor's first element kernels look for another: by what `place` says, by the program's number, by a row that was loaded."""
    _, head, batch = place(queries, heads, 16, False)
    start, _, _ = head_of(query, query_strides, batch, head, 16, 16, False, 1)
    tl.store(offsets, start.to(tl.int64) - query.to(tl.int64))
    program = this_program()
    start, _, _ = head_of(query, query_strides, program // heads, program % heads, 16, 16, False, 1)
    tl.store(offsets + 1, start.to(tl.int64) - query.to(tl.int64))
    row = tl.load(rows)
    corner = tl.min(tl.min(tile_of(head_of(query, query_strides, 0, 0, 16, 16, False, 1), row).to(tl.int64), 1), 0)
    tl.store(offsets + 2, corner - query.to(tl.int64))


def test_addresses_have_64_bits() -> None:
    """Batch entries, heads and rows that begin further away than 32 bits count."""
    query, offsets = torch.zeros(1, dtype=torch.float16), torch.zeros(3, dtype=torch.int64)
    arguments = {"query": query, "query_strides": (2**31 + 8, 2**30, 2**24, 1), "rows": torch.tensor([256], dtype=torch.int32), "offsets": offsets}
    Launch(offsets_kernel, (8,), arguments | {"heads": 4, "groups": 1, "queries": 16}, num_warps=4, num_stages=1).run()
    of_the_last = 2 * (1 * (2**31 + 8) + 3 * 2**30)  # batch entry 1, head 3
    assert offsets.tolist() == [of_the_last, of_the_last, 2 * 256 * 2**24]


def test_kept_descriptions_change_nothing() -> None:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # as in this process: sums of several differ
    unkept = subprocess.run([sys.executable, "-c", UNKEPT], capture_output=True, text=True, cwd=ROOT, env=one_thread, check=False)
    assert unkept.returncode == 0, unkept.stderr
    assert keeps()
    assert unkept.stdout.splitlines() == answers()
    assert not is_changed()  # for the kernels of others
