"""The question that every oracle answers: exact inputs, a scale, a mask and dropout."""

from dataclasses import dataclass, field

from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles.masks import Dropout, Mask


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention on exact inputs.

    The tensors have the dtype of the kernel. The oracles read them as the real numbers that they hold.

    The definition is out = (Z o softmax(scale query key^T)) value, where Z is the dropout mask divided by 1 - p. The
    query head `head` uses the key head `head // groups`. The loss is sum(out o dout), so dout is the gradient of out.
    A query that sees no key has out 0, lse -inf and zero gradients.
    """

    query: Float[Tensor, "batch heads queries dim"]
    key: Float[Tensor, "batch kv_heads keys dim"]
    value: Float[Tensor, "batch kv_heads keys dim"]
    dout: Float[Tensor, "batch heads queries dim"]
    scale: float
    mask: Mask
    dropout: Dropout = field(default_factory=Dropout)

    @property
    def groups(self) -> int:
        """The number of query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]
