"""One step as arrays: its tokens, their places in the KV cache, what each may see, and the lengths of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from minisgl.batch import Batch
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, request_colors, round_step, shorten, visible
from minisgl.table import RunningTable


def token_strip(texts: Sequence[str], batch: Batch, page_size: int) -> Picture:
    """Draw each fed token with its position and its place in the KV cache, the tokens of one page in one frame.

    Args:
        texts: [T] text of each token.
        page_size: tokens a page.
    """
    columns, line = 8, 86
    cell = (WIDTH - 2 * MARGIN) / columns
    title = f"One step feeds {batch.num_tokens} tokens: text, position in the sequence, place in the KV cache"
    canvas = Canvas(title)
    says: list[str] = []
    for start in range(0, batch.num_tokens, columns):
        tokens = range(start, min(start + columns, batch.num_tokens))
        y = 40 + start // columns * line
        for page, group in groupby(tokens, lambda token: int(batch.out_locs[token]) // page_size):
            members = list(group)
            x = MARGIN + (members[0] - start) * cell
            canvas.box(x + 2, y, len(members) * cell - 4, line - 8)
            canvas.text(x + 10, y + 17, f"page {page}", "muted small", "start")
            for token in members:
                middle = MARGIN + (token - start + 0.5) * cell
                canvas.text(middle, y + 37, shorten(visible(texts[token]), 9), "text mono")
                canvas.text(middle, y + 54, f"position {batch.positions[token]}", "muted small")
                canvas.text(middle, y + 70, f"place {batch.out_locs[token]}", "text small strong")
            first, words = members[0], " ".join(repr(texts[token]) for token in members)
            says.append(f"Page {page}, place {batch.out_locs[first]}: from position {batch.positions[first]}, {words}")
    lines = -(-batch.num_tokens // columns)
    return canvas.picture(40 + lines * line + 6, "\n".join(says))


# -- the arrays ------------------------------------------------------------------------------------------------------

_LABEL = 112
_ROOM = WIDTH - 2 * MARGIN - _LABEL
_ARRAY = 20
_MOST_ROWS = 24
_PER_ROW = (60, 160, 265, 365, 500, 650)

Column = tuple[int, int | None]
"""(row, flat token), or None for tokens of the row that are left out."""


def batch_arrays(batch: Batch) -> Picture:
    """Draw the arrays with an entry a token above, those with an entry a row below.

    Of a large step, the middles of long rows and all rows after the first 24 are left out.
    """
    columns = _columns(batch)
    digits = max(len(str(int(array.max()))) for array in (batch.positions, batch.token_slots, batch.out_locs))
    a_line = min(16, int(_ROOM / (digits * 7.7 + 6)))
    decode = f"decode rows: {batch.num_decode}"
    title = f"One step: {counted(batch.num_tokens, 'token')} in {counted(batch.num_rows, 'row')}"
    canvas, says, y = Canvas(title, decode), [f"{title}, {decode}."], 44.0
    for start in range(0, len(columns), a_line):
        _draw_tokens(canvas, y, columns[start : start + a_line], _ROOM / a_line, batch)
        y += 132
    names = ("row", "slots", "q_lens", "seq_lens", "cached before", "in sample_rows")
    for x, name in zip(_PER_ROW, names, strict=True):
        canvas.text(x, y + 16, name, "muted small" if name in ("row", "cached before") else "text small")
    y += 26
    for row in range(min(batch.num_rows, _MOST_ROWS)):
        says.append(_draw_row(canvas, y, batch, row))
        y += 24
    if batch.num_rows > _MOST_ROWS:
        canvas.rest(y + 16, batch.num_rows - _MOST_ROWS, "row")
        says.append(f"And {counted(batch.num_rows - _MOST_ROWS, 'row')} more.")
        y += 24
    return canvas.picture(y + 10, "\n".join(says))


def _columns(batch: Batch) -> list[Column]:
    columns: list[Column] = []
    head, tail = 5, 2
    for row in range(min(batch.num_rows, _MOST_ROWS)):
        tokens = range(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        if batch.num_tokens > 64 and len(tokens) > head + 1 + tail:
            columns += [(row, token) for token in (*tokens[:head], None, *tokens[-tail:])]
        else:
            columns += [(row, token) for token in tokens]
    return columns


def _draw_tokens(canvas: Canvas, y: float, columns: list[Column], cell: float, batch: Batch) -> None:
    """One line of tokens with the entries of the arrays below each."""
    names = ("cu_seqlens_q", "row", "flat index", "positions", "token_slots", "out_locs")
    baselines = [y + 12, y + 33, *(y + 56 + line * _ARRAY for line in range(4))]
    for name, baseline in zip(names, baselines, strict=True):
        canvas.text(MARGIN, baseline, name, "muted small" if name in ("row", "flat index") else "text small", "start")
    left = MARGIN + _LABEL
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


def _draw_row(canvas: Canvas, y: float, batch: Batch, row: int) -> str:
    """One row of the arrays with an entry a row; returns it in words."""
    fill, ink = request_colors(row)
    canvas.box(_PER_ROW[0] - 24, y, 48, 20, fill=fill)
    canvas.text(_PER_ROW[0], y + 15, row, "text strong small", fill=ink)
    samples = bool(np.isin(row, batch.sample_rows))
    cached = int(batch.seq_lens[row] - batch.q_lens[row])
    values = (batch.slots[row], batch.q_lens[row], batch.seq_lens[row], cached, "yes" if samples else "no")
    for x, value in zip(_PER_ROW[1:], values, strict=True):
        canvas.text(x, y + 15, value)
    first, end = int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1])
    places = ", ".join(str(place) for place in batch.out_locs[first:end][:12].tolist())
    return (
        f"Row {row} is slot {batch.slots[row]}: flat tokens {first} to {end - 1}, positions "
        f"{batch.positions[first]} to {batch.positions[end - 1]} of {batch.seq_lens[row]}, K and V to {places}"
        f"{', …' if end - first > 12 else ''}; {'samples' if samples else 'samples nothing'}."
    )


# -- who sees what ---------------------------------------------------------------------------------------------------

Interval = tuple[int, int]


def attention_mask(batch: Batch, window: int | None = None) -> Picture:
    """Draw a block for each of the first 16 rows: a line for each fed token, a column for each position it could see.

    Args:
        batch: the step. No token sees those of other rows, so there is no column for them.
        window: positions that a token sees at most, itself included; None is all up to itself.
    """
    most = 16
    title = "Who sees what: a line for each fed token, a column for each position of its sequence"
    legend = "grey: cached before this step  ·  colour: computed in this step  ·  outline only: not seen"
    canvas, y, says = Canvas(title, legend=legend), 60.0, []
    for row in range(min(batch.num_rows, most)):
        positions = batch.positions[int(batch.cu_seqlens_q[row]) : int(batch.cu_seqlens_q[row + 1])].tolist()
        seen = [(max(0, position + 1 - window) if window else 0, position + 1) for position in positions]
        y = _draw_mask(canvas, y, row, int(batch.seq_lens[row]), positions, seen)
        says.append(_mask_in_words(row, int(batch.slots[row]), positions, seen))
    if batch.num_rows > most:
        says.append(canvas.rest(y + 14, batch.num_rows - most, "row"))
        y += 22
    return canvas.picture(y + 6, "\n".join(says))


def _draw_mask(canvas: Canvas, y: float, row: int, seq_len: int, positions: list[int], seen: list[Interval]) -> float:
    """One row's block; returns where it ends."""
    cached = positions[0]
    left, top = MARGIN + 104, y + 40
    cell = min(26.0, (WIDTH - MARGIN - left) / seq_len)
    line = 20.0 if len(positions) <= 24 else 260.0 / len(positions)
    parts = [f"{cached} cached"] * (cached > 0) + [f"{len(positions)} fed"]
    canvas.text(MARGIN, y + 18, f"row {row}: {counted(seq_len, 'position')}, {', '.join(parts)}", "text", "start")
    for position in range(0, seq_len, max(1, int(round_step(25 / cell)))):
        canvas.text(left + (position + 0.5) * cell, top - 5, position, "muted small")
    fill, _ = request_colors(row)
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


