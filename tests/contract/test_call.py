"""The contract of a call: what the call returns, and that an answer depends only on its own call.

After every call of every check, flashproof compares the inputs, the output gradient and the memory around them with
what they held before. It also checks that the global state is unchanged, that the answer shares no memory with an
input, and that only one process returned from the call.
"""

from dataclasses import replace

import pytest
import torch

from flashproof import grids, judging
from flashproof.calling import Answer, Withheld
from flashproof.cases import Case
from flashproof.impls.spec import Dtype
from flashproof.registry import check
from flashproof.space import Space
from flashproof.subject import BACKWARD, Subject
from flashproof.tensors import inputs, memory, tensors_of

CALLS = 24  # how many calls in a row get the same input
BUSY = 200_000_000  # clock cycles for which a GPU's stream is kept busy: about a tenth of a second
SMALL = "b2 h2 q65 k65 d64\nb1 h2 q40 k40 d32 causal"


@check("contract", grid=grids.lines(SMALL), early=True)
def test_answers(subject: Subject) -> None:
    """A plain call returns an output (and an LSE) of the right shape, dtype and device, without NaN or infinity. It
    leaves its inputs and global state as they were."""
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        # `attend` records a wrong shape, dtype or device, and a changed input, as a fault.
        first, second = (subject.attend(case, backward=backward) for _ in range(2))
        if first is None or second is None:
            continue
        is_finite = all(tensor.isfinite().all() for tensor in first.tensors.values())
        subject.expect(is_finite, case, "the answer to an ordinary input holds NaN or infinity")
        for answer, which in ((first, "first"), (second, "second")):
            subject.judge_answer(answer, case, subject.tensors, note=f"the {which} of two calls")
        # The first call may import modules that add warning filters. So only the second call must change no state.
        subject.expect(not second.changed, case, f"the call changed {', '.join(second.changed)}")


def _same(first: Answer, second: Answer) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.tensors if name in second)


@check("contract", grid=grids.lines("b2 h2 q65 k65 d64", slow="b1 h1 q65 k65 d32"), early=True)
def test_calls_agree(subject: Subject) -> None:
    """Many calls in a row with one input are all answered inside the bound."""
    for case in subject.cases[-1:]:
        given = inputs(case, subject.device)
        judged: list[tuple[Answer, str]] = []  # the distinct answers, each with its error or an empty text
        wrong: list[tuple[int, str]] = []
        for call in range(1, CALLS + 1):
            answer = subject.attend(case, backward=subject.implementation.supports.backward, given=given)
            if answer is None:
                if judged:
                    subject.fail(
                        case, f"call {call} with one input returned no answer, although the calls before it did"
                    )
                return
            said = next((said for earlier, said in judged if _same(answer, earlier)), None)
            if said is None:
                verdicts = judging.judge(answer, case, subject.claim(case), subject.tensors)
                worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.worst_rho))
                lean = ", whose errors lean to one side" if worst.worst_rho <= 1.0 else ""
                said = "" if worst.passed else f"{worst.tensor} with rho {worst.worst_rho:.3g}{lean}"
                judged.append((answer, said))
            wrong += [(call, said)] if said else []
        first = f"; the first of them is call {wrong[0][0]}: {wrong[0][1]}" if wrong else ""
        often = f"{len(wrong)} of {CALLS}" if len(wrong) < CALLS else f"every one of {CALLS}"
        subject.expect(not wrong, case, f"wrong in {often} calls with one input{first}")


@check("contract", grid=grids.where(most=2), claims=("backward",))
def test_changed_in_place(subject: Subject) -> None:
    """If an input, the output or the LSE is changed between forward and backward, the backward raises or is right."""
    for case in subject.cases:
        for name in ("query", "key", "value", "out", "lse"):
            call = subject.forward(case, inputs(case, subject.device))
            if call is None or not call.carries_gradient:
                subject.backward(call)  # records a missing gradient
                break
            tensors = {"query": call.leaves[0], "key": call.leaves[1], "value": call.leaves[2]}
            tensors |= {str(of): tensor for of, tensor in call.tensors.items()}
            if name not in tensors:
                continue
            with torch.no_grad():
                tensors[name].mul_(2.0)
            try:
                answer = subject.backward(call.renewed())
            except Withheld:
                subject.expect(True, case, "")
                continue
            if answer is not None:
                note = f"{name} was changed in place between forward and backward, and the backward did not raise"
                subject.judge_answer(answer, case, BACKWARD, note=note)


def _on_a_gpu(space: Space, dtype: Dtype) -> list[Case]:
    return grids.lines(SMALL)(space, dtype) if space.device == "cuda" else []


@check("contract", grid=_on_a_gpu, early=True, every=False)
def test_stream(subject: Subject) -> None:
    """On a GPU, the kernel works in the caller's stream, after the work that this stream already holds."""
    if subject.device != "cuda":
        pytest.skip("CUDA: the check is of streams")
    callers = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    backward = subject.implementation.supports.backward
    for case in subject.cases:
        if subject.attend(case, backward=backward) is None:  # compiles the kernel: the next call launches at once
            continue
        renewed = replace(case, seed=case.seed + 1)
        given, fresh = inputs(case, subject.device), inputs(renewed, subject.device)
        torch.cuda.synchronize()
        with torch.cuda.stream(callers):
            torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
            for old, new in zip(tensors_of(given), tensors_of(fresh), strict=True):
                memory(old).copy_(memory(new))
            answer = subject.attend(renewed, backward=backward, given=given)
        if answer is not None:
            note = (
                "called in a stream that was still filling the inputs;"
                " if this check alone fails, the kernel works in another stream"
            )
            subject.judge_answer(answer, renewed, subject.tensors, note=note)
