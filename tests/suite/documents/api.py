"""Generates docs/api.md: the public names, and the objects that they return, from signatures and docstrings.

It reads the source text, because an object at run time has lost the comments, and the way in which types are written.
"""

import ast
import builtins
import importlib
import inspect
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Literal, get_args, get_origin

import flashproof
from flashproof.oracles.verdict import Bias, Worst
from flashproof.reports.record import Element, Judgement
from flashproof.reports.wording import item
from flashproof.tests.suite.documents.checks import ROOT

PAGE = ROOT / "docs" / "api.md"
WIDTH = 100  # of a line of code; a longer signature has one parameter a line
HEAD = """\
# The Python API

These names are public: `from flashproof import verify`, or `flashproof.verify`. `import flashproof` alone loads neither
PyTorch nor a kernel. Each section also describes the objects that its functions return. [Types](#types) explains the
names in the signatures.

- [Verify a kernel](#verify-a-kernel): `verify` and its `Result`
- [Judge tensors](#judge-tensors): `judge` and `assert_accurate`, for tensors that you already have
- [Claims](#claims): `Implementation`, `Supports` and `Arithmetic`
- [Write a check](#write-a-check): `check` and `Subject`

This page is generated: `python -m flashproof.tests.suite.documents` writes it from signatures and docstrings.
"""
VERIFY = """
This does what `flashproof TARGET` does, from a script or a test:

```python
import flashproof

result = flashproof.verify(attention, dtypes=["float32"], quick=True)
print(result.verdict)
for failure in result.failures:
    print(failure.check, failure.case, failure.tensor, failure.rho, failure.message)
if ("dq", "float32") in result.worst:
    print(result.worst["dq", "float32"].rho)
result.raise_for_failures()
```

[Commands and options](commands.md) explains the options, and [Reading a failure](failures.md) the words.
"""
JUDGE = """
These functions call no kernel. They compare the answer of a kernel with the exact result and the bound:

```python
verdicts = flashproof.judge(out, query, key, value, is_causal=True, dout=dout, dq=dq, dk=dk, dv=dv, with_bounds=True)
print(verdicts.passed, verdicts["dq"].rho)
print(verdicts["out"].worst.index, verdicts["out"].worst.error, verdicts["out"].worst.bound)
if verdicts["out"].bias is not None:
    print(verdicts["out"].bias.value, verdicts["out"].bias.leans)
errors = (out.double() - verdicts["out"].exact).abs() / verdicts["out"].bound
```
"""
CLAIMS = """
A plain function needs none of these. [What a function claims](claims.md) says when to use them, with an example.
[The arithmetic behind the bound](arithmetic.md) says what each field of `Arithmetic` does to the bound.
"""
CHECK = """
[Adding an implementation or a check](adding.md) has an example.
"""
VERSION = """
## Version

`flashproof.__version__` is the version as a string, such as "0.1.0". It is "unknown" in a clone that is not installed.
"""
TYPES = """
## Types

"""
# The fields of `Subject` whose names say it all in the code.
SAID = {
    "check": 'the name of the check, "accuracy/forward"',
    "implementation": "the `Implementation` under the check",
    "dtype": "the dtype under the check",
    "device": "the device under the check",
    "cases": "the cases of the grid that the implementation claims, or those of `--case`",
}
# What a check uses. The other members of `Subject` are for those who run checks.
OF_SUBJECT = (
    *("implementation", "dtype", "device", "check", "cases", "tensors"),
    *("judge", "judge_answer", "attend", "forward", "backward", "claim", "search"),
    *("expect", "expect_equal", "varies", "fail", "is_slow"),
)
# Names in signatures that this page does not explain by a heading. The module is where the values are read from.
LITERALS = {
    "Alignment": ("flashproof.impls.spec", "how a causal mask of different lengths is aligned"),
    "Call": ("flashproof.cases", "a way of calling a kernel"),
    "Certainty": ("flashproof.reports.record", "how an exact value is known"),
    "Device": ("flashproof.impls.spec", "a kind of device"),
    "Dtype": ("flashproof.impls.spec", "a dtype by its name"),
    "Slow": ("flashproof.impls.spec", "what is slow"),
    "Status": ("flashproof.reports.record", "the result of a case"),
    "TensorName": ("flashproof.reports.record", "the name of a result"),
}
MEANINGS = {
    "Answer": 'what the kernel answered: `answer["dq"]` is a tensor, `"dq" in answer` says whether it is there, and '
    "`answer.seconds` is how long the call took",
    "Bool": '`Bool[Tensor, "1 keys"]` is a boolean tensor of this shape',
    "Case": "one input, and how the kernel is called with it. `str(case)` is [its line](commands.md), and `Case.parse` "
    "reads one. [flashproof/cases.py](../flashproof/cases.py) has the fields",
    "Claimed": "a claim, or a function of dtype and device that returns one: `Arithmetic` or "
    "`Callable[[Dtype, Device], Arithmetic]`",
    "Float": '`Float[Tensor, "batch heads queries dim"]` is a floating-point tensor of this shape. Equal names stand '
    "for equal sizes, and `*shape` for any number of dimensions. `batch_or_1` is the batch, or 1",
    "Float32": "the same, in float32",
    "Float64": "the same, in float64",
    "Forward": "a call whose forward was answered, and whose backward may follow",
    "Function": "the function under the decorator",
    "Elements": "how many elements have an error of so many units in the last place. "
    "[reports/record.py](../reports/record.py)",
    "Grid": "the cases of a check: `Callable[[Space, Dtype], list[Case]]`. "
    "[flashproof/grids.py](../flashproof/grids.py) makes some",
    "Inputs": "the tensors of a case: `query`, `key`, `value`, `dout`, and `block_mask` or None",
    "Judged": "the verdict on a tensor, with `tensor`, `passed`, `worst_rho`, `worst` and `bias`",
    "SearchStrategy": "a strategy of Hypothesis",
}
KNOWN = {*vars(builtins), "Any", "Callable", "Literal", "Mapping", "Path", "Sequence", "Tensor", "torch"}


