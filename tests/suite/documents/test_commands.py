"""Tests that readers can type what the pages show: every command, every option and every block of Python.

Each command is read by the parser of its program, and the files, implementations and cases that it names must be there.
Commands that take only seconds are also run, in a folder with the files that the pages show.
"""

import argparse
import ast
import gzip
import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from _pytest.mark.expression import Expression
from packaging.requirements import Requirement

import flashproof
from flashproof import checking, cli, exercised, listing, selection, words
from flashproof.impls import catalogue
from flashproof.loading import is_external
from flashproof.registry import checks
from flashproof.reports import __main__ as merging
from flashproof.reports import bundle, difference, history
from flashproof.reports.record import Judgement, read
from flashproof.running import Wanted
from flashproof.search import Budget
from flashproof.tests.suite.documents.checks import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
SHELLS = ("sh", "bash", "console")
PROGRAM = re.compile(r"(\.venv/bin/)?(flashproof|pytest|python -m flashproof[\w.]*|make|pip)( |$)")
# Programs, commands and an option that a sentence only names.
NAMED = {"flashproof", "flashproof check", "flashproof bundle", "flashproof history", "pytest --impl", "make"}
SMALL = "b1 h1 q5 k5 d8 float32"
HERE = ("-n", "0", "--device", "cpu")  # in one process, and with the same figures where there is a GPU
# The values of the words that a reader replaces.
PLACEHOLDERS = {
    "TARGET": "mine.py:attention",
    "ONE": "mine.py:attention",
    "OTHER": "scaled.py:attention",
    "LINE": SMALL,
    "RECORDS": "cpu.jsonl",
    "DIR": "site",
    "FILE": "found.md",
    "SECONDS": "30",
    "EXPRESSION": "contract/answers",
    "BUNDLE": "cpu.jsonl",
    "N": "5",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def split(page: Path) -> tuple[list[Block], str]:
    """Returns the fenced blocks of a page, and the text around them."""
    blocks, around = list[Block](), list[str]()
    inside: list[str] | None = None
    start, language = 0, ""
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = re.fullmatch(r"```(\w*)", line.strip())
        if inside is None and not fence:
            around.append(line)
        elif inside is None and fence:
            inside, start, language = [], number, fence[1]
        elif inside is not None and fence:
            blocks.append(Block(str(page.relative_to(ROOT)), start, language, "\n".join(inside) + "\n"))
            inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}: a block does not end"
    return blocks, "\n".join(around)


BLOCKS = [block for page in PAGES for block in split(page)[0]]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def commands() -> list[str]:
    """Returns every command of the pages, once: of shell blocks, of indented lines, of failures and of sentences."""
    found: list[str] = []
    for block in BLOCKS:
        if block.language in SHELLS:
            lines = [line.removeprefix("$ ") for line in block.text.replace("\\\n", "").splitlines()]
            found += [shlex.join(each) for line in lines if (each := shlex.split(line, comments=True))]
        elif not block.language:
            found += re.findall(r"^ *again: (.*)", block.text, re.MULTILINE)
    for page in PAGES:
        given = [*spans(page), *re.findall(r"^    (\S.*)", split(page)[1], re.MULTILINE)]
        found += [each for each in given if PROGRAM.match(each) and each not in NAMED]
    return list(dict.fromkeys(found))


