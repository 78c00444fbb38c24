"""The subject of a check: one implementation, one dtype, one device.

A subject runs the implementation on cases, judges the answers, records them, and describes failures. A check decides
what to do with each case, and never depends on the implementation.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import hypothesis
import msgspec
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from flashproof import judging, questions, search, ways
from flashproof.calling import (
    GRADIENTS,
    UNOBSERVED,
    Answer,
    Fault,
    Forward,
    Observer,
    Refused,
    TensorName,
    answered_before,
    attend,
    forward,
    go_back,
)
from flashproof.cases import Case
from flashproof.defects import Defect
from flashproof.impls.spec import Arithmetic, Device, Dtype, Implementation
from flashproof.judging import Judged
from flashproof.reports import wording
from flashproof.reports.record import Judgement, Record, Status
from flashproof.sandbox.process_state import FILTERS
from flashproof.space import Space, levels, simplest
from flashproof.tensors import Inputs, inputs

FORWARD: tuple[TensorName, ...] = ("out", "lse")
BACKWARD = GRADIENTS
SLOW = 0.1  # seconds
LONG = 384  # queries; after a shorter sequence, the next one never takes long
REPETITIONS = 16  # repetitions of a call whose bits may vary from run to run
ASKED_ABOUT = 2**21  # scores of a key head; with more, no other question is searched: each takes an oracle
ENDED_BY = "the check was ended by "  # the start of the message of a check that is itself at fault
WITHOUT_GRADIENT = "the output carries no gradient"
NO_GRADIENT = "the output carries no gradient, although backward is claimed"
Result = TypeVar("Result")
Answered = tuple[list[Judged], ways.Computed]  # the verdicts on one answer, and the answer


class Explained(NamedTuple):
    """What is found about a failure.

    question: the other question that it answers, or empty. words: the simplest case that fails, or where failures
    begin. simplest: the answer to this case, if it still fails. of_simplest: the other question that it answers.
    """

    question: str = ""
    words: str = ""
    simplest: Answered | None = None
    of_simplest: str = ""


@dataclass(eq=False)
class Subject:
    """What a check receives. `cases`: the claimed cases of its grid, or those of --case."""

    implementation: Implementation
    dtype: Dtype
    device: Device
    check: str  # "accuracy/forward"
    space: Space  # the space of the implementation in this run
    cases: list[Case]
    run: str
    emit: Callable[[Record], None]
    defects: Sequence[Defect] = ()  # the entries of known_defects.toml for this check here
    observer: Observer | None = None  # observes the calls, in a process that may die in a call
    explains: bool = True  # whether the first failure is examined: which question it answers, where it begins
    simplifying: float = 3.0  # how many seconds the search for a simpler case that fails may take
    failures: list[Judgement] = field(default_factory=list)
    expected: list[Defect] = field(default_factory=list)  # known defects of some cases, one for each case that failed
    refusals: list[str] = field(default_factory=list)
    judged: int = 0
    carried: bool = False  # whether the output of any call of the check carried a gradient

    @property
    def tensors(self) -> tuple[TensorName, ...]:
        """The tensors that the implementation returns, with gradients if it claims a backward."""
        return FORWARD + BACKWARD if self.implementation.supports.backward else FORWARD

    # ------------------------------------------------------------------------------------------------ figures

    def judge(self, case: Case, *, axes: dict[str, float] | None = None) -> list[Judged]:
        """Calls the kernel as the case says, and judges every answer. Empty if the kernel refused or failed to answer.

        Each tensor is judged by rho and bias. A change of global state is a failure.
        """
        verdicts: list[Judged] = []
        for found in self._tried(case, lambda: self._computed(case)) or ():
            if found.case.backward and self.implementation.supports.backward:
                self._carries_gradient(case, found.answer.has_gradient)
            # Imports during a call may add warnings filters. The check contract/answers tests for that.
            if changed := [name for name in found.answer.changed if name != FILTERS]:
                self.fail(case, f"the call changed {', '.join(changed)}")
            names = (*FORWARD, *ways.wanted(found.case))
            verdicts += self.judge_answer(
                found.answer, found.case, names, axes=axes, given=found.given, note=found.note
            )
        return verdicts

    def _computed(self, case: Case) -> list[ways.Computed]:
        return list(ways.computed(self.implementation, case, self.device, self._observer))

    def claim(self, case: Case) -> Arithmetic:
        """The arithmetic by which an answer to a case is judged."""
        return ways.arithmetic(self.implementation, case, self.device)

    def judge_answer(
        self,
        answer: Answer,
        case: Case,
        names: tuple[TensorName, ...],
        *,
        axes: dict[str, float] | None = None,
        given: Inputs | None = None,
        note: str = "",
    ) -> list[Judged]:
        """Judges an answer to a case, and records the verdicts.

        given: the input tensors, if they are not the case's own. note: further words for a failure.
        """
        verdicts = judging.judge(answer, case, self.claim(case), names, given)
        self._record_judged(verdicts, answer, case, axes=axes or {}, given=given, note=note)
        return verdicts

    def attend(self, case: Case, *, backward: bool, given: Inputs | None = None) -> Answer | None:
        """The answer to a case, or None if the kernel refused or failed. Refusals and failures are recorded.

        given: input tensors in place of the case's own.
        """
        answer = self._tried(
            case,
            lambda: attend(
                self.implementation,
                case,
                given or inputs(case, self.device),
                backward=backward,
                observer=self._observer,
            ),
        )
        return answer if answer is None or not backward or self._carries_gradient(case, answer.has_gradient) else None

    def forward(self, case: Case, given: Inputs) -> Forward | None:
        """The forward of a call, whose backward may follow. None as in `attend`."""
        return self._tried(
            case, lambda: forward(self.implementation, case, given, wanted=BACKWARD, observer=self._observer)
        )

    def backward(self, call: Forward | None) -> Answer | None:
        """The backward of a call. None as in `attend`."""
        if call is None or not self._carries_gradient(call.case, call.carries_gradient):
            return None
        return self._tried(call.case, lambda: go_back(call))

    def _tried(self, case: Case, run: Callable[[], Result]) -> Result | None:
        """The result of a run of the kernel. None if the kernel refused or failed, which is recorded."""
        try:
            return run()
        except Refused as refusal:
            self.refusals.append(str(refusal))
            self._emit(case, "refused", message=str(refusal), of_every_call=refusal.of_every_call)
            self._ask_again()
        except Fault as fault:
            self.fail(case, str(fault), of_every_call=fault.of_every_call)
            self._end_if_spoilt(fault)
        return None

    def _ask_again(self) -> None:
        """After the first refusal of a check, calls the kernel for a case that it answered before.

        A kernel that refuses that case too has not declined an input. The kernel is broken, and this is a failure.
        """
        if len(self.refusals) == 1 and (case := answered_before(self.implementation)):
            self.attend(case, backward=False)

    @property
    def _observer(self) -> Observer:
        return self.observer or UNOBSERVED

    def _end_if_spoilt(self, fault: Fault) -> None:
        """Ends this process if a kernel left it unusable. The failure is recorded, and another process continues."""
        if fault.spoils:
            self._observer.spoilt()

    def _carries_gradient(self, case: Case, carries: bool) -> bool:
        """Whether a backward can follow. If not, this is recorded."""
        if carries:
            self.carried = True
        elif not self.implementation.bare:
            self.fail(case, NO_GRADIENT)
        elif self.carried or self._carries_on_another_call(case):
            self.fail(
                case,
                "the output carries no gradient, but that of another call did: the kernel lost it without an error",
            )
        else:
            self.refusals.append(WITHOUT_GRADIENT)
            self._emit(case, "refused", message=f"{WITHOUT_GRADIENT}: backward is not verified")
        return carries

    def _carries_on_another_call(self, case: Case) -> bool:
        """Whether the output of another call with the same input carries a gradient. A check asks this once.

        An earlier check may have seen a gradient that this check has not seen.
        """
        if WITHOUT_GRADIENT in self.refusals:
            return False
        again = replace(case, call="plain", wanted="all")
        given = inputs(again, self.device)
        answer = self._tried(
            again,
            lambda: attend(self.implementation, again, given, backward=True, observer=self._observer),
        )
        return answer is not None and answer.has_gradient

    def is_slow(self, case: Case) -> bool:
        """Whether a long sequence takes over a tenth of a second, twice. The first of two calls may have compiled.

        The next longer sequence takes about ten times as long.
        """
        if case.queries < LONG:
            return False
        backward = self.implementation.supports.backward
        answers = (self.attend(case, backward=backward) for _ in range(2))
        return all(answer is not None and answer.seconds > SLOW for answer in answers)

    # ------------------------------------------------------------------------------------------------ properties

    def expect(self, holds: bool, case: Case, message: str, **fields: object) -> None:
        """Records whether a property holds. message: what is wrong otherwise. fields: further fields of the record."""
        if holds:
            self.judged += 1
            self._emit(case, "passed", **fields)
        else:
            self.fail(case, message, **fields)

    def expect_equal(self, first: Tensor, second: Tensor, case: Case, name: str, message: str) -> None:
        """Records whether two results are bitwise equal (0 equals -0). A failure names the first difference."""
        if torch.equal(first, second):
            self.expect(True, case, message)
            return
        apart = (first != second) & ~(first.isnan() & second.isnan())
        if not apart.any():
            self.fail(case, f"{message}: {name} holds NaN")
            return
        index = tuple(int(i) for i in apart.nonzero()[0])
        values = f"{first[index].item()} and {second[index].item()}"
        self.fail(
            case,
            f"{message}: {name} differs in {int(apart.sum())} of {apart.numel()} elements, "
            f"first at {list(index)}: {values}",
        )

    def varies(self, case: Case, name: TensorName, *runs: tuple[Inputs, Tensor]) -> bool:
        """Whether this tensor has other bits in a repetition of the same call, as with atomic sums.

        False for an implementation that claims to be deterministic. runs: inputs, and the first answer to them. Each
        call is repeated until an answer differs or REPETITIONS is reached; a rare difference takes many repetitions.
        """
        if self.implementation.supports.deterministic:
            return False
        for _ in range(REPETITIONS):
            for given, first in runs:
                again = self.attend(case, backward=name in BACKWARD, given=given)
                if again is None or not torch.equal(again[name], first):
                    return True
        return False

    def fail(self, case: Case, message: str, **fields: object) -> None:
        """Records a failure with this message."""
        self.judged += 1
        self._failed(case, message=message, **fields)

    # ------------------------------------------------------------------------------------------------ search

    def search(self, strategy: st.SearchStrategy[Case]) -> None:
        """Lets Hypothesis search for a case that fails, guided by each tensor's rho, and shrinks it.

        Only the smallest failing case is recorded, or else the case with the largest rho.
        """
        worst: tuple[float, Answered] | None = None
        failed: list[tuple[Answered | None, Case, str]] = []
        budget = search.Search(is_slow=bool(self.implementation.slow(self.device)))
        tried: list[Case] = []

        def attempt(case: Case) -> None:
            nonlocal worst
            if budget.is_over and not failed:  # a failure is shrunk even after the end of the time
                return
            if self._of_some_cases(case):
                return
            tried.append(case)
            try:
                answers = self._computed(case)
            except Refused as refusal:
                self.refusals.append(str(refusal))
                return
            except Fault as fault:
                if fault.spoils:
                    self.fail(case, str(fault))
                    self._end_if_spoilt(fault)
                failed.append((None, case, str(fault)))
                raise AssertionError(str(fault)) from fault
            has_backward = self.implementation.supports.backward
            if has_backward and not all(found.answer.has_gradient for found in answers if found.case.backward):
                if self.implementation.bare:
                    return
                failed.append((None, case, NO_GRADIENT))
                raise AssertionError("no gradient")
            climbed: dict[str, float] = {}
            for found in answers:
                names = (*FORWARD, *ways.wanted(found.case))
                verdicts = judging.judge(found.answer, found.case, self.claim(found.case), names, found.given)
                for judged in verdicts:
                    if math.isfinite(judged.worst_rho):
                        climbed[judged.tensor] = max(judged.worst_rho, climbed.get(judged.tensor, 0.0))
                rho = max((judged.worst_rho for judged in verdicts), default=0.0)
                if worst is None or rho >= worst[0]:
                    worst = (rho, (verdicts, found))
                if not all(judged.passed for judged in verdicts):
                    failed.append(((verdicts, found), case, ""))
                    raise AssertionError(f"rho {rho:.3g}")
            for tensor, rho in climbed.items():
                hypothesis.target(rho, label=tensor)

        try:
            for _ in budget.runs():
                budget.decorated(hypothesis.given(strategy)(attempt))()
        except (AssertionError, hypothesis.errors.Flaky, ExceptionGroup):
            if not failed:
                raise  # not a failure of the kernel: the search itself is at fault
            answered, case, fault = failed[-1]  # Hypothesis ends with the smallest failing case
            if answered is None:
                self.fail(case, fault)
            else:
                verdicts, found = answered
                self._record_judged(verdicts, found.answer, found.case, given=found.given, note=found.note)
            return
        if worst is not None:
            _, (verdicts, found) = worst
            pairs, triples = self.space.completed(tried)
            added = f"they add {wording.plural(pairs, 'pair')} and {wording.plural(triples, 'triple')} of levels"
            note = f"the worst of {wording.plural(len(tried), 'case')}; {added}"
            self._record_judged(verdicts, found.answer, found.case, given=found.given, note=note)

    # ------------------------------------------------------------------------------------------------ records and words

    def _judgement(self, case: Case, status: Status, **fields: object) -> Judgement:
        about: dict[str, str] = {
            "run": self.run,
            "implementation": self.implementation.name,
            "check": self.check,
            "case": str(case),
        }
        about |= {"dtype": self.dtype, "device": self.device, "status": status}
        return Judgement(**about, **fields)  # type: ignore[arg-type]

    def unfinished(self) -> Judgement:
        """The judgement to record if this process dies in the check. Its case and message are added then."""
        return self._of_no_case(
            "known defect" if self.defect else "failed", link=self.defect.link if self.defect else ""
        )

    def ended_by(self, error: Exception) -> Judgement:
        """The judgement to record if an exception ends the check itself. It is never a known defect of the kernel."""
        return self._of_no_case("failed", message=f"{ENDED_BY}{type(error).__name__}: {error}")

    def _of_no_case(self, status: Status, **fields: object) -> Judgement:
        return msgspec.structs.replace(self._judgement(Case(), status, **fields), case="")

    def _emit(self, case: Case, status: Status, **fields: object) -> None:
        self.emit(self._judgement(case, status, **fields))

    def _of_some_cases(self, case: Case) -> Defect | None:
        """The known defect of some cases that explains a failure of this case."""
        return next((defect for defect in self.defects if defect.where and defect.is_of(case)), None)

    def _failed(self, case: Case, **fields: object) -> None:
        """Records a failure, as a known defect if it is one."""
        of_some = self._of_some_cases(case)
        defect = of_some or self.defect
        words: dict[str, object] = {"message": defect.seen, "link": defect.link} if defect else {}
        self._emit(case, "known defect" if defect else "failed", **fields | words)
        if of_some:
            self.expected.append(of_some)
        else:
            self.failures.append(self._judgement(case, "failed", **fields))

    @property
    def defect(self) -> Defect | None:
        """The known defect of this check that applies to all cases."""
        return next((defect for defect in self.defects if not defect.where), None)

    def _record_judged(
        self,
        verdicts: list[Judged],
        answer: Answer,
        case: Case,
        *,
        axes: dict[str, float] | None = None,
        given: Inputs | None = None,
        note: str = "",
        known: Explained | None = None,
    ) -> None:
        """Records the verdicts on an answer. given, note: as in `judge_answer`. known: about the first that failed.

        Along the lengths, where the numbers are normal, the errors of all elements are recorded too.
        """
        truth = judging.truth_of(answer, case, self.claim(case), given) if "queries" in (axes or {}) else None
        for judged in verdicts:
            self.judged += 1
            fields: dict[str, object] = {"seconds": answer.seconds, "axes": axes or {}}
            if truth and judged.tensor != "lse":
                fields["elements"] = judging.elements(answer[judged.tensor].cpu(), judged.tensor, truth)
            if judged.passed:
                self._emit(case, "passed", **judged.figures(note), **fields)
                continue
            problem = (given or inputs(case, self.device)).problem(case)
            row = "" if judged.tensor in ("dk", "dv") else judging.describe(problem, judged.worst.index)
            fields |= judged.figures(row) | {"message": note}
            found = known or Explained()
            if not known and not self.failures and not self._of_some_cases(case) and self.explains:
                found = self._explained(verdicts, answer, case, judged.tensor, given)
            fields["question"] = found.question
            fields["message"] = "\n".join(words for words in (note, found.question, found.words) if words)
            self._failed(case, **fields)
            known = None  # the other tensors of an answer repeat no words
            if found.simplest:
                of_simplest, there = found.simplest
                self._record_judged(
                    of_simplest,
                    there.answer,
                    there.case,
                    given=there.given,
                    note=there.note,
                    known=Explained(found.of_simplest),
                )

    def _explained(
        self,
        verdicts: list[Judged],
        answer: Answer,
        case: Case,
        name: TensorName,
        given: Inputs | None,
    ) -> Explained:
        """What is found about a failure.

        If this case answers no other question, the simplest case may: its numbers and its mask are plainer. If it
        answers one, the simplest case matters less, so the search for it is short.
        """
        question = self._question(verdicts, answer, case, given)
        if given is not None:
            return Explained(question)
        simple, needs = self._simplest(case, name, self.simplifying / (3.0 if question else 1.0))
        if simple == case:
            return Explained(question, "" if question else self._onset(case, name))
        words = f"the simplest case that fails: {simple}" + (f"; it needs {', '.join(needs)}" if needs else "")
        failing = self._failing(simple)
        if failing is None:  # the kernel does not repeat itself
            return Explained(question, words)
        of_simplest, there = failing
        other = self._question(of_simplest, there.answer, there.case, there.given)
        return Explained(question or other, words, failing, other)

    def _question(self, verdicts: list[Judged], answer: Answer, case: Case, given: Inputs | None) -> str:
        """The other question that the wrong tensors of an answer are right for, in words. The CPU looks for it."""
        if case.heads // case.kv_heads * case.queries * case.keys > ASKED_ABOUT:
            return ""
        problem, claim = (given.on_cpu() if given else inputs(case)).problem(case), self.claim(case)
        truth = judging.truth_of(answer, case, claim, given)
        tensors = {name: tensor.cpu() for name, tensor in answer.tensors.items()}
        return questions.answered(problem, tensors, verdicts, truth, claim)

    def _failing(self, case: Case) -> Answered | None:
        """The verdicts on a case that fails, and its answer. Calls the kernel again. None if it passes now."""
        for found in self._answers(case):
            names = (*FORWARD, *ways.wanted(found.case))
            verdicts = judging.judge(found.answer, found.case, self.claim(found.case), names, found.given)
            if not all(judged.passed for judged in verdicts):
                return verdicts, found
        return None

    def _simplest(self, case: Case, name: TensorName, seconds: float) -> tuple[Case, list[str]]:
        """The simplest case that fails, and the levels without which it passes: none if there was no time to try all.

        It is the case itself if no simpler one fails. The dtype stays, because a check is of one dtype.
        """
        end = time.monotonic() + seconds
        found = simplest(
            case, lambda other: other.dtype == case.dtype and time.monotonic() < end and self._fails(other, name)
        )
        if time.monotonic() >= end:
            return found.case, []
        needed = [factor for factor in found.needs if factor != "dtype"]
        return found.case, [f"{factor} {level}" for factor, level in levels(found.case).items() if factor in needed]

    def _onset(self, case: Case, name: TensorName) -> str:
        """From which magnitude, or shift, the case fails, in words. Halving finds the value."""
        axis = "shift" if case.shift else "magnitude"
        value = getattr(case, axis)
        for _ in range(6):
            if not self._fails(replace(case, **{axis: value / 2.0}), name):
                return f"passes at {axis} {value / 2.0:g}, fails from {value:g}"
            value /= 2.0
        return f"fails at every {axis} from {value:g} to {getattr(case, axis):g}"

    def _fails(self, case: Case, name: TensorName) -> bool:
        """Whether this tensor of an answer to a case is outside the bound. False if there is no memory to judge it."""
        try:
            found = self._answers(case)
            verdicts = [judging.judge(one.answer, one.case, self.claim(one.case), (name,), one.given) for one in found]
        except RuntimeError as error:
            if "can't allocate memory" in str(error):
                return False
            raise
        return not all(judged.passed for of_one in verdicts for judged in of_one)

    def _answers(self, case: Case) -> list[ways.Computed]:
        """The answers to a case. Empty if the kernel refused or failed, which is not recorded."""
        try:
            return self._computed(case)
        except (Refused, Fault, ValueError):  # ValueError: numbers that the dtype cannot hold
            return []


class Recorder:
    """Adds other records than judgements to a run: memory, traffic, curves, figures of compilers."""

    def __init__(self, run: str, emit: Callable[[Record], None]) -> None:
        self.run = run
        self.add = emit


@contextmanager
def concluded(subject: Subject) -> Generator[None]:
    """Runs a check, and turns its findings into pytest's outcome."""
    try:
        yield
    except Exception as error:
        subject.emit(subject.ended_by(error))  # so that the report does not show an unfinished check as passed
        raise
    if subject.failures:
        pytest.fail(summary(subject), pytrace=False)
    if subject.expected:
        pytest.xfail(f"{subject.expected[0].seen} ({subject.expected[0].link})")
    if not subject.judged and subject.refusals:
        pytest.skip(f"refused: {subject.refusals[0]}")
    if not subject.judged:
        pytest.skip("no case in this run: no claimed case of this check was selected")


def summary(subject: Subject, most: int = 3) -> str:
    """The failures of a check as one text: the first few, and the number of the others.

    A failure of every call is counted once.
    """
    final = [failure for failure in subject.failures if failure.of_every_call]
    failures = [failure for failure in subject.failures if failure not in final[1:]]
    shown = [wording.failure_block(failure) for failure in failures[:most]]
    rest = len(failures) - len(shown)
    return "\n\n".join([*shown, f"and {wording.plural(rest, 'more failure')} of this check"] if rest else shown)
