"""IEEE arithmetic for float32 products, whatever the process has allowed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ieee_products() -> Iterator[None]:
    """Inside, float32 matrix products are products of float32 numbers, not of their TF32 or bfloat16 roundings.

    PyTorch keeps this choice in the process, not in the call: it is set on entry and put back on exit.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    chosen = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, chosen, strict=True):
            backend.fp32_precision = precision
