"""Host and device side by side in time: who works, who waits, and on which step."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from minisgl.trace import DEVICE, HOST, Event, Trace
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors
from minisgl.viz.units import duration

_MARGIN = 14
_LABEL = 76
_MEDIAN = 84
_ROOM = WIDTH - 2 * _MARGIN - _LABEL - _MEDIAN
_LANES = ("schedule", "launch", "wait", "process", "device")
_LINE = 34
_BOX = 26
_TOP = 60
_DIGIT = 8.0
_LEGEND = "the number in a box, and its colour: the step that it belongs to"


def host_device_timeline(trace: Trace, first: int = 0, count: int = 4) -> Picture:
    """A few steps on one axis of time: four lanes for what the host does, one for the device.

    Args:
        trace: of `LLM.trace`.
        first: number of the first step drawn.
        count: how many steps are drawn.
    """
    spans = [event for event in trace.events if _is_drawn(event, first, count)]
    start = min((event.start for event in spans), default=0.0)
    seconds = max((event.end for event in spans), default=0.0) - start
    canvas = Canvas()
    drawn = len({event.args["step"] for event in spans})
    title = f"Host and device, {counted(drawn, 'step')} from step {first}"
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(WIDTH - _MARGIN, 26, duration(seconds), anchor="end")
    canvas.text(WIDTH - _MARGIN, _TOP - 6, "median", "muted small", "end")
    left, scale = _MARGIN + _LABEL, _ROOM / (seconds or 1.0)
    bottom = _TOP + len(_LANES) * _LINE
    _draw_axis(canvas, left, bottom, seconds, scale)
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for line, lane in enumerate(_LANES):
        y = _TOP + line * _LINE
        members = [event for event in spans if _lane(event) == lane]
        durations[lane] = [event.end - event.start for event in members]
        canvas.text(_MARGIN, y + 18, lane, "text strong" if lane == "device" else "text", "start")
        canvas.path(f"M{left} {y + _BOX:g}h{_ROOM:g}", "rule")
        if members:
            canvas.text(WIDTH - _MARGIN, y + 18, duration(median(durations[lane])), "text small", "end")
        places = [left + (event.start - start) * scale for event in members]
        for event, x, end in zip(members, places, [*places[1:], left + _ROOM + _DIGIT * 3], strict=False):
            _draw_span(canvas, y, event, x, scale, end)
    canvas.text(_MARGIN, bottom + 40, _LEGEND, "muted small", "start")
    return canvas.picture(bottom + 52, "\n".join([f"{title}, {duration(seconds)}.", *_words(spans, start)]))


def _is_drawn(event: Event, first: int, count: int) -> bool:
    return _lane(event) in _LANES and first <= event.args.get("step", -1) < first + count


def _lane(event: Event) -> str:
    return "device" if event.track == DEVICE else event.name if event.track == HOST else ""


def _draw_axis(canvas: Canvas, left: float, y: float, seconds: float, scale: float) -> None:
    """Marks at round times, in the unit that suits the whole."""
    unit, name = (1e-6, "µs") if seconds < 2e-3 else (1e-3, "ms") if seconds < 2 else (1.0, "s")
    steps = [digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)]
    every = next(step for step in steps if step * unit * scale >= 60 or step == steps[-1])
    for index in range(int(seconds / (every * unit)) + 1 if seconds else 0):
        x = left + index * every * unit * scale
        canvas.path(f"M{x:g} {_TOP:g}V{y:g}", "rule dashed")
        canvas.text(x, y + 14, f"{index * every:g} {name}", "muted small")


def _draw_span(canvas: Canvas, y: float, event: Event, x: float, scale: float, end: float) -> None:
    """One span; its number stands in it, or behind it if there is room before ``end``."""
    step = event.args["step"]
    fill, ink = request_colors(step)
    width = max((event.end - event.start) * scale, 1.5)
    canvas.box(x, y, width, _BOX, fill=fill)
    needed = len(str(step)) * _DIGIT + 4
    if width >= needed:
        canvas.text(x + width / 2, y + 18, step, "small", fill=ink)
    elif end - x - width >= needed:
        canvas.text(x + width + 2, y + 18, step, "text small", "start")


def _words(spans: list[Event], start: float) -> list[str]:
    steps: defaultdict[int, list[str]] = defaultdict(list)
    for event in spans:
        name = f"{event.name} on the device" if event.track == DEVICE else event.name
        when, spent = duration(event.start - start), duration(event.end - event.start)
        steps[event.args["step"]].append(f"{name} at {when} for {spent}")
    return [f"Step {step}: {', '.join(parts)}." for step, parts in sorted(steps.items())]
