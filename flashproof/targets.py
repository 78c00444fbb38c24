"""Targets: what `--impl` selects. The implementations of a run, with their dtypes and devices.

`flashproof.loading` turns a name into an implementation.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashproof.impls import catalogue
from flashproof.impls.spec import Device, Dtype, Implementation
from flashproof.loading import is_external, load, make_importable
from flashproof.sandbox.process_state import FILTERS, left_alone


@dataclass(frozen=True)
class Target:
    """One implementation, dtype and device for a check, or the reason why the implementation cannot run here."""

    name: str
    dtype: Dtype
    device: Device
    implementation: Implementation | None
    missing: str | None  # why the implementation cannot run here

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.device}"


@dataclass(frozen=True)
class Loaded:
    """The result of loading a name."""

    name: str
    implementation: Implementation | None
    missing: str | None  # the backend that is not installed, if there is no implementation
    changed: tuple[str, ...]  # global state that the import changed, and that was restored

    @property
    def is_external(self) -> bool:
        """Whether the implementation is not one of the catalogue."""
        return is_external(self.name)


def load_selected(names: Sequence[str]) -> list[Loaded]:
    """Loads what names and globs select, each once. Without names, loads the whole catalogue.

    If the backend of a catalogue kernel is missing, the kernel does not run, and this is not an error. In all other
    cases, the function raises what `load` raises.
    """
    if any(map(is_external, names)):
        make_importable(os.getcwd())  # as for `python -m pytest`
    chosen: list[str] = []
    for pattern in names or ["*"]:
        chosen += [pattern] if is_external(pattern) else catalogue.names([pattern])
    return [_load_one(name) for name in dict.fromkeys(chosen)]


def _load_one(name: str) -> Loaded:
    missing = None
    with warnings.catch_warnings(), left_alone() as changed:
        warnings.simplefilter("ignore")  # a file may warn during its import, and a warning is an error in this suite
        try:
            implementation = replace(load(name), name=name)  # a run uses the name that loads it again
            if is_external(name):
                implementation = replace(implementation, slow=lambda device: None)
        except ImportError as error:
            if is_external(name):
                raise
            implementation, missing = None, f"{error.name or name}: not installed"
    return Loaded(name, implementation, missing, tuple(setting for setting in changed if setting != FILTERS))


def targets_of(loaded: Loaded, dtypes: Sequence[Dtype], device: Device | None) -> list[Target]:
    """The targets of an implementation: its claimed dtypes and devices among those that are asked for."""
    found = []
    implementation = loaded.implementation
    for where in _devices(implementation, device):
        missing = loaded.missing if implementation is None else implementation.missing(where) or _no_device(where)
        claimed = [dtype for dtype in dtypes if implementation is None or dtype in implementation.supports.dtypes]
        found += [Target(loaded.name, dtype, where, implementation, missing) for dtype in claimed]
    return found


def _devices(implementation: Implementation | None, asked: Device | None) -> list[Device]:
    claimed: list[Device] = list(implementation.supports.devices) if implementation else ["cpu"]
    if asked:
        return [asked] if asked in claimed else []
    if torch.cuda.is_available():
        return [
            device
            for device in claimed
            if implementation is None or device == "cuda" or implementation.missing(device) is None
        ]
    return [device for device in claimed if device == "cpu"] or claimed


def _no_device(device: Device) -> str | None:
    return "CUDA: no device" if device == "cuda" and not torch.cuda.is_available() else None
