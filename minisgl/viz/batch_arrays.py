"""The index tensors of a step, lined up under the tokens that they index."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from minisgl.core import Batch
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

_MARGIN = 14
_LABEL = 112
_ROOM = WIDTH - 2 * _MARGIN - _LABEL
_MOST_COLUMNS = 16
_DIGIT = 7.7
_ARRAY = 20
_BLOCK = 132
_FEW = 64
_HEAD, _TAIL = 5, 2
_MOST_ROWS = 24
_PER_ROW = (60, 160, 265, 365, 500, 650)

Column = tuple[int, int | None]
"""(row, flat token), or None for tokens of the row that are left out."""


def batch_arrays(batch: Batch) -> Picture:
    """Arrays with an entry a token above, arrays with an entry a row below; a colour and a number for each row.

    Args:
        batch: the step. Of a large one, the middles of long rows and all rows after the first 24 are left out.
    """
    columns = _columns(batch)
    digits = max(len(str(int(array.max()))) for array in (batch.positions, batch.token_slots, batch.out_locs))
    a_line = min(_MOST_COLUMNS, int(_ROOM / (digits * _DIGIT + 6)))
    decode = f"decode rows: {batch.num_decode}"
    title = f"One step: {counted(batch.num_tokens, 'token')} in {counted(batch.num_rows, 'row')}"
    canvas = Canvas()
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(WIDTH - _MARGIN, 26, decode, anchor="end")
    y = 44.0
    for start in range(0, len(columns), a_line):
        _draw_tokens(canvas, y, columns[start : start + a_line], _ROOM / a_line, batch)
        y += _BLOCK
    y = _draw_rows(canvas, y, batch)
    return canvas.picture(y, "\n".join([f"{title}, {decode}.", *_words(batch)]))


def _columns(batch: Batch) -> list[Column]:
    columns: list[Column] = []
    for row in range(min(batch.num_rows, _MOST_ROWS)):
        tokens = range(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        if batch.num_tokens > _FEW and len(tokens) > _HEAD + 1 + _TAIL:
            columns += [(row, token) for token in tokens[:_HEAD]]
            columns += [(row, None)]
            columns += [(row, token) for token in tokens[-_TAIL:]]
        else:
            columns += [(row, token) for token in tokens]
    return columns


def _draw_tokens(canvas: Canvas, y: float, columns: list[Column], cell: float, batch: Batch) -> None:
    """One line of tokens with the entries of the arrays below each."""
    names = ("cu_seqlens_q", "row", "flat index", "positions", "token_slots", "out_locs")
    baselines = [y + 12, y + 33, *(y + 56 + line * _ARRAY for line in range(4))]
    for name, baseline in zip(names, baselines, strict=True):
        canvas.text(_MARGIN, baseline, name, "muted small" if name in ("row", "flat index") else "text small", "start")
    left = _MARGIN + _LABEL
    for row, group in groupby(enumerate(columns), lambda item: item[1][0]):
        members = list(group)
        x, width = left + members[0][0] * cell, len(members) * cell
        fill, ink = request_colors(row)
        canvas.box(x + 1, y + 17, width - 2, 23, fill=fill)
        canvas.box(x + 1, y + 42, width - 2, 4 * _ARRAY + 2)
        canvas.text(x + width / 2, y + 33, row, "text strong small", fill=ink)
        if members[0][1][1] == batch.cu_seqlens_q[row]:
            canvas.text(x + 2, y + 12, batch.cu_seqlens_q[row], "text small", "start")
        if members[-1][1][1] == batch.num_tokens - 1:
            canvas.text(x + width - 2, y + 12, batch.num_tokens, "text small", "end")
        for column, (_, token) in members:
            middle = left + (column + 0.5) * cell
            arrays = (batch.positions, batch.token_slots, batch.out_locs)
            values = ["…"] * 4 if token is None else [token, *(int(array[token]) for array in arrays)]
            for line, value in enumerate(values):
                canvas.text(middle, baselines[2 + line], value, "text small" if line else "muted small")


def _draw_rows(canvas: Canvas, y: float, batch: Batch) -> float:
    """The arrays with an entry a row; returns where they end."""
    for x, name in zip(
        _PER_ROW, ("row", "slots", "q_lens", "seq_lens", "cached before", "in sample_rows"), strict=True
    ):
        canvas.text(x, y + 16, name, "muted small" if name in ("row", "cached before") else "text small")
    y += 26
    sampled = np.isin(np.arange(batch.num_rows), batch.sample_rows)
    for row in range(min(batch.num_rows, _MOST_ROWS)):
        fill, ink = request_colors(row)
        canvas.box(_PER_ROW[0] - 24, y, 48, 20, fill=fill)
        canvas.text(_PER_ROW[0], y + 15, row, "text strong small", fill=ink)
        cached = int(batch.seq_lens[row] - batch.q_lens[row])
        values = (batch.slots[row], batch.q_lens[row], batch.seq_lens[row], cached, "yes" if sampled[row] else "no")
        for x, value in zip(_PER_ROW[1:], values, strict=True):
            canvas.text(x, y + 15, value)
        y += 24
    if batch.num_rows > _MOST_ROWS:
        rest = f"… and {counted(batch.num_rows - _MOST_ROWS, 'row')} more"
        canvas.text(_MARGIN, y + 16, rest, "muted", "start")
        y += 24
    return y + 10


def _words(batch: Batch) -> list[str]:
    says = []
    for row in range(min(batch.num_rows, _MOST_ROWS)):
        first, end = int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1])
        places = ", ".join(str(place) for place in batch.out_locs[first:end][:12].tolist())
        says.append(
            f"Row {row} is slot {batch.slots[row]}: flat tokens {first} to {end - 1}, positions "
            f"{batch.positions[first]} to {batch.positions[end - 1]} of {batch.seq_lens[row]}, K and V to {places}"
            f"{', …' if end - first > 12 else ''}; {'samples' if row in batch.sample_rows else 'samples nothing'}."
        )
    if batch.num_rows > _MOST_ROWS:
        says.append(f"And {counted(batch.num_rows - _MOST_ROWS, 'row')} more.")
    return says
