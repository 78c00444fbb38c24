"""Builds the arrays that the package contains: flashproof/arrays.json.gz.

    python -m flashproof.tests.suite.space.arrays

They take a minute. They are outdated after any change of the sources that build them, and then no run uses them.
"""

import gzip
from collections.abc import Iterator

import msgspec

from flashproof import arrays
from flashproof.impls import catalogue
from flashproof.impls.spec import DTYPES
from flashproof.loading import load
from flashproof.signatures import of_callable
from flashproof.space import Space, space_of


def _as_sdpa(query, key, value, *, is_causal=False, scale=None, enable_gqa=False): ...  # type: ignore[no-untyped-def]
def _without_groups(query, key, value, *, is_causal=False, scale=None): ...  # type: ignore[no-untyped-def]
def _causal(query, key, value, *, is_causal=False): ...  # type: ignore[no-untyped-def]


def spaces() -> Iterator[Space]:
    """The spaces whose arrays the package contains.

    They are those of each implementation, and of functions with usual signatures, on a CPU.
    """
    for implementation in map(load, catalogue.names(["*"])):
        if "cpu" in implementation.supports.devices:
            yield space_of(implementation, DTYPES, "cpu")
    for function in (_as_sdpa, _without_groups, _causal):
        yield space_of(of_callable(function, "any"), DTYPES, "cpu")
        yield space_of(of_callable(function, "any"), DTYPES, "cpu", effort="quick")


def main() -> None:
    found = {arrays.name_of(space.about()): space for space in spaces()}
    rows = {name: found[name].built_rows() for name in sorted(found)}
    arrays.OF_THE_PACKAGE.write_bytes(gzip.compress(msgspec.json.encode(rows), mtime=0))


if __name__ == "__main__":
    main()
