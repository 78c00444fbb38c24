"""Compares the time of `flashproof.judge` with that of textbook attention in float64, forward and backward by autograd.

    python -m flashproof.tests.bench.judge_speed [cpu|cuda]

The shape is batch 1, 8 heads, 1024 queries and keys, head dim 64. All five tensors are judged. The figures are medians
of several repetitions, in milliseconds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import flashproof


def median(run: Callable[[], object], device: str, repetitions: int) -> float:
    """Returns the median of wall-clock times in milliseconds. The first two calls are not counted."""
    times = []
    for _ in range(repetitions + 2):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def textbook(query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Computes output, LSE and gradients in float64, with the whole matrix of scores."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    scores = (leaves[0] @ leaves[1].mT) / query.shape[-1] ** 0.5
    out = torch.softmax(scores, dim=-1) @ leaves[2]
    return (out, scores.logsumexp(dim=-1), *torch.autograd.grad(out, leaves, dout.double()))


def main(device: str) -> None:
    """Prints one line for each dtype."""
    shape, repetitions = (1, 8, 1024, 64), 20 if device == "cuda" else 3
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
        query, key, value, dout = (tensor.requires_grad_(i < 3) for i, tensor in enumerate(drawn))
        out = functional.scaled_dot_product_attention(query, key, value)
        dq, dk, dv = torch.autograd.grad(out, (query, key, value), dout)
        lse = textbook(query, key, value, dout)[1].float()

        answer = partial(flashproof.judge, out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv)
        judge, reference = partial(answer, query, key, value), partial(textbook, query, key, value, dout)
        of_judge, of_textbook = median(judge, device, repetitions), median(reference, device, repetitions)
        ratio = of_judge / of_textbook
        print(
            f"{dtype}: judge {of_judge:.2f} ms, textbook {of_textbook:.2f} ms,"
            f" ratio {ratio:.2f}, passed {judge().passed}"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
