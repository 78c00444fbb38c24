"""The arrays that the package contains are those that a run would build."""

from flashproof import arrays
from flashproof.tests.suite.space.arrays import spaces

ADVICE = "The arrays of the package are outdated. Run: python -m flashproof.tests.suite.space.arrays"


def test_the_package_contains_the_arrays_of_these_sources() -> None:
    assert {arrays.name_of(space.about()) for space in spaces()} == set(arrays.of_the_package()), ADVICE


def test_an_array_of_the_package_is_as_a_run_builds_it() -> None:
    """The smallest arrays. The digests of `test_case_set.py` are of cases from larger ones."""
    found = sorted({arrays.name_of(space.about()): space for space in spaces()}.items())
    smallest = sorted(found, key=lambda each: len(arrays.of_the_package()[each[0]].rows))[:3]
    for name, space in smallest:
        assert arrays.of_the_package()[name] == space.built_rows(), ADVICE
