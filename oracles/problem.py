"""The question that every oracle answers: exact inputs, a scale, a mask, dropout."""

from dataclasses import dataclass, field

from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.oracles.masks import Dropout, Mask


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention on exact inputs: tensors in the kernel's dtype, read as the real numbers they hold.

    out = (Z o softmax(scale query key^T)) value, with Z the dropout mask over 1 - p; queries share key head `head // groups`.
    The loss is sum(out o dout), so dout is the gradient of out. A query that sees no key has out 0, lse -inf and no gradient.
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
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]
