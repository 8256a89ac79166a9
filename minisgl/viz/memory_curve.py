"""How much memory a process has over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.viz.svg import Canvas, Picture, request_colors

_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 746.0, 48.0, 248.0


def memory_curve(curves: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Picture:
    """A line for each process; the highest point of each carries its number and its height.

    Args:
        curves: name → (seconds, megabytes) in order of time, at least two points each.
        title: what the memory is.
    """
    canvas = Canvas()
    canvas.text(14, 26, title, "text strong", "start")
    last = max(points[-1][0] for points in curves.values())
    top = 1.12 * max(megabytes for points in curves.values() for _, megabytes in points)

    def place(seconds: float, megabytes: float) -> tuple[float, float]:
        return _LEFT + (_RIGHT - _LEFT) * seconds / last, _BOTTOM - (_BOTTOM - _TOP) * megabytes / top

    for height in _ticks(top):
        _, y = place(0, height)
        canvas.path(f"M{_LEFT:g} {y:g}H{_RIGHT:g}", "rule")
        canvas.text(_LEFT - 8, y + 4, f"{height:,.0f} MB" if height else "0", "muted small", "end")
    for seconds in _ticks(last):
        x, _ = place(seconds, 0)
        canvas.text(x, _BOTTOM + 18, f"{seconds:g} s", "muted small")
    says = []
    for number, (name, points) in enumerate(curves.items()):
        fill, ink = request_colors(number)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
        canvas.path(f"M{path}", "line dashed" if number % 2 else "line")
        highest = max(points, key=lambda point: point[1])
        x, y = place(*highest)
        x = min(max(x, _LEFT + 12), _RIGHT - 80)
        canvas.box(x - 11, y - 22, 22, 19, fill=fill)
        canvas.text(x, y - 8, number + 1, "text small strong", fill=ink)
        canvas.text(x + 16, y - 8, f"{highest[1]:,.0f} MB", "text small strong", "start")
        line = _BOTTOM + 34 + 26 * number
        canvas.box(14, line, 22, 19, fill=fill)
        canvas.text(25, line + 14, number + 1, "text small strong", fill=ink)
        canvas.text(46, line + 14, name, "text", "start")
        says.append(f"{number + 1}. {name}: at most {highest[1]:,.0f} MB, in {points[-1][0]:.1f} seconds.")
    return canvas.picture(_BOTTOM + 40 + 26 * len(curves), f"{title}\n" + "\n".join(says))


def _ticks(top: float) -> list[float]:
    """At most seven round numbers from 0 to ``top``."""
    steps = (factor * 10.0**power for power in range(-4, 9) for factor in (1, 2, 5))
    step = next(step for step in steps if top <= 6 * step)
    return [step * number for number in range(int(top / step) + 1)]