Kind = Literal["field", "property", "method"]


@dataclass(frozen=True)
class Member:
    """A field, property or method of a class."""

    name: str
    stub: str  # its lines in the stub of the class
    meaning: str
    kind: Kind
    types: tuple[str, ...]


def page() -> str:
    """Returns the text of the page. Raises ValueError if something on it has no meaning in words."""
    result, subject = flashproof.Result, flashproof.Subject
    verdicts, claims = (
        (flashproof.Verdicts, flashproof.Verdict, Worst, Bias),
        (flashproof.Supports, flashproof.Arithmetic),
    )
    sections: tuple[tuple[str, str, tuple[object, ...]], ...] = (
        ("Verify a kernel", VERIFY, (flashproof.verify, result, Judgement, Element)),
        ("Judge tensors", JUDGE, (flashproof.judge, flashproof.assert_accurate, *verdicts)),
        ("Claims", CLAIMS, (flashproof.Implementation, *claims)),
        ("Write a check", CHECK, (flashproof.check, subject)),
    )
    shown = [place_of(each) for _, _, objects in sections for each in objects]
    if missing := set(flashproof.__all__) - {name for _, name in shown} - {"__version__"}:
        raise ValueError(f"{', '.join(sorted(missing))}: public, and in no section of the page")
    parts, types = [HEAD], set[str]()
    for title, text, objects in sections:
        parts += [f"\n## {title}\n", text]
        for each in objects:
            words, used = _described(*place_of(each))
            parts.append(words)
            types |= used
    parts += [VERSION, TYPES]
    parts += [_type(name) for name in sorted(types - KNOWN - {name for _, name in shown})]
    return "".join(parts)


def place_of(thing: object) -> tuple[str, str]:
    """Returns the module and the name of a function or class."""
    return str(getattr(thing, "__module__", "")), str(getattr(thing, "__name__", ""))


# ----------------------------------------------------------------------------------------------- the source of a module


