"""Real activations: what a model in training gives its attention, captured at some steps and in every layer."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashproof.impls import catalogue
from flashproof.tensors import Inputs
from flashproof.tests.training.kernels import of_implementation
from flashproof.tests.training.learning import Backward, Kernel, Recipe, train

RECIPE = Recipe(layers=3, length=192, batch=4, rate=3e-3)
STEPS = (0, 100, 400)  # the untrained model, one that knows the letters, and one that looks words up
ENTRIES = 2  # captured entries of the batch


@dataclass(frozen=True, eq=False)
class Activations:
    """Query, key, value and output gradient of one call [ENTRIES, heads, length, dim], in float32."""

    step: int
    layer: int
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    file: Path  # holds the tensors

    def inputs(self, dtype: torch.dtype, device: str) -> Inputs:
        """The same, rounded to a dtype."""
        query, key, value, dout = (tensor.to(device, dtype) for tensor in self.tensors)
        return Inputs(query, key, value, dout, block_mask=None)


@lru_cache(maxsize=1)
def captured() -> list[Activations]:
    """The activations of a training in float32 with PyTorch's math attention. They are kept, also in files.

    A training is the same each time on one machine. Another one may add in another order, so its files are others.
    """
    found: list[Activations] = []
    at = {"step": 0, "layer": 0}

    def watched(kernel: Kernel) -> Kernel:
        def watching(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
            layer = at["layer"]
            at["layer"] = (layer + 1) % RECIPE.layers
            out, backward = kernel(query, key, value)
            if at["step"] not in STEPS:
                return out, backward

            def captures(dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                query_, key_, value_, dout_ = (tensor[:ENTRIES].clone() for tensor in (query, key, value, dout))
                found.append(_kept(at["step"], layer, (query_, key_, value_, dout_)))
                return backward(dout)

            return out, captures

        return watching

    kernel = watched(of_implementation(catalogue.load("sdpa.math"), torch.float32))
    for step, _ in enumerate(train(RECIPE, kernel, STEPS[-1] + 1)):
        at["step"] = step + 1
    return sorted(found, key=lambda one: (one.step, one.layer))


def _kept(step: int, layer: int, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Activations:
    folder = Path(tempfile.gettempdir()) / f"flashproof-activations-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"step{step}-layer{layer}.pt"
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as half:
        torch.save([tensor.contiguous() for tensor in tensors], half)
    shutil.move(half.name, path)  # another process reads the whole file or the one before
    return Activations(step, layer, tensors, path)
