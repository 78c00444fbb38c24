"""Every implementation, one line each, and how a name becomes an implementation.

Nothing here imports a kernel before it is loaded: names can be listed on a machine that has no Triton, no CUDA and no JAX.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from types import ModuleType

from impls import claims
from impls.spec import Implementation, Supports, arithmetic_of_callables

CATALOGUE: dict[str, str] = {
    "tiled.fa1": "impls.tiled.fa1:implementation",
    "tiled.fa2": "impls.tiled.fa2:implementation",
    "tiled.block_sparse": "impls.tiled.block_sparse:implementation",
    "triton.fa1": "impls.triton.fa1:implementation",
    "triton.fa2": "impls.triton.fa2:implementation",
    "triton.block_sparse": "impls.triton.block_sparse:implementation",
    "cuda.fa1": "impls.cuda.fa1:implementation",
    "cuda.fa2": "impls.cuda.fa2:implementation",
    "cuda.block_sparse": "impls.cuda.block_sparse:implementation",
    "sdpa.math": "impls.peers.sdpa:math",
    "sdpa.flash_cpu": "impls.peers.sdpa:flash_cpu",
    "sdpa.flash": "impls.peers.sdpa:flash",
    "sdpa.efficient": "impls.peers.sdpa:efficient",
    "sdpa.cudnn": "impls.peers.sdpa:cudnn",
    "flex": "impls.peers.flex:implementation",
}

FORMS = "give a name of the catalogue, 'package.module:attribute' or 'path/file.py:attribute'"


def names(patterns: Sequence[str]) -> list[str]:
    """The catalogue's names that match any of the globs, in its order. Raises ValueError for a glob that matches none, with the names that are close."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CATALOGUE):
            raise ValueError(_unknown(pattern))
    return [name for name in CATALOGUE if any(fnmatchcase(name, pattern) for pattern in patterns)]


