"""What each fed token may look at: one staircase for each row of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl.core import Batch
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

_MARGIN = 14
_LABEL = 104
_WIDEST = 26.0
_ROOM = WIDTH - 2 * _MARGIN - _LABEL
_FEW_LINES = 24
_MOST_HEIGHT = 260.0
_MOST_ROWS = 16
_LEGEND = "grey: cached before this step  ·  colour: computed in this step  ·  outline only: not seen"

Span = tuple[int, int]


def attention_mask(batch: Batch, window: int | None = None) -> Picture:
    """For each row of the step a block: a line for each token it feeds, a column for each position of its sequence.

    Tokens of other rows are in nobody's sight, so there is no column for them.

    Args:
        batch: the step. Of more than 16 rows, the others are left out.
        window: positions that a token sees at most, itself included; None is all up to itself.
    """
    title = "Who sees what: a line for each fed token, a column for each position of its sequence"
    canvas = Canvas()
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(_MARGIN, 48, _LEGEND, "muted small", "start")
    y, says = 60.0, []
    for row in range(min(batch.num_rows, _MOST_ROWS)):
        positions = batch.positions[int(batch.cu_seqlens_q[row]) : int(batch.cu_seqlens_q[row + 1])].tolist()
        seen = [(max(0, position + 1 - window) if window else 0, position + 1) for position in positions]
        y = _draw_row(canvas, y, row, int(batch.seq_lens[row]), positions, seen)
        says.append(_words(row, int(batch.slots[row]), positions, seen))
    if batch.num_rows > _MOST_ROWS:
        rest = f"… and {counted(batch.num_rows - _MOST_ROWS, 'row')} more"
        canvas.text(_MARGIN, y + 14, rest, "muted", "start")
        says.append(rest)
        y += 22
    return canvas.picture(y + 6, "\n".join(says))


def _draw_row(canvas: Canvas, y: float, row: int, seq_len: int, positions: list[int], seen: list[Span]) -> float:
    """One row's block; returns where it ends."""
    cached = positions[0]
    fill, _ = request_colors(row)
    cell = min(_WIDEST, _ROOM / seq_len)
    line = 20.0 if len(positions) <= _FEW_LINES else _MOST_HEIGHT / len(positions)
    left, top = _MARGIN + _LABEL, y + 40
    parts = [f"{cached} cached"] * (cached > 0) + [f"{len(positions)} fed"]
    canvas.text(_MARGIN, y + 18, f"row {row}: {counted(seq_len, 'position')}, {', '.join(parts)}", "text", "start")
    for position in _ticks(seq_len, cell):
        canvas.text(left + (position + 0.5) * cell, top - 5, position, "muted small")
    canvas.path(_area(left, top, cell, line, [(first, cached) for first, _ in seen]), "shade")
    canvas.path(_area(left, top, cell, line, [(max(first, cached), end) for first, end in seen]), fill=fill)
    height = line * len(positions)
    columns = range(seq_len + 1) if cell >= 8 else (0, seq_len)
    lines = range(len(positions) + 1) if line >= 8 else (0, len(positions))
    grid = [f"M{left + column * cell:g} {top:g}v{height:g}" for column in columns]
    grid += [f"M{left:g} {top + index * line:g}h{cell * seq_len:g}" for index in lines]
    canvas.path("".join(grid), "rule")
    if cached > 0:
        canvas.path(f"M{left + cached * cell:g} {top - 3:g}v{height + 6:g}", "line")
    for index in range(len(positions)) if line >= 14 else (0, len(positions) - 1):
        baseline = top + (index + 0.5) * line + 4 if line >= 14 else (top + 12 if index == 0 else top + height)
        canvas.text(left - 8, baseline, f"position {positions[index]}", "text small", "end")
    return top + height + 8


def _area(left: float, top: float, cell: float, line: float, spans: Iterable[Span]) -> str:
    """Path around the columns of one span a line."""
    return "".join(
        f"M{left + first * cell:g} {top + index * line:g}h{(end - first) * cell:g}v{line:g}h{(first - end) * cell:g}z"
        for index, (first, end) in enumerate(spans)
        if first < end
    )


def _ticks(seq_len: int, cell: float) -> range:
    """Positions to be numbered, far enough from each other."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if step * cell >= 25)
    return range(0, seq_len, step)


def _words(row: int, slot: int, positions: Sequence[int], seen: Sequence[Span]) -> str:
    lines = [f"position {position} sees {_span(span)}" for position, span in zip(positions, seen, strict=True)]
    if len(lines) > 6:
        lines = [*lines[:3], "…", lines[-1]]
    return f"Row {row} (slot {slot}), {positions[0]} positions cached: {'; '.join(lines)}."


def _span(span: Span) -> str:
    first, end = span
    return f"{first} to {end - 1}" if end - first > 1 else f"{first}"
