"""Lines and numbered marks between two axes, each linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl.viz.svg import Canvas, Picture, Point, circle, request_colors

_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 722.0, 70.0, 300.0
_LEGEND = 26
_NUMBER = 20.0
_LOWEST = _BOTTOM - 10
_SHIFTS = (0, -1, 1, -2, 2, -3, 3, -4, 4)
_AT = tuple((0.0, _NUMBER * shift) for shift in _SHIFTS)
_BESIDE = tuple((15.0, _NUMBER * shift - 15.0) for shift in _SHIFTS)
_BELOW = tuple((28.0 * across, down) for down in (28.0, 50.0, -28.0, -50.0) for across in (0, 1, -1, 2, -2))
"""From the end of a line without a dot, from one with a dot, and from a mark, to where its number may stand: the first
place that is free."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its name, unit included, and whether its steps are factors."""

    name: str
    log: bool = False


def chart(
    lines: Mapping[str, Sequence[Point]],
    marks: Mapping[str, Point],
    title: str,
    across: Axis,
    up: Axis,
    limits: Mapping[str, float] | None = None,
    dots: bool = False,
) -> Picture:
    """Every line and every mark has a number, which the legend below explains.

    Args:
        lines: name → points in the order in which the line goes through them, at least one.
        marks: name → the one point where it stands.
        title: what is drawn.
        across, up: the axes.
        limits: name → a height that should not be exceeded.
        dots: whether each point of a line was measured: it has a dot then, and the line its colour.
    """
    points = [point for line in lines.values() for point in line] + list(marks.values())
    heights = [*(point[1] for point in points), *(limits or {}).values()]
    plot = _Plot(title, across, up, _scale([point[0] for point in points], across), _scale(heights, up), dots)
    for name, limit in (limits or {}).items():
        plot.limit(name, limit)
    for name, line in lines.items():
        plot.line(name, line)
    plot.marks(marks)
    return plot.picture()


@dataclass(frozen=True, slots=True)
class _Scale:
    """From a value to its share of the axis' length; ``low`` and ``high`` are logarithms on a logarithmic axis."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool

    def __call__(self, value: float) -> float:
        return ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)


def _scale(values: Sequence[float], axis: Axis) -> _Scale:
    if axis.log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        return _Scale(low, high, [10.0**power for power in range(low, high + 1)], True)
    top = max(values) or 1.0
    steps = (factor * 10.0**power for power in range(-9, 15) for factor in (1, 2, 5))
    step = next(step for step in steps if top <= 6 * step)
    count = math.ceil(top / step - 1e-9)
    return _Scale(0.0, count * step, [step * number for number in range(count + 1)], False)


class _Plot:
    """One drawing, and where numbers stand in it.

    Args:
        title: of the chart.
        across, up: the axes.
        x, y: their scales.
        dots: whether points have dots, which the numbers then leave free.
    """

    def __init__(self, title: str, across: Axis, up: Axis, x: _Scale, y: _Scale, dots: bool) -> None:
        self.canvas, self.x, self.y, self.dots = Canvas(), x, y, dots
        self.names: list[str] = []
        self.covered: list[Point] = []
        self.says = [f"{title}: {up.name} by {across.name}."]
        self.canvas.text(14, 26, title, "text strong", "start")
        self.canvas.text(14, _TOP - 18, up.name, "muted small", "start")
        self.canvas.text(_RIGHT, _BOTTOM + 36, across.name, "muted small", "end")
        for tick in y.ticks:
            height = self._height(tick)
            self.canvas.path(f"M{_LEFT:g} {height:g}H{_RIGHT:g}", "rule")
            self.canvas.text(_LEFT - 8, height + 4, _label(tick), "muted small", "end")
        for tick in x.ticks:
            self.canvas.text(_LEFT + x(tick) * (_RIGHT - _LEFT), _BOTTOM + 18, _label(tick), "muted small")

    def limit(self, name: str, limit: float) -> None:
        """A line across with its name on it."""
        height = self._height(limit)
        self.canvas.path(f"M{_LEFT:g} {height:.1f}H{_RIGHT:g}", "line dashed")
        self.canvas.text(_LEFT + 6, height - 5, f"{name}: {_label(limit)}", "text small strong", "start")
        self.says.append(f"{name}: {_label(limit)}.")

    def line(self, name: str, points: Sequence[Point]) -> None:
        """A line with its number at its end."""
        number, places = len(self.names), [self._place(point) for point in points]
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in places)
        colour = request_colors(number)[0] if self.dots else ""
        self.canvas.path(f"M{path}", "line dashed" if number % 2 else "line", stroke=colour)
        for left, top in places if self.dots else ():
            self.canvas.path(circle(left, top, 3.5), fill=colour)
        self._number(name, self._free_place(places[-1], _BESIDE if self.dots else _AT))
        self.says.append(f"{number + 1}. {name}: " + ", ".join(f"{_label(a)} → {_label(b)}" for a, b in points) + ".")

    def marks(self, marks: Mapping[str, Point]) -> None:
        """Numbers where they stand; among dots, circles there and lines from them to the numbers."""
        numbers = places = [self._place(point) for point in marks.values()]
        if self.dots:
            self.covered += places
            numbers = [self._free_place(place, _BELOW) for place in places]
            for (x, y), (to_x, to_y) in zip(places, numbers, strict=True):
                self.canvas.path(f"{circle(x, y, 7)}M{x:g} {y:g}L{to_x:g} {to_y:g}")
        for (name, point), place in zip(marks.items(), numbers, strict=True):
            self._number(name, place)
            self.says.append(f"{len(self.names)}. {name}: {_label(point[0])} → {_label(point[1])}.")

    def picture(self) -> Picture:
        return self.canvas.picture(_BOTTOM + 50 + _LEGEND * len(self.names), "\n".join(self.says))

    def _place(self, point: Point) -> Point:
        return _LEFT + self.x(point[0]) * (_RIGHT - _LEFT), self._height(point[1])

    def _height(self, value: float) -> float:
        return _BOTTOM - self.y(value) * (_BOTTOM - _TOP)

    def _free_place(self, point: Point, asides: Sequence[Point]) -> Point:
        """The first place aside of ``point`` where a number covers nothing; the first of all if there is none."""
        x, middle = point[0], min(max(point[1], _TOP), _LOWEST)
        for across, down in asides:
            place = x + across, middle + down
            if _LEFT <= place[0] <= _RIGHT + 16 and _TOP <= place[1] <= _LOWEST and not self._is_covered(place):
                self.covered.append(place)
                return place
        return x, middle

    def _is_covered(self, place: Point) -> bool:
        return any(abs(x - place[0]) < 22 and abs(y - place[1]) < _NUMBER for x, y in self.covered)

    def _number(self, name: str, place: Point) -> None:
        """A number in a box at its place, and in the legend."""
        number, x, y = len(self.names), place[0], min(max(place[1], _TOP), _LOWEST)
        fill, ink = request_colors(number)
        for left, top in ((x - 11, y - 10), (14.0, _BOTTOM + 46 + _LEGEND * number)):
            self.canvas.box(left, top, 22, 19, fill=fill)
            self.canvas.text(left + 11, top + 14, number + 1, "text small strong", fill=ink)
        self.canvas.text(46, _BOTTOM + 60 + _LEGEND * number, name, "text", "start")
        self.names.append(name)


def _label(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.3g}'):g}"
