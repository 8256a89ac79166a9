"""Schedules of collectives: which rank sends what to which, and what each rank has by then."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from typing import Literal

from minisgl.book.players import Player, player
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, Point, byte_size, counted, request_colors
from minisgl.errors import ConfigError

Sums = list[list[Counter[int]]]
"""[ranks][chunks] whose numbers are in the sum that a rank has of a chunk, and how often."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a collective, which the destination adds to what it has, or takes in its place."""

    when: float  # number of the turn, or a time in any unit; transfers with the same take place at once
    source: int
    destination: int
    chunk: int | None  # which part of the tensor; None is all of it
    nbytes: int
    kind: Literal["add", "take"]

    def __post_init__(self) -> None:
        if self.source == self.destination or min(self.source, self.destination, self.chunk or 0) < 0:
            raise ConfigError(f"a transfer goes from one rank to another and numbers count from 0: {self!r}")

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f" chunk {self.chunk}"
        return f"{self.source} to {self.destination}{chunk} to {self.kind}"


def ring_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Each rank sends to its neighbour only, in ``2 (ranks − 1)`` turns (Patarasuk and Yuan 2009).

    Each chunk goes round once and grows, and once more when it is complete.
    """
    chunks = _chunk_sizes(ranks, nbytes)
    transfers: list[Transfer] = []
    for turn in range(2 * (ranks - 1)):
        for rank in range(ranks):
            chunk = (rank - turn) % ranks  # in the second lap `ranks - 1` turns later: the next chunk
            kind: Literal["add", "take"] = "add" if turn < ranks - 1 else "take"
            transfers.append(Transfer(turn, rank, (rank + 1) % ranks, chunk, chunks[chunk], kind))
    return transfers


def one_shot_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Each of at least two ranks gets everything from all others, and adds it up for itself. One turn."""
    _chunk_sizes(ranks, nbytes)
    return [Transfer(0, source, rank, None, nbytes, "add") for source, rank in permutations(range(ranks), 2)]


