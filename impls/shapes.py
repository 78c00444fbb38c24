"""Shapes in signatures: the types of jaxtyping if it is installed, and stand-ins otherwise.

flashproof does not depend on jaxtyping, because an installed jaxtyping loads NumPy into every run of pytest. A clone
has jaxtyping. There, mypy reads the shapes, and the tests of flashproof itself check them at run time.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = ["Bool", "Float", "Float32", "Float64", "Int"]

if TYPE_CHECKING or find_spec("jaxtyping"):
    from jaxtyping import Bool, Float, Float32, Float64, Int
else:

    class _Shaped:
        """Makes `Float[Tensor, "batch dim"]` mean Tensor."""

        def __class_getitem__(cls, item: tuple[type, str]) -> type:
            return item[0]

    Bool = Float = Float32 = Float64 = Int = _Shaped
