"""GPT-2, with any attention.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. The configuration of 2.7B is that
of Brown et al., "Language Models are Few-Shot Learners", 2020, arXiv 2005.14165, table 2.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashproof.impls.shapes import Float, Int
from flashproof.impls.spec import Implementation
from flashproof.nn.attention import KVCache, MultiHeadAttention, restored_on_failure


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The sizes of a GPT."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 50257
    context: int = 1024  # the largest number of tokens
    dropout: float = 0.0


GPT2 = {
    "124M": Configuration(layers=12, heads=12, width=768),
    "350M": Configuration(layers=24, heads=16, width=1024),
    "774M": Configuration(layers=36, heads=20, width=1280),
    "1.5B": Configuration(layers=48, heads=25, width=1600),
    "2.7B": Configuration(layers=32, heads=32, width=2560),
}


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): a block of GPT-2, with the norm in front.

    Its attention has as many key heads as heads, and no padding.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        attention: str | Implementation | Callable[..., object] = "triton.fa2",
    ) -> None:
        """Makes the block. dropout: of the attention weights and of what is added to x. attention: as of the module."""
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, heads, dropout=dropout, attention=attention)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch tokens width"], cache: KVCache | None = None
    ) -> Float[Tensor, "batch tokens width"]:
        """The residual stream after the block. cache: the keys and values of the tokens before x."""
        x = x + self.dropout(self.attention(self.attention_norm(x), is_causal=True, cache=cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder that predicts the next token. The embedding of tokens is also the last linear map.

    An attention that is an `nn.Module` is shared by all blocks, and keeps its own initial weights.
    """

    def __init__(
        self,
        configuration: Configuration,
        attention: str | Implementation | Callable[..., object] = "triton.fa2",
    ) -> None:
        """Makes the model with the initial weights of GPT-2."""
        super().__init__()
        self.configuration = configuration
        of_block = (configuration.width, configuration.heads, configuration.dropout, attention)
        self.tokens = nn.Embedding(configuration.vocabulary, configuration.width)
        self.positions = nn.Embedding(configuration.context, configuration.width)
        self.dropout = nn.Dropout(configuration.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(*of_block) for _ in range(configuration.layers))
        self.norm = nn.LayerNorm(configuration.width)
        # Each of the two branches of a layer adds to the residual stream, so their last maps start smaller.
        smaller = 0.02 / math.sqrt(2 * configuration.layers)
        for name, parameter in self.named_parameters():
            if ".attention.attention." in name:  # of an attention that is a module
                continue
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=smaller if name.endswith(("out_proj.weight", "mlp.2.weight")) else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Int[Tensor, "batch tokens"], caches: list[KVCache] | None = None
    ) -> Float[Tensor, "batch tokens vocabulary"]:
        """The logits of the token after each token. caches: for each layer, the keys and values of earlier tokens.

        Raises ValueError for more tokens than the context, and for another number of caches than layers. After an
        exception, the caches are as before.
        """
        if caches and len(caches) != len(self.blocks):
            raise ValueError(f"caches: {len(caches)}; give one for each of the {len(self.blocks)} layers")
        start = caches[0].length if caches else 0
        end = start + tokens.shape[1]
        if end > self.configuration.context:
            raise ValueError(f"tokens: {end} are beyond the context of {self.configuration.context}")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(start, end, device=tokens.device)))
        if caches:
            with restored_on_failure(caches):
                for block, cache in zip(self.blocks, caches, strict=True):
                    x = block(x, cache)
        else:
            for block in self.blocks:
                x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "batch tokens"],
        count: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch all_tokens"]:
        """Appends `count` tokens, each with one step of a KV cache. The model is in eval mode meanwhile.

        temperature: 0 takes the most likely token; otherwise a token is drawn, with the generator if one is given.

        Raises ValueError for an empty prompt, a negative count, and more tokens than the context.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(
                f"tokens: {list(tokens.shape)}; give [batch, length] with at least one token for each entry"
            )
        if count < 0:
            raise ValueError(f"count: {count}; give at least 0")
        caches = [KVCache(tokens.shape[1] + count) for _ in self.blocks]
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            new = tokens
            for _ in range(count):
                logits = self(new, caches)[:, -1]
                if temperature:
                    new = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
                else:
                    new = logits.argmax(dim=-1, keepdim=True)
                tokens = torch.cat([tokens, new], dim=1)
        finally:
            for module, is_training in modes:
                module.training = is_training
        return tokens
