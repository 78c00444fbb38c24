"""The charts of the report, as static SVG.

Altair describes a chart and vl-convert renders it, in this process. A chart holds no script and needs no network.

Text, axes and rules take the text colour of the page (currentColor), so a chart is readable in light and dark mode.
Series differ by shape or dash as well as by colour. If Altair or vl-convert is not installed, `missing()` says so, and
the report shows its tables without charts.
"""

import importlib
import math
import re
from collections.abc import Callable
from html import escape
from typing import Any

from markupsafe import Markup

from flashproof.reports.evidence import TENSORS, Machine, size
from flashproof.reports.tables import Growth, Series, Sweep

# These colours are readable on white and on near-black: their contrast is above 3 on both.
BLUE, ORANGE, GREEN, PINK, VIOLET, BROWN = "#2f7fd1", "#d0700f", "#17957a", "#d1487f", "#8a6fd1", "#a0763a"
PALETTE = (BLUE, ORANGE, GREEN, PINK, VIOLET, BROWN)
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
BAD = "#d8433a"
FONT = "system-ui, sans-serif"
WIDTH = 300
LANDMARKS = 30  # an axis shows at most this many places of both signs one by one
FOOT = 1e-4  # a smaller rho is drawn at the foot of a chart

_TENSOR_TITLES = {"out": "out", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}
_AXIS_TITLES = {"queries": "queries (tokens)", "magnitude": "magnitude of the scores", "score": "score"}


def missing() -> str | None:
    """A message such as "Altair: not installed" about the first missing package. None if no package is missing."""
    for module, title in (("altair", "Altair"), ("vl_convert", "vl-convert")):
        try:
            importlib.import_module(module)
        except ImportError:
            return f"{title}: not installed"
    return None


def sweep_chart(sweep: Sweep, machine: Callable[[Machine], str], title: str, label: str, identity: str) -> Markup:
    """A chart of rho along an axis: one panel for each dtype and machine, with the line rho = 1.

    A rho below FOOT is drawn at the foot. A rho that is not finite is drawn as a cross at the top.

    machine: gives the label of a machine, which is empty if there is only one machine.
    label: the name of the chart for screen readers.
    identity: a prefix for the ids inside the SVG; it must be unique on the page.
    """
    import altair as alt

    figures = [size(judged.rho) for panel in sweep.panels for _, row in panel.rows for judged in row if judged]
    foot, top = _decades([1.0, *figures])
    foot, top = max(foot, FOOT), 2.0 if max(figures) <= 1 else max(top, 10.0)
    rows: list[dict[str, object]] = []
    for panel in sweep.panels:
        for place, row in panel.rows:
            for tensor, judged in zip(panel.tensors, row, strict=True):
                if judged is None:
                    continue
                rho = size(judged.rho)
                rows.append(
                    {
                        "panel": ", ".join(filter(None, (panel.dtype, machine(panel.machine)))),
                        "place": place,
                        "tensor": _TENSOR_TITLES[tensor],
                        "rho": min(max(rho, foot), top),
                        "finite": math.isfinite(rho),
                        "bound": 1,
                    }
                )
    tensors = [_TENSOR_TITLES[t] for t in TENSORS if any(row["tensor"] == _TENSOR_TITLES[t] for row in rows)]
    x = _place_axis(sweep)
    y = alt.Y(
        "rho:Q",
        title="rho (error / bound)",
        scale=alt.Scale(type="log", domain=[foot, top], nice=False),
        axis=_powers(foot, top),
    )
    order = list(_TENSOR_TITLES.values())
    legend = alt.Legend(columns=5)
    colour = alt.Color(
        "tensor:N",
        title=None,
        scale=alt.Scale(domain=tensors, range=[PALETTE[order.index(t)] for t in tensors]),
        legend=legend,
    )
    shape = alt.Shape(
        "tensor:N",
        title=None,
        scale=alt.Scale(domain=tensors, range=[SHAPES[order.index(t)] for t in tensors]),
        legend=legend,
    )
    base = alt.Chart(width=WIDTH, height=130)
    bound = base.mark_rule(color="currentColor", strokeDash=[4, 3]).encode(y=alt.Y("max(bound):Q"))
    line = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=colour, detail="tensor:N")
    points = (
        base.transform_filter("datum.finite")
        .mark_point(filled=True, size=42, opacity=1)
        .encode(x=x, y=y, color=colour, shape=shape)
    )
    broken = (
        base.transform_filter("!datum.finite")
        .mark_point(shape="cross", size=90, color=BAD, filled=True, angle=45, opacity=1)
        .encode(x=x, y=y)
    )
    chart = alt.layer(bound, line, points, broken, data=alt.InlineData(values=rows)).facet(
        row=_panels(rows), title=_title(title), spacing=14
    )
    return _svg(chart, label, identity)


