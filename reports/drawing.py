"""A small drawing: scales, lines, marks and words, as static SVG.

A drawing holds no script, no colour and no font. Its classes get their colours from the style of the page, so that one
drawing is right in light and dark mode and on paper.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

Point = tuple[float, float]
Sized = Sequence[tuple[float, str]]  # ticks: a place and its label


class Scale(NamedTuple):
    """A scale from values to pixels. Values outside of the domain are drawn at its ends.

    kind: "log", "linear", or "root", on which differences between small values show.
    """

    low: float
    high: float
    start: float
    end: float
    kind: str = "log"

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        low, value, high = (self._moved(each) for each in (self.low, value, self.high))
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1.0)

    def _moved(self, value: float) -> float:
        if self.kind == "log":
            return math.log(value)
        return math.sqrt(value) if self.kind == "root" else value


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return "0" if abs(value) < 0.05 else f"{value:.1f}".removesuffix(".0")


class Drawing:
    """Collects the elements of an SVG."""

    def __init__(self, width: float, height: float, label: str) -> None:
        """label: what the drawing shows, for those who do not see it."""
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []
        self.texts: dict[str, list[str]] = {}  # by their class and anchor; they lie above the parts
        self.links: list[str] = []  # above the texts

    def line(self, one: Point, other: Point, kind: str) -> None:
        """A straight line."""
        self.lines([(one, other)], kind)

    def lines(self, ends: Iterable[tuple[Point, Point]], kind: str) -> None:
        """Straight lines, as one path."""
        run = "".join(f"M{_points([one])}{_to(one, other)}" for one, other in ends)
        if run:
            self.parts.append(f'<path class="{kind}" d="{run}"/>')

    def curve(self, points: Sequence[Point], kind: str) -> None:
        """A line through points."""
        if len(points) > 1:
            self.parts.append(f'<path class="{kind}" d="{_run(points)}"/>')

    def area(self, points: Sequence[Point], kind: str) -> None:
        """A filled polygon, whose corners lie at whole pixels."""
        if len(points) > 2:
            whole = [(round(x), round(y)) for x, y in points]
            self.parts.append(f'<path class="{kind}" d="{_run(whole)}z"/>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """A filled rectangle. title: what a pointer on it shows."""
        self.parts.append(_box(x, y, width, height, kind, title))

    def boxes(self, corners: Iterable[Point], width: float, height: float, kind: str) -> None:
        """Equal filled rectangles, as one path."""
        run = "".join(
            f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z" for x, y in corners
        )
        if run:
            self.parts.append(f'<path class="{kind}" d="{run}"/>')

    def marks(self, shape: str, points: Iterable[Point], kind: str, size: float = 2.2) -> None:
        """Marks at points, as one path: "circle", "triangle", "diamond", "square", "cross" or "dot"."""
        if shape == "dot":  # lines without length, whose round ends are dots of the width of the line
            run = "".join(f"m{step}h0" for step in _steps(points))
        else:
            run = "".join(_mark(shape, x, y, size) for x, y in points)
        if run:
            self.parts.append(f'<path class="{kind}" d="{run}"/>')

    def words(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", turn: float = 0) -> None:
        """A line of text. anchor: "start", "middle" or "end". turn: degrees."""
        about = f' class="{kind}"' if kind else ""
        about += "" if anchor == "start" else f' text-anchor="{anchor}"'
        turned = f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
        words = f'<text x="{number(x)}" y="{number(y)}"{turned}>{escape(text)}</text>'
        self.texts.setdefault(about, []).append(words)

    def link(self, address: str, title: str, x: float, y: float, width: float, height: float) -> None:
        """An invisible rectangle that leads somewhere. The page holds the same link for the keyboard."""
        box = _box(x, y, width, height, "hit", title)
        self.links.append(f'<a href="{escape(address)}" tabindex="-1">{box}</a>')

    def svg(self) -> Markup:
        """The drawing. One that holds links is a group for those who do not see it, and not an image."""
        role = "group" if self.links else "img"
        texts = [f"<g{about}>{''.join(words)}</g>" for about, words in self.texts.items()]
        return Markup(
            f'<svg role="{role}" aria-label="{escape(self.label)}" viewBox="0 0 {number(self.width)} '
            f'{number(self.height)}" width="{number(self.width)}" height="{number(self.height)}">'
            + "".join([*self.parts, *texts, *self.links])
            + "</svg>"
        )


def _box(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect class="{kind}" {place}' + (f"><title>{escape(title)}</title></rect>" if title else "/>")


def _to(one: Point, other: Point) -> str:
    """A straight line from one point to another. A level or upright line is shorter to write."""
    if number(one[1]) == number(other[1]):
        return f"H{number(other[0])}"
    return f"V{number(other[1])}" if number(one[0]) == number(other[0]) else f"L{_points([other])}"


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{number(x)} {number(y)}" for x, y in points)


def _steps(points: Iterable[Point]) -> list[str]:
    """The first point, and the step to each next one. Steps are shorter to write than points."""
    tenths = [(round(10 * x), round(10 * y)) for x, y in points]
    steps_ = [(x - left, y - top) for (left, top), (x, y) in pairwise(tenths)]
    return [_pair(*step) for step in (*tenths[:1], *steps_)]


def _pair(right: int, down: int) -> str:
    return f"{_short(right)} {_short(down)}".replace(" -", "-")


def _run(points: Sequence[Point]) -> str:
    """A line through points, in few letters. Between the ends of a level line, it names no point."""
    (x, y), *rest = [(round(10 * x), round(10 * y)) for x, y in points]
    path = [f"m{_pair(x, y)}"]
    for (next_x, next_y), after in zip(rest, [*rest[1:], None], strict=True):
        is_within_a_level_line = after and y == next_y == after[1] and (next_x - x) * (after[0] - next_x) >= 0
        if not is_within_a_level_line:
            path.append(_step(next_x - x, next_y - y))
            x, y = next_x, next_y
    return "".join(path)


def _step(right: int, down: int) -> str:
    """A line to a point so many tenths away."""
    if right and down:
        return f"l{_pair(right, down)}"
    return f"h{_short(right)}" if right else f"v{_short(down)}"


def _short(tenths: int) -> str:
    """A number of tenths in few letters: ".5", "-.5", "12", "3.4"."""
    text = f"{abs(tenths) // 10 or ''}{f'.{abs(tenths) % 10}' if tenths % 10 else ''}" or "0"
    return f"-{text}" if tenths < 0 else text


def _mark(shape: str, x: float, y: float, r: float) -> str:
    d = number(2 * r)
    if shape == "circle":
        return f"M{number(x - r)} {number(y)}a{number(r)} {number(r)} 0 1 0 {d} 0a{number(r)} {number(r)} 0 1 0 -{d} 0z"
    if shape == "square":
        return f"M{number(x - r)} {number(y - r)}h{d}v{d}h-{d}z"
    if shape == "triangle":
        r *= 1.35
        return f"M{number(x)} {number(y - r)}L{number(x + r)} {number(y + 0.8 * r)}H{number(x - r)}z"
    if shape == "diamond":
        r *= 1.3
        return f"M{_points([(x, y - r), (x + r, y), (x, y + r), (x - r, y)])}z"
    r *= 1.2  # a cross
    return f"M{_points([(x - r, y - r), (x + r, y + r)])}M{_points([(x - r, y + r), (x + r, y - r)])}"


def steps(most: float, count: int = 5) -> Sized:
    """About `count` ticks from 0 to `most`, at round numbers."""
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * base for base in (1, 2, 5, 10) if power * base * (count + 0.5) >= most)
    return [(step * k, f"{step * k:g}") for k in range(int(most / step + 1e-9) + 1)]


def powers(low: float, high: float, step: int = 1) -> Sized:
    """Ticks at the powers of ten from low to high, every `step` decades, so that 1 is one of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [(10.0**power, power_label(power)) for power in range(first, last + 1) if power % step == 0]


def power_label(power: int) -> str:
    """A power of ten: "0.01", "1", "1e4"."""
    return f"{10.0**power:g}" if -4 < power < 4 else f"1e{power}"
