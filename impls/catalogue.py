"""Every implementation of the project, one line each.

Nothing here imports a kernel before it is loaded: names can be listed on a machine that has neither Triton nor CUDA.
"""

import difflib
import importlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from flashproof.impls.spec import Implementation

CATALOGUE: dict[str, str] = {
    "tiled.fa1": "flashproof.impls.tiled.fa1:implementation",
    "tiled.fa2": "flashproof.impls.tiled.fa2:implementation",
    "tiled.block_sparse": "flashproof.impls.tiled.block_sparse:implementation",
    "triton.fa1": "flashproof.impls.triton.fa1:implementation",
    "triton.fa2": "flashproof.impls.triton.fa2:implementation",
    "triton.block_sparse": "flashproof.impls.triton.block_sparse:implementation",
    "cuda.fa1": "flashproof.impls.cuda.fa1:implementation",
    "cuda.fa2": "flashproof.impls.cuda.fa2:implementation",
    "cuda.fa3": "flashproof.impls.cuda.fa3:implementation",
    "cuda.block_sparse": "flashproof.impls.cuda.block_sparse:implementation",
    "sdpa.math": "flashproof.impls.peers.sdpa:math",
    "sdpa.flash_cpu": "flashproof.impls.peers.sdpa:flash_cpu",
    "sdpa.flash": "flashproof.impls.peers.sdpa:flash",
    "sdpa.efficient": "flashproof.impls.peers.sdpa:efficient",
    "sdpa.cudnn": "flashproof.impls.peers.sdpa:cudnn",
    "flex": "flashproof.impls.peers.flex:implementation",
}

FORMS = "give a name of the catalogue, 'package.module:attribute' or 'path/file.py:attribute'"


def names(patterns: Sequence[str]) -> list[str]:
    """The catalogue's names that match any of the globs, in its order. Raises ValueError for a glob that matches none, with the names that are close."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CATALOGUE):
            raise ValueError(unknown(pattern))
    return [name for name in CATALOGUE if any(fnmatchcase(name, pattern) for pattern in patterns)]


def load(name: str) -> Implementation:
    """The implementation of a name of the catalogue.

    Raises ValueError for a name that it does not hold, and ImportError where a backend is not installed.
    """
    if name not in CATALOGUE:
        raise ValueError(unknown(name))
    module, _, attribute = CATALOGUE[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Implementation):
        raise TypeError(f"{name}: {CATALOGUE[name]} is no Implementation")
    return found


def unknown(name: str) -> str:
    """The words of an error about a name that the catalogue does not hold."""
    return f"{name}: no implementation of the catalogue has this name{close(name, CATALOGUE)}; {FORMS}"


def close(name: str, known: Iterable[str]) -> str:
    """The known names that are close to one, as the end of an error; nothing where there are none."""
    found = difflib.get_close_matches(name, list(known), n=3)
    return f"; close: {', '.join(found)}" if found else ""
