"""Real activations: outlier channels, attention sinks and near-ties, in the form in which a training makes them.

A small GPT learns a made text. What its attention is given at some steps is judged like every other case.
"""

import shlex
from collections.abc import Callable
from dataclasses import replace

import torch

from flashproof.cases import Case
from flashproof.impls.spec import Dtype
from flashproof.registry import check
from flashproof.space import Space
from flashproof.subject import Subject
from flashproof.tests.training.activations import ENTRIES, RECIPE, STEPS, Activations, captured


def steps(space: Space, dtype: Dtype) -> list[Case]:
    """One case for each captured step, which is its seed. The numbers of the case are not those of its line."""
    return [replace(RECIPE.case(dtype), batch=ENTRIES, seed=step) for step in STEPS]


@check("training", grid=steps, claims=("causal", "backward"), asked=True)
def test_activations(subject: Subject) -> None:
    """Real activations: what a small GPT in training gives its attention. Output, LSE and gradients are judged as ever.

    The seed of the case is the step of the training. All layers of the step are judged. A failure names the file that
    holds the tensors, and the command that judges them again.
    """
    for case in subject.cases:
        for activations in captured():
            if activations.step != case.seed:
                continue
            given = activations.inputs(getattr(torch, case.dtype), subject.device)
            answer = subject.attend(case, backward=True, given=given)
            if answer is None:
                continue
            again = ["python", "-m", "flashproof.tests.training", str(activations.file), subject.implementation.name]
            note = f"layer {activations.layer} at step {activations.step}; these tensors: {shlex.join(again)}"
            axes = {"step": float(activations.step), "layer": float(activations.layer)}
            subject.judge_answer(answer, case, subject.tensors, axes=axes, given=given, note=note)


def test_the_activations_are_those_of_a_model_that_learned() -> None:
    """The last step has what the first one has not: attention that picks keys, and rows that hardly have a gradient."""

    def of_step(step: int, figure: Callable[[Activations], float]) -> float:
        return max(figure(one) for one in captured() if one.step == step)

    def picks(one: Activations) -> float:
        """The mean of the largest weight of the last rows."""
        query, key, _, _ = one.tensors
        scores = query[:, :, -1:] @ key.mT / RECIPE.dim**0.5
        return float(torch.softmax(scores, dim=-1).amax(dim=-1).mean())

    def uneven(one: Activations) -> float:
        """How many times larger the largest row of an output gradient is than the smallest."""
        largest = one.tensors[3].abs().amax(dim=-1)
        return float((largest.amax(dim=-1) / largest.amin(dim=-1)).max())

    assert len(captured()) == len(STEPS) * RECIPE.layers
    assert of_step(STEPS[-1], picks) > 4.0 * of_step(0, picks)
    assert of_step(STEPS[-1], uneven) > 16.0 * of_step(0, uneven)
    assert all(one.file.exists() for one in captured())
