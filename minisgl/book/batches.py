"""One step as arrays: its tokens, their places in the KV cache, what each may see, and the lengths of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

import numpy as np

from minisgl.batch import Batch
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, request_colors, shorten, visible
from minisgl.table import RunningTable

_LABEL = 112
_ROOM = WIDTH - 2 * MARGIN - _LABEL
_ARRAY = 20
_MOST_ROWS = 24
Column = tuple[int, int | None]  # a row, and a flat token of it; None stands for those that are left out
_PER_ROW = {"row": 60, "slots": 160, "q_lens": 265, "seq_lens": 365, "cached before": 500, "in sample_rows": 650}


def token_strip(texts: Sequence[str], batch: Batch, page_size: int) -> Picture:
    """Draw each fed token, by its [T] ``texts``, with its position and place in the KV cache; a frame is a page."""
    columns, line = 8, 86
    cell = (WIDTH - 2 * MARGIN) / columns
    canvas = Canvas(f"One step feeds {batch.num_tokens} tokens: text, position in the sequence, place in the KV cache")
    pages = (batch.out_locs // page_size).tolist()
    for (row, page), group in groupby(range(batch.num_tokens), lambda token: (token // columns, pages[token])):
        members = list(group)
        first, x, y = members[0], MARGIN + members[0] % columns * cell, 40 + row * line
        canvas.box(x + 2, y, len(members) * cell - 4, line - 8)
        canvas.text(x + 10, y + 17, f"page {page}", "muted small", "start")
        for token in members:
            text = (shorten(visible(texts[token]), 9), "text mono")
            position = (f"position {batch.positions[token]}", "muted small")
            place = (f"place {batch.out_locs[token]}", "text small strong")
            canvas.lines(x + (token - first + 0.5) * cell, y + 49, text, position, place)
        words = " ".join(repr(texts[token]) for token in members)
        canvas.says.append(
            f"Page {page}, place {batch.out_locs[first]}: from position {batch.positions[first]}, {words}"
        )
    return canvas.picture(46 + -(-batch.num_tokens // columns) * line)


def batch_arrays(batch: Batch) -> Picture:
    """Draw the arrays with an entry a token above, those with an entry a row below.

    Of a large step, the middles of long rows and all rows after the first 24 are left out.
    """
    rows = range(min(batch.num_rows, _MOST_ROWS))
    columns = [column for row in rows for column in _columns(batch, row)]
    digits = max(len(str(int(array.max()))) for array in (batch.positions, batch.token_slots, batch.out_locs))
    a_line = min(16, int(_ROOM / (digits * 7.7 + 6)))
    title = f"One step: {counted(batch.num_tokens, 'token')} in {counted(batch.num_rows, 'row')}"
    decode = f"decode rows: {batch.num_decode}"
    canvas, y = Canvas(title, decode, says=f"{title}, {decode}."), 44.0
    for start in range(0, len(columns), a_line):
        _draw_tokens(canvas, y, columns[start : start + a_line], _ROOM / a_line, batch)
        y += 132
    for name, x in _PER_ROW.items():
        canvas.text(x, y + 16, name, "muted small" if name in ("row", "cached before") else "text small")
    for row in rows:
        y += 24
        _draw_row(canvas, y + 2, batch, row)
    if batch.num_rows > _MOST_ROWS:
        y += 24
        canvas.says.append(canvas.rest(y + 18, batch.num_rows - _MOST_ROWS, "row"))
    return canvas.picture(y + 36)


def _columns(batch: Batch, row: int) -> list[Column]:
    tokens: list[int | None] = list(range(*batch.cu_seqlens_q[row : row + 2].tolist()))
    if batch.num_tokens > 64 and len(tokens) > 8:
        tokens[5:-2] = [None]
    return [(row, token) for token in tokens]


def _draw_tokens(canvas: Canvas, y: float, columns: list[Column], cell: float, batch: Batch) -> None:
    """One line of tokens with the entries of the arrays below each."""
    names = ("cu_seqlens_q", "row", "flat index", "positions", "token_slots", "out_locs")
    baselines = [y + 12, y + 33, *(y + 56 + line * _ARRAY for line in range(4))]
    for name, baseline in zip(names, baselines, strict=True):
        canvas.text(MARGIN, baseline, name, "muted small" if name in ("row", "flat index") else "text small", "start")
    left = MARGIN + _LABEL
    for row, group in groupby(enumerate(columns), lambda item: item[1][0]):
        members = [(left + column * cell, token) for column, (_, token) in group]
        x, width = members[0][0], len(members) * cell
        canvas.cell(x + 1, y + 17, width - 2, 23, (row, "text strong small"), color=row)
        canvas.box(x + 1, y + 42, width - 2, 4 * _ARRAY + 2)
        if members[0][1] == batch.cu_seqlens_q[row]:
            canvas.text(x + 2, y + 12, batch.cu_seqlens_q[row], "text small", "start")
        if members[-1][1] == batch.num_tokens - 1:
            canvas.text(x + width - 2, y + 12, batch.num_tokens, "text small", "end")
        for x, token in members:
            arrays = (np.arange(batch.num_tokens), batch.positions, batch.token_slots, batch.out_locs)
            for array, baseline, look in zip(arrays, baselines[2:], ["muted small", *["text small"] * 3], strict=True):
                canvas.text(x + cell / 2, baseline, "…" if token is None else array[token], look)


def _draw_row(canvas: Canvas, y: float, batch: Batch, row: int) -> None:
    """One row of the arrays with an entry a row."""
    places = iter(_PER_ROW.values())
    canvas.cell(next(places) - 24, y, 48, 20, (row, "text strong small"), color=row)
    samples, seq_len, fed = int((batch.sample_rows == row).sum()), batch.seq_lens[row], batch.q_lens[row]
    often = f" {counted(samples, 'time')}" if samples > 1 else ""  # it verifies drafts
    values = (batch.slots[row], fed, seq_len, seq_len - fed, often.strip() or ("yes" if samples else "no"))
    for x, value in zip(places, values, strict=True):
        canvas.text(x, y + 15, value)
    first, end = batch.cu_seqlens_q[row : row + 2].tolist()
    written = [*map(str, batch.out_locs[first:end][:12].tolist()), *["…"] * (end - first > 12)]
    canvas.says.append(
        f"Row {row} is slot {batch.slots[row]}: flat tokens {first} to {end - 1}, positions {batch.positions[first]} "
        f"to {batch.positions[end - 1]} of {seq_len}, K and V to {', '.join(written)}; "
        f"{'samples' if samples else 'samples nothing'}{often}."
    )


def attention_mask(batch: Batch) -> Picture:
    """Draw a block for each of the first 16 rows: a line for each fed token, a column for each position it could see.

    No token sees those of other rows, so there is no column for them.
    """
    most = 16
    title = "Who sees what: a line for each fed token, a column for each position of its sequence"
    legend = "grey: cached before this step  ·  colour: computed in this step  ·  outline only: not seen"
    canvas, y = Canvas(title, legend=legend), 60.0
    for row in range(min(batch.num_rows, most)):
        positions = batch.positions[int(batch.cu_seqlens_q[row]) : int(batch.cu_seqlens_q[row + 1])].tolist()
        y = _draw_mask(canvas, y, row, int(batch.seq_lens[row]), positions)
        says = [f"position {position} sees {f'0 to {position}' if position else 0}" for position in positions]
        if len(says) > 6:
            says[3:-1] = ["…"]
        canvas.says.append(f"Row {row} (slot {batch.slots[row]}), {positions[0]} positions cached: {'; '.join(says)}.")
    if batch.num_rows > most:
        canvas.says.append(canvas.rest(y + 14, batch.num_rows - most, "row"))
        y += 22
    return canvas.picture(y + 6)


def _draw_mask(canvas: Canvas, y: float, row: int, seq_len: int, positions: list[int]) -> float:
    """One row's block; returns where it ends."""
    cached, count = positions[0], len(positions)
    left, top = MARGIN + 104, y + 40
    cell = min(26.0, (WIDTH - MARGIN - left) / seq_len)
    line = 20.0 if count <= 24 else 260.0 / count
    parts = [f"{cached} cached"] * (cached > 0) + [f"{count} fed"]
    canvas.text(MARGIN, y + 18, f"row {row}: {counted(seq_len, 'position')}, {', '.join(parts)}", "text", "start")
    canvas.columns(left, top - 5, cell, seq_len, room=25)
    height, border = line * count, left + cached * cell
    canvas.path(f"M{left:g} {top:g}H{border:g}v{height:g}H{left:g}z", "shade")
    stairs = "".join(f"h{cell:g}v{line:g}" for _ in positions)
    canvas.path(f"M{border:g} {top:g}{stairs}H{border:g}z", fill=request_colors(row)[0])
    columns = range(seq_len + 1) if cell >= 8 else (0, seq_len)
    lines = range(count + 1) if line >= 8 else (0, count)
    grid = [f"M{left + column * cell:g} {top:g}v{height:g}" for column in columns]
    grid += [f"M{left:g} {top + index * line:g}h{cell * seq_len:g}" for index in lines]
    canvas.path("".join(grid), "rule")
    if cached:
        canvas.path(f"M{border:g} {top - 3:g}v{height + 6:g}", "line")
    for index in range(count) if line >= 14 else (0, count - 1):
        middle = top + (index + 0.5) * line if line >= 14 else top + 8 + (height - 12) * (index > 0)
        canvas.text(left - 8, middle + 4, f"position {positions[index]}", "text small", "end")
    return top + height + 8


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
        ends = {"kv": self.kv_len, "id": self.known_len, "?": self.token_len}
        return next((state for state, end in ends.items() if position < end), "")


