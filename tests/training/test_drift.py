"""Drift: how far a training with a kernel leaves the training with the exact attention.

The same model learns the same text three times: with the implementation, with PyTorch's math attention, and with the
float64 result. Right kernels leave the exact training too, since they round. How far they do is measured: they are the
exact result with drawn errors of the size that the claim makes. The rest of the model is float64, so only the attention
rounds.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from flashproof.cases import Case
from flashproof.impls import catalogue
from flashproof.impls.spec import Arithmetic, Dtype, Implementation
from flashproof.oracles import bounds
from flashproof.registry import check
from flashproof.reports.record import Curve
from flashproof.space import Space
from flashproof.subject import Recorder, Subject
from flashproof.tests.training import kernels
from flashproof.tests.training.kernels import Stopped
from flashproof.tests.training.learning import Kernel, Recipe, Step, train

RECIPE = Recipe(length=96)
STEPS = 16
SEEDS = 6  # trainings with drawn roundings
Run = Sequence[Step]


def one(space: Space, dtype: Dtype) -> list[Case]:
    """The case of every call of the training."""
    return [RECIPE.case(dtype)]


@check("training", grid=one, claims=("causal", "backward"), asked=True, every=False)
def test_drift(subject: Subject, recorder: Recorder) -> None:
    """Trained with the kernel, a small GPT follows the exact training as closely as with other right kernels.

    The losses and the gradient norms of all steps are compared with those of the float64 attention. Their distance is
    held against the distances of right kernels with drawn roundings.
    """
    for case in subject.cases:
        arithmetic = subject.implementation.arithmetic(subject.dtype, subject.device)
        if not kernels.is_modelled(arithmetic, subject.dtype):
            continue
        try:
            run = trained(kernels.of_subject(subject, case))
        except Stopped:
            continue
        exact, others = _exact(subject.dtype), _of_right(subject.dtype, arithmetic)
        math_attention = _of_math(subject.dtype)
        series = {subject.implementation.name: run, "sdpa.math": math_attention}
        series |= {f"right {seed}": other for seed, other in enumerate(others)}
        for name, each in series.items():
            for what, apart in (("loss", _losses(each, exact)), ("gradient norm", _norms(each, exact))):
                recorder.add(
                    Curve(
                        run=recorder.run,
                        chart=f"drift of the {what}, {subject.dtype}, {subject.implementation.name}",
                        series=name,
                        device=subject.device,
                        x=[float(step) for step in range(STEPS)],
                        y=[value if math.isfinite(value) else None for value in apart],
                        x_title="step",
                        y_title=f"{what} - exact" if what == "loss" else "log(norm / exact)",
                    )
                )
        for what, of in (("losses", _losses), ("gradient norms", _norms)):
            found, limit = drift(of(run, exact)), farthest([drift(of(other, exact)) for other in others])
            words = f"the {what} of {STEPS} steps of a training are {found:.3g} from those of the exact attention"
            subject.expect(found <= limit, case, f"{words}, and right kernels stay within {limit:.3g}")


def trained(kernel: Kernel) -> Run:
    """The steps of a training with a kernel."""
    return list(train(RECIPE, kernel, STEPS, torch.float64))


def drift(apart: Sequence[float]) -> float:
    """The root mean square of what two trainings differ by in each step."""
    return math.sqrt(sum(value * value for value in apart) / len(apart))


def farthest(drifts: Sequence[float]) -> float:
    """How far a right kernel may drift, from the drifts of some.

    A training multiplies early differences, so drifts differ by factors: their logarithms have a mean and a standard
    deviation. The limit lies as many standard deviations above the mean as the test for bias has standard errors.
    """
    logs = torch.tensor([math.log(value) for value in drifts], dtype=torch.float64)
    return math.exp(float(logs.mean() + bounds.BIAS_STANDARD_ERRORS * logs.std()))


def _losses(run: Run, exact: Run) -> list[float]:
    return [step.loss - other.loss for step, other in zip(run, exact, strict=True)]


def _norms(run: Run, exact: Run) -> list[float]:
    return [math.log(step.gradient_norm / other.gradient_norm) for step, other in zip(run, exact, strict=True)]


@lru_cache
def _exact(dtype: Dtype) -> Run:
    return trained(kernels.exact(getattr(torch, dtype)))


@lru_cache
def _of_math(dtype: Dtype) -> Run:
    return trained(kernels.of_implementation(catalogue.load("sdpa.math"), getattr(torch, dtype)))


@lru_cache
def _of_right(dtype: Dtype, arithmetic: Arithmetic) -> list[Run]:
    return [trained(kernels.right(getattr(torch, dtype), arithmetic, seed)) for seed in range(SEEDS)]


def test_the_gate_rejects_a_scale_that_is_off() -> None:
    """Negative control: with 0.1 % on its scale, a kernel drifts farther in float32 than right kernels do."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        scale = 1.001 / math.sqrt(RECIPE.dim)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)

    off = trained(kernels.of_implementation(Implementation(name="off", attention=attention), torch.float32))
    exact, others = _exact("float32"), _of_right("float32", Arithmetic())
    for of in (_losses, _norms):
        limit = farthest([drift(of(other, exact)) for other in others])
        assert drift(of(off, exact)) > limit
        assert drift(of(_of_math("float32"), exact)) <= limit
