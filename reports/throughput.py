"""What the page about speed shows."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from flashproof.impls.catalogue import PEERS, STANDARD
from flashproof.reports import charts, errors, wording
from flashproof.reports.drawing import Scale, steps
from flashproof.reports.evidence import Evidence, dtype_order
from flashproof.reports.record import Memory
from flashproof.reports.speed import Group, Timing

Groups = dict[tuple[str, Group], list[Timing]]  # by device and group


class Chart(NamedTuple):
    """A chart of the page: what it shows, on which device, and the drawing."""

    title: str
    device: str
    svg: Markup


def values(timings: list[Timing], evidence: Evidence) -> dict[str, Any]:
    """The values of the template speed.html."""
    dense = [t for t in timings if t.blocks is None]
    groups, sparse = _groups(dense), _by_share(timings)
    first, others = _sweeps(groups)
    return {
        "lead": _lead(dense),
        "sweeps": first,
        "more_sweeps": others,
        "compared": _compared(groups) + _compared_at_one_share(sparse),
        "scatters": _scatters(groups, evidence),
        "sparse": _sparse(sparse),
        "generations": _generations(dense),
        "standard": _beside_the_standard(dense, evidence),
        "figures_of_all": _figures(timings),
        "lengths": sorted({t.length for t in timings}),
        "sources": sorted({t.source for t in timings}),
    }


def order(timing: Timing) -> tuple[object, ...]:
    """The order of a table: by device, direction, dtype, mask, head dim, length and speed."""
    return (
        timing.device,
        timing.direction == "backward",
        dtype_order(timing.dtype),
        timing.blocks is not None,
        timing.causal,
        timing.dim,
        timing.length,
        -timing.tflops,
    )


def _groups(timings: Sequence[Timing]) -> Groups:
    """The timings by device and group. The backward of a setting follows its forward."""
    groups: Groups = defaultdict(list)
    for timing in sorted(timings, key=order):
        groups[timing.device, timing.group].append(timing)
    return dict(sorted(groups.items(), key=lambda pair: _place(pair[1][0])))


def _place(timing: Timing) -> tuple[object, ...]:
    """The order of charts, in which the backward of a setting follows its forward."""
    return timing.device, dtype_order(timing.dtype), timing.causal, timing.dim, timing.direction == "backward"


def _ceiling(timings: Sequence[Timing]) -> float | None:
    """The ceiling that a chart draws: that of most of its timings, which is the lowest."""
    return min((timing.ceiling for timing in timings if timing.ceiling), default=None)


def _pace(timing: Timing) -> str:
    percent = 100 * timing.tflops / timing.ceiling if timing.ceiling else None
    share = "" if percent is None else f", {percent:.{0 if percent >= 1 else 1}f} %"
    return f"{wording.number(timing.tflops, 3)} TFLOP/s{share}"


def _lead(timings: Sequence[Timing]) -> str:
    """The fastest forward and backward, in words."""
    found = []
    for direction in ("forward", "backward"):
        best = max((t for t in timings if t.direction == direction), key=lambda t: t.tflops, default=None)
        if best:
            share = f" ({100 * best.tflops / best.ceiling:.0f} % of the chip's peak)" if best.ceiling else ""
            where = f"{best.dtype}, {best.length} tokens, head dim {best.dim}{', causal' if best.causal else ''}"
            found.append(
                f"The fastest {direction} is that of {best.implementation}: "
                f"{wording.number(best.tflops, 3)} TFLOP/s{share} in {where}, on {best.device}."
            )
    return " ".join(found)


# ------------------------------------------------------------------------------------------------- throughput, length


def _sweeps(groups: Groups) -> tuple[list[Chart], list[Chart]]:
    """Throughput over length: the settings of each dtype with most measurements, and the other settings."""
    swept = {place: every for place, every in groups.items() if _most_lengths(every) > 1}
    total: Counter[tuple[str, str]] = Counter()
    for (device, group), every in swept.items():
        total[device, group.dtype] += len(every)
    chosen: dict[tuple[str, str, str], Group] = {}
    # The dtype with most measurements is first, and of it the setting with most, and of these the largest head dim.
    for device, group in sorted(swept, key=lambda place: (len(swept[place]), place[1].dim), reverse=True):
        chosen.setdefault((device, group.dtype, group.direction), group)
    first: list[Chart] = []
    others: list[Chart] = []
    for device, group in sorted(swept, key=lambda place: -total[place[0], place[1].dtype]):
        chart = Chart(str(group), device, _throughput(swept[device, group], f"{group} on {device}"))
        (first if group in chosen.values() else others).append(chart)
    return first, others


def _most_lengths(timings: Sequence[Timing]) -> int:
    lengths = {(t.implementation, t.length) for t in timings}
    return max(Counter(name for name, _ in lengths).values())


def _commonest(timings: Sequence[Timing]) -> tuple[int, int]:
    """The length at which most were timed, or the longest of several, and how many were."""
    counts = Counter(timing.length for timing in timings)
    return max(counts.items(), key=lambda pair: (pair[1], pair[0]))


def _throughput(timings: Sequence[Timing], title: str) -> Markup:
    """TFLOP/s over length, a line for each implementation, and the chip's ceiling as a line across.

    Implementations that were timed at one length alone are left out.
    """
    counts = Counter(timing.implementation for timing in timings)
    timings = [timing for timing in timings if counts[timing.implementation] > 1]
    by_name: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for timing in timings:
        by_name[timing.implementation][timing.length] = timing.tflops
    ceiling = _ceiling(timings)
    most = max([ceiling or 0.0, *(t.tflops for t in timings)])
    best = max(timings, key=lambda t: (t.length, t.tflops))
    lengths = sorted({t.length for t in timings})
    return charts.lines(
        [
            charts.Trace(name, tuple((float(length), tflops) for length, tflops in sorted(points.items())))
            for name, points in by_name.items()
        ],
        f"TFLOP/s over sequence length, {title}: at {best.length} tokens {best.implementation} is the fastest "
        f"with {_pace(best)}{' of what the chip can do' if ceiling else ''}",
        ("sequence length", "TFLOP/s"),
        up=Scale(0, most * 1.03, 0, 0, "linear"),
        ticks=steps(most * 1.03),
        places=[(float(length), charts.short(length)) for length in lengths],
        rule=(ceiling, f"the chip, {ceiling:.0f}") if ceiling else None,
        width=300,
    )


def _compared(groups: Groups) -> list[Chart]:
    """All implementations at one length: for each device, direction and dtype, where most were timed."""
    found: dict[tuple[str, str, str], tuple[int, Chart]] = {}
    for (device, group), every in groups.items():
        length, count = _commonest(every)
        if count <= max(2, found.get((device, group.direction, group.dtype), (0,))[0]):
            continue
        here = [t for t in every if t.length == length]
        found[device, group.direction, group.dtype] = count, _bars(here, f"{group}, {length} tokens")
    return [chart for _, chart in found.values()]


def _bars(timings: Sequence[Timing], title: str) -> Chart:
    """Timings in one setting, the fastest first."""
    here = sorted(timings, key=lambda t: -t.tflops)
    label = f"{title} on {here[0].device}: {here[0].implementation} is the fastest with {_pace(here[0])}"
    rows = [(t.implementation, t.tflops, _pace(t)) for t in here]
    return Chart(title, here[0].device, charts.bars(rows, label, _ceiling(here)))


# --------------------------------------------------------------------------------------------------- speed, accuracy


def _scatters(groups: Groups, evidence: Evidence) -> list[Chart]:
    """Speed against accuracy: the forward against the errors of out, and the backward against those of dV."""
    accuracy = {(row.kernel.name, row.dtype, row.tensor): row.spread for row in errors.rows(evidence) if row.spread}
    found = []
    for wanted, tensor in (("forward", "out"), ("backward", "dv")):
        best: tuple[str, str, list[tuple[str, float, float]]] = ("", "", [])
        for (device, group), every in groups.items():
            length, _ = _commonest(every)
            points = [
                (t.implementation, spread.absolute[1], t.tflops)
                for t in every
                if t.length == length and (spread := accuracy.get((t.implementation, group.dtype, tensor)))
            ]
            if group.direction == wanted and len(points) > len(best[2]):
                best = f"{group}, {length} tokens", device, [point for point in points if point[1] > 0]
        title, device, points = best
        if len(points) > 1:
            axes = (
                f"median error of {wording.TITLES[tensor]} on common cases; left is better",
                "TFLOP/s; up is better",
            )
            label = (
                f"speed against accuracy, {title} on {device}: the fastest is {max(points, key=lambda p: p[2])[0]}, "
                f"the most accurate is {min(points, key=lambda p: p[1])[0]}"
            )
            found.append(Chart(title, device, charts.scatter(points, label, axes)))
    return found


# ----------------------------------------------------------------------------------------------------- block-sparse


def _by_share(timings: Sequence[Timing]) -> list[list[Timing]]:
    """The timings with block masks, by setting without the share of kept blocks.

    Timings with another note were measured in another way, and are apart.
    """
    groups: defaultdict[tuple[object, ...], list[Timing]] = defaultdict(list)
    for timing in sorted((t for t in timings if t.blocks is not None), key=order):
        groups[*timing.setting[:-1], timing.note].append(timing)
    return list(groups.values())


def _compared_at_one_share(groups: Sequence[Sequence[Timing]]) -> list[Chart]:
    """The implementations side by side in the settings in which one share of kept blocks was timed."""
    return [
        _bars(every, f"{every[0].group}, {every[0].length} tokens, {every[0].mask}")
        for every in groups
        if len({t.blocks for t in every}) == 1 < len(every)
    ]


def _sparse(groups: Sequence[Sequence[Timing]]) -> list[dict[str, Any]]:
    """Time against the share of kept blocks: a chart and its table for each setting with several shares."""
    found = []
    for every in groups:
        shares = sorted({t.blocks for t in every if t.blocks is not None})
        by_name: defaultdict[str, dict[float, Timing]] = defaultdict(dict)
        for timing in every:
            assert timing.blocks is not None
            by_name[timing.implementation][timing.blocks] = timing
        if len(shares) < 2:
            continue
        one, most = every[0], max(1e3 * t.seconds for t in every)
        title = f"{one.group}, {one.length} tokens"
        fastest = min((t for t in every if t.blocks == shares[0]), key=lambda t: t.seconds)
        traces = [
            charts.Trace(name, tuple((100 * share, 1e3 * t.seconds) for share, t in sorted(points.items())))
            for name, points in by_name.items()
        ]
        svg = charts.lines(
            traces,
            f"milliseconds over the share of kept blocks, {title} on {one.device}: with {fastest.mask} "
            f"{fastest.implementation} is the fastest with {wording.number(1e3 * fastest.seconds, 3)} ms",
            ("kept blocks, %", "ms"),
            up=Scale(0, most * 1.05, 0, 0, "linear"),
            ticks=steps(most * 1.05),
            places=[(100 * share, f"{100 * share:.0f}") for share in shares],
            logarithmic=False,
            width=300,
        )
        whole = {name: points[1.0].seconds for name, points in by_name.items() if 1.0 in points}
        rows = [(share, [(points.get(share), whole.get(name)) for name, points in by_name.items()]) for share in shares]
        found.append({"chart": Chart(title, one.device, svg), "names": list(by_name), "rows": rows, "note": one.note})
    return found


# ---------------------------------------------------------------------------------------------------- FA1 and FA2


def _generations(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """FlashAttention-1 against FlashAttention-2: the pairs of implementations that differ in nothing else."""
    found = []
    names = {t.implementation for t in timings}
    pairs = {name: name.replace("fa1", "fa2") for name in names if "fa1" in name}
    paired = {name for pair in pairs.items() for name in pair if set(pair) <= names}
    groups = _groups([t for t in timings if t.implementation in paired])
    for direction in ("forward", "backward"):
        here = {group: every for group, every in groups.items() if group[1].direction == direction}
        if not here:
            continue
        (device, group), every = max(
            here.items(), key=lambda pair: (len(pair[1]), pair[0][1].dtype == "float16", pair[0][1].dim)
        )
        rows = []
        for one in every:
            other = next(
                (t for t in every if t.implementation == pairs.get(one.implementation) and t.setting == one.setting),
                None,
            )
            if other:
                rows.append((one, other))
        svg = (
            _throughput(every, f"{group} on {device}")
            if _most_lengths(every) > 1
            else charts.bars(
                [(t.implementation, t.tflops, _pace(t)) for t in every],
                f"{group} on {device}: FlashAttention-1 beside FlashAttention-2",
                _ceiling(every),
            )
        )
        found.append({"chart": Chart(str(group), device, svg), "rows": rows})
    return found


# ------------------------------------------------------------------------------------------------ standard attention


class Beside(NamedTuple):
    """A row of the table that the papers and tutorials print. The bytes are those of one head."""

    flash: Timing
    standard: Timing | None
    matrix_bytes: int
    measured_bytes: int | None


def _beside_the_standard(timings: Sequence[Timing], evidence: Evidence) -> list[dict[str, Any]]:
    """Milliseconds and bytes beside standard attention: a table for each direction.

    It shows the setting, and the implementation of the project, with the most rows, and among these the fastest.
    """
    standard = {t.setting: t for t in timings if t.implementation == STANDARD}
    memory: dict[tuple[str, str, str, str, int], Memory] = {
        (kernel.name, str(machine), record.dtype, record.direction, record.length): record
        for kernel in evidence.kernels
        for record, machine in kernel.memory
    }
    own: defaultdict[tuple[str, str, Group], list[Timing]] = defaultdict(list)
    for t in timings:
        if t.implementation not in PEERS and t.setting in standard:
            own[t.implementation, t.device, t.group].append(t)
    found = []
    for direction in ("forward", "backward"):
        here = [every for (_, _, group), every in own.items() if group.direction == direction]
        if not here:
            continue
        every = max(here, key=lambda rows: (len(rows), -math.fsum(math.log(t.seconds) for t in rows)))
        one = every[0]
        same = [t for t in timings if t.implementation == one.implementation]
        # The checks of memory do not count what a benchmark does, so a table has the bytes of one of the two.
        of_benchmarks = any(t.memory_bytes is not None for t in every)
        rows = []
        for t in sorted(same, key=lambda t: t.length):
            if (t.device, t.group) == (one.device, one.group):
                record = memory.get((t.implementation, t.device, t.dtype, t.direction, t.length))
                heads = t.batch * t.heads
                measured = None if t.memory_bytes is None else t.memory_bytes // heads
                if record and not of_benchmarks:
                    measured = record.measured_bytes // record.heads
                rows.append(Beside(t, standard.get(t.setting), t.matrix_bytes // heads, measured))
        found.append({"title": str(one.group), "device": one.device, "name": one.implementation, "rows": rows})
    return found


# ------------------------------------------------------------------------------------------------------- all figures


class Figures(NamedTuple):
    """A row of the table of all figures: the timings of an implementation in one setting, by length."""

    one: Timing
    by_length: dict[int, Timing]


def _figures(timings: Sequence[Timing]) -> list[Figures]:
    rows: dict[tuple[object, ...], dict[int, Timing]] = {}
    for t in sorted(timings, key=order):
        rows.setdefault((t.device, t.group, t.blocks, t.implementation, t.note), {})[t.length] = t
    return [Figures(next(iter(by_length.values())), by_length) for by_length in rows.values()]
