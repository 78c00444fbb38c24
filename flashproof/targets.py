"""Targets: what `--impl` names. How a name becomes an implementation, and on which dtypes and devices it is run.

A name is one of the catalogue, "package.module:attribute", or "path/file.py:attribute".
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import ModuleType

import torch

from flashproof.impls import catalogue, claims
from flashproof.impls.catalogue import FORMS, close
from flashproof.impls.spec import Device, Dtype, Implementation, Supports, arithmetic_of_callables
from flashproof.sandbox.process_state import FILTERS, left_alone


@dataclass(frozen=True)
class Target:
    """One implementation, dtype and device that a check is run for, or the reason why it cannot run here."""

    name: str
    dtype: Dtype
    device: Device
    implementation: Implementation | None
    missing: str | None  # why it cannot run here

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.device}"


@dataclass(frozen=True)
class Loaded:
    """What came of loading a name."""

    name: str
    implementation: Implementation | None
    missing: str | None  # the backend that is not installed, where there is no implementation
    changed: tuple[str, ...]  # global state that its import changed, and that was put back

    @property
    def is_external(self) -> bool:
        """Whether it is not one of the catalogue."""
        return is_external(self.name)


def is_external(name: str) -> bool:
    """Whether a name is not one of the catalogue, nor a glob over it."""
    return ":" in name or name.endswith(".py")


def load_selected(names: Sequence[str]) -> list[Loaded]:
    """Loads what names and globs select, each once; all of the catalogue if there are none.

    A backend that is not installed is a reason not to run, unless it is one of an external kernel. Raises what `load`
    raises for everything else.
    """
    chosen: list[str] = []
    for pattern in names or ["*"]:
        chosen += [pattern] if is_external(pattern) else catalogue.names([pattern])
    return [_load_one(name) for name in dict.fromkeys(chosen)]


def _load_one(name: str) -> Loaded:
    missing = None
    with warnings.catch_warnings(), left_alone() as changed:
        warnings.simplefilter("ignore")  # a warning is an error in this suite, and a file may warn when it is imported
        try:
            implementation = replace(load(name), name=name)  # a run knows it by the name that loads it again
            if is_external(name):
                implementation = replace(implementation, one_code=lambda device: ())
        except ImportError as error:
            if is_external(name):
                raise
            implementation, missing = None, f"{error.name or name}: not installed"
    return Loaded(name, implementation, missing, tuple(setting for setting in changed if setting != FILTERS))


def targets_of(loaded: Loaded, dtypes: Sequence[Dtype], device: Device | None) -> list[Target]:
    """The targets of an implementation: the dtypes and devices that it claims, of those that are asked for."""
    found = []
    implementation = loaded.implementation
    for where in _devices(implementation, device):
        missing = loaded.missing if implementation is None else implementation.missing(where) or _no_device(where)
        claimed = [dtype for dtype in dtypes if implementation is None or dtype in implementation.supports.dtypes]
        found += [Target(loaded.name, dtype, where, implementation, missing) for dtype in claimed]
    return found


def _devices(implementation: Implementation | None, asked: Device | None) -> list[Device]:
    claimed: list[Device] = list(implementation.supports.devices) if implementation else ["cpu"]
    if asked:
        return [asked] if asked in claimed else []
    if torch.cuda.is_available():
        return [
            device
            for device in claimed
            if implementation is None or device == "cuda" or implementation.missing(device) is None
        ]
    return [device for device in claimed if device == "cpu"] or claimed


def _no_device(device: Device) -> str | None:
    return "CUDA: no device" if device == "cuda" and not torch.cuda.is_available() else None


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
    if name in catalogue.CATALOGUE:
        return catalogue.load(name)
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(
            f"{name}: which attribute of it?{_defined(name.rstrip(':'))} {FORMS}"
            if ":" in name or name.endswith(".py")
            else catalogue.unknown(name)
        )
    module = _file(Path(place), name) if place.endswith(".py") or "/" in place else _module(place, name)
    try:
        found = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise AttributeError(
            f"{name}: {place} has no attribute '{attribute}'{close(attribute, vars(module))}"
        ) from None
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
        raise TypeError(
            f"{name}: {attention!r} is not an attention function; give a function attention(query, key, value, ...) or an Implementation"
        )
    parameters = _parameters(attention, name)
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            f"{name}: takes {len(positional)} positional arguments; give a function that takes three: attention(query, key, value, ...)"
        )
    further = [
        p.name
        for p in parameters
        if p not in positional[:3]
        and p.default is kinds.empty
        and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    if further:
        raise TypeError(
            f"{name}: needs {', '.join(further)} beside query, key and value; give a function that fills them in"
        )
    keywords = {
        p.name
        for p in parameters
        if p not in positional[:3] and p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    supports = Supports(
        causal=()
        if "is_causal" not in keywords
        else ("top_left", "bottom_right")
        if "causal_alignment" in keywords
        else ("top_left",),
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
        name=name,
        attention=attention,
        supports=supports,
        arithmetic=arithmetic_of_callables,
        summary="A function, verified as it stands.",
        bare=True,
    )


def _parameters(attention: Callable[..., object], name: str) -> list[inspect.Parameter]:
    """A callable's parameters. Builtins such as torch's `scaled_dot_product_attention` carry theirs at the head of the docstring: "f(a, b=0.0) -> Tensor"."""
    try:
        return list(
            inspect.signature(getattr(attention, "forward", attention)).parameters.values()
        )  # nn.Module: __call__ says nothing, forward does
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
    parameters = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if i < required else None)
        for i, a in enumerate(plain)
    ]
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
            raise ImportError(
                f"{name}: {path} needs '{error.name}', which is not installed", name=error.name
            ) from error
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
    found += [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return f" It defines {', '.join(found)};" if found else ""


def _failed(name: str, error: BaseException) -> ValueError:
    """Not an ImportError: a broken module must not pass for one that is not installed."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    # A syntax error's words name its place; what ran last was the importer.
    where = "" if place.filename.startswith("<frozen importlib") else f" ({place.filename}, line {place.lineno})"
    return ValueError(f"{name}: importing it failed with {type(error).__name__}: {error}{where}")
