"""Measures the speed of every implementation, forward and backward, beside the fastest kernel of PyTorch.

The command is `pytest --benchmark-only`. `--impl` and `--dtype` narrow it, and `--thorough` adds lengths, head dims and
dtypes. On a machine with a GPU, the GPU is timed, and elsewhere, or with `--device cpu`, the CPU (`settings`).

Every implementation is first judged on the tensors of the setting. One that fails is not timed. Then each round times
the fastest peer and the implementation in turn (`timing.in_turn`). On a GPU, the device measures each time between two
events, with a cold L2 cache. The table groups implementations by direction and setting. `extra_info` in the JSON holds
throughput, its share of the chip's peak, the ratio to the peer, peak memory and rho.
"""

import warnings

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch._functorch import config as functorch

from flashproof import loading
from flashproof.cases import Case
from flashproof.impls.peers import flex
from flashproof.impls.spec import Dtype
from flashproof.registry import checks
from flashproof.session import STATE, Session
from flashproof.targets import Target
from flashproof.tests.bench import settings
from flashproof.tests.bench.calls import DIRECTIONS, Direction
from flashproof.tests.bench.comparing import Wrong, measure
from flashproof.tests.bench.timing import CLOCK, report

BUDGETS = {False: 0.3, True: 1.0}  # seconds for the rounds of a benchmark, by `--thorough`
DEFECTS = ("accuracy/forward", "gradients/backward")  # the checks whose known defects excuse a wrong answer here


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a benchmark for each setting, direction and implementation that claims it, and one for each absence."""
    if "line" not in metafunc.fixturenames:
        return
    session = metafunc.config.stash[STATE]
    metafunc.parametrize(("name", "dtype", "direction", "line"), parameters(session))


def parameters(session: Session) -> list[object]:
    """The benchmarks of a run. An implementation that cannot run here is one that is skipped with the reason."""
    if not session.times:
        return [_skipped("none", settings.NOT_ASKED)]
    device = settings.device_of(session.selection)
    targets = [target for target in session.selection.targets if target.device == device]
    missing = {target.name: target.missing for target in session.selection.targets if target.missing}
    timed = [
        (case, target, direction)
        for target in targets
        if target.implementation and not target.missing
        for case in settings.settings_of(target.implementation, target.dtype, session.selection)
        for direction in DIRECTIONS
        if direction == "forward" or target.implementation.supports.backward
    ]
    order = {case: place for place, case in enumerate(dict.fromkeys(case for case, _, _ in timed))}
    timed.sort(key=lambda found: (order[found[0]], found[2] == "backward"))
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [
        pytest.param(target.name, target.dtype, direction, _words(case), marks=marks)
        for case, target, direction in timed
    ] + [_skipped(name, reason) for name, reason in missing.items()]


def _skipped(name: str, reason: str) -> object:
    return pytest.param(name, "", "", "", marks=pytest.mark.skip(reason=reason), id=name)


def _words(case: Case) -> str:
    """The line of a setting without what is the same in all settings."""
    left_out = {case.dtype, "full", "normal", "seed0"}
    return " ".join(word for word in str(case).split() if word not in left_out)


@pytest.mark.benchmark(timer=CLOCK)
def test_speed(
    benchmark: BenchmarkFixture,
    request: pytest.FixtureRequest,
    name: str,
    dtype: Dtype,
    direction: Direction,
    line: str,
) -> None:
    """Measures the seconds of one call. For the backward, only the computation of the gradients is timed."""
    session: Session = request.config.stash[STATE]
    device, case = settings.device_of(session.selection), Case.parse(f"{line} {dtype}")
    implementation = loading.load(name)
    benchmark.group = f"{direction}, {line} {dtype}"
    try:
        # torch.compile may warn about itself, and compiles backwards that run once, unless told otherwise.
        with warnings.catch_warnings(), functorch.patch(donated_buffer=False), flex.as_users_call():
            warnings.simplefilter("ignore")
            measured = measure(implementation, case, direction, device, BUDGETS[session.selection.thorough])
    except Wrong as wrong:
        target = Target(name, dtype, device, implementation, None)
        if defect := next(filter(None, (session.defect(checks()[check], target) for check in DEFECTS)), None):
            pytest.xfail(f"not timed, because of a known defect: {defect.seen} ({defect.link})")
        pytest.fail(f"not timed, because it is wrong in '{case}':\n{wrong}", pytrace=False)
    except torch.OutOfMemoryError:
        pytest.skip("memory: the call does not fit")
    except NotImplementedError as refusal:
        pytest.skip(f"refused: {refusal}")
    report(benchmark, measured.seconds)
    benchmark.extra_info |= measured.about