def memory_chart(
    growths: list[Growth], machine: Callable[[Machine], str], title: str, label: str, identity: str
) -> Markup:
    """A chart of memory in bytes against sequence length, beside the size of the full attention matrix.

    Both axes are logarithmic. Zero bytes are drawn at the foot. The last four parameters are those of `sweep_chart`.
    """
    import altair as alt

    matrix = "full attention matrix"
    rows: list[dict[str, object]] = []
    counts = [
        float(count) for growth in growths for row in growth.rows for count in (row.measured_bytes, row.matrix_bytes)
    ]
    foot = 2.0 ** math.floor(math.log2(min([count for count in counts if count > 0], default=1.0)))
    for growth in growths:
        panel = ", ".join(
            filter(None, (growth.dtype, f"{growth.heads} heads", f"dim {growth.dim}", machine(growth.machine)))
        )
        for row in growth.rows:
            rows.append(
                {
                    "panel": panel,
                    "length": row.length,
                    "series": f"measured, {growth.direction}",
                    "bytes": max(row.measured_bytes, foot),
                }
            )
            rows.append({"panel": panel, "length": row.length, "series": matrix, "bytes": max(row.matrix_bytes, foot)})
    names = sorted({str(row["series"]) for row in rows} - {matrix}, reverse=True)
    domain = [*names, matrix]
    colours = [BLUE if name.endswith("forward") else ORANGE for name in names] + ["currentColor"]
    shapes = ["circle" if name.endswith("forward") else "square" for name in names] + ["diamond"]
    x = alt.X(
        "length:Q",
        title="sequence length (queries = keys)",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(format="d", labelOverlap="greedy", labelSeparation=6),
    )
    y = alt.Y(
        "bytes:Q",
        title="bytes",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(labelExpr=_BYTES, labelOverlap=True, tickCount=6),
    )
    colour = alt.Color("series:N", title=None, scale=alt.Scale(domain=domain, range=colours))
    base = alt.Chart(width=WIDTH, height=170)
    line = base.mark_line(strokeWidth=1.5).encode(
        x=x,
        y=y,
        color=colour,
        strokeDash=alt.condition(f"datum.series == '{matrix}'", alt.value([4, 3]), alt.value([1, 0])),
    )
    points = base.mark_point(filled=True, size=42, opacity=1).encode(
        x=x, y=y, color=colour, shape=alt.Shape("series:N", title=None, scale=alt.Scale(domain=domain, range=shapes))
    )
    chart = alt.layer(line, points, data=alt.InlineData(values=rows)).facet(
        row=_panels(rows), title=_title(title), spacing=14
    )
    return _svg(chart, label, identity)


_BYTES = (
    "datum.value >= 1073741824 ? format(datum.value / 1073741824, '~g') + ' GiB'"
    " : datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + ' MiB'"
    " : datum.value >= 1024 ? format(datum.value / 1024, '~g') + ' KiB' : format(datum.value, '~g') + ' B'"
)


