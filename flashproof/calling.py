"""Runs an implementation on a case. The outcome is an answer with tensors, a refusal, or a fault."""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

import numpy
import torch
from torch import Tensor

from flashproof import diagnosis
from flashproof.cases import PLAIN_CALLS, Case
from flashproof.diagnosis import declines, told
from flashproof.impls.spec import Implementation, Supports
from flashproof.sandbox.process_state import left_alone
from flashproof.tensors import Inputs, dropout_seed, memory, tensors_of

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
TENSORS: tuple[TensorName, ...] = get_args(TensorName)
GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")  # of query, key and value, in this order


_About = tuple[str, Case, tuple[tuple[int, ...], ...], bool]
Run = Callable[[Callable[..., object], tuple[Tensor, ...], dict[str, object]], object]
"""What makes a call: it is given the function, query, key and value, and the keywords."""


class Refused(Exception):
    """A bare callable declined the case with a clear exception. This is not a failure.

    of_every_call: it would decline every case on this device in the same way.
    """

    def __init__(self, said: str, *, of_every_call: bool = False) -> None:
        super().__init__(said)
        self.of_every_call = of_every_call


class Withheld(Exception):
    """The backward of a call was refused because its tensors changed after the forward. This is allowed."""


class Fault(Exception):
    """The implementation raised an exception or returned an invalid answer. This is a result; the run continues.

    spoils: the process is unusable from now on, as after a CUDA error. of_every_call: every call would end like this.
    """

    def __init__(self, said: str, *, spoils: bool = False, of_every_call: bool = False) -> None:
        super().__init__(said)
        self.spoils = spoils
        self.of_every_call = of_every_call


@dataclass(frozen=True, eq=False)
class Answer:
    """The detached results of an implementation: lse and gradients only if the call asked for them."""

    tensors: dict[TensorName, Tensor]
    seconds: float
    has_gradient: bool = field(default=True)  # whether the output carried a gradient
    changed: tuple[str, ...] = ()  # global state that the call changed, and that was restored

    def __getitem__(self, name: TensorName) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: TensorName) -> bool:
        return name in self.tensors


def arguments(case: Case, supports: Supports, inputs: Inputs) -> dict[str, object]:
    """The keywords of the call: only those that the case needs, unless the case spells out all of them.

    So a kernel without a keyword still runs on the cases that do not need the keyword.
    """
    keywords: dict[str, object] = {}
    if case.spelled:
        keywords |= _neutral(supports)
    if case.mask != "full":
        keywords["is_causal"] = True
        if "bottom_right" in supports.causal:
            keywords["causal_alignment"] = "top_left" if case.mask == "causal" else "bottom_right"
    if case.scale is not None:
        keywords["scale"] = {"float": float, "int": int, "numpy": numpy.float64}[case.number](case.scale)
    if case.kv_heads != case.heads:
        keywords["enable_gqa"] = True
    if inputs.block_mask is not None:
        keywords["block_mask"] = inputs.block_mask
    if case.dropout:
        keywords["dropout_p"] = case.dropout
        keywords["dropout_seed"] = dropout_seed(case)
    if asks_lse(case, supports):
        keywords["return_lse"] = True
    return keywords


def _neutral(supports: Supports) -> dict[str, object]:
    """The claimed keywords with values that change nothing."""
    known: dict[str, tuple[bool, object]] = {
        "is_causal": (bool(supports.causal), False),
        "causal_alignment": ("bottom_right" in supports.causal, "top_left"),
        "scale": (supports.scale != "default", None),
        "enable_gqa": (supports.grouped_heads, True),
        "block_mask": (supports.block_mask, None),
        "dropout_p": (supports.dropout, 0.0),
        "return_lse": (supports.lse, False),
    }
    return {keyword: value for keyword, (is_claimed, value) in known.items() if is_claimed}


def asks_lse(case: Case, supports: Supports) -> bool:
    """Whether the call returns the LSE beside the output."""
    return supports.lse and case.lse


