"""Attention kernels in Triton.

On a machine where torch finds no CUDA device, the kernels run in Triton's interpreter, on CPU tensors.

Triton reads TRITON_INTERPRET when a kernel is defined. This module therefore sets the variable before any file of this
package imports triton. A value that the user has set stays in effect.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
