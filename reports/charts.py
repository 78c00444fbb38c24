"""The charts of the report, as static SVG.

Each chart is drawn from the rows of a table that the page also holds. What passes, fails or is a known defect differs
by shape as well as by colour. The classes of the elements are coloured in templates/style.css.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from markupsafe import Markup

from flashproof.reports.drawing import Drawing, Point, Scale, powers, steps
from flashproof.reports.evidence import Judged, size
from flashproof.reports.tables import Growth, Series, lean
from flashproof.reports.wording import TITLES, bytes_, rho, scientific

FOOT, TOP = 1e-4, 1e5  # of every chart of rho: a smaller or larger rho is drawn at its edge
ALLCLOSE = 1e-2  # the absolute tolerance that tutorials compare attention with
SHAPES = {"passed": "circle", "failed": "triangle", "known defect": "diamond", "refused": "square"}
MARKS = ("circle", "square", "triangle", "diamond", "cross")
WIDEST = 1320.0  # pixels of a chart that fills a page
MARKED = 120  # points of a chart of lines that are all marked
LETTER = 6.8  # pixels: the width of a letter of a chart, at most

# Where exponentials overflow or underflow: the largest argument of exp in float16 and float32, the smallest one whose
# float32 result is not 0, the largest argument of exp2 in float32, and the largest float16.
LANDMARKS = ((-103.97, "-103.97"), (11.09, "11.09"), (88.72, "88.72"), (128.0, "128"), (65504.0, "65504"))


# ---------------------------------------------------------------------------------------------- rho in small multiples


@dataclass(frozen=True)
class Panel:
    """One panel: the worst judgement of a tensor in a dtype at each place of an axis."""

    tensor: str
    dtype: str
    points: tuple[tuple[float, Judged], ...]


def multiples(
    panels: Sequence[Panel],
    axis: str,
    label: str,
    width: float = 196,
    landmarks: bool = False,
) -> Markup:
    """Rho over an axis: a row of panels for each tensor, a column for each dtype, and one log grid for all.

    Each panel has the bound as a line at 1. Above it lies the range of errors that an absolute tolerance of 0.01 lets
    pass, and below it the share of the allowed bias.

    landmarks: places are drawn side by side, with the landmarks between them, and not to scale.
    """
    tensors = list(dict.fromkeys(panel.tensor for panel in panels))
    dtypes = list(dict.fromkeys(panel.dtype for panel in panels))
    left, top, height, gap = 58.0, 20.0, 74.0, 10.0
    foot = 34.0 if landmarks else 30.0
    drawing = Drawing(left + len(dtypes) * (width + gap), top + len(tensors) * (height + gap) - gap + foot, label)
    places = sorted({place for panel in panels for place, _ in panel.points})
    across = _steps(places) if landmarks or min(places) <= 0 else _log(places)
    by_place = {(panel.tensor, panel.dtype): panel for panel in panels}
    for column, dtype in enumerate(dtypes):
        x = left + column * (width + gap)
        drawing.words(x, 13, dtype, "head")
        for row, tensor in enumerate(tensors):
            y = top + row * (height + gap)
            panel = by_place.get((tensor, dtype))
            _rho_panel(drawing, panel, (x, y, width, height), across, first=column == 0, landmarks=landmarks)
        bottom = top + len(tensors) * (height + gap) - gap
        _foot(drawing, x, bottom, width, places, across, landmarks)
    for row, tensor in enumerate(tensors):
        drawing.words(2, top + row * (height + gap) + 11, TITLES[tensor], "head")
    drawing.words(left + (len(dtypes) * (width + gap) - gap) / 2, drawing.height - 2, axis, "soft", "middle")
    return drawing.svg()


Across = Callable[[float], float]  # from a place to a share of the width


def _log(places: Sequence[float]) -> Across:
    low, high = places[0], places[-1]
    return lambda place: 0.05 + 0.9 * (math.log(place / low) / (math.log(high / low) or 1.0))


def _steps(places: Sequence[float]) -> Across:
    order = {place: index for index, place in enumerate(places)}
    return lambda place: (order[place] + 0.5) / len(order)


def _rho_panel(
    drawing: Drawing,
    panel: Panel | None,
    frame: tuple[float, float, float, float],
    across: Across,
    *,
    first: bool,
    landmarks: bool,
) -> None:
    x, y, width, height = frame
    up = Scale(FOOT, TOP, y + height, y)
    ticks = powers(FOOT, TOP, 2)
    drawing.lines([((x, up(value)), (x + width, up(value))) for value, _ in ticks], "grid")
    for value, name in ticks if first else []:
        drawing.words(x - 5, up(value) + 3.5, name, "tick", "end")
    if panel is None:
        drawing.line((x, up(1)), (x + width, up(1)), "bound")
        drawing.words(x + width / 2, y + height / 2 + 12, "not judged", "soft", "middle")
        return
    place = [(round(x + width * across(at)), judged) for at, judged in panel.points]
    allowed = [(at, ALLCLOSE / bound) for at, judged in place if (bound := _bound(judged))]
    drawing.area(_down_to(up(1), [(at, min(up(1), up(limit))) for at, limit in allowed]), "hides")
    drawing.curve([(round(at), round(up(max(limit, FOOT)))) for at, limit in allowed], "loose")
    biased = [(at, lean(judged.judgement)) for at, judged in place if judged.judgement.bias is not None]
    drawing.area(_down_to(up(FOOT), [(at, up(max(share, FOOT))) for at, share in biased]), "lean")
    if landmarks:
        _landmarks(drawing, x, y, width, height, [at for at, _ in panel.points], across)
    drawing.line((x, up(1)), (x + width, up(1)), "bound")
    dotted = all(judged.judgement.status == "passed" for _, judged in place)  # the lines then carry their dots
    on_lines: set[float] = set()
    for run in _runs([(at, size(judged.rho) if size(judged.rho) >= FOOT else None) for at, judged in place]):
        drawing.curve([(at, up(figure)) for at, figure in run], "rho dotted" if dotted else "rho")
        if dotted and len(run) > 1:
            on_lines |= {at for at, _ in run}
    for state, shape in SHAPES.items():
        points = [(at, up(max(size(j.rho), FOOT))) for at, j in place if j.judgement.status == state]
        if state == "passed":
            drawing.marks("dot", [point for point in points if point[0] not in on_lines], "dots")
        else:
            drawing.marks(shape, points, f"mark {state.replace(' ', '-')}", 3.2)
    worst = max((judged for _, judged in place), key=lambda judged: size(judged.rho))
    failing = any(judged.judgement.status == "failed" for _, judged in place)
    drawing.words(x + width, y + 9, f"max {rho(worst.rho)}", "worst halo" if failing else "tick halo", "end")


def _down_to(foot: float, points: Sequence[Point]) -> list[Point]:
    """The corners of the area between a line and a level below it. Empty if the line is too short or at that level."""
    if len(points) < 2 or all(y == foot for _, y in points):
        return []
    return [*points, (points[-1][0], foot), (points[0][0], foot)]


def _bound(judged: Judged) -> float:
    """The bound at the worst element. 0 if it is not a number to divide by."""
    bound = size(judged.judgement.worst.bound) if judged.judgement.worst else 0.0
    return bound if bound < math.inf else 0.0


def _landmarks(
    drawing: Drawing, x: float, y: float, width: float, height: float, places: Sequence[float], across: Across
) -> None:
    found = [at for landmark, _ in LANDMARKS if (at := _between(landmark, places, across)) is not None]
    drawing.lines([((x + width * at, y), (x + width * at, y + height)) for at in found], "landmark")


def _between(landmark: float, places: Sequence[float], across: Across) -> float | None:
    """The share of the width at which a landmark stands: at its place, or half way between the places around it."""
    if landmark in places:
        return across(landmark)
    below = [place for place in places if place < landmark]
    above = [place for place in places if place > landmark]
    return (across(max(below)) + across(min(above))) / 2 if below and above else None


def _foot(
    drawing: Drawing, x: float, y: float, width: float, places: Sequence[float], across: Across, landmarks: bool
) -> None:
    if landmarks:
        for landmark, name in LANDMARKS:
            if (at := _between(landmark, places, across)) is not None:
                drawing.words(x + width * at, y + 12, name, "tick", "middle")
        return
    last = -math.inf
    for place in places:
        at = x + width * across(place)
        name = short(place)
        if at - last > 6.4 * len(name) + 4:
            drawing.words(at, y + 12, name, "tick", "middle")
            last = at


def short(value: float) -> str:
    """A place on an axis in few letters: "16k", "1/64", "0.25"."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    if 0 < value < 0.1 and (1 / value).is_integer():
        return f"1/{1 / value:g}"
    return f"{value:g}"


