"""All-reduce schedules: which rank sends what to which, what each rank has by then, and what a collective costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, permutations
from typing import Literal

from minisgl.book.charts import Axis, chart
from minisgl.book.players import Player, player
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, Point, byte_size, counted, request_colors
from minisgl.errors import ConfigError

Sums = list[list[Counter[int]]]
"""[ranks][chunks] whose numbers are in the sum that a rank has of a chunk, and how often."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a collective.

    Args:
        kind: ``"add"``: the destination adds it to what it has; ``"take"``: it replaces what it has.
    """

    when: float  # number of the turn, or a time in any unit; transfers with the same take place at once
    source: int
    destination: int
    chunk: int | None  # which part of the tensor; None is all of it
    nbytes: int
    kind: Literal["add", "take"]

    def __post_init__(self) -> None:
        if self.source == self.destination or min(self.source, self.destination, self.chunk or 0) < 0:
            raise ConfigError(f"a transfer goes from one rank to another and numbers count from 0: {self}")


def ring_all_reduce(ranks: int, nbytes: int) -> list[Transfer]:
    """Each rank sends to its neighbour only, in ``2 (ranks − 1)`` turns (Patarasuk and Yuan 2009).

    Each chunk goes round once and grows, and once more when it is complete.
    """
    chunks = _chunk_sizes(ranks, nbytes)
    transfers: list[Transfer] = []
    for turn in range(2 * (ranks - 1)):
        adding = turn < ranks - 1
        for rank in range(ranks):
            chunk = (rank - turn) % ranks if adding else (rank + ranks - turn) % ranks
            kind: Literal["add", "take"] = "add" if adding else "take"
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
    """What every rank has of every chunk before the first turn, and after each. In a turn, all send, then receive.

    Raises `ConfigError` if a chunk arrives to be taken while another one of it arrives at the same rank.
    """
    chunks = 1 + max((transfer.chunk or 0 for transfer in transfers), default=0)
    sums: Sums = [[Counter([rank]) for _ in range(chunks)] for rank in range(_num_ranks(transfers))]
    yield sums
    for turn in turns(transfers):
        sums = _after(sums, turn)
        yield sums


def _after(before: Sums, turn: Sequence[Transfer]) -> Sums:
    sums = [list(row) for row in before]
    taken: set[tuple[int, int]] = set()
    arrived: set[tuple[int, int]] = set()
    for transfer in turn:
        for chunk in range(len(before[0])) if transfer.chunk is None else [transfer.chunk]:
            place, sent = (transfer.destination, chunk), before[transfer.source][chunk]
            if place in taken or (place in arrived and transfer.kind == "take"):
                raise ConfigError(
                    f"rank {transfer.destination} takes chunk {chunk} while it gets it from another rank, too; "
                    "give these transfers different times"
                )
            arrived.add(place)
            if transfer.kind == "take":
                taken.add(place)
                sums[transfer.destination][chunk] = sent
            else:
                sums[transfer.destination][chunk] = sums[transfer.destination][chunk] + sent
    return sums


def _num_ranks(transfers: Sequence[Transfer]) -> int:
    return 1 + max((max(transfer.source, transfer.destination) for transfer in transfers), default=0)


def _in_words(turn: Sequence[Transfer]) -> str:
    """``0 to 1 chunk 3 to add, 1 to 2 …``."""
    return ", ".join(
        f"{transfer.source} to {transfer.destination}"
        f"{'' if transfer.chunk is None else f' chunk {transfer.chunk}'} to {transfer.kind}"
        for transfer in turn
    )


# -- turn by turn ----------------------------------------------------------------------------------------------------

_TOP = 64.0
_CENTRE, _RADIUS = 152.0, 104.0
_NODE, _CELL = 26.0, 28.0


def reduce_player(transfers: Sequence[Transfer], name: str = "all-reduce") -> Player:
    """Step through a schedule: the ranks in a circle with their messages, and beside it what each has in memory.

    Args:
        transfers: such as `ring_all_reduce` makes; errors as of `partial_sums`.
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
    return f"{counted(len(turn), 'message')} of {size}{' each' * (len(turn) > 1)}; the receiver {kinds} it"


