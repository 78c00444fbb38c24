"""Loading: how a name becomes an implementation.

A name is one of the catalogue, "package.module:attribute", "path/file.py:attribute" or "package.module.attribute".
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import ModuleType

from flashproof.diagnosis import own_frame, shown
from flashproof.impls import catalogue, claims
from flashproof.impls.catalogue import FORMS, close
from flashproof.impls.fields import UnreadableClaim
from flashproof.impls.spec import Implementation
from flashproof.signatures import of_callable

GLOB = "*?["
SHOWN = 8  # names that an error lists
FLASHPROOF = Path(__file__).parent
GIVEN: dict[
    str, object
] = {}  # what a caller of `flashproof.verify` gave as an object, by the name that the run gives it


def is_external(name: str) -> bool:
    """Whether a name is not one of the catalogue, nor a glob over it."""
    return name not in catalogue.CATALOGUE and (":" in name or not any(letter in name for letter in GLOB))


def spelled(name: str) -> str:
    """One name for an attribute of a file, however its path is given. Other names as they stand.

    The path starts in the working directory if the file is in it or below it. "::" is taken for ":", as pytest has it.
    """
    name = name.strip().replace("::", ":")
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    return f"{shown(Path(place).expanduser())}:{attribute}"


def load(name: str) -> Implementation:
    """The implementation that a name stands for.

    An attribute that is an `Implementation` is taken as it is, if its claims can be read (`claims.check`). Any other
    callable is verified for what its parameters name (`signatures.of_callable`). Every error says what was
    given and what would do.

    Raises ImportError where a module is not installed (its `name` says which), FileNotFoundError, AttributeError,
    TypeError for what is not an attention function, and ValueError for an unknown name, a claim that cannot be read
    and code that fails while it is imported.
    """
    if name in catalogue.CATALOGUE:
        return catalogue.load(name)
    found = _find(name)
    if not isinstance(found, Implementation):
        return of_callable(found, name)
    try:
        claims.check(found)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return found if found.name else replace(found, name=name)


def make_importable(folder: str) -> None:
    """Lets modules be imported from a folder, before those of any other."""
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


# -------------------------------------------------------------------------------------------- which object is meant


def _find(name: str) -> object:
    if name in GIVEN:
        return GIVEN[name]
    place, colon, attribute = name.rpartition(":")
    if not name:
        raise ValueError(f"'': an empty name stands for nothing; {FORMS}")
    if not colon:
        return _without_colon(name)
    if not place:
        raise ValueError(f"{name}: names no module and no file before the colon; {FORMS}")
    if not attribute:
        raise ValueError(f"{name}: {_no_attribute(_contents(place))}")
    is_path = place.endswith(".py") or "/" in place or Path(place).is_file()
    module = _file(Path(place), name) if is_path else _module(place, name)
    return _attribute(module, attribute, name)


def _without_colon(name: str) -> object:
    """What "package.module.attribute" stands for. Raises for a name that lacks an attribute, or that nothing has."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "__init__.py").is_file():
        raise ValueError(f"{name}: is a directory; {_in_directory(path)}")
    if path.is_file() or name.endswith(".py"):
        _check_file(path, name)
        raise ValueError(f"{name}: {_no_attribute(_contents(name))}")
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or not _is_there(parts[0]):
        raise ValueError(_unknown(name, advice=_in_src(name.rpartition(".")[0]) or FORMS))
    found: object = _module(parts[0], name)
    for i, part in enumerate(parts[1:], start=1):
        place = ".".join(parts[:i])
        if not hasattr(found, part) and isinstance(found, ModuleType) and _is_there(f"{place}.{part}"):
            found = _module(f"{place}.{part}", name)
            continue
        if not hasattr(found, part):
            known = f"; close: {', '.join(near)}" if (near := _near(part, found)) else ""
            raise ValueError(_unknown(name, advice=f"{place} has no attribute '{part}'{known}; {FORMS}"))
        found = getattr(found, part)
    if isinstance(found, ModuleType):
        raise ValueError(f"{name}: {_no_attribute(_contents_of(found))}")
    return found


