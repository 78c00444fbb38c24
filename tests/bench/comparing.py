"""Measures an implementation in a setting: it is judged, and then timed in turn with the fastest peer."""

from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any

import torch

from flashproof import environment, loading
from flashproof.cases import Case, not_claimed
from flashproof.impls import catalogue
from flashproof.impls.spec import Device, Implementation
from flashproof.reports.speed import ceiling
from flashproof.tests.bench import calls, timing
from flashproof.tests.bench.calls import Calls, Direction, Given


class Wrong(Exception):
    """The implementation is outside its bound, and is not timed. The message is what `flashproof.judge` says."""


@dataclass(frozen=True)
class Measured:
    """What was measured: the seconds of each round, and what `extra_info` holds."""

    seconds: list[float]
    about: dict[str, Any]


def measure(
    implementation: Implementation, case: Case, direction: Direction, device: Device, budget: float
) -> Measured:
    """Judges an implementation and measures it, in turn with the fastest peer. budget: the seconds of all rounds.

    Raises `Wrong`, torch.OutOfMemoryError, and what the implementation raises.
    """
    given = _given(case, device)
    own = Calls(implementation, given)
    verdicts = own.judge(direction)
    if not verdicts.passed:
        raise Wrong(str(verdicts))
    memory = own.peak_bytes(direction)
    peer = fastest_peer(given, direction)
    beside = Calls(loading.load(peer.name), replace(given, block_mask=peer.block_mask)).of(direction)
    mine, theirs = timing.in_turn(own.of(direction), beside, device, budget)
    tflops = calls.operations(given, direction) / median(mine) / 1e12
    name = environment.device_name(device)
    peak = ceiling(name, case.dtype)
    return Measured(
        mine,
        {
            "implementation": implementation.name,
            "device": name,
            "clock": "events of the device" if device == "cuda" else "the process",
            "l2": "cold" if device == "cuda" else "as it was",
            "tflops": tflops,
            "share_of_peak": peak and tflops / peak,
            "baseline": peer.name,
            "baseline_seconds": median(theirs),
            "ratio": median(theirs) / median(mine),
            "peak_memory": memory,
            "matrix_bytes": case.batch * case.heads * case.queries * case.keys * given.tensors[0].element_size(),
            "kept": given.share,
            "rho": {tensor: verdict.worst_rho for tensor, verdict in verdicts.items()},
        },
    )


@lru_cache(maxsize=1)
def _given(case: Case, device: Device) -> Given:
    return calls.given(case, device)


@dataclass(frozen=True, eq=False)
class Peer:
    """A peer, and the block mask that it is given. It is None if no peer takes block masks."""

    name: str
    block_mask: torch.Tensor | None


@lru_cache
def fastest_peer(given: Given, direction: Direction) -> Peer:
    """The fastest peer on some tensors, as it is measured here.

    Where no peer takes block masks, it is the fastest without the mask. A peer that is compiled for each kind of call
    counts only where no other takes the case.

    Raises NotImplementedError if there is none.
    """
    if given.block_mask is not None and not _claiming(given):
        given = replace(given, case=replace(given.case, blocks=None), block_mask=None)
    every = {name: loading.load(name) for name in _claiming(given)}
    ready = [name for name in every if every[name].slow(given.device) is None]
    for names in (ready, list(every)):
        times = {name: seconds for name in names if (seconds := _second(every[name], given, direction))}
        if times:
            return Peer(min(times, key=times.__getitem__), given.block_mask)
    raise NotImplementedError(f"no peer takes {given.case}")


def _claiming(given: Given) -> list[str]:
    """The peers that run on the device and claim the case."""
    found = []
    for name in catalogue.PEERS:
        peer = loading.load(name)
        if given.device in peer.supports.devices and peer.missing(given.device) is None:
            found += [name] if not_claimed(given.case, peer.supports) is None else []
    return found


def _second(peer: Implementation, given: Given, direction: Direction) -> float | None:
    """The seconds of a second call. None if the peer refuses the call, or if it does not fit into memory."""
    try:
        call = Calls(peer, given).of(direction)
        return timing.seconds([call], given.device, 2)[0][1]
    except NotImplementedError:
        return None
    except torch.OutOfMemoryError:
        pass  # its traceback keeps the tensors of the call alive until here
    torch.cuda.empty_cache()
    return None