def _frame(title: str, turn: Sequence[Transfer], sums: Sums, sent: Counter[int]) -> Picture:
    ranks, chunks, left, line = len(sums), len(sums[0]), 342.0, 38.0
    legend = "piece of a cell: the numbers of that rank are in the sum  ·  thick frame: complete"
    canvas = Canvas(title, legend=legend)
    _draw_circle(canvas, turn, ranks)
    width = (WIDTH - 88.0 - left) / chunks
    for chunk in range(chunks):
        label = chunk if width < 60 else "the whole" if chunks == 1 else f"chunk {chunk}"
        canvas.text(left + (chunk + 0.5) * width, _TOP + 16, label, "muted small")
    canvas.text(WIDTH - MARGIN, _TOP + 16, "sent so far", "muted small", "end")
    says = [f"{title}.", *([f"Messages: {_in_words(turn)}."] if turn else [])]
    for rank, row in enumerate(sums):
        y = _TOP + 26 + rank * line
        fill, ink = request_colors(rank)
        canvas.box(left - 36, y, 28, _CELL, fill=fill)
        canvas.text(left - 22, y + 19, rank, "strong", fill=ink)
        for chunk, parts in enumerate(row):
            _draw_sum(canvas, left + chunk * width, y, width - 6, parts, ranks)
        canvas.text(WIDTH - MARGIN, y + 19, byte_size(sent[rank]), "text small", "end")
        has = [
            "the sum" if _is_complete(parts, ranks) else "+".join(map(str, sorted(parts.elements()))) for parts in row
        ]
        says.append(f"Rank {rank} has {', '.join(has)}.")
    bottom = max(_TOP + 2 * (_RADIUS + _NODE) + 20, _TOP + 26 + ranks * line)
    return canvas.picture(bottom + 8, "\n".join(says))


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
        if transfer.chunk is not None:
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
    """From node to node beside the straight line, so that messages in the other direction have room."""
    length = math.dist(start, end)
    along = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    aside = 6 * along[1], -6 * along[0]
    gap = _NODE * 0.72
    return (
        (start[0] + gap * along[0] + aside[0], start[1] + gap * along[1] + aside[1]),
        (end[0] - gap * along[0] + aside[0], end[1] - gap * along[1] + aside[1]),
    )


# -- schedules below each other --------------------------------------------------------------------------------------

_LEFT, _LANE = MARGIN + 64, 34


def reduce_schedule(schedules: Mapping[str, Sequence[Transfer]]) -> Picture:
    """Draw every message of some schedules (name → transfers): ranks as lines, turns to the right, arrows between."""
    most_turns = max(len(turns(transfers)) for transfers in schedules.values())
    width = min((WIDTH - MARGIN - _LEFT) / max(most_turns, 1), 150.0)
    legend = "colour: sender  ·  number: chunk  ·  add, take: what the receiver does  ·  turns are drawn equally wide"
    canvas, y = Canvas("Who sends what to whom", legend=legend), 60.0
    says = ["Who sends what to whom."]
    for name, transfers in schedules.items():
        sent: Counter[int] = Counter()
        for transfer in transfers:
            sent[transfer.source] += transfer.nbytes
        most = byte_size(max(sent.values(), default=0))
        heading = f"{name}: {counted(len(turns(transfers)), 'turn')}, a rank sends {most}"
        canvas.path(f"M{MARGIN} {y:g}H{WIDTH - MARGIN}", "rule")
        canvas.text(MARGIN, y + 20, heading, "text strong", "start")
        says.append(f"{heading}.")
        y = _draw_schedule(canvas, y + 30, width, transfers)
        says += [f"Turn {number}: {_in_words(turn)}." for number, turn in enumerate(turns(transfers), start=1)]
    return canvas.picture(y, "\n".join(says))


def _draw_schedule(canvas: Canvas, y: float, width: float, transfers: Sequence[Transfer]) -> float:
    """One schedule below ``y``; returns where it ends."""
    in_turns = turns(transfers)
    lanes = [y + 30 + rank * _LANE for rank in range(_num_ranks(transfers))]
    for rank, lane in enumerate(lanes):
        fill, ink = request_colors(rank)
        canvas.box(MARGIN, lane - 10, 56, 20, fill=fill)
        canvas.text(MARGIN + 28, lane + 4, f"rank {rank}", "small strong", fill=ink)
        canvas.path(f"M{_LEFT - 8} {lane:g}H{_LEFT + len(in_turns) * width:g}", "rule")
    for number, turn in enumerate(in_turns):
        x = _LEFT + number * width
        canvas.path(f"M{x + width:g} {lanes[0] - 12:g}V{lanes[-1] + 12:g}", "rule dashed")
        kinds = "/".join(dict.fromkeys(transfer.kind for transfer in turn))
        canvas.text(x + width / 2, y + 12, f"{number + 1}: {kinds}" if width >= 48 else kinds, "muted small")
        for transfer in turn:
            start, tip = (x + 3, lanes[transfer.source]), (x + width - 3, lanes[transfer.destination])
            canvas.arrow(start, tip, fill=request_colors(transfer.source)[0], thickness=2.0)
        if len({transfer.source for transfer in turn}) == len(turn):
            _number_chunks(canvas, turn, x, width, lanes)
    return lanes[-1] + 24


