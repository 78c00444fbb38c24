"""The page of the mutants: which judge rejects each mutant, which check is the first, and which right kernels fail."""

from pathlib import Path

import pytest

from flashproof.reports import charts, mutants
from flashproof.reports.evidence import Mutation, gather
from flashproof.reports.pages import write_site
from flashproof.reports.record import Trial
from flashproof.tests.suite.reports import building
from flashproof.tests.suite.reports.building import environment, judgement


@pytest.fixture
def found(tmp_path: Path) -> Mutation:
    mutation = gather([building.write(tmp_path / "run.jsonl", [environment(), *building.mutation()])]).mutation
    assert mutation
    return mutation


def test_a_row_knows_which_check_was_first(found: Mutation) -> None:
    rows = {row.specimen.name: row for row in mutants.rows(found)}
    assert rows["tail-unmasked"].first == {"accuracy/forward"}
    assert rows["delta-omitted"].first == {"gradients/backward"}
    assert not rows["delta-rounded"].is_killed
    assert not rows["delta-rounded"].counts


def test_a_cell_sums_up_the_dtypes(found: Mutation) -> None:
    cells = {row.specimen.name: row.cells for row in mutants.rows(found)}
    assert cells["tail-unmasked"]["accuracy/forward", "ours"].verdict == "rejected"
    assert cells["tail-unmasked"]["gradients/backward", "ours"].verdict == "in some dtypes"
    assert cells["delta-omitted"]["accuracy/forward", "ours"].verdict == "let through"
    assert cells["two-passes"]["allclose 1e-2", "theirs"].verdict == "false alarm"
    assert cells["two-passes"]["gradients/backward", "ours"].verdict == "not tried"
    assert cells["tiled.fa2"]["accuracy/forward", "ours"].verdict == "accepted"


def test_scores_count_mutants_and_false_alarms(found: Mutation) -> None:
    suite, checks, others = mutants.scores(found, mutants.rows(found))
    assert (suite.killed, suite.mutants, suite.alarms, suite.right) == (2, 2, (), 2)
    assert [(score.killed, score.first, score.named) for score in checks] == [(1, 1, 1), (2, 1, 1)]
    assert suite.told == 2
    assert [score.told for score in others] == [1]
    assert [(score.killed, score.mutants, score.alarms, score.right) for score in others] == [
        (1, 2, (("two-passes", ("float32",)),), 1)
    ]


def test_a_rule_that_rejects_the_original_too_tells_nothing(tmp_path: Path) -> None:
    alarm = Trial(
        run=building.CPU, specimen="tiled.fa2", judge="allclose 1e-2", inputs="theirs", dtype="float32", rejected=True
    )
    mutation = gather([building.write(tmp_path / "run.jsonl", [environment(), *building.mutation(), alarm])]).mutation
    assert mutation
    (score,) = mutants.scores(mutation, mutants.rows(mutation))[2]
    assert (score.killed, score.told) == (1, 0)


def test_the_later_run_counts(tmp_path: Path) -> None:
    first = building.write(tmp_path / "first.jsonl", [environment(), *building.mutation()])
    later = building.write(
        tmp_path / "later.jsonl", [environment("later", date="2026-03-09T10:00:00Z"), *building.mutation("later")[:4]]
    )
    mutation = gather([later, first]).mutation
    assert mutation
    assert mutation.environment.run == "later"
    assert [specimen.name for specimen in mutation.specimens] == ["tail-unmasked"]


def test_the_index_leads_to_the_page_and_it_tells_all(tmp_path: Path) -> None:
    site = write_site(
        [building.write(tmp_path / "run.jsonl", [environment(), judgement(), *building.mutation()])], tmp_path / "site"
    ).parent
    assert 'href="mutants.html"' in (site / "index.html").read_text()
    page = (site / "mutants.html").read_text()
    for words in (
        "2 of 2 kernels",
        "tail-unmasked in words",
        "&lt;b&gt;old&lt;/b&gt;",
        "inside the bound",
        "A tutorial",
        "1 of 2",
        "two properties meet",
        "299 (99 %)",
    ):
        assert words in page


def test_without_mutants_there_is_no_page(tmp_path: Path) -> None:
    site = write_site([building.write(tmp_path / "run.jsonl", [environment(), judgement()])], tmp_path / "site").parent
    assert not (site / "mutants.html").exists()
    assert "mutants.html" not in (site / "index.html").read_text()


@pytest.mark.parametrize("count", [3, 150, 300])
def test_the_matrix_fits_the_page_with_its_figures(count: int) -> None:
    score = charts.Score("all checks", f"{count} of {count}", ("told",) * count)
    svg = charts.kills([("masks", count)], [], [("flashproof", [score])], "mutants")
    width = float(svg.split('viewBox="0 0 ')[1].split()[0])
    figure = float(svg.split(f">{score.figure}<")[0].rpartition('x="')[2].split('"')[0])
    assert figure + charts.LETTER * len(score.figure) <= width <= charts.WIDEST
