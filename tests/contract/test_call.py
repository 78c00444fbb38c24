"""The contract of the call: what comes back, what must not change, and that an answer depends on its own call alone.

After every call of every check, flashproof compares the inputs, the output gradient and the memory around them with
what they held before. It also looks whether the answer shares memory with an input, and whether one process came back.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from flashproof import grids, judging
from flashproof.calling import Answer, Forward, TensorName
from flashproof.cases import Case, Layouts, not_claimed
from flashproof.impls.spec import Device, Dtype
from flashproof.registry import check
from flashproof.sandbox.process_state import FILTERS
from flashproof.subject import BACKWARD, FORWARD, Subject
from flashproof.tensors import Inputs, inputs

CALLS = 24  # of one input in a row
TURNED: Layouts = ("transposed", "transposed", "transposed", "transposed")
BUSY = 200_000_000  # clock cycles for which a GPU's stream is kept from what follows: about a tenth of a second


@check("contract", grid=grids.small, early=True)
def test_answers(subject: Subject) -> None:
    """A plain call returns an output (and an LSE) of the right shape, dtype and device, without NaN or infinity."""
    for case in subject.cases:
        answer = subject.attend(case, backward=subject.implementation.supports.backward)  # a wrong form is a fault, recorded there
        if answer is not None:
            subject.expect(all(tensor.isfinite().all() for tensor in answer.tensors.values()), case, "the answer to an ordinary input holds NaN or infinity")


@check("contract", grid=grids.small, early=True)
def test_inputs_stay(subject: Subject) -> None:
    """A call leaves the inputs, the output gradient and the memory around them as they were, bit for bit."""
    for case in subject.cases:
        if subject.attend(case, backward=subject.implementation.supports.backward) is not None:  # a change is a fault, recorded there
            subject.expect(True, case, "")


@check("contract", grid=grids.small, early=True)
def test_answer_is_its_own(subject: Subject) -> None:
    """A second call leaves the output, the LSE and the gradients of the first call as they were."""
    passes = (False, True) if subject.implementation.supports.backward else (False,)  # of one without gradients, the output is looked at all the same
    for case, backward in product(subject.cases[-1:], passes):
        first = subject.attend(case, backward=backward)
        if first is None:
            continue
        kept = {name: tensor.clone() for name, tensor in first.tensors.items()}
        if subject.attend(replace(case, seed=case.seed + 1), backward=backward) is None:
            continue
        for name, tensor in kept.items():
            subject.expect_equal(tensor, first[name], case, name, f"a second call changed the {'output' if name == 'out' else name} of the first call")


def _is_one_memory(case: Case) -> bool:
    """Whether several entries of a tensor are one, so that none of them can be changed alone."""
    return bool({"expanded", "pooled", "summed"} & set(case.layouts)) or case.sharing != "apart"


@check("contract", grid=grids.small, early=True)
def test_call_after_call(subject: Subject) -> None:
    """Every call gets its own answer, whatever was called before: other values, the same buffers with new values,
    another batch size, other strides."""
    for plain in subject.cases[-1:]:
        case = replace(plain, queries=plain.queries + 1, keys=plain.keys + 1)  # a shape that no check before has asked for
        given = inputs(case, subject.device)
        other, renewed, larger = (replace(case, seed=case.seed + 1), replace(case, seed=case.seed + 2), replace(case, batch=case.batch + 1))
        calls: list[tuple[str, Case, Inputs | None]] = [
            ("", case, _as_new(given)),  # a failure of the first call is none of the row
            ("the same call again", case, given),
            ("other values of the same shape", other, None),
            ("another batch size", larger, None),
            ("the first batch size again", other, None),
        ]
        if subject.implementation.supports.strided and not _is_one_memory(case):
            turned = replace(case, layouts=TURNED if case.layouts[0] == "contiguous" else Case().layouts)
            calls += [("other strides", turned, None), ("the first strides again", other, None)]
        if not _is_one_memory(case):
            calls += [("new values in the tensors of the first call", renewed, given)]
        answered: list[tuple[int, Case, Answer]] = []
        for number, (words, call, tensors) in enumerate(calls, start=1):
            there = _as_new(_renew(given, inputs(call, subject.device))) if call is renewed else tensors
            refused = len(subject.refusals)
            answer = subject.attend(call, backward=subject.implementation.supports.backward, given=there)
            if answer is None and len(subject.refusals) > refused:
                continue  # another batch size or stride; a refusal of what had been answered is a fault
            if answer is None:
                break
            # Calls that were given other values, and got the same bits.
            others = [(earlier, out) for earlier, asked, out in answered if replace(asked, layouts=call.layouts) != call]
            stale = [f"; its out is bit for bit the out of call {earlier}" for earlier, out in others if torch.equal(answer["out"], out["out"])]
            note = f"call {number} of {len(calls)} in a row: {words}" + "".join(stale[:1]) if words else ""
            subject.judge_answer(answer, call, subject.tensors, note=note)
            answered.append((number, call, answer))
        for wanted in (BACKWARD, ()) if subject.implementation.supports.backward else ((),):
            _judge_renewed(subject, plain, wanted)


def _judge_renewed(subject: Subject, case: Case, wanted: tuple[TensorName, ...]) -> None:
    """The very tensors of a call in another one, with new values, as where a graph of calls is replayed; and new tensors at their addresses."""
    if _is_one_memory(case):
        return
    given = inputs(case, subject.device)
    first, renewed, again = (_as_new(given), replace(case, seed=case.seed + 1), replace(case, seed=case.seed + 2))
    call = subject.forward(case, first, wanted=wanted)
    if call is None:
        return
    _renew(first, inputs(renewed, subject.device))
    second = subject.forward(renewed, first, wanted=wanted, leaves=call.leaves)
    answer = _answer(subject, second)
    if answer is not None:
        subject.judge_answer(answer, renewed, FORWARD + wanted, note="new values in the very tensors of the call before")
    third = subject.forward(again, _as_new(_renew(given, inputs(again, subject.device))), wanted=wanted)
    answer = _answer(subject, third)
    if answer is not None:
        subject.judge_answer(answer, again, FORWARD + wanted, note="new tensors at the addresses of those of the call before")


def _answer(subject: Subject, call: Forward | None) -> Answer | None:
    """With its gradients, where any are wanted."""
    return subject.backward(call) if call is None or any(leaf.requires_grad for leaf in call.leaves) else call.answer()


def _as_new(given: Inputs) -> Inputs:
    """The same memory in tensors that no one has changed yet, as an allocator hands out what was freed: to autograd they are version 0."""
    return replace(given, query=given.query.data, key=given.key.data, value=given.value.data, dout=given.dout.data)


def _renew(given: Inputs, new: Inputs) -> Inputs:
    """The values of other inputs in the memory of these."""
    for old, tensor in ((given.query, new.query), (given.key, new.key), (given.value, new.value), (given.dout, new.dout)):
        old.copy_(tensor)
    return replace(given, block_mask=new.block_mask)


@check("contract", grid=grids.trained, single=False, early=True)
def test_other_options(subject: Subject) -> None:
    """Calls of one shape with different masks, scales, block masks or dropout seeds each get the answer to their own options."""
    for case in subject.cases[-1:]:
        for calls in _options(case):
            for number, call in enumerate(calls, start=1):
                if not_claimed(call, subject.implementation.supports):
                    break
                answer = subject.attend(call, backward=subject.implementation.supports.backward)
                if answer is not None:
                    note = f"call {number} of {len(calls)} in a row: the same shape, with another option" if number > 1 else ""
                    subject.judge_answer(answer, call, subject.tensors, note=note)


def _options(case: Case) -> list[list[Case]]:
    """Rows of calls that differ in one option: what is claimed of the first is not always claimed of the next."""
    blocks, longer = replace(case, mask="full", keys=260, blocks=0.5), replace(case, keys=case.keys + 1)
    return [
        [replace(case, mask="full"), replace(case, mask="causal")],
        [replace(longer, mask="causal"), replace(longer, mask="causal-br")],
        [replace(case, scale=None), replace(case, scale=0.5), replace(case, scale=0.25)],
        [replace(case, dropout=0.25), replace(case, dropout=0.25, seed=case.seed + 1)],
        [replace(blocks, seed=case.seed + 1), replace(blocks, seed=case.seed + 2)],
    ]


@check("contract", grid=grids.trained, single=False, early=True)
def test_keywords(subject: Subject) -> None:
    """Keywords that change nothing may be given or left out: no return_lse, no causal_alignment, enable_gqa for equal heads."""
    kernel, supports = subject.implementation, subject.implementation.supports
    aligned = len(supports.causal) == 2
    for case in subject.cases[-1:]:
        # Two kernels may answer with and without return_lse: the other one sees groups and large scores, too.
        harder = replace(case, magnitude=64.0, heads=4 if supports.grouped_heads else case.heads, kv_heads=2 if supports.grouped_heads else case.kv_heads)
        calls = [
            (supports.lse, "without return_lse", case, subject.without_lse),
            (supports.lse, "without return_lse", harder, subject.without_lse),
            (aligned, "without causal_alignment", replace(case, keys=case.keys + 5), replace(kernel, supports=replace(supports, causal=("top_left",)))),
            (supports.grouped_heads, "with enable_gqa=True for equal heads", case, replace(kernel, attention=partial(kernel.attention, enable_gqa=True))),
        ]
        for is_claimed, words, call, called in calls:
            if not is_claimed or not_claimed(call, supports):
                continue
            answer = subject.attend(call, backward=supports.backward, called=called)
            if answer is not None:
                subject.judge_answer(answer, call, subject.tensors, note=f"called {words}")


@check("contract", grid=grids.addresses, claims=("unaligned",), early=True)
def test_addresses(subject: Subject) -> None:
    """Tensors may begin at an address that is no multiple of 16 bytes, as slices of other tensors do."""
    for case in subject.cases:
        subject.judge(case, subject.tensors)


def _same(first: Answer, second: Answer) -> bool:
    return all(first[name].shape == second[name].shape and torch.equal(first[name], second[name]) for name in first.tensors if name in second)


@check("contract", grid=grids.small, early=True)
def test_calls_agree(subject: Subject) -> None:
    """Many calls in a row with one input are all answered inside the bound."""
    arithmetic = subject.implementation.arithmetic(subject.dtype, subject.device)
    for plain in subject.cases[-1:]:
        case = replace(plain, heads=plain.heads // plain.kv_heads, kv_heads=1)
        given = inputs(case, subject.device)
        judged: list[tuple[Answer, str]] = []  # answers that differ, each with what is wrong with it
        wrong: list[tuple[int, str]] = []
        for call in range(1, CALLS + 1):
            answer = subject.attend(case, backward=subject.implementation.supports.backward, given=given)
            if answer is None:
                if judged:
                    subject.expect(False, case, f"call {call} with one input brought no answer, and the calls before it did")
                return
            said = next((said for earlier, said in judged if _same(answer, earlier)), None)
            if said is None:
                verdicts = judging.judge(answer, case, arithmetic, subject.tensors)
                worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.worst_rho))
                said = "" if worst.passed else f"{worst.tensor} with rho {worst.worst_rho:.3g}"
                judged.append((answer, said))
            wrong += [(call, said)] if said else []
        first = f"; the first of them is call {wrong[0][0]}: {wrong[0][1]}" if wrong else ""
        often = f"{len(wrong)} of {CALLS}" if len(wrong) < CALLS else f"every one of {CALLS}"
        subject.expect(not wrong, case, f"wrong in {often} calls with one input{first}")


@check("contract", grid=grids.small, early=True)
def test_world_stays(subject: Subject) -> None:
    """A call leaves global state as it was: default dtype, threads, grad mode, random seed, deterministic mode, warnings
    filters, standard streams."""
    passes = (False, True) if subject.implementation.supports.backward else (False,)
    for case, backward in product(subject.cases, passes):
        first, second = (subject.attend(case, backward=backward) for _ in range(2))
        if first is None or second is None:
            continue
        # What a first call imports, or a first backward, may filter warnings of its own.
        changed = dict.fromkeys([*(name for name in first.changed if name != FILTERS), *second.changed])
        subject.expect(not changed, case, f"the call changed {', '.join(changed)}")


def _on_a_gpu(dtype: Dtype, device: Device) -> list[Case]:
    return grids.small(dtype, device) if device == "cuda" else []


@check("contract", grid=_on_a_gpu, early=True)
def test_stream(subject: Subject) -> None:
    """On a GPU, the kernel works in the caller's stream, after the work that this stream already holds."""
    if subject.device != "cuda":
        pytest.skip("CUDA: the check is of streams")
    callers = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for case in subject.cases:
        if _is_one_memory(case):
            continue
        if subject.attend(case, backward=subject.implementation.supports.backward) is None:  # compiles, so that the next call launches at once
            continue
        renewed = replace(case, seed=case.seed + 1)
        given, fresh = inputs(case, subject.device), inputs(renewed, subject.device)
        torch.cuda.synchronize()
        with torch.cuda.stream(callers):
            torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
            answer = subject.attend(renewed, backward=subject.implementation.supports.backward, given=_renew(given, fresh))
        if answer is not None:
            note = "called in a stream that was still filling the inputs; if this check alone fails, the kernel works in another stream"
            subject.judge_answer(answer, renewed, subject.tensors, note=note)
