"""`flashproof.nn.MultiHeadAttention`: what it computes, what of PyTorch's module it takes over, and what it refuses."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flashproof import judge
from flashproof.impls import catalogue
from flashproof.impls.spec import Implementation, Supports
from flashproof.nn import KVCache, MultiHeadAttention

BATCH, TOKENS, WIDTH, HEADS, DIM = 3, 40, 64, 4, 16
IMPLEMENTATIONS = ["tiled.fa2", "triton.fa2", "sdpa.math"]


def inputs(tokens: int = TOKENS) -> Tensor:
    return torch.randn((BATCH, tokens, WIDTH), generator=torch.Generator().manual_seed(1))


def made(attention: str | Callable[..., object], **options: Any) -> MultiHeadAttention:
    """A module with random biases, too."""
    torch.manual_seed(2)
    module = MultiHeadAttention(WIDTH, HEADS, attention=attention, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return module


def of_heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, DIM).transpose(1, 2)


def projected(module: MultiHeadAttention, x: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value of each head, [batch, heads, tokens, dim], by one linear map."""
    width = [WIDTH, module.kv_heads * DIM, module.kv_heads * DIM]
    parts = torch.split(functional.linear(x, module.in_proj_weight, module.in_proj_bias), width, dim=-1)
    return tuple(of_heads(part) for part in parts)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_module_is_linear_attention_linear(name: str, kv_heads: int) -> None:
    """Bitwise, with the gradients of the input and of all parameters."""
    module, x = made(name, num_kv_heads=kv_heads), inputs().requires_grad_()
    weights = [x, *module.parameters()]
    query, key, value = projected(module, x)
    keywords = {"enable_gqa": True} if kv_heads != HEADS else {}
    attended = catalogue.load(name).attention(query, key, value, is_causal=True, **keywords)
    assert isinstance(attended, Tensor)
    composed = functional.linear(
        attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH), module.out_proj.weight, module.out_proj.bias
    )
    out = module(x, is_causal=True)
    assert torch.equal(out, composed)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    for one, other in zip(
        torch.autograd.grad(out, weights, dout), torch.autograd.grad(composed, weights, dout), strict=True
    ):
        assert torch.equal(one, other)


def test_autocast_ends_before_the_implementation() -> None:
    """Its arithmetic is then what it claims, on inputs of the dtype of autocast."""
    module, x = made("tiled.fa2"), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
        query, key, value = projected(module, x)
    attended = catalogue.load("tiled.fa2").attention(query, key, value)
    assert isinstance(attended, Tensor)
    assert attended.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, module.out_proj(attended.transpose(1, 2).flatten(2)))


# ---------------------------------------------------------------------------------------- PyTorch's own module

LEFT, RIGHT, NONE = [True] * 7 + [False] * 33, [False] * 31 + [True] * 9, [False] * 40
HOLES = [token % 3 == 1 for token in range(40)]
MASKS = {
    "full": (None, False),
    "causal": (None, True),
    "holes": ([HOLES, NONE, LEFT], False),
    "causal, right": ([RIGHT, NONE, RIGHT], True),
    "causal, left": ([LEFT, RIGHT, NONE], True),
}


