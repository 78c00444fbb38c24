"""Triton kernels. Where torch finds no CUDA device they run under Triton's interpreter, on tensors of the CPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set here, before any file of this package imports triton.
A value set by the user stands.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
