"""The processes of a server, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, duration, request_colors, shorten
from minisgl.errors import ConfigError

_INDENT, _DEEPEST = 26.0, 160.0
_BOX, _ROW, _PID, _STATE = 30.0, 40.0, 330.0, 430.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment."""

    name: str
    pid: int  # of the operating system
    waits_for: str
    parent: str = ""  # name of the process that has started it; empty for the first
    ended: str = ""  # how it ended; empty while it lives


def process_tree(processes: Sequence[ProcessState]) -> Picture:
    """Draw a box for each process below its parent: what it waits for, or how it ended.

    Raises `ConfigError` for a name that several have, or a parent after its child.
    """
    dead = sum(bool(process.ended) for process in processes)
    title = f"Processes: {len(processes) - dead} alive, {dead} dead"
    canvas, places = Canvas(title, says=f"{title}."), dict[str, tuple[float, float]]()
    for number, process in enumerate(processes):
        if process.name in places or process.parent not in ("", *places):
            raise ConfigError(f"{process}: give each name once, and a parent before its children")
        x, y = float(MARGIN), 44 + number * _ROW
        if process.parent:
            left, top = places[process.parent]
            x = min(left + _INDENT, _DEEPEST)
            canvas.path(f"M{x - _INDENT / 2:g} {top + _BOX:g}V{y + _BOX / 2:g}H{x:g}", "rule")
        places[process.name] = x, y
        fill, ink = request_colors(5) if process.ended else ("", "")
        state = f"dead: {process.ended}" if process.ended else f"waits for {process.waits_for}"
        canvas.box(x, y, WIDTH - MARGIN - x, _BOX, "shared", fill)
        canvas.text(x + 10, y + 20, shorten(process.name, int((_PID - x - 20) / 8.2)), "text strong", "start", ink)
        canvas.text(_PID, y + 20, f"pid {process.pid}", "text small", "start", ink)
        canvas.text(_STATE, y + 20, shorten(state, 44), "text small", "start", ink)
        started = f", started by {process.parent}" if process.parent else ""
        canvas.says.append(f"{process.name}, pid {process.pid}{started}: {state}.")
    return canvas.picture(52 + len(processes) * _ROW)


# -- messages --------------------------------------------------------------------------------------------------------

_LEFT, _RIGHT = MARGIN + 66, WIDTH - MARGIN - 262
_HEADS, _HEAD, _LINE, _SIGN = 40.0, 24, 40, 6.7
_MOST = 60


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two processes."""

    time: float  # when it was sent, in seconds of any clock that all share
    source: str  # names of the processes
    destination: str
    kind: str  # its type
    summary: str = ""  # some of its fields, in a few words


def message_sequence(messages: Sequence[Message]) -> Picture:
    """Draw a lane for each process and an arrow for each of the first 60 messages, in order of time.

    Lines are equally far from each other; the times are written.
    """
    in_order = sorted(messages, key=lambda message: message.time)
    shown, first = in_order[:_MOST], in_order[0].time if in_order else 0.0
    title = counted(len(in_order), "message") + (f" in {duration(in_order[-1].time - first)}" if in_order else "")
    canvas = Canvas(title, says=f"{title}.")
    lanes = list(dict.fromkeys(name for message in in_order for name in (message.source, message.destination)))
    width = (_RIGHT - _LEFT) / max(len(lanes), 1)
    middles = {name: _LEFT + (number + 0.5) * width for number, name in enumerate(lanes)}
    rows = 1 if max(map(len, lanes), default=0) * _SIGN + 6 <= width else 2  # of heads
    top = _HEADS + rows * (_HEAD + 2)
    bottom = top + len(shown) * _LINE
    for number, (name, middle) in enumerate(middles.items()):
        fill, ink = request_colors(number)
        y = _HEADS + number % rows * (_HEAD + 2)
        canvas.path(f"M{middle:g} {y + _HEAD:g}V{bottom:g}", "rule")
        canvas.box(middle - rows * width / 2 + 2, y, rows * width - 4, _HEAD, fill=fill)
        canvas.text(middle, y + 16, shorten(name, int((rows * width - 6) / _SIGN)), "text small", fill=ink)
    for line, message in enumerate(shown):
        y, when = top + line * _LINE, duration(message.time - first)
        start, end = middles[message.source], middles[message.destination]
        fill, _ = request_colors(lanes.index(message.source))
        if start == end:
            canvas.path(f"M{start:g} {y + 12:g}h18v12h-10", "line")
            canvas.arrow((start + 10, y + 24), (start, y + 24), fill=fill)
        else:
            canvas.arrow((start, y + 18), (end, y + 18), fill=fill, thickness=2.0)
        canvas.text(_RIGHT + 10, y + 15, shorten(message.kind, 28), "text small strong", "start")
        canvas.text(_RIGHT + 10, y + 31, shorten(message.summary, 38), "muted small", "start")
        canvas.text(_LEFT - 10, y + 22, when, "muted small", "end")
        summary = f" ({shorten(message.summary, 120)})" if message.summary else ""
        canvas.says.append(f"At {when}: {message.source} to {message.destination}: {message.kind}{summary}.")
    if len(in_order) > len(shown):
        canvas.says.append(canvas.rest(bottom + 12, len(in_order) - len(shown), "message"))
        bottom += 20
    return canvas.picture(bottom + 6)
