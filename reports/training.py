"""What the page about training shows: why bias matters, how far trainings drift, and the speed of training GPT-2."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from flashproof.impls.catalogue import PEERS
from flashproof.reports import charts, speed, wording
from flashproof.reports.drawing import Scale, powers, steps
from flashproof.reports.evidence import Evidence, Machine, dtype_order, gather
from flashproof.reports.record import Curve

FOLDER = Path(__file__).absolute().parent / "training"  # the committed trainings, in a clone
SMOOTHED = 10  # a loss is the mean of so many steps: each step has other letters, some of which are harder
DRIFT = "drift of the "  # how the title of a chart of drifts begins; the quantity, the dtype and the kernel follow
RIGHT = "right "  # how the name of a training with drawn roundings begins


# ------------------------------------------------------------------------------------------------------ measured steps


@dataclass(frozen=True)
class Cost:
    """What the steps of a training cost. batch: the sequences of a step. peak_bytes: with weights and optimizer."""

    batch: int
    tokens_per_second: float
    peak_bytes: int

    def milliseconds(self, length: int) -> float:
        """The time of a step."""
        return 1e3 * self.batch * length / self.tokens_per_second


@dataclass(frozen=True)
class Step:
    """The training of a model with an implementation, and with standard attention if that fits into memory.

    attention_share: the share of attention in the time of a step. source: the file. date: when it was measured.
    """

    implementation: str
    device: str
    model: str
    length: int
    cost: Cost
    standard: Cost | None
    attention_share: float
    source: str
    date: str

    @property
    def speed_up(self) -> float | None:
        """The tokens per second, as a multiple of those of standard attention."""
        return self.cost.tokens_per_second / self.standard.tokens_per_second if self.standard else None

    @property
    def memory_ratio(self) -> float | None:
        """The peak memory of standard attention over this one. None if the batches are not of one size."""
        if not self.standard or self.standard.batch != self.cost.batch:
            return None
        return self.standard.peak_bytes / self.cost.peak_bytes


def committed() -> list[Step]:
    """The measured steps in the folder of committed measurements. Empty where there is none."""
    found: list[Step] = []
    for path in sorted(speed.FOLDER.glob("*.json")):
        with suppress(ValueError):
            found += read(path)
    return latest(found)


def latest(every: Iterable[Step]) -> list[Step]:
    """The measurements without those that a later one of the same training replaces."""
    return list(
        {
            (one.implementation, one.device, one.model, one.length): one
            for one in sorted(every, key=lambda one: one.date)
        }.values()
    )


def read(path: Path) -> list[Step]:
    """The measured steps in a file of pytest-benchmark. Other benchmarks are left out.

    Raises ValueError, which names the file, for other content.
    """
    try:
        content = json.loads(path.read_bytes())
        measured = [one for one in content.get("benchmarks", ()) if "attention_share" in one["extra_info"]]
        return [_step(one["extra_info"], path.name, content.get("datetime", "")) for one in measured]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: holds no benchmarks ({error!r})") from error


def _step(about: Mapping[str, Any], source: str, date: str) -> Step:
    def cost(prefix: str) -> Cost:
        return Cost(*(about[f"{prefix}{name}"] for name in ("batch", "tokens_per_second", "peak_bytes")))

    return Step(
        implementation=about["implementation"],
        device=about["gpu"],
        model=about["model"],
        length=about["length"],
        cost=cost(""),
        standard=cost("standard_") if about["standard_batch"] else None,
        attention_share=about["attention_share"],
        source=source,
        date=date,
    )


# ------------------------------------------------------------------------------------------------------------ the page


def values(evidence: Evidence, measured: Sequence[Step]) -> dict[str, Any]:
    """The values of the template training.html."""
    return {"bias": _bias(), "drifts": _drifts(evidence), "speeds": _speeds(measured)}


def is_drift(curve: Curve) -> bool:
    """Whether a curve belongs to this page."""
    return curve.chart.startswith(DRIFT)


def kernel_of(curve: Curve) -> str:
    """The implementation whose training a curve of a drift belongs to."""
    return curve.chart.rpartition(", ")[2]


class Trained(NamedTuple):
    """A row of the table about bias: a kernel, what it did in a training, and the step at which each test told."""

    name: str
    says: str
    is_right: bool
    loss: float  # the mean of the last steps
    norm: float  # the largest gradient norm
    told: Mapping[str, int | None]


def _bias() -> dict[str, Any] | None:
    """Two charts and a table of the training with kernels whose errors have one sign. None outside of a clone."""
    path = FOLDER / "bias.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text("utf-8"))
    runs: dict[str, dict[str, Any]] = content["runs"]
    rows = [
        Trained(
            name,
            run["says"],
            run["right"],
            math.fsum(run["loss"][-SMOOTHED:]) / SMOOTHED,
            max(run["gradient_norm"]),
            content["told"][name],
        )
        for name, run in runs.items()
    ]
    count = len(next(iter(runs.values()))["loss"])
    losses = {name: _smoothed(run["loss"]) for name, run in runs.items()}
    norms = {name: list(enumerate(run["gradient_norm"])) for name, run in runs.items()}
    told = [
        (float(step), f"step {step}: the {test} shows {row.name}")
        for row in rows
        for test, step in row.told.items()
        if step is not None
    ]
    least, most = _ends([value for points in losses.values() for _, value in points])
    low, high = _decades([value for points in norms.values() for _, value in points])
    places = [(float(step), str(step)) for step in range(0, count + 1, max(1, count // 6))]

    def drawn(points: Mapping[str, list[tuple[int, float]]], axis: str, up: Scale, ticks: Any, label: str) -> Markup:
        return charts.lines(
            [
                charts.Trace(name, tuple((float(step), value) for step, value in run), _kind(runs[name]["right"]))
                for name, run in points.items()
            ],
            label,
            ("step of the training", axis),
            up=up,
            ticks=ticks,
            places=places,
            logarithmic=False,
            posts=told,
        )

    words = ", ".join(f"{row.name} ends at {wording.number(row.loss, 3)}" for row in rows)
    loss_ticks = [tick for tick in steps(most) if tick[0] >= least]
    return {
        "rows": rows,
        "last": f"{count - SMOOTHED} to {count - 1}",
        "recipe": content["recipe"],
        "offset": content["offset"],
        "charts": [
            (
                "Loss",
                drawn(losses, "loss", Scale(least, most, 0, 0, "linear"), loss_ticks, f"Loss over steps: {words}"),
            ),
            (
                "Norm of the gradient",
                drawn(norms, "norm", Scale(low, high, 0, 0), powers(low, high), "Norm of the gradient over steps"),
            ),
        ],
    }


def _kind(is_right: bool) -> str:
    return "formula" if is_right else "series"


def _smoothed(losses: Sequence[float]) -> list[tuple[int, float]]:
    """The mean of the last SMOOTHED losses, from the step on where there are so many."""
    return [(end - 1, math.fsum(losses[end - SMOOTHED : end]) / SMOOTHED) for end in range(SMOOTHED, len(losses) + 1)]


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    return math.floor(2 * min(numbers)) / 2, math.ceil(2 * max(numbers)) / 2


def _decades(numbers: Sequence[float]) -> tuple[float, float]:
    known = [number for number in numbers if 0 < number < math.inf]
    return 10.0 ** math.floor(math.log10(min(known))), 10.0 ** math.ceil(math.log10(max(known)))


# --------------------------------------------------------------------------------------------------------------- drift


class Drifts(NamedTuple):
    """How far trainings leave the exact one: the charts, and the implementations that left the spread of right ones."""

    machine: Machine
    charts: list[tuple[str, Markup]]
    implementations: list[str]
    outside: list[str]
    is_committed: bool


def _drifts(evidence: Evidence) -> list[Drifts]:
    """The drifts in the evidence. Where there are none, those of the committed trainings, if it holds the kernels."""
    path = FOLDER / "drift.jsonl.gz"
    is_committed = not any(is_drift(curve) for curve, _ in evidence.curves) and path.exists()
    source = gather([path]) if is_committed else evidence
    names = {kernel.name for kernel in evidence.kernels}
    by_machine: defaultdict[Machine, list[Curve]] = defaultdict(list)
    for curve, machine in source.curves:
        if is_drift(curve) and kernel_of(curve) in names:
            by_machine[machine].append(curve)
    outside = defaultdict(list)
    for kernel in source.kernels:
        for judged in kernel.judged:
            if judged.judgement.check == "training/drift" and judged.judgement.status == "failed":
                outside[judged.machine].append(kernel.name)
    return [
        Drifts(
            machine,
            _drift_charts(curves, machine),
            sorted(set(map(kernel_of, curves))),
            sorted(set(outside[machine])),
            is_committed,
        )
        for machine, curves in sorted(by_machine.items())
    ]


def _drift_charts(curves: Sequence[Curve], machine: Machine) -> list[tuple[str, Markup]]:
    """A chart for each quantity and dtype: a line for each implementation, and the range of right kernels."""
    groups: defaultdict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        quantity, dtype, _ = curve.chart.removeprefix(DRIFT).split(", ")
        groups[quantity, dtype].append(curve)
    found = []
    for place in sorted(groups, key=lambda place: (place[0] != "loss", dtype_order(place[1]))):
        here, title = groups[place], ", ".join(place)
        apart: dict[str, list[tuple[float, float]]] = {}
        right: defaultdict[float, list[float]] = defaultdict(list)
        for curve in here:
            points = [(x, abs(y)) for x, y in zip(curve.x, curve.y, strict=True) if y]
            if curve.series.startswith(RIGHT):
                for x, y in points:
                    right[x].append(y)
            else:
                apart[curve.series] = points
        of_all = [y for points in apart.values() for _, y in points] + [y for of in right.values() for y in of]
        low, high = _decades(of_all)
        xs = sorted(right)
        found.append(
            (
                title,
                charts.lines(
                    [charts.Trace(name, tuple(sorted(points))) for name, points in sorted(apart.items())],
                    f"distance of the {title} from that of the exact training, over steps, on {machine}",
                    (here[0].x_title, "distance"),
                    up=Scale(low, high, 0, 0),
                    ticks=powers(low, high, max(1, round(math.log10(high / low) / 5))),
                    places=[(x, f"{x:g}") for x in xs[:: max(1, len(xs) // 5)]],
                    logarithmic=False,
                    width=300,
                    band=("right kernels", [(x, min(right[x]), max(right[x])) for x in xs]),
                ),
            )
        )
    return found


# --------------------------------------------------------------------------------------------------------------- speed


class Speeds(NamedTuple):
    """The trainings of a model on a device, and the table that tutorials print, for one implementation."""

    model: str
    device: str
    rows: list[Step]
    name: str
    of_name: list[Step]
    charts: list[tuple[str, Markup]]


def _speeds(measured: Sequence[Step]) -> list[Speeds]:
    groups: defaultdict[tuple[str, str], list[Step]] = defaultdict(list)
    for one in sorted(measured, key=_order):
        groups[one.device, one.model].append(one)
    found = []
    for (device, model), rows in groups.items():
        own = [one for one in rows if one.implementation not in PEERS] or rows
        name = max(own, key=lambda one: (one.length, one.cost.tokens_per_second)).implementation
        of_name = [one for one in rows if one.implementation == name]
        found.append(Speeds(model, device, rows, name, of_name, _speed_charts(rows, f"GPT-2 {model} on {device}")))
    return found


def _order(one: Step) -> tuple[object, ...]:
    return one.device, _size(one.model), one.length, -one.cost.tokens_per_second


def _size(model: str) -> float:
    """The parameters of a model, from its name: "124M", "1.5B"."""
    return float(model[:-1]) * {"M": 1e6, "B": 1e9}[model[-1]]


def _speed_charts(rows: Sequence[Step], title: str) -> list[tuple[str, Markup]]:
    """Tokens per second, and the share of attention, over the length. Empty if only one length was measured."""
    lengths = sorted({one.length for one in rows})
    if len(lengths) < 2:
        return []
    by_name: defaultdict[str, list[Step]] = defaultdict(list)
    for one in rows:
        by_name[one.implementation].append(one)
    best = max(rows, key=lambda one: (one.length, one.cost.tokens_per_second))
    quantities: tuple[tuple[str, str, Callable[[Step], float]], ...] = (
        ("thousand tokens per second", "tokens per second", lambda one: one.cost.tokens_per_second / 1e3),
        ("attention, % of the step", "share of attention in a step", lambda one: 100 * one.attention_share),
    )
    found = []
    for axis, label, of in quantities:
        most = max(of(one) for one in rows)
        found.append(
            (
                label,
                charts.lines(
                    [
                        charts.Trace(name, tuple((float(one.length), of(one)) for one in every))
                        for name, every in by_name.items()
                    ],
                    f"{label} over sequence length, {title}: "
                    f"at {best.length} tokens {best.implementation} is the fastest",
                    ("sequence length", axis),
                    up=Scale(0, most * 1.03, 0, 0, "linear"),
                    ticks=steps(most * 1.03),
                    places=[(float(length), charts.short(length)) for length in lengths],
                    width=300,
                ),
            )
        )
    return found
