"""How long Hypothesis searches: `--hypothesis-profile dev | ci | thorough`. dev and ci draw the same cases every time, thorough new ones."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = 10  # per search, implementation and dtype; the interpreter takes about a second for each
THOROUGH_EXAMPLES = 5000

settings.register_profile("dev", max_examples=EXAMPLES)
settings.register_profile("thorough", max_examples=THOROUGH_EXAMPLES)

PHASES = (Phase.generate, Phase.target, Phase.shrink)  # to find out only whether there is a case that fails, the last is left out

Test = TypeVar("Test", bound=Callable[..., None])


def search(test: Test) -> Test:
    """Applies the profile of this run to a search over cases.

    Deadlines are off, since a first call may compile a kernel. No database: an example of one kernel would be replayed on the next; what is found is
    pinned as a line of a grid.
    """
    thorough = settings.get_current_profile_name() == "thorough"
    return settings(
        max_examples=THOROUGH_EXAMPLES if thorough else EXAMPLES,
        derandomize=not thorough,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        phases=PHASES,
    )(test)
