"""Lines and numbered marks between two axes, each linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl.viz.svg import Canvas, Picture, Point, request_colors

_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 722.0, 70.0, 300.0
_LEGEND = 26


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its name, unit included, and whether its steps are factors."""

    name: str
    log: bool = False


def chart(
    lines: Mapping[str, Sequence[Point]], marks: Mapping[str, Point], title: str, across: Axis, up: Axis
) -> Picture:
    """Every line and every mark has a number, which the legend below explains.

    Args:
        lines: name → points from left to right, at least two.
        marks: name → the one point where it stands.
        title: what is drawn.
        across, up: the axes.
    """
    points = [point for line in lines.values() for point in line] + list(marks.values())
    x, y = _scale([point[0] for point in points], across), _scale([point[1] for point in points], up)
    canvas = Canvas()
    canvas.text(14, 26, title, "text strong", "start")
    canvas.text(14, _TOP - 18, up.name, "muted small", "start")
    canvas.text(_RIGHT, _BOTTOM + 36, across.name, "muted small", "end")
    for tick in y.ticks:
        height = _BOTTOM - y(tick) * (_BOTTOM - _TOP)
        canvas.path(f"M{_LEFT:g} {height:g}H{_RIGHT:g}", "rule")
        canvas.text(_LEFT - 8, height + 4, _label(tick), "muted small", "end")
    for tick in x.ticks:
        canvas.text(_LEFT + x(tick) * (_RIGHT - _LEFT), _BOTTOM + 18, _label(tick), "muted small")

    def place(point: Point) -> Point:
        return _LEFT + x(point[0]) * (_RIGHT - _LEFT), _BOTTOM - y(point[1]) * (_BOTTOM - _TOP)

    says: list[str] = []
    for number, (name, line) in enumerate(lines.items()):
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in map(place, line))
        canvas.path(f"M{path}", "line dashed" if number % 2 else "line")
        _number(canvas, number, place(line[-1]), name)
        says.append(f"{number + 1}. {name}: " + ", ".join(f"{_label(a)} → {_label(b)}" for a, b in line) + ".")
    for number, (name, point) in enumerate(marks.items(), len(lines)):
        _number(canvas, number, place(point), name)
        says.append(f"{number + 1}. {name}: {_label(point[0])} → {_label(point[1])}.")
    height = _BOTTOM + 50 + _LEGEND * (len(lines) + len(marks))
    return canvas.picture(height, "\n".join([f"{title}: {up.name} by {across.name}.", *says]))


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


def _number(canvas: Canvas, number: int, place: Point, name: str) -> None:
    """A number in a box at its place, and in the legend."""
    fill, ink = request_colors(number)
    x, y = place[0], min(max(place[1], _TOP), _BOTTOM - 10)
    for left, top in ((x - 11, y - 10), (14.0, _BOTTOM + 46 + _LEGEND * number)):
        canvas.box(left, top, 22, 19, fill=fill)
        canvas.text(left + 11, top + 14, number + 1, "text small strong", fill=ink)
    canvas.text(46, _BOTTOM + 60 + _LEGEND * number, name, "text", "start")


def _label(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.3g}'):g}"
