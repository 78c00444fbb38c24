"""The derived bound for any test: `flashproof.judge` and `flashproof.assert_accurate`.

Both take a kernel's answer, and its inputs and options in the form of torch's `scaled_dot_product_attention`. The
verdict is the same as in the suite (`judging`): the deterministic bound, for float32 on FMA units also the
probabilistic one, and the test for bias. Sources of the bound: `oracles/bounds.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from flashproof import judging, questions
from flashproof.calling import GRADIENTS, TENSORS, TensorName
from flashproof.impls.call import Call, check_call
from flashproof.impls.shapes import Bool, Float, Float32, Float64
from flashproof.impls.spec import Alignment, Arithmetic, Device, Dtype, arithmetic_of_callables
from flashproof.judging import Exact, Judged
from flashproof.oracles.masks import Dropout, Mask
from flashproof.oracles.problem import Problem
from flashproof.oracles.verdict import Bias, Worst
from flashproof.reports import wording
from flashproof.reports.record import Certainty, Judgement

Claimed = Arithmetic | Callable[[Dtype, Device], Arithmetic]

_ROWS = 256  # the number of queries whose mask is computed at once


@dataclass(frozen=True, eq=False)
class Verdict:
    """The verdict on one tensor."""

    tensor: TensorName  # which tensor this is
    dtype: str  # the dtype of the tensor, "float16"
    # The largest ratio of error to deterministic bound. It is inf where no bound excuses a result, such as a NaN.
    rho: float
    # The largest ratio of error to probabilistic bound. None where that bound does not gate: outside float32 on FMA
    # units.
    rho_statistical: float | None
    worst: Worst  # the element with the larger of the two ratios
    bias: Bias | None  # the mean error. It is None for the LSE and for few rows or columns, which are not judged
    # How the exact value is known. "certified": it is enclosed in a ball, a number with a proven radius. "bounded": it
    # was computed in float64, with a bound on the error of float64. "sampled": the same, and rows were compared with
    # balls.
    certainty: Certainty
    passed: bool  # whether both ratios are at most 1, and the mean error does not lean
    row: str  # the properties of the row of the worst element, if the tensor failed, or else empty
    bound: Float64[Tensor, "*shape"] | None  # the bound on each element, if `with_bounds` asked for it
    exact: Float64[Tensor, "*shape"] | None  # the exact result, if `with_bounds` asked for it
    _judgement: Judgement = field(repr=False)

    @property
    def worst_rho(self) -> float:
        """The larger of `rho` and `rho_statistical`: up to 1 passes."""
        return max(self.rho, self.rho_statistical or 0.0)

    def __str__(self) -> str:
        """Returns rho, error and bound in a line. If the tensor failed, further lines describe the worst element, its
        row and the bias.
        """
        lines = wording.finding(self._judgement, self.tensor, self.dtype)
        return lines[0] if self.passed else "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Verdicts(Mapping[TensorName, Verdict]):
    """The verdicts on all tensors that were given: a mapping from the name of a tensor to its verdict.

    `verdicts["dq"].rho` is a number. The order is the worst first. A tensor that was not given raises KeyError.
    """

    by_tensor: Mapping[TensorName, Verdict]  # the same verdicts, as a plain mapping
    # The other question that the failed tensors answer, such as one without the causal mask. Empty if there is none.
    question: str

    @property
    def passed(self) -> bool:
        """Whether every tensor passed."""
        return all(each.passed for each in self.values())

    def __getitem__(self, tensor: TensorName) -> Verdict:
        if tensor not in self.by_tensor:
            raise KeyError(f"{tensor}: was not judged; the verdicts are on {', '.join(self.by_tensor)}")
        return self.by_tensor[tensor]

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.by_tensor)

    def __len__(self) -> int:
        return len(self.by_tensor)

    def __str__(self) -> str:
        """Returns a block of lines for each tensor that failed, the worst first, and a line for each that passed."""
        failed = [str(each) for each in self.values() if not each.passed]
        passed = [str(each) for each in self.values() if each.passed]
        if failed and self.question:
            failed[0] += f"\n{self.question}"
        return "\n\n".join([*failed, "\n".join(passed)] if passed else failed)


def judge(
    out: Float[Tensor, "batch heads queries dim"] | None,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    lse: Float32[Tensor, "batch heads queries"] | None = None,
    dout: Float[Tensor, "batch heads queries dim"] | None = None,
    dq: Float[Tensor, "batch heads queries dim"] | None = None,
    dk: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    dv: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    arithmetic: Claimed | None = None,
    with_bounds: bool = False,
) -> Verdicts:
    """Judges an attention kernel's answer: is it as accurate as the arithmetic that the kernel claims allows?

    - `query`, `key`, `value`: what the kernel was given. All three are float32, float16 or bfloat16, on one device: a
      CPU or a CUDA GPU. dim is at most 256.
    - `out`, `lse`, `dq`, `dk`, `dv`: what the kernel answered. Any subset of them is judged; give None for `out` to
      leave it out. They have the dtype of `query`; `lse` is float32, the natural log-sum-exp of the scaled scores.
    - `dout`: the output gradient. `dq`, `dk` and `dv` are the gradients of sum(out dout) for query, key and value.
    - `is_causal`, `scale`, `enable_gqa`: as in `torch.nn.functional.scaled_dot_product_attention`.
    - `causal_alignment`: "top_left", as in torch, lets query i see the keys j <= i. "bottom_right", as in flash-attn,
      lets it see the keys j <= i + keys - queries.
    - `block_mask`: False hides a block of 128 queries by 128 keys.
    - `dropout_p`, `dropout_seed`: dropout on the weights, from 0 to below 1, with the mask of Philox 4x32-10
      (`oracles.masks.Dropout`).
    - `arithmetic`: the claim, or a function of dtype and device that makes it. None is FlashAttention's: scores and
      sums are float32 (IEEE, no TF32), and weights are cast to the input's dtype before the second product.
    - `with_bounds`: whether the verdicts hold the bound and the exact result of every element, in float64.

    A query that sees no key must have output 0, LSE -inf and gradient 0.

    The exact result is computed in float64, with a bound on its error. On a CPU, small problems are certified in balls,
    and some rows of long problems are compared with balls. On a GPU, and for the lengths between, only a row that fails
    is compared. Memory is linear in the length. No gradient is recorded, and no argument is changed.

    Raises TypeError, ValueError or NotImplementedError for an argument that cannot be judged. The error names it. A
    wrong number in a result, such as a NaN, raises no error. The verdict says that the tensor did not pass.
    """
    keywords = (is_causal, causal_alignment, scale, enable_gqa, dropout_p, dropout_seed, block_mask)
    call = check_call(query, key, value, *keywords)
    if query.device.type not in ("cpu", "cuda"):
        raise ValueError(f"query: device {query.device} is not taken; give tensors on the CPU or on a CUDA device")
    answer = _checked_answer({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, query, key, dout)
    claim = _claim(arithmetic, query)
    with torch.no_grad():
        problem = _problem(query, key, value, dout, call, causal_alignment, block_mask)
        return _judge(
            problem, {name: tensor.detach() for name, tensor in answer.items()}, claim, with_bounds=with_bounds
        )


def assert_accurate(
    out: Float[Tensor, "batch heads queries dim"] | None,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    block_mask: Bool[Tensor, "batch_or_1 heads_or_1 query_blocks key_blocks"] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    lse: Float32[Tensor, "batch heads queries"] | None = None,
    dout: Float[Tensor, "batch heads queries dim"] | None = None,
    dq: Float[Tensor, "batch heads queries dim"] | None = None,
    dk: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    dv: Float[Tensor, "batch kv_heads keys dim"] | None = None,
    arithmetic: Claimed | None = None,
) -> None:
    """Raises AssertionError if a kernel's answer is less accurate than the arithmetic that it claims allows.

    The arguments are those of `judge`, without `with_bounds`, and so are the errors for arguments that cannot be
    judged. The message tells of every tensor that failed, the worst first: rho, error and bound, the worst element,
    what its row looks like, a bias, and which other question the answer is right for.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    verdicts = judge(
        out,
        query,
        key,
        value,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        scale=scale,
        enable_gqa=enable_gqa,
        block_mask=block_mask,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        lse=lse,
        dout=dout,
        dq=dq,
        dk=dk,
        dv=dv,
        arithmetic=arithmetic,
    )
    if not verdicts.passed:
        raise AssertionError(str(verdicts))


