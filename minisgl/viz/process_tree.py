"""The processes of a server: who lives and waits for what, how full the queues are, and who was told of a fault."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.errors import ConfigError
from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors, shorten
from minisgl.viz.units import duration

_MARGIN = 14
_BOX, _LINE = 46.0, 62.0
_INDENT, _DEEPEST = 26.0, 104.0
_TOP, _EDGE = 62.0, 440.0
_COLUMN = 36.0
_CHARACTER, _SMALL_CHARACTER = 8.2, 6.9
_METER_LEFT, _METER = 330.0, 180.0
_QUEUE_LINE = 26.0
_WORDS_LINE = 22.0
_LONGEST_NAMES, _LONGEST_WORDS = 40, 90
_DEAD = 5
_LEGEND = "number: queue, from the process where its line begins to the one at its tip"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment.

    Args:
        name: of the process.
        pid: of the operating system.
        waits_for: what it waits for.
        parent: name of the process that has started it; empty for the first.
        ended: how it ended; empty while it lives.
    """

    name: str
    pid: int
    waits_for: str
    parent: str = ""
    ended: str = ""


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue between two processes at one moment.

    Args:
        source, destination: names of the processes.
        kind: of its messages.
        depth: messages in it.
        highest: most there have been.
        bound: most there may be; None if there is no bound.
    """

    source: str
    destination: str
    kind: str
    depth: int
    highest: int
    bound: int | None


@dataclass(frozen=True, slots=True)
class Notice:
    """Somebody was told of a fault.

    Args:
        time: seconds after it.
        source, to: who told whom, such as ``"API process"`` and ``"3 clients"``.
        text: what.
    """

    time: float
    source: str
    to: str
    text: str


def process_tree(
    processes: Sequence[ProcessState], queues: Sequence[QueueState] = (), notices: Sequence[Notice] = ()
) -> Picture:
    """A box for each process, below the one that has started it; lines are queues, with meters below.

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
    drawing = _Drawing(f"Processes: {len(processes) - dead} alive, {dead} dead")
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
    return drawing.picture()


def _depths(processes: Sequence[ProcessState]) -> dict[str, int]:
    """How many ancestors each has."""
    depths: dict[str, int] = {}
    for process in processes:
        if process.name in depths or (process.parent and process.parent not in depths):
            raise ConfigError(f"{process}: give each name once, and a parent before its children")
        depths[process.name] = depths[process.parent] + 1 if process.parent else 0
    return depths


class _Drawing:
    """``y`` is how far it has come."""

    def __init__(self, title: str) -> None:
        self.canvas, self.y = Canvas(), _TOP
        self.canvas.text(_MARGIN, 26, title, "text strong", "start")
        self.says = [f"{title}."]

    def processes(self, processes: Sequence[ProcessState], depths: dict[str, int]) -> dict[str, float]:
        """A box each; returns where they begin."""
        indent = min(_INDENT, _DEEPEST / max([*depths.values(), 1]))
        tops: dict[str, float] = {}
        for process in processes:
            x, top = _MARGIN + depths[process.name] * indent, self.y
            if process.parent:
                elbow = x - indent / 2
                self.canvas.path(f"M{elbow:g} {tops[process.parent] + _BOX:g}V{top + _BOX / 2:g}H{x:g}", "rule")
            self._process(process, x, top)
            tops[process.name] = top
            self.y += _LINE
        return tops

    def _process(self, process: ProcessState, x: float, y: float) -> None:
        fill, ink = request_colors(_DEAD) if process.ended else ("", "")
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
        self.canvas.text(_MARGIN, 46, _LEGEND, "muted small", "start")
        ends: dict[str, list[tuple[int, str]]] = {name: [] for name in tops}
        for index, queue in enumerate(queues):
            ends[queue.source].append((index, "out"))
            ends[queue.destination].append((index, "in"))
        ports = {
            (*end, name): tops[name] + _BOX * (place + 1) / (len(at) + 1)
            for name, at in ends.items()
            for place, end in enumerate(at)
        }
        column = min(_COLUMN, (WIDTH - _MARGIN - 40 - _EDGE) / len(queues))
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
        self.canvas.path(f"M{_MARGIN} {self.y:g}H{WIDTH - _MARGIN}", "rule")
        self.canvas.text(_MARGIN, self.y + 20, text, "text small strong", "start")
        self.y += 30

    def meter(self, number: int, queue: QueueState) -> None:
        """How full a queue is, and how full it has been; without a bound, against the most there has been."""
        canvas, y = self.canvas, self.y
        fill, ink = request_colors(number - 1)
        names = f"{queue.source} → {queue.destination}: {queue.kind}"
        full = queue.highest if queue.bound is None else queue.bound
        now, highest = (min(count / max(full, 1), 1.0) * _METER for count in (queue.depth, queue.highest))
        canvas.box(_MARGIN, y, 22, 19, fill=fill)
        canvas.text(_MARGIN + 11, y + 14, number, "small strong", fill=ink)
        canvas.text(_MARGIN + 32, y + 14, shorten(names, _LONGEST_NAMES), "text small", "start")
        canvas.box(_METER_LEFT, y + 2, _METER, 15)
        if queue.depth:
            canvas.box(_METER_LEFT, y + 2, now, 15, fill=fill)
        canvas.path(f"M{_METER_LEFT + highest:g} {y - 1:g}v21")
        bound = "no bound" if queue.bound is None else f"bound {queue.bound}"
        state = f"{queue.depth} now, {queue.highest} at most, {bound}"
        canvas.text(_METER_LEFT + _METER + 12, y + 14, state, "text small", "start")
        self.says.append(f"Queue {number}, {names}: {state}.")
        self.y += _QUEUE_LINE

    def notice(self, notice: Notice) -> None:
        """A line, or several."""
        words = f"{notice.source} → {notice.to}: {notice.text}"
        self.canvas.text(_MARGIN + 68, self.y + 10, duration(notice.time), "muted small", "end")
        for line in textwrap.wrap(words, _LONGEST_WORDS):
            self.canvas.text(_MARGIN + 80, self.y + 10, line, "text small", "start")
            self.y += _WORDS_LINE
        self.says.append(f"After {duration(notice.time)} {words}.")

    def picture(self) -> Picture:
        return self.canvas.picture(self.y + 8, "\n".join(self.says))
