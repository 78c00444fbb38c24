"""Known defects: how their file is read, the errors about it, and the message about a defect that is gone."""

from pathlib import Path

import pytest

from flashproof import defects
from flashproof.session import CATALOGUE_DEFECTS
from flashproof.tests.suite.command_line.test_cli import KERNELS, run

ENTRY = {
    "implementation": '"mine.py:right"',
    "device": '"cpu"',
    "dtypes": '["float32"]',
    "checks": '["contract/answers"]',
    "seen": '"a wrong answer"',
    "link": '"https://example.org/1"',
}

BROKEN_CHECK = '''
from flashproof import Subject, check, grids


@check("stability", grid=grids.lines("b1 h2 q20 k20 d16"))
def test_sinks(subject: Subject) -> None:
    """Raises after the kernel has failed."""
    subject.judge(subject.cases[0])
    raise LookupError("no such tile")
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with kernels, and with a pyproject.toml that names a file of known defects."""
    (tmp_path / "mine.py").write_text(KERNELS)
    (tmp_path / "pyproject.toml").write_text('[tool.flashproof]\nknown_defects = "known.toml"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entry(**changed: str) -> str:
    """Returns an entry with some fields changed. A field that is changed to an empty text is left out."""
    return (
        "\n".join(["[[defect]]", *(f"{name} = {value}" for name, value in (ENTRY | changed).items() if value)]) + "\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[defect]\n", "known.toml: cannot be read"),
        ('[[defects]]\nseen = "x"\n', r"known.toml: holds defects; give \[\[defect\]\] tables"),
        (entry(link=""), "known.toml, entry 1: the field link is missing; give implementation, device"),
        (
            entry() + entry(checks='"contract/answers"'),
            "known.toml, entry 2: checks is 'contract/answers'; give a list",
        ),
        (entry(seen="3"), "known.toml, entry 1: seen is 3; give a string"),
        (entry(device='"gpu"'), "known.toml, entry 1: device: 'gpu' is unknown; give cpu, cuda"),
        (entry(dtypes='["fp32"]'), "known.toml, entry 1: dtypes: 'fp32' is unknown; give float32"),
        (entry(dtype='"x"'), "known.toml, entry 1: there is no field 'dtype'; close: dtypes; give"),
        (
            entry(checks='["contract/answer"]'),
            "entry 1: checks: there is no check 'contract/answer'; close: contract/answers",
        ),
        (entry(checks='["answers"]'), "entry 1: checks: there is no check 'answers'"),
        (
            entry(implementation='"mine.py:rigth"'),
            "entry 1: implementation: mine.py does not define 'rigth'; close: right",
        ),
        (entry(implementation='"yours.py:right"'), "entry 1: implementation: there is no file 'yours.py'"),
        (entry(checks='["*"]'), r"entry 1: checks: there is no check '\*'"),
        (entry(where='"causal"'), "entry 1: where is 'causal'; give a table of factors and levels"),
        (
            entry(where='{masks = "causal"}'),
            "entry 1: where: there is no factor 'masks'; close: mask; give dtype, call",
        ),
        (entry(where='{mask = ["lower"]}'), "entry 1: where: mask has no level 'lower'; give full, causal, causal-br"),
        (entry(implementation='"tiled.fa22"'), "entry 1: implementation: 'tiled.fa22' is unknown; close: tiled.fa2"),
    ],
)
def test_what_cannot_be_read(project: Path, text: str, words: str) -> None:
    """The error names the file, the entry and the field, and says what to give instead."""
    path = project / "known.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        defects.check_names(defects.read(path))


def test_what_can_be_read(project: Path) -> None:
    """An entry may name a check of the project's own, which flashproof does not know.

    The known defects of the catalogue have names that exist.
    """
    path = project / "known.toml"
    path.write_text(entry(checks='["contract/answers", "stability/sinks"]', implementation='"./mine.py:wrong"'))
    found = defects.read(path)
    defects.check_names(found)
    assert [(one.implementation, one.place) for one in found] == [("mine.py:wrong", "known.toml, entry 1")]
    defects.check_names(defects.read(CATALOGUE_DEFECTS))


def test_a_defect_that_is_gone(project: Path) -> None:
    """If a known defect is gone, the run fails and says which entry to change. A missing file is an error."""
    words = ["mine.py:right", "-k", "contract/answers", "--dtype", "fp32", "--records", "run.jsonl"]
    status, said = run(project, *words)
    assert status == 4
    assert said.startswith("ERROR: [tool.flashproof] known_defects: there is no file ")
    (project / "known.toml").write_text(entry())
    status, said = run(project, *words)
    assert status == 1
    assert "\na known defect is gone: contract/answers passes mine.py:right in float32 on cpu\nremove" in said
    assert "from known.toml, entry 1\n" in said
    assert "XPASS" not in said


def test_an_exception_is_no_defect(project: Path) -> None:
    """A known defect is expected, but not an exception that ends its check: the check itself is then at fault."""
    (project / "known.toml").write_text(entry(implementation='"mine.py:wrong"', checks='["stability/sinks"]'))
    check, words = project / "test_sinks.py", ["--impl", "mine.py:wrong", "--dtype", "float32"]
    check.write_text(BROKEN_CHECK)
    status, said = run(project, *words, "test_sinks.py", module="pytest")
    assert status == 1
    assert "the check was ended by LookupError: no such tile" in said
    assert "1 failed" in said
    check.write_text(BROKEN_CHECK.replace("    raise", "    # raise"))
    assert "1 xfailed" in run(project, *words, "test_sinks.py", module="pytest")[1]


def test_a_defect_of_some_cases(project: Path) -> None:
    """Failures of the cases of an entry are expected, but not required. Failures of other cases are not expected."""
    mine = project / "mine.py"
    mine.write_text(
        mine.read_text() + "\n\ndef causal(query, key, value, is_causal=False):\n"
        "    return (wrong if is_causal else right)(query, key, value, is_causal)\n"
    )
    words = ["mine.py:causal", "-k", "over_lengths or answers", "--dtype", "fp32", "--records", "run.jsonl"]
    for levels, wanted, said in (
        ('{mask = "causal"}', 0, "2 with a known defect"),
        ('{mask = "full"}', 1, "a wrong answer"),
    ):
        (project / "known.toml").write_text(entry(implementation='"mine.py:causal"', checks='["*"]', where=levels))
        status, text = run(project, *words)
        assert status == wanted, text
        assert (said in text) == (wanted == 0), text
