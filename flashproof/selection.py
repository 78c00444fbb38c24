"""The selection of a run: its implementations, dtypes, device and cases, and the cases of each check and target."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashproof import loading, quick, targets
from flashproof.cases import Case, not_claimed
from flashproof.impls.spec import DTYPES, Device, Dtype, Implementation
from flashproof.registry import Check, checks
from flashproof.reports.record import Asked
from flashproof.sandbox.memory import available_memory
from flashproof.space import Effort, Space, space_of
from flashproof.targets import Loaded, Target
from flashproof.tensors import inputs

BYTES_OF_A_NUMBER = 40  # during construction: 64-bit random words, their sum, and the other tensors in float64


@dataclass(eq=False)
class Selection:
    """The selection of a command line or a caller. Raises ValueError and what `loading.load` raises."""

    names: list[str]  # names and globs as given; empty for the whole catalogue
    dtypes: list[Dtype] = field(default_factory=lambda: list(DTYPES))
    device: Device | None = None
    cases: list[Case] = field(default_factory=list)  # cases that replace those of the grids
    by_name: bool = False  # whether tests were chosen by name
    quick: bool = False  # whether a few checks and cases replace all of them
    thorough: bool = False  # whether the run has as many cases as all triples of levels need
    loaded: list[Loaded] = field(init=False)
    targets: list[Target] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(dict.fromkeys(map(loading.spelled, self.names)))
        if self.cases:
            self.dtypes = list(dict.fromkeys(case.dtype for case in self.cases))
        self.loaded = targets.load_selected(self.names)
        self.targets = [
            target for loaded in self.loaded for target in targets.targets_of(loaded, self.dtypes, self.device)
        ]
        self._claimed: dict[tuple[object, str], list[Case]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether no option narrows the verification of the implementations on the chosen devices."""
        return not (self.cases or self.by_name or self.quick) and set(self.dtypes) == set(DTYPES)

    @property
    def effort(self) -> Asked:
        """Which cases of the list the run asks for."""
        return "given" if self.cases else self._effort

    @property
    def _effort(self) -> Effort:
        return "quick" if self.quick else "thorough" if self.thorough else "default"

    def whole(self) -> int:
        """The number of checks of these implementations in a run that nothing narrows, for all dtypes and devices."""
        other = copy.copy(self)
        other.dtypes, other.device, other.cases, other.by_name, other.quick = list(DTYPES), None, [], False, False
        other.targets = [one for loaded in self.loaded for one in targets.targets_of(loaded, other.dtypes, None)]
        other._claimed = {}
        return sum(other.covers(check, target) for check in checks().values() for target in other.targets)

    @property
    def external(self) -> list[str]:
        """The external kernels of the run."""
        return [loaded.name for loaded in self.loaded if loaded.is_external]

    def space_of(self, target: Target, *, is_sketch: bool = False) -> Space:
        """The space of a target's cases in this run. The target must have an implementation."""
        assert target.implementation is not None
        return self.space_of_loaded(target.implementation, target.device, is_sketch=is_sketch)

    def space_of_loaded(self, implementation: Implementation, device: Device, *, is_sketch: bool = False) -> Space:
        """The space of an implementation on a device, for all selected dtypes."""
        return space_of(implementation, self.dtypes, device, effort=self._effort, is_sketch=is_sketch)

    def cases_of(self, check: Check, target: Target) -> list[Case]:
        """The cases of a check that the target claims."""
        if target.implementation is None:
            return []
        about = (check.name, str(target))
        if about not in self._claimed:
            if self.cases:
                chosen = [check.of_line(case) for case in self.cases if case.dtype == target.dtype]
                if check.asked:
                    own = check.grid(self.space_of(target, is_sketch=True), target.dtype)
                    chosen = [case for case in chosen if case in own]
                supports = target.implementation.supports
                self._claimed[about] = [one for one in chosen if one and not_claimed(one, supports) is None]
            else:
                found = check.cases(target.implementation, target.dtype, self.space_of(target))
                self._claimed[about] = found[: quick.CHECKS[check.name]] if self.quick else found
        return list(self._claimed[about])

    def includes(self, check: Check) -> bool:
        """Whether a run takes a check at all: one that takes minutes must be asked for."""
        return not check.asked or self.by_name or self.thorough or bool(self.cases)

    def covers(self, check: Check, target: Target) -> bool:
        """Whether a run includes a check for a target: it claims what the check needs, and at least one case."""
        if target.implementation is None:
            return True
        if (self.cases and not check.single) or (self.quick and check.name not in quick.CHECKS):
            return False
        if not self.includes(check):
            return False
        supports = target.implementation.supports
        if not all(getattr(supports, claim) for claim in check.claims):
            return False
        if self.cases:
            return bool(self.cases_of(check, target))
        return bool(check.cases(target.implementation, target.dtype, self.space_of(target, is_sketch=True)))


def parse_cases(lines: Sequence[str], dtypes: Sequence[Dtype]) -> list[Case]:
    """The cases of some lines. A line without a dtype is a case in each of `dtypes`.

    Raises what `parse_case` raises.
    """
    found: list[Case] = []
    for line in lines:
        named = any(word in DTYPES for word in line.split())
        found += (
            [parse_case(line)]
            if named or not dtypes or not line.strip()
            else [parse_case(f"{line} {dtype}") for dtype in dtypes]
        )
    return list(dict.fromkeys(found))


def parse_case(line: str) -> Case:
    """The case of a line.

    Raises ValueError for an unknown word, for numbers that the dtype cannot hold, and for tensors that do not fit in
    memory.
    """
    if not line.strip():
        raise ValueError("is empty; give a case: the line of a failure")
    case = Case.parse(line)
    needed, left = case.numbers * BYTES_OF_A_NUMBER / 2**30, available_memory() / 2**30
    if needed > left:
        raise ValueError(
            f"the tensors of '{case}' need {needed:.0f} GiB while they are made, and {left:.0f} GiB are left; "
            "give a smaller one"
        )
    inputs(case)
    return case