# ------------------------------------------------------------------------------------------------ what was given


def _checked_answer(
    given: dict[TensorName, Tensor | None], query: Tensor, key: Tensor, dout: Tensor | None
) -> dict[TensorName, Tensor]:
    """The tensors to judge. Raises TypeError or ValueError for tensors that cannot be an answer to these inputs."""
    answer = {name: tensor for name, tensor in given.items() if tensor is not None}
    gradients = [name for name in GRADIENTS if name in answer]
    if gradients and dout is None:
        raise ValueError(f"dout: None was given with {gradients[0]}; give the output gradient that it was computed for")
    if dout is not None and not gradients:
        raise ValueError(
            "dout: was given without dq, dk and dv; give at least one of them, such as query.grad after a backward, "
            "or leave dout out"
        )
    if not answer:
        raise ValueError("out: None was given, and so were lse, dq, dk and dv; give at least one result of the kernel")
    like = {"out": query, "dout": query, "lse": query[..., 0], "dq": query, "dk": key, "dv": key}
    tensors: dict[str, object] = {str(name): tensor for name, tensor in answer.items()}
    if dout is not None:
        tensors["dout"] = dout
    for name, tensor in tensors.items():
        shape, dtype = like[name].shape, torch.float32 if name == "lse" else query.dtype
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} is not a tensor; give one of shape {list(shape)}")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: layout {tensor.layout} is not taken; give a dense tensor, as to_dense() makes one"
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)} does not fit the inputs; "
                f"give {list(shape)}{_hint(name, tensor, shape)}"
            )
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} is not taken; give {dtype}{'' if name == 'lse' else ', as query has'}"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: device {tensor.device} differs from query's {query.device}; put all tensors on one device"
            )
    return answer


