"""An all-reduce turn by turn: who sends to whom, and whose numbers every rank has added up by then."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from minisgl.viz.player import Player, player
from minisgl.viz.svg import WIDTH, Canvas, Picture, Point, counted, request_colors
from minisgl.viz.transfers import Sums, Transfer, in_words, partial_sums, turns
from minisgl.viz.units import byte_size

_MARGIN = 14
_TOP = 64.0
_CENTRE, _RADIUS = 152.0, 104.0
_NODE = 26.0
_LEFT, _RIGHT = 342.0, WIDTH - 88.0
_LINE = 38.0
_CELL = 28.0
_DIGIT = 12.0
_MOST_LABELS = 16
_LEGEND = "piece of a cell: the numbers of that rank are in the sum  ·  thick frame: complete"


def reduce_player(transfers: Sequence[Transfer], name: str = "all-reduce") -> Player:
    """Step through a schedule: the ranks in a circle with their messages, and beside it what each has in memory.

    Args:
        transfers: such as `ring_all_reduce` makes.
        name: of the schedule.

    Raises:
        ConfigError: see `partial_sums`.
    """
    in_turns, sums = turns(transfers), list(partial_sums(transfers))
    frames, captions, sent = [], [], Counter[int]()
    for number, (turn, after) in enumerate(zip([[], *in_turns], sums, strict=True)):
        for transfer in turn:
            sent[transfer.source] += transfer.nbytes
        frames.append(_frame(f"{name}, after turn {number} of {len(in_turns)}", turn, after, sent))
        captions.append(_caption(turn) if number else "every rank has its own numbers only")
    return player(frames, captions)


def _caption(turn: Sequence[Transfer]) -> str:
    sizes = dict.fromkeys(byte_size(nbytes) for nbytes in sorted(transfer.nbytes for transfer in turn))
    size = " to ".join([*sizes][:: max(len(sizes) - 1, 1)])
    kinds = " or ".join(sorted({f"{transfer.kind}s" for transfer in turn}))
    messages = f"{counted(len(turn), 'message')} of {size}{' each' * (len(turn) > 1)}"
    return f"{messages}; whoever gets one {kinds} it"


def _frame(title: str, turn: Sequence[Transfer], sums: Sums, sent: Counter[int]) -> Picture:
    ranks, chunks = len(sums), len(sums[0])
    canvas = Canvas()
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(_MARGIN, 46, _LEGEND, "muted small", "start")
    _draw_circle(canvas, turn, ranks)
    width = (_RIGHT - _LEFT) / chunks
    for chunk in range(chunks):
        label = chunk if width < 60 else "the whole" if chunks == 1 else f"chunk {chunk}"
        canvas.text(_LEFT + (chunk + 0.5) * width, _TOP + 16, label, "muted small")
    canvas.text(WIDTH - _MARGIN, _TOP + 16, "sent so far", "muted small", "end")
    says = [f"{title}.", *([f"Messages: {in_words(turn)}."] if turn else [])]
    for rank, row in enumerate(sums):
        y = _TOP + 26 + rank * _LINE
        fill, ink = request_colors(rank)
        canvas.box(_LEFT - 36, y, 28, _CELL, fill=fill)
        canvas.text(_LEFT - 22, y + 19, rank, "strong", fill=ink)
        for chunk, parts in enumerate(row):
            _draw_sum(canvas, _LEFT + chunk * width, y, width - 6, parts, ranks)
        canvas.text(WIDTH - _MARGIN, y + 19, byte_size(sent[rank]), "text small", "end")
        says.append(f"Rank {rank} has {', '.join(_words(parts, ranks) for parts in row)}.")
    bottom = max(_TOP + 2 * (_RADIUS + _NODE) + 20, _TOP + 26 + ranks * _LINE)
    return canvas.picture(bottom + 8, "\n".join(says))


def _draw_sum(canvas: Canvas, x: float, y: float, width: float, parts: Counter[int], ranks: int) -> None:
    """A cell with a place for every rank, filled if its numbers are in the sum; as often as they are, if not once."""
    place = width / ranks
    for rank, times in sorted(parts.items()):
        fill, ink = request_colors(rank)
        canvas.box(x + rank * place, y, place - 0.5, _CELL, fill=fill)
        if place >= _DIGIT:
            text = rank if times == 1 else f"{times}×"
            canvas.text(x + (rank + 0.5) * place, y + 19, text, "small", fill=ink)
    canvas.box(x, y, width, _CELL)
    if all(parts[rank] == 1 for rank in range(ranks)):
        canvas.path(f"M{x - 2:g} {y - 2:g}h{width + 4:g}v{_CELL + 4:g}h{-width - 4:g}z")


def _draw_circle(canvas: Canvas, turn: Sequence[Transfer], ranks: int) -> None:
    for transfer in turn:
        start, end = _between(_place(transfer.source, ranks), _place(transfer.destination, ranks))
        canvas.arrow(start, end, fill=request_colors(transfer.source)[0], thickness=2.0)
    for transfer in turn if len(turn) <= _MOST_LABELS else ():
        if transfer.chunk is not None:
            start, end = _between(_place(transfer.source, ranks), _place(transfer.destination, ranks))
            x, y = (a + 0.4 * (b - a) for a, b in zip(start, end, strict=True))
            half = 7 if transfer.chunk < 10 else 10
            canvas.box(x - half, y - 8, 2 * half, 16, "card")
            canvas.text(x, y + 4, transfer.chunk, "text small strong")
    for rank in range(ranks):
        x, y = _place(rank, ranks)
        fill, ink = request_colors(rank)
        canvas.box(x - _NODE / 2, y - _NODE / 2, _NODE, _NODE, fill=fill)
        canvas.text(x, y + 5, rank, "strong", fill=ink)


def _place(rank: int, ranks: int) -> Point:
    """On the circle, from the top and clockwise."""
    angle = 2 * math.pi * rank / ranks
    return _CENTRE + _RADIUS * math.sin(angle), _TOP + 20 + _NODE / 2 + _RADIUS * (1 - math.cos(angle))


def _between(start: Point, end: Point) -> tuple[Point, Point]:
    """From node to node beside the straight line, so that what goes the other way has room."""
    length = math.dist(start, end)
    along = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    aside = 6 * along[1], -6 * along[0]
    gap = _NODE * 0.72
    return (
        (start[0] + gap * along[0] + aside[0], start[1] + gap * along[1] + aside[1]),
        (end[0] - gap * along[0] + aside[0], end[1] - gap * along[1] + aside[1]),
    )


def _words(parts: Counter[int], ranks: int) -> str:
    if all(parts[rank] == 1 for rank in range(ranks)):
        return "the sum"
    return "+".join(str(rank) for rank in sorted(parts.elements()))