def _area(left: float, top: float, cell: float, line: float, intervals: Iterable[Interval]) -> str:
    """Path around the columns of one interval a line."""
    return "".join(
        f"M{left + first * cell:g} {top + index * line:g}h{(end - first) * cell:g}v{line:g}h{(first - end) * cell:g}z"
        for index, (first, end) in enumerate(intervals)
        if first < end
    )


def _mask_in_words(row: int, slot: int, positions: Sequence[int], seen: Sequence[Interval]) -> str:
    spans = [f"{first} to {end - 1}" if end - first > 1 else f"{first}" for first, end in seen]
    lines = [f"position {position} sees {span}" for position, span in zip(positions, spans, strict=True)]
    if len(lines) > 6:
        lines = [*lines[:3], "…", lines[-1]]
    return f"Row {row} (slot {slot}), {positions[0]} positions cached: {'; '.join(lines)}."


# -- the lengths of a request ----------------------------------------------------------------------------------------


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

    def state(self, position: int) -> str:
        """``kv``: computed, ``id``: known, ``?``: being sampled, or nothing for room."""
        if position < self.kv_len:
            return "kv"
        if position < self.known_len:
            return "id"
        return "?" if position < self.token_len else ""


def length_strip(moments: Sequence[Lengths]) -> Picture:
    """Draw one line a moment of one request, in the order of time, and one box a position of the sequence."""
    canvas = Canvas("Positions of one request, from moment to moment")
    left, top, line = MARGIN + 206, 56, 34
    columns = [WIDTH - MARGIN - 120 + 48 * column for column in range(3)]
    for x, name in zip(columns, ("kv", "token", "known"), strict=True):
        canvas.text(x, 48, name, "muted small")
    width = min((WIDTH - MARGIN - 150 - left) / max(moment.max_len for moment in moments), 36.0)
    says = []
    for number, moment in enumerate(moments):
        y = top + number * line
        canvas.text(MARGIN, y + 19, moment.label, "text small", "start")
        for position in range(moment.max_len):
            state, place = moment.state(position), left + position * width
            fill, ink = {"kv": request_colors(0), "?": request_colors(1)}.get(state, ("", ""))
            canvas.box(place + 1, y, width - 2, line - 6, "shared" if state == "id" else "empty", fill)
            if width >= 20:
                canvas.text(place + width / 2, y + 19, state, "text small", fill=ink)
        for x, length in zip(columns, (moment.kv_len, moment.token_len, moment.known_len), strict=True):
            canvas.text(x, y + 19, length, "text strong")
        says.append(
            f"{moment.label}: kv_len {moment.kv_len}, token_len {moment.token_len}, known_len {moment.known_len}."
        )
    bottom = top + len(moments) * line
    legend = (
        "kv: keys and values computed, or being computed  ·  id: known, not fed yet  ·  ?: being sampled  ·  "
        "outline: room"
    )
    canvas.text(MARGIN, bottom + 18, legend, "muted small", "start")
    return canvas.picture(bottom + 30, "\n".join(says))


