"""The attentions of a training: an implementation, the exact result, and right kernels that round at random."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashproof.calling import GRADIENTS
from flashproof.cases import Case
from flashproof.impls.spec import Arithmetic, Dtype, Implementation
from flashproof.oracles import bounds, naive, spread
from flashproof.oracles.masks import Mask
from flashproof.oracles.problem import Problem
from flashproof.subject import Subject
from flashproof.tensors import Inputs
from flashproof.tests.training.learning import Backward, Gradients, Kernel


class Stopped(Exception):
    """The kernel refused or failed. The subject has recorded it."""


def is_modelled(arithmetic: Arithmetic, dtype: Dtype) -> bool:
    """Whether `right` can draw the errors of a claim."""
    numbers = torch.zeros((1, 1, 1, 1), dtype=getattr(torch, dtype))
    return spread.is_modelled(_problem(numbers.dtype, numbers, numbers, numbers, numbers), arithmetic)


def of_implementation(implementation: Implementation, dtype: torch.dtype) -> Kernel:
    """An implementation, called with tensors of a dtype."""

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            out = implementation.attention(*leaves, is_causal=True)
        assert isinstance(out, Tensor)

        def backward(dout: Tensor) -> Gradients:
            dquery, dkey, dvalue = torch.autograd.grad(out, leaves, dout.to(dtype))
            return dquery, dkey, dvalue

        return out.detach(), backward

    return kernel


def of_subject(subject: Subject, case: Case) -> Kernel:
    """The implementation under a check. Refusals and failures are recorded, and then the kernel raises `Stopped`."""
    dtype = getattr(torch, case.dtype)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
        q, k, v = (tensor.to(subject.device, dtype) for tensor in (query, key, value))
        with torch.enable_grad():
            call = subject.forward(case, Inputs(q, k, v, dout=torch.zeros_like(q), block_mask=None))
        if call is None:
            raise Stopped

        def backward(dout: Tensor) -> Gradients:
            given = replace(call, inputs=replace(call.inputs, dout=dout.to(subject.device, dtype)))
            answer = subject.backward(replace(given, before=given.renewed().before))
            if answer is None:
                raise Stopped
            dquery, dkey, dvalue = (answer[name].to(dout.device) for name in GRADIENTS)
            return dquery, dkey, dvalue

        return call.tensors["out"].detach().to(query.device), backward

    return kernel


def exact(dtype: torch.dtype) -> Kernel:
    """The float64 result for inputs of a dtype, without any rounding of the results."""

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
        def backward(dout: Tensor) -> Gradients:
            answer = naive.attention(_problem(dtype, query, key, value, dout))
            return answer.dq, answer.dk, answer.dv

        return naive.attention(_problem(dtype, query, key, value, torch.zeros_like(query))).out, backward

    return kernel


def right(dtype: torch.dtype, arithmetic: Arithmetic, seed: int) -> Kernel:
    """A right kernel whose roundings are drawn: the exact result, with the errors that a claim makes.

    The errors are normal. Their mean square is that of `oracles.spread`, an upper estimate for the claim.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(answer: Tensor, variance: Tensor) -> Tensor:
        before = (variance - bounds.half_unit(answer, dtype).square() / 3.0).clamp(min=0.0).sqrt()
        return (answer + before * torch.randn(answer.shape, generator=generator, dtype=torch.float64)).to(dtype)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Backward]:
        def backward(dout: Tensor) -> Gradients:
            problem = _problem(dtype, query, key, value, dout)
            answer, variances = naive.attention(problem), spread.variances(problem, arithmetic).elements
            return (
                drawn(answer.dq, variances.dq),
                drawn(answer.dk, variances.dk),
                drawn(answer.dv, variances.dv),
            )

        problem = _problem(dtype, query, key, value, torch.zeros_like(query))
        return drawn(naive.attention(problem).out, spread.variances(problem, arithmetic).elements.out), backward

    return kernel


def _problem(dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Problem:
    q, k, v, do = (tensor.detach().to(dtype) for tensor in (query, key, value, dout))
    length, dim = query.shape[2:]
    return Problem(q, k, v, do, 1.0 / math.sqrt(dim), Mask(length, length, "top_left"))
