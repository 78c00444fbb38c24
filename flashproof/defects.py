"""Known defects: failures that are known and expected.

A file of known defects is a list of tables:

    [[defect]]
    implementation = "mine.py:attention"        # the name in a run
    device = "cpu"
    dtypes = ["float16"]
    checks = ["contract/autocast"]               # `flashproof list --checks` lists the names
    seen = "autocast is not supported"
    link = "https://..."                        # where it is reported, or why it is accepted

Every field is required. One further field is optional: the levels of the cases that fail, if other cases of the check
pass (docs/checks.md lists the factors and their levels). With this field, "*" stands for every check:

    checks = ["*"]
    where = {batch = "over 65535 with heads", mask = ["causal", "causal-br"]}
"""

import ast
import difflib
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from flashproof import loading
from flashproof.cases import Case
from flashproof.impls import catalogue
from flashproof.impls.catalogue import close
from flashproof.impls.spec import DTYPES, Device
from flashproof.registry import checks
from flashproof.reports.record import LAYERS
from flashproof.space import FACTORS, levels

LISTS = ("dtypes", "checks")
ALIKE = 0.8  # the share of equal letters above which one name is a misspelling of another
WHERE, EVERY = "where", "*"
TEXTS = ("implementation", "device", "seen", "link")


@dataclass(frozen=True)
class Defect:
    """One entry of a file of known defects."""

    implementation: str
    device: str
    dtypes: tuple[str, ...]
    checks: tuple[str, ...]
    seen: str
    link: str
    place: str  # "known_defects.toml, entry 2"
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()  # factors, and their levels in the cases that fail

    def is_of(self, case: Case) -> bool:
        """Whether the defect applies to a case."""
        found = levels(case)
        return all(found[factor] in known for factor, known in self.where)


def read(path: Path) -> list[Defect]:
    """The entries of a file.

    Raises OSError for a file that cannot be read. Raises ValueError for a file that is not a list of defects, and for a
    field that is missing, unknown or of the wrong type. The error names the file, the entry and the field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; write one, or remove the key")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    entries = table.get("defect", [])
    if set(table) - {"defect"} or not isinstance(entries, list):
        raise ValueError(f"{path}: holds {', '.join(table)}; give [[defect]] tables and nothing else")
    return [_entry(entry, f"{path.name}, entry {number}") for number, entry in enumerate(entries, start=1)]


def check_names(defects: list[Defect]) -> None:
    """Raises ValueError, which names the entry, for a misspelt check or implementation."""
    for defect in defects:
        for check in defect.checks:
            if check != EVERY or not defect.where:
                _check_name(check, f"{defect.place}: checks")
        _check_implementation(defect.implementation, f"{defect.place}: implementation")


def _entry(entry: object, place: str) -> Defect:
    """Converts an entry of a file to a `Defect`."""
    fields: dict[str, object] = entry if isinstance(entry, dict) else {}
    known = (*TEXTS[:2], *LISTS, *TEXTS[2:])
    for name in fields:
        if name not in (*known, WHERE):
            raise ValueError(
                f"{place}: there is no field {name!r}{close(name, (*known, WHERE))}; give {', '.join(known)}"
            )
    for name in known:
        if name not in fields:
            raise ValueError(f"{place}: the field {name} is missing; give {', '.join(known)}")
        value = fields[name]
        if name in LISTS and not (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
            raise ValueError(f"{place}: {name} is {value!r}; give a list of strings")
        if name in TEXTS and not (isinstance(value, str) and value):
            raise ValueError(f"{place}: {name} is {value!r}; give a string")
    texts = {name: str(fields[name]) for name in TEXTS}
    lists = {name: tuple(map(str, fields[name])) for name in LISTS}  # type: ignore[call-overload]
    _check_one_of(texts["device"], get_args(Device), f"{place}: device")
    for dtype in lists["dtypes"]:
        _check_one_of(dtype, DTYPES, f"{place}: dtypes")
    texts["implementation"] = loading.spelled(texts["implementation"])
    where = _where(fields.get(WHERE, {}), f"{place}: {WHERE}")
    return Defect(**texts, **lists, place=place, where=where)  # type: ignore[arg-type]


def _where(given: object, field: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The levels of factors that an entry names."""
    known = {factor.name: factor.levels for factor in FACTORS}
    if not isinstance(given, dict):
        raise ValueError(f"{field} is {given!r}; give a table of factors and levels, as {{mask = 'causal'}}")
    found = []
    for factor, level in given.items():
        if factor not in known:
            raise ValueError(
                f"{field}: there is no factor {factor!r}{close(factor, list(known))}; give {', '.join(known)}"
            )
        named = level if isinstance(level, list) else [level]
        for word in named:
            if word not in known[factor]:
                raise ValueError(f"{field}: {factor} has no level {word!r}; give {', '.join(known[factor])}")
        found.append((factor, tuple(named)))
    return tuple(found)


def _check_one_of(word: str, known: tuple[str, ...], field: str) -> None:
    if word not in known:
        raise ValueError(f"{field}: {word!r} is unknown; give {', '.join(known)}")


def _check_name(check: str, field: str) -> None:
    """Raises ValueError for a misspelt check. An unknown name may be one of the project's own checks."""
    layer, _, name = check.partition("/")
    near = [known for known in checks() if difflib.SequenceMatcher(None, known.partition("/")[2], name).ratio() > ALIKE]
    if check not in checks() and (near or layer not in LAYERS or not name):
        said = f"; close: {', '.join(near)}" if near else ""
        raise ValueError(f"{field}: there is no check {check!r}{said}; `flashproof list --checks` lists the names")


def _check_implementation(name: str, field: str) -> None:
    """Raises ValueError for a misspelt implementation. It parses a file instead of importing it: no code runs."""
    place, _, attribute = name.rpartition(":")
    if not loading.is_external(name) or not place:
        if name not in catalogue.CATALOGUE:
            near = close(name, list(catalogue.CATALOGUE))
            raise ValueError(
                f"{field}: {name!r} is unknown{near}; give a name of the catalogue, 'package.module:attribute' or "
                "'path/file.py:attribute'"
            )
        return
    if not place.endswith(".py"):
        return
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{field}: there is no file {place!r}; give a path from the working folder")
    with suppress(SyntaxError, UnicodeDecodeError):  # the run reports this if it verifies that file
        names = _names(ast.parse(path.read_text(encoding="utf-8")))
        if names and attribute.partition(".")[0] not in names:
            raise ValueError(f"{field}: {place} does not define {attribute!r}{close(attribute, sorted(names))}")


def _names(module: ast.Module) -> set[str]:
    """The names that a module may define. Empty if the module imports unknown names by a star."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return set() if "*" in found else found