class Observer(Protocol):
    """Is told when a kernel's code runs. A worker process reports this to the pool, which checks the time."""

    def given(self, case: Case) -> None:
        """The kernel is now called for this case."""

    def returned(self) -> None:
        """The kernel has returned, or raised."""

    def spoilt(self) -> None:
        """The process is unusable, and its failure is recorded. A worker ends; the pool starts another worker."""


class Unobserved:
    """The observer of a call that nobody observes."""

    def given(self, case: Case) -> None:
        """Does nothing."""

    def returned(self) -> None:
        """Does nothing."""

    def spoilt(self) -> None:
        """Does nothing: the process continues."""


UNOBSERVED = Unobserved()


@contextmanager
def calling(case: Case, observer: Observer = UNOBSERVED) -> Generator[list[str], None, None]:
    """The context in which code of the implementation runs. Yields a list of the global state that the code changed."""
    observer.given(case)
    try:
        with warnings.catch_warnings():
            # Warnings are errors in this suite. A kernel's warning says nothing about its arithmetic.
            warnings.simplefilter("ignore")
            with left_alone() as changed:
                yield changed
    finally:
        observer.returned()


@dataclass(frozen=True, eq=False)
class Forward:
    """A call whose forward was answered. Its backward may follow at once, after another call, twice, or never."""

    implementation: Implementation
    observer: Observer
    case: Case
    inputs: Inputs
    leaves: tuple[Tensor, ...]  # query, key and value, as they were passed
    before: dict[str, Tensor]  # the bytes of each input before the call
    tensors: dict[TensorName, Tensor]  # out and, if the call asked for it, lse
    seconds: float
    changed: tuple[str, ...]
    carries_gradient: bool  # whether autograd can go back from the output
    is_changed: bool = False  # whether the caller has changed its tensors since

    def renewed(self) -> "Forward":
        """The same call after the caller has changed its tensors. A backward may refuse, but must not write to them."""
        return replace(
            self,
            before={name: memory(tensor).clone() for name, tensor in _given(self.inputs).items()},
            is_changed=True,
        )

    def answer(self) -> Answer:
        """The answer of a call without a backward."""
        return Answer(
            {name: tensor.detach() for name, tensor in self.tensors.items()},
            self.seconds,
            self.carries_gradient,
            self.changed,
        )


def attend(
    implementation: Implementation, case: Case, inputs: Inputs, *, backward: bool, observer: Observer = UNOBSERVED
) -> Answer:
    """Calls the implementation, and its backward if asked. Raises Refused or Fault.

    A refusal is an exception of a kind that says "not this input" (`diagnosis.declines`). Only a bare callable may
    refuse, and only a case that it has not answered before. An implementation with claims has stated what it takes.
    """
    about = _about(implementation, case, inputs, backward=backward)
    try:
        call = forward(implementation, case, inputs, wanted=GRADIENTS if backward else (), observer=observer)
        answer = go_back(call, plain=True) if backward and call.carries_gradient else call.answer()
    except Refused as refusal:
        if about in _answered:
            raise Fault(f"refused a case that it had answered before: {refusal}") from refusal
        raise
    _answered[about] = case
    return answer


def _about(implementation: Implementation, case: Case, inputs: Inputs, *, backward: bool) -> _About:
    """Identifies calls that a kernel must always answer after one answer, for all values and after all other calls."""
    strides = tuple(tensor.stride() for tensor in _given(inputs).values())
    call = "plain" if case.call in PLAIN_CALLS else case.call
    return implementation.name, replace(case, seed=0, call=call), strides, backward


_answered: dict[_About, Case] = {}  # calls that an implementation answered for any seed, and the case of the last one


def answered_before(implementation: Implementation) -> Case | None:
    """A case whose plain forward the implementation has answered in this process. None if there is none.

    It has the seed of the answered call: the strides of a layout may depend on the seed.
    """
    found = [
        replace(answered, call="plain")
        for (name, case, _, backward), answered in _answered.items()
        if name == implementation.name and not backward and case.call == "plain"
    ]
    return min(found, key=str, default=None)


