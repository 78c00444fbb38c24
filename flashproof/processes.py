"""The processes that run checks: those of pytest-xdist for the catalogue, or workers for external kernels."""

from itertools import pairwise

import pytest
import torch

from flashproof.loading import is_external
from flashproof.reports import wording
from flashproof.reports.record import Judgement
from flashproof.sandbox.pool import Pool
from flashproof.session import POOL_SIZE, PoolRun, Session, left_by_a_crash, processes, target_of


def choose(config: pytest.Config) -> None:
    """Gives a run with an external kernel as many workers as -n says. With -n 0, everything runs in this process."""
    options = config.option
    asked = getattr(options, "numprocesses", None)
    external = any(is_external(name) for name in options.flashproof_impl)
    if not external or asked == 0 or options.collectonly or config.getoption("usepdb") or options.flashproof_worker:
        return
    count = asked if isinstance(asked, int) else processes()
    config.stash[POOL_SIZE] = 0 if config.getoption("benchmark_only", default=False) else count
    options.numprocesses = 0


def automatic(config: pytest.Config) -> int:
    """The number of processes of `-n auto`: one for each core.

    It is 0 for single cases, and for benchmarks, which need the machine for themselves.
    """
    chosen = getattr(config.option, "flashproof_case", None)
    if config.getoption("benchmark_only", default=False) or chosen or config.option.collectonly:
        return 0
    # Neighbouring tests stay together and share the exact results that a process caches. On a GPU, `scheduling` assigns
    # tests.
    config.option.dist = "worksteal"
    return processes()


def run_in_workers(session: Session, tests: pytest.Session) -> bool | None:
    """Runs the checks in workers if the run has workers. In a spawned worker, serves the pool."""
    if session.worker:
        session.worker.serve(tests)
        return True
    if not session.uses_pool or tests.testsfailed:
        return None
    spawns = torch.cuda.is_available() or session.config.option.flashproof_spawn
    checks = [item for item in tests.items if target_of(item) is not None]
    Pool(tests, checks, PoolRun(session), count=session.pool_size, spawns=spawns).run()
    own = [item for item in tests.items if target_of(item) is None]  # tests of the project, run if paths are given
    for item, following in pairwise([*own, None]):
        assert item
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if tests.shouldfail:
            raise tests.Failed(tests.shouldfail)
    return True


def complete_crash(session: Session, test: str, report: pytest.TestReport) -> None:
    """Completes the report of a check in which a process of pytest-xdist died, from the journal of the check."""
    found = left_by_a_crash(session, test)
    if not found:
        return
    for record in found:
        session.record(record)
    failures = [one for one in found if isinstance(one, Judgement) and one.status in ("failed", "known defect")]
    known = all(one.status == "known defect" for one in failures)
    words = [wording.failure_block(one) for one in failures]
    report.when, report.outcome = "call", "skipped" if known else "failed"
    report.location = (report.location[0], None, test.rpartition("::")[2])
    report.longrepr = "\n\n".join(
        [*words, "the process cannot be used any more: the other cases of this check were left out"]
    )
    if known:
        report.wasxfail = failures[-1].message
