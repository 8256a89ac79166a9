"""The lengths of a request as it goes through its life: what is computed, what is known, what may still come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.core import RunningTable
from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors

_MARGIN = 14
_LABEL = 206
_NUMBERS = 150
_LINE = 34
_WIDEST = 36.0
_LEGEND = (
    "kv: keys and values computed, or being computed  ·  id: known, not fed yet  ·  ?: being sampled  ·  outline: room"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a running request at one moment, in tokens, as in `RunningTable`; ``label`` names the moment."""

    label: str
    kv_len: int
    token_len: int
    known_len: int
    max_len: int

    @classmethod
    def of(cls, table: RunningTable, slot: int, label: str) -> Lengths:
        """Those of the request in ``slot``, now."""
        lengths = (table.kv_len, table.token_len, table.known_len, table.max_len)
        return cls(label, *(int(array[slot]) for array in lengths))


def length_strip(moments: Sequence[Lengths]) -> Picture:
    """One line a moment, one box a position of the sequence.

    Args:
        moments: in the order of time, of one request.
    """
    canvas = Canvas()
    canvas.text(_MARGIN, 26, "Positions of one request, from moment to moment", "text strong", "start")
    left = _MARGIN + _LABEL
    for column, name in enumerate(("kv", "token", "known")):
        canvas.text(_number_x(column), 48, name, "muted small")
    width = min((WIDTH - _MARGIN - _NUMBERS - left) / max(moment.max_len for moment in moments), _WIDEST)
    for line, moment in enumerate(moments):
        y = 56 + line * _LINE
        canvas.text(_MARGIN, y + 19, moment.label, "text small", "start")
        for position in range(moment.max_len):
            _draw_position(canvas, left + position * width, y, width, _state(moment, position))
        for column, length in enumerate((moment.kv_len, moment.token_len, moment.known_len)):
            canvas.text(_number_x(column), y + 19, length, "text strong")
    bottom = 56 + len(moments) * _LINE
    canvas.text(_MARGIN, bottom + 18, _LEGEND, "muted small", "start")
    says = (f"{m.label}: kv_len {m.kv_len}, token_len {m.token_len}, known_len {m.known_len}." for m in moments)
    return canvas.picture(bottom + 30, "\n".join(says))


def _number_x(column: int) -> float:
    return WIDTH - _MARGIN - _NUMBERS + 30 + column * 48


def _state(moment: Lengths, position: int) -> str:
    if position < moment.kv_len:
        return "kv"
    if position < moment.known_len:
        return "id"
    return "?" if position < moment.token_len else ""


def _draw_position(canvas: Canvas, x: float, y: float, width: float, state: str) -> None:
    fill, ink = {"kv": request_colors(0), "?": request_colors(1)}.get(state, ("", ""))
    canvas.box(x + 1, y, width - 2, _LINE - 6, "shared" if state == "id" else "empty", fill)
    if width >= 20:
        canvas.text(x + width / 2, y + 19, state, "text small", fill=ink)
