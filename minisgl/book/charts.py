"""Charts: lines and marks between two axes, bars made of parts, and how evenly work is shared out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, Point, circle, counted, digits, request_colors, round_step

_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 722.0, 70.0, 300.0
_LEGEND_LINE = 26
_NUMBER = 20.0  # height of a number on a line of a chart
_NARROWEST = 16.0  # width of a bar's piece that has room for its number
_LOWEST = _BOTTOM - 10
_TOLD = 24  # points of a line that are told one by one; of a longer line the first, the highest and the last are
_Scale = Callable[[float], float]  # from a value to its place on an axis
_SHIFTS = (0, -1, 1, -2, 2, -3, 3, -4, 4)
# Where the number of a line or mark may stand, from its end: the first free place is taken.
_AT_LINE = tuple((0.0, _NUMBER * shift) for shift in _SHIFTS)
_BESIDE_DOT = tuple((15.0, _NUMBER * shift - 15.0) for shift in _SHIFTS)
_BELOW_MARK = tuple((28.0 * across, down) for down in (28.0, 50.0, -28.0, -50.0) for across in (0, 1, -1, 2, -2))


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its name with the unit, and whether it is logarithmic."""

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
    """Draw lines and marks, each with a number that the legend below explains.

    Args:
        lines: name → points in the order in which the line goes through them, at least one.
        marks: name → the point where the number stands.
        limits: name → height of a line across that should not be exceeded.
        dots: give each point a dot and each line its colour.
    """
    limits = limits or {}
    points = [point for line in lines.values() for point in line] + list(marks.values())
    xs, heights = [x for x, _ in points], [*(y for _, y in points), *limits.values()]
    plot = _Plot(title, across, up, xs, heights, dots)
    for name, limit in limits.items():
        plot.limit(name, limit)
    for name, line in lines.items():
        plot.line(name, line)
    plot.marks(marks)
    return plot.canvas.picture(_BOTTOM + 50 + _LEGEND_LINE * plot.count)


def _scale(values: Sequence[float], axis: Axis, start: float, end: float) -> tuple[_Scale, list[float]]:
    """Where values lie on an axis, and which of them are written beside it."""
    low, most = 0.0, max(values) or 1.0
    if axis.log:
        low = math.floor(math.log10(min(values)))
        high: float = max(math.ceil(math.log10(most)), low + 1)
        ticks = [10.0**power for power in range(low, int(high) + 1)]
    else:
        step = round_step(most / 6)
        ticks = [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]
        high = ticks[-1]

    def place(value: float) -> float:
        return start + ((math.log10(value) if axis.log else value) - low) / (high - low) * (end - start)

    return place, ticks


class _Plot:
    """One chart, and the places in it that numbers cover."""

    def __init__(
        self, title: str, across: Axis, up: Axis, xs: Sequence[float], ys: Sequence[float], dots: bool
    ) -> None:
        self.canvas, self.dots = Canvas(title, says=f"{title}: {up.name} by {across.name}."), dots
        self.x, x_ticks = _scale(xs, across, _LEFT, _RIGHT)
        self.y, y_ticks = _scale(ys, up, _BOTTOM, _TOP)
        self.count = 0  # of lines and marks so far
        self.covered: list[Point] = []
        self.canvas.text(MARGIN, _TOP - 18, up.name, "muted small", "start")
        self.canvas.text(_RIGHT, _BOTTOM + 36, across.name, "muted small", "end")
        for tick in y_ticks:
            height = self.y(tick)
            self.canvas.path(f"M{_LEFT:g} {height:g}H{_RIGHT:g}", "rule")
            self.canvas.text(_LEFT - 8, height + 4, digits(tick), "muted small", "end")
        for tick in x_ticks:
            self.canvas.text(self.x(tick), _BOTTOM + 18, digits(tick), "muted small")

    def limit(self, name: str, limit: float) -> None:
        height = self.y(limit)
        self.canvas.path(f"M{_LEFT:g} {height:.1f}H{_RIGHT:g}", "line dashed")
        self.canvas.text(_LEFT + 6, height - 5, f"{name}: {digits(limit)}", "text small strong", "start")
        self.canvas.says.append(f"{name}: {digits(limit)}.")

    def line(self, name: str, points: Sequence[Point]) -> None:
        """A line with its number at its end."""
        number, places = self.count, [(self.x(a), self.y(b)) for a, b in points]
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in places)
        colour = request_colors(number)[0] if self.dots else ""
        self.canvas.path(f"M{path}", "line dashed" if number % 2 else "line", stroke=colour)
        for left, top in places if self.dots else ():
            self.canvas.path(circle(left, top, 3.5), fill=colour)
        self._number(name, self._free_place(places[-1], _BESIDE_DOT if self.dots else _AT_LINE))
        told = points if len(points) <= _TOLD else [points[0], max(points, key=lambda point: point[1]), points[-1]]
        words = ", ".join(f"{digits(a)} → {digits(b)}" for a, b in told)
        self.canvas.says.append(f"{self.count}. {name}: {words}.")

    def marks(self, marks: Mapping[str, Point]) -> None:
        """Numbers where they stand; among dots, circles there and lines from them to the numbers."""
        numbers = places = [(self.x(a), self.y(b)) for a, b in marks.values()]
        if self.dots:
            self.covered += places
            numbers = [self._free_place(place, _BELOW_MARK) for place in places]
            for (x, y), (to_x, to_y) in zip(places, numbers, strict=True):
                self.canvas.path(f"{circle(x, y, 7)}M{x:g} {y:g}L{to_x:g} {to_y:g}")
        for (name, point), place in zip(marks.items(), numbers, strict=True):
            self._number(name, place)
            self.canvas.says.append(f"{self.count}. {name}: {digits(point[0])} → {digits(point[1])}.")

    def _free_place(self, point: Point, asides: Sequence[Point]) -> Point:
        """The first place beside ``point`` where a number covers nothing; the point itself if there is none."""
        middle = min(max(point[1], _TOP), _LOWEST)
        for across, down in asides:
            x, y = point[0] + across, middle + down
            is_free = all(abs(x - other) >= 22 or abs(y - its) >= _NUMBER for other, its in self.covered)
            if is_free and _LEFT <= x <= _RIGHT + 16 and _TOP <= y <= _LOWEST:
                self.covered.append((x, y))
                return x, y
        return point[0], middle

    def _number(self, name: str, place: Point) -> None:
        """A number at its place, and in the legend."""
        self.canvas.badge(place[0] - 11, min(max(place[1], _TOP), _LOWEST) - 10, self.count)
        row = _BOTTOM + 46 + _LEGEND_LINE * self.count
        self.canvas.badge(MARGIN, row, self.count)
        self.canvas.text(46, row + 14, name, "text", "start")
        self.count += 1


