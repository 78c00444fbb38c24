"""`flashproof.nn.GPT`: its sizes are those of GPT-2, and generation with a cache is the full forward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flashproof import judge
from flashproof.impls import catalogue
from flashproof.nn import GPT, GPT2, Configuration, KVCache

SMALL = Configuration(layers=2, heads=2, width=32, vocabulary=61, context=256)
# The figures of the checkpoints that OpenAI published, and for 2.7B the sum of the sizes.
PARAMETERS = {
    "124M": 124_439_808,
    "350M": 354_823_168,
    "774M": 774_030_080,
    "1.5B": 1_557_611_200,
    "2.7B": 50257 * 2560 + 1024 * 2560 + 32 * (12 * 2560**2 + 13 * 2560) + 2 * 2560,
}


@pytest.mark.parametrize("size", GPT2)
def test_the_number_of_parameters(size: str) -> None:
    with torch.device("meta"):
        model = GPT(GPT2[size], attention="tiled.fa2")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[size]


def test_256_tokens_with_a_cache_are_the_full_forward() -> None:
    """Token by token: each output of attention is inside the bound of the causal problem of all 256 tokens.

    The tokens are those that the full forward prefers, too.
    """
    calls: list[tuple[Tensor, ...]] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
        out = catalogue.load("tiled.fa2").attention(query, key, value, is_causal=is_causal)
        assert isinstance(out, Tensor)
        calls.append((query, key, value, out))
        return out

    torch.manual_seed(1)
    model = GPT(SMALL, attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)  # as after training: attention that prefers some keys, and logits that differ
    prompt = torch.randint(61, (2, 6))
    tokens = model.generate(prompt, 250)
    assert tokens.shape == (2, 256)
    with torch.no_grad():
        assert torch.equal(model(tokens).argmax(dim=-1)[:, 5:-1], tokens[:, 6:])
    assert len(torch.unique(tokens)) > 8
    generating = calls[: 250 * SMALL.layers]
    for layer in range(SMALL.layers):
        of_layer = generating[layer :: SMALL.layers]
        query, out = (torch.cat([call[part] for call in of_layer], dim=2) for part in (0, 3))
        assert query.shape[2] == 255  # the last token is not attended to
        verdicts = judge(out, query, of_layer[-1][1], of_layer[-1][2], is_causal=True)
        assert verdicts.passed, verdicts


def test_tokens_are_drawn_by_a_generator() -> None:
    torch.manual_seed(1)
    model = GPT(SMALL, "tiled.fa2")
    prompt = torch.randint(61, (2, 6))
    drawn: list[Any] = [model.generate(prompt, 8, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_more_tokens_than_the_context() -> None:
    with pytest.raises(ValueError, match="tokens: 257 are beyond the context of 256"):
        GPT(SMALL, "tiled.fa2")(torch.zeros((1, 257), dtype=torch.long))


def test_generation_is_in_eval_mode() -> None:
    """No dropout changes a token, and each submodule has its mode again."""
    torch.manual_seed(1)
    model = GPT(replace(SMALL, dropout=0.5), "tiled.fa2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    prompt = torch.randint(61, (2, 6))
    assert torch.equal(model.generate(prompt, 20), model.generate(prompt, 20))
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2


@pytest.mark.parametrize("shape", [(2, 0), (0, 6), (6,)])
def test_prompts_without_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tokens: \[.*\]; give \[batch, length\] with at least one token"):
        GPT(SMALL, "tiled.fa2").generate(torch.zeros(shape, dtype=torch.long), 3)


@torch.no_grad()
def test_a_refusal_of_a_later_layer_leaves_all_caches() -> None:
    model, tokens = GPT(SMALL, "tiled.fa2"), torch.zeros((1, 4), dtype=torch.long)
    caches = [KVCache(4), KVCache(3)]
    model(tokens[:, :3], caches)
    with pytest.raises(ValueError, match="4 tokens do not fit into 3"):
        model(tokens[:, 3:], caches)
    assert [cache.length for cache in caches] == [3, 3]


def test_an_attention_that_is_a_module_keeps_its_weights() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
            return functional.scaled_dot_product_attention(self.linear(query), key, value, is_causal=is_causal)

    attention = Mixed()
    before = attention.linear.weight.detach().clone()
    assert GPT(SMALL, attention).get_parameter("blocks.0.attention.attention.linear.weight") is attention.linear.weight
    assert torch.equal(attention.linear.weight, before)
