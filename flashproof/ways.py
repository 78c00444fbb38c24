"""The ways of calling a kernel, as training and inference call it. The `call` of a case selects one.

Each answer is judged by its own bound, in every way of calling.
"""

import math
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from flashproof.calling import GRADIENTS, Answer, Fault, Forward, Observer, Run, TensorName, arguments, forward, go_back
from flashproof.cases import Call, Case, Masking
from flashproof.impls.spec import Arithmetic, Device, Implementation, Supports
from flashproof.oracles.masks import BLOCK
from flashproof.tensors import FORMS, Inputs, inputs, memory, tensors_of


@dataclass(frozen=True, eq=False)
class Computed:
    """An answer, and the case that it answers. given: the input tensors, if they are not the case's own."""

    answer: Answer
    case: Case
    given: Inputs | None = None
    note: str = ""  # which answer this is, if a way of calling has several


def wanted(case: Case) -> tuple[TensorName, ...]:
    """The gradients that a case asks for."""
    if not case.backward:
        return ()
    return GRADIENTS if case.wanted == "all" else cast(tuple[TensorName, ...], tuple(case.wanted.split("-")))


def arithmetic(implementation: Implementation, case: Case, device: Device) -> Arithmetic:
    """The arithmetic by which an answer is judged: the claim of the implementation, with more roundings under autocast.

    Under autocast, PyTorch rounds products to the input dtype, and also the gradients of each query head. The products
    of e4m3 numbers are coarser.
    """
    claimed = implementation.arithmetic(case.dtype, device)
    if case.call != "autocast" or claimed.products == "e4m3":
        return claimed
    return replace(claimed, products="input", gradients="input" if claimed.gradients == "input" else "heads")