def memory_curve(curves: Mapping[str, Sequence[Point]], title: str) -> Picture:
    """Memory over time, a line for each process: name → (seconds, megabytes) in order of time, at least two each."""
    lines = {f"{name}: at most {max(high for _, high in points):,.0f} MB": points for name, points in curves.items()}
    return chart(lines, {}, title, Axis("seconds"), Axis("MB"))


# -- bars ------------------------------------------------------------------------------------------------------------


def bars(things: Mapping[str, Mapping[str, float]], title: str, unit: str) -> Picture:
    """Draw a bar for each thing, as long as its parts together; a part has one number in all bars.

    ``things`` maps name → part → size, none negative; sizes are written with three digits and their ``unit``.
    """
    parts = list(dict.fromkeys(part for sizes in things.values() for part in sizes))
    longest = max(sum(sizes.values()) for sizes in things.values()) or 1.0
    totals = {name: f"{digits(sum(sizes.values()))} {unit}" for name, sizes in things.items()}
    left, beside = MARGIN + 190.0, max(80.0, 8 * max(map(len, totals.values())))
    room = WIDTH - MARGIN - left - beside
    canvas, y = Canvas(title, says=f"{title}, {unit}."), 44
    for name, sizes in things.items():
        canvas.text(MARGIN, y + 17, name, "text", "start")
        numbered = [(parts.index(part), parts.index(part) + 1, size / longest * room) for part, size in sizes.items()]
        end = _draw_pieces(canvas, left, y, 24, numbered)
        canvas.text(end + 6, y + 17, totals[name], "text small strong", "start")
        words = ", ".join(f"{part} {digits(size)}" for part, size in sizes.items())
        canvas.says.append(f"{name}: {digits(sum(sizes.values()))}, of which {words}.")
        y += 34
    for number, part in enumerate(parts):
        x, middle = MARGIN + (number % 2) * 370, y + 8 + number // 2 * _LEGEND_LINE
        canvas.badge(x, middle, number)
        canvas.text(x + 32, middle + 14, part, "text small", "start")
    return canvas.picture(y + 14 + (len(parts) + 1) // 2 * _LEGEND_LINE)


def _draw_pieces(canvas: Canvas, x: float, y: float, height: float, pieces: Sequence[tuple[int, int, float]]) -> float:
    """Draw (colour, number, width) side by side, the number where there is room; returns where they end."""
    for colour, number, width in pieces:
        fill, ink = request_colors(colour)
        if width >= 1:
            canvas.box(x, y, max(width - 1, 0.5), height, fill=fill)
        if width >= _NARROWEST:
            canvas.text(x + width / 2, y + height / 2 + 5, number, "small", fill=ink)
        x += width
    return x


Load = Mapping[int, int]  # row → units of its work, in the order in which they are done


def loads(schedules: Mapping[str, Sequence[Load]], title: str, unit: str) -> Picture:
    """Draw several ways to share the same work among processors, on one scale: name → what each of them does in turn.

    The ``unit`` of work is in the singular; each takes equally long.
    """
    left, line = MARGIN + 96.0, 20
    scale = (WIDTH - MARGIN - left) / max(sum(load.values()) for each in schedules.values() for load in each)
    canvas = Canvas(title, legend=f"the number is the row's; width is time, in {unit}s", says=f"{title}.")
    y = 58.0
    for name, processors in schedules.items():
        done = max(sum(load.values()) for load in processors)
        heading = f"{name}: done after {counted(done, unit)}"
        canvas.text(MARGIN, y + 16, heading, "text", "start")
        canvas.says.append(f"{heading}.")
        y += 24
        for number, load in enumerate(processors):
            canvas.text(MARGIN, y + 13, f"processor {number}", "muted small", "start")
            _draw_pieces(canvas, left, y, 17, [(row, row, count * scale) for row, count in load.items()])
            words = ", ".join(f"{counted(count, unit)} of row {row}" for row, count in load.items())
            canvas.says.append(f"Processor {number}: {words or 'nothing'}.")
            y += line
        canvas.path(f"M{left + done * scale - 0.75:g} {y - len(processors) * line - 4:g}V{y:g}", "line dashed")
        y += 10
    return canvas.picture(y)
