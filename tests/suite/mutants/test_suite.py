"""Tests of the suite as a whole: what the mutants cover, what the last full run found, and where tolerances stand."""

import ast
import re

import pytest

from flashproof import registry
from flashproof.reports import mutants as tables
from flashproof.reports.evidence import Mutation, gather
from flashproof.tests.suite.mutants import __main__, mutant
from flashproof.tests.suite.mutants.mutant import ROOT

# The ids of all faults in BUGS.md, and the reasons why some of these faults have no mutant here.
IDS = {
    f"{letter}{number}"
    for letter, count in zip("ABCDEFGHIJKL", (3, 3, 4, 5, 5, 2, 5, 3, 1, 1, 1, 1), strict=True)
    for number in range(1, count + 1)
}
NOT_OF_A_DENSE_KERNEL = {
    "D5": "a fault of a verifier that shares the kernel's mask; the oracles share none",
    "I1": "offsets beyond 2^31 elements: no case of a CPU grid is that far",
    "K1": "a fault of the checker: tests/oracles and this directory are the negative controls",
}
# Checks that no mutant names, each with the reason.
NOT_NAMED = {
    "contract/stream": "of a GPU",
    "training/drift": "it says whether an error matters; tests/training holds its negative control",
    "masks/hidden_nan_changes_nothing": "claimed by no implementation that a mutant patches",
}
RECORDS = ROOT / "reports" / "records" / "mutants.jsonl.gz"


def test_there_are_enough_mutants() -> None:
    assert len([one for one in mutant.every() if not one.survives]) >= 60


@pytest.mark.parametrize("one", mutant.every(), ids=lambda one: one.name)
def test_every_patch_stands_once(one: mutant.Mutant) -> None:
    mutant.patched(one)
    assert one.survives or one.check in {*registry.checks(), mutant.ARRAY}


def test_every_real_fault_has_a_mutant() -> None:
    covered = set(re.findall(r"\b[A-L]\d\b", " ".join(one.origin for one in mutant.every())))
    assert covered | set(NOT_OF_A_DENSE_KERNEL) >= IDS


def test_a_name_that_no_specimen_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(["lazy-rescale-beyond-flot16"])
    assert ended.value.code == 2
    assert (
        "lazy-rescale-beyond-flot16: no specimen has this in its name; close: lazy-rescale-beyond-float16"
        in capsys.readouterr().err
    )


def last_run() -> Mutation:
    """Returns what the last full run found. Skips the test if no full run is committed."""
    if not RECORDS.exists():
        pytest.skip("Kill matrix: no full run is committed; `python -m flashproof.tests.suite.mutants` makes one")
    mutation = gather([RECORDS]).mutation
    assert mutation
    return mutation


def test_the_last_full_run_is_of_these_mutants_and_checks() -> None:
    """`python -m flashproof.tests.suite.mutants` makes a new full run."""
    run = last_run()
    judges = {judge.name for judge in run.judges if judge.kind == "check"}
    if lacking := set(registry.checks()) - judges:
        pytest.skip(
            f"Kill matrix: the last full run is older than {', '.join(sorted(lacking))}; "
            "`python -m flashproof.tests.suite.mutants` makes one"
        )
    assert {specimen.name for specimen in run.specimens if specimen.kind == "mutant"} == {
        one.name for one in mutant.every()
    }


def test_every_check_is_named_by_a_mutant() -> None:
    of_array = {name for name, check in registry.checks().items() if check.call}
    without = set(registry.checks()) - of_array - {one.check for one in mutant.every()}
    assert without <= set(NOT_NAMED), without


def test_the_last_full_run_rejected_every_mutant_and_nothing_right() -> None:
    run = last_run()
    suite, _, _ = tables.scores(run, tables.rows(run))
    assert (suite.killed, suite.alarms) == (suite.mutants, ())


def test_the_readme_tells_of_the_last_full_run() -> None:
    run = last_run()
    suite, _, rules = tables.scores(run, tables.rows(run))
    told = [rule.told for rule in rules if rule.judge and rule.judge.inputs == "theirs"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"rejected {suite.killed} of {suite.mutants} mutants and {len(suite.alarms)} of {suite.right} right kernels"
        in text
    )
    assert f"distinguished {min(told)} to {max(told)} of the mutants" in text


# ------------------------------------------------------------------------------------------------------ tolerances

# Files that may contain tolerances, each with the reason.
MAY = {
    "oracles/bounds.py": "the one place for them",
    "tests/suite/mutants/rules.py": "the rules of others, which are themselves on trial",
    "tests/suite/mutants/test_rules.py": "their known verdicts",
}
# Files in which numbers look like tolerances but are not, each with what they compare.
OTHER: dict[str, str] = {
    "flashproof/questions.py": "whether two scales are the same question",
    "reports/wording.py": "how many digits a figure is shown with",
    "reports/charts.py": "whether a place on an axis is written as a fraction",
    "reports/drawing.py": "how a number of a picture is written",
    "reports/example.py": "which judgement is a clear example",
    "tests/suite/reports/test_browser.py": "the formula of WCAG for the contrast of colours",
    "tests/suite/reports/test_speed.py": "a quotient of two figures, each as the page rounds it",
    "tests/suite/kernels/test_cuda_gpu.py": "seconds",
    "tests/suite/oracles/test_spread.py": "how far the model of the spread may be from what is measured of it",
}
KEYWORDS = {"atol", "rtol", "tol", "abs", "rel", "abs_tol", "rel_tol", "tolerance", "threshold"}
CALLS = {"allclose", "isclose", "assert_close", "approx", "assert_allclose"}


def tolerances(source: str) -> list[str]:
    """Returns everything in a source text that looks like a tolerance.

    Three things do: a keyword such as `atol` with a constant, a call of `allclose` or a similar function, and a
    comparison with a float constant whose magnitude is between 0 and 0.5.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in CALLS or any(
                word.arg in KEYWORDS and isinstance(word.value, ast.Constant) for word in node.keywords
            ):
                found.append(f"line {node.lineno}: {ast.unparse(node)[:100]}")
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                if isinstance(side, ast.Constant) and isinstance(side.value, float) and 0.0 < abs(side.value) < 0.5:
                    found.append(f"line {node.lineno}: {ast.unparse(node)[:100]}")
    return found


def test_no_tolerance_stands_outside_the_bounds() -> None:
    files = [
        path
        for folder in ("flashproof", "oracles", "impls", "tests", "reports")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    found = {
        str(path.relative_to(ROOT)): tolerances(path.read_text())
        for path in files
        if str(path.relative_to(ROOT)) not in MAY | OTHER
    }
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    ["torch.allclose(a, b)", "check(x, atol=1e-2)", "assert error < 1e-3", "assert 0.01 > error", "pytest.approx(3.0)"],
)
def test_the_scan_sees(line: str) -> None:
    assert tolerances(line)


@pytest.mark.parametrize("line", ["x < 1.0", "n == 0", "f(p=0.1)", "a <= b"])
def test_the_scan_leaves_in_peace(line: str) -> None:
    assert not tolerances(line)