def two_shot_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Each rank gets one chunk from all others and adds it up; then all get the complete chunks from each other."""
    chunks = _chunk_sizes(ranks, nbytes)
    pairs = list(permutations(range(ranks), 2))
    scatter = [Transfer(0, source, owner, owner, chunks[owner], "add") for source, owner in pairs]
    return scatter + [Transfer(1, owner, rank, owner, chunks[owner], "take") for owner, rank in pairs]


def _chunk_sizes(ranks: int, nbytes: int) -> list[int]:
    """As equal as possible, the first ones larger."""
    if ranks < 2 or nbytes < 1:
        raise ConfigError(f"an all-reduce takes at least 2 ranks and 1 byte, not {ranks} and {nbytes}")
    return [nbytes // ranks + (chunk < nbytes % ranks) for chunk in range(ranks)]


def turns(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """The transfers that take place at once, in order of time."""
    in_order = sorted(transfers, key=lambda transfer: transfer.when)
    return [list(turn) for _, turn in groupby(in_order, key=lambda transfer: transfer.when)]


def partial_sums(transfers: Sequence[Transfer]) -> Iterator[Sums]:
    """What every rank has of every chunk before the first turn, and after each. In a turn, all send, then receive."""
    chunks = 1 + max((transfer.chunk or 0 for transfer in transfers), default=0)
    sums: Sums = [[Counter([rank]) for _ in range(chunks)] for rank in range(_num_ranks(transfers))]
    yield sums
    for turn in turns(transfers):
        before, sums = sums, [list(row) for row in sums]
        for transfer in turn:
            for chunk in range(chunks) if transfer.chunk is None else [transfer.chunk]:
                sent, row = before[transfer.source][chunk], sums[transfer.destination]
                row[chunk] = sent if transfer.kind == "take" else row[chunk] + sent
        yield sums


def _num_ranks(transfers: Sequence[Transfer]) -> int:
    return 1 + max((max(transfer.source, transfer.destination) for transfer in transfers), default=0)


_TOP = 64.0
_CENTRE, _RADIUS = 152.0, 104.0
_NODE, _CELL = 26.0, 28.0


def reduce_player(transfers: Sequence[Transfer], name: str = "all-reduce") -> Player:
    """Step through a schedule: the ranks in a circle with their messages, and beside it what each has in memory."""
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
    return f"{counted(len(turn), 'message')} of {size}{' each' * (len(turn) > 1)}; the receiver {kinds} it"


def _frame(title: str, turn: Sequence[Transfer], sums: Sums, sent: Counter[int]) -> Picture:
    ranks, chunks, left, line = len(sums), len(sums[0]), 342.0, 38.0
    legend = "piece of a cell: the numbers of that rank are in the sum  ·  thick frame: complete"
    canvas = Canvas(title, legend=legend, says=f"{title}.")
    if turn:
        canvas.says.append(f"Messages: {', '.join(map(str, turn))}.")
    _draw_circle(canvas, turn, ranks)
    width = (WIDTH - 88.0 - left) / chunks
    for chunk in range(chunks):
        label = chunk if width < 60 else "the whole" if chunks == 1 else f"chunk {chunk}"
        canvas.text(left + (chunk + 0.5) * width, _TOP + 16, label, "muted small")
    canvas.text(WIDTH - MARGIN, _TOP + 16, "sent so far", "muted small", "end")
    for rank, row in enumerate(sums):
        y = _TOP + 26 + rank * line
        _draw_rank(canvas, left - 22, y + _CELL / 2, rank, 28, _CELL, rank)
        for chunk, parts in enumerate(row):
            _draw_sum(canvas, left + chunk * width, y, width - 6, parts, ranks)
        canvas.text(WIDTH - MARGIN, y + 19, byte_size(sent[rank]), "text small", "end")
        has = ("the sum" if _is_complete(each, ranks) else "+".join(map(str, sorted(each.elements()))) for each in row)
        canvas.says.append(f"Rank {rank} has {', '.join(has)}.")
    bottom = max(_TOP + 2 * (_RADIUS + _NODE) + 20, _TOP + 26 + ranks * line)
    return canvas.picture(bottom + 8)


def _is_complete(parts: Counter[int], ranks: int) -> bool:
    return all(parts[rank] == 1 for rank in range(ranks))


def _draw_sum(canvas: Canvas, x: float, y: float, width: float, parts: Counter[int], ranks: int) -> None:
    """A cell with a place for every rank, filled if its numbers are in the sum; with how often, if not once."""
    place = width / ranks
    for rank, times in sorted(parts.items()):
        fill, ink = request_colors(rank)
        canvas.box(x + rank * place, y, place - 0.5, _CELL, fill=fill)
        if place >= 12:
            canvas.text(x + (rank + 0.5) * place, y + 19, rank if times == 1 else f"{times}×", "small", fill=ink)
    canvas.box(x, y, width, _CELL)
    if _is_complete(parts, ranks):
        canvas.path(f"M{x - 2:g} {y - 2:g}h{width + 4:g}v{_CELL + 4:g}h{-width - 4:g}z")


def _draw_circle(canvas: Canvas, turn: Sequence[Transfer], ranks: int) -> None:
    arrows = [_between(_place(each.source, ranks), _place(each.destination, ranks)) for each in turn]
    for transfer, (start, end) in zip(turn, arrows, strict=True):
        canvas.arrow(start, end, fill=request_colors(transfer.source)[0], thickness=2.0)
    for transfer, (start, end) in zip(turn, arrows, strict=True) if len(turn) <= 16 else ():
        x, y = (a + 0.4 * (b - a) for a, b in zip(start, end, strict=True))
        _write_chunk(canvas, x, y, transfer.chunk)
    for rank in range(ranks):
        _draw_rank(canvas, *_place(rank, ranks), rank, _NODE, _NODE, rank)


def _place(rank: int, ranks: int) -> Point:
    """On the circle, from the top and clockwise."""
    angle = 2 * math.pi * rank / ranks
    return _CENTRE + _RADIUS * math.sin(angle), _TOP + 20 + _NODE / 2 + _RADIUS * (1 - math.cos(angle))


def _between(start: Point, end: Point) -> tuple[Point, Point]:
    """From node to node beside the straight line, so that messages in the other direction have room."""
    length, gap = math.dist(start, end), _NODE * 0.72
    x, y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    first = start[0] + gap * x + 6 * y, start[1] + gap * y - 6 * x
    return first, (end[0] - gap * x + 6 * y, end[1] - gap * y - 6 * x)


_LEFT, _LANE = MARGIN + 64, 34


def reduce_schedule(schedules: Mapping[str, Sequence[Transfer]]) -> Picture:
    """Draw every message of some schedules (name → transfers): ranks as lines, turns to the right, arrows between."""
    in_turns = {name: turns(transfers) for name, transfers in schedules.items()}
    width = min((WIDTH - MARGIN - _LEFT) / max(1, *map(len, in_turns.values())), 150.0)
    legend = "colour: sender  ·  number: chunk  ·  add, take: what the receiver does  ·  turns are drawn equally wide"
    canvas, y = Canvas("Who sends what to whom", legend=legend, says="Who sends what to whom."), 60.0
    for name, transfers in schedules.items():
        sent: Counter[int] = Counter()
        for transfer in transfers:
            sent[transfer.source] += transfer.nbytes
        most = byte_size(max(sent.values(), default=0))
        heading = f"{name}: {counted(len(in_turns[name]), 'turn')}, a rank sends {most}"
        canvas.path(f"M{MARGIN} {y:g}H{WIDTH - MARGIN}", "rule")
        canvas.text(MARGIN, y + 20, heading, "text strong", "start")
        canvas.says.append(f"{heading}.")
        y = _draw_schedule(canvas, y + 30, width, in_turns[name], _num_ranks(transfers))
    return canvas.picture(y)


def _draw_schedule(canvas: Canvas, y: float, width: float, in_turns: list[list[Transfer]], ranks: int) -> float:
    """One schedule below ``y``; returns where it ends."""
    lanes = [y + 30 + rank * _LANE for rank in range(ranks)]
    for rank, lane in enumerate(lanes):
        _draw_rank(canvas, MARGIN + 28, lane, rank, 56, 20, f"rank {rank}")
        canvas.path(f"M{_LEFT - 8} {lane:g}H{_LEFT + len(in_turns) * width:g}", "rule")
    for number, turn in enumerate(in_turns):
        canvas.says.append(f"Turn {number + 1}: {', '.join(map(str, turn))}.")
        x = _LEFT + number * width
        canvas.path(f"M{x + width:g} {lanes[0] - 12:g}V{lanes[-1] + 12:g}", "rule dashed")
        kinds = "/".join(dict.fromkeys(transfer.kind for transfer in turn))
        label = f"{number + 1}: {kinds}" if width >= 48 else kinds if width >= 32 else number + 1
        canvas.text(x + width / 2, y + 12, label, "muted small")
        for transfer in turn:
            start, tip = (x + 3, lanes[transfer.source]), (x + width - 3, lanes[transfer.destination])
            canvas.arrow(start, tip, fill=request_colors(transfer.source)[0], thickness=2.0)
        for transfer in turn if len({each.source for each in turn}) == len(turn) else ():
            down = lanes[transfer.destination] - lanes[transfer.source]
            share = 11.0 / abs(down)  # so near that numbers of different senders stay apart
            _write_chunk(canvas, x + share * width + 4, lanes[transfer.source] + share * down, transfer.chunk)
    return lanes[-1] + 24


def _write_chunk(canvas: Canvas, x: float, y: float, chunk: int | None) -> None:
    """The number of a chunk on an arrow, on the card's colour, so that no line crosses it."""
    if chunk is not None:
        half = 7 if chunk < 10 else 10
        canvas.box(x - half, y - 8, 2 * half, 16, "card")
        canvas.text(x, y + 4, chunk, "text small strong")


def _draw_rank(canvas: Canvas, x: float, y: float, rank: int, width: float, height: float, label: object) -> None:
    fill, ink = request_colors(rank)
    canvas.box(x - width / 2, y - height / 2, width, height, fill=fill)
    canvas.text(x, y + 4.5, label, "small strong", fill=ink)