@dataclass(frozen=True)
class Source:
    """The source text of a module."""

    module: str
    text: str
    nodes: dict[str, ast.stmt]  # functions and classes, by name
    comments: dict[int, str]  # by line
    alone: frozenset[int]  # lines that hold nothing but a comment

    def written(self, node: ast.expr) -> str:
        """Returns an expression as it is written, on one line and without the names of modules."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        text = " ".join((ast.get_source_segment(self.text, node) or "").split())
        return re.sub(r"\b[a-z]\w*\.(?=[A-Z])", "", text)

    def default(self, node: ast.expr) -> str:
        """Returns a default. A name of numbers or words is replaced by them."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
            return next(self.default(each.value) for each in node.keywords if each.arg == "default")
        value = getattr(importlib.import_module(self.module), node.id, None) if isinstance(node, ast.Name) else None
        if isinstance(value, tuple):
            return repr(value).replace("'", '"')
        return ast.get_source_segment(self.text, node) or ""

    def said_of(self, node: ast.stmt) -> str:
        """Returns the comment above a statement and the one beside it."""
        first, found = node.lineno - 1, list[str]()
        while first in self.alone:
            found.insert(0, self.comments[first])
            first -= 1
        found += [
            self.comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in self.comments
        ]
        return " ".join(found)


