"""The processes of a server: their tree, their queues, and the messages between them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.book.players import Player, player
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, duration, request_colors, shorten
from minisgl.errors import ConfigError

_CHARACTER, _SMALL_CHARACTER = 8.2, 6.9
_BOX, _EDGE = 46.0, 440.0
_METER_LEFT, _METER = 330.0, 180.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment."""

    name: str
    pid: int  # of the operating system
    waits_for: str
    parent: str = ""  # name of the process that has started it; empty for the first
    ended: str = ""  # how it ended; empty while it lives


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue between two processes at one moment."""

    source: str  # names of the processes
    destination: str
    kind: str  # of its messages
    depth: int  # messages in it
    highest: int  # most there have been
    bound: int | None  # most there may be; None if there is no bound


@dataclass(frozen=True, slots=True)
class Notice:
    """A report of a fault: ``time`` seconds after it, ``source`` told ``to``, such as ``"3 clients"``, a ``text``."""

    time: float
    source: str
    to: str
    text: str


def process_tree(
    processes: Sequence[ProcessState], queues: Sequence[QueueState] = (), notices: Sequence[Notice] = ()
) -> Picture:
    """Draw a box for each process below its parent, a line and a meter for each queue, and a line for each notice.

    Args:
        processes: at one moment; parents before their children.
        queues: at the same moment.
        notices: all that were given until then.

    Raises:
        ConfigError: a name that no process has or several have, a parent after its child, or a queue with fewer
            messages than none or more than its highest.
    """
    depths = _depths(processes)
    for queue in queues:
        unknown = {queue.source, queue.destination} - set(depths)
        if unknown or not 0 <= queue.depth <= queue.highest:
            raise ConfigError(
                f"{queue}: its ends must be of {', '.join(depths)}, and 0 <= depth <= highest the number of messages"
            )
    dead = sum(bool(process.ended) for process in processes)
    drawing = _Tree(f"Processes: {len(processes) - dead} alive, {dead} dead", bool(queues))
    tops = drawing.processes(processes, depths)
    if queues:
        drawing.wires(tops, queues)
        drawing.heading("queues: messages in each now, and the most there have been (line)")
    for number, queue in enumerate(queues, start=1):
        drawing.meter(number, queue)
    if notices:
        drawing.heading("who was told, and when after the fault")
    for notice in sorted(notices, key=lambda notice: notice.time):
        drawing.notice(notice)
    return drawing.canvas.picture(drawing.y + 8, "\n".join(drawing.says))


def _depths(processes: Sequence[ProcessState]) -> dict[str, int]:
    """How many ancestors each has."""
    depths: dict[str, int] = {}
    for process in processes:
        if process.name in depths or (process.parent and process.parent not in depths):
            raise ConfigError(f"{process}: give each name once, and a parent before its children")
        depths[process.name] = depths[process.parent] + 1 if process.parent else 0
    return depths


class _Tree:
    """One drawing: ``y`` is how far it has come."""

    def __init__(self, title: str, with_queues: bool) -> None:
        legend = "number: queue, from the process where its line begins to the one at its tip"
        self.canvas, self.y = Canvas(title, legend=legend * with_queues), 62.0
        self.says = [f"{title}."]

    def processes(self, processes: Sequence[ProcessState], depths: dict[str, int]) -> dict[str, float]:
        """A box each; returns where they begin."""
        indent = min(26.0, 104.0 / max([*depths.values(), 1]))
        tops: dict[str, float] = {}
        for process in processes:
            x, top = MARGIN + depths[process.name] * indent, self.y
            if process.parent:
                elbow = x - indent / 2
                self.canvas.path(f"M{elbow:g} {tops[process.parent] + _BOX:g}V{top + _BOX / 2:g}H{x:g}", "rule")
            self._process(process, x, top)
            tops[process.name] = top
            self.y += 62
        return tops

    def _process(self, process: ProcessState, x: float, y: float) -> None:
        fill, ink = request_colors(5) if process.ended else ("", "")
        state = f"dead: {process.ended}" if process.ended else f"waits for {process.waits_for}"
        pid = f"pid {process.pid}"
        room = _EDGE - x - 20
        self.canvas.box(x, y, _EDGE - x, _BOX, "shared", fill)
        name = shorten(process.name, int((room - len(pid) * _SMALL_CHARACTER) / _CHARACTER))
        self.canvas.text(x + 10, y + 19, name, "text strong", "start", ink)
        self.canvas.text(_EDGE - 10, y + 19, pid, "text small", "end", ink)
        self.canvas.text(x + 10, y + 37, shorten(state, int(room / _SMALL_CHARACTER)), "text small", "start", ink)
        started = f", started by {process.parent}" if process.parent else ""
        self.says.append(f"{process.name}, {pid}{started}: {state}.")

    def wires(self, tops: dict[str, float], queues: Sequence[QueueState]) -> None:
        """A line for each queue, in its own column; those that meet at a process are spread over its height."""
        ends: dict[str, list[tuple[int, str]]] = {name: [] for name in tops}
        for index, queue in enumerate(queues):
            ends[queue.source].append((index, "out"))
            ends[queue.destination].append((index, "in"))
        ports = {
            (*end, name): tops[name] + _BOX * (place + 1) / (len(at) + 1)
            for name, at in ends.items()
            for place, end in enumerate(at)
        }
        column = min(36.0, (WIDTH - MARGIN - 40 - _EDGE) / len(queues))
        for index, queue in enumerate(queues):
            fill, ink = request_colors(index)
            start, end = ports[index, "out", queue.source], ports[index, "in", queue.destination]
            x, middle = _EDGE + 30 + index * column, (start + end) / 2
            self.canvas.path(f"M{_EDGE:g} {start:g}H{x:g}V{end:g}H{_EDGE + 8:g}", stroke=fill)
            self.canvas.arrow((_EDGE + 10, end), (_EDGE, end), fill=fill)
            self.canvas.box(x - 11, middle - 10, 22, 19, fill=fill)
            self.canvas.text(x, middle + 4, index + 1, "small strong", fill=ink)

    def heading(self, text: str) -> None:
        """Of what follows."""
        self.canvas.path(f"M{MARGIN} {self.y:g}H{WIDTH - MARGIN}", "rule")
        self.canvas.text(MARGIN, self.y + 20, text, "text small strong", "start")
        self.y += 30

    def meter(self, number: int, queue: QueueState) -> None:
        """How full a queue is and has been; without a bound, against the most there has been."""
        canvas, y = self.canvas, self.y
        fill, _ = request_colors(number - 1)
        names = f"{queue.source} → {queue.destination}: {queue.kind}"
        full = queue.highest if queue.bound is None else queue.bound
        now, highest = (min(count / max(full, 1), 1.0) * _METER for count in (queue.depth, queue.highest))
        canvas.badge(MARGIN, y, number - 1)
        canvas.text(MARGIN + 32, y + 14, shorten(names, 40), "text small", "start")
        canvas.box(_METER_LEFT, y + 2, _METER, 15)
        if queue.depth:
            canvas.box(_METER_LEFT, y + 2, now, 15, fill=fill)
        canvas.path(f"M{_METER_LEFT + highest:g} {y - 1:g}v21")
        bound = "no bound" if queue.bound is None else f"bound {queue.bound}"
        state = f"{queue.depth} now, {queue.highest} at most, {bound}"
        canvas.text(_METER_LEFT + _METER + 12, y + 14, state, "text small", "start")
        self.says.append(f"Queue {number}, {names}: {state}.")
        self.y += 26

    def notice(self, notice: Notice) -> None:
        """A line, or several."""
        words = f"{notice.source} → {notice.to}: {notice.text}"
        self.canvas.text(MARGIN + 68, self.y + 10, duration(notice.time), "muted small", "end")
        for line in textwrap.wrap(words, 90):
            self.canvas.text(MARGIN + 80, self.y + 10, line, "text small", "start")
            self.y += 22
        self.says.append(f"After {duration(notice.time)} {words}.")


# -- messages --------------------------------------------------------------------------------------------------------

_LEFT, _RIGHT = MARGIN + 66, WIDTH - MARGIN - 262
_HEADS, _HEAD, _LINE = 40.0, 24, 40
_MOST = 60
_WINDOW = 10
"""Messages that a frame of the player shows."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two processes."""

    time: float  # when it was sent, in seconds of any clock that all share
    source: str  # names of the processes
    destination: str
    kind: str  # its type
    summary: str = ""  # some of its fields, in a few words