def length_strip(moments: Sequence[Lengths]) -> Picture:
    """Draw one line a moment of one request, in the order of time, and one box a position of the sequence."""
    canvas = Canvas("Positions of one request, from moment to moment")
    left, y, line = MARGIN + 206, 56, 34
    columns = {name: WIDTH - MARGIN - 120 + 48 * column for column, name in enumerate(("kv", "token", "known"))}
    for name, x in columns.items():
        canvas.text(x, 48, name, "muted small")
    width = min((WIDTH - MARGIN - 150 - left) / max(moment.max_len for moment in moments), 36.0)
    for moment in moments:
        canvas.text(MARGIN, y + 19, moment.label, "text small", "start")
        for position in range(moment.max_len):
            state = moment.state(position)
            kind, color = "shared" if state == "id" else "empty", {"kv": 0, "?": 1}.get(state)
            words = [(state, "text small")] * (width >= 20)
            canvas.cell(left + position * width + 1, y, width - 2, line - 6, *words, color=color, kind=kind)
        lengths = astuple(moment)[1:4]
        for x, length in zip(columns.values(), lengths, strict=True):
            canvas.text(x, y + 19, length, "text strong")
        canvas.says.append("{}: kv_len {}, token_len {}, known_len {}.".format(moment.label, *lengths))
        y += line
    states = "kv: keys and values computed, or being computed  ·  id: known, not fed yet  ·  ?: being sampled"
    canvas.note(y + 18, f"{states}  ·  outline: room")
    return canvas.picture(y + 30)


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
                color = None if number and row < count - 1 else 0
                canvas.cell(left + column * cell + 1, y + 1, cell - 2, cell - 2, color=color, kind="shade")
    old, y = count * (count - 1) // 2, top + count * cell + 22
    words = f"Of the second step's {old + count} scores, the {old} grey ones are the first step's; the last row is new."
    canvas.note(y, words)
    return canvas.picture(y + 14, words)


