"""The calls that are timed: an implementation on the tensors of a setting, forward or backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flashproof import accuracy, tensors
from flashproof.calling import arguments
from flashproof.cases import Case
from flashproof.impls.spec import Device, Implementation
from flashproof.tests.memory.measuring import peak_bytes

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Given:
    """The tensors of a setting: query, key, value [batch, heads, length, dim], output gradient, and block mask."""

    case: Case
    device: Device
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    block_mask: Tensor | None

    @property
    def share(self) -> float:
        """The share of the scores that the block mask keeps."""
        return 1.0 if self.block_mask is None else float(self.block_mask.double().mean())


def given(case: Case, device: Device) -> Given:
    """Normal tensors of a setting, drawn on the device with the seed of the case."""
    generator = torch.Generator(device).manual_seed(case.seed)
    shape, dtype = (case.batch, case.heads, case.queries, case.dim), getattr(torch, case.dtype)
    query, key, value, dout = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4))
    return Given(case, device, (query, key, value, dout), tensors.block_mask(case, device))


class Calls:
    """The calls of an implementation on given tensors, as in practice: without the LSE."""

    def __init__(self, implementation: Implementation, given: Given) -> None:
        self.implementation, self.given = implementation, given
        supports = replace(implementation.supports, lse=False)
        query, key, value, self._dout = given.tensors
        inputs = tensors.Inputs(query, key, value, self._dout, given.block_mask)
        self._inputs = (query, key, value)
        self._keywords = arguments(given.case, supports, inputs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = self.implementation.attention(query, key, value, **self._keywords)  # type: ignore[assignment]
        return out

    def of(self, direction: Direction) -> Callable[[], object]:
        """A call in a direction. For the backward, the forward has been made, and only gradients are computed.

        Raises what the implementation raises.
        """
        if direction == "forward":
            return lambda: self._attention(*self._inputs)
        leaves = self._leaves()
        out = self._attention(*leaves)
        return lambda: torch.autograd.grad(out, leaves, self._dout, retain_graph=True)

    def _leaves(self) -> list[Tensor]:
        return [tensor.detach().requires_grad_() for tensor in self._inputs]

    def answer(self, direction: Direction) -> list[Tensor]:
        """Output, and for the backward also the gradients of query, key and value."""
        if direction == "forward":
            return [self._attention(*self._inputs)]
        leaves = self._leaves()
        out = self._attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, self._dout)]

    def judge(self, direction: Direction) -> accuracy.Verdicts:
        """Judges the answer on the tensors that are timed: the last head of the last batch entry.

        Raises what the implementation raises.
        """
        case, mask = self.given.case, self.given.block_mask
        query, key, value = (tensor[-1:, -1:] for tensor in self._inputs)
        out, *gradients = (tensor[-1:, -1:] for tensor in self.answer(direction))
        dq, dk, dv = gradients or (None, None, None)
        return accuracy.judge(
            out,
            query,
            key,
            value,
            is_causal=case.mask != "full",
            block_mask=None if mask is None else mask[-1:, -1:],
            dout=self._dout[-1:, -1:] if gradients else None,
            dq=dq,
            dk=dk,
            dv=dv,
            arithmetic=self.implementation.arithmetic,
        )

    def peak_bytes(self, direction: Direction) -> int:
        """The most bytes in use at once beyond inputs and results: of a forward, or of forward and backward."""
        peak, results = peak_bytes(lambda: self.answer(direction), self.given.device)
        return peak - sum(tensor.untyped_storage().nbytes() for tensor in results)


def operations(given: Given, direction: Direction) -> float:
    """Counts the operations of a call, as section 4.1 of the FlashAttention-2 paper (Dao) does.

    A forward has 4 B H N M D operations, half as many with a causal mask, and with a block mask those of the blocks
    that it keeps. A backward has 2.5 times as many.
    """
    case = given.case
    count = 4.0 * case.batch * case.heads * case.queries * case.keys * case.dim
    count *= given.share * (0.5 if case.mask != "full" else 1.0)
    return count * (2.5 if direction == "backward" else 1.0)
