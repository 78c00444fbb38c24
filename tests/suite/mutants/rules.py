"""The rules by which other projects test attention kernels, for comparison.

Each rule has its source, its constants and its own references. The rules are written from what their sources do. Their
tolerances do not belong in `oracles/bounds.py`, because no verdict about a kernel of this project depends on them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flashproof.calling import TENSORS, Fault, Refused, TensorName, attend
from flashproof.cases import Case, not_claimed
from flashproof.impls.spec import Device, Dtype, Implementation
from flashproof.oracles import naive
from flashproof.oracles.naive import Attention
from flashproof.tensors import inputs


@dataclass(frozen=True, eq=False)
class Compared:
    """One tensor of one case: the answer of a kernel, the exact result, and the answer of eager attention.

    Eager attention computes in the kernel's own dtype.
    """

    name: TensorName
    actual: Tensor
    exact: Tensor  # float64
    eager: Tensor

    @property
    def reference(self) -> Tensor:
        """The exact result, rounded to the kernel's dtype."""
        return self.exact.to(self.actual.dtype)


@dataclass(frozen=True)
class Rule:
    """One rule: a function that says whether it accepts a tensor, and the tensors that the rule compares."""

    name: str
    says: str
    source: str
    accepts: Callable[[Compared], bool]
    tensors: tuple[TensorName, ...] = ("out", "dq", "dk", "dv")


def _close(actual: Tensor, expected: Tensor, atol: float, rtol: float) -> bool:
    return bool(torch.isclose(actual.double(), expected.double(), atol=atol, rtol=rtol).all())


