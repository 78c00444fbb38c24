"""flashproof verifies attention kernels: is a kernel as accurate as the arithmetic that it claims allows?

The names below are the public interface. They are loaded when they are first used, so that `import flashproof` loads
neither PyTorch nor a kernel.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashproof.impls.spec import Arithmetic, Implementation, Supports
    from flashproof.registry import check
    from flashproof.subject import Subject

__all__ = ["Arithmetic", "Implementation", "Subject", "Supports", "__version__", "check"]

_PLACES = {
    "Arithmetic": "flashproof.impls.spec",
    "Implementation": "flashproof.impls.spec",
    "Supports": "flashproof.impls.spec",
    "Subject": "flashproof.subject",
    "check": "flashproof.registry",
}


def __getattr__(name: str) -> object:
    """Loads a public name (PEP 562)."""
    if name == "__version__":
        try:
            return version("flashproof")
        except PackageNotFoundError:  # a clone that is not installed
            return "unknown"
    if name not in _PLACES:
        raise AttributeError(f"module 'flashproof' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