def curve_chart(
    curves: list[Series], machine: Callable[[Machine], str], title: str, label: str, identity: str
) -> Markup:
    """A chart of named curves over one x.

    A curve has a gap where its value is not finite. A cross at the top edge marks each such place. The last four
    parameters are those of `sweep_chart`.
    """
    import altair as alt

    values = [y for one in curves for y in one.curve.y if y is not None]
    logarithmic = (
        bool(values) and min(values) >= 0 and max(values) > 50 * min((y for y in values if y > 0), default=math.inf)
    )
    foot, top = (
        _decades([y for y in values if y > 0])
        if logarithmic
        else (min([0.0, *values]), max(values, default=1.0) or 1.0)
    )
    rows: list[dict[str, object]] = []
    names = []
    for one in curves:
        name = ", ".join(filter(None, (one.curve.series, machine(one.machine))))
        names.append(name)
        stretch = 0
        for x, y in sorted(zip(one.curve.x, one.curve.y, strict=True), key=lambda point: point[0]):
            stretch += y is None  # each stretch is a line of its own, so no line crosses a gap
            rows.append(
                {
                    "x": x,
                    "y": top if y is None else max(y, foot),
                    "finite": y is not None,
                    "series": name,
                    "stretch": f"{name} {stretch}",
                }
            )
    first = curves[0].curve
    xs = alt.X(
        "x:Q",
        title=first.x_title,
        scale=alt.Scale(zero=False, nice=False),
        axis=alt.Axis(labelOverlap="greedy", labelSeparation=6, format="~g"),
    )
    scale = alt.Scale(type="log", domain=[foot, top], nice=False) if logarithmic else alt.Scale(domain=[foot, top])
    ys = alt.Y(
        "y:Q",
        title=first.y_title,
        scale=scale,
        axis=_powers(foot, top) if logarithmic else alt.Axis(format="~g", labelOverlap=True, tickCount=5),
    )
    domain = list(dict.fromkeys(names))
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(domain))]
    shapes = [SHAPES[(i + i // len(PALETTE)) % len(SHAPES)] for i in range(len(domain))]
    colour = alt.Color("series:N", title=None, scale=alt.Scale(domain=domain, range=colours))
    base = alt.Chart(alt.InlineData(values=rows), width=440, height=250)
    finite, broken = base.transform_filter("datum.finite"), base.transform_filter("!datum.finite")
    chart = alt.layer(
        finite.mark_line(strokeWidth=1.5).encode(x=xs, y=ys, color=colour, detail="stretch:N"),
        finite.mark_point(filled=True, size=28, opacity=1).encode(
            x=xs,
            y=ys,
            color=colour,
            shape=alt.Shape("series:N", title=None, scale=alt.Scale(domain=domain, range=shapes)),
        ),
        broken.mark_point(shape="cross", angle=45, size=90, filled=True, opacity=1, color=BAD).encode(x=xs, y=ys),
    ).properties(title=_title(title))
    return _svg(chart, label, identity)


def _decades(figures: list[float]) -> tuple[float, float]:
    """The lower and the upper end of the whole decades around the finite positive figures; at least one decade."""
    logs = [math.log10(figure) for figure in figures if 0 < figure < math.inf]
    low, high = math.floor(min(logs, default=-1.0)), math.ceil(max(logs, default=0.0))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _powers(foot: float, top: float) -> Any:
    """An axis with grid lines at powers of ten, at most seven of them."""
    import altair as alt

    low, high = round(math.log10(foot)), math.floor(math.log10(top) + 1e-9)
    return alt.Axis(
        values=[10.0**power for power in range(low, high + 1, -(-(high - low + 1) // 7))],
        format="~g" if low > -5 and high < 7 else "~e",
    )


def _place_axis(sweep: Sweep) -> Any:
    """The x axis of a sweep.

    Places of both signs stand side by side and not to scale if there are at most LANDMARKS. Positive places that span a
    factor of 4 get a logarithmic axis with base 2. All others get a linear axis.
    """
    import altair as alt

    places = [place for panel in sweep.panels for place, _ in panel.rows]
    title = _AXIS_TITLES.get(sweep.axis, sweep.axis)
    if min(places) < 0 < max(places) and len(set(places)) <= LANDMARKS:
        return alt.X(
            "place:O", title=f"{title} (landmarks, not to scale)", axis=alt.Axis(labelAngle=-90, format="~g", grid=True)
        )
    spread = min(places) > 0 and max(places) >= 4 * min(places)
    scale = (
        alt.Scale(type="log", base=2, nice=False, padding=6) if spread else alt.Scale(zero=False, nice=False, padding=6)
    )
    return alt.X(
        "place:Q",
        title=title,
        scale=scale,
        axis=alt.Axis(labelOverlap="greedy", labelSeparation=6, format="d" if sweep.axis == "queries" else "~g"),
    )


def _panels(rows: list[dict[str, object]]) -> Any:
    import altair as alt

    order = list(dict.fromkeys(str(row["panel"]) for row in rows))
    header = alt.Header(
        title=None,
        labelOrient="top",
        labelAnchor="start",
        labelColor="currentColor",
        labelFontSize=12,
        labelFontWeight="bold",
        labelPadding=4,
    )
    return alt.Row("panel:N", sort=order, header=header)


def _title(text: str) -> Any:
    import altair as alt

    return alt.Title(text, anchor="start", fontSize=13, color="currentColor", offset=8)


_STYLE = {
    "aria": False,  # the SVG as a whole has a name, and the table beside it holds its figures
    "background": "transparent",
    "font": FONT,
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "domainColor": "currentColor",
        "tickColor": "currentColor",
        "gridColor": "currentColor",
        "gridOpacity": 0.13,
        "domainOpacity": 0.5,
        "tickOpacity": 0.5,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 10,
    },
    "legend": {
        "labelColor": "currentColor",
        "labelFontSize": 12,
        "labelLimit": 420,
        "orient": "bottom",
        "direction": "horizontal",
        "columns": 1,
    },
}


def _svg(chart: Any, label: str, identity: str) -> Markup:
    """Renders a chart as SVG.

    label: the name of the chart for screen readers.
    identity: a prefix for the ids inside the SVG, so that the charts of a page do not collide.
    """
    import altair as alt
    import vl_convert

    spec = chart.to_dict(validate=False) | {"config": _STYLE}
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known = vl_convert.get_vegalite_versions()
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=version if version in known else known[-1])
    svg = re.sub(r'\bid="', f'id="{identity}-', svg)
    svg = svg.replace("url(#", f"url(#{identity}-").replace('href="#', f'href="#{identity}-')
    return Markup(f'<svg role="img" aria-label="{escape(label)}"' + svg.removeprefix("<svg"))


def places(value: float) -> str:
    """A place on an axis, as the table beside the chart shows it."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.6g}"