def forward(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    *,
    wanted: Sequence[TensorName] = (),
    run: Run | None = None,
    leaves: tuple[Tensor, ...] | None = None,
    observer: Observer = UNOBSERVED,
) -> Forward:
    """Calls the implementation. Raises Refused or Fault.

    wanted: the gradients that will be asked for. run: makes the call, for example in another thread. leaves: the
    tensors of an earlier call, if `inputs` are in their memory.
    """
    given = _given(inputs)
    before = {name: memory(tensor).clone() for name, tensor in given.items()}
    leaves = leaves or tuple(
        tensor.detach().requires_grad_(name in wanted)
        for name, tensor in zip(GRADIENTS, (inputs.query, inputs.key, inputs.value), strict=True)
    )
    keywords = arguments(case, implementation.supports, inputs)
    _poison_free_memory(inputs)
    started = time.perf_counter()
    with calling(case, observer) as changed, _one_process():
        try:
            attention = implementation.attention
            returned = run(attention, leaves, keywords) if run else attention(*leaves, **keywords)
            early = _read_in_stream(returned)
            _synchronise(inputs)
        except BaseException as error:
            if _is_the_users(error):
                raise
            ended = _failed_forward(error, implementation, inputs)
            if isinstance(ended, Refused) and _about(implementation, case, inputs, backward=False) in _answered:
                raise Fault(f"refused a case that it had answered before: {ended}") from error
            raise ended from error
    seconds = time.perf_counter() - started
    tensors = _outputs(returned, implementation, case, inputs)
    for name, tensor in tensors.items():
        if any(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in given.values()):
            raise Fault(f"{name} shares memory with an input")
    if early is not None and not _same_bits(early, tensors["out"]):
        raise Fault(
            "out was not ready when the caller's stream read it: it is computed in another stream, "
            "and the caller's stream does not wait for that one"
        )
    _check_untouched(given, before)
    _answered[_about(implementation, case, inputs, backward=False)] = case
    return Forward(
        implementation,
        observer,
        case,
        inputs,
        leaves,
        before,
        tensors,
        seconds,
        tuple(changed),
        _carries_gradient(tensors["out"]),
    )


def _carries_gradient(out: Tensor) -> bool:
    """Whether the output carries a gradient. An operator without a gradient formula has a node that only warns."""
    return out.requires_grad and out.grad_fn is not None and "NotImplemented" not in out.grad_fn.name()