# --------------------------------------------------------------------------------------------------------- plain lines


@dataclass(frozen=True)
class Trace:
    """A line of a chart. kind: a class of the style. A y of None is a gap."""

    name: str
    points: tuple[tuple[float, float | None], ...]
    kind: str = "series"


def lines(
    traces: Sequence[Trace],
    label: str,
    axes: tuple[str, str],
    *,
    up: Scale,
    ticks: Sequence[tuple[float, str]],
    places: Sequence[tuple[float, str]],
    logarithmic: bool = True,
    width: float = 430,
    height: float = 210,
    rule: tuple[float, str] | None = None,
    posts: Sequence[tuple[float, str]] = (),
    band: tuple[str, Sequence[tuple[float, float, float]]] | None = None,
) -> Markup:
    """Lines over one axis. Their names stand at the right, each with its mark, in the order of their last values.

    Where there are many lines or points, only the last points are marked.

    axes: the titles of x and y. up: the domain of y; its pixels are set here. ticks, places: the labels of y and x.
    rule: a line across, with its name. posts: places of x with a line up, with their names. band: a named range of y at
    places of x, as (x, low, high).
    """
    least = 13.0  # between two names
    height = max(height, least * (len(traces) + bool(rule) + bool(band)))
    left, top, foot = 62.0, 22.0, 38.0
    every = [trace.name for trace in traces] + [one[0] for one in [band] if one] + [one[1] for one in [rule] if one]
    right = 22 + LETTER * max(map(len, every))
    drawing = Drawing(left + width + right, top + height + foot, label)
    up = up._replace(start=top + height, end=top)
    xs = [x for trace in traces for x, _ in trace.points] + [x for x, _ in posts]
    across = Scale(min(xs), max(xs), left + 8, left + width - 8, "log" if logarithmic else "linear")
    drawing.words(left - 50, 11, axes[1], "soft")
    for value, name in ticks:
        drawing.line((left, up(value)), (left + width, up(value)), "grid")
        drawing.words(left - 6, up(value) + 3.5, name, "tick", "end")
    for value, name in places:
        drawing.words(across(value), top + height + 14, name, "tick", "middle")
    drawing.words(left + width / 2, top + height + 32, axes[0], "soft", "middle")
    many = sum(len(trace.points) > 1 for trace in traces) > 6 or len(xs) > MARKED
    names: list[_Name] = []
    if band:
        drawing.area(
            [(across(x), up(low)) for x, low, _ in band[1]] + [(across(x), up(top_)) for x, _, top_ in band[1][::-1]],
            "lean",
        )
        names.append(_Name((up(band[1][-1][1]) + up(band[1][-1][2])) / 2, band[0], "lean", "square"))
    for index, (x, name) in enumerate(posts):
        drawing.line((across(x), top), (across(x), top + height), "landmark")
        side = ("start", 4) if across(x) < left + width / 2 else ("end", -4)
        drawing.words(across(x) + side[1], top + 9 + 13 * index, name, "tick halo", side[0])
    if rule:
        drawing.line((left, up(rule[0])), (left + width, up(rule[0])), "bound")
        names.append(_Name(up(rule[0]), rule[1], "tick", ""))
    for index, trace in enumerate(traces):
        kind = f"{trace.kind} c{index % 6}" if trace.kind == "series" else trace.kind
        shape = MARKS[index % len(MARKS)]
        for run in _runs(trace.points):
            drawing.curve([(across(x), up(y)) for x, y in run], f"line {kind}")
            marked = run[-1:] if many else run
            drawing.marks(shape, [(across(x), up(y)) for x, y in marked], f"mark {kind}", 2.6)
        drawing.marks("cross", [(across(x), top + 5) for x, y in trace.points if y is None], "mark broken", 3)
        if known := [y for _, y in trace.points if y is not None]:
            names.append(_Name(up(known[-1]), trace.name, kind, shape))
    for one in _apart(names, least, top + height):
        if one.shape:
            drawing.marks(one.shape, [(left + width + 10, one.y)], f"mark {one.kind}", 2.6)
        drawing.words(left + width + 18, one.y + 3.5, one.name, f"name {one.kind}" if one.shape else one.kind)
    return drawing.svg()


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