@cache
def source_of(module: str) -> Source:
    """Returns the source of a module."""
    text = Path(inspect.getfile(importlib.import_module(module))).read_text()
    statements = ast.parse(text).body
    nodes = {node.name: node for node in statements if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    tokens = [each for each in tokenize.generate_tokens(StringIO(text).readline) if each.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.lstrip("# ").rstrip() for token in tokens}
    alone = frozenset(token.start[0] for token in tokens if token.line.strip() == token.string)
    return Source(module, text, dict(nodes), comments, alone)


# ------------------------------------------------------------------------------------------------ functions and classes


def _described(module: str, name: str) -> tuple[str, set[str]]:
    """Returns the description of a function or class, and the names of types in it."""
    source = source_of(module)
    node = source.nodes[name]
    if isinstance(node, ast.FunctionDef):
        parts = [f"\n### `{name}`\n", f"\n```python\n{_signature(source, node)}\n```\n", f"\n{_words(node)}\n"]
        return "".join(parts), set(_types_of(_annotations(node)))
    assert isinstance(node, ast.ClassDef)
    members = list(_members(source, node))
    parts = [f"\n### `{name}`\n", f"\n{_words(node)}\n", f"\n```python\n{_stub(source, node, members)}\n```\n"]
    for title, kinds in (("Fields", ("field", "property")), ("Methods", ("method",))):
        rows = [(each.name, each.meaning) for each in members if each.kind in kinds]
        if rows:
            parts.append(f"\n{title}:\n\n")
            parts += [_item(*row) for row in rows]
    return "".join(parts), {one for each in members for one in each.types}


def _words(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Returns the docstring. That of a dataclass that checks its fields goes on with what the check says."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__post_init__"]
    words = [ast.get_docstring(each) for each in (node, *methods)]
    if not words[0]:
        raise ValueError(f"{node.name}: has no docstring")
    return "\n\n".join(each for each in words if each)


def _stub(source: Source, node: ast.ClassDef, members: Iterable[Member]) -> str:
    """Returns the class without its code. A class that users make shows how: its fields are keywords."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    lines = [f"@{each}" for each in decorators if "kw_only=True" in each]
    bases = [source.written(base) for base in node.bases if source.written(base) != "Struct"]
    lines.append(f"class {node.name}{'(' + ', '.join(bases) + ')' if bases else ''}:")
    fields = [each.stub for each in members if each.kind == "field"]
    others = [each.stub for each in members if each.kind != "field"]
    return "\n".join([*lines, *fields, *([""] if fields and others else []), *others])


def _members(source: Source, owner: ast.ClassDef) -> Iterator[Member]:
    """Yields the public fields, properties and methods, in this order."""
    found = [_member(source, owner, node) for node in owner.body if _is_public(owner, node)]
    return iter(sorted(found, key=lambda member: ("field", "property", "method").index(member.kind)))


def _is_public(owner: ast.ClassDef, node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        name = node.target.id
    elif isinstance(node, ast.FunctionDef):
        name = node.name
    else:
        return False
    if isinstance(node, ast.FunctionDef) and name.startswith("__"):  # a special method is public if it is explained
        return bool(ast.get_docstring(node)) and name != "__post_init__"
    return name in OF_SUBJECT if owner.name == "Subject" else not name.startswith("_")


def _member(source: Source, owner: ast.ClassDef, node: ast.stmt) -> Member:
    """Returns a field, property or method. Raises ValueError if nothing says what it means."""
    if isinstance(node, ast.FunctionDef):
        name, annotations = _called(owner, node), _annotations(node)
        is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
        kind: Kind = "property" if is_property else "method"
        stub = "    @property\n" * is_property + _signature(source, node, "    ")
        meaning = " ".join((ast.get_docstring(node) or "").split())
    else:
        assert isinstance(node, ast.AnnAssign)
        name, annotations, kind = ast.unparse(node.target), [node.annotation], "field"
        default = f" = {source.default(node.value)}" if node.value else ""
        stub = f"    {name}: {source.written(node.annotation)}{default}"
        meaning = (SAID.get(name) if owner.name == "Subject" else None) or source.said_of(node)
    if not meaning:
        raise ValueError(f"{owner.name}.{name}: has no meaning; give it a comment or a docstring")
    return Member(name, stub, meaning, kind, tuple(_types_of(annotations)))


def _called(owner: ast.ClassDef, method: ast.FunctionDef) -> str:
    """Returns a method as one writes it: `str(result)` in place of `__str__`."""
    special = {"__bool__": "bool", "__str__": "str", "__len__": "len"}.get(method.name)
    return f"{special}({owner.name.lower()})" if special else method.name


def _signature(source: Source, node: ast.FunctionDef, indent: str = "") -> str:
    """Returns the head of a function. A long one has one parameter a line."""
    arguments = node.args
    # The defaults of positional parameters belong to the last of them.
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    parameters = [_parameter(source, *each) for each in zip(arguments.args, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(f"*{_parameter(source, arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parameters.append("*")
    parameters += [_parameter(source, *each) for each in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parameters.append(f"**{_parameter(source, arguments.kwarg, None)}")
    behind = f" -> {source.written(node.returns)}: ..." if node.returns else ": ..."
    line = f"{indent}def {node.name}({', '.join(parameters)}){behind}"
    if len(line) <= WIDTH:
        return line
    lines = [f"{indent}    {each}," for each in parameters]
    return "\n".join([f"{indent}def {node.name}(", *lines, f"{indent}){behind}"])


def _parameter(source: Source, argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {source.written(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{annotation}{f' = {source.default(default)}' if default else ''}"


# ---------------------------------------------------------------------------------------------------------------- types


def _annotations(node: ast.FunctionDef) -> list[ast.expr]:
    arguments = node.args
    every = [*arguments.args, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    found = [each.annotation for each in every if each.annotation]
    return [*found, node.returns] if node.returns else found


def _types_of(annotations: Iterable[ast.expr]) -> Iterator[str]:
    """Yields the names in annotations, without those of modules. A shape is not a name."""
    for annotation in annotations:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            yield from _types_of([ast.parse(annotation.value, mode="eval").body])
            continue
        for node in ast.walk(annotation):
            name = getattr(node, "attr", "") or getattr(node, "id", "")
            if name[:1].isupper():
                yield name


def _type(name: str) -> str:
    """Returns the list item of a type."""
    if name in LITERALS:
        module, meaning = LITERALS[name]
        values = getattr(importlib.import_module(module), name)
        assert get_origin(values) is Literal
        meaning += ": " + ", ".join(f'`"{value}"`' for value in get_args(values))
    elif name in MEANINGS:
        meaning = MEANINGS[name]
    else:
        raise ValueError(f"{name}: in a signature, and not explained; give it a meaning in {Path(__file__).name}")
    return _item(name, meaning)


def _item(name: str, meaning: str) -> str:
    """Returns a name and its meaning, in sentences, as an item of a list."""
    return item(f"`{name}`: {meaning[0].upper()}{meaning[1:]}{'' if meaning.endswith(('.', '?')) else '.'}")
