"""Shapes in signatures: the types of jaxtyping where it is installed, as in a clone, and stand-ins elsewhere.

flashproof does not depend on jaxtyping: wherever that is installed, it loads NumPy into every run of pytest. A clone has
it, so that mypy reads the shapes, and the tests of flashproof itself check them at run time.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = ["Bool", "Float", "Float32", "Float64", "Int"]

if TYPE_CHECKING or find_spec("jaxtyping"):
    from jaxtyping import Bool, Float, Float32, Float64, Int
else:

    class _Shaped:
        """`Float[Tensor, "batch dim"]` is Tensor."""

        def __class_getitem__(cls, item: tuple[type, str]) -> type:
            return item[0]

    Bool = Float = Float32 = Float64 = Int = _Shaped
