"""Attention weights as squares: which earlier tokens each token reads, in one head or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors, shorten, visible

_MARGIN = 14
_LABEL = 84
_LARGEST = 30.0
_TOP = 62
_LONGEST = 8
_SMALLEST_WEIGHT = 0.005


def attention_map(maps: Mapping[str, torch.Tensor], texts: Sequence[str]) -> Picture:
    """A panel a head, side by side. The area of a square is the weight with which its row's token reads its column's.

    Args:
        maps: title → [T, T] weights; each row sums to 1 and is 0 right of the diagonal.
        texts: [T] text of each token.
    """
    panel = (WIDTH - 2 * _MARGIN) / len(maps)
    cell = min((panel - _LABEL - 10) / len(texts), _LARGEST)
    canvas = Canvas()
    says: list[str] = []
    for number, (title, weights) in enumerate(maps.items()):
        x = _MARGIN + number * panel
        canvas.text(x, 26, title, "text strong", "start")
        _draw_panel(canvas, x, cell, weights, texts)
        strongest = weights.argmax(dim=1).tolist()
        reads = ", ".join(f"{row} reads {column}" for row, column in enumerate(strongest))
        says.append(f"{title}. What each token reads most: {reads}.")
    bottom = _TOP + len(texts) * cell
    legend = "row: the token that reads  ·  column: the token that is read  ·  area: weight, a full cell is 1"
    canvas.text(_MARGIN, bottom + 22, legend, "muted small", "start")
    return canvas.picture(bottom + 34, "\n".join(says))


def _draw_panel(canvas: Canvas, x: float, cell: float, weights: torch.Tensor, texts: Sequence[str]) -> None:
    left = x + _LABEL
    for row, text in enumerate(texts):
        y = _TOP + row * cell
        canvas.text(left - 22, y + cell / 2 + 5, shorten(visible(text), _LONGEST), "text mono", "end")
        canvas.text(left - 4, y + cell / 2 + 4, row, "muted small", "end")
        canvas.text(left + (row + 0.5) * cell, _TOP - 8, row, "muted small")
        for column, weight in enumerate(weights[row, : row + 1].tolist()):
            canvas.box(left + column * cell, y, cell, cell)
            if weight >= _SMALLEST_WEIGHT:
                side = (cell - 2) * weight**0.5
                inset = (cell - side) / 2
                canvas.box(left + column * cell + inset, y + inset, side, side, fill=request_colors(0)[0])
