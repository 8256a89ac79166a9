"""Timelines: requests and steps, host and device, and the kernels of a device."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from minisgl.book.players import Player, player
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, duration, request_colors, round_step
from minisgl.trace import DEVICE, HOST, Event, Trace

_LINE = 32
_BOX = 26
_DIGIT = 8.0
"""Width of a digit in CSS pixels."""


def step_timeline(steps: Sequence[Mapping[int, int]]) -> Picture:
    """Draw steps from left to right and requests from top to bottom, in each box the tokens fed.

    Args:
        steps: for each step, tokens fed by the ``uid`` of the request.
    """
    uids = sorted({uid for step in steps for uid in step})
    left, top = MARGIN + 44, 62
    width = min((WIDTH - MARGIN - left) / max(len(steps), 1), 48.0)
    canvas = Canvas("Tokens that each request feeds in each step (more than one: prefill; one: decode)")
    for step in range(len(steps)):
        canvas.text(left + (step + 0.5) * width, top - 8, step, "muted small")
    says = []
    for line, uid in enumerate(uids):
        y = top + line * _LINE
        canvas.text(MARGIN, y + 19, f"r{uid}", "text strong", "start")
        fill, ink = request_colors(uid)
        for step, fed in enumerate(steps):
            if uid in fed:
                x = left + step * width
                canvas.box(x + 1, y, width - 2, _LINE - 4, fill=fill)
                canvas.text(x + width / 2, y + 19, fed[uid], "small", fill=ink)
        prefill = [f"{step[uid]} tokens in step {number}" for number, step in enumerate(steps) if step.get(uid, 0) > 1]
        decode = ", ".join(str(number) for number, step in enumerate(steps) if step.get(uid) == 1)
        parts = [*prefill, *([f"1 token in each of the steps {decode}"] if decode else [])]
        says.append(f"Request r{uid} feeds {', '.join(parts)}.")
    return canvas.picture(top + len(uids) * _LINE + 8, "\n".join(says))


# -- the schedule of a trace -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Life:
    """What a trace says of one request."""

    fed: dict[int, int] = field(default_factory=dict)  # tokens fed by step
    cached: dict[int, int] = field(default_factory=dict)  # positions in the KV cache before each of these steps
    decoded: set[int] = field(default_factory=set)  # the steps in which it was a decode row
    preempted: list[int] = field(default_factory=list)  # steps at whose beginning it was preempted
    finished_by: int | None = None  # how many steps had been launched when it finished; None while it runs
    reason: str = "not finished"  # why it finished

    def until(self, step: int) -> _Life:
        """The part that was over when so many steps had been launched."""
        known = {other: fed for other, fed in self.fed.items() if other < step}
        life = _Life(known, self.cached, self.decoded & set(known), [at for at in self.preempted if at < step])
        if self.finished_by is not None and self.finished_by <= step:
            life.finished_by, life.reason = self.finished_by, self.reason
        return life


def schedule_timeline(trace: Trace) -> Picture:
    """Draw prefill chunks, decode steps, preemptions and ends: steps to the right, a line for each request.

    Steps are equally wide however long they took; `host_device_timeline` shows time.
    """
    lives, num_steps = _read(trace.events)
    return _draw_schedule(lives, num_steps, num_steps)


def schedule_player(trace: Trace) -> Player:
    """`schedule_timeline` growing step by step, at most 60 pictures, with what happens in words."""
    lives, num_steps = _read(trace.events)
    stops = range(0, num_steps, -(-num_steps // 60))
    frames = [
        _draw_schedule({uid: life.until(step + 1) for uid, life in lives.items()}, num_steps, step + 1)
        for step in stops
    ]
    return player(frames, [_step_in_words(lives, step) for step in stops])


def _read(events: list[Event]) -> tuple[dict[int, _Life], int]:
    """Requests by ``uid``, in its order, and the number of steps."""
    launches = [event for event in events if event.name == "launch" and "step" in event.args]
    starts = [event.start for event in launches]
    lives: defaultdict[int, _Life] = defaultdict(_Life)
    for event in events:
        args = event.args
        if event.name == "launch" and "step" in args:
            for row, (uid, fed, cached) in enumerate(zip(args["uids"], args["fed"], args["cached"], strict=True)):
                lives[uid].fed[args["step"]], lives[uid].cached[args["step"]] = fed, cached
                if row < args["decode"]:
                    lives[uid].decoded.add(args["step"])
        elif event.name == "preempt":  # it makes room for the step that is launched next
            lives[args["uid"]].preempted.append(bisect_left(starts, event.start))
        elif event.name == "finish":
            life = lives[args["uid"]]
            life.finished_by, life.reason = bisect_left(starts, event.start), args["reason"]
    return dict(sorted(lives.items())), len(launches)


def _draw_schedule(lives: dict[int, _Life], num_steps: int, launched: int) -> Picture:
    """What has happened by the time that so many of the steps have been launched."""
    left, top = MARGIN + 52, 84
    width = min((WIDTH - MARGIN - 84 - left) / max(num_steps, 1), 44.0)
    title = f"Schedule: {counted(len(lives), 'request')}, {counted(num_steps, 'step')}"
    legend = "tall: prefill, with its tokens  ·  flat: decode, one a step  ·  ×: preempted  ·  dashed: waits to go on"
    canvas = Canvas(title, legend=legend)
    canvas.text(MARGIN, top - 8, "step", "muted small", "start")
    canvas.text(WIDTH - MARGIN, top - 8, "ends with", "muted small", "end")
    for step in range(0, num_steps, max(1, int(round_step(30 / width)))):
        canvas.text(left + (step + 0.5) * width, top - 8, step, "muted small")
    for line, (uid, life) in enumerate(lives.items()):
        _draw_life(canvas, left, top + line * _LINE, width, launched, uid, life)
    says = [f"{title}.", *(_life_in_words(uid, life) for uid, life in lives.items())]
    return canvas.picture(top + len(lives) * _LINE + 8, "\n".join(says))


def _draw_life(canvas: Canvas, left: float, y: float, width: float, launched: int, uid: int, life: _Life) -> None:
    fill, ink = request_colors(uid)
    gap = 1.0 if width >= 8 else 0.0
    canvas.text(MARGIN, y + 18, f"r{uid}", "text strong", "start")
    for first, last in _decodes(life):
        length = (last - first + 1) * width
        canvas.box(left + first * width + gap, y + 7, length - 2 * gap, _BOX - 14, fill=fill)
    for step, fed in life.fed.items():
        if step not in life.decoded:
            canvas.box(left + step * width + gap, y, width - 2 * gap, _BOX, fill=fill)
            if len(str(fed)) * _DIGIT <= width - 2:
                canvas.text(left + (step + 0.5) * width, y + 18, fed, "small", fill=ink)
    for step in life.preempted:
        now = launched if life.finished_by is None else life.finished_by
        again = min((other for other in life.fed if other >= step), default=now)
        if again > step:
            canvas.path(f"M{left + step * width + 12:g} {y + _BOX / 2:g}H{left + again * width:g}", "line dashed")
        canvas.text(left + step * width + 1, y + 19, "×", "text strong", "start")
    canvas.text(WIDTH - MARGIN, y + 18, life.reason, "text small", "end")


def _decodes(life: _Life) -> list[tuple[int, int]]:
    """First and last step of each run of decode steps without a gap."""
    steps = sorted(life.decoded)
    firsts = [step for step in steps if step - 1 not in life.decoded]
    lasts = [step for step in steps if step + 1 not in life.decoded]
    return list(zip(firsts, lasts, strict=True))


def _life_in_words(uid: int, life: _Life) -> str:
    parts = [
        f"prefills {counted(fed, 'token')} on top of {life.cached[step]} in step {step}"
        for step, fed in sorted(life.fed.items())
        if step not in life.decoded
    ]
    runs = [f"{first} to {last}" if first < last else f"{first}" for first, last in _decodes(life)]
    parts += [f"decodes in step {', '.join(runs)}"] * bool(runs)
    parts += [f"is preempted before step {step}" for step in life.preempted]
    parts += ["is not finished" if life.finished_by is None else f"finishes: {life.reason}"]
    return f"Request r{uid} {', '.join(parts)}."


def _step_in_words(lives: dict[int, _Life], step: int) -> str:
    """``step 5: r1 preempted; r0 r3 decode; r4 prefills 8 on top of 2``."""
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


# -- host and device -------------------------------------------------------------------------------------------------

_LANES = ("schedule", "launch", "wait", "process", "device")


def host_device_timeline(trace: Trace, first: int = 0, count: int = 4) -> Picture:
    """Draw ``count`` steps from step ``first`` on in time: four lanes of the host, one of the device."""
    spans = [
        event
        for event in trace.events
        if _lane(event) in _LANES and first <= event.args.get("step", -1) < first + count
    ]
    start = min((event.start for event in spans), default=0.0)
    seconds = max((event.end for event in spans), default=0.0) - start
    title = f"Host and device, {counted(len({event.args['step'] for event in spans}), 'step')} from step {first}"
    canvas = Canvas(title, duration(seconds))
    left, room, top, height = MARGIN + 76, WIDTH - 2 * MARGIN - 76 - 84, 60, 34
    scale, bottom = room / (seconds or 1.0), top + len(_LANES) * height
    canvas.text(WIDTH - MARGIN, top - 6, "median", "muted small", "end")
    unit, name = (1e-6, "µs") if seconds < 2e-3 else (1e-3, "ms") if seconds < 2 else (1.0, "s")
    every = max(1e-3, round_step(60 / (unit * scale)))
    for index in range(int(seconds / (every * unit)) + 1 if seconds else 0):
        x = left + index * every * unit * scale
        canvas.path(f"M{x:g} {top:g}V{bottom:g}", "rule dashed")
        canvas.text(x, bottom + 14, f"{index * every:g} {name}", "muted small")
    for line, lane in enumerate(_LANES):
        y = top + line * height
        members = [event for event in spans if _lane(event) == lane]
        canvas.text(MARGIN, y + 18, lane, "text strong" if lane == "device" else "text", "start")
        canvas.path(f"M{left} {y + _BOX:g}h{room:g}", "rule")
        if members:
            middle = duration(median(event.end - event.start for event in members))
            canvas.text(WIDTH - MARGIN, y + 18, middle, "text small", "end")
        places = [left + (event.start - start) * scale for event in members]
        for event, x, end in zip(members, places, [*places[1:], left + room + _DIGIT * 3], strict=False):
            _draw_span(canvas, y, event, x, scale, end)
    legend = "the number in a box, and its colour: the step that it belongs to"
    canvas.text(MARGIN, bottom + 40, legend, "muted small", "start")
    steps: defaultdict[int, list[str]] = defaultdict(list)
    for event in spans:
        name = f"{event.name} on the device" if event.track == DEVICE else event.name
        when, spent = duration(event.start - start), duration(event.end - event.start)
        steps[event.args["step"]].append(f"{name} at {when} for {spent}")
    says = [f"Step {step}: {', '.join(parts)}." for step, parts in sorted(steps.items())]
    return canvas.picture(bottom + 52, "\n".join([f"{title}, {duration(seconds)}.", *says]))


def _lane(event: Event) -> str:
    return "device" if event.track == DEVICE else event.name if event.track == HOST else ""


def _draw_span(canvas: Canvas, y: float, event: Event, x: float, scale: float, end: float) -> None:
    """One span; its number stands in it, or behind it if there is room before ``end``."""
    step = event.args["step"]
    fill, ink = request_colors(step)
    width = max((event.end - event.start) * scale, 1.5)
    canvas.box(x, y, width, _BOX, fill=fill)
    needed = len(str(step)) * _DIGIT + 4
    if width >= needed:
        canvas.text(x + width / 2, y + 18, step, "small", fill=ink)
    elif end - x - width >= needed:
        canvas.text(x + width + 2, y + 18, step, "text small", "start")


# -- kernels ---------------------------------------------------------------------------------------------------------

Span = tuple[str, float, float]
"""A kernel, and when it begins and ends, in microseconds."""


def kernel_timeline(versions: Mapping[str, Sequence[Span]], title: str) -> Picture:
    """Draw the kernels of several versions of the same work, those that overlap in different lanes.

    Args:
        versions: name → kernels in the order in which they begin. A kernel has one number in all versions.
    """
    kernels = list(dict.fromkeys(name for spans in versions.values() for name, _, _ in spans))
    longest = max((end for spans in versions.values() for _, _, end in spans), default=0.0)
    room, line = WIDTH - 2 * MARGIN, 26
    scale = room / (longest or 1.0)
    canvas, y, says = Canvas(title), 44.0, [f"{title}, µs."]
    for version, spans in versions.items():
        last = max((end for _, _, end in spans), default=0.0)
        canvas.text(MARGIN, y + 16, version, "text", "start")
        canvas.text(WIDTH - MARGIN, y + 16, f"{last:.1f} µs", "text strong", "end")
        y += line
        lanes = _lanes(spans)
        for (name, start, end), lane in zip(spans, lanes, strict=True):
            _draw_kernel(canvas, MARGIN + start * scale, y + lane * line, (end - start) * scale, kernels.index(name))
        y += (max(lanes, default=0) + 1) * line + 14
        says.append(f"{version}: {', '.join(f'{name} from {start:.1f} to {end:.1f}' for name, start, end in spans)}.")
    every = max(1.0, round_step(60 / scale))
    canvas.path(f"M{MARGIN} {y:g}h{room:g}", "rule")
    for index in range(int(longest / every) + 1):
        x = MARGIN + index * every * scale
        canvas.path(f"M{x:g} {y:g}v4", "rule")
        canvas.text(min(max(x, MARGIN + 14), WIDTH - MARGIN - 20), y + 17, f"{index * every:g} µs", "muted small")
    y += 32
    for number, name in enumerate(kernels):
        x, height = MARGIN + number % 2 * room / 2, y + number // 2 * line
        _draw_kernel(canvas, x, height, 24, number)
        canvas.text(x + 34, height + 16, name, "text small", "start")
    return canvas.picture(y + (len(kernels) + 1) // 2 * line + 8, "\n".join(says))


def launch_lanes(versions: Mapping[str, tuple[Sequence[Span], Sequence[Span]]], title: str) -> Picture:
    """Draw what the host launches above what the device computes, for several ways to do the same work, on one scale.

    Args:
        versions: name → spans of the host, spans of the device. A span of the device has the colour of the launch with
            its name; where there is none, as in a replay, all of them were launched at once.
    """
    lanes = [spans for both in versions.values() for spans in both]
    longest = max((end for spans in lanes for _, _, end in spans), default=0.0)
    left, line = MARGIN + 64, 28
    scale = (WIDTH - MARGIN - left) / (longest or 1.0)
    canvas, y, says = Canvas(title), 44.0, [f"{title}, µs."]
    for version, (host, device) in versions.items():
        last = max((end for _, _, end in device), default=0.0)
        busy = _covered(device) / (last or 1.0)
        canvas.text(MARGIN, y + 16, version, "text strong", "start")
        canvas.text(WIDTH - MARGIN, y + 16, f"{last:.0f} µs, the device busy for {busy:.0%}", "text", "end")
        for lane, spans in (("host", host), ("device", device)):
            y += line
            canvas.text(MARGIN, y + 16, lane, "text", "start")
            canvas.path(f"M{left:g} {y + 22:g}H{WIDTH - MARGIN:g}", "rule")
            for number, (_, start, end) in enumerate(spans):
                fill, _ = request_colors(number)
                canvas.box(left + start * scale, y, max((end - start) * scale - 0.5, 1.0), 22, fill=fill)
        y += line + 14
        says.append(f"{version}: {len(host)} launches, {len(device)} kernels, {last:.0f} µs, busy for {busy:.0%}.")
    every = max(1.0, round_step(60 / scale))
    for index in range(int(longest / every) + 1):
        x = left + index * every * scale
        canvas.path(f"M{x:g} {y - 10:g}v4", "rule")
        canvas.text(min(x, WIDTH - MARGIN - 20), y + 8, f"{index * every:g} µs", "muted small")
    return canvas.picture(y + 22, "\n".join(says))


def _covered(spans: Sequence[Span]) -> float:
    """Length of the time in which at least one of the spans, ordered by their beginnings, is running."""
    covered, until = 0.0, 0.0
    for _, start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def _lanes(spans: Sequence[Span]) -> list[int]:
    """For each kernel the first lane that is free when it begins."""
    busy_until: list[float] = []
    lanes: list[int] = []
    for _, start, end in spans:
        free = (lane for lane, until in enumerate(busy_until) if until <= start)
        lane = next(free, len(busy_until))
        busy_until[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _draw_kernel(canvas: Canvas, x: float, y: float, width: float, number: int) -> None:
    fill, ink = request_colors(number)
    canvas.box(x, y, max(width - 1, 1.0), 22, fill=fill)
    if width >= 18:
        canvas.text(x + width / 2, y + 16, number + 1, "small strong", fill=ink)
