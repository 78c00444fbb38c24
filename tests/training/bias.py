"""Why bias matters: kernels whose rounding errors have one sign train beside right ones.

    python -m flashproof.tests.training.bias [-o FILE] [--steps STEPS]

With another number of steps, the result is written only into a file that is given.

Qiu and Yao ("Why Low-Precision Transformer Training Fails: An Analysis on Flash Attention", 2025, arXiv 2510.04212)
found why the loss of a GPT-2 exploded with flash attention in bfloat16. The output of attention had rounding errors of
one sign, and delta = rowsum(dO o O) had them too. The gradient of a score is P (dP - delta), so the error of delta is
in every gradient of queries and keys. It did not average out over the steps, since the representations were similar
from token to token, and the weights grew in one direction. In their run, the errors had one sign because several scores
of a row were its maximum. Then several weights are exactly 1, and the sum of their values was rounded to bfloat16 at
places that are half a unit away from the sum, with smaller terms of the same sign behind them.

That run took thousands of steps of a GPT-2 on GPUs. Here, a small GPT shows the same in a few minutes on a CPU, by two
changes that say what they do:

- The values have a common part, OFFSET, as the outlier channels of large models do. It is added before the attention
  and taken off behind it. In exact arithmetic this changes nothing, since the weights of a row sum to 1. In bfloat16,
  the roundings are relative to the larger numbers.
- The kernel "cut" has errors of one sign on every input: it cuts the lower bits of its output off. The kernel "narrow"
  has the rounding of Qiu and Yao: it rounds the unnormalised sum to bfloat16, and the output once more.

Both stay inside the largest error that FlashAttention's arithmetic can make on nearly every call. The test for bias
sees the first one in its first call.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashproof import judging
from flashproof.calling import TENSORS, TensorName
from flashproof.impls.spec import arithmetic_of_flash
from flashproof.oracles.masks import Mask
from flashproof.oracles.problem import Problem
from flashproof.tests.training.learning import Backward, Gradients, Recipe, train

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "reports" / "training" / "bias.json"
RECIPE = Recipe()
STEPS = 360
OFFSET = 48.0
JUDGED = (0, 1, 10, 30, 100, 200, 300)  # the steps whose calls are judged
SMOOTHED = 10  # a loss is the mean of so many steps: each step has other letters, some of which are harder
Rounding = Callable[[Tensor], Tensor]


def nearest(x: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, and returns float32."""
    return x.to(torch.bfloat16).to(torch.float32)


def cut(x: Tensor) -> Tensor:
    """Cuts the lower 16 bits of float32 off: a rounding towards zero."""
    return (x.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)


def exactly(x: Tensor) -> Tensor:
    """Rounds nothing."""
    return x


@dataclass(frozen=True)
class Made:
    """A kernel with FlashAttention's arithmetic in bfloat16, on whole matrices, but for what the fields change."""

    says: str
    is_right: bool
    of_sum: Rounding = exactly  # of the unnormalised sum P V
    of_out: Rounding = nearest  # of the output
    is_normalised: bool = False  # whether the weights are divided by their sum before they are cast
    is_delta_of_weights: bool = False  # whether delta is sum_j P_j dP_j, and not rowsum(dO o O)

    def kernel(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
        """The output for [batch, heads, tokens, dim], with a causal mask, and the backward."""
        q, k, v = (nearest(tensor) for tensor in (query, key, value))
        scale, later = 1.0 / math.sqrt(q.shape[3]), torch.ones((q.shape[2], q.shape[2]), dtype=torch.bool).triu(1)
        scores = (scale * (q @ k.mT)).masked_fill(later, -math.inf)
        maximum = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - maximum)
        total = weights.sum(dim=-1, keepdim=True)
        if self.is_normalised:
            out = self.of_out(self.of_sum(nearest(weights / total) @ v))
        else:
            out = self.of_out(self.of_sum(nearest(weights) @ v) / total)
        normalised = torch.exp(scores - (maximum + torch.log(total)))

        def backward(dout: Tensor) -> Gradients:
            do = nearest(dout)
            dweights = do @ v.mT
            delta = ((normalised * dweights) if self.is_delta_of_weights else (do * out)).sum(dim=-1, keepdim=True)
            dscores = nearest(normalised * (dweights - delta))
            gradients = scale * (dscores @ k), scale * (dscores.mT @ q), nearest(normalised).mT @ do
            return nearest(gradients[0]), nearest(gradients[1]), nearest(gradients[2])

        return out, backward


KERNELS = {
    "right": Made("one rounding to nearest at the end, as FlashAttention", is_right=True),
    "right, delta of the weights": Made("the same, with delta = sum P dP", is_right=True, is_delta_of_weights=True),
    "right, normalised weights": Made("the same, with weights that sum to 1", is_right=True, is_normalised=True),
    "cut": Made("cuts the lower bits of the output off: errors of one sign", is_right=False, of_out=cut),
    "narrow": Made("rounds the unnormalised sum to bfloat16, too (Qiu and Yao)", is_right=False, of_sum=nearest),
}