def computed(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """Calls the implementation as the case says. Raises Refused or Fault, as `calling.forward` and `go_back` do.

    The answers of one way may share memory, so all of them are computed before the first one is returned.
    """
    yield from _SEVERAL.get(case.call, _one)(implementation, case, device, _Of(case, observer))


@dataclass(frozen=True)
class _Of:
    """Tells an observer the case that was asked for, in place of the cases of the single calls."""

    case: Case
    observer: Observer

    def given(self, case: Case) -> None:
        self.observer.given(self.case)

    def returned(self) -> None:
        self.observer.returned()

    def spoilt(self) -> None:
        self.observer.spoilt()


CALLS_BETWEEN = 4  # further calls between forward and backward, if calls are fast; a kernel may have several buffers
MANY_CALLS = {2**11: 128, 2**15: 32}  # the same for cases of up to so many elements: the layers of deep networks
LOOP_THREADS = 6, 8  # more than a case may have heads; one of them is a power of two
CALLS_BEFORE = 4  # calls that fill the same tensors, if calls are fast; graphs are captured after the third call
FEW_QUERIES = 15  # generation has one query, or a few that were guessed
LONGEST_PROMPT = 64
GROWTH = 1, 5  # how many keys are added to a cache between two calls
LARGEST_UNGROUPED = 2**19  # elements of a case of grouped heads that is also called with as many key heads as heads
LARGEST_BATCH = 8  # a batch of up to this size is also called with one more entry

# ------------------------------------------------------------------------------------------------ one forward each


def within(context: Callable[[], AbstractContextManager[object]]) -> Run:
    """A `Run` that calls the function within a context."""

    def run(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
        with context():
            return attention(*leaves, **keywords)

    return run


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Generator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _checkpointed(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
    try:
        return torch.utils.checkpoint.checkpoint(partial(attention, **keywords), *leaves, use_reentrant=False)
    except BaseException as error:
        # PyTorch 2.11 leaves its hooks for saved tensors in place until these frames are freed. Until then, every later
        # backward of this process would repeat the call.
        traceback.clear_frames(error.__traceback__)
        raise


def _compiled(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
    torch._dynamo.reset()  # after some recompilations, torch continues without compiling
    return torch.compile(attention, backend="aot_eager", dynamic=False)(*leaves, **keywords)


def _in_a_thread(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
    return _in_threads([lambda: attention(*leaves, **keywords)])[0]


_ONE_BY_ONE = threading.Lock()


def _in_threads(calls: list[Callable[[], object]]) -> list[object]:
    """The results of calls that run at the same time, each in its own thread. Raises the first exception of them."""
    returned: list[object] = [None] * len(calls)
    raised: list[BaseException] = []
    begin = threading.Barrier(len(calls))
    is_inference = torch.is_inference_mode_enabled()  # a new thread does not inherit the mode

    def run(place: int) -> None:
        with _ONE_BY_ONE:
            torch.get_num_threads()  # torch makes a pool for each thread; making two at once raises an error in torch
        begin.wait()
        try:
            with torch.inference_mode(is_inference):
                returned[place] = calls[place]()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return returned


@contextmanager
def _parallel(threads: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_under_float64, _under_bfloat16 = (partial(_default_dtype, dtype) for dtype in (torch.float64, torch.bfloat16))
_RUNS: dict[Call, Run] = {
    "no_grad": within(torch.no_grad),
    "inference": within(torch.inference_mode),
    "checkpointed": _checkpointed,
    "compiled": _compiled,
    "thread": _in_a_thread,
    "default64": within(_under_float64),
    "default16": within(_under_bfloat16),
    "deterministic": within(_deterministic),
}
_AROUND: dict[Call, Callable[[], AbstractContextManager[object]]] = {  # the contexts of the backward
    "default64": _under_float64,
    "default16": _under_bfloat16,
    "deterministic": _deterministic,
}


def _without_gradients(run: Run, case: Case) -> Run:
    """The run under torch.inference_mode, if no input of the case wants a gradient.

    torch.compile makes a tensor of a NumPy number, and its own guards then fail in inference mode (PyTorch 2.13). Such
    a call is made under torch.no_grad.
    """
    is_of_numpy = case.call == "compiled" and case.number == "numpy"

    def detached(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
        with torch.no_grad() if is_of_numpy else torch.inference_mode():
            return run(attention, leaves, keywords)

    return detached if case.wanted == "none" else run


def _one(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """One forward, and its backward."""
    given = inputs(case, device)
    run, around = _RUNS.get(case.call), _AROUND.get(case.call, nullcontext)
    if case.call == "parallel":
        around = partial(_parallel, LOOP_THREADS[case.seed % 2])
        run = within(around)
    if case.call == "autocast":
        run = within(lambda: torch.autocast(device, given.query.dtype))
    run = run and _without_gradients(run, case)
    call = forward(implementation, case, given, wanted=_leaves(case), run=run, observer=observer)
    yield Computed(_answered(call, under=around), case)


def _leaves(case: Case) -> tuple[TensorName, ...]:
    """The inputs that require a gradient. Under no_grad they do, as parameters of a network do."""
    return GRADIENTS if case.call == "no_grad" else wanted(case)


def _answered(call: Forward, **how: Any) -> Answer:
    """The answer of a call, with gradients if any are wanted and the output carries a gradient."""
    if call.case.backward and call.carries_gradient:
        return go_back(call, plain=True, **how)
    return call.answer()


# ----------------------------------------------------------------------------------------------------- several calls


def _twice(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    given = inputs(case, device)
    other = replace(given, dout=inputs(replace(case, seed=case.seed + 1), device).dout)
    call = forward(implementation, case, given, wanted=wanted(case), observer=observer)
    if not call.carries_gradient:
        yield Computed(call.answer(), case)
        return
    first = go_back(call, keep=True, plain=True)
    second = go_back(call, dout=other.dout, keep=True)
    yield Computed(first, case, note="the first of two backwards of one call, checked after the second")
    yield Computed(second, case, other, "the second of two backwards of one call")


def _another(case: Case, supports: Supports) -> Case:
    """A case of the same shape with other values, and with other options and strides if they are claimed."""
    masks: list[Masking] = ["full"]
    masks += ["causal"] if "top_left" in supports.causal else []
    masks += ["causal-br"] if "bottom_right" in supports.causal else []
    other = replace(case, seed=case.seed + 1, mask=masks[(masks.index(case.mask) + 1) % len(masks)])
    if supports.strided and case.sharing == "apart":
        layouts = ("transposed" if layout == "contiguous" else "contiguous" for layout in case.layouts)
        other = replace(other, layouts=tuple(layouts))  # type: ignore[arg-type]
    return other if supports.scale == "default" else replace(other, scale=0.5, number="float")


def _two_forwards(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """Several forwards, then backwards: the last call goes first, as in a network, or the first, as in a pipeline.

    One of the forwards is without gradients, as that of a second model. In half of the cases, the second forward has
    another length.
    """
    other = _another(case, implementation.supports)
    if case.seed // 2 % 2 and case.keys > 1 and implementation.supports.cross_lengths:
        other = replace(other, keys=case.keys - 1, sharing="apart")
    first, second = (
        forward(implementation, one, inputs(one, device), wanted=wanted(one), observer=observer)
        for one in (case, other)
    )
    further = replace(case, seed=case.seed + 1)
    given = inputs(further, device)
    of_inference = forward(implementation, further, given, wanted=(), run=within(torch.no_grad), observer=observer)
    between = next((calls for most, calls in MANY_CALLS.items() if case.numbers <= most), CALLS_BETWEEN)
    between = 0 if implementation.slow(cast(Device, device)) else between
    kept = [forward(implementation, further, given, wanted=wanted(case), observer=observer) for _ in range(between)]
    if case.seed % 2:
        *_, of_second, of_first = [_answered(call) for call in reversed((first, second, *kept))]
    else:
        of_first, of_second = _answered(first), _answered(second)
    del kept  # until here, these calls wait for their backward
    without = replace(further, call="no_grad")
    yield Computed(of_inference.answer(), without, given, "it ran between forward and backward of other calls")
    yield Computed(of_first, case, note=f"{2 + between} other calls ran between forward and backward")
    yield Computed(of_second, other, note="it ran between forward and backward of another call")


def _alike(case: Case, supports: Supports) -> Case:
    """A case that differs only in its number of key heads, or only in its dropout and sometimes its length.

    The seed decides which. It may be the case itself: then nothing differs.
    """
    if case.dropout and case.seed % 2:
        longer = case.sharing == "apart" and supports.cross_lengths and case.seed // 2 % 2
        return replace(case, dropout=0.25, keys=case.keys + 1 if longer else case.keys)
    ungrouped = replace(case, kv_heads=case.heads)
    return ungrouped if case.seed % 2 == 0 and ungrouped.numbers <= LARGEST_UNGROUPED else case


def _after_another(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    calls = [
        (_another(case, implementation.supports), "checked after another call"),
        (case, "after a call of the same shape with other options"),
    ]
    like = _alike(case, implementation.supports)
    if like != case:
        calls.insert(1, (like, "checked after another call"))
    elif case.batch <= LARGEST_BATCH and case.sharing == "apart":
        calls.append((replace(case, batch=case.batch + 1), "after a call with another batch size"))
    answers = [
        _answered(forward(implementation, one, inputs(one, device), wanted=wanted(one), observer=observer))
        for one, _ in calls
    ]
    for answer, (one, note) in zip(answers, calls, strict=True):
        yield Computed(answer, one, note=note)


def _renewed(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """Calls as in the replay of a graph: all use the same tensors, or the last uses new ones at the same addresses."""
    times = 1 if implementation.slow(cast(Device, device)) else CALLS_BEFORE
    others = [replace(case, seed=case.seed + FORMS * (1 + turn % 2)) for turn in range(times)]
    given, kept = inputs(others[0], device), None
    for turn, other in enumerate(others):
        if turn:
            _fill(given, inputs(other, device))
        run = within(torch.no_grad) if turn == 0 and times > 1 else None
        before = forward(implementation, other, given, wanted=wanted(other), run=run, leaves=kept, observer=observer)
        if case.backward and before.carries_gradient:
            go_back(before, plain=True)
        kept = before.leaves
    _fill(given, inputs(case, device))
    if case.call == "readdressed":  # tensors without earlier changes, as an allocator reuses freed memory
        kept, given = (
            None,
            replace(given, **{name: getattr(given, name).data for name in ("query", "key", "value", "dout")}),
        )
    call = forward(implementation, case, given, wanted=wanted(case), leaves=kept, observer=observer)
    what = "with other values in the same tensors" if kept else "with other tensors at the same addresses"
    yield Computed(_answered(call), case, note=f"after {'a call' if times == 1 else f'{times} calls'} {what}")


def _fill(given: Inputs, fresh: Inputs) -> None:
    """Copies the numbers of other inputs into the memory of these inputs."""
    for old, new in zip(tensors_of(given), tensors_of(fresh), strict=True):
        memory(old).copy_(memory(new))


def _grown(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """Calls as in generation: the second call has more keys than the first, in the same memory.

    In every second case, the first call is of another sequence, so an answer from remembered keys is wrong. In the
    others, the sequence keeps its keys, and a third call has as few keys as the first, as after a rejected guess.
    Before a call with few queries, the first call may be a prompt, which has many.
    """

    def answer(one: Case, tensors: Inputs) -> Answer:
        return forward(implementation, one, tensors, wanted=(), run=within(torch.no_grad), observer=observer).answer()

    other = replace(case, seed=case.seed + FORMS)
    added = min(GROWTH[case.seed // 4 % len(GROWTH)], case.keys - 1)
    fewer = replace(other, keys=case.keys - added, sharing="apart")
    follows_a_prompt = case.seed % 2 and case.queries <= FEW_QUERIES and case.blocks is None
    if follows_a_prompt and implementation.supports.cross_lengths:
        fewer = replace(fewer, queries=min(fewer.keys, LONGEST_PROMPT))

    def shortened(tensors: Inputs, queries: Inputs) -> Inputs:
        blocks = tensors.block_mask
        blocks = blocks if blocks is None else blocks[..., : math.ceil(fewer.keys / BLOCK)]
        return replace(queries, key=tensors.key[:, :, :-added], value=tensors.value[:, :, :-added], block_mask=blocks)

    def before_the_case() -> Inputs:
        """The tensors before the second call. Every sequence begins with the same token."""
        tensors = inputs(case if keeps_keys else other, device)
        if case.layouts[1] != "expanded":
            tensors.key[:, :, :1] = inputs(case, device).key[:, :, :1]
        return tensors

    keeps_keys = case.seed // 2 % 2 == 1
    given = before_the_case()
    of_prompt = given if fewer.queries == case.queries and not keeps_keys else inputs(fewer, device)
    first = answer(fewer, shortened(given, of_prompt))
    _fill(given, inputs(case, device))
    second = answer(case, given)
    third = answer(fewer, shortened(given, of_prompt)) if keeps_keys else None
    rest = before_the_case()
    before = shortened(rest, rest if of_prompt is given else inputs(fewer, device))
    yield Computed(first, fewer, before, "before a call with more keys")
    yield Computed(second, case, note="after a call with fewer keys")
    if third is not None:
        yield Computed(third, fewer, before, "after a call with more keys of the same sequence")


def _accumulated(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """A backward of zeros leaves gradients of zero, to which the next backward adds."""
    given = inputs(case, device)
    nothing = replace(given, dout=given.dout * 0.0)
    first = forward(implementation, case, nothing, wanted=wanted(case), observer=observer)
    if not first.carries_gradient:
        yield Computed(first.answer(), case)
        return
    go_back(first, plain=True, onto=True)
    second = forward(implementation, case, given, wanted=wanted(case), leaves=first.leaves, observer=observer)
    yield Computed(go_back(second, onto=True), case)


def _projected(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """A call with inputs that are not leaves. PyTorch lets a kernel change them in place, which spoils other uses.

    In every second case, what the call saves for its backward is copied, as with an offload to the memory of the CPU.
    """
    changed: list[str] = []
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)

    def run(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
        made = [leaf * 1 for leaf in leaves]
        before = [tensor.detach().clone() for tensor in made]
        with copies if case.seed % 2 else nullcontext():
            returned = attention(*made, **keywords)
        pairs = zip(("query", "key", "value"), made, before, strict=True)
        changed.extend(name for name, tensor, as_made in pairs if not torch.equal(tensor, as_made))
        return returned

    call = forward(implementation, case, inputs(case, device), wanted=wanted(case), run=run, observer=observer)
    if changed:
        raise Fault(f"the call changed its {changed[0]} in place, which is the result of another operation")
    yield Computed(_answered(call), case)


def _two_threads(implementation: Implementation, case: Case, device: str, observer: Observer) -> Iterator[Computed]:
    """Two calls at once, with other values and options. A call without gradients has none in either thread."""
    beside = _another(case, implementation.supports)
    theirs = inputs(beside, device)
    own = arguments(beside, implementation.supports, theirs)
    returned: list[object] = []

    def run(attention: Callable[..., object], leaves: tuple[Tensor, ...], keywords: dict[str, object]) -> object:
        others = tuple(
            tensor.detach().requires_grad_(leaf.requires_grad)
            for tensor, leaf in zip((theirs.query, theirs.key, theirs.value), leaves, strict=True)
        )
        mine, other = _in_threads([lambda: attention(*leaves, **keywords), lambda: attention(*others, **own)])
        returned.append(other)
        return mine

    how = _without_gradients(run, case)
    call = forward(implementation, case, inputs(case, device), wanted=wanted(case), run=how, observer=observer)
    answer = _answered(call)
    out = returned[0][0] if isinstance(returned[0], tuple) else returned[0]
    yield Computed(answer, case, note="called in two threads at once")
    if isinstance(out, Tensor) and out.shape == answer["out"].shape and not case.dropout:
        of_beside = Answer({"out": out.detach()}, answer.seconds, answer.has_gradient)
        yield Computed(of_beside, beside, note="called in two threads at once")


_SEVERAL: dict[Call, Callable[[Implementation, Case, str, Observer], Iterator[Computed]]] = {
    "twice": _twice,
    "two-forwards": _two_forwards,
    "after-another": _after_another,
    "renewed": _renewed,
    "readdressed": _renewed,
    "grown": _grown,
    "accumulated": _accumulated,
    "projected": _projected,
    "threads": _two_threads,
}
