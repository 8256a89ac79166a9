"""Schedules of an all-reduce below each other: ranks as lines, time to the right, a message as an arrow between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors
from minisgl.viz.transfers import Transfer, in_words, num_ranks, turns
from minisgl.viz.units import byte_size

_MARGIN = 14
_LABEL = 64
_LEFT = _MARGIN + _LABEL
_ROOM = WIDTH - _MARGIN - _LEFT
_WIDEST = 150.0
_LANE = 34
_NUMBER_AT = 11.0
"""From a sender's line to the number on its arrow, so that numbers of different senders stay apart."""
_LEGEND = "colour: sender  ·  number: chunk  ·  add, take: what the receiver does  ·  turns are drawn equally wide"


def reduce_schedule(schedules: Mapping[str, Sequence[Transfer]]) -> Picture:
    """Every message of some schedules. A turn takes as long as a message is under way, and its bytes need to pass.

    Args:
        schedules: name → transfers, such as `ring_all_reduce` makes.
    """
    most_turns = max(len(turns(transfers)) for transfers in schedules.values())
    width = min(_ROOM / max(most_turns, 1), _WIDEST)
    canvas, y = Canvas(), 60.0
    canvas.text(_MARGIN, 26, "Who sends what to whom", "text strong", "start")
    canvas.text(_MARGIN, 46, _LEGEND, "muted small", "start")
    says = ["Who sends what to whom."]
    for name, transfers in schedules.items():
        heading = f"{name}: {_cost(transfers)}"
        canvas.path(f"M{_MARGIN} {y:g}H{WIDTH - _MARGIN}", "rule")
        canvas.text(_MARGIN, y + 20, heading, "text strong", "start")
        says.append(f"{heading}.")
        y = _draw(canvas, y + 30, width, transfers)
        says += [f"Turn {number}: {in_words(turn)}." for number, turn in enumerate(turns(transfers), start=1)]
    return canvas.picture(y, "\n".join(says))


def _cost(transfers: Sequence[Transfer]) -> str:
    """Turns, and the most that a rank sends."""
    sent: Counter[int] = Counter()
    for transfer in transfers:
        sent[transfer.source] += transfer.nbytes
    return f"{counted(len(turns(transfers)), 'turn')}, a rank sends {byte_size(max(sent.values(), default=0))}"


def _draw(canvas: Canvas, y: float, width: float, transfers: Sequence[Transfer]) -> float:
    """One schedule below ``y``; returns where it ends."""
    in_turns = turns(transfers)
    lanes = [y + 30 + rank * _LANE for rank in range(num_ranks(transfers))]
    end = _LEFT + len(in_turns) * width
    for rank, lane in enumerate(lanes):
        fill, ink = request_colors(rank)
        canvas.box(_MARGIN, lane - 10, _LABEL - 8, 20, fill=fill)
        canvas.text(_MARGIN + _LABEL / 2 - 4, lane + 4, f"rank {rank}", "small strong", fill=ink)
        canvas.path(f"M{_LEFT - 8} {lane:g}H{end:g}", "rule")
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
            share = _NUMBER_AT / abs(down)
            left, middle = x + share * width + 4, lanes[transfer.source] + share * down
            half = 6 if transfer.chunk < 10 else 9
            canvas.box(left - half, middle - 7, 2 * half, 14, "card")
            canvas.text(left, middle + 4, transfer.chunk, "text small strong")
