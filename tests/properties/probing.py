"""What the probes share: forward and backward of one call, and the words of a root mean square."""

from oracles import bounds, verdict
from reports.record import figure
from tests.cases import Case, Inputs
from tests.running import Answer, TensorName
from tests.subject import Subject


def answer_to(subject: Subject, case: Case, given: Inputs | None = None) -> Answer | None:
    """Output, LSE where claimed, and gradients where there are any: one call serves all. None where the case was refused or failed."""
    refusals = len(subject.refusals)
    answer = subject.attend(case, backward=subject.implementation.supports.backward, given=given)
    if answer is None and any("backward" in said or "gradient" in said for said in subject.refusals[refusals:]):
        return subject.attend(case, backward=False, given=given)  # it runs forward only, and that is judged
    return answer


def expect_rms(subject: Subject, case: Case, name: TensorName, found: verdict.Rms | None, what: str) -> None:
    """Records a root mean square, which must not be too large; where there are too few rows to tell, nothing."""
    if found is None:
        return
    message = (
        f"{what}: {found.value:.3g} times the root mean square that the claimed arithmetic spreads, where {bounds.RMS_ALLOWANCE:g} is allowed"
        f" (its square is {found.square:.3g}, with a standard error of {found.standard_error:.2g})"
    )
    subject.expect(not found.too_large, case, message, tensor=name, rms=figure(found.value), rms_error=found.standard_error)
