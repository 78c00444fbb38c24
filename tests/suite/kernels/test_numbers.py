"""Tests numbers that no bound covers, in the project's own implementations.

A NaN is passed on and never becomes a number. A score below the range of float32 is -inf.
"""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flashproof.impls import catalogue
from flashproof.impls.spec import Device
from flashproof.tests.suite.command_line.test_catalogue import loaded

OWN = catalogue.names(["tiled.*", "triton.*", "cuda.*"])
DEVICES = [pytest.param(device, marks=pytest.mark.gpu if device == "cuda" else ()) for device in get_args(Device)]
TENSORS = ("out", "lse", "dq", "dk", "dv")


def attended(
    name: str, device: Device, inputs: dict[str, Tensor], dtype: torch.dtype | None = None, **keywords: Any
) -> dict[str, Tensor]:
    """Runs an implementation. Returns out, lse and, if it has a backward, dq, dk and dv on the CPU.

    inputs: query, key, value and dout, all [1, heads, length, dim].
    dtype: of the computation. None means float32, or bfloat16 if it does not take float32.
    """
    implementation = loaded(name)
    if device not in implementation.supports.devices:
        pytest.skip(f"{name}: not for {device}")
    if "dropout_p" in keywords and not implementation.supports.dropout:
        pytest.skip(f"{name}: claims no dropout")
    if reason := implementation.missing(device) or (
        "CUDA: no device" if device == "cuda" and not torch.cuda.is_available() else None
    ):
        pytest.skip(reason)
    if dtype is None:
        dtype = torch.float32 if "float32" in implementation.supports.dtypes else torch.bfloat16
    leaves = [inputs[tensor].to(device, dtype, copy=True).requires_grad_() for tensor in ("query", "key", "value")]
    attention: Any = implementation.attention
    results = attention(*leaves, return_lse=True, **keywords)
    if implementation.supports.backward:
        results = (*results, *torch.autograd.grad(results[0], leaves, inputs["dout"].to(device, dtype)))
    return {tensor: x.detach().cpu() for tensor, x in zip(TENSORS, results, strict=False)}


def textbook(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Computes the same in float64, with whole matrices."""
    query, key, value = (inputs[tensor].double().requires_grad_() for tensor in ("query", "key", "value"))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    out = torch.softmax(scores, dim=-1) @ value
    gradients = torch.autograd.grad(out, (query, key, value), inputs["dout"].double())
    return {tensor: x.detach() for tensor, x in zip(TENSORS, (out, scores.logsumexp(-1), *gradients), strict=True)}


def random(queries: int, keys: int) -> dict[str, Tensor]:
    """Makes random inputs in float32, [1, 2, length, 16]."""
    generator = torch.Generator().manual_seed(0)
    lengths = {"query": queries, "key": keys, "value": keys, "dout": queries}
    return {name: torch.randn(1, 2, length, 16, generator=generator) for name, length in lengths.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["query", "key", "value", "dout"])
@pytest.mark.parametrize("name", OWN)
def test_nan_is_passed_on(name: str, where: str, device: Device) -> None:
    """A NaN makes every result that depends on it NaN, and no other result.

    The others keep their bits. Gradients do so only if the kernel is deterministic.
    """
    inputs = random(queries=70, keys=150)
    repeats = ("out", "lse", *(("dq", "dk", "dv") if loaded(name).supports.deterministic else ()))
    without = attended(name, device, inputs)
    inputs[where][0, 1, 3, 5] = math.nan
    found, expected = attended(name, device, inputs), textbook(inputs)
    for tensor, values in found.items():
        assert torch.equal(values.isnan(), expected[tensor].isnan()), tensor
        if tensor in repeats:
            assert torch.equal(values[~values.isnan()], without[tensor][~values.isnan()]), tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OWN)
def test_nan_is_not_dropped(name: str, device: Device) -> None:
    """Dropout may drop the weight that is NaN. The result is still NaN, because the sum of the weights contains it."""
    inputs = random(queries=40, keys=40)
    inputs["key"][0, 1, 3, 5] = math.nan
    found = attended(name, device, inputs, dropout_p=0.5, dropout_seed=1)
    assert found["out"][0, 1].isnan().all()
    assert found["lse"][0, 1].isnan().all()
    assert not found["out"][0, 0].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OWN)
def test_scores_below_float32(name: str, device: Device) -> None:
    """Keys with scores below the range of float32 have the weight 0, even if they fill whole tiles.

    The output is the mean of the other values, which are all equal.
    """
    inputs = random(queries=70, keys=300)
    inputs["query"] = inputs["query"].abs() + 1e19
    inputs["key"][..., :270, :], inputs["key"][..., 270:, :] = -1e20, 0.0
    inputs["value"][..., 270:, :] = 1.0
    found = attended(name, device, inputs)
    assert (found["out"] == 1.0).all()
    if "dv" in found:
        assert (found["dv"][..., :270, :] == 0.0).all()
        assert found["dv"].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", [name for name in OWN if "float16" in catalogue.load(name).supports.dtypes])
def test_delta_beyond_float16(name: str, dim: int, device: Device) -> None:
    """dP and delta exceed the range of float16, but dS = P (dP - delta) is 0, because all values are equal.

    A tile reaches past the last key. There, dP is 0, and P is not, because all scores are 0. If this dS becomes
    infinite in float16, dQ becomes NaN.
    """
    numbers = {"query": 0.0, "key": 1.0, "value": 128.0, "dout": 256.0}
    inputs = {tensor: torch.full((1, 1, 33, dim), number) for tensor, number in numbers.items()}
    found = attended(name, device, inputs, torch.float16)
    for tensor in found.keys() & {"dq", "dk"}:
        assert (found[tensor] == 0.0).all(), tensor
