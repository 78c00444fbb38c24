"""Loading: turns a name into an implementation.

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
GIVEN: dict[str, object] = {}  # the objects that callers of `flashproof.verify` gave, by their names in the run


def is_external(name: str) -> bool:
    """Whether a name is neither a name of the catalogue nor a glob over it."""
    return name not in catalogue.CATALOGUE and (":" in name or not any(letter in name for letter in GLOB))


def spelled(name: str) -> str:
    """The canonical form of a file's attribute, for any form of its path. Other names are returned unchanged.

    The path is relative to the working directory if the file is inside it. "::" counts as ":", as in pytest.
    """
    name = name.strip().replace("::", ":")
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    return f"{shown(Path(place).expanduser())}:{attribute}"


def load(name: str) -> Implementation:
    """The implementation of a name.

    An attribute that is an `Implementation` is returned unchanged if its claims are valid (`claims.check`). Any other
    callable is verified for what its parameters name (`signatures.of_callable`). Every error says what was given and
    what to give instead.

    Raises ImportError for a module that is not installed (its `name` says which), FileNotFoundError, AttributeError,
    TypeError for an object that is not an attention function, and ValueError for an unknown name, an invalid claim, and
    code that fails during its import.
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
    """Makes modules importable from a folder, before all other folders."""
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


# -------------------------------------------------------------------------------------------- which object is meant


def _find(name: str) -> object:
    if name in GIVEN:
        return GIVEN[name]
    place, colon, attribute = name.rpartition(":")
    if not name:
        raise ValueError(f"'': the name is empty; {FORMS}")
    if not colon:
        return _without_colon(name)
    if not place:
        raise ValueError(f"{name}: there is no module or file before the colon; {FORMS}")
    if not attribute:
        raise ValueError(f"{name}: {_no_attribute(_contents(place))}")
    is_path = place.endswith(".py") or "/" in place or Path(place).is_file()
    module = _file(Path(place), name) if is_path else _module(place, name)
    return _attribute(module, attribute, name)


def _without_colon(name: str) -> object:
    """The object of "package.module.attribute". Raises an error if the name has no attribute, or does not exist."""
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
    """The error text for a name that exists neither in the catalogue nor as a module."""
    return f"{name}: the catalogue has no implementation of this name{close(name, catalogue.CATALOGUE)}; {advice}"


def _no_attribute(contents: str) -> str:
    """The error text for a module or a file without an attribute."""
    return f"names no attribute.{contents} {FORMS}" if contents else f"names no attribute; {FORMS}"


def _defined(file: str) -> list[str]:
    """The functions and names that a file defines, attention first. Empty for a missing file and for invalid Python."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    found += [target.id for targets in assigned for target in targets if isinstance(target, ast.Name)]
    return sorted((name for name in found if not name.startswith("_")), key=lambda name: "att" not in name.lower())


def _contents(file: str, folders: Iterable[str] = ()) -> str:
    """A sentence about what a file defines and which modules its package's folders contain; empty for nothing."""
    modules = [found.name for found in pkgutil.iter_modules(list(folders))]
    defines = f"It defines {_some(_defined(file))}; " if _defined(file) else ""
    holds = f"{'it' if defines else 'It'} holds the modules {_some(modules)}; " if modules else ""
    return f" {defines}{holds}".rstrip()


def _contents_of(module: ModuleType) -> str:
    return _contents(getattr(module, "__file__", None) or "", getattr(module, "__path__", ()))


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _in_directory(folder: Path) -> str:
    """Advice in place of a directory: one of its files, with an attribute."""
    files = sorted(path for path in folder.glob("*.py") if _defined(str(path)))
    example = files[0] if files else folder / "file.py"
    return f"name a file in it and an attribute, such as '{shown(example)}:attention'"


# ------------------------------------------------------------------------------------------------ modules and files


def _is_there(module: str) -> bool:
    """Whether a module can be found. The call imports its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _module(place: str, name: str) -> ModuleType:
    """The module of a name. A file that was imported under another name is not imported again."""
    with _importing(place, name):
        if place not in sys.modules and (origin := _origin(place)) and (loaded := _loaded(origin)):
            return loaded
        return importlib.import_module(place)


def _origin(module: str) -> Path | None:
    """The file that an import of this name would run. None if there is no file, as for a builtin."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.has_location and spec.origin is not None:
            return Path(spec.origin)
    return None


def _loaded(path: Path) -> ModuleType | None:
    """The module of a file, if the file was imported."""
    return next((module for module in list(sys.modules.values()) if _is_of(module, path)), None)


def _file(path: Path, name: str) -> ModuleType:
    """The module of a file. The file runs once, even if several of its functions are loaded.

    A file of a package is imported as a module of that package. A file that was imported before is not run again. The
    file's folder, or the folder of its package, stays importable, as for `python file.py`. During the import, this
    folder comes before all other folders; later, it comes last.
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
    """A context in which imports search a folder first. Afterwards they search a new folder last."""
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
    """The name of a file as a module, and the folder that contains its outermost package.

    Raises ImportError if another package of this name was imported.
    """
    packages = {
        os.path.realpath(folder): package
        for package, module in list(sys.modules.items())
        for folder in list(getattr(module, "__dict__", {}).get("__path__", ()))
        if isinstance(folder, str)
    }
    # Some packages of flashproof are links to folders of the clone.
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
            f"already imported ({getattr(other, '__file__', None) or 'a builtin'}); rename the package",
            name=parts[0],
        )
    return ".".join(parts), folder


def _is_of(module: ModuleType, path: Path) -> bool:
    """Whether a module was loaded from a file."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(file, str) and file.endswith(path.name) and os.path.realpath(file) == os.path.realpath(path)


def _leads_to(module: str, path: Path) -> bool:
    """Whether an import of this name would run this file. Another file, or a builtin module, may have the same name."""
    origin = _origin(module)
    return origin is not None and os.path.realpath(origin) == os.path.realpath(path)


def _alone(path: Path, name: str) -> ModuleType:
    """Runs a file as a module with a unique name."""
    unique = f"{path.stem}_{hashlib.sha256(f'{path} {path.stat().st_mtime_ns}'.encode()).hexdigest()[:12]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # where dataclasses and pickle search for it
    try:
        with _importing(str(path), name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _check_file(path: Path, name: str) -> None:
    """Raises an error with advice if a path is not a Python file."""
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
    """Turns every exception of an import into an error of `load`."""
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
    """Advice for a module that the working directory's src/ contains; empty if it does not."""
    place = Path("src", *module.split("."))
    found = next((path for path in (place, place.with_suffix(".py")) if path.exists()), None)
    return f"{found} is not importable yet; run `pip install -e .`, or set PYTHONPATH=src" if found and module else ""


def _failed(name: str, error: BaseException) -> ValueError:
    """The error of code that fails. It is not an ImportError, so that a broken module does not look missing."""
    frame = own_frame(error)  # a syntax error names its own place
    where = f" ({shown(frame.filename)}, line {frame.lineno})" if frame else ""
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    advice = ""
    if isinstance(error, UnreadableClaim):
        return ValueError(f"{name}: {text}{where}")
    if isinstance(error, SystemExit):
        advice = "; move the code of the program under `if __name__ == '__main__':`"
    if isinstance(error, ImportError) and "no known parent package" in text:
        advice = "; give each folder of its package an __init__.py, or name it as 'package.module:attribute'"
    return ValueError(f"{name}: importing it failed with {said}{where}{advice}")