def _hint(name: str, tensor: Tensor, shape: torch.Size) -> str:
    """A hint at what the caller may have meant by another shape."""
    if tensor.ndim == 4 and tensor.transpose(1, 2).shape == shape:
        return f", that is {name}.transpose(1, 2)"
    if name == "lse" and tensor.ndim == 4 and tensor.shape[:3] == shape and tensor.shape[3] == 1:
        return ", that is lse.squeeze(-1)"
    return ""


def _claim(arithmetic: object, query: Tensor) -> Arithmetic:
    dtype, device = cast(Dtype, str(query.dtype).removeprefix("torch.")), cast(Device, query.device.type)
    if arithmetic is None:
        return arithmetic_of_callables(dtype, device)
    if isinstance(arithmetic, Arithmetic):
        return arithmetic
    if not callable(arithmetic) or isinstance(arithmetic, type):
        raise TypeError(
            f"arithmetic: {arithmetic!r} is not a claim; "
            "give a flashproof.Arithmetic, or a function of dtype and device that returns one"
        )
    claim = arithmetic(dtype, device)
    if not isinstance(claim, Arithmetic):
        raise TypeError(
            f"arithmetic: returned {claim!r} for ({dtype!r}, {device!r}); it must return a flashproof.Arithmetic"
        )
    return claim


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor | None,
    call: Call,
    causal_alignment: Alignment,
    block_mask: Tensor | None,
) -> Problem:
    """The problem that the oracles solve. Raises ValueError for a number that is not finite where it matters."""
    problem = Problem(
        query=query.detach(),
        key=key.detach(),
        value=value.detach(),
        dout=query.detach().new_zeros(()).expand_as(query) if dout is None else dout.detach(),
        scale=call.scale,
        mask=Mask(call.queries, call.keys, causal_alignment if call.is_causal else None, block_mask),
        dropout=Dropout(call.dropout_p, call.dropout_seed),
    )
    named = {"query": problem.query, "key": problem.key, "value": problem.value, "dout": problem.dout}
    if bool(torch.stack([tensor.isfinite().all() for tensor in named.values()]).all()):
        return problem
    # NaN and infinities in a key that no query sees, or in a query that sees no key, change nothing: they
    # count as 0.
    sees, seen = _visibility(problem)
    used = {"query": sees, "key": seen, "value": seen, "dout": sees}
    for name, tensor in named.items():
        wrong = (~tensor.isfinite() & used[name][..., None]).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ValueError(
                f"{name}: holds {tensor[index].item()} at {list(index)}, where a result depends on it; "
                "give finite numbers, since the exact result is defined for these alone"
            )
    cleaned: dict[str, Any] = {name: torch.where(used[name][..., None], tensor, 0.0) for name, tensor in named.items()}
    return replace(problem, **cleaned)