def _attribute(module: ModuleType, attribute: str, name: str) -> object:
    try:
        found: object = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        words = name.rpartition(":")[0]
        if hasattr(module, "__path__") and not getattr(module, "__file__", None):  # a folder without __init__.py
            raise AttributeError(f"{name}: {words} is a directory; {_in_directory(Path(module.__path__[0]))}") from None
        near, contents = _near(attribute, module), _contents_of(module)
        known = f"; close: {', '.join(near)}" if near else f".{contents} {FORMS}" if contents else f"; {FORMS}"
        raise AttributeError(f"{name}: {words} has no attribute '{attribute}'{known}") from None
    return found


def _near(attribute: str, place: object) -> list[str]:
    found = close(attribute.strip(), getattr(place, "__dict__", {}))
    return found.removeprefix("; close: ").split(", ") if found else []


def _unknown(name: str, *, advice: str) -> str:
    """The words of an error about a name that neither the catalogue nor a module has."""
    return f"{name}: the catalogue has no implementation of this name{close(name, catalogue.CATALOGUE)}; {advice}"


def _no_attribute(contents: str) -> str:
    """The words of an error about a module or a file that is named alone."""
    return f"names no attribute.{contents} {FORMS}" if contents else f"names no attribute; {FORMS}"


def _defined(file: str) -> list[str]:
    """The functions and names that a file defines, attention first. Empty for what is no file, or no Python."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    found += [target.id for targets in assigned for target in targets if isinstance(target, ast.Name)]
    return sorted((name for name in found if not name.startswith("_")), key=lambda name: "att" not in name.lower())


def _contents(file: str, folders: Iterable[str] = ()) -> str:
    """What a file defines, and which modules the folders of its package hold, as a sentence; empty for nothing."""
    modules = [found.name for found in pkgutil.iter_modules(list(folders))]
    defines = f"It defines {_some(_defined(file))}; " if _defined(file) else ""
    holds = f"{'it' if defines else 'It'} holds the modules {_some(modules)}; " if modules else ""
    return f" {defines}{holds}".rstrip()


def _contents_of(module: ModuleType) -> str:
    return _contents(getattr(module, "__file__", None) or "", getattr(module, "__path__", ()))


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _in_directory(folder: Path) -> str:
    """What would do in place of a directory: one of its files, with an attribute."""
    files = sorted(path for path in folder.glob("*.py") if _defined(str(path)))
    example = files[0] if files else folder / "file.py"
    return f"name a file in it and an attribute, as '{shown(example)}:attention'"


# ------------------------------------------------------------------------------------------------ modules and files


def _is_there(module: str) -> bool:
    """Whether a module can be found. Its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _module(place: str, name: str) -> ModuleType:
    """The module of a name. The module of a file that has been imported under another name is not imported again."""
    with _importing(place, name):
        if place not in sys.modules and (origin := _origin(place)) and (loaded := _loaded(origin)):
            return loaded
        return importlib.import_module(place)


def _origin(module: str) -> Path | None:
    """The file that an import of this name would run. None if there is none, as of a builtin."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.has_location and spec.origin is not None:
            return Path(spec.origin)
    return None


def _loaded(path: Path) -> ModuleType | None:
    """The module of a file that has been imported."""
    return next((module for module in list(sys.modules.values()) if _is_of(module, path)), None)


def _file(path: Path, name: str) -> ModuleType:
    """The module of a file, which runs once, however many of its functions are asked for.

    A file of a package is imported as a module of that package. A file that has been imported is not run again. Its
    folder, or that of its package, is importable from then on, as for `python file.py`: before all others while the
    file is imported, and behind them later.
    """
    path = path.expanduser().absolute()
    _check_file(path, name)
    if loaded := _loaded(path):
        return loaded
    module, root = _module_name(path, name)
    with _first(str(root)):
        is_importable = module not in sys.modules and ("." in module or _leads_to(module, path))
        return _module(module, name) if is_importable else _alone(path, name)


@contextmanager
def _first(folder: str) -> Generator[None]:
    """While it is open, imports look into a folder first. Afterwards they look there last, if they did not before."""
    known = folder in sys.path
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if not known:
            sys.path.append(folder)


def _module_name(path: Path, name: str) -> tuple[str, Path]:
    """The name of a file as a module, and the folder that it is imported from, which holds its outermost package.

    Raises ImportError if another package of this name is imported.
    """
    packages = {
        os.path.realpath(folder): package
        for package, module in list(sys.modules.items())
        for folder in list(getattr(module, "__dict__", {}).get("__path__", ()))
        if isinstance(folder, str)
    }
    # Parts of flashproof are links to folders, which it imports as its own.
    packages |= {os.path.realpath(folder): f"flashproof.{folder.name}" for folder in FLASHPROOF.iterdir()}
    parts, folder = [] if path.stem == "__init__" else [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        if package := packages.get(os.path.realpath(folder)):
            return ".".join([package, *parts]), folder.parent
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) > 1 and (other := sys.modules.get(parts[0])):
        raise ImportError(
            f"{name}: its package '{parts[0]}' in {folder} cannot be imported, because another module of this name is "
            f"imported already ({getattr(other, '__file__', None) or 'a builtin'}); rename the package",
            name=parts[0],
        )
    return ".".join(parts), folder


def _is_of(module: ModuleType, path: Path) -> bool:
    """Whether a module is that of a file."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(file, str) and file.endswith(path.name) and os.path.realpath(file) == os.path.realpath(path)


