"""SARIF: the failures of a run in the format that code scanning reads, beside the annotations of `reports.github`.

There is one result for each failed check, dtype and device of an implementation. Its place is the line that the failure
names, or else the line that defines the kernel.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from flashproof.reports import wording
from flashproof.reports.record import Judgement

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
HELP = "https://github.com/flashproof/flashproof/blob/main/docs/failures.md"
Place = tuple[str, int]  # a file, relative to the root of the repository, and a line


def log(
    groups: Sequence[Sequence[Judgement]],
    places: Sequence[Place | None],
    sentences: Mapping[str, str],
    *,
    ended: bool,
    version: str = "",
) -> dict[str, Any]:
    """A SARIF log of one run.

    groups: the failures of each check, the worst first in each. places: the place of each group, if the repository has
    one. sentences: what a check asks, by its name. ended: whether the run came to a verdict. version: of flashproof.
    """
    rules = list(dict.fromkeys(group[0].check for group in groups))
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "flashproof",
                        "informationUri": "https://github.com/flashproof/flashproof",
                        **({"version": version} if version else {}),
                        "rules": [_rule(name, sentences.get(name, "")) for name in rules],
                    }
                },
                "invocations": [{"executionSuccessful": ended}],
                "results": [
                    _result(group, rules.index(group[0].check), place)
                    for group, place in zip(groups, places, strict=True)
                ],
            }
        ],
    }


def _rule(name: str, sentence: str) -> dict[str, Any]:
    return {
        "id": name,
        "shortDescription": {"text": sentence or name},
        "helpUri": HELP,
        "defaultConfiguration": {"level": "error"},
    }


def _result(group: Sequence[Judgement], rule: int, place: Place | None) -> dict[str, Any]:
    worst = group[0]
    text = wording.failure_block(worst)
    if others := len(group) - 1:
        text += f"\nand {wording.plural(others, 'more failure')} of this check"
    result: dict[str, Any] = {
        "ruleId": worst.check,
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": text},
        # The same failure of the next commit has the same fingerprint, whatever its figures and its line are.
        "partialFingerprints": {
            "flashproof/v1": " ".join((worst.implementation, worst.check, worst.dtype, worst.device))
        },
    }
    # Code scanning takes no result without a place. A kernel outside the repository has its name for one.
    file, line = place or (worst.implementation, 1)
    artifact = {"uri": quote(file), "uriBaseId": "%SRCROOT%"}
    result["locations"] = [{"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}]
    return result
