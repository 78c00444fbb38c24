"""The legend of the words of cases: it knows every word, and explains those that stand in a text."""

from flashproof.cases import _WORDS, Case
from flashproof.reports import glossary


def test_every_word_of_a_case_is_explained() -> None:
    numbered = ("blocks0.5", "blocks0.5one", "x16", "shift-100", "scale0.3", "scale2int", "scale0.7numpy", "dropout0.1")
    assert [word for word in (*_WORDS, *numbered, "seed7") if not glossary.explained(word)] == []
    assert glossary.explained("quick") == ""


def test_the_words_of_a_text_are_explained_once() -> None:
    cases = [
        Case(heads=4, kv_heads=2, queries=300, keys=200, dim=128, mask="causal-br", seed=3),
        Case(layouts=("columns", "columns", "contiguous", "pooled"), magnitude=16.0, spelled=True, seed=4),
    ]
    found = glossary.entries([f"again: pytest --impl f --case '{case}'" for case in (*cases, cases[0])])
    words = [word for each, _ in found for word in each]
    assert found[0] == (
        ["b1 h4/2 q300 k200 d128"],
        "batch 1, heads 4 of the query and 2 of key and value, queries 300, keys 200, head dim 128",
    )
    assert words[1:] == [
        *("float32", "full", "causal-br", "normal", "k.columns", "q.columns", "do.pooled", "spelled", "x16", "seed3"),
        *("q.", "k.", "do."),
    ]
    assert glossary.entries(["masks/hidden: 12 random cases"]) == []
