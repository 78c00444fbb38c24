"""Tests the checks of arguments in the project's own implementations.

A bad argument raises an error before anything is computed. The message names the argument and its value, and says what
is accepted.
"""

import math
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from flashproof.impls import catalogue
from flashproof.impls.spec import Implementation
from flashproof.tests.suite.command_line.test_catalogue import loaded

OWN = catalogue.names(["tiled.*", "triton.*", "cuda.*"])

QUERY, KEY = torch.zeros(2, 4, 130, 16), torch.zeros(2, 2, 140, 16)
MANY = torch.zeros(1).expand(2, 2, 2**31 + 5, 16)  # one number in memory, as a large tensor
GOOD: dict[str, object] = {"query": QUERY, "key": KEY, "value": KEY, "enable_gqa": True}

# (the arguments that replace good ones, the exception, its message). The message begins with the name of the argument.
# Its value follows, and then what is accepted.
BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "query-list": ({"query": [1.0]}, TypeError, r"^query: list is not a tensor; give a torch\.Tensor"),
    "value-none": ({"value": None}, TypeError, "^value: NoneType is not a tensor"),
    "key-three-dimensions": ({"key": KEY[0]}, ValueError, r"^key: shape \[2, 140, 16\] has 3 dimensions; give four"),
    "query-float64": (
        {"query": QUERY.double()},
        TypeError,
        r"^query: dtype torch\.float64 is not taken; give float32, float16 or bfloat16",
    ),
    "query-int": ({"query": QUERY.int()}, TypeError, r"^query: dtype torch\.int32 is not taken"),
    "query-sparse": (
        {"query": QUERY.to_sparse()},
        TypeError,
        r"^query: layout torch\.sparse_coo is not taken; give a dense tensor",
    ),
    "value-mkldnn": (
        {"value": KEY.to_mkldnn()},
        TypeError,
        r"^value: layout torch\._mkldnn is not taken; give a dense tensor",
    ),
    "query-empty": (
        {"query": QUERY[:, :, :0]},
        ValueError,
        r"^query: shape \[2, 4, 0, 16\] is empty; every size is at least 1",
    ),
    "key-empty": ({"key": KEY[:, :, :0], "value": KEY[:, :, :0]}, ValueError, r"^key: shape \[2, 2, 0, 16\] is empty"),
    "key-dtype": ({"key": KEY.half()}, TypeError, r"^key: dtype torch\.float16 differs from query's torch\.float32"),
    "value-dtype": ({"value": KEY.bfloat16()}, TypeError, r"^value: dtype torch\.bfloat16 differs"),
    "key-device": (
        {"key": KEY.to("meta")},
        ValueError,
        "^key: device meta differs from query's cpu; put all three on one device",
    ),
    "key-batch": ({"key": KEY[:1], "value": KEY[:1]}, ValueError, "^key: batch 1 differs from query's 2"),
    "key-dim": ({"key": KEY[..., :8], "value": KEY[..., :8]}, ValueError, "^key: head dim 8 differs from query's 16"),
    "value-shape": (
        {"value": KEY[:, :, :139]},
        ValueError,
        r"^value: shape \[2, 2, 139, 16\] differs from key's \[2, 2, 140, 16\]",
    ),
    "dim-too-large": (
        {"query": torch.zeros(1, 1, 1, 257), "key": torch.zeros(1, 1, 1, 257), "value": torch.zeros(1, 1, 1, 257)},
        ValueError,
        "^query: head dim 257 is larger than 256, the largest taken",
    ),
    "queries-too-many": (
        {"query": torch.zeros(1).expand(2, 4, 2**31, 16)},
        ValueError,
        "^query: length 2147483648 is larger than 2147483392, the largest taken",
    ),
    "keys-too-many": ({"key": MANY, "value": MANY}, ValueError, "^key: length 2147483653 is larger than 2147483392"),
    "heads-without-gqa": (
        {"enable_gqa": False},
        ValueError,
        "^key: 2 heads for query's 4; give equal numbers, or enable_gqa=True",
    ),
    "heads-that-do-not-divide": ({"query": QUERY[:, :3]}, ValueError, "^key: 2 heads do not divide query's 3"),
    "alignment": (
        {"causal_alignment": "middle"},
        ValueError,
        "^causal_alignment: 'middle' is unknown; give 'top_left' or 'bottom_right'",
    ),
    "scale-nan": ({"scale": math.nan}, ValueError, "^scale: nan is not finite; give a finite float, or None"),
    "scale-infinite": ({"scale": -math.inf}, ValueError, "^scale: -inf is not finite"),
    "scale-beyond-float64": ({"scale": 10**400}, ValueError, "^scale: 10{400} is not finite"),
    "scale-text": ({"scale": "auto"}, TypeError, "^scale: 'auto' is not a number"),
    "scale-bool": ({"scale": True}, TypeError, "^scale: True is not a number"),
    "causal-mask": (
        {"is_causal": torch.ones(130, 140)},
        TypeError,
        r"^is_causal: a tensor of shape \[130, 140\] is not a bool; give True or False",
    ),
    "scale-tensor": ({"scale": torch.ones(4)}, TypeError, r"^scale: a tensor of shape \[4\] is not a number"),
    "dropout-text": ({"dropout_p": "0.1"}, TypeError, r"^dropout_p: '0\.1' is not a number; give a float in \[0, 1\)"),
    "seed-fraction": ({"dropout_seed": 1.5}, TypeError, r"^dropout_seed: 1\.5 is not an integer; give one in"),
    "dropout-one": ({"dropout_p": 1.0}, ValueError, r"^dropout_p: 1\.0 is outside \[0, 1\)"),
    "dropout-negative": ({"dropout_p": -0.1}, ValueError, r"^dropout_p: -0\.1 is outside"),
    "dropout-nan": ({"dropout_p": math.nan}, ValueError, "^dropout_p: nan is outside"),
    "seed-negative": ({"dropout_seed": -1}, ValueError, r"^dropout_seed: -1 is outside \[0, 2\^64\)"),
    "seed-too-large": ({"dropout_seed": 2**64}, ValueError, "^dropout_seed: 18446744073709551616 is outside"),
}

