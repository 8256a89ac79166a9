"""RoPE as dials: where the rotary embedding turns a vector at each position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from minisgl.layers import Rotary, rotate
from minisgl.viz.svg import WIDTH, Canvas, Picture, circle, request_colors

_MARGIN = 14
_RADIUS = 56.0
_TOP = 48
_DIAL = 2 * (_RADIUS + 24)
_APART = 16.0
"""Pixels between two labels, so that neither covers the other."""


def rotation_dials(rotary: Rotary, pairs: Sequence[int], positions: Sequence[int]) -> Picture:
    """A dial for each pair of dimensions; a dot on it is where a vector that points right is turned at a position.

    Args:
        rotary: a live embedding; the dots come out of `rotate`.
        pairs: at most four; pair ``i`` is the dimensions ``i`` and ``i + head_dim / 2``.
        positions: ascending; the first and the last are always labelled, the others where there is room.
    """
    half = rotary.table.shape[1] // 2
    vectors = torch.cat([torch.ones(half), torch.zeros(half)]).expand(len(positions), 1, -1)
    rotation = rotary(torch.tensor(positions, dtype=torch.int32), torch.float32)
    turned = rotate(vectors, rotation)[:, 0]
    canvas = Canvas()
    title = f"The same vector at the positions {positions[0]} to {positions[-1]}, in {len(pairs)} of {half} pairs"
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    width = (WIDTH - 2 * _MARGIN) / len(pairs)
    says: list[str] = []
    for number, pair in enumerate(pairs):
        points = [(float(row[pair]), float(row[pair + half])) for row in turned]
        step = math.degrees(math.atan2(float(rotary.table[1, pair + half]), float(rotary.table[1, pair])))
        x = _MARGIN + (number + 0.5) * width
        _draw_dial(canvas, x, points, positions)
        canvas.text(x, _TOP + _DIAL + 16, f"pair {pair}: dimensions {pair} and {pair + half}", "text small")
        canvas.text(x, _TOP + _DIAL + 33, f"{step:.3g}° a position", "muted small")
        says.append(f"Pair {pair}, dimensions {pair} and {pair + half}, turns by {step:.3g} degrees a position.")
    return canvas.picture(_TOP + _DIAL + 46, "\n".join(says))


def _draw_dial(canvas: Canvas, x: float, points: Sequence[tuple[float, float]], positions: Sequence[int]) -> None:
    """``points`` are (cos, sin) and turn counter-clockwise from the right, as angles do on paper."""
    y = _TOP + _DIAL / 2
    canvas.path(circle(x, y, _RADIUS), "rule")
    placed: list[tuple[float, float]] = []
    in_order = [0, len(points) - 1, *range(1, len(points) - 1)]
    for index in in_order:
        cos, sin = points[index]
        dot = x + cos * _RADIUS, y - sin * _RADIUS
        label = x + cos * (_RADIUS + 14), y - sin * (_RADIUS + 14)
        canvas.path(f"M{x:g} {y:g}L{dot[0]:g} {dot[1]:g}", "rule")
        canvas.path(circle(*dot, 4), fill=request_colors(0)[0])
        if all(math.dist(label, other) >= _APART for other in placed):
            placed.append(label)
            canvas.text(label[0], label[1] + 4, positions[index], "text small")
