"""How pytest-xdist deals the checks to its processes where there is a GPU.

Most of the time goes into compiling kernels. Processes that run the same implementation at the same time compile the
same kernels, each for itself. So all checks of an implementation in one dtype go to one process. If a kernel is
compiled for each call, its checks have few compilations in common, and each check goes to any process.
"""

import re
from collections.abc import Collection
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

_ON_A_GPU = re.compile(r"\[((.+)-\w+)-cuda\]$")


class ByImplementation(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process the checks of one implementation and dtype, in the order of the tests.

    spread: the names of the implementations whose checks go to any process.
    """

    def __init__(self, config: Any, log: Any = None, spread: Collection[str] = ()) -> None:
        super().__init__(config, log)
        self._spread = spread
        config.option.loadscopereorder = False  # the tests are in order: what takes longest comes first

    def _split_scope(self, nodeid: str) -> str:
        """The group of a test. A test of the suite itself is a group of its own."""
        found = _ON_A_GPU.search(nodeid)
        return found[1] if found and found[2] not in self._spread else nodeid

    def _reschedule(self, node: Any) -> None:
        """Gives a process more tests. One that replaces another gets none before it has collected them.

        The base class takes all processes as ready as soon as it knows as many collections as there are processes. It
        also counts the collections of those that have ended.
        """
        if node in self.registered_collections:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Takes back the tests of a process that has ended, and returns the one in which it died.

        The method of the base class deals out that test again, so it would kill one process after the other.
        """
        groups = self.assigned_work.pop(node)
        left = [(tests, test) for tests in groups.values() for test, is_done in tests.items() if not is_done]
        if not left:
            return None
        tests, died_in = left[0]
        tests[died_in] = True
        for group, tests in reversed(groups.items()):
            if not all(tests.values()):
                self.workqueue[group] = tests
                self.workqueue.move_to_end(group, last=False)  # those under way come first
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in