BAD_BLOCK_MASKS: dict[str, tuple[object, type[Exception], str]] = {
    "list": ([[True]], TypeError, r"^block_mask: .* is not boolean; give a torch\.bool tensor"),
    "float": (torch.ones(2, 4, 2, 2), TypeError, r"^block_mask: torch\.float32 is not boolean"),
    "two-dimensions": (
        torch.ones(2, 2, dtype=torch.bool),
        ValueError,
        r"^block_mask: shape \[2, 2\] does not fit; give \[1 or 2, 1 or 4, 2, 2\]",
    ),
    "kv-heads": (
        torch.ones(2, 2, 2, 2, dtype=torch.bool),
        ValueError,
        r"^block_mask: shape \[2, 2, 2, 2\] does not fit",
    ),
    "blocks": (
        torch.ones(1, 1, 130, 140, dtype=torch.bool),
        ValueError,
        r"does not fit; .*an entry for each 128 x 128 block of scores",
    ),
    "device": (
        torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta"),
        ValueError,
        "^block_mask: device meta differs from query's cpu",
    ),
}


def call(implementation: Implementation, arguments: dict[str, object]) -> None:
    """Calls an implementation with these arguments."""
    rest = dict(arguments)
    tensors = [rest.pop(name) for name in ("query", "key", "value")]
    implementation.attention(*tensors, **rest)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("bad", BAD)
def test_bad_argument(name: str, bad: str) -> None:
    """Makes one argument of a good call bad."""
    given, kind, words = BAD[bad]
    with pytest.raises(kind, match=words):
        call(loaded(name), GOOD | given)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("bad", BAD_BLOCK_MASKS)
def test_bad_block_mask(name: str, bad: str) -> None:
    """Implementations with a block mask reject a bad one. The others reject the keyword, and name it."""
    implementation = loaded(name)
    block_mask, kind, words = BAD_BLOCK_MASKS[bad]
    if not implementation.supports.block_mask:
        kind, words = TypeError, "block_mask"
    with pytest.raises(kind, match=words):
        call(implementation, GOOD | {"block_mask": block_mask})


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # raised by torch when it imports its rules
@pytest.mark.parametrize("name", OWN)
def test_forward_mode(name: str) -> None:
    """A tangent is refused. The answer is never a tangent of zeros."""
    attention: Any = loaded(name).attention
    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(
        NotImplementedError,
        match=r"^key: has a tangent, and forward-mode differentiation is not implemented; differentiate backwards",
    ):
        torch.func.jvp(lambda key: attention(x, key, x), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^value: has a tangent"):
        attention(x, x, forward_ad.make_dual(x, x))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", catalogue.names(["tiled.*"]))
def test_good_call(name: str) -> None:
    """The good call is accepted. Otherwise all bad calls, which are made from it, could fail for one common reason."""
    call(loaded(name), GOOD)
