"""The catalogue: every implementation of the project, one line each.

A kernel is imported only when it is loaded. So names can be listed on a machine that has neither Triton nor CUDA.
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
    "triton.fa3": "flashproof.impls.triton.fa3:implementation",
    "triton.block_sparse": "flashproof.impls.triton.block_sparse:implementation",
    "cuda.fa1": "flashproof.impls.cuda.fa1:implementation",
    "cuda.fa2": "flashproof.impls.cuda.fa2:implementation",
    "cuda.fa3": "flashproof.impls.cuda.fa3:implementation",
    "cuda.fa3_deterministic": "flashproof.impls.cuda.fa3:deterministic",
    "cuda.fa3_fp8": "flashproof.impls.cuda.fa3_fp8:implementation",
    "cuda.fa3_float32": "flashproof.impls.cuda.fa3_float32:implementation",
    "cuda.block_sparse": "flashproof.impls.cuda.block_sparse:implementation",
    "sdpa.math": "flashproof.impls.peers.sdpa:math",
    "sdpa.flash_cpu": "flashproof.impls.peers.sdpa:flash_cpu",
    "sdpa.flash": "flashproof.impls.peers.sdpa:flash",
    "sdpa.efficient": "flashproof.impls.peers.sdpa:efficient",
    "sdpa.cudnn": "flashproof.impls.peers.sdpa:cudnn",
    "flex": "flashproof.impls.peers.flex:implementation",
}

PEERS = tuple(name for name, place in CATALOGUE.items() if place.startswith("flashproof.impls.peers."))  # by others
STANDARD = "sdpa.math"  # textbook attention, which stores the whole matrix of scores

FORMS = "give a name of the catalogue, 'package.module:attribute' or 'path/file.py:attribute'"


def names(patterns: Sequence[str]) -> list[str]:
    """The names in the catalogue that match at least one of the globs, in the order of the catalogue.

    Raises ValueError for a glob that matches no name. The message contains similar names.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CATALOGUE):
            raise ValueError(unknown(pattern))
    return [name for name in CATALOGUE if any(fnmatchcase(name, pattern) for pattern in patterns)]


def load(name: str) -> Implementation:
    """Loads the implementation with this name.

    Raises ValueError if the name is not in the catalogue, ImportError if a backend is not installed, and TypeError if
    the attribute is not an `Implementation`.
    """
    if name not in CATALOGUE:
        raise ValueError(unknown(name))
    module, _, attribute = CATALOGUE[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Implementation):
        raise TypeError(f"{name}: {CATALOGUE[name]} is not an Implementation")
    return found


def unknown(name: str) -> str:
    """The error message for a name that is not in the catalogue."""
    return f"{name}: no implementation of the catalogue has this name{close(name, CATALOGUE)}; {FORMS}"


def close(name: str, known: Iterable[str]) -> str:
    """The known names that are similar to a name, as the end of an error message. Empty if there are none."""
    found = difflib.get_close_matches(name, list(known), n=3)
    return f"; close: {', '.join(found)}" if found else ""