def _visibility(problem: Problem) -> tuple[Bool[Tensor, "batch heads queries"], Bool[Tensor, "batch kv_heads keys"]]:
    """Which queries see a key, and which keys a query sees."""
    device, (batches, heads, queries, _) = problem.query.device, problem.query.shape
    sees = torch.zeros((batches, heads, queries), dtype=torch.bool, device=device)
    seen = torch.zeros(problem.key.shape[:3], dtype=torch.bool, device=device)
    for batch in range(batches):
        for head in range(heads):
            for start in range(0, queries, _ROWS):
                rows = torch.arange(start, min(start + _ROWS, queries), device=device)
                visible = problem.mask.visible(batch, head, rows)
                sees[batch, head, rows] = visible.any(dim=1)
                seen[batch, head // problem.groups] |= visible.any(dim=0)
    return sees, seen


# ------------------------------------------------------------------------------------------------ verdicts


def _judge(problem: Problem, answer: dict[TensorName, Tensor], claim: Arithmetic, *, with_bounds: bool) -> Verdicts:
    backward = any(name in GRADIENTS for name in answer)
    truth = _exact(problem, claim, backward=backward)
    judged = [judging.judge_tensor(answer[name], name, truth) for name in TENSORS if name in answer]
    judged.sort(key=lambda each: (each.passed, -each.worst_rho))
    failed = [each for each in judged if not each.passed]
    if failed and truth.certainty != "certified":
        truth = _enclose_worst_row(problem, truth, failed, backward=backward)
        judged = [replace(each, certainty=truth.certainty) for each in judged]
    verdicts = {
        each.tensor: _verdict(each, answer[each.tensor], problem, truth, with_bounds=with_bounds) for each in judged
    }
    return Verdicts(verdicts, questions.answered(problem, answer, judged, truth, claim))


def _exact(problem: Problem, claim: Arithmetic, *, backward: bool) -> Exact:
    """The exact result and bound that judge the answer, certified as in the suite. A GPU does not wait for balls."""
    if problem.query.is_cuda:
        return judging.exact_of(problem, claim, backward=backward)
    if judging.is_certified(problem):
        with torch.device("cpu"):  # independent of the caller's default device
            enclosed = judging.enclose(problem, backward=backward)
        return judging.exact_of(problem, claim, enclosed, backward=backward)
    truth = judging.exact_of(problem, claim, backward=backward)
    if problem.key.shape[2] < judging.SAMPLED_FROM:
        return truth
    head = problem.query.shape[1] - 1
    return _held_against_balls(problem, truth, 0, head, judging.sampled_rows(problem.query.shape[2]), backward=backward)


def _enclose_worst_row(problem: Problem, truth: Exact, failed: list[Judged], *, backward: bool) -> Exact:
    """Compares the oracle with a ball at the largest error, before a kernel is reported as wrong."""
    place = judging.worst_row(failed)
    return truth if place is None else _held_against_balls(problem, truth, *place[:2], [place[2]], backward=backward)


def _held_against_balls(
    problem: Problem, truth: Exact, batch: int, head: int, rows: list[int], *, backward: bool
) -> Exact:
    names: tuple[TensorName, ...] = ("out", "lse", "dq") if backward else ("out", "lse")
    with torch.device("cpu"):
        judging.check_rows(problem, truth.answer, truth.error, batch, head, rows, names)
    return replace(truth, certainty="sampled")


def _verdict(judged: Judged, actual: Tensor, problem: Problem, truth: Exact, *, with_bounds: bool) -> Verdict:
    dtype = str(actual.dtype).removeprefix("torch.")
    row = "" if judged.passed or judged.tensor in ("dk", "dv") else judging.describe(problem, judged.worst.index)
    judgement = Judgement(
        run="",
        implementation="",
        check="",
        case="",
        dtype=dtype,
        device=cast(Device, actual.device.type),
        status="passed" if judged.passed else "failed",
        **judged.figures(row),  # type: ignore[arg-type]
    )
    return Verdict(
        tensor=judged.tensor,
        dtype=dtype,
        rho=judged.rho.value,
        rho_statistical=judged.statistical.value if judged.statistical else None,
        worst=judged.worst,
        bias=judged.bias,
        certainty=judged.certainty,
        passed=judged.passed,
        row=row,
        bound=getattr(truth.bound, judged.tensor) if with_bounds else None,
        exact=getattr(truth.answer, judged.tensor) if with_bounds else None,
        _judgement=judgement,
    )