def message_sequence(messages: Sequence[Message]) -> Picture:
    """Draw a lane for each process and an arrow for each of the first 60 messages, in order of time.

    Lines are equally far from each other; the times are written.
    """
    in_order = _in_order(messages)
    return _draw_messages(in_order, in_order[:_MOST], _lanes(in_order), newest=None)


def message_player(messages: Sequence[Message]) -> Player:
    """`message_sequence` message by message: the newest in colour, and the nine before it."""
    in_order = _in_order(messages)
    lanes = _lanes(in_order)
    frames = [
        _draw_messages(in_order, in_order[max(0, number + 1 - _WINDOW) : number + 1], lanes, newest=message)
        for number, message in enumerate(in_order)
    ]
    return player(frames, [_sentence(message) for message in in_order])


def _in_order(messages: Sequence[Message]) -> list[Message]:
    return sorted(messages, key=lambda message: message.time)


def _lanes(in_order: Sequence[Message]) -> list[str]:
    """Processes in the order of their first message."""
    return list(dict.fromkeys(name for message in in_order for name in (message.source, message.destination)))


def _draw_messages(
    in_order: Sequence[Message], shown: Sequence[Message], lanes: Sequence[str], newest: Message | None
) -> Picture:
    """Without a ``newest`` all are equally important, and the picture is as high as they need."""
    first = in_order[0].time if in_order else 0.0
    title = counted(len(in_order), "message")
    if in_order:
        title += f" in {duration(in_order[-1].time - first)}"
    canvas = Canvas(title)
    lines = len(shown) if newest is None else min(len(in_order), _WINDOW)
    width = (_RIGHT - _LEFT) / max(len(lanes), 1)
    middles = {name: _LEFT + (number + 0.5) * width for number, name in enumerate(lanes)}
    top = _draw_lanes(canvas, middles, width, newest, lines)
    says = [f"{title}."]
    for line, message in enumerate(shown):
        y = top + line * _LINE
        _draw_message(canvas, y, message, middles, request_colors(lanes.index(message.source))[0], newest)
        canvas.text(_LEFT - 10, y + 22, duration(message.time - first), "muted small", "end")
        says.append(f"At {duration(message.time - first)}: {_sentence(message)}.")
    bottom = top + lines * _LINE
    if newest is None and len(in_order) > len(shown):
        says.append(canvas.rest(bottom + 12, len(in_order) - len(shown), "message"))
        bottom += 20
    return canvas.picture(bottom + 6, "\n".join(says))


