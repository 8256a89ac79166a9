"""The tokens of a batch, each in the place of the KV cache where its key and value go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from minisgl.core import Batch
from minisgl.viz.svg import WIDTH, Canvas, Picture, shorten, visible

_COLUMNS = 8
_MARGIN = 14
_CELL = (WIDTH - 2 * _MARGIN) / _COLUMNS
_LINE = 86
_LONGEST = 9


def token_strip(texts: Sequence[str], batch: Batch, page_size: int) -> Picture:
    """Each fed token with its position and its place in the KV cache; tokens of one page stand in one frame.

    Args:
        texts: [T] text of each token.
        batch: the step.
        page_size: tokens a page.
    """
    canvas = Canvas()
    title = f"One step feeds {batch.num_tokens} tokens: text, position in the sequence, place in the KV cache"
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    says: list[str] = []
    for start in range(0, batch.num_tokens, _COLUMNS):
        tokens = range(start, min(start + _COLUMNS, batch.num_tokens))
        y = 40 + start // _COLUMNS * _LINE
        for page, group in groupby(tokens, lambda token: int(batch.out_locs[token]) // page_size):
            members = list(group)
            x = _MARGIN + (members[0] - start) * _CELL
            canvas.box(x + 2, y, len(members) * _CELL - 4, _LINE - 8)
            canvas.text(x + 10, y + 17, f"page {page}", "muted small", "start")
            for token in members:
                position, place = int(batch.positions[token]), int(batch.out_locs[token])
                _draw_token(canvas, _MARGIN + (token - start) * _CELL, y, texts[token], position, place)
            first, words = members[0], " ".join(repr(texts[token]) for token in members)
            says.append(f"Page {page}, place {batch.out_locs[first]}: from position {batch.positions[first]}, {words}")
    lines = -(-batch.num_tokens // _COLUMNS)
    return canvas.picture(40 + lines * _LINE + 6, "\n".join(says))


def _draw_token(canvas: Canvas, x: float, y: float, text: str, position: int, place: int) -> None:
    middle = x + _CELL / 2
    canvas.text(middle, y + 37, shorten(visible(text), _LONGEST), "text mono")
    canvas.text(middle, y + 54, f"position {position}", "muted small")
    canvas.text(middle, y + 70, f"place {place}", "text small strong")