def padding(lengths: Mapping[str, int]) -> Picture:
    """The tokens that each row feeds in one step, as a rectangle with padding and as one flat run."""
    widest, total = max(lengths.values()), sum(lengths.values())
    cell = min(26.0, 600.0 / max(widest, total))
    canvas = Canvas("One step, two layouts", legend="Each box is a token that the model computes.")
    canvas.text(MARGIN, 76, f"a rectangle: {len(lengths)} × {widest} = {len(lengths) * widest} tokens", anchor="start")
    x, flat = 128.0, 84.0 + 24 * len(lengths) + 36
    canvas.text(MARGIN, flat - 8, f"flat: {total} tokens", anchor="start")
    for number, (name, length) in enumerate(lengths.items()):
        y = 84.0 + 24 * number
        canvas.text(120, y + 16, shorten(name, 16), "muted small", "end")
        for column in range(widest):
            color = number if column < length else None
            canvas.cell(128 + column * cell, y + 2, cell - 2, 20, color=color)
            if column < length:
                canvas.cell(x, flat, cell - 2, 20, color=color)
                x += cell
    wasted = len(lengths) * widest - total
    words = f"The rectangle has {wasted} places of padding, computed and thrown away; the flat run has none."
    canvas.note(flat + 46, words)
    return canvas.picture(flat + 60, words)