class _Name(NamedTuple):
    """A name beside a chart: its height, its text, its class, and the shape of its mark."""

    y: float
    name: str
    kind: str
    shape: str


def _apart(names: Sequence[_Name], least: float, bottom: float) -> list[_Name]:
    """Moves names so that no two overlap and none is below the bottom. Their order by height stays."""
    order = sorted(names)
    heights: list[float] = []
    for one in order:
        heights.append(max(one.y, heights[-1] + least) if heights else one.y)
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], bottom - least * (len(heights) - 1 - index))
    return [one._replace(y=y) for one, y in zip(order, heights, strict=True)]


def magnitudes(curves: Sequence[tuple[str, str, Sequence[tuple[float, Judged]]]], title: str, label: str) -> Markup:
    """Rho of one tensor over the magnitude of the scores: a thin line for each implementation, a thick one if it fails.

    curves: the name of the implementation, its state, and its judgements.
    """
    width, height, left, top = 330.0, 150.0, 40.0, 24.0
    drawing = Drawing(left + width + 8, top + height + 34, label)
    low, high = 1e-3, 10.0
    up = Scale(low, high, top + height, top)
    places = sorted({place for _, _, points in curves for place, _ in points})
    across = _log(places)
    drawing.words(left, 13, title, "head")
    for value, name in powers(low, high):
        drawing.line((left, up(value)), (left + width, up(value)), "grid")
        drawing.words(left - 5, up(value) + 3.5, name, "tick", "end")
    drawing.line((left, up(1)), (left + width, up(1)), "bound")
    _foot(drawing, left, top + height, width, places, across, False)
    drawing.words(left + width / 2, top + height + 30, "magnitude of the scores", "soft", "middle")
    order = sorted(curves, key=lambda curve: curve[1] in ("failed", "known defect"))
    for name, state, points in order:
        kind = "rho" if state == "passed" else state.replace(" ", "-")
        run = [(left + width * across(at), up(max(size(judged.rho), low))) for at, judged in points]
        drawing.curve(run, f"thin {kind}")
        bad = [
            (left + width * across(at), up(max(size(judged.rho), low)))
            for at, judged in points
            if judged.judgement.status != "passed"
        ]
        drawing.marks(SHAPES.get(state, "circle"), bad, f"mark {kind}", 3.4)
        if bad:
            drawing.words(bad[0][0] + 6, bad[0][1] - 6, name, f"name {kind}")
    return drawing.svg()


