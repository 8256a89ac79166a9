"""Kernels of a device in time, of several versions of the same work below each other, on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors

_MARGIN = 14
_ROOM = WIDTH - 2 * _MARGIN
_TOP = 44
_HEADING = 26
_LANE = 26
_BOX = 22
_GAP = 14
_NUMBER = 18.0
_LEGEND_LINE = 26

Span = tuple[str, float, float]
"""A kernel, and when it begins and ends, in microseconds."""


def kernel_timeline(versions: Mapping[str, Sequence[Span]], title: str) -> Picture:
    """One box a kernel. Kernels that run at the same time are in different lanes.

    Args:
        versions: name → kernels, in the order in which they begin. A kernel has one number in all versions.
        title: what is drawn.
    """
    kernels = list(dict.fromkeys(name for spans in versions.values() for name, _, _ in spans))
    longest = max((end for spans in versions.values() for _, _, end in spans), default=0.0)
    scale = _ROOM / (longest or 1.0)
    canvas, y = Canvas(), float(_TOP)
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    says = [f"{title}, µs."]
    for version, spans in versions.items():
        last = max((end for _, _, end in spans), default=0.0)
        canvas.text(_MARGIN, y + 16, version, "text", "start")
        canvas.text(WIDTH - _MARGIN, y + 16, f"{last:.1f} µs", "text strong", "end")
        y += _HEADING
        lanes = _lanes(spans)
        for (name, start, end), lane in zip(spans, lanes, strict=True):
            _draw(canvas, _MARGIN + start * scale, y + lane * _LANE, (end - start) * scale, kernels.index(name))
        y += (max(lanes, default=0) + 1) * _LANE + _GAP
        says.append(f"{version}: {', '.join(f'{name} from {start:.1f} to {end:.1f}' for name, start, end in spans)}.")
    _draw_axis(canvas, y, longest, scale)
    y += 32
    for number, name in enumerate(kernels):
        x, line = _MARGIN + number % 2 * _ROOM / 2, y + number // 2 * _LEGEND_LINE
        _draw(canvas, x, line, 24, number)
        canvas.text(x + 34, line + 16, name, "text small", "start")
    return canvas.picture(y + (len(kernels) + 1) // 2 * _LEGEND_LINE + 8, "\n".join(says))


def _lanes(spans: Sequence[Span]) -> list[int]:
    """For each kernel the first lane that is free when it begins."""
    busy_until: list[float] = []
    lanes: list[int] = []
    for _, start, end in spans:
        free = (lane for lane, until in enumerate(busy_until) if until <= start)
        lane = next(free, len(busy_until))
        busy_until[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _draw(canvas: Canvas, x: float, y: float, width: float, number: int) -> None:
    fill, ink = request_colors(number)
    canvas.box(x, y, max(width - 1, 1.0), _BOX, fill=fill)
    if width >= _NUMBER:
        canvas.text(x + width / 2, y + 16, number + 1, "small strong", fill=ink)


def _draw_axis(canvas: Canvas, y: float, longest: float, scale: float) -> None:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e9) if step * scale >= 60)
    canvas.path(f"M{_MARGIN} {y:g}h{_ROOM:g}", "rule")
    for index in range(int(longest / every) + 1):
        x = _MARGIN + index * every * scale
        canvas.path(f"M{x:g} {y:g}v4", "rule")
        canvas.text(min(max(x, _MARGIN + 14), WIDTH - _MARGIN - 20), y + 17, f"{index * every:g} µs", "muted small")