def _draw_lanes(canvas: Canvas, middles: dict[str, float], width: float, newest: Message | None, lines: int) -> float:
    """Heads with names, in two rows if the longest needs it, and lines below; returns where these begin.

    A head is grey while its process is no part of the newest message.
    """
    character = 6.7
    rows = 1 if max(map(len, middles), default=0) * character + 6 <= width else 2
    top = _HEADS + rows * (_HEAD + 2)
    for number, (name, middle) in enumerate(middles.items()):
        fill, ink = request_colors(number)
        if newest is not None and name not in (newest.source, newest.destination):
            fill, ink = "", ""
        y = _HEADS + number % rows * (_HEAD + 2)
        canvas.path(f"M{middle:g} {y + _HEAD:g}V{top + lines * _LINE:g}", "rule")
        canvas.box(middle - rows * width / 2 + 2, y, rows * width - 4, _HEAD, "shared", fill)
        canvas.text(middle, y + 16, shorten(name, int((rows * width - 6) / character)), "text small", fill=ink)
    return top


def _draw_message(
    canvas: Canvas, y: float, message: Message, middles: dict[str, float], fill: str, newest: Message | None
) -> None:
    """Its arrow, and beside the lanes its type and its fields."""
    start, end = middles[message.source], middles[message.destination]
    thickness = 4.0 if message is newest else 2.0
    if newest is not None and message is not newest:
        fill = ""
    if start == end:
        canvas.path(f"M{start:g} {y + 12:g}h18v12h-10", "line")
        canvas.arrow((start + 10, y + 24), (start, y + 24), fill=fill)
    else:
        canvas.arrow((start, y + 18), (end, y + 18), "muted", fill, thickness)
    kind = "text strong" if message is newest else "text small strong"
    canvas.text(_RIGHT + 10, y + 15, shorten(message.kind, 28), kind, "start")
    canvas.text(_RIGHT + 10, y + 31, shorten(message.summary, 38), "muted small", "start")


def _sentence(message: Message) -> str:
    summary = f" ({shorten(message.summary, 120)})" if message.summary else ""
    return f"{message.source} to {message.destination}: {message.kind}{summary}"