def go_back(
    call: Forward,
    *,
    dout: Tensor | None = None,
    keep: bool = False,
    plain: bool = False,
    onto: bool = False,
    under: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Answer:
    """The backward of a call, by autograd, for the inputs whose gradient is wanted. Raises Refused, Withheld or Fault.

    dout: the output gradient, if it is not the call's own. keep: keeps the graph for another backward, which a bare
    callable may decline. plain: the backward follows its forward at once. A bare callable that declines a plain
    backward has no gradient for the case. If it declines only another backward, that is a fault, except for a
    NotImplementedError. onto: adds to the `grad` of the inputs, as `Tensor.backward` does. under: the context of the
    backward.
    """
    wanted = [(name, leaf) for name, leaf in zip(GRADIENTS, call.leaves, strict=True) if leaf.requires_grad]
    given = call.inputs.dout if dout is None else dout
    started = time.perf_counter()
    with calling(call.case, call.observer) as changed, _one_process():
        try:
            out, leaves = call.tensors["out"], [leaf for _, leaf in wanted]
            gradients: Sequence[Tensor | None]
            with under():
                if onto:
                    torch.autograd.backward(out, given, inputs=leaves, retain_graph=keep)
                    gradients = [leaf.grad for leaf in leaves]
                else:
                    gradients = torch.autograd.grad(out, leaves, given, allow_unused=True, retain_graph=keep)
            _synchronise(call.inputs)
        except BaseException as error:
            if _is_the_users(error):
                raise
            fault = _fault(f"backward raised {told(error)}", error, call.inputs)
            declined = not fault.spoils and declines(error)
            if call.is_changed and declined:
                raise Withheld(told(error)) from error
            if (
                call.implementation.bare
                and declined
                and (plain or keep or isinstance(error, NotImplementedError) or _declines_backward(call))
            ):
                raise Refused(f"backward: {told(error)}") from error
            raise fault from error
    seconds = call.seconds + time.perf_counter() - started
    tensors = dict(call.tensors)
    for (name, leaf), gradient in zip(wanted, gradients, strict=True):
        # A missing gradient means the same as a gradient of zero, and is judged as zero.
        tensors[name] = torch.zeros_like(leaf) if gradient is None else gradient
    _check_untouched(_given(call.inputs), call.before)
    return Answer(
        {name: tensor.detach() for name, tensor in tensors.items()}, seconds, changed=(*call.changed, *changed)
    )


def _declines_backward(call: Forward) -> bool:
    """Whether the backward of the same case is also declined when it follows its forward at once."""
    try:
        attend(call.implementation, call.case, call.inputs, backward=True, observer=call.observer)
    except Refused:
        return True
    except Fault:
        pass
    return False


def _given(inputs: Inputs) -> dict[str, Tensor]:
    return dict(zip(("query", "key", "value", "output gradient", "block mask"), tensors_of(inputs), strict=False))


def _poison_free_memory(inputs: Inputs) -> None:
    """On a GPU, fills memory with NaN where an output or a buffer of sums is likely to be allocated.

    On a CPU, malloc of a worker does the same: sandbox/worker.py.
    """
    if inputs.query.is_cuda:
        shapes = (inputs.query.shape, inputs.key.shape)
        held = [
            torch.full(shape, math.nan, dtype=dtype, device=inputs.query.device)
            for shape in shapes
            for dtype in (inputs.query.dtype, torch.float32)
        ]
        del held


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.detach().contiguous().view(torch.uint8), second.detach().contiguous().view(torch.uint8))


