"""The schedule of a trace: which request fed how many tokens in which step, and what became of it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from minisgl.trace import Event, Trace
from minisgl.viz.player import Player, player
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

_MARGIN = 14
_LABEL = 52
_REASON = 84
_ROOM = WIDTH - 2 * _MARGIN - _LABEL - _REASON
_WIDEST = 44.0
_LINE = 32
_BOX = 26
_DIGIT = 8.0
_TICK = 30
_TOP = 84
_MOST_STOPS = 60
_LEGEND = "tall: prefill, with its tokens  ·  flat: decode, one a step  ·  ×: preempted  ·  dashed: waits to go on"


@dataclass(slots=True)
class _Life:
    """What a trace says of one request.

    Args:
        fed: tokens fed by step.
        cached: positions in the KV cache before each of these steps.
        decoded: the steps in which it was a decode row.
        preempted: steps at whose beginning it was preempted.
        finished_by: how many steps had been launched when it finished; None while it runs.
        reason: why it finished.
    """

    fed: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    decoded: set[int] = field(default_factory=set)
    preempted: list[int] = field(default_factory=list)
    finished_by: int | None = None
    reason: str = "not finished"

    def until(self, step: int) -> _Life:
        """The part of it that was over when as many steps had been launched."""
        known = {other: fed for other, fed in self.fed.items() if other < step}
        preempted = [other for other in self.preempted if other < step]
        if self.finished_by is not None and self.finished_by <= step:
            return _Life(known, self.cached, self.decoded & set(known), preempted, self.finished_by, self.reason)
        return _Life(known, self.cached, self.decoded & set(known), preempted)


def schedule_timeline(trace: Trace) -> Picture:
    """Steps from left to right, requests from top to bottom: prefill chunks, decode steps, preemptions, and the end.

    Steps are equally wide however long they took; `host_device_timeline` shows time.

    Args:
        trace: of `LLM.trace`.
    """
    lives, num_steps = _read(trace.events)
    return _picture(lives, num_steps, num_steps)


def schedule_player(trace: Trace) -> Player:
    """`schedule_timeline` growing step by step, with what happens in each step in words.

    Args:
        trace: of `LLM.trace`; at least one step. Of more than 60, only every second, third, … stops.
    """
    lives, num_steps = _read(trace.events)
    stops = range(0, num_steps, -(-num_steps // _MOST_STOPS))
    frames = [
        _picture({uid: life.until(step + 1) for uid, life in lives.items()}, num_steps, step + 1) for step in stops
    ]
    return player(frames, [_caption(lives, step) for step in stops], still=schedule_timeline(trace))


def _picture(lives: dict[int, _Life], num_steps: int, launched: int) -> Picture:
    """What has happened by the time that so many of the steps have been launched."""
    width = min(_ROOM / max(num_steps, 1), _WIDEST)
    canvas = Canvas()
    title = f"Schedule: {counted(len(lives), 'request')}, {counted(num_steps, 'step')}"
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(_MARGIN, 48, _LEGEND, "muted small", "start")
    left = _MARGIN + _LABEL
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if step * width >= _TICK or step > 500)
    canvas.text(_MARGIN, _TOP - 8, "step", "muted small", "start")
    canvas.text(WIDTH - _MARGIN, _TOP - 8, "ends with", "muted small", "end")
    for step in range(0, num_steps, every):
        canvas.text(left + (step + 0.5) * width, _TOP - 8, step, "muted small")
    for line, (uid, life) in enumerate(lives.items()):
        _draw(canvas, left, _TOP + line * _LINE, width, launched, uid, life)
    says = [f"{title}.", *(_words(uid, life) for uid, life in lives.items())]
    return canvas.picture(_TOP + len(lives) * _LINE + 8, "\n".join(says))


def _read(events: list[Event]) -> tuple[dict[int, _Life], int]:
    """Requests by ``uid``, in order of it, and the number of steps."""
    launches = [event for event in events if event.name == "launch" and "step" in event.args]
    starts = [event.start for event in launches]
    lives: dict[int, _Life] = {}
    for event in events:
        if event.name == "launch" and "step" in event.args:
            args, step = event.args, event.args["step"]
            rows = zip(args["uids"], args["fed"], args["cached"], strict=True)
            for row, (uid, fed, cached) in enumerate(rows):
                life = lives.setdefault(uid, _Life())
                life.fed[step], life.cached[step] = fed, cached
                if row < args["decode"]:
                    life.decoded.add(step)
        elif event.name == "preempt":
            following = bisect_left(starts, event.start)  # a preemption makes room for the step that is launched next
            lives.setdefault(event.args["uid"], _Life()).preempted.append(following)
        elif event.name == "finish":
            life = lives.setdefault(event.args["uid"], _Life())
            life.finished_by, life.reason = bisect_left(starts, event.start), event.args["reason"]
    return dict(sorted(lives.items())), len(launches)


def _draw(canvas: Canvas, left: float, y: float, width: float, launched: int, uid: int, life: _Life) -> None:
    fill, ink = request_colors(uid)
    canvas.text(_MARGIN, y + 18, f"r{uid}", "text strong", "start")
    for first, last in _decodes(life):
        x, length = left + first * width, (last - first + 1) * width
        canvas.box(x + _gap(width), y + 7, length - 2 * _gap(width), _BOX - 14, fill=fill)
    for step, fed in life.fed.items():
        if step not in life.decoded:
            canvas.box(left + step * width + _gap(width), y, width - 2 * _gap(width), _BOX, fill=fill)
            if len(str(fed)) * _DIGIT <= width - 2:
                canvas.text(left + (step + 0.5) * width, y + 18, fed, "small", fill=ink)
    for step in life.preempted:
        now = launched if life.finished_by is None else life.finished_by
        again = min((other for other in life.fed if other >= step), default=now)
        if again > step:
            canvas.path(f"M{left + step * width + 12:g} {y + _BOX / 2:g}H{left + again * width:g}", "line dashed")
        canvas.text(left + step * width + 1, y + 19, "×", "text strong", "start")
    canvas.text(WIDTH - _MARGIN, y + 18, life.reason, "text small", "end")


def _gap(width: float) -> float:
    """Space between two boxes, as long as there is some."""
    return 1.0 if width >= 8 else 0.0


def _decodes(life: _Life) -> list[tuple[int, int]]:
    """First and last step of each run of decode steps without a gap."""
    steps = sorted(life.decoded)
    firsts = [step for step in steps if step - 1 not in life.decoded]
    lasts = [step for step in steps if step + 1 not in life.decoded]
    return list(zip(firsts, lasts, strict=True))


def _words(uid: int, life: _Life) -> str:
    parts = []
    for step in sorted(life.fed):
        if step not in life.decoded:
            parts.append(f"prefills {counted(life.fed[step], 'token')} on top of {life.cached[step]} in step {step}")
    runs = [f"{first} to {last}" if first < last else f"{first}" for first, last in _decodes(life)]
    parts += [f"decodes in step {', '.join(runs)}"] * bool(runs)
    parts += [f"is preempted before step {step}" for step in life.preempted]
    parts += ["is not finished" if life.finished_by is None else f"finishes: {life.reason}"]
    return f"Request r{uid} {', '.join(parts)}."


def _caption(lives: dict[int, _Life], step: int) -> str:
    """What happens in a step: ``step 5: r1 preempted; r0 r3 decode; r4 prefills 8 on top of 2``."""
    preempted = [f"r{uid}" for uid, life in lives.items() if step in life.preempted]
    decoding = [f"r{uid}" for uid, life in lives.items() if step in life.decoded]
    prefills = [
        f"r{uid} prefills {life.fed[step]}" + f" on top of {life.cached[step]}" * (life.cached[step] > 0)
        for uid, life in lives.items()
        if step in life.fed and step not in life.decoded
    ]
    finished = [f"r{uid} ends with {life.reason}" for uid, life in lives.items() if life.finished_by == step + 1]
    parts = [f"{' '.join(preempted)} preempted"] * bool(preempted)
    parts += [f"{' '.join(decoding)} decode"] * bool(decoding)
    return f"step {step}: {'; '.join([*parts, *prefills, *finished])}"