def spelled(name: str) -> str:
    """One name for an attribute of a file, however its path is given: from the working directory where it lies below that. Other names as they stand."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    path, here = Path(os.path.abspath(Path(place).expanduser())), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{attribute}"


def load(name: str) -> Implementation:
    """The implementation that a name stands for: "triton.fa2" (catalogue), "package.module:attribute" or "path/file.py:attribute".

    An attribute that is an `Implementation` is taken as it is, if its claims can be read (`claims.check`). Any other callable is verified as it stands: its
    signature is its claim (`of_callable`). Every error says what was given and what would do. Raises ImportError where a module is not installed (its `name`
    says which), FileNotFoundError, AttributeError, TypeError for what is not an attention function, ValueError for an unknown name, a claim that cannot be read
    and code that fails while it is imported.
    """
    given = CATALOGUE.get(name, name)
    place, _, attribute = given.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{name}: which attribute of it?{_defined(given.rstrip(':'))} {FORMS}" if ":" in name or name.endswith(".py") else _unknown(name))
    module = _file(Path(place), name) if place.endswith(".py") or "/" in place else _module(place, name)
    try:
        found = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise AttributeError(f"{name}: {place} has no attribute '{attribute}'{close(attribute, vars(module))}") from None
    if isinstance(found, Implementation):
        try:
            claims.check(found)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return found if found.name else replace(found, name=name)
    return of_callable(found, name)


def of_callable(attention: object, name: str) -> Implementation:
    """A bare callable as an implementation: it claims what its parameters name, in the three dtypes, on both devices, forward and backward.

    `is_causal` claims top-left causal masks, and with `causal_alignment` bottom-right ones; `scale` any positive scale; `enable_gqa` grouped heads;
    `block_mask` block masks; `dropout_p` together with `dropout_seed` dropout; `return_lse` the log-sum-exp. `**kwargs` claims nothing.
    Its arithmetic is taken to be `arithmetic_of_callables`. Raises TypeError for what cannot be called with query, key and value alone.
    """
    if inspect.isclass(attention) or not callable(attention):
        raise TypeError(f"{name}: {attention!r} is not an attention function; give a function attention(query, key, value, ...) or an Implementation")
    parameters = _parameters(attention, name)
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        raise TypeError(f"{name}: takes {len(positional)} positional arguments; give a function that takes three: attention(query, key, value, ...)")
    further = [p.name for p in parameters if p not in positional[:3] and p.default is kinds.empty and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    if further:
        raise TypeError(f"{name}: needs {', '.join(further)} beside query, key and value; give a function that fills them in")
    keywords = {p.name for p in parameters if p not in positional[:3] and p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    supports = Supports(
        causal=() if "is_causal" not in keywords else ("top_left", "bottom_right") if "causal_alignment" in keywords else ("top_left",),
        scale="positive" if "scale" in keywords else "default",
        grouped_heads="enable_gqa" in keywords,
        cross_lengths=True,
        strided=True,
        unaligned=True,
        block_mask="block_mask" in keywords,
        dropout={"dropout_p", "dropout_seed"} <= keywords,
        lse="return_lse" in keywords,
    )
    return Implementation(
        name=name, attention=attention, supports=supports, arithmetic=arithmetic_of_callables, summary="A function, verified as it stands.", bare=True
    )


def _parameters(attention: Callable[..., object], name: str) -> list[inspect.Parameter]:
    """A callable's parameters. Builtins such as torch's `scaled_dot_product_attention` carry theirs at the head of the docstring: "f(a, b=0.0) -> Tensor"."""
    try:
        return list(inspect.signature(getattr(attention, "forward", attention)).parameters.values())  # nn.Module: __call__ says nothing, forward does
    except (TypeError, ValueError):
        pass
    head = (inspect.getdoc(attention) or "").partition("\n\n")[0].partition("->")[0].strip()
    try:
        definition = ast.parse(f"def {head}: ...").body[0]
    except SyntaxError:
        definition = None
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"{name}: its parameters cannot be read; give a function of your own that calls it")
    given = definition.args
    kinds = inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    required = len(plain) - len(given.defaults)
    parameters = [kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if i < required else None) for i, a in enumerate(plain)]
    parameters += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return parameters


def _module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if place == missing or place.startswith(missing + "."):
            raise ImportError(f"{name}: there is no module '{missing}'; {FORMS}", name=missing) from None
        raise ImportError(f"{name}: {place} needs '{missing}', which is not installed", name=missing) from error
    except Exception as error:
        raise _failed(name, error) from error


def _file(path: Path, name: str) -> ModuleType:
    """Runs a file as a module of its own, once, however many of its functions are asked for. Its folder is importable meanwhile, as for `python file.py`."""
    path = path.expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"{name}: there is no file {path}; {FORMS}")
    unique = f"{path.stem}_{hashlib.sha256(f'{path} {path.stat().st_mtime_ns}'.encode()).hexdigest()[:12]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}: {path} is not a Python file; {FORMS}", name=unique)
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # where dataclasses and pickle look for it
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        if isinstance(error, ModuleNotFoundError):
            raise ImportError(f"{name}: {path} needs '{error.name}', which is not installed", name=error.name) from error
        raise _failed(name, error) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _defined(place: str) -> str:
    """The functions and names that a file defines, in words; nothing for what is no file, or no Python."""
    try:
        tree = ast.parse(Path(place).read_text())
    except (OSError, SyntaxError, ValueError):
        return ""
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    found += [target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)]
    return f" It defines {', '.join(found)};" if found else ""


def _failed(name: str, error: BaseException) -> ValueError:
    """Not an ImportError: a broken module must not pass for one that is not installed."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    # A syntax error's words name its place; what ran last was the importer.
    where = "" if place.filename.startswith("<frozen importlib") else f" ({place.filename}, line {place.lineno})"
    return ValueError(f"{name}: importing it failed with {type(error).__name__}: {error}{where}")


def _unknown(name: str) -> str:
    return f"{name}: no implementation of the catalogue has this name{close(name, CATALOGUE)}; {FORMS}"


def close(name: str, known: Iterable[str]) -> str:
    """The known names that are close to one, as the end of an error; nothing where there are none."""
    found = difflib.get_close_matches(name, list(known), n=3)
    return f"; close: {', '.join(found)}" if found else ""