def _largest(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest error, or NaN if any element is NaN."""
    return float((actual.double() - expected.double()).abs().max())


_RTOL = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 1.3e-6}
_ATOL = {torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float32: 1e-5}


def _within_a_hundredth(it: Compared) -> bool:
    return _close(it.actual, it.reference, atol=1e-2, rtol=0.0)


def _twice_eager(it: Compared) -> bool:
    return _largest(it.actual, it.exact) <= 2.0 * _largest(it.eager, it.exact)


def _older_sdpa(it: Compared) -> bool:
    fudge = 4.0 if it.name == "dq" else 1.0
    relative = ((it.exact - it.eager.double()) / it.exact).abs().nan_to_num(nan=_RTOL[it.actual.dtype])
    atol = fudge * max(_largest(it.eager, it.exact), _ATOL[it.actual.dtype])
    rtol = fudge * max(float(relative.max()), _RTOL[it.actual.dtype])
    return _close(it.actual, it.reference, atol=atol, rtol=_RTOL[it.actual.dtype] if rtol > 1e30 else rtol)


_FUDGES: dict[TensorName, float] = {"out": 4.0, "dq": 160.0, "dk": 25.0, "dv": 8.0}


def _newer_sdpa(it: Compared) -> bool:
    return _largest(it.actual, it.exact) <= max(1e-5, _FUDGES[it.name] * _largest(it.eager, it.exact))


def _assert_close(it: Compared) -> bool:
    return _close(it.actual, it.reference, atol=1e-5, rtol=_RTOL[it.actual.dtype])


def _three_of_flashmla(it: Compared) -> bool:
    tolerances = {"out": (1e-3, 2.01 / 128, 5e-6), "lse": (1e-6, 8.01 / 65536, 1e-7)}
    absolute, relative, cosine = tolerances.get(it.name, (1e-3, 8.01 / 128, 7e-6))
    actual, expected = it.actual.float(), it.reference.float()
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        return False
    actual, expected = actual[actual.isfinite()], expected[expected.isfinite()]
    error = (actual - expected).abs()
    near = (error < absolute) | (error / (expected.abs() + 1e-6) < relative)
    a, b = actual.double(), expected.double()
    apart = 0.0 if float((b * b).sum()) < 1e-12 else 1.0 - float(2.0 * (a * b).sum() / (a * a + b * b).sum())
    return bool(near.all()) and abs(apart) <= cosine


RULES: tuple[Rule, ...] = (
    Rule(
        "allclose 1e-2",
        "within 1e-2 of the reference, element by element",
        "Triton, tutorial 06 (fused attention): atol=1e-2, rtol=0",
        _within_a_hundredth,
    ),
    Rule(
        "twice eager",
        "the largest error is at most twice that of eager attention in the same dtype",
        "Dao-AILab/flash-attention, tests/test_flash_attn.py",
        _twice_eager,
    ),
    Rule(
        "SDPA, older",
        "atol and rtol are eager's largest absolute and relative errors, four times as much for dQ",
        "PyTorch 2.0 to 2.4, test/test_transformers.py, get_tolerances",
        _older_sdpa,
    ),
    Rule(
        "SDPA, newer",
        "the largest error is at most eager's times 4 (out), 160 (dQ), 25 (dK) or 8 (dV), or 1e-5",
        "PyTorch since 2.5, test/test_transformers.py, check_out_and_grad",
        _newer_sdpa,
    ),
    Rule(
        "assert_close",
        "rtol 1.3e-6, 1e-3 or 1.6e-2 by dtype, atol 1e-5",
        "torch.testing.assert_close with its defaults",
        _assert_close,
    ),
    Rule(
        "FlashMLA",
        "absolute or relative error small, and cosine distance at most 5e-6 or 7e-6; LSE too",
        "deepseek-ai/FlashMLA, tests/kernelkit/compare.py, check_is_allclose, with the tolerances of its tests",
        _three_of_flashmla,
        TENSORS,
    ),
)

# Inputs with the shapes that such suites use.
_THEIRS = """
b2 h4 q128 k128 d64
b2 h4 q128 k128 d64 causal
b1 h2 q113 k203 d64
b1 h2 q256 k256 d64 causal
b1 h2 q108 k256 d40 causal-br
b1 h4/2 q128 k217 d128 causal-br
b1 h4/2 q128 k128 d64 causal seed1
b1 h2 q128 k128 d64 dropout0.17
"""


def their_inputs(dtype: Dtype, device: Device) -> list[Case]:
    """Returns cases with standard normal inputs of a few shapes, for output and gradients.

    The suites of these rules run such inputs.
    """
    return [Case.parse(f"{line} {dtype}") for line in _THEIRS.split("\n") if line]


@lru_cache(maxsize=512)
def references(case: Case) -> tuple[Attention, dict[TensorName, Tensor]]:
    """Returns the exact result in float64, and the answer of eager attention in the dtype of the case.

    Autograd computes the gradients of eager attention.
    """
    given = inputs(case)
    problem = given.problem(case)
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in (given.query, given.key, given.value))
    rows, groups = torch.arange(case.queries), case.heads // case.kv_heads
    every = [(b, h) for b in range(case.batch) for h in range(case.heads)]
    visible = torch.stack([problem.mask.visible(b, h, rows) for b, h in every]).view(
        case.batch, case.heads, case.queries, case.keys
    )
    scores = (query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)) * problem.scale
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=3).masked_fill(~visible, 0.0)
    lse = torch.logsumexp(scores.masked_fill(~visible, -torch.inf).float(), dim=3)
    if case.dropout:
        kept = torch.stack([problem.dropout.kept(b, h, rows, case.keys) for b, h in every]).view(visible.shape)
        weights = weights * kept / (1.0 - case.dropout)
    out = weights @ value.repeat_interleave(groups, dim=1)
    dq, dk, dv = torch.autograd.grad(out, (query, key, value), given.dout)
    return naive.attention(problem), {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def ask(implementation: Implementation, cases: list[Case]) -> dict[str, tuple[Case, str]]:
    """Returns the rules that reject an implementation on any of the cases, each with the first case and tensor.

    If the implementation raises an exception, all rules reject it. A case that it refuses does not count. Nor does one
    for which eager attention answers NaN: most rules take their tolerance from eager attention.
    """
    rejected: dict[str, tuple[Case, str]] = {}
    for case in cases:
        if not_claimed(case, implementation.supports) is not None:
            continue
        try:
            answer = attend(implementation, case, inputs(case), backward=implementation.supports.backward)
        except Refused:
            continue
        except Fault as fault:
            return {rule.name: (case, str(fault)) for rule in RULES} | rejected
        exact, eager = references(case)
        if any(bool(tensor.isnan().any()) for tensor in eager.values()):
            continue
        for rule in RULES:
            for name in rule.tensors:
                if (
                    rule.name not in rejected
                    and name in answer
                    and not rule.accepts(Compared(name, answer[name], getattr(exact, name), eager[name]))
                ):
                    rejected[rule.name] = (case, name)
        if len(rejected) == len(RULES):
            break
    return rejected