def judged(tensors: Sequence[Tensor], out: Tensor, gradients: Gradients) -> dict[str, Any]:
    """The verdicts on one call: for each tensor the rho and the bias, and whether they pass.

    tensors: query, key, value and output gradient.
    """
    query, key, value, dout = (tensor.to(torch.bfloat16) for tensor in tensors)
    problem = Problem(
        query, key, value, dout, 1.0 / math.sqrt(query.shape[3]), Mask(query.shape[2], key.shape[2], "top_left")
    )
    truth = judging.exact_of(problem, arithmetic_of_flash("bfloat16", "cpu"))
    answer: dict[TensorName, Tensor] = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    found: dict[str, Any] = {}
    for name in TENSORS:
        if name in answer:
            actual = answer[name].to(torch.bfloat16)
            judgement = judging.judge_tensor(actual, name, truth)
            bias = judgement.bias
            found[name] = {
                "rho": judgement.rho.value,
                "bias": bias and bias.value,
                "standard_error": bias and bias.standard_error,
                "allowance": bias and bias.allowance,
                "leans": bool(bias and bias.leans),
            }
    return found


def run(made: Made, steps: int) -> dict[str, Any]:
    """One training: the loss and the gradient norm of each step, and the verdicts on its calls at some steps."""
    verdicts: list[dict[str, Any]] = []
    losses: list[float] = []
    norms: list[float] = []

    def shifted(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
        out, backward = made.kernel(query, key, value + OFFSET)
        step = len(losses)

        def back(dout: Tensor) -> Gradients:
            gradients = backward(dout)
            if step in JUDGED:
                verdicts.append({"step": step, **judged((query, key, value + OFFSET, dout), out, gradients)})
            return gradients

        return out - OFFSET, back

    for step in train(RECIPE, shifted, steps):
        losses.append(step.loss)
        norms.append(step.gradient_norm)
    return {"says": made.says, "right": made.is_right, "loss": losses, "gradient_norm": norms, "verdicts": verdicts}


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last SMOOTHED losses, from the step on where there are so many."""
    return [sum(losses[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(losses) + 1)]


def departed(losses: Sequence[float], of_right: Sequence[Sequence[float]]) -> int | None:
    """The step from which a loss stays away from those of right kernels, by more than these are apart. None: never."""
    spread = [(min(losses), max(losses)) for losses in zip(*map(smoothed, of_right), strict=True)]
    away = [mean > 2.0 * high - low for mean, (low, high) in zip(smoothed(losses), spread, strict=True)]
    if not away or not away[-1]:
        return None
    return SMOOTHED - 1 + next(start for start in range(len(away)) if all(away[start:]))


def told(runs: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    """For each kernel, the step at which each test would have told: the bound, the bias, and the loss.

    Single calls are judged at the steps JUDGED alone.
    """
    of_right = [one["loss"] for one in runs.values() if one["right"]]

    def first(one: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> int | None:
        steps = [call["step"] for call in one["verdicts"] if any(holds(call[name]) for name in TENSORS if name in call)]
        return min(steps, default=None)

    return {
        name: {
            "bound": first(one, lambda found: found["rho"] > 1.0),
            "bias": first(one, lambda found: found["leans"]),
            "loss": departed(one["loss"], of_right),
        }
        for name, one in runs.items()
    }


def in_words(steps: dict[str, int | None]) -> str:
    """What told, and what did not: "told by the bias at step 0; not told by the bound"."""
    by = [f"the {test} at step {step}" for test, step in steps.items() if step is not None]
    not_by = [f"the {test}" for test, step in steps.items() if step is None]
    parts = [f"{verb} {', '.join(tests)}" for verb, tests in (("told by", by), ("not told by", not_by)) if tests]
    return "; ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Trains with each kernel, and writes what came of it.

    The exit status is 0 if the bias told before the loss.
    """
    parser = argparse.ArgumentParser(prog="python -m flashproof.tests.training.bias")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"{PLACE.name} of the reports, for {STEPS} steps"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="STEPS", help=f"{STEPS} unless given")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    output = options.output or (PLACE if options.steps == STEPS else None)
    torch.set_num_threads(1)
    runs = {}
    for name, made in KERNELS.items():
        runs[name] = run(made, options.steps)
        last = runs[name]["loss"][-SMOOTHED:]
        print(f"{name}: loss {sum(last) / len(last):.3f}", flush=True)
    found: dict[str, Any] = {"offset": OFFSET, "recipe": vars(RECIPE), "told": told(runs), "runs": runs}
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found))
    else:
        print(f"not written: {PLACE} holds {STEPS} steps; give -o FILE")
    for name, steps in found["told"].items():
        print(f"{name}: {in_words(steps)}")
    bias, loss = found["told"]["cut"]["bias"], found["told"]["cut"]["loss"]
    return 0 if bias is not None and loss is not None and bias < loss else 1


if __name__ == "__main__":
    sys.exit(main())