def spans(page: Path) -> list[str]:
    """Returns the words in backticks of a page, also those in comments of its blocks."""
    text = re.sub(r"^ *```.*$", "", page.read_text(), flags=re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


COMMANDS = commands()
OPTIONS = sorted({each for page in PAGES for each in spans(page) if re.fullmatch(r"(-[a-z]|--[a-z-]+)([ =].+)?", each)})


def documented(command: str) -> list[str]:
    """Returns the words of a command, without placeholders. The pages must hold it."""
    assert command in COMMANDS, f"no page holds {command!r} any more"
    return filled(command)


def filled(command: str) -> list[str]:
    """Returns the words of a command. A word in capitals is replaced, and so is the "..." behind it."""
    found = [
        word.removesuffix("...") if word.removesuffix("...") in PLACEHOLDERS else word for word in split_of(command)
    ]
    return [PLACEHOLDERS.get(word, word) for word in found]


def split_of(command: str) -> list[str]:
    return shlex.split(command.removeprefix(".venv/bin/"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages show. It is the current one."""

    def shown(page: str, *texts: str) -> str:
        """The blocks of Python of a page in which these texts stand, one after the other."""
        return "\n\n".join(
            next(each.text for each in PYTHON if each.page == page and text in each.text) for text in texts
        )

    files = {
        "mine.py": shown("README.md", "def attention(") + "\n\n" + shown("docs/claims.md", "Implementation("),
        "scaled.py": shown("docs/failures.md", "1.001"),
        "test_sinks.py": shown("docs/adding.md", "def test_sinks("),
        "tests/stability/test_sinks.py": shown("docs/adding.md", "def test_sinks("),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(project: Path, *given: str) -> tuple[int, str]:
    """Runs a command in a folder. Returns its exit status and its output."""
    module = given[2:] if given[:2] == ("python", "-m") else given
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    ended = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=project,
        env=names | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr


# ------------------------------------------------------------------------------------------------ parsing a command


class Parsed(Exception):
    """Ends a program after it has read its arguments."""


def understand(given: Sequence[str], config: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a command as its program does. Fails for what the program would not accept."""
    program, *arguments = given
    if program == "flashproof":
        understand_flashproof(arguments, config, monkeypatch)
    elif program == "pytest":
        understand_pytest(arguments, config)
    elif program == "python":
        understand_module(arguments[1], arguments[2:], monkeypatch)
    elif program == "make":
        understand_make(arguments)
    elif program == "pip":
        understand_pip(arguments)
    else:
        pytest.fail(f"{program}: no program whose commands this test can read")


def understand_flashproof(arguments: Sequence[str], config: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a command of flashproof, and then the words that it gives to pytest."""
    asked: list[dict[str, Any]] = []

    def note(single: bool, **wanted: Any) -> None:
        cli._check(wanted)
        asked.append(wanted)

    monkeypatch.setattr(cli, "_run", note)
    monkeypatch.setattr(merging, "merge", lambda *_: 0)
    for module in (difference, bundle, checking, history):
        monkeypatch.setattr(module, "tell", lambda *_, **__: 0)
    monkeypatch.setattr(listing, "show_checks", lambda: None)
    monkeypatch.setattr(listing, "show_catalogue", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.app(list(arguments), prog_name="flashproof")
    assert not ended.value.code, f"flashproof does not accept {shlex.join(arguments)}"
    for wanted in asked:
        understand_pytest(Wanted(**wanted).words(), config)


def understand_pytest(arguments: Sequence[str], config: pytest.Config) -> None:
    """Reads a command of pytest with the parser of this run, which has the options of flashproof too."""
    options, unknown = config._parser.parse_known_and_unknown_args(list(arguments))
    assert not unknown, f"pytest does not know {unknown}"
    for name in options.flashproof_impl:
        check_target(name)
    words.parse_dtypes(options.flashproof_dtype)
    words.parse_device(options.flashproof_device)
    selection.parse_cases(options.flashproof_case, [])
    exercised.parse(options.flashproof_require)
    if options.flashproof_search:
        Budget.parse(options.flashproof_search)
    for place in options.file_or_dir:
        assert Path(place).exists() or (ROOT / place).exists(), f"{place}: is not there"
    if options.keyword:
        matches: Any = Expression.compile(options.keyword).evaluate
        found = [name for name in checks() if matches(lambda word, name=name, **_: word in name)]
        assert found, f"-k {options.keyword!r} matches no check"
    assert options.markexpr in ("", "gpu")


def check_target(name: str) -> None:
    """Fails if a target is neither in the catalogue, nor in a file that the pages show, nor in one of the clone."""
    added = [text for block in PYTHON if is_excerpt(block) for text in ast.literal_eval(f"{{{block.text}}}")]
    if name in added:  # a page shows how
        return
    place, colon, attribute = name.partition(":")
    if not is_external(name) or not colon:
        assert catalogue.names([name])
        return
    found = [path for path in (Path(place), ROOT / place) if path.is_file()]
    assert found, f"{place}: is not there"
    assert attribute in names_made(ast.parse(found[0].read_text())), f"{place} has no {attribute}"


def understand_module(module: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a command of a module of flashproof. It is imported only if it has a function that can be stopped."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    assert spec is not None, f"{module}: no such module"
    assert spec.origin is not None
    if "def main(" not in Path(spec.origin).read_text():
        assert not arguments, f"{module} takes no arguments"
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parse(parser, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed):
        importlib.import_module(spec.name).main(list(arguments))


def understand_make(arguments: Sequence[str]) -> None:
    """Asks make what it would do. make knows the targets, and reports a missing rule."""
    if not shutil.which("make"):
        pytest.skip("make: not installed")
    defined = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word.partition("=")[0] for word in arguments if "=" in word} <= set(defined)
    ended = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def understand_pip(arguments: Sequence[str]) -> None:
    """Compares what is installed with the name of the project and its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert arguments[0] == "install"
    for wanted in map(Requirement, arguments[1:]):
        assert wanted.name == project["name"]
        assert wanted.extras <= set(project["optional-dependencies"])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("project")
def test_a_command_is_understood(command: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    understand(filled(command), pytestconfig, monkeypatch)


def options() -> list[str]:
    """Returns a command for each option that docs/commands.md lists, for flashproof and for pytest."""
    _, text = split(ROOT / "docs" / "commands.md")
    found: list[str] = []
    for item in re.findall(r"^- (`-.*?): ", text, re.MULTILINE):
        spelled = re.findall(r"`([^`]+)`", item)
        found += [f"flashproof TARGET {spelled[0]}", f"pytest --impl TARGET {spelled[-1]}"]
    return found


@pytest.mark.parametrize("command", options())
@pytest.mark.usefixtures("project")
def test_an_option_is_known_to_both_commands(
    command: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    understand(filled(command), pytestconfig, monkeypatch)


# Many sentences name an option without its value. At least one sentence names it with its value.
@pytest.mark.parametrize("option", [one for one in OPTIONS if not any(each.startswith(f"{one} ") for each in OPTIONS)])
@pytest.mark.usefixtures("project")
def test_an_option_in_a_sentence_is_one(
    option: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that a sentence names is one of flashproof, of pytest, or of a module that the pages name."""
    modules = [command for command in COMMANDS if command.startswith("python -m ") and "*" not in command]
    said = []
    others = ("flashproof list", "flashproof check BUNDLE", "flashproof history RECORDS -o FILE")
    for command in ("flashproof TARGET", *others, "pytest --impl TARGET", *modules):
        try:
            understand(filled(f"{command} {option}"), pytestconfig, monkeypatch)
        except (Exception, SystemExit) as error:
            said.append(f"{command}: {error}")
        else:
            return
    pytest.fail("\n".join(said))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("flashproof mine.py:attention --no-such-option", "flashproof does not accept"),
        ("flashproof mine.py:attention --dtype float8", "flashproof does not accept"),
        ("flashproof mine.py:nothing", "mine.py has no nothing"),
        ("flashproof tiled.fa9", "tiled.fa9"),
        ("flashproof mine.py:attention --case 'b1 h1 q5 nonsense'", "'nonsense' is unknown"),
        ("flashproof mine.py:attention --require nothing", "'nothing' is not a feature"),
        ("flashproof mine.py:attention -k no_such_check", "matches no check"),
        ("flashproof report cpu.jsonl", "flashproof does not accept"),
        ("pytest --no-such-option", "no-such-option"),
        ("pytest tests/nothing", "tests/nothing: is not there"),
        ("python -m flashproof.reports.nothing", "no such module"),
        ("python -m flashproof.tests.suite.documents --all", "takes no arguments"),
        ("python -m flashproof.reports.github --no-such-option cpu.jsonl", "2"),  # the exit status of argparse
        ("make nothing", "No rule to make target"),
        ("make report NOTHING=1", "NOTHING"),
        ("pip install 'flashproof[nothing]'", "nothing"),
        ("rm -r .", "rm: no program"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_wrong_command_is_not_understood(
    command: str, message: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would be worthless if these commands passed them."""
    with pytest.raises(BaseException, match=message):
        understand(filled(command), pytestconfig, monkeypatch)


# ------------------------------------------------------------------------------------------------ running a command


def test_the_check_of_the_pages_verifies_the_kernel_of_the_pages(project: Path) -> None:
    command = documented("pytest --impl mine.py:attention test_sinks.py")
    status, said = run(project, *command, *HERE, "--dtype", "float32", "--records", "run.jsonl")
    assert status == 0, said
    judged = [one for one in read(project / "run.jsonl") if isinstance(one, Judgement)]
    assert {one.check for one in judged} == {"stability/sinks"}
    assert {one.tensor for one in judged} == {"out", "dq", "dk", "dv"}


def test_a_run_and_its_records_as_the_pages_say(project: Path) -> None:
    """The commands for a CI and for several machines, one after the other."""
    whole = documented(
        "flashproof mine.py:attention --report out --records out/runs/verify.jsonl --junitxml out/junit.xml"
    )
    status, said = run(project, *whole, *HERE, "--case", SMALL, "-k", "contract/answers")
    assert status == 0, said
    assert (project / "out" / "index.html").is_file()
    assert (project / "out" / "junit.xml").is_file()

    records = (project / "out" / "runs" / "verify.jsonl").read_bytes()
    for name in ("cpu.jsonl", "run.jsonl", "before.jsonl", "after.jsonl", "records/one.jsonl"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_bytes(records)
    (project / "gpu.jsonl.gz").write_bytes(gzip.compress(records))
    for command, words_of_it in {
        "python -m flashproof.reports.github out/runs/verify.jsonl": "passed: 1 of",
        "flashproof report cpu.jsonl gpu.jsonl.gz -o site": "site/index.html",
        "flashproof report records/ -o site": "site/index.html",
        "flashproof diff before.jsonl after.jsonl": "No verdict changed",
        "python -m flashproof.reports.calibration RECORDS... -o FILE": "",
        "flashproof check run.jsonl": "accepted: a part of a run",
        "flashproof history out/runs/verify.jsonl -o history.json --gate": "the first run on this machine",
        "flashproof list": "tiled.fa2",
    }.items():
        status, said = run(project, *documented(command))
        assert status == 0, f"{command}: {said}"
        assert words_of_it in said
    assert "mine.py:attention" in (project / "found.md").read_text()


def test_the_failure_of_the_pages_is_what_a_run_says(project: Path) -> None:
    """The README and docs/failures.md show one failure. Its case fails like that, to the digit."""
    shown = {block.text for block in BLOCKS if block.text.startswith("scaled.py:attention  out")}
    assert len(shown) == 1, "the pages show different failures"
    (block,) = shown
    again = block.strip().splitlines()[-1].removeprefix("again: ")
    status, said = run(project, *documented(again), *HERE, "-k", "gradients/backward")
    assert status == 1, said
    assert block in said


# ------------------------------------------------------------------------------------------------ blocks of Python


def is_excerpt(block: Block) -> bool:
    """Whether a block is some lines of a dictionary."""
    return block.language == "python" and block.text.startswith(" ")


def is_stub(block: Block) -> bool:
    """Whether a block shows signatures alone."""
    return not is_excerpt(block) and all(
        isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and ast.unparse(node.body[0]) == "...")
        for node in ast.parse(block.text).body
    )


def names_made(tree: ast.Module) -> set[str]:
    """Returns the names that a module defines."""
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return found | {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """What the blocks of Python assume: the kernel of the README, and what it answered."""
    names: dict[str, Any] = {"__name__": "shown", "flashproof": flashproof, "torch": torch}
    exec(next(block.text for block in PYTHON if block.page == "README.md" and "def attention(" in block.text), names)
    generator = torch.Generator().manual_seed(0)
    query, key, value, dout = (torch.randn(1, 2, 24, 16, generator=generator) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = names["attention"](query, key, value, is_causal=True)
    dq, dk, dv = torch.autograd.grad(out, inputs, dout)
    scores = (query @ key.mT / 4.0).masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf)
    answer = {"out": out.detach(), "lse": scores.logsumexp(dim=-1).detach(), "dq": dq, "dk": dk, "dv": dv}
    return names | {"query": query.detach(), "key": key.detach(), "value": value.detach(), "dout": dout} | answer


@pytest.fixture(scope="module")
def one_case(given: dict[str, Any]) -> flashproof.Result:
    """The result of a verification of the kernel of the README in one case."""
    return flashproof.verify(given["attention"], device="cpu", cases=[SMALL], processes=1)


@pytest.mark.parametrize("block", [each for each in PYTHON if is_excerpt(each) or is_stub(each)], ids=str)
def test_an_excerpt_is_python(block: Block) -> None:
    compile(f"{{{block.text}}}" if is_excerpt(block) else textwrap.dedent(block.text), str(block), "exec")


def unchanged_limits() -> AbstractContextManager[None]:
    """Puts back the limits of torch.compile that a block changes."""
    config = importlib.import_module("torch._dynamo.config")
    names = ("recompile_limit", "accumulated_recompile_limit")
    # A monkeypatch will not do: it ends with delattr, after which PyTorch denies that the setting exists.
    patched: AbstractContextManager[None] = config.patch({name: getattr(config, name) for name in names})
    return patched


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.compile, as it imports its own modules
@pytest.mark.parametrize("block", [each for each in PYTHON if not is_excerpt(each) and not is_stub(each)], ids=str)
def test_a_block_of_python_runs(
    block: Block, given: dict[str, Any], one_case: flashproof.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One verification of one case stands for all that the blocks ask for."""
    signature = inspect.signature(flashproof.verify)

    def verify(*values: Any, **keywords: Any) -> flashproof.Result:
        signature.bind(*values, **keywords)
        return one_case

    monkeypatch.setattr(flashproof, "verify", verify, raising=False)
    with unchanged_limits() if "torch._dynamo" in block.text else nullcontext():
        exec(compile(block.text, str(block), "exec"), dict(given))
