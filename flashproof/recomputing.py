"""What follows from the records of a run alone, without its kernel: claims, contradictions, and certified figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashproof import judging, ways
from flashproof.cases import Case
from flashproof.impls.spec import Arithmetic, Implementation, Supports
from flashproof.oracles import verdict
from flashproof.reports import wording
from flashproof.reports.evidence import size, worst_rho
from flashproof.reports.record import Claim, Element, Judgement, TensorName, figure

# How far a bound may lie from the recorded one, relative to it. Bounds are sums in float64, and the vector units of
# another CPU, or another PyTorch, add and exponentiate in other ways. Where large scores cancel, this shows most: of
# 1,926 bounds of an H200's host, computed again on an AMD EPYC, 1,664 were equal, and one differed by 2.2e-7.
BOUND = 2.0**-20
# The same for rho = error / (recorded bound + radius). Only the radius, and the rounding of a division, may differ.
RHO = 2.0**-30
# An exact value lies in its ball, here and there, and the balls are of one size. So the midpoints are at most two radii
# apart.
RADII = 2.0


@dataclass(frozen=True, eq=False)
class Claimed:
    """An implementation without its kernel, from what a run wrote down of it."""

    claim: Claim

    @cached_property
    def implementation(self) -> Implementation:
        """Raises ValueError for a claim that this version does not know."""
        supports = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.claim.supports.items()
        }
        try:
            arithmetic = {
                where: Arithmetic(**fields)  # type: ignore[arg-type]
                for where, fields in self.claim.arithmetic.items()
            }
            return Implementation(
                name=self.claim.implementation,
                attention=_absent,
                supports=Supports(**supports),  # type: ignore[arg-type]
                arithmetic=lambda dtype, device: arithmetic[f"{dtype} on {device}"],
                slow=lambda device: self.claim.slow.get(device) or None,  # type: ignore[arg-type, return-value]
                bare=self.claim.bare,
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"the claim of {self.claim.implementation} cannot be read ({error})") from error


def _absent(*tensors: object, **keywords: object) -> object:
    raise NotImplementedError("records hold no kernel")


def about(judgement: Judgement) -> str:
    """What a judgement is of, for a message."""
    parts = (judgement.implementation, judgement.check, judgement.tensor or "", judgement.device, f"[{judgement.case}]")
    return " ".join(part for part in parts if part)


def is_enclosed(case: Case, effort: str = "default") -> bool:
    """Whether a run encloses every element of a case in a ball, so that its figures are certified."""
    most, heads = (
        judging.FEWER_PRODUCTS if effort == "thorough" else judging.CERTIFIED_PRODUCTS,
        case.batch * case.heads,
    )
    return heads <= judging.CERTIFIED_HEADS and heads * case.queries * case.keys * case.dim <= most


def contradiction(judgement: Judgement) -> str:
    """What is wrong with a judgement by its own figures, in words. Empty if nothing is."""
    if judgement.status != "passed":
        return ""
    worst = worst_rho(judgement)
    if not size(worst) <= 1.0:
        return f"passed with rho {wording.rho(worst)}"
    lean = judgement.bias, judgement.bias_error, judgement.bias_allowance
    if None not in lean and verdict.Bias(*lean).leans:  # type: ignore[arg-type]
        return "passed with a bias beyond its allowance"
    return ""


def disagreement(judgement: Judgement, kernel: Claimed) -> str:
    """What does not follow from the case of a certified figure, in words. Empty if everything does.

    The exact value of the worst element, its bound and rho are computed from the line of the case and the claim. A
    record has one worst element: that of the larger rho. The smaller rho, of another element, cannot be computed.
    """
    if judgement.worst is None or judgement.tensor is None or judgement.rho is None:
        return "is certified, and has no worst element"
    try:
        case = Case.parse(judgement.case)
        if not is_enclosed(case):
            return "is certified, and its case is too large for balls"
        truth = judging.exact(case, ways.arithmetic(kernel.implementation, case, judgement.device), "cpu")
    except (KeyError, ValueError) as error:
        return f"cannot be computed ({error})"
    shape = tuple(getattr(truth.answer, judgement.tensor).shape)
    index = judgement.worst.index
    if len(index) != len(shape) or not all(0 <= i < n for i, n in zip(index, shape, strict=True)):
        return f"there is no element {list(index)} in a tensor of shape {list(shape)}"
    dtype = torch.float32 if judgement.tensor == "lse" else getattr(torch, case.dtype)
    return next(_faults(judgement, judgement.worst, _Truth(truth, judgement.tensor, index), dtype), "")


@dataclass(frozen=True)
class _Truth:
    """The exact result of one element, and its bounds. All tensors have one number."""

    truth: judging.Exact
    name: TensorName
    index: tuple[int, ...]

    def of(self, part: object) -> Tensor:
        return getattr(part, self.name)[self.index].reshape(1)

    @cached_property
    def bound(self) -> Tensor:
        return self.of(self.truth.bound)

    @cached_property
    def of_chance(self) -> tuple[Tensor, ...]:
        """The probabilistic bounds: without the small terms that sums may lose, and with them."""
        bound = self.of(self.truth.statistical())
        return bound, bound + self.truth.lost_at(self.name, self.index)


def _faults(judgement: Judgement, worst: Element, truth: _Truth, dtype: torch.dtype) -> Iterator[str]:
    """What is wrong with a figure, from its element to its rho."""
    got, exact, bound = (torch.tensor([float(n)], dtype=torch.float64) for n in (worst.got, worst.exact, worst.bound))
    mid, radius = truth.of(truth.truth.answer), truth.of(truth.truth.error)
    if not _is_near(got.to(dtype), got):
        yield f"{worst.got} is no number of {str(dtype).removeprefix('torch.')}"
    if not _is_near(exact, mid, RADII * float(radius)):
        yield f"the exact value is {float(mid)!r}, not {worst.exact}"
    if figure(error := abs(float(got) - float(exact))) != worst.error:
        yield f"the error is {error!r}, not {worst.error}"
    if (judgement.rho_statistical is not None) != truth.truth.gates:
        yield (
            "there must be a probabilistic rho for this claim" if truth.truth.gates else "there is no probabilistic rho"
        )
        return
    rho, of_chance = float(judgement.rho or 0.0), judgement.rho_statistical
    is_of_chance = of_chance is not None and not rho >= float(of_chance)  # the larger rho names the worst element
    bounds = truth.of_chance if is_of_chance else (truth.bound,)
    if not any(_is_near(bound, own, BOUND * float(own)) for own in bounds):
        yield f"the bound is {float(bounds[0])!r}, not {worst.bound}"
    said = torch.tensor([float(of_chance or 0.0) if is_of_chance else rho], dtype=torch.float64)
    ratio = verdict.ratios(got.to(dtype), exact, bound, radius)
    if not _is_near(said, ratio, RHO * float(ratio)):
        yield f"rho is {float(ratio)!r}, not {float(said)!r}"
    least = float(verdict.ratios(got.to(dtype), exact, truth.bound, radius))
    if rho < least * (1.0 - BOUND):
        yield f"rho is at least {least!r}, that of this element, not {rho!r}"


def _is_near(one: Tensor, other: Tensor, apart: float = 0.0) -> bool:
    """Whether two numbers are equal, both NaN, or at most this far apart."""
    first, second = float(one), float(other)
    return first == second or (math.isnan(first) and math.isnan(second)) or abs(first - second) <= apart
