"""Checks that tensors have the shapes that signatures name, while the tests of the suite itself run.

jaxtyping wraps every function and dataclass of the modules below when they are imported. beartype then checks each
argument and each result. A verification wraps nothing, because it must not be slowed down.

Two modules are not wrapped. The checks of `impls.call` must see wrong arguments first. The kernels of `impls.triton`
must reach Triton unchanged.
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
MUTANTS = SUITE / "mutants"  # not checked here: a check must reject a mutant because of its answer


def wrap() -> None:
    """Imports the modules, wrapped. The checks are off."""
    jaxtyping.config.update("jaxtyping_disable", True)
    with jaxtyping.install_import_hook(CHECKED, "beartype.beartype"):
        for name in CHECKED:
            module = import_module(name)
            for part in iter_modules(getattr(module, "__path__", ())):
                import_module(f"{name}.{part.name}")


@contextmanager
def held(item: pytest.Item) -> Generator[None, None, None]:
    """While the context is open, wrong shapes raise jaxtyping.TypeCheckError.

    This holds if the item is a test of the suite itself and not a test of mutants.
    """
    path = item.path.resolve()
    jaxtyping.config.update("jaxtyping_disable", not path.is_relative_to(SUITE) or path.is_relative_to(MUTANTS))
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Checks the shapes while a test and its fixtures run. The root conftest.py registers this module as a plugin."""
    with held(item):
        return (yield)