def _check_untouched(given: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Raises Fault if the call wrote to an input, or to the memory around it."""
    after = {name: memory(tensor) for name, tensor in given.items()}
    if not _differ([(after[name], before[name]) for name in given]):
        return
    for name, tensor in given.items():
        now = after[name]
        if torch.equal(now, before[name]):
            continue
        owned = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            before[name].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        if _same_bits(tensor, owned):
            places = (now != before[name]).nonzero().flatten()
            start, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
            first = (int(places[0]) - start) // size
            raise Fault(
                f"the call wrote to memory around its {name}, which it does not own: "
                f"first at element {first:+d}, counted from the tensor's first"
            )
        raise Fault(f"the call changed its {name}")


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the bytes of any pair of buffers differ. To compare eight bytes at once takes a tenth of the time."""
    parts = [part for pair in pairs for part in zip(*map(_in_words, pair), strict=True)]
    if parts[0][0].is_cuda:  # one result to wait for, not one for each tensor
        return bool(torch.stack([(one != other).any() for one, other in parts]).any())
    return not all(torch.equal(one, other) for one, other in parts)


def _in_words(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a buffer as 64-bit words, and the bytes that are left over."""
    whole = len(buffer) // 8 * 8
    return buffer[:whole].view(torch.int64), buffer[whole:]


FORKED = 86  # the exit status of a second process that returned from a call
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


os.register_at_fork(after_in_parent=_count_fork)


@contextmanager
def _one_process() -> Generator[None, None, None]:
    """Ends a child process that returns from a call, which would continue the run. Raises Fault if there was one."""
    process, forks = os.getpid(), _forks
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(FORKED)
    if _forks != forks and _a_child_came_back():
        raise Fault("the call forked its process, and both processes returned from it")


def _a_child_came_back(patience: float = 2.0) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if process and os.waitstatus_to_exitcode(status) == FORKED:
            return True
        if not process:
            time.sleep(0.01)
    return False


def _failed_forward(error: BaseException, implementation: Implementation, inputs: Inputs) -> Refused | Fault:
    """The outcome of a forward that raised: a refusal or a fault, and whether every call would end like this."""
    fault = _fault(f"forward raised {told(error)}", error, inputs)
    if fault.spoils:
        return fault
    is_answered = any(name == implementation.name for name, *_ in _answered)
    tensors = (inputs.query, inputs.key, inputs.value)
    might = implementation.bare and not is_answered and (declines(error) or isinstance(error, AttributeError))
    if might and diagnosis.works_on_arrays(implementation.attention, *tensors):
        words = f"it works on NumPy arrays, and was given tensors: {told(error)}"
        return Fault(
            f"{words}; {diagnosis.converting(implementation.attention, implementation.name)}", of_every_call=True
        )
    if not declines(error):
        return fault
    needs_gpu = not inputs.query.is_cuda and diagnosis.needs_gpu(error)
    if implementation.bare:
        return Refused(told(error), of_every_call=needs_gpu)
    if needs_gpu:
        advice = "an implementation only for CUDA claims Supports(devices=('cuda',))"
        return Fault(f"{fault}; {advice}", of_every_call=True)
    return fault


def _outputs(returned: object, implementation: Implementation, case: Case, inputs: Inputs) -> dict[TensorName, Tensor]:
    """Out, and lse if it was asked for. Raises Fault unless each is a tensor of the right shape, dtype and device."""
    supports = implementation.supports
    shape = (case.batch, case.heads, case.queries, case.dim)
    expected: dict[TensorName, tuple[tuple[int, ...], torch.dtype]] = {"out": (shape, inputs.query.dtype)}
    with_lse = asks_lse(case, supports)
    if with_lse:
        expected["lse"] = (shape[:3], torch.float32)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise Fault(
                f"return_lse=True returned {type(returned).__name__}, not the pair (out, lse)", of_every_call=True
            )
    values = returned if isinstance(returned, tuple) and with_lse else (returned,)
    tensors: dict[TensorName, Tensor] = {}
    for (name, (size, dtype)), value in zip(expected.items(), values, strict=True):
        if not isinstance(value, Tensor):
            raise Fault(
                f"{name} is {diagnosis.not_a_tensor(value, implementation.attention, implementation.name)}",
                of_every_call=True,
            )
        if tuple(value.shape) != size:
            advice = diagnosis.of_another_layout(value.shape, size, case.keys) if name == "out" else ""
            raise Fault(f"{name} has shape {list(value.shape)}, not {list(size)}{advice}")
        if value.dtype != dtype:
            raise Fault(f"{name} has dtype {value.dtype}, not {dtype}")
        if value.device != inputs.query.device:
            raise Fault(f"{name} is on {value.device}, not on {inputs.query.device}")
        tensors[name] = value
    return tensors


def _fault(words: str, error: BaseException, inputs: Inputs) -> Fault:
    """The fault of a call that raised. It tests whether the device still works, since the exception may not say so.

    After an out-of-memory error, the process keeps memory that other processes need, so it counts as spoilt.
    """
    try:
        _synchronise(inputs)
    except RuntimeError as lost:
        return Fault(
            words if _is_cuda_error(error) else f"{words}; the device was left in error: {diagnosis.said(lost)}",
            spoils=True,
        )
    return Fault(words, spoils=_is_cuda_error(error) or isinstance(error, torch.OutOfMemoryError))


def _is_cuda_error(error: BaseException) -> bool:
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def _is_the_users(error: BaseException) -> bool:
    """Whether the error is the user's Ctrl-C. In a process that ignores SIGINT, a kernel raised the error."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def _read_in_stream(returned: object) -> Tensor | None:
    """On a GPU, what the caller's stream reads right after the call. The read also reveals the error of a launch."""
    out = returned[0] if isinstance(returned, tuple) and returned else returned
    return (
        out.detach().clone(memory_format=torch.contiguous_format) if isinstance(out, Tensor) and out.is_cuda else None
    )


def _synchronise(inputs: Inputs) -> None:
    if inputs.query.is_cuda:
        torch.cuda.synchronize()
