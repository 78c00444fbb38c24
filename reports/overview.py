"""The first screen: a sentence of verdict, and a row for each implementation on each device."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from flashproof.reports import causes, common, symptoms, tables, wording
from flashproof.reports.checks import LAYER_SENTENCES
from flashproof.reports.evidence import (
    DTYPES,
    TENSORS,
    Evidence,
    Judged,
    Kernel,
    Machine,
    dtype_order,
    is_nearly_zero,
    severity,
    size,
)
from flashproof.reports.record import LAYERS, Judgement
from flashproof.reports.tables import State

OF_TENSORS = ("accuracy", "gradients")  # the layers whose tensors have columns of their own


@dataclass(frozen=True)
class Column:
    """A column of the first screen: a tensor, or a layer of checks other than those of accuracy and gradients.

    The column of a tensor has what these two layers say of it, and where it fails in any other.
    """

    key: str
    title: str
    sentence: str
    layers: tuple[str, ...]
    tensor: str = ""  # empty for a layer

    def holds(self, judgement: Judgement) -> bool:
        """Whether a judgement belongs to this column. A fault without a tensor belongs to all tensors of its layer."""
        layer = judgement.check.partition("/")[0]
        if not self.tensor:
            return layer in self.layers
        if layer not in OF_TENSORS:
            return judgement.status == "failed" and judgement.tensor == self.tensor
        if judgement.tensor is None:
            return layer == self.layers[0]
        return judgement.tensor == self.tensor


_TENSORS = (
    ("out", "out", "accuracy", "The output: each element against the bound of its arithmetic."),
    ("lse", "LSE", "accuracy", "The log-sum-exp of the scaled scores of each query, against its bound."),
    ("dq", "dQ", "gradients", "The gradient of the queries, against its bound."),
    ("dk", "dK", "gradients", "The gradient of the keys, against its bound."),
    ("dv", "dV", "gradients", "The gradient of the values, against its bound."),
)
_TITLES = {
    "stability": "overflow",
    "masks": "masks",
    "properties": "exact probes",
    "memory": "memory",
    "contract": "calls",
    "determinism": "repeats",
}


@cache
def columns(layers: tuple[str, ...]) -> tuple[Column, ...]:
    """The columns for these layers: the tensors first, then accuracy in hard places, and the contract of the call.

    A layer that flashproof does not know has a column of its own name.
    """
    known = [
        Column(tensor, title, sentence, (layer, *(other for other in OF_TENSORS if other != layer)), tensor)
        for tensor, title, layer, sentence in _TENSORS
        if set(OF_TENSORS) & set(layers)
    ]
    known += [
        Column(layer, title, LAYER_SENTENCES[layer], (layer,)) for layer, title in _TITLES.items() if layer in layers
    ]
    return (*known, *(Column(layer, layer, "", (layer,)) for layer in layers if layer not in LAYERS))


def layers(evidence: Evidence) -> tuple[str, ...]:
    """The layers of all checks of the evidence."""
    return tuple(dict.fromkeys(check.partition("/")[0] for check in evidence.checks))


@dataclass(frozen=True)
class Bar:
    """The result of one column in one dtype."""

    dtype: str
    state: State
    worst: Judged | None = None  # the worst judgement, by `severity`

    @property
    def rho(self) -> float | None:
        """The largest rho, where a rho was judged."""
        return None if self.worst is None or self.worst.rho is None else size(self.worst.rho)


@dataclass(frozen=True)
class Strip:
    """A cell: a bar for each dtype, and the worst of them."""

    column: Column
    bars: tuple[Bar, ...]
    worst: Bar

    @property
    def figure(self) -> str:
        """The number under which the cell is known: its largest rho, or why it fails."""
        judged = self.worst.worst
        return "" if judged is None else wording.short_reason(judged.judgement)

    @property
    def words(self) -> str:
        """The cell for those who do not see it, and for a pointer: "float32 passed 0.05; float16 failed 1.7"."""
        return "; ".join(
            f"{bar.dtype or 'any dtype'} {bar.state}"
            + (f" {wording.short_reason(bar.worst.judgement)}" if bar.worst else "")
            for bar in self.bars
        )


@dataclass(frozen=True)
class Line:
    """The row of one implementation on one machine. state: as of `tables.verdict`, for this machine alone."""

    kernel: Kernel
    machine: Machine
    state: State
    note: str
    strips: tuple[Strip, ...]

    @property
    def group(self) -> str:
        """The title of the group to which the row belongs."""
        if self.state == "passed" and self.machine in self.kernel.narrowed_on:
            return NARROWED
        return next(title for title, states in GROUPS.items() if self.state in states)


NARROWED = "holds its bound on the cases of narrowed runs"
GROUPS: dict[str, tuple[State, ...]] = {
    "fails": ("failed",),
    "known defects": ("known defect",),
    "holds its bound on every case": ("passed",),
    NARROWED: (),
    "refused every case": ("refused",),
    "not run here": ("not possible here", "not claimed", "not run"),
}


def lines(evidence: Evidence) -> list[tuple[str, list[Line]]]:
    """The rows by group, the gravest group first, and in it the largest rho first where something fails."""
    shown = columns(layers(evidence))
    all_lines = [line(kernel, machine, shown, evidence) for kernel in evidence.kernels for machine in kernel.machines]
    groups = []
    for title in GROUPS:
        here = [line for line in all_lines if line.group == title]
        if title == "fails":
            here.sort(
                key=lambda line: -max((_failing_rho(bar.worst) for s in line.strips for bar in s.bars), default=0.0)
            )
        if here:
            groups.append((title, here))
    return groups


def _failing_rho(judged: Judged | None) -> float:
    return -1.0 if judged is None or judged.judgement.status != "failed" else judged.telling_rho


def key_of(judgement: Judgement) -> str:
    """The column in which a judgement is found first."""
    layer = judgement.check.partition("/")[0]
    return next((column.key for column in columns((layer,)) if column.holds(judgement)), layer)


def line(kernel: Kernel, machine: Machine, shown: tuple[Column, ...], evidence: Evidence) -> Line:
    """The row of an implementation on a machine, with these columns. Two pages show it, so the kernel keeps it."""
    kept: dict[object, Line] = vars(kernel).setdefault("lines", {})
    if (machine, shown) not in kept:
        kept[machine, shown] = _line(kernel, machine, shown, evidence)
    return kept[machine, shown]


def _line(kernel: Kernel, machine: Machine, shown: tuple[Column, ...], evidence: Evidence) -> Line:
    own = [judged for judged in kernel.judged if judged.machine == machine]
    if not own:
        verdict = tables.verdict(kernel) if not kernel.judged else tables.Cell("not run")
        return Line(kernel, machine, verdict.state, verdict.note, ())
    by_place: defaultdict[tuple[str, str], list[Judged]] = defaultdict(list)
    keys: dict[tuple[str, str | None, str], list[str]] = {}  # the columns of a check, tensor and status
    for judged in own:
        one = judged.judgement
        about = one.check, one.tensor, one.status
        if about not in keys:
            keys[about] = [column.key for column in shown if column.holds(one)]
        for key in keys[about]:
            by_place[key, one.dtype].append(judged)
    dtypes = sorted({*DTYPES, *(judged.judgement.dtype for judged in own if judged.judgement.dtype)}, key=dtype_order)
    whole = tables.found(own)
    strips = tuple(_strip(kernel, machine, column, dtypes, by_place, evidence) for column in shown)
    return Line(kernel, machine, whole.state, whole.note, strips)


def _strip(
    kernel: Kernel,
    machine: Machine,
    column: Column,
    dtypes: list[str],
    by_place: dict[tuple[str, str], list[Judged]],
    evidence: Evidence,
) -> Strip:
    bars = []
    for dtype in dtypes:
        here = by_place.get((column.key, dtype)) or []
        if here:
            state = tables.found(here).state
            bars.append(Bar(dtype, state, max((j for j in here if j.judgement.status == state), key=severity)))
        else:
            bars.append(Bar(dtype, _absence(kernel, machine, column, dtype, evidence)))
    return Strip(column, tuple(bars), max(bars, key=_badness))


def _absence(kernel: Kernel, machine: Machine, column: Column, dtype: str, evidence: Evidence) -> State:
    """Why a column holds no judgement: no check of it is claimed, or none could run."""
    if column.tensor and kernel.claim and not kernel.claim.supports.get("lse", True) and column.tensor == "lse":
        return "not claimed"
    if column.tensor in TENSORS[2:] and kernel.claim and not kernel.claim.supports.get("backward", True):
        return "not claimed"
    checks = [check for check in evidence.checks if check.partition("/")[0] in column.layers]
    states = {tables.cell(kernel, machine, dtype, check).state for check in checks}
    if "not possible here" in states:
        return "not possible here"
    if any(one.machine == machine and one.judgement.dtype == dtype for one in kernel.judged):
        return "not claimed" if "not claimed" in states else "not run"
    return "not claimed" if states == {"not claimed"} else "not run"  # a narrowed run left the whole dtype out


def _badness(bar: Bar) -> tuple[int, int, float]:
    if bar.worst is None:
        return (0, 0, 0.0)
    return (1, *severity(bar.worst))


# ------------------------------------------------------------------------------------------------------- the sentence


@dataclass(frozen=True)
class Verdict:
    """The sentence of verdict, in three parts, each of which may be empty."""

    holding: str
    failing: str
    others: str


def verdict(evidence: Evidence) -> Verdict:
    """What is right, what is wrong and how bad, over all implementations and devices."""
    states = {kernel.name: tables.verdict(kernel).state for kernel in evidence.kernels if kernel.judged}
    if not states:
        return Verdict("Nothing was verified in these runs.", "", "")
    by_state: defaultdict[str, list[Kernel]] = defaultdict(list)
    for kernel in evidence.kernels:
        if kernel.name in states:
            by_state[states[kernel.name]].append(kernel)
    holding = _holding(by_state["passed"], len(states))
    return Verdict(holding, _failing(evidence), _others(by_state, evidence))


def _holding(passed: list[Kernel], total: int) -> str:
    """How many implementations hold their bound on every case, and how many on the cases of narrowed runs.

    passed: those that hold it. total: the number of all implementations.
    """
    whole = [kernel for kernel in passed if not kernel.narrowed_on]
    narrowed = [kernel for kernel in passed if kernel.narrowed_on]
    if total == 1:
        on = f"the cases that were run; {not_whole(narrowed[0])}" if narrowed else "every case"
        return f"{passed[0].name} holds its bound on {on}." if passed else ""
    told = []
    if whole or not narrowed:
        told.append(f"{_count(whole, total)} on every case.")
    if narrowed:
        subject = _count(narrowed, total) if not whole else f"{len(narrowed)} more {_hold(narrowed)}"
        why = f"no run of {'it' if len(narrowed) == 1 else 'them'} was whole"
        if any(kernel.whole_on for kernel in narrowed):
            why = "not every device had a whole run"
        told.append(f"{subject} on the cases that were run; {why}.")
    return " ".join(told)


def _count(kernels: list[Kernel], total: int) -> str:
    every = f"All {total}" if len(kernels) == total else f"{len(kernels)} of {total}"
    return f"{every} implementations {_hold(kernels)}"


def _hold(kernels: list[Kernel]) -> str:
    return "holds its bound" if len(kernels) == 1 else "hold their bound"


def not_whole(kernel: Kernel) -> str:
    """Where no run of an implementation was whole: "no run was whole".

    It is empty if each machine that judged the implementation had a whole run.
    """
    if not kernel.narrowed_on:
        return ""
    where = f" on {wording.listed(map(str, kernel.narrowed_on))}" if kernel.whole_on else ""
    return f"no run{where} was whole"


def worst_failure(kernel: Kernel) -> Judged | None:
    """The failure with the largest figure in the row of the implementation. None if nothing failed."""
    failed = (judged for judged in kernel.judged if judged.judgement.status == "failed")
    return max(failed, key=_figure, default=None)


def simplest_failure(kernel: Kernel) -> Judged | None:
    """The failure with the simplest case. None if nothing failed.

    It shows the cause that is found, if one is. Otherwise, the case of `common.needs` comes first. An error of nearly 0
    (`is_nearly_zero`) is taken only where there is no other one. Of several tensors that fail in one case, the first in
    the order of `TENSORS` is taken.
    """
    failed = [judged for judged in kernel.judged if judged.judgement.status == "failed"]
    explained = next(iter(causes.explanations([judged.judgement for judged in failed])), [])
    of_cause = {id(judgement) for judgement in explained}
    pool = [judged for judged in failed if id(judged.judgement) in of_cause] or failed
    needed = common.needs([judged.judgement for judged in failed])

    def order(judged: Judged) -> tuple[bool, bool, tuple[float, float], bool, bool, int]:
        one = judged.judgement
        place = TENSORS.index(one.tensor) if one.tensor else len(TENSORS)
        is_special = one.check.partition("/")[0] not in OF_TENSORS
        is_other = needed is not None and one.case != needed.case
        return is_nearly_zero(one), is_other, causes.complexity(one.case), judged.rho is None, is_special, place

    return min(pool, key=order, default=None)


def failed(kernel: Kernel) -> list[Judged]:
    """The failures of an implementation, those that tell most first (`gravity`)."""
    every = [judged for judged in kernel.judged if judged.judgement.status == "failed"]
    return sorted(every, key=gravity, reverse=True)


def said(kernel: Kernel) -> str:
    """What a headline says of the failures: their cause, or else what the records show of them. Empty if nothing."""
    cause = causes.headline([judged.judgement for judged in failed(kernel)])
    return cause or symptoms.headline(symptoms.symptoms([judged.judgement for judged in kernel.judged]))


def of_cases(kernel: Kernel) -> str:
    """In how many of the cases it fails: " in 417 of 1,685 cases". Empty if no failure has a case."""
    cases = {judged.judgement.case for judged in kernel.judged if judged.judgement.case}
    wrong = _wrong_cases(kernel)
    if len(wrong) < len(cases):
        return f" in {len(wrong):,} of {len(cases):,} cases" if wrong else ""
    return f" in all {len(cases):,} cases" if len(cases) > 1 else " in its only case" if cases else ""


def _wrong_cases(kernel: Kernel) -> set[str]:
    return {judged.judgement.case for judged in kernel.judged if judged.judgement.status == "failed"} - {""}


def _figure(judged: Judged) -> tuple[tuple[int, float], tuple[bool, int, float]]:
    """Of equal figures, and of those without one, the larger is the one that tells most (`gravity`)."""
    return severity(judged), gravity(judged)


def gravity(judged: Judged) -> tuple[bool, int, float]:
    """A sort key by which the failure that tells most is the largest.

    A failure of a plain call, in the layers of accuracy and gradients, tells more than one where a call is made in a
    special way.
    """
    return (judged.judgement.check.partition("/")[0] in OF_TENSORS, *severity(judged))


def worst(evidence: Evidence) -> Kernel | None:
    """The implementation that the sentence of verdict names: the first one of the rows that fail."""
    found = [(judged, kernel) for kernel in evidence.kernels if (judged := worst_failure(kernel))]
    return max(found, key=lambda pair: _figure(pair[0]))[1] if found else None


def _failing(evidence: Evidence) -> str:
    kernel, count = worst(evidence), sum(worst_failure(kernel) is not None for kernel in evidence.kernels)
    judged = worst_failure(kernel) if kernel else None
    if kernel is None or judged is None:
        return ""
    who = f"{wording.short_name(kernel.name)} on {judged.machine}"
    if count > 1:
        reason = wording.instance(judged.judgement)
        return f"{count} fail; the name of each in the table opens its failures. The worst is {who}: {reason}."
    if told := said(kernel):
        return f"{who} fails{of_cases(kernel)}: {told}."
    where = "; in the simplest one, " if len(_wrong_cases(kernel)) > 1 else ": "
    return f"{who} fails{of_cases(kernel)}{where}{wording.instance((simplest_failure(kernel) or judged).judgement)}."


def _others(by_state: dict[str, list[Kernel]], evidence: Evidence) -> str:
    told = []
    if known := by_state.get("known defect"):
        has = "has" if len(known) == 1 else "have"
        told.append(f"{wording.listed(kernel.name for kernel in known)} {has} known defects.")
    if refused := by_state.get("refused"):
        told.append(f"{wording.listed(kernel.name for kernel in refused)} refused every case.")
    if not by_state.get("failed") and (closest := _closest(evidence.kernels)):
        told.append(
            f"{wording.tensor(closest.judgement)} of {wording.short_name(closest.judgement.implementation)} in "
            f"{closest.judgement.dtype} comes closest to its bound: {wording.rho(closest.rho)} of it."
        )
    return " ".join(told)


def _closest(kernels: Iterable[Kernel]) -> Judged | None:
    passed = (j for kernel in kernels for j in kernel.judged if j.judgement.status == "passed" and j.rho is not None)
    return max(passed, key=lambda judged: size(judged.rho), default=None)