def _leads_to(module: str, path: Path) -> bool:
    """Whether an import of this name would run this file. Another file, or a builtin module, may have the same name."""
    origin = _origin(module)
    return origin is not None and os.path.realpath(origin) == os.path.realpath(path)


def _alone(path: Path, name: str) -> ModuleType:
    """Runs a file as a module whose name no other module has."""
    unique = f"{path.stem}_{hashlib.sha256(f'{path} {path.stat().st_mtime_ns}'.encode()).hexdigest()[:12]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # where dataclasses and pickle look for it
    try:
        with _importing(str(path), name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _check_file(path: Path, name: str) -> None:
    """Raises an error that says what would do, for what is no file of Python."""
    if path.is_dir():
        raise ValueError(f"{name}: is a directory; {_in_directory(path)}")
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.py"))
        raise FileNotFoundError(f"{name}: there is no file {path}{close(path.name, beside)}; {FORMS}")
    if path.suffix != ".py":
        raise ValueError(
            f"{name}: {path.name} is not a Python file; give the Python function that calls the kernel, "
            "as 'path/file.py:attribute'"
        )


# ------------------------------------------------------------------------------------------- code that fails to load


@contextmanager
def _importing(place: str, name: str) -> Generator[None]:
    """Turns whatever ends an import into an error of `load`."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or place
        if place == missing or place.startswith(missing + "."):
            known: Iterable[str] = sorted(file.stem for file in Path.cwd().glob("*.py"))
            near, advice = close(missing, known), _in_src(missing) or FORMS
            raise ImportError(f"{name}: there is no module '{missing}'{near}; {advice}", name=missing) from None
        given, advice = name.rpartition(":")[0] or place, f"; {found}" if (found := _in_src(missing)) else ""
        raise ImportError(f"{name}: {given} needs '{missing}', which is not installed{advice}", name=missing) from error
    except BaseException as error:  # a module may call sys.exit, or pytest.skip
        raise _failed(name, error) from error


def _in_src(module: str) -> str:
    """How to make a module importable that src/ of the working directory holds; empty if it holds none."""
    place = Path("src", *module.split("."))
    found = next((path for path in (place, place.with_suffix(".py")) if path.exists()), None)
    return f"{found} is not importable yet; run `pip install -e .`, or set PYTHONPATH=src" if found and module else ""


def _failed(name: str, error: BaseException) -> ValueError:
    """Not an ImportError: a broken module must not pass for one that is not installed."""
    frame = own_frame(error)  # a syntax error names its own place
    where = f" ({shown(frame.filename)}, line {frame.lineno})" if frame else ""
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    advice = ""
    if isinstance(error, UnreadableClaim):
        return ValueError(f"{name}: {text}{where}")
    if isinstance(error, SystemExit):
        advice = "; move what it does as a program under `if __name__ == '__main__':`"
    if isinstance(error, ImportError) and "no known parent package" in text:
        advice = "; give each folder of its package an __init__.py, or name it as 'package.module:attribute'"
    return ValueError(f"{name}: importing it failed with {said}{where}{advice}")
