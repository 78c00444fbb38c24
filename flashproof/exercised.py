"""What a run has to exercise: the options --require and --strict.

A run verifies what a kernel claims. A kernel that claims less, or that refuses cases, still passes. `--require` names
features that must have been verified, and `--strict` makes everything that a run could not verify a failure.
"""

from collections.abc import Callable, Iterable, Sequence

from flashproof.calling import GRADIENTS
from flashproof.cases import Case
from flashproof.impls.catalogue import close
from flashproof.impls.spec import DTYPES
from flashproof.reports.record import Judgement

Exercises = Callable[[Judgement, Case], bool]

FEATURES: dict[str, Exercises] = {
    "backward": lambda record, case: record.tensor in GRADIENTS,
    "causal": lambda record, case: case.mask != "full",
    "bottom_right": lambda record, case: case.mask == "causal-br",
    "scale": lambda record, case: case.scale is not None,
    "grouped_heads": lambda record, case: case.heads != case.kv_heads,
    "cross_lengths": lambda record, case: case.queries != case.keys,
    "dropout": lambda record, case: case.dropout > 0.0,
    "block_mask": lambda record, case: case.blocks is not None,
    "lse": lambda record, case: record.tensor == "lse",
    "strided": lambda record, case: any(layout != "contiguous" for layout in case.layouts),
    **{dtype: lambda record, case, dtype=dtype: case.dtype == dtype for dtype in DTYPES},  # type: ignore[misc]
}


def parse(given: Iterable[str]) -> list[str]:
    """The features that are required. given: words with commas between them.

    Raises ValueError for a feature that is not known.
    """
    words = [word.strip() for words in given for word in words.split(",") if word.strip()]
    for word in words:
        if word not in FEATURES:
            raise ValueError(f"{word!r} is not a feature{close(word, [*FEATURES])}; known are {', '.join(FEATURES)}")
    return list(dict.fromkeys(words))


class Exercised:
    """Which of the required features each implementation has passed with."""

    def __init__(self, required: Sequence[str]) -> None:
        self.required = required
        self._found: dict[str, set[str]] = {}

    def add(self, record: Judgement) -> None:
        """Counts a record."""
        found = self._found.setdefault(record.implementation, set())
        if record.status != "passed" or len(found) == len(self.required):
            return
        case = Case.parse(record.case)
        found.update(word for word in self.required if FEATURES[word](record, case))

    def missing(self, implementation: str) -> list[str]:
        """The required features that nothing passed with."""
        found = self._found.get(implementation, set())
        return [word for word in self.required if word not in found]