# ------------------------------------------------------------------------------------------------------- memory, curves


def growth(growths: Sequence[Growth], label: str) -> Markup:
    """Memory beyond inputs and outputs over sequence length, beside that of the full attention matrix."""
    traces = [
        Trace(
            f"{one.direction}, {one.dtype}",
            tuple((float(row.length), float(max(row.measured_bytes, 1024))) for row in one.rows),
        )
        for one in growths
    ]
    whole = max(growths, key=lambda one: len(one.rows))
    traces.append(
        Trace(
            f"full matrix, {whole.dtype}", tuple((float(r.length), float(r.matrix_bytes)) for r in whole.rows), "whole"
        )
    )
    return _bytes_chart(traces, label, "sequence length (queries = keys)")


def traffic(traces: Sequence[Trace], label: str) -> Markup:
    """Counted bytes over sequence length, beside the formula of the paper."""
    return _bytes_chart(traces, label, "sequence length")


def _bytes_chart(traces: Sequence[Trace], label: str, axis: str) -> Markup:
    counts = [y for trace in traces for _, y in trace.points if y]
    low, high = 2.0 ** math.floor(math.log2(min(counts))), 2.0 ** math.ceil(math.log2(max(counts) * 1.01))
    step = max(1, round(math.log2(high / low) / 6))
    ticks = [(2.0**power, bytes_(2**power)) for power in range(round(math.log2(low)), round(math.log2(high)) + 1, step)]
    xs = sorted({x for trace in traces for x, _ in trace.points})
    return lines(
        traces,
        label,
        (axis, "bytes"),
        up=Scale(low, high, 0, 0),
        ticks=ticks,
        places=[(x, short(x)) for x in xs],
    )


