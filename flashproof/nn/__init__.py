"""Modules that use any attention of the catalogue: multi-head attention, a transformer block, and GPT-2."""

from flashproof.nn.attention import KVCache, MultiHeadAttention
from flashproof.nn.gpt import GPT, GPT2, Configuration, TransformerBlock

__all__ = ["GPT", "GPT2", "Configuration", "KVCache", "MultiHeadAttention", "TransformerBlock"]