def _number_chunks(canvas: Canvas, turn: Sequence[Transfer], x: float, width: float, lanes: Sequence[float]) -> None:
    """The chunk of each message on its arrow, near the sender; on the card's colour, so that no line crosses it."""
    for transfer in turn:
        if transfer.chunk is not None:
            down = lanes[transfer.destination] - lanes[transfer.source]
            share = 11.0 / abs(down)  # so near that numbers of different senders stay apart
            left, middle = x + share * width + 4, lanes[transfer.source] + share * down
            half = 6 if transfer.chunk < 10 else 9
            canvas.box(left - half, middle - 7, 2 * half, 14, "card")
            canvas.text(left, middle + 4, transfer.chunk, "text small strong")


# -- costs -----------------------------------------------------------------------------------------------------------

Cost = tuple[str, int, float]
"""(method, bytes of the message, microseconds)."""
Segment = tuple[float, float]
"""A straight line: its heights at both ends."""
Crossing = tuple[str, str, float, float]
"""(the lower one before, the lower one after, share of the way from left to right, height)."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where two methods take the same time."""

    below: str  # the fastest for smaller messages
    above: str  # the fastest for larger ones
    nbytes: float
    microseconds: float  # that both take


def collective_costs(costs: Sequence[Cost], title: str) -> Picture:
    """Draw a line for each method on logarithmic axes, and a mark where another method becomes the fastest.

    Args:
        costs: in any order, at least one.
        title: which collective, between which devices.

    Raises `ConfigError` if a size or a time is not positive, or there are two times for one method and size; names it.
    """
    lines = {
        method: [(nbytes / 1024, microseconds) for nbytes, microseconds in sorted(times.items())]
        for method, times in _by_method(costs).items()
    }
    marks = {
        f"from {byte_size(round(each.nbytes))} on: {each.above}, no longer {each.below}": (
            each.nbytes / 1024,
            each.microseconds,
        )
        for each in break_evens(costs)
    }
    return chart(lines, marks, title, Axis("KiB of the message", log=True), Axis("µs", log=True), dots=True)


def break_evens(costs: Sequence[Cost]) -> list[BreakEven]:
    """Where the fastest method changes, in order of size; errors as of `collective_costs`.

    Between two measured sizes a method is taken to be a straight line on logarithmic axes. Where one of two methods was
    not measured on both sides, nothing is claimed.
    """
    methods = _by_method(costs)
    sizes = sorted({nbytes for times in methods.values() for nbytes in times})
    found: list[BreakEven] = []
    fastest = ""
    for left, right in pairwise(sizes):
        pieces = {
            method: (_logarithm(times, left), _logarithm(times, right))
            for method, times in methods.items()
            if min(times) <= left and right <= max(times)
        }
        if pieces:
            crossings, fastest = _envelope(pieces, fastest)
            for below, above, share, height in crossings:
                nbytes = math.exp(math.log(left) + share * math.log(right / left))
                found.append(BreakEven(below, above, nbytes, math.exp(height)))
    return found


def _by_method(costs: Sequence[Cost]) -> dict[str, dict[int, float]]:
    """Method → bytes → microseconds."""
    methods: dict[str, dict[int, float]] = {}
    for method, nbytes, microseconds in costs:
        times = methods.setdefault(method, {})
        if nbytes <= 0 or microseconds <= 0 or nbytes in times:
            raise ConfigError(
                f"costs of {method!r}: {nbytes} bytes in {microseconds} µs; both must be above 0, each size there once"
            )
        times[nbytes] = microseconds
    return methods


def _logarithm(times: Mapping[int, float], nbytes: int) -> float:
    """Of the time for a size between two measured ones, on the straight line between them on logarithmic axes."""
    below = max(size for size in times if size <= nbytes)
    above = min(size for size in times if size >= nbytes)
    low, high = math.log(times[below]), math.log(times[above])
    return low if below == above else low + (high - low) * math.log(nbytes / below) / math.log(above / below)


def _envelope(pieces: Mapping[str, Segment], before: str) -> tuple[list[Crossing], str]:
    """Which line is the lowest from left to right: the crossings, and the lowest at the right end.

    ``before``, the lowest so far, stays where it is as low as any other.
    """
    now = min(pieces, key=lambda name: (pieces[name][0], name != before))
    found: list[Crossing] = []
    while True:
        left, right = pieces[now]
        lower = {name: piece for name, piece in pieces.items() if piece[1] < right}
        if not lower:
            return found, now
        shares = {name: (piece[0] - left) / ((right - left) - (piece[1] - piece[0])) for name, piece in lower.items()}
        following = min(shares, key=lambda name: (shares[name], lower[name][1]))
        found.append((now, following, shares[following], left + shares[following] * (right - left)))
        now = following