@pytest.mark.parametrize("name", ["tiled.fa2", "triton.fa2"])
@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_state_dict_gives_pytorchs_result(mask: str, name: str) -> None:
    """Both modules are inside the bound of one exact result, row by row.

    The last map of both is the identity here, so that their results are those of the attention.
    """
    rows, is_causal = MASKS[mask]
    hidden = None if rows is None else torch.tensor(rows)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        theirs.out_proj.weight.copy_(torch.eye(WIDTH))
    ours = MultiHeadAttention(WIDTH, HEADS, attention=name)
    ours.load_state_dict(theirs.state_dict())
    x, later = inputs(), torch.ones((TOKENS, TOKENS), dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected, _ = theirs(
            x, x, x, key_padding_mask=hidden, attn_mask=later if is_causal else None, need_weights=False
        )
        found = ours(x, is_causal=is_causal, key_padding_mask=hidden)
        query, key, value = projected(ours, x)
    for entry in range(BATCH):
        seen = torch.ones(TOKENS, dtype=torch.bool) if hidden is None else ~hidden[entry]
        first = int(seen.nonzero()[0])
        # A row that sees no key is NaN in PyTorch's module. The rows before the first key are left out.
        begin = first if is_causal else 0
        part = (slice(entry, entry + 1), slice(None), slice(begin, None))
        for out in (found, expected):
            verdicts = judge(
                of_heads(out)[part],
                query[part],
                key[entry : entry + 1, :, seen],
                value[entry : entry + 1, :, seen],
                is_causal=is_causal,
            )
            assert verdicts.passed, verdicts
        if is_causal:
            assert not found[entry, :first].any()


@pytest.mark.parametrize("options", [{}, {"bias": False}])
def test_state_dicts_are_pytorchs(options: dict[str, bool]) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours = MultiHeadAttention(WIDTH, HEADS, attention="tiled.fa2", **options)
    assert {name: one.shape for name, one in ours.state_dict().items()} == {
        name: one.shape for name, one in theirs.state_dict().items()
    }


# ------------------------------------------------------------------------------------------ padding, caches, dropout


def test_the_gradients_with_padding_are_those_of_the_shorter_input() -> None:
    """Hidden keys change nothing, bitwise: neither the rows that are left nor the gradients."""
    module, x = made("tiled.fa2"), inputs()[:1]
    hidden, weights = torch.tensor([[False] * 33 + [True] * 7]), list(module.parameters())
    dout = torch.randn((1, 33, WIDTH), generator=torch.Generator().manual_seed(3))
    padded, short = module(x, is_causal=True, key_padding_mask=hidden)[:, :33], module(x[:, :33], is_causal=True)
    assert torch.equal(padded, short)
    for name, one, other in zip(
        dict(module.named_parameters()),
        torch.autograd.grad(padded, weights, dout),
        torch.autograd.grad(short, weights, dout),
        strict=True,
    ):
        assert one.isfinite().all(), name
        assert torch.equal(one, other), name


def test_a_row_that_sees_no_key_is_the_bias() -> None:
    module, hidden = made("tiled.fa2"), torch.tensor([[True] * TOKENS, [False] * TOKENS, [True] * TOKENS])
    out = module(inputs(), key_padding_mask=hidden)
    assert torch.equal(out[0], module.out_proj.bias.expand(TOKENS, WIDTH))
    assert torch.equal(out[1], module(inputs())[1])


@torch.no_grad()
def test_tokens_after_those_of_a_cache() -> None:
    """Chunks of 1, 25 and 14 tokens, padded on the left, give the rows of one call, judged by the bound."""
    module, x = made("tiled.fa2", num_kv_heads=2), inputs()
    cache, hidden, outs, start = KVCache(TOKENS), torch.tensor([LEFT, NONE, LEFT]), [], 0
    module.out_proj.weight.copy_(torch.eye(WIDTH))
    module.out_proj.bias.zero_()
    for chunk in (1, 25, 14):
        end = start + chunk
        outs.append(module(x[:, start:end], is_causal=True, key_padding_mask=hidden[:, :end], cache=cache))
        start = end
    query, key, value = projected(module, x)
    out = of_heads(torch.cat(outs, dim=1))
    for entry, first in ((0, 7), (1, 0), (2, 7)):
        one = slice(entry, entry + 1), slice(None), slice(first, None)
        verdicts = judge(out[one], query[one], key[one], value[one], is_causal=True, enable_gqa=True)
        assert verdicts.passed, verdicts


def test_a_cache_says_what_it_cannot_hold() -> None:
    module, cache = made("tiled.fa2"), KVCache(50)
    with pytest.raises(RuntimeError, match="carries no gradient"):
        module(inputs(), cache=cache)
    with torch.no_grad():
        module(inputs(), is_causal=True, cache=cache)
        with pytest.raises(ValueError, match="80 tokens do not fit into 50"):
            module(inputs(), is_causal=True, cache=cache)


@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    """Refused for its mask, for its causal alignment, or inside of the attention. The next call is then right."""
    fails = False

    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
        if fails:
            raise RuntimeError("no memory")
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    module, x, cache, untroubled = made(attention), inputs(), KVCache(TOKENS), KVCache(TOKENS)
    for one in (cache, untroubled):
        module(x[:, :10], is_causal=True, cache=one)
    with pytest.raises(ValueError, match="does not fit; give booleans"):
        module(x[:, 10:11], cache=cache, key_padding_mask=torch.zeros((BATCH, 10), dtype=torch.bool))
    with pytest.raises(ValueError, match="aligned at the bottom right"):
        module(x[:, 10:14], is_causal=True, cache=cache)
    fails, empty = True, KVCache(TOKENS)
    for one in (cache, empty):
        with pytest.raises(RuntimeError, match="no memory"):
            module(x[:, 10:11], is_causal=True, cache=one)
    fails = False
    assert (cache.length, empty.length) == (10, 0)
    found, expected = (module(x[:, 10:11], is_causal=True, cache=one) for one in (cache, untroubled))
    assert torch.equal(found, expected)
    assert module(x[:1], is_causal=True, cache=empty).shape == (1, TOKENS, WIDTH)


@torch.no_grad()
def test_a_cache_takes_tokens_of_one_batch_and_dtype() -> None:
    module, x, cache = made("tiled.fa2"), inputs(), KVCache(TOKENS)
    module(x[:2, :10], is_causal=True, cache=cache)
    with pytest.raises(
        ValueError, match=r"cache: holds batch 2, .*torch.float32 on cpu, and x has batch 1, .*clear\(\)"
    ):
        module(x[:1, 10:11], is_causal=True, cache=cache)
    with pytest.raises(ValueError, match=r"and x has batch 2, 4 key heads of dim 16, torch\.bfloat16 on cpu"):
        copy.deepcopy(module).bfloat16()(x[:2, 10:11].bfloat16(), is_causal=True, cache=cache)
    assert cache.length == 10
    cache.clear()
    assert module(x[:1, :10], is_causal=True, cache=cache).shape == (1, 10, WIDTH)


def test_the_gradient_is_zero_if_no_token_sees_a_key() -> None:
    module, x = made("tiled.fa2"), inputs().requires_grad_()
    out = module(x, key_padding_mask=torch.ones((BATCH, TOKENS), dtype=torch.bool))
    assert torch.equal(out, module.out_proj.bias.expand(out.shape))
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_dropout_is_drawn_in_training_alone() -> None:
    module, x = made("tiled.fa2", dropout=0.5), inputs()
    assert not torch.equal(module(x), module(x))
    torch.manual_seed(4)
    first = module(x)
    torch.manual_seed(4)
    assert torch.equal(first, module(x))
    module.eval()
    assert torch.equal(module(x), made("tiled.fa2")(x))


# ------------------------------------------------------------------------------------------------------- refusals


def full_only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def test_any_callable_is_an_attention() -> None:
    assert torch.equal(made(full_only)(inputs()), made(functional.scaled_dot_product_attention)(inputs()))


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("tiled.fa3", {}, "tiled.fa3: no implementation of the catalogue has this name"),
        ("tiled.fa2", {"num_kv_heads": 3}, "num_kv_heads: 3; give a divisor of num_heads, 4"),
        ("tiled.fa2", {"num_kv_heads": 0}, "num_kv_heads: 0; give a divisor of num_heads, 4"),
        ("tiled.fa2", {"num_kv_heads": -2}, "num_kv_heads: -2; give a divisor of num_heads, 4"),
        ("tiled.fa2", {"num_heads": 0}, "num_heads: 0; give at least 1"),
        ("tiled.fa2", {"num_heads": 5}, "embed_dim: 64; give a multiple of num_heads, 5"),
        ("tiled.fa2", {"dropout": 1.0}, "dropout: 1.0; give a probability of at least 0 and below 1"),
        ("tiled.fa2", {"dropout": -0.1}, "dropout: -0.1; give a probability"),
        ("tiled.fa2", {"dropout": math.nan}, "dropout: nan; give a probability"),
        (full_only, {"num_kv_heads": 2}, "num_kv_heads: full_only takes no grouped heads"),
        (full_only, {"dropout": 0.5}, "no dropout_p with a dropout_seed; give dropout=0.0, or .*tiled.fa2"),
    ],
)
def test_what_cannot_be_made(attention: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(WIDTH, **{"num_heads": HEADS} | options, attention=attention)


@pytest.mark.parametrize(
    ("attention", "hidden", "message"),
    [
        (full_only, None, "is_causal: full_only takes no causal mask aligned at the top left"),
        (functional.scaled_dot_product_attention, LEFT, "aligned at the bottom right; padding on the left needs"),
        ("tiled.fa2", HOLES, "its first ones or, without a cache, its last ones"),
        ("tiled.fa2", LEFT[1:], r"key_padding_mask: torch.bool \[3, 39\] does not fit; give booleans \[3, 40\]"),
    ],
)
def test_masks_that_no_call_can_express(attention: Any, hidden: list[bool] | None, message: str) -> None:
    mask = None if hidden is None else torch.tensor([hidden] * BATCH)
    with pytest.raises(ValueError, match=message):
        made(attention)(inputs(), is_causal=True, key_padding_mask=mask)


def detached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value).detach()


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (
            Implementation(name="forward", attention=detached, supports=Supports(backward=False)),
            "forward has no backward",
        ),
        (detached, "detached returned an output without a gradient"),
    ],
)
def test_no_training_without_a_backward(attention: Any, message: str) -> None:
    """Otherwise the second linear map alone would learn."""
    module = made(attention)
    with pytest.raises(ValueError, match=rf"attention: {message}; use torch.no_grad\(\) for inference, or another"):
        module(inputs())
    with torch.no_grad():
        assert module(inputs()).shape == (BATCH, TOKENS, WIDTH)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"dtypes": ("float16", "bfloat16")}, "x: narrow takes no float32 for .*; give float16 or bfloat16"),
        ({"devices": ("cuda",)}, "x: narrow takes no tensors on cpu; give them on cuda"),
    ],
)
def test_dtypes_and_devices_outside_the_claims(claims: dict[str, Any], message: str) -> None:
    narrow = Implementation(name="narrow", attention=full_only, supports=Supports(**claims))
    with pytest.raises(ValueError, match=message):
        made(narrow)(inputs())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (lambda q, k, v: (q, None), "attention: <lambda> returned a tuple; it must return the output alone"),
        (
            lambda q, k, v: q[:, :1],
            r"returned torch.float32 \[3, 1, 40, 16\]; the output must be like query, .*3, 4, 40",
        ),
        (lambda q, k, v: q.double(), r"returned torch.float64 \[3, 4, 40, 16\]; the output must be like query"),
    ],
)
def test_outputs_unlike_query(attention: Callable[..., object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(attention)(inputs())


@pytest.mark.parametrize("shape", [(TOKENS, WIDTH), (1, BATCH, TOKENS, WIDTH), (BATCH, TOKENS, 32), (BATCH, 0, WIDTH)])
def test_inputs_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x: \[.*\]; give \[batch, length, embed_dim\] with embed_dim 64"):
        made("tiled.fa2")(torch.zeros(shape))


# ------------------------------------------------------------------------------------ attentions of modules, pickles


class Scaled(nn.Module):
    """An attention with a parameter, a dropout, and a causal mask unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True) -> Tensor:
        query = self.dropout(query * self.factor)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def test_an_attention_that_is_a_module_is_a_submodule() -> None:
    attention = Scaled()
    module = made(attention).eval()
    assert module.get_parameter("attention.factor") is attention.factor
    assert "attention.factor" in module.state_dict()
    assert not attention.training
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict() | {"attention.factor": torch.tensor(0.5)})
    assert not torch.equal(twin(inputs()), module(inputs()))
    torch.autograd.backward(module(inputs()).sum())
    assert attention.factor.grad is not None


OWN = Implementation(name="own", attention=full_only, supports=Supports(deterministic=True))


@pytest.mark.parametrize("attention", [*IMPLEMENTATIONS, functional.scaled_dot_product_attention, Scaled(), OWN])
def test_a_saved_module_comes_back(attention: Any) -> None:
    module, file = made(attention).eval(), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(module)):
        assert torch.equal(twin(inputs()), module(inputs()))
        assert twin.implementation.name == module.implementation.name
        assert twin.implementation.supports == module.implementation.supports
        if isinstance(attention, str):
            assert twin.implementation is module.implementation
        if isinstance(attention, nn.Module):
            assert twin.get_parameter("attention.factor") is not attention.get_parameter("factor")