def curves(series: Sequence[Series], label: str) -> Markup:
    """Named curves over one x. A cross at the upper edge stands where a value is not finite."""
    first = series[0].curve
    values = [y for one in series for y in one.curve.y if y]
    low = 10.0 ** math.floor(math.log10(min(values, default=0.1)))
    high = max(10.0 ** math.ceil(math.log10(max(values, default=1.0))), 10 * low)
    step = max(1, round(math.log10(high / low) / 5))
    xs = sorted({x for one in series for x in one.curve.x})
    places = [(x, f"{x:g}") for x in (xs[0], xs[len(xs) // 2], xs[-1])]
    traces = [
        Trace(
            one.curve.series,
            tuple(
                (x, None if y is None else max(y, low)) for x, y in sorted(zip(one.curve.x, one.curve.y, strict=True))
            ),
        )
        for one in series
    ]
    return lines(
        traces,
        label,
        (first.x_title, first.y_title),
        up=Scale(low, high, 0, 0),
        ticks=powers(low, high, step),
        places=places,
        logarithmic=False,
    )


# ------------------------------------------------------------------------------------------------ histogram, heat map


def histogram(
    counts: Sequence[tuple[float, int]],
    label: str,
    axis: str,
    rule: tuple[float, str],
    floor: Sequence[int] = (),
) -> Markup:
    """How many cases or elements have an error of so many ulps.

    counts: the lower edge of each bin, each twice the one before, and its count. rule: a line, with its name. floor:
    counts of the bins that no answer can be better than, drawn as a line.
    """
    width, height, left, top = 400.0, 130.0, 62.0, 26.0
    drawing = Drawing(left + width + 12, top + height + 36, label)
    most = max([count for _, count in counts] + list(floor))
    up = Scale(0, most, top + height, top, "root")
    step = width / len(counts)
    for share in (0.1, 0.4, 1.0):
        value = round(most * share)
        drawing.line((left, up(value)), (left + width, up(value)), "grid")
        drawing.words(left - 5, up(value) + 3.5, f"{value:,}", "tick", "end")
    drawing.area(_stairs([count for _, count in counts], left, step, up), "fill rho")
    for index, (edge, _) in list(enumerate(counts))[::2]:
        drawing.words(left + index * step, top + height + 13, short(edge), "tick", "middle")
    drawing.curve(_stairs(floor, left, step, up)[1:-1], "exact")
    at = left + step * (math.log2(rule[0] / counts[0][0]))
    if left <= at <= left + width:
        drawing.line((at, top - 10), (at, top + height), "bound")
        drawing.words(at + 4, top - 5, rule[1], "tick halo")
    drawing.words(left + width / 2, top + height + 31, axis, "soft", "middle")
    return drawing.svg()


def _stairs(counts: Sequence[int], left: float, step: float, up: Scale) -> list[Point]:
    """The outline of bars that stand side by side, with its foot at both ends."""
    tops = [(left + (index + side) * step, up(count)) for index, count in enumerate(counts) for side in (0, 1)]
    return [(left, up(0)), *tops, (left + len(counts) * step, up(0))]


def heat(
    grid: Sequence[Sequence[float]], extent: tuple[int, int], label: str, axes: tuple[str, str], tiles: tuple[int, int]
) -> Markup:
    """The largest rho in each part of a tensor: rows down, dims across. Above 1, its scale is that of logarithms.

    extent: rows and dims of the tensor. tiles: the rows and dims of a tile; the edges of tiles are drawn.
    """
    left, top, cell = 60.0, 24.0, 17.0
    width, height = cell * len(grid[0]), cell * len(grid)
    steps_ = heat_steps([abs(value) for values in grid for value in values])
    drawing = Drawing(left + max(width, 280.0), top + height + 28 + 18 * math.ceil(len(steps_) / 2), label)
    places: dict[int, list[Point]] = {}
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            step = next((at for at, (edge, _) in enumerate(steps_) if abs(value) <= edge), len(steps_) - 1)
            places.setdefault(step, []).append((left + column * cell, top + row * cell))
    for step, corners in sorted(places.items()):
        drawing.boxes(corners, cell, cell, steps_[step][1])
        if steps_[step][0] > 1:
            drawing.marks("triangle", [(x + cell / 2, y + cell / 2) for x, y in corners], "mark over", 2.6)
    for (size_, tile), (begin, length), is_row in (
        ((extent[0], tiles[0]), (top, height), True),
        ((extent[1], tiles[1]), (left, width), False),
    ):
        if tile and size_ / tile <= 32:
            for start in range(tile, size_, tile):
                place = begin + length * start / size_
                ends = ((left, place), (left + width, place)) if is_row else ((place, top), (place, top + height))
                drawing.line(*ends, "landmark")
    drawing.words(left - 6, top + 10, "0", "tick", "end")
    drawing.words(left - 6, top + height, str(extent[0] - 1), "tick", "end")
    drawing.words(left, top + height + 13, "0", "tick", "middle")
    drawing.words(left + width, top + height + 13, str(extent[1] - 1), "tick", "end")
    drawing.words(left, 14, f"{axes[0]} down, {axes[1]} across", "soft")
    for step, (edge, kind) in enumerate(steps_):  # below the map, so that a narrow screen shows it whole
        x, y = left + 140 * (step % 2), top + height + 26 + 18 * (step // 2)
        drawing.box(x, y, 14, 14, kind)
        name = "not finite" if edge == math.inf else f"up to {rho(edge) if edge > 1 else number_of(edge)}"
        drawing.words(x + 20, y + 11, f"{name}, the bound" if edge == 1 else name, "tick")
    return drawing.svg()


def heat_steps(sizes: Sequence[float]) -> list[tuple[float, str]]:
    """The steps of a heat map, each with its largest rho and its class: two up to the bound, and up to four above it.

    The steps above the bound are equal on a scale of logarithms, up to the largest rho of the map. A step of its own
    holds what is not finite.
    """
    finite = [size for size in sizes if math.isfinite(size)]
    most = max(finite, default=0.0)
    count = 0 if most <= 1 else 1 if most < 2 else 2 if most < 10 else 4
    kinds = {0: (), 1: ("h5",), 2: ("h3", "h5"), 4: ("h2", "h3", "h4", "h5")}[count]
    # A step ends at a number that its label shows.
    edges = [float(f"{most ** (step / count):.2g}") for step in range(1, count)] + ([most] if count else [])
    found = [(0.1, "h0"), (1.0, "h1"), *zip(edges, kinds, strict=True)]
    return found if len(finite) == len(sizes) else [*found, (math.inf, "h6")]


# ------------------------------------------------------------------------------------------------------------- speeds


def bars(rows: Sequence[tuple[str, float, str]], label: str, ceiling: float | None) -> Markup:
    """A bar for each implementation. rows: its name, its TFLOP/s, and the words beside the bar."""
    left, step, width = 150.0, 22.0, 300.0
    most = max([value for _, value, _ in rows] + ([ceiling] if ceiling else []))
    drawing = Drawing(left + width + 130, step * len(rows) + 24, label)
    if ceiling:
        drawing.line((left + width * ceiling / most, 0), (left + width * ceiling / most, step * len(rows) + 4), "bound")
    for index, (name, value, words) in enumerate(rows):
        y = 6 + index * step
        drawing.words(left - 8, y + 11, name, "", "end")
        drawing.box(left, y, max(1.0, width * value / most), 14, "fill speed")
        drawing.words(left + width * value / most + 6, y + 11, words, "tick halo")
    if ceiling:
        drawing.words(
            left + width * ceiling / most, step * len(rows) + 18, f"the chip's ceiling, {ceiling:g}", "tick", "end"
        )
    return drawing.svg()


def scatter(points: Sequence[tuple[str, float, float]], label: str, axes: tuple[str, str]) -> Markup:
    """A point with its name for each implementation. points: the name, the error and the speed."""
    left, top, width, height = 56.0, 22.0, 430.0, 220.0
    drawing = Drawing(left + width + 110, top + height + 40, label)
    errors, speeds = [x for _, x, _ in points], [y for _, _, y in points]
    across = Scale(min(errors) / 1.5, max(errors) * 1.5, left, left + width)
    up = Scale(0, max(speeds) * 1.08, top + height, top, "linear")
    drawing.words(left - 48, 11, axes[1], "soft")
    for value, tick in steps(max(speeds) * 1.08):
        drawing.line((left, up(value)), (left + width, up(value)), "grid")
        drawing.words(left - 6, up(value) + 3.5, tick, "tick", "end")
    low, high = across.low, across.high
    bases = (1, 1.5, 2, 3, 4, 5, 7) if high / low < 20 else (1, 3)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    last = -math.inf
    for value in [base * 10.0**power for power in decades for base in bases]:
        if low <= value <= high and across(value) - last > 44:
            last = across(value)
            drawing.line((last, top), (last, top + height), "grid")
            drawing.words(last, top + height + 14, scientific(value), "tick", "middle")
    drawing.words(left + width / 2, top + height + 34, axes[0], "soft", "middle")
    order = sorted(points, key=lambda point: -point[2])
    marks = [(across(error), up(speed)) for _, error, speed in order]
    for index, place in enumerate(marks):
        drawing.marks(MARKS[index % 4], [place], f"mark series c{index % 6}", 4)
    edges = Box(left, top - 8, drawing.width, top + height)
    for (x, y), label_, (name, _, _) in zip(
        marks, _labels(marks, [name for name, _, _ in order], edges), order, strict=True
    ):
        if abs(label_.y - y) > 16:
            drawing.line((x, y), (label_.x - 2 if label_.anchor == "start" else label_.x + 2, label_.y - 3.5), "grid")
        drawing.words(label_.x, label_.y, name, "tick halo", label_.anchor)
    return drawing.svg()


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether the two overlap."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def holds(self, other: "Box") -> bool:
        """Whether the other lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )


class _Label(NamedTuple):
    x: float
    y: float
    anchor: str


def _labels(marks: Sequence[Point], names: Sequence[str], edges: Box) -> list[_Label]:
    """A place for the name of each mark: the nearest one where it covers no mark and no other name."""
    taken = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    found = []
    for (x, y), name in zip(marks, names, strict=True):
        wide = LETTER * len(name)
        shifts = sorted(range(-120, 121, 6), key=abs)
        label, box = _Label(x + 9, y + 3.5, "start"), edges
        for shift, side in product(shifts, ("start", "end")):
            start = x + 9 if side == "start" else x - 9 - wide
            box = Box(start, y + shift - 6, start + wide, y + shift + 6)
            if edges.holds(box) and not any(box.meets(other) for other in taken):
                label = _Label(start if side == "start" else start + wide, y + shift + 3.5, side)
                break
        taken.append(box)
        found.append(label)
    return found


# -------------------------------------------------------------------------------------------- the matrix of the mutants


@dataclass(frozen=True)
class Score:
    """A row of the matrix of mutants: a judge, and what it does with each of the specimens."""

    name: str
    figure: str
    found: tuple[str, ...]  # "told", "alike" (the right kernel is rejected, too), "missed" or "" (not tried)
    strong: bool = False


def kills(
    groups: Sequence[tuple[str, int]],
    names: Sequence[tuple[str, str]],
    sections: Sequence[tuple[str, Sequence[Score]]],
    label: str,
) -> Markup:
    """Judges down, specimens across.

    A filled cell is told from the right kernel, a pale one is rejected like the right kernel, a dot is let through, and
    a gap was not tried. groups: the classes of faults and the number of their specimens. names: the name and address of
    each specimen; without them, the columns lead nowhere.
    """
    left, top, tall, gap, right = 190.0, 66.0, 13.0, 6.0, 76.0
    room = WIDEST - left - right - gap * len(groups)
    cell = min(5.0, max(3.0, room / max(1, sum(count for _, count in groups))))
    starts: list[float] = []
    x = left
    for _, count in groups:
        for _ in range(count):
            starts.append(x)
            x += cell
        x += gap
    end = x
    rows = sum(len(scores) for _, scores in sections)
    height = top + rows * tall + len(sections) * 22
    drawing = Drawing(x + right, height, label)
    place = 0
    for title, count in groups:
        drawing.words(starts[place] + count * cell / 2, top - 8, title, "tick", "start", -50)
        place += count
    y = top
    for title, scores in sections:
        drawing.words(0, y + 12, title, "head")
        y += 18
        for score in scores:
            drawing.words(left - 8, y + 9.5, score.name, "strong" if score.strong else "tick", "end")
            kind = "ours" if score.strong else "theirs"
            at = {
                word: [x for x, one in zip(starts, score.found, strict=True) if one == word]
                for word in ("told", "alike", "missed")
            }
            drawing.boxes([(x, y + 1) for x in at["told"]], cell - 0.8, tall - 3, f"fill {kind}")
            drawing.boxes([(x, y + 4.5) for x in at["alike"]], cell - 0.8, 3, "fill alike")
            if names:
                drawing.boxes([(x + 0.3 * cell, y + tall / 2 - 1) for x in at["missed"]], 1.4, 1.4, "fill missed")
            drawing.words(end, y + 9.5, score.figure, "strong" if score.strong else "tick")
            y += tall
        y += 4
    for start, (name, address) in zip(starts, names, strict=False):
        drawing.link(address, name, start, top, cell, height - top)
    return drawing.svg()


# ----------------------------------------------------------------------------------------------------- the explanation


def number_line(exact: float, got: float, bound: float, ulp: float, label: str) -> Markup:
    """The worked example: the exact result, the numbers of the dtype around it, the bound and the answer."""
    width, height, left = 640.0, 150.0, 30.0
    drawing = Drawing(width + 2 * left, height, label)
    reach = 1.35 * max(bound, abs(got - exact))
    across = Scale(exact - reach, exact + reach, left, left + width, "linear")
    y = 84.0
    drawing.box(across(exact - bound), y - 26, across(exact + bound) - across(exact - bound), 52, "fill allowed")
    drawing.line((left, y), (left + width, y), "axis")
    first = math.ceil((exact - reach) / ulp)
    count = math.floor((exact + reach) / ulp) - first + 1
    stride = max(1, count // 160)
    for index in range(0, count, stride):
        at = across((first + index) * ulp)
        drawing.line((at, y - 5), (at, y + 5), "axis")
    drawing.line((across(exact), y - 40), (across(exact), y + 26), "exact")
    drawing.words(across(exact), y - 45, "exact result", "head", "middle")
    failing = abs(got - exact) > bound
    drawing.marks(
        "triangle" if failing else "circle", [(across(got), y)], f"mark {'failed' if failing else 'passed'}", 5
    )
    drawing.words(across(got), y - 14, "answer", "worst" if failing else "head", "middle")
    drawing.line((across(exact - bound), y + 36), (across(exact + bound), y + 36), "axis")
    for side in (exact - bound, exact + bound):
        drawing.line((across(side), y + 31), (across(side), y + 41), "axis")
    drawing.words(across(exact), y + 54, f"allowed by its arithmetic: \u00b1{number_of(bound)}", "tick", "middle")
    return drawing.svg()


def number_of(value: float) -> str:
    """A small number with two digits."""
    return f"{value:.2g}"


def places(value: float) -> str:
    """A place on an axis, as a table shows it."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.6g}"
