"""flashproof verifies attention kernels: is a kernel as accurate as the arithmetic that it claims allows?

The names below are the public interface. They are loaded when they are first used, so that `import flashproof` loads
neither PyTorch nor a kernel.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashproof.accuracy import Verdict, Verdicts, assert_accurate, judge
    from flashproof.impls.spec import Arithmetic, Implementation, Supports
    from flashproof.registry import check
    from flashproof.subject import Subject
    from flashproof.verification import Result, verify

__all__ = [
    "Arithmetic",
    "Implementation",
    "Result",
    "Subject",
    "Supports",
    "Verdict",
    "Verdicts",
    "__version__",
    "assert_accurate",
    "check",
    "judge",
    "verify",
]

_PLACES = {
    "Verdict": "flashproof.accuracy",
    "Verdicts": "flashproof.accuracy",
    "assert_accurate": "flashproof.accuracy",
    "judge": "flashproof.accuracy",
    "Arithmetic": "flashproof.impls.spec",
    "Implementation": "flashproof.impls.spec",
    "Supports": "flashproof.impls.spec",
    "Subject": "flashproof.subject",
    "Result": "flashproof.verification",
    "check": "flashproof.registry",
    "verify": "flashproof.verification",
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
