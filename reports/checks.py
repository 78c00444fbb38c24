"""What each check asks, in one sentence: the first of its docstring.

The sentences come from the source of the checks, which is read and not run, because running it needs torch.
"""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from flashproof.reports.record import LAYERS, Judge

TESTS = Path(__file__).absolute().parents[1] / "tests"

LAYER_SENTENCES = {
    "contract": "A call is right however it is made: twice, in threads, compiled, under autocast, after other calls.",
    "accuracy": "Every element of out and LSE is as close to the exact result as the claimed arithmetic allows.",
    "gradients": "Every element of dQ, dK and dV is as close to the exact gradient as the claimed arithmetic allows.",
    "stability": "Scores stand where exponentials overflow or underflow: 11.09, 65504, 88.72, -103.97 and 128.",
    "masks": "What a mask hides changes nothing, and neither does memory outside of the tensors.",
    "properties": "Inputs whose exact answer is known without a reference, and identities of exact attention.",
    "memory": "Memory beyond inputs and outputs grows with the length, and not with its square.",
    "determinism": "The same call gives the same bits, and an entry of a batch gives the bits that it gives alone.",
}


@cache
def of_source(folder: Path = TESTS) -> dict[str, str]:
    """The first sentence of each check of flashproof by its name, "accuracy/forward"."""
    found: dict[str, str] = {}
    for layer in LAYERS:
        for path in sorted((folder / layer).glob("test_*.py")):
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and _is_check(node):
                    found[f"{layer}/{node.name.removeprefix('test_')}"] = first_sentence(ast.get_docstring(node) or "")
    return found


def sentences(judges: Iterable[Judge] = ()) -> dict[str, str]:
    """What each check asks. Checks that the source does not hold any more are explained by the records of judges."""
    told = {judge.name: first_sentence(judge.says) for judge in judges if judge.kind == "check"}
    return told | of_source()


def first_sentence(text: str) -> str:
    """The first sentence of a text, in one line."""
    words = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return words.partition(". ")[0].removesuffix(".") + "." if words else ""


def _is_check(node: ast.FunctionDef) -> bool:
    calls = [decorator.func for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id == "check" for call in calls)
