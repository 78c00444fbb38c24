"""Answers stay finite and inside the bound where exponentials overflow and underflow."""

import math

import torch

from flashproof import grids
from flashproof.registry import check
from flashproof.reports.record import Curve
from flashproof.subject import Recorder, Subject


@check("stability", grid=grids.shifted, single=False)
def test_shifted_scores(subject: Subject) -> None:
    """All scores are moved to where exponentials overflow or underflow (11.09, 87 to 89, 128, -104, 65504, 2.5e5): the
    answer stays inside the bound."""
    for case in subject.cases:
        subject.judge(case, axes={"score": case.shift})


@check("stability", grid=grids.spiked, single=False)
def test_spiked_scores(subject: Subject) -> None:
    """One score of each row is moved to where exponentials overflow or underflow: the answer stays inside the bound."""
    for case in subject.cases:
        subject.judge(case, axes={"score": case.magnitude})


def naive_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Computes the textbook softmax, which does not subtract the maximum before the exponential."""
    exponentials = torch.exp(scores)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def test_naive_softmax_overflows_at_88_72(recorder: Recorder) -> None:
    """Records the curves of a chart in the report: the error of the weight of one score s beside a score of zero.

    The weight is 1/(1 + exp(-s)). If the maximum is not subtracted, it is NaN above 88.7228.
    """
    sweep = [80.0 + step / 8.0 for step in range(81)]
    scores = torch.tensor([[score, 0.0] for score in sweep], dtype=torch.float32)
    exact = [1.0 / (1.0 + math.exp(-score)) for score in sweep]
    for name, softmax in (
        ("naive: exp(s) / sum exp(s)", naive_softmax),
        ("shifted: exp(s - max) / sum exp(s - max)", lambda x: torch.softmax(x, dim=-1)),
    ):
        weights = softmax(scores)[:, 0].tolist()
        error = [abs(got - true) if math.isfinite(got) else None for got, true in zip(weights, exact, strict=True)]
        recorder.add(
            Curve(
                run=recorder.run,
                chart="overflow",
                series=name,
                device="cpu",
                x=sweep,
                y=error,
                x_title="score",
                y_title="error of its weight",
            )
        )
    finite = naive_softmax(scores)[:, 0].isfinite().tolist()
    first = next(score for score, is_finite in zip(sweep, finite, strict=True) if not is_finite)
    largest_float32 = 128.0 * math.log(2.0)  # 88.7228: the exponential of a larger score overflows float32
    assert first - 1.0 / 8.0 <= largest_float32 < first
    assert torch.softmax(scores, dim=-1).isfinite().all()


def test_the_landmarks_stand_on_both_sides() -> None:
    """Landmarks lie below and above each threshold.

    The thresholds are the overflow and underflow of exp in float32, of float16, and of exp2.
    """
    powers_of_two = [power * math.log(2.0) for power in (128.0, 127.0, -126.0, -150.0)]
    for threshold in (*powers_of_two, math.log(65504.0)):
        close = [score for score in grids.LANDMARKS if abs(score - threshold) < 1.0]
        assert min(close) < threshold < max(close), threshold
