"""Speeds: timings of pytest-benchmark, and of the committed measurements, beside the accuracy of the same kernels."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).absolute().parent / "benchmarks"  # the committed measurements, in a clone

# Dense TFLOP/s of the tensor cores, from NVIDIA's data sheets of H100 SXM and H200 SXM. The most accurate way to
# multiply float32 numbers there takes six bfloat16 products; three of TF32, and the FMA units (66.9), are not faster.
_HOPPER = {"float16": 989.4, "bfloat16": 989.4, "float32": 989.4 / 6, "float8": 2 * 989.4}
CEILINGS = {"H200": _HOPPER, "H100": _HOPPER}
PRODUCTS = {"cuda.fa3_fp8": "float8"}  # implementations whose products are not in the dtype of their inputs


def ceiling(device: str, dtype: str) -> float | None:
    """The TFLOP/s that a chip cannot exceed in a dtype, where they are known. device: the name of the chip."""
    return next((peaks.get(dtype) for chip, peaks in CEILINGS.items() if chip in device), None)


class Group(NamedTuple):
    """What timings of different lengths share that may be compared. tokens: of a batch."""

    direction: str
    dtype: str
    causal: bool
    dim: int
    tokens: int
    heads: int

    def __str__(self) -> str:
        return f"{self.direction}, {self.dtype}, head dim {self.dim}{', causal' if self.causal else ''}"


@dataclass(frozen=True)
class Timing:
    """One measured speed.

    seconds: the median of one call. source: the file. date: when it was measured. baseline: the implementation that was
    timed in turn with it. ratio: the time of the baseline over this one. memory_bytes: the most bytes in use at once,
    beyond inputs and results. blocks: the share of the blocks that a block mask keeps; None without a block mask. note:
    what the source says about how it was measured.
    """

    implementation: str
    device: str
    dtype: str
    direction: str
    causal: bool
    length: int
    dim: int
    batch: int
    heads: int
    seconds: float
    tflops: float
    source: str
    date: str = ""
    baseline: str = ""
    ratio: float | None = None
    memory_bytes: int | None = None
    blocks: float | None = None
    note: str = ""

    @property
    def ceiling(self) -> float | None:
        """The TFLOP/s that the chip cannot exceed in the dtype of the products, where they are known."""
        return ceiling(self.device, PRODUCTS.get(self.implementation, self.dtype))

    @property
    def tokens(self) -> int:
        """The tokens of a batch."""
        return self.batch * self.length

    @property
    def group(self) -> Group:
        """What may stand in one chart over length."""
        return Group(self.direction, self.dtype, self.causal, self.dim, self.tokens, self.heads)

    @property
    def setting(self) -> tuple[object, ...]:
        """What two timings share that may be divided by one another."""
        return self.device, self.group, self.length, self.blocks

    @property
    def mask(self) -> str:
        """The mask in words."""
        return (
            f"{100 * self.blocks:.3g} % of blocks" if self.blocks is not None else "causal" if self.causal else "none"
        )

    @property
    def matrix_bytes(self) -> int:
        """The bytes of the full matrix of scores, in the dtype of the inputs."""
        return self.batch * self.heads * self.length**2 * (4 if self.dtype == "float32" else 2)


def committed() -> list[Timing]:
    """The timings in the folder of committed measurements. Empty where there is none.

    Raw measurements in another form are passed over.
    """
    found: list[Timing] = []
    for path in sorted(FOLDER.glob("*.json")):
        with suppress(ValueError):
            found += read(path)
    return latest(found)


def latest(timings: Iterable[Timing]) -> list[Timing]:
    """The timings without those that a later one of the same implementation in the same setting replaces.

    A timing with a note was measured in another way, so it replaces no other, and no other replaces it.
    """
    found = {
        (timing.implementation, timing.setting, timing.note): timing
        for timing in sorted(timings, key=lambda timing: timing.date)
    }
    return list(found.values())


def read(path: Path) -> list[Timing]:
    """The timings of a file: of pytest-benchmark's JSON, or of a measurement with "results" or "cases".

    Benchmarks without a throughput, such as those of the oracles, are left out. Raises ValueError, which names the
    file, for other content.
    """
    try:
        content = json.loads(path.read_bytes())
        if "benchmarks" in content:
            found = [_benchmark(one, path.name, content.get("datetime", "")) for one in content["benchmarks"]]
        elif "cases" in content:
            found = [_of_fp8(one, content["gpu"], path.name, content.get("date", "")) for one in content["cases"]]
        else:
            device = content["gpu"]
            found = [timing for one in content["results"] for timing in _result(one, device, path.name, content)]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: holds no benchmarks ({error!r})") from error
    return [timing for timing in found if timing]


def _benchmark(one: dict[str, Any], source: str, date: str) -> Timing | None:
    about, parameters = one["extra_info"], one.get("params") or {}
    line = parameters.get("line", "")
    sizes = {name: int(size) for name, size in re.findall(r"\b([bhqkd])(\d+)", line)}
    if "tflops" not in about or "q" not in sizes:
        return None
    return Timing(
        implementation=about.get("implementation") or parameters["name"],
        device=about.get("device") or about.get("gpu", ""),
        dtype=parameters["dtype"],
        direction=parameters["direction"],
        causal="causal" in line,
        length=sizes["q"],
        dim=sizes["d"],
        batch=sizes.get("b", 1),
        heads=sizes.get("h", 1),
        seconds=float(one["stats"]["median"]),
        tflops=float(about["tflops"]),
        source=source,
        date=date,
        baseline=about.get("baseline", ""),
        ratio=about.get("ratio"),
        memory_bytes=about.get("peak_memory"),
        blocks=float(blocks[1]) if (blocks := re.search(r"\bblocks([\d.e-]+)", line)) else None,
    )


def _result(one: dict[str, Any], device: str, source: str, about: dict[str, Any]) -> Iterable[Timing]:
    for name, tflops in one["tflops"].items():
        others = {other: value for other, value in one["tflops"].items() if other != name}
        best = max(others, key=others.__getitem__, default="")
        yield Timing(
            implementation=name,
            device=device,
            dtype=one["dtype"],
            direction=one["direction"],
            causal=one["causal"],
            length=one["length"],
            dim=one["dim"],
            batch=one["batch"],
            heads=one["heads"],
            seconds=one["seconds"][name]["median"],
            tflops=tflops,
            source=source,
            date=about.get("date", ""),
            baseline=best,
            ratio=tflops / others[best] if best else None,
            blocks=one.get("blocks"),
            note=about.get("note", ""),
        )


def _of_fp8(one: dict[str, Any], device: str, source: str, date: str) -> Timing:
    """The forward of cuda.fa3_fp8, which was timed in turn with that of cuda.fa3 on the same tensors."""
    seconds, length = 1e-3 * one["ms"]["fa3_fp8"], one["n"]
    operations = 4 * one["batch"] * one["heads"] * length**2 * one["dim"] * (0.5 if one["causal"] else 1.0)
    return Timing(
        implementation="cuda.fa3_fp8",
        device=device,
        dtype=one["dtype"],
        direction="forward",
        causal=one["causal"],
        length=length,
        dim=one["dim"],
        batch=one["batch"],
        heads=one["heads"],
        seconds=seconds,
        tflops=1e-12 * operations / seconds,
        source=source,
        date=date,
        baseline="cuda.fa3",
        ratio=one["ms"]["fa3"] / one["ms"]["fa3_fp8"],
    )
