"""Holds tensors to the shapes that signatures name, while the tests of the suite itself run.

jaxtyping wraps every function and dataclass of the modules below when they are imported, and beartype asks each
argument and each result. In a verification nothing is wrapped: its time counts.

Not among them: `impls.call`, whose own checks have to see wrong arguments first, and `impls.triton`, whose kernels must
reach Triton as they are.
"""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import jaxtyping
import pytest

CHECKED = (
    "flashproof.cases",
    "flashproof.judging",
    "flashproof.oracles",
    "flashproof.impls.tiled",
    "flashproof.impls.cuda",
)
SUITE = Path(__file__).resolve().parent
MUTANTS = SUITE / "mutants"  # a mutant must be rejected by a check, which judges what it answers


def wrap() -> None:
    """Imports the modules, wrapped and at rest."""
    jaxtyping.config.update("jaxtyping_disable", True)
    with jaxtyping.install_import_hook(CHECKED, "beartype.beartype"):
        for name in CHECKED:
            module = import_module(name)
            for part in iter_modules(getattr(module, "__path__", ())):
                import_module(f"{name}.{part.name}")


@contextmanager
def held(item: pytest.Item) -> Generator[None, None, None]:
    """While this is open, wrong shapes raise jaxtyping.TypeCheckError, if the item is a test of the suite itself."""
    path = item.path.resolve()
    jaxtyping.config.update("jaxtyping_disable", not path.is_relative_to(SUITE) or path.is_relative_to(MUTANTS))
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Holds what a test and its fixtures do. The root conftest.py registers this module as a plugin."""
    with held(item):
        return (yield)