def score_grids(texts: Sequence[str]) -> Picture:
    """Draw the scores q·k of two steps without a cache: of all tokens but the last, then of all; grey is repeated."""
    cell, top, count = min(34.0, 300.0 / len(texts)), 78.0, len(texts)
    canvas = Canvas("The scores q·k of two steps", legend="A row is a token's query, a column a token's key.")
    for number, (left, length) in enumerate([(90.0, count - 1), (460.0, count)]):
        canvas.text(left, top - 8, f"text of {length} tokens", "text small", "start")
        for row in range(length):
            y = top + row * cell
            canvas.text(left - 6, y + cell / 2 + 4, shorten(visible(texts[row]), 9), "mono", "end")
            for column in range(row + 1):
                fill = "" if number and row < count - 1 else request_colors(0)[0]
                canvas.box(left + column * cell + 1, y + 1, cell - 2, cell - 2, "shade", fill)
    old, new = count * (count - 1) // 2, count
    y = top + count * cell + 22
    words = f"Of the second step's {old + new} scores, the {old} grey ones are the first step's; the last row is new."
    canvas.text(MARGIN, y, words, "muted small", "start")
    return canvas.picture(y + 14, words)


def padding(lengths: Mapping[str, int]) -> Picture:
    """The tokens that each row feeds in one step, as a rectangle with padding and as one flat run."""
    widest, total = max(lengths.values()), sum(lengths.values())
    cell = min(26.0, 600.0 / max(widest, total))
    canvas = Canvas("One step, two layouts", legend="Each box is a token that the model computes.")
    canvas.text(MARGIN, 76, f"a rectangle: {len(lengths)} × {widest} = {len(lengths) * widest} tokens", anchor="start")
    y = 84.0
    for number, (name, length) in enumerate(lengths.items()):
        canvas.text(120, y + 16, shorten(name, 16), "muted small", "end")
        for column in range(widest):
            fill = request_colors(number)[0] if column < length else ""
            canvas.box(128 + column * cell, y + 2, cell - 2, 20, "empty", fill)
        y += 24
    canvas.text(MARGIN, y + 28, f"flat: {total} tokens", anchor="start")
    x = 128.0
    for number, length in enumerate(lengths.values()):
        for _ in range(length):
            canvas.box(x, y + 36, cell - 2, 20, fill=request_colors(number)[0])
            x += cell
    wasted = len(lengths) * widest - total
    words = f"The rectangle has {wasted} places of padding, computed and thrown away; the flat run has none."
    canvas.text(MARGIN, y + 82, words, "muted small", "start")
    return canvas.picture(y + 96, words)
