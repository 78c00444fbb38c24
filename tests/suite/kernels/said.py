"""What compilers say of the kernels as they stand, kept in the repository: to ask them anew takes twenty minutes.

Each answer is kept under a hash of all that it depends on: sources, options, target, the compilers' versions. If one of
these has changed, the compiler is asked. Each day it is also asked about another tenth of what is kept, and must say the
same. What it said earlier on this machine, of the same sources, stands in the user's cache folder and counts as asking.
`python -m flashproof.tests.suite.kernels` asks about what is not kept, and writes the file; with `--all` it asks about
everything.
"""

import datetime
import gzip
import json
import zlib
from functools import cache
from pathlib import Path

PLACE = Path(__file__).resolve().parents[3] / "reports" / "compilers.json.gz"
DAYS = 10  # in which everything is asked again
ADVICE = "run `python -m flashproof.tests.suite.kernels` to write the file anew"

heard: dict[str, str] | None = None  # what is known by now, while the file is written anew
asks_all = False  # whether the file is written without what it holds


def recall(key: str) -> str | None:
    """What is kept under a hash in hexadecimal digits; None where the compiler has to be asked, because nothing is kept or because it is its day."""
    if heard is not None:
        kept = None if asks_all else _kept(PLACE).get(key)
        return heard.setdefault(key, kept) if kept is not None else None
    if int(key, 16) % DAYS == datetime.datetime.now(datetime.UTC).toordinal() % DAYS:
        return None
    return _kept(PLACE).get(key)


def hold(key: str, answer: str) -> None:
    """Holds what a compiler has said against what is kept. Raises ValueError where that is something else."""
    if heard is not None:
        heard[key] = answer
    elif (kept := _kept(PLACE).get(key, answer)) != answer:
        raise ValueError(f"{PLACE.name}: holds {kept!r} under {key}, but the compiler now says {answer!r}; {ADVICE}")


def write(answers: dict[str, str]) -> None:
    """Writes the file: answers by their keys."""
    PLACE.write_bytes(gzip.compress(json.dumps(answers, indent=0, sort_keys=True).encode(), mtime=0))


@cache
def _kept(place: Path) -> dict[str, str]:
    try:
        answers: dict[str, str] = json.loads(gzip.decompress(place.read_bytes())) if place.exists() else {}
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{place.name}: cannot be read ({type(error).__name__}: {error}); {ADVICE}") from error
    return answers
