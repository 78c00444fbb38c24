"""What the probes share: the answer of one call, comparison with exact answers, and judgement of a root mean square."""

import torch
from torch import Tensor

from flashproof.calling import TENSORS, Answer, TensorName
from flashproof.cases import Case
from flashproof.oracles import bounds, verdict
from flashproof.oracles.naive import Attention
from flashproof.reports.record import figure
from flashproof.subject import Subject
from flashproof.tensors import Inputs


def answer_to(subject: Subject, case: Case, given: Inputs | None = None) -> Answer | None:
    """Returns the output, the LSE where it is claimed, and the gradients where there are any, all from one call.

    If only the backward is refused, returns the answer of a forward alone. Returns None if the case was refused or
    failed. given: tensors in place of the case's own.
    """
    refusals = len(subject.refusals)
    answer = subject.attend(case, backward=subject.implementation.supports.backward, given=given)
    if answer is None and any("backward" in said or "gradient" in said for said in subject.refusals[refusals:]):
        return subject.attend(case, backward=False, given=given)  # only the backward was refused: judge the forward
    return answer


def expect_inside_bound(subject: Subject, case: Case, answer: Answer, given: Inputs, what: str) -> None:
    """Judges every tensor of an answer by its bound.

    given: the inputs of the call, which differ from the case's own. what: describes them in the message.
    """
    subject.judge_answer(answer, case, TENSORS, given=given, note=f"where {what}")


def before_rounding(subject: Subject, case: Case, given: Inputs) -> Attention:
    """Returns `bounds.before_rounding` for the arithmetic that the subject claims, on the CPU."""
    problem = given.problem(case)
    bound = bounds.before_rounding(problem, subject.implementation.arithmetic(subject.dtype, subject.device))
    return Attention(*(tensor.cpu() for tensor in (bound.out, bound.lse, bound.dq, bound.dk, bound.dv)))


def expect_exact(
    subject: Subject, case: Case, name: TensorName, actual: Tensor, exact: Tensor, before: Tensor, what: str
) -> None:
    """Expects the exact result, bit for bit, wherever the last rounding leaves no other.

    before: the bound before that rounding. what: describes the exact result in the message.
    """
    actual, exact = actual.cpu(), exact.cpu()
    missed = verdict.missed(actual, exact, before)
    message = ""
    if missed.any():
        index = tuple(int(i) for i in missed.nonzero()[0])
        message = (
            f"{what}: the dtype holds the exact {name},"
            f" but {int(missed.sum())} of {missed.numel()} elements differ from it,"
            f" first at {list(index)}: got {actual[index].item()}, exact {exact[index].item()}"
        )
    subject.expect(not missed.any(), case, message, tensor=name)


def expect_rms(subject: Subject, case: Case, name: TensorName, found: verdict.Rms | None, what: str) -> None:
    """Records a root mean square, which must not be too large.

    found: None if there are too few rows; then nothing is recorded. what: the quantity whose errors these are.
    """
    if found is None:
        return
    message = (
        f"the root mean square of the errors of {what} is {found.value:.3g} times what the claimed arithmetic makes;"
        f" {bounds.RMS_ALLOWANCE:g} times is allowed"
        f" (as squares: {found.square:.3g}, standard error {found.standard_error:.2g})"
    )
    subject.expect(
        not found.too_large, case, message, tensor=name, rms=figure(found.value), rms_error=found.standard_error
    )


def by_query_head(tensor: Tensor, case: Case) -> Tensor:
    """Repeats each key head of a tensor for every query head of its group."""
    return tensor.repeat_interleave(case.heads // case.kv_heads, dim=1)


def over_groups(tensor: Tensor, case: Case) -> Tensor:
    """Sums a tensor of query heads over the heads that share a key head."""
    batch, heads, *rest = tensor.shape
    return tensor.reshape(batch, case.kv_heads, heads // case.kv_heads, *rest).sum(dim=2)


def in_float64(tensor: Tensor) -> Tensor:
    """Returns the same numbers in float64."""
    return tensor.to(torch.float64)
