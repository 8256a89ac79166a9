"""Message by message: what processes say to each other while they serve a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.viz.player import Player, player
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors, shorten
from minisgl.viz.units import duration

_MARGIN = 14
_TIMES, _WORDS = 66, 262
_LEFT, _RIGHT = _MARGIN + _TIMES, WIDTH - _MARGIN - _WORDS
_HEADS, _HEAD, _LINE = 40.0, 24, 40
_LONGEST_KIND, _LONGEST_SUMMARY = 28, 38
_SMALL_CHARACTER = 6.7
_MOST = 60
_WINDOW = 10
"""Messages that a frame of the player shows."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two processes.

    Args:
        time: when it was sent, in seconds of any clock that all share.
        source, destination: names of the processes.
        kind: its type.
        summary: some of its fields, in a few words.
    """

    time: float
    source: str
    destination: str
    kind: str
    summary: str = ""


def message_sequence(messages: Sequence[Message]) -> Picture:
    """A lane for each process, an arrow for each message, from top to bottom in order of time.

    Lines are equally far from each other; the times are written.

    Args:
        messages: in any order. Of more than 60, the last are left out.
    """
    in_order = _in_order(messages)
    return _picture(in_order, in_order[:_MOST], _lanes(in_order), newest=None)


def message_player(messages: Sequence[Message]) -> Player:
    """`message_sequence` message by message: the newest in colour, and the nine before it.

    Args:
        messages: in any order, at least one.
    """
    in_order = _in_order(messages)
    lanes = _lanes(in_order)
    frames = [
        _picture(in_order, in_order[max(0, number + 1 - _WINDOW) : number + 1], lanes, newest=message)
        for number, message in enumerate(in_order)
    ]
    return player(frames, [_sentence(message) for message in in_order])


def _in_order(messages: Sequence[Message]) -> list[Message]:
    return sorted(messages, key=lambda message: message.time)


def _lanes(in_order: Sequence[Message]) -> list[str]:
    """Processes in the order in which they come up."""
    return list(dict.fromkeys(name for message in in_order for name in (message.source, message.destination)))


def _picture(
    in_order: Sequence[Message], shown: Sequence[Message], lanes: Sequence[str], newest: Message | None
) -> Picture:
    """``newest`` None: all are equally important, and the picture is as high as they need."""
    first = in_order[0].time if in_order else 0.0
    title = counted(len(in_order), "message")
    if in_order:
        title += f" in {duration(in_order[-1].time - first)}"
    canvas = Canvas()
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    lines = len(shown) if newest is None else min(len(in_order), _WINDOW)
    width = (_RIGHT - _LEFT) / max(len(lanes), 1)
    middles = {name: _LEFT + (number + 0.5) * width for number, name in enumerate(lanes)}
    top = _draw_lanes(canvas, middles, width, newest, lines)
    says = [f"{title}."]
    for line, message in enumerate(shown):
        y = top + line * _LINE
        _draw_message(canvas, y, message, middles, request_colors(lanes.index(message.source))[0], newest)
        canvas.text(_LEFT - 10, y + 22, duration(message.time - first), "muted small", "end")
        says.append(f"At {duration(message.time - first)}: {_sentence(message)}.")
    bottom = top + lines * _LINE
    if newest is None and len(in_order) > len(shown):
        rest = f"… and {counted(len(in_order) - len(shown), 'message')} more"
        canvas.text(_MARGIN, bottom + 12, rest, "muted", "start")
        says.append(rest)
        bottom += 20
    return canvas.picture(bottom + 6, "\n".join(says))


def _draw_lanes(canvas: Canvas, middles: dict[str, float], width: float, newest: Message | None, lines: int) -> float:
    """Heads with names, in two rows if one has no room for the longest, and lines below; returns where these begin.

    A head is grey while its process is no part of the newest message.
    """
    rows = 1 if max(map(len, middles), default=0) * _SMALL_CHARACTER + 6 <= width else 2
    top = _HEADS + rows * (_HEAD + 2)
    for number, (name, middle) in enumerate(middles.items()):
        fill, ink = request_colors(number)
        if newest is not None and name not in (newest.source, newest.destination):
            fill, ink = "", ""
        y = _HEADS + number % rows * (_HEAD + 2)
        canvas.path(f"M{middle:g} {y + _HEAD:g}V{top + lines * _LINE:g}", "rule")
        canvas.box(middle - rows * width / 2 + 2, y, rows * width - 4, _HEAD, "shared", fill)
        longest = int((rows * width - 6) / _SMALL_CHARACTER)
        canvas.text(middle, y + 16, shorten(name, longest), "text small", fill=ink)
    return top


def _draw_message(
    canvas: Canvas, y: float, message: Message, middles: dict[str, float], fill: str, newest: Message | None
) -> None:
    """Its arrow, and beside the lanes its type and its fields."""
    start, end = middles[message.source], middles[message.destination]
    thickness = 4.0 if message is newest else 2.0
    if newest is not None and message is not newest:
        fill = ""
    if start == end:
        canvas.path(f"M{start:g} {y + 12:g}h18v12h-10", "line")
        canvas.arrow((start + 10, y + 24), (start, y + 24), fill=fill)
    else:
        canvas.arrow((start, y + 18), (end, y + 18), "muted", fill, thickness)
    kind = "text strong" if message is newest else "text small strong"
    canvas.text(_RIGHT + 10, y + 15, shorten(message.kind, _LONGEST_KIND), kind, "start")
    canvas.text(_RIGHT + 10, y + 31, shorten(message.summary, _LONGEST_SUMMARY), "muted small", "start")


def _sentence(message: Message) -> str:
    summary = f" ({shorten(message.summary, 120)})" if message.summary else ""
    return f"{message.source} to {message.destination}: {message.kind}{summary}"
