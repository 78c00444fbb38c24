"""`python -m reports RECORDS... -o DIR`: merges the records of several machines into one site."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashproof.reports.pages import write_site


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the site and prints where. Returns the exit status: 0, or 2 with a line on stderr that names the file at fault."""
    parser = argparse.ArgumentParser(
        prog="python -m reports", description="Makes one HTML accuracy report of the records of one or several runs. It opens offline and never needs a GPU."
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS", help="record files (JSON lines), as pytest writes them")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="where the site goes; DIR/index.html is its first page")
    options = parser.parse_args(arguments)
    if options.output.exists() and not options.output.is_dir():
        return _fail(f"--output {options.output}: is a file; give a directory")
    try:
        index = write_site(options.records, options.output)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    print(index)
    return 0


def _fail(message: str) -> int:
    print(f"reports: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
