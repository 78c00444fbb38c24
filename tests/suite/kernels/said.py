"""Keeps the answers of the compilers about the current kernels in the repository. To ask again takes twenty minutes.

Each answer is kept under a hash of everything that it depends on: sources, options, target and versions of the
compilers. If one of these has changed, the compiler is asked. In addition, the compiler is asked each day about a
different tenth of the kept answers, and must repeat them. The user's cache folder holds the answers that compilers gave
earlier on this machine for the same sources. Such an answer counts as asking.

`python -m flashproof.tests.suite.kernels` asks about everything that is not kept, and writes the file. With `--all`, it
asks about everything.
"""

import datetime
import gzip
import json
import zlib
from functools import cache
from pathlib import Path

PLACE = Path(__file__).resolve().parents[3] / "reports" / "compilers.json.gz"
DAYS = 10  # after so many days, every answer has been asked for again
ADVICE = "run `python -m flashproof.tests.suite.kernels` to write the file anew"

heard: dict[str, str] | None = None  # the answers so far, while the file is being rewritten
asks_all = False  # whether a rewrite ignores the kept answers


def recall(key: str) -> str | None:
    """Returns the kept answer, or None if the compiler must be asked.

    The compiler must be asked if no answer is kept, or if today is the day of this answer.

    key: a hash in hexadecimal digits.
    Raises ValueError if the file cannot be read.
    """
    if heard is not None:
        kept = None if asks_all else _kept(PLACE).get(key)
        return heard.setdefault(key, kept) if kept is not None else None
    if int(key, 16) % DAYS == datetime.datetime.now(datetime.UTC).toordinal() % DAYS:
        return None
    return _kept(PLACE).get(key)


def hold(key: str, answer: str) -> None:
    """Compares an answer of a compiler with the kept one. Raises ValueError if they differ.

    While the file is being rewritten, the answer is collected instead.
    """
    if heard is not None:
        heard[key] = answer
    elif (kept := _kept(PLACE).get(key, answer)) != answer:
        raise ValueError(f"{PLACE.name}: holds {kept!r} under {key}, but the compiler now says {answer!r}; {ADVICE}")


def write(answers: dict[str, str]) -> None:
    """Writes the file. answers: by their keys."""
    PLACE.write_bytes(gzip.compress(json.dumps(answers, indent=0, sort_keys=True).encode(), mtime=0))


@cache
def _kept(place: Path) -> dict[str, str]:
    try:
        answers: dict[str, str] = json.loads(gzip.decompress(place.read_bytes())) if place.exists() else {}
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{place.name}: cannot be read ({type(error).__name__}: {error}); {ADVICE}") from error
    return answers
