"""Tests the CUDA kernels on a GPU.

compute-sanitizer must find nothing, kernels must run on the current stream, a first use must be quick, and the error of
a failed launch must name the launch.

`python -m flashproof.tests.suite.kernels.test_cuda_gpu` runs a small grid of every kernel, forward and backward.
compute-sanitizer watches this command. Each of its tools takes a minute. For this reason, `pytest -m gpu` does not run
the tests with compute-sanitizer. To run them, name this file.
"""

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashproof.impls import catalogue
from flashproof.impls.cuda import launching
from flashproof.impls.cuda.launching import CudaError, Launch
from flashproof.impls.spec import Implementation

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA: no device")]
NAMES = catalogue.names(["cuda.*"])
ROOT = Path(__file__).resolve().parents[3]

# (query heads, key heads, queries, keys, head dim, keywords, strided). A strided tensor is every second column of a
# wider one.
GRID: tuple[tuple[int, int, int, int, int, dict[str, Any], bool], ...] = (
    (2, 1, 150, 70, 64, {"is_causal": True, "causal_alignment": "bottom_right"}, False),  # some rows see no key
    (2, 2, 70, 150, 40, {"is_causal": True}, True),
    (2, 1, 65, 130, 128, {"dropout_p": 0.2, "dropout_seed": 7}, False),
    (1, 1, 40, 50, 200, {"is_causal": True}, False),
)


def main() -> None:
    """Runs the grid. A result that is not finite is an error."""
    torch.manual_seed(0)
    for name, line in itertools.product(NAMES, GRID):
        implementation = catalogue.load(name)
        if implementation.missing("cuda") or (line[5].get("dropout_p") and not implementation.supports.dropout):
            continue
        for dtype in implementation.supports.dtypes:
            _run(implementation, getattr(torch, dtype), line)
    print("the grid is done")


def _run(
    implementation: Implementation, dtype: torch.dtype, line: tuple[int, int, int, int, int, dict[str, Any], bool]
) -> None:
    """Runs one line of the grid, forward and backward."""
    heads, kv_heads, queries, keys, dim, keywords, strided = line
    if implementation.supports.block_mask:
        keywords = keywords | {"block_mask": (torch.rand(1, heads, -(-queries // 128), -(-keys // 128)) < 0.7).cuda()}
    query, key, value = (
        _tensor(h, length, dim, dtype, strided) for h, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )
    out: Any = implementation.attention(query, key, value, enable_gqa=True, **keywords)
    gradients = torch.autograd.grad(out, (query, key, value), torch.randn(out.shape).to("cuda", dtype))
    torch.cuda.synchronize()
    assert all(torch.isfinite(x).all() for x in (out, *gradients)), (implementation.name, dtype, line)


def _tensor(heads: int, length: int, dim: int, dtype: torch.dtype, strided: bool) -> Tensor:
    wide = torch.randn(1, heads, length, dim * (2 if strided else 1)).to("cuda", dtype)
    return (wide[..., ::2] if strided else wide).detach().requires_grad_()


def _dtype(implementation: Implementation) -> torch.dtype:
    """The last of the dtypes that an implementation claims: a 16-bit dtype, if there is one."""
    dtype: torch.dtype = getattr(torch, implementation.supports.dtypes[-1])
    return dtype


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    """Checks the grid for accesses outside memory, reads of unwritten memory and incomplete barriers."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer: not installed")
    # Errors of API calls are not reported, because cuda-bindings asks for functions that older drivers do not have.
    command = [
        sanitizer,
        "--tool",
        tool,
        "--report-api-errors",
        "no",
        sys.executable,
        "-m",
        "flashproof.tests.suite.kernels.test_cuda_gpu",
    ]
    # Without caching, each tensor has its own allocation, and compute-sanitizer knows its bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert "the grid is done" in done.stdout, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_run_on_the_current_stream(name: str) -> None:
    """A kernel waits for inputs that its slow stream is still writing. Other streams change nothing in the meantime."""
    implementation = catalogue.load(name)
    source = torch.randn(1, 4, 512, 64, device="cuda", dtype=_dtype(implementation))
    expected: Any = implementation.attention(source, source, source)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.full_like(source, torch.nan)
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # tens of milliseconds
        late.copy_(source)
        found: Any = implementation.attention(late, late, late)
    assert not stream.query(), "the stream was done before the call was checked: it shows nothing"
    stream.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_new_thread(name: str) -> None:
    """A call in a new thread works.

    A new thread has no driver context. If the kernel is loaded and memory is available, only the launch can make one.
    """
    implementation = catalogue.load(name)
    attention: Any = implementation.attention
    x = torch.randn(1, 2, 70, 64, device="cuda", dtype=_dtype(implementation))
    expected = attention(x, x, x)
    attention(x, x, x)  # its result is freed, so that memory is available
    torch.cuda.synchronize()
    found: list[Tensor | Exception] = []

    def call() -> None:
        try:
            found.append(attention(x, x, x))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(found[0], Tensor), found[0]
    assert torch.equal(found[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_first_use_is_quick(name: str, tmp_path: Path) -> None:
    """A kernel that is in no cache is compiled and loaded in less than 2 s. From the disk, it takes less than 0.1 s."""
    launches: list[Launch] = []
    implementation = catalogue.load(name)
    x = torch.zeros(1, 1, 128, 128, device="cuda", dtype=_dtype(implementation), requires_grad=True)
    with mock.patch.object(Launch, "run", autospec=True, side_effect=launches.append):
        out: Any = implementation.attention(x, x, x, is_causal=True)
        if implementation.supports.backward:
            out.backward(torch.zeros_like(out))
    with mock.patch.object(launching, "cache_folder", return_value=tmp_path):
        for launch in launches:
            seconds = []
            for _ in range(2):
                launching._kernel_on_gpu.cache_clear()
                start = time.perf_counter()
                launching._kernel_on_gpu(
                    launch.source, launch.kernel, tuple(launch.constants.items()), launch.shared_bytes, 0
                )
                seconds.append(time.perf_counter() - start)
            assert seconds[0] < 2.0, f"{launch}: {seconds[0]:.1f} s"
            assert seconds[1] < 0.1, f"{launch}: {seconds[1]:.1f} s from the disk"
    launching._kernel_on_gpu.cache_clear()


@pytest.mark.gpu
def test_a_launch_that_fails_names_itself() -> None:
    """The launches ask for more shared memory than the GPU has, and for more threads than a block may have."""
    launches: list[Launch] = []
    x = torch.zeros(1, 2, 70, 64, device="cuda", dtype=torch.float16)
    with mock.patch.object(Launch, "run", autospec=True, side_effect=launches.append):
        catalogue.load("cuda.fa2").attention(x, x, x)
    launch = launches[0]
    with pytest.raises(
        CudaError,
        match=r"(?s)needs 10000000 bytes of shared memory .*fa2\.cu forward <<<\d+, \d+, 10000000>>>"
        r" .*DIM=64.*\[1, 2, 70, 64\]",
    ):
        replace(launch, shared_bytes=10_000_000).run()
    with pytest.raises(
        CudaError, match=r"CUDA: CUDA_ERROR_INVALID_VALUE when launching fa2\.cu forward <<<\d+, 4096, \d+>>>"
    ):
        replace(launch, warps=128).run()


if __name__ == "__main__":
    main()
