"""`python -m flashproof.reports RECORDS... -o DIR` merges the records of several runs or machines into one site."""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from flashproof.reports.evidence import gather

PROGRAM = "python -m flashproof.reports"


def merge(records: Sequence[Path], output: Path, program: str = PROGRAM) -> int:
    """Writes the site and prints the path of its index.

    Records that cannot be read are left out, and a line on stderr says which and why. Files that end in .json are
    measured speeds, from pytest-benchmark.

    Returns the exit status. It is 0, or 1 if something was left out. It is 2 if nothing is left, or a package is not
    installed; then no site is written.
    """
    if output.exists() and not output.is_dir():
        return _fail(program, f"--output {output}: is a file; give a directory")
    try:
        from flashproof.reports.pages import write_pages
    except ImportError as error:
        return _fail(program, f"{error.name} is not installed; pip install 'flashproof[report]' installs it")
    from flashproof.reports import speed, training

    collects = gc.isenabled()
    gc.disable()  # the records live until the end, and the collector would visit all of them again and again
    try:
        files, damaged = files_of(records), list[str]()
        timed = [path for path in files if path.suffix == ".json"]
        timings = speed.latest([*speed.committed(), *(timing for path in timed for timing in speed.read(path))])
        steps = training.latest([*training.committed(), *(step for path in timed for step in training.read(path))])
        evidence = gather([path for path in files if path not in timed], damaged)
        if damaged and not evidence.environments:
            return _fail(program, "\n".join(damaged))
        index = write_pages(evidence, output, timings, damaged, steps)
    except (OSError, ValueError) as error:
        return _fail(program, str(error))
    finally:
        if collects:
            gc.enable()
    for words in damaged:
        print(f"{program}: left out: {words}", file=sys.stderr)
    print(index)
    return 1 if damaged else 0


def files_of(places: Sequence[Path]) -> list[Path]:
    """The given files, and every record file below the given folders.

    Raises ValueError for a folder that holds no record files.
    """
    found: list[Path] = []
    for place in places:
        inside = [path for path in sorted(place.rglob("*")) if path.name.endswith((".jsonl", ".jsonl.gz"))]
        if place.is_dir() and not inside:
            raise ValueError(f"{place}: is a folder that holds no records (*.jsonl, *.jsonl.gz)")
        found += inside if place.is_dir() else [place]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and merges. Returns the exit status of `merge`."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Makes one HTML report of the records of one or several runs. It opens offline and needs no GPU.",
    )
    parser.add_argument(
        "records",
        nargs="+",
        type=Path,
        metavar="RECORDS",
        help="record files (JSON lines), as a run writes them, or folders of them",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="where the site goes; DIR/index.html is its first page",
    )
    options = parser.parse_args(arguments)
    return merge(options.records, options.output)


def _fail(program: str, message: str) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
