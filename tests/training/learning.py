"""A small GPT that learns a made text: the same model, data and order of steps for every attention.

All of the model but the attention is float32, or float64 for the exact run. The attention is given query, key and value
in the dtype under test, as under mixed precision. Its gradients are those of its backward.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from flashproof.cases import Case
from flashproof.impls.spec import Dtype
from flashproof.nn import GPT, Configuration

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
Backward = Callable[[Tensor], Gradients]  # from the output gradient
# The output for query, key and value [batch, heads, tokens, dim], with a causal mask, and its backward.
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Backward]]

# The attention is given output gradients of a loss that is so much larger. Otherwise those of float16 would underflow.
LOSS_SCALE = 2.0**12

# ----------------------------------------------------------------------------------------------------------- the text

SYMBOLS = "\n abcdefghijklmnopqrstuvwxyz.,"
NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo")
THINGS = ("key", "book", "lamp", "coat", "map", "cup", "letter", "violin")
COLOURS = ("red", "blue", "green", "black", "white", "old", "new", "small")
SENTENCES = (
    "{a} gives the {c} {t} to {b}. now {b} has the {c} {t}, and {a} has it no more.\n",
    "{a} and {b} look for the {c} {t}. {b} finds the {c} {t} first, and {a} finds it later.\n",
    "the {c} {t} of {a} is here, and the {t} of {b} is not. so {a} lends the {c} {t} to {b}.\n",
)


def text(sentences: int, seed: int) -> str:
    """Sentences whose words come back: a model that predicts them must look them up.

    The draws are integers of NumPy's Philox bit stream, so the text is the same on every machine.
    """
    draws = np.random.Philox(key=seed).random_raw((sentences, 5)).astype(object)
    parts = []
    for kind, first, second, colour, thing in draws.tolist():
        a, b = NAMES[first % 8], NAMES[(first % 8 + 1 + second % 7) % 8]
        parts.append(SENTENCES[kind % 3].format(a=a, b=b, c=COLOURS[colour % 8], t=THINGS[thing % 8]))
    return "".join(parts)


def tokens(length: int, seed: int) -> Tensor:
    """The first `length` letters of a text, as numbers of SYMBOLS."""
    letters = text(length // 50 + 1, seed)[:length]
    return torch.tensor([SYMBOLS.index(letter) for letter in letters])


# ------------------------------------------------------------------------------------------------------- the training


@dataclass(frozen=True)
class Recipe:
    """What a training consists of, apart from the attention."""

    layers: int = 2
    heads: int = 2
    width: int = 64
    length: int = 128
    batch: int = 2
    rate: float = 2e-3
    seed: int = 1

    @property
    def dim(self) -> int:
        """The head dim."""
        return self.width // self.heads

    def case(self, dtype: Dtype) -> Case:
        """The case of every call of the attention."""
        return Case(batch=self.batch, heads=self.heads, queries=self.length, dim=self.dim, dtype=dtype, mask="causal")


@dataclass(frozen=True)
class Step:
    """What a step of a training measured before it changed the weights."""

    loss: float
    gradient_norm: float  # of all parameters together


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        out, backward = kernel(query, key, value)
        ctx.backward_of_kernel = backward  # type: ignore[attr-defined]
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gradients: Gradients = ctx.backward_of_kernel(dout * LOSS_SCALE)  # type: ignore[attr-defined]
        query, key, value = (gradient.to(dout.dtype) / LOSS_SCALE for gradient in gradients)
        return query, key, value, None


def model_of(recipe: Recipe, kernel: Kernel, dtype: torch.dtype = torch.float32) -> GPT:
    """The model before its first step. Its weights depend on the recipe alone."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
        assert is_causal
        out: Tensor = _Attended.apply(query, key, value, kernel)  # type: ignore[no-untyped-call]
        return out

    sizes = Configuration(
        layers=recipe.layers, heads=recipe.heads, width=recipe.width, vocabulary=len(SYMBOLS), context=recipe.length
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return GPT(sizes, attention).to(dtype)


def train(recipe: Recipe, kernel: Kernel, steps: int, dtype: torch.dtype = torch.float32) -> Iterator[Step]:
    """Trains with AdamW, and yields what each step measures. dtype: of everything but the attention."""
    model = model_of(recipe, kernel, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.1)
    span = recipe.length + 1
    numbers = tokens(steps * recipe.batch * span, recipe.seed).view(steps, recipe.batch, span)
    for batch in numbers:
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None])
        )
        yield Step(float(loss.detach()), float(norm))
        optimizer.step()
