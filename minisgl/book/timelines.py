"""Timelines: requests and steps, host and device, and the kernels of a device."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from minisgl.book.players import Player, player
from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, counted, duration, round_step
from minisgl.trace import DEVICE, Event, Trace

_LINE, _BOX, _DIGIT = 32, 26, 8.0  # heights of a line and of the box in it, and the width of a digit, in CSS pixels


def step_timeline(steps: Sequence[Mapping[int, int]]) -> Picture:
    """Draw steps to the right and requests downwards, in each box the tokens fed. A step maps ``uid`` to tokens."""
    uids = sorted({uid for step in steps for uid in step})
    left, top = MARGIN + 44, 62
    width = min((WIDTH - MARGIN - left) / max(len(steps), 1), 48.0)
    canvas = Canvas("Tokens that each request feeds in each step (more than one: prefill; one: decode)")
    canvas.columns(left, top - 8, width, len(steps))
    for line, uid in enumerate(uids):
        y = top + line * _LINE
        canvas.text(MARGIN, y + 19, f"r{uid}", "text strong", "start")
        fed = {step: each[uid] for step, each in enumerate(steps) if uid in each}
        for step, tokens in fed.items():
            canvas.cell(left + step * width + 1, y, width - 2, _LINE - 4, (tokens, "small"), color=uid)
        parts = [f"{tokens} tokens in step {step}" for step, tokens in fed.items() if tokens > 1]
        decode = ", ".join(str(step) for step, tokens in fed.items() if tokens == 1)
        parts += [f"1 token in each of the steps {decode}"] * bool(decode)
        canvas.says.append(f"Request r{uid} feeds {', '.join(parts)}.")
    return canvas.picture(top + len(uids) * _LINE + 8)


# -- the schedule of a trace -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Life:
    """What a trace says of one request."""

    prefills: dict[int, list[int]] = field(default_factory=dict)  # tokens fed and cached before, by step
    decodes: list[int] = field(default_factory=list)  # steps in which it was a decode row
    preempted: list[int] = field(default_factory=list)  # steps at whose beginning it was preempted
    finished_by: int | None = None  # how many steps had been launched when it finished; None while it runs
    reason: str = "not finished"  # why it finished

    def runs(self) -> list[tuple[int, int]]:
        """First and last step of each run of decode steps without a gap."""
        firsts = [step for step in self.decodes if step - 1 not in self.decodes]
        lasts = [step for step in self.decodes if step + 1 not in self.decodes]
        return list(zip(firsts, lasts, strict=True))

    def in_words(self) -> str:
        fed = self.prefills.items()
        parts = [f"prefills {counted(tokens, 'token')} on top of {on} in step {step}" for step, (tokens, on) in fed]
        runs = [f"{first} to {last}" if first < last else f"{first}" for first, last in self.runs()]
        parts += [f"decodes in step {', '.join(runs)}"] * bool(runs)
        parts += [f"is preempted before step {step}" for step in self.preempted]
        return ", ".join([*parts, "is not finished" if self.finished_by is None else f"finishes: {self.reason}"])


def schedule_timeline(trace: Trace) -> Picture:
    """Draw prefill chunks, decode steps, preemptions and ends: steps to the right, a line for each request.

    Steps are equally wide however long they took; `host_device_timeline` shows time.
    """
    lives, num_steps = _read(trace.events)
    return _draw_schedule(lives, num_steps, num_steps)


def schedule_player(trace: Trace) -> Player:
    """`schedule_timeline` growing step by step, at most 60 pictures, with what happens in words."""
    frames, captions, (_, num_steps) = [], [], _read(trace.events)
    for step in range(0, num_steps, -(-num_steps // 60) or 1):
        lives, _ = _read(trace.events, step + 1)
        frames.append(_draw_schedule(lives, num_steps, step + 1))
        captions.append(_step_in_words(lives, step))
    return player(frames, captions)


def _read(events: list[Event], launched: float = inf) -> tuple[dict[int, _Life], int]:
    """All requests by ``uid``, with what had happened when so many steps had been ``launched``; the number of steps."""
    starts = [event.start for event in events if event.name == "launch" and "step" in event.args]
    lives: defaultdict[int, _Life] = defaultdict(_Life)
    for event in events:
        args, at = event.args, bisect_left(starts, event.start)
        if event.name == "launch" and "step" in args:
            for row, (uid, *fed) in enumerate(zip(args["uids"], args["fed"], args["cached"], strict=True)):
                life = lives[uid]
                if at < launched and row < args["decode"]:
                    life.decodes.append(at)
                elif at < launched:
                    life.prefills[at] = fed
        elif event.name == "preempt" and at < launched:  # it makes room for the step that is launched next
            lives[args["uid"]].preempted.append(at)
        elif event.name == "finish" and at <= launched:
            lives[args["uid"]].finished_by, lives[args["uid"]].reason = at, args["reason"]
    return dict(sorted(lives.items())), len(starts)


def _draw_schedule(lives: dict[int, _Life], num_steps: int, launched: int) -> Picture:
    """What has happened by the time that so many of the steps have been launched."""
    left, top = MARGIN + 52, 84
    width = min((WIDTH - MARGIN - 84 - left) / max(num_steps, 1), 44.0)
    title = f"Schedule: {counted(len(lives), 'request')}, {counted(num_steps, 'step')}"
    legend = "tall: prefill, with its tokens  ·  flat: decode, one a step  ·  ×: preempted  ·  dashed: waits to go on"
    canvas = Canvas(title, legend=legend, says=f"{title}.")
    canvas.text(MARGIN, top - 8, "step", "muted small", "start")
    canvas.text(WIDTH - MARGIN, top - 8, "ends with", "muted small", "end")
    canvas.columns(left, top - 8, width, num_steps, room=30)
    for line, (uid, life) in enumerate(lives.items()):
        y, gap = top + line * _LINE, 1.0 if width >= 8 else 0.0
        canvas.text(MARGIN, y + 18, f"r{uid}", "text strong", "start")
        for first, last in life.runs():
            canvas.cell(left + first * width + gap, y + 7, (last - first + 1) * width - 2 * gap, _BOX - 14, color=uid)
        for step, (fed, _) in life.prefills.items():
            words = [(fed, "small")] * (len(str(fed)) * _DIGIT <= width - 2)
            canvas.cell(left + step * width + gap, y, width - 2 * gap, _BOX, *words, color=uid)
        for step in life.preempted:
            now = launched if life.finished_by is None else life.finished_by
            again = min((other for other in [*life.prefills, *life.decodes] if other >= step), default=now)
            if again > step:
                canvas.path(f"M{left + step * width + 12:g} {y + _BOX / 2:g}H{left + again * width:g}", "line dashed")
            canvas.text(left + step * width + 1, y + 19, "×", "text strong", "start")
        canvas.text(WIDTH - MARGIN, y + 18, life.reason, "text small", "end")
        canvas.says.append(f"Request r{uid} {life.in_words()}.")
    return canvas.picture(top + len(lives) * _LINE + 8)


def _step_in_words(lives: dict[int, _Life], step: int) -> str:
    """``step 5: r1 preempted; r0 r3 decode; r4 prefills 8 on top of 2``."""
    preempted = [f"r{uid}" for uid, life in lives.items() if step in life.preempted]
    decoding = [f"r{uid}" for uid, life in lives.items() if step in life.decodes]
    parts = [f"{' '.join(preempted)} preempted"] * bool(preempted) + [f"{' '.join(decoding)} decode"] * bool(decoding)
    for uid, life in lives.items():
        for fed, cached in [life.prefills[step]] if step in life.prefills else []:
            parts.append(f"r{uid} prefills {fed}" + f" on top of {cached}" * (cached > 0))
    parts += [f"r{uid} ends with {life.reason}" for uid, life in lives.items() if life.finished_by == step + 1]
    return f"step {step}: {'; '.join(parts)}"


# -- spans in time ---------------------------------------------------------------------------------------------------

Span = tuple[str, float, float]  # a kernel, and when it begins and ends, in microseconds
_Row = tuple[str, str, Sequence[tuple[float, float, int, object]]]
"""Its name, what stands at its right, and spans: start and end in seconds, number, label. A heading has none."""


def _draw_rows(canvas: Canvas, top: float, left: float, right: float, rows: Sequence[_Row]) -> float:
    """Draw rows of spans between ``left`` and ``right`` on one scale, and an axis below. Returns the lower edge."""
    seconds = max((span[1] for _, _, spans in rows for span in spans), default=0.0)
    scale, bottom = (right - left) / (seconds or 1.0), top + len(rows) * _LINE
    unit, name = (1e-6, "µs") if seconds < 2e-3 else (1e-3, "ms") if seconds < 2 else (1.0, "s")
    every = max(1e-3, round_step(60 / (unit * scale)))
    for index in range(int(seconds / (every * unit)) + 1 if seconds else 0):
        x = left + index * every * unit * scale
        lines = (f"M{x:g} {top + line * _LINE:g}v{_LINE}" for line, (_, _, spans) in enumerate(rows) if spans)
        canvas.path("".join(lines), "rule dashed")
        x = min(max(x, MARGIN + 14), WIDTH - MARGIN - 20)
        canvas.text(x, bottom + 14, f"{index * every:g} {name}", "muted small")
    for line, (name, after, spans) in enumerate(rows):
        y = top + line * _LINE
        canvas.text(MARGIN, y + 18, name, "text" if spans and name != "device" else "text strong", "start")
        canvas.text(WIDTH - MARGIN, y + 18, after, "text small", "end")
        if spans:
            canvas.path(f"M{left} {y + _BOX:g}H{right:g}", "rule")
        next_ones = [*(left + span[0] * scale for span in spans[1:]), right + _DIGIT * 3]
        for (start, end, number, label), free in zip(spans, next_ones, strict=False):
            x, width, needed = left + start * scale, max((end - start) * scale - 0.5, 1.0), len(str(label)) * _DIGIT + 4
            canvas.cell(x, y, width, _BOX, *[(label, "small")] * (label != "" and width >= needed), color=number)
            if label != "" and width < needed <= free - x - width:
                canvas.text(x + width + 2, y + 18, label, "text small", "start")
    return bottom + 22


def host_device_timeline(trace: Trace, first: int = 0, count: int = 4) -> Picture:
    """Draw ``count`` steps from step ``first`` on in time: four lanes of the host, one of the device."""
    lanes: dict[str, list[Event]] = {lane: [] for lane in ("schedule", "launch", "wait", "process", "device")}
    events = [event for event in trace.events if first <= event.args.get("step", -1) < first + count]
    start = min((event.start for event in events), default=0.0)
    whole = duration(max((event.end for event in events), default=0.0) - start)
    steps: defaultdict[int, list[str]] = defaultdict(list)
    rows: list[_Row] = []
    for event in events:
        lanes.get("device" if event.track == DEVICE else event.name, []).append(event)
        times = f"at {duration(event.start - start)} for {duration(event.end - event.start)}"
        steps[event.args["step"]].append(f"{event.name}{' on the device' * (event.track == DEVICE)} {times}")
    for lane, members in lanes.items():
        middle = duration(median(event.end - event.start for event in members)) if members else ""
        spans = [(each.start - start, each.end - start, each.args["step"], each.args["step"]) for each in members]
        rows.append((lane, middle, spans))
    title = f"Host and device, {counted(len(steps), 'step')} from step {first}"
    canvas = Canvas(title, whole, says=f"{title}, {whole}.")
    canvas.text(WIDTH - MARGIN, 54, "median", "muted small", "end")
    bottom = _draw_rows(canvas, 60, MARGIN + 76, WIDTH - MARGIN - 84, rows)
    canvas.note(bottom + 18, "the number in a box, and its colour: its step")
    canvas.says += [f"Step {step}: {', '.join(parts)}." for step, parts in sorted(steps.items())]
    return canvas.picture(bottom + 30)


def kernel_timeline(versions: Mapping[str, Sequence[Span]], title: str) -> Picture:
    """Draw the kernels of several versions of the same work, those that overlap in different lanes.

    The kernels of a version come in the order in which they begin. A kernel has one number in all versions.
    """
    kernels = list(dict.fromkeys(name for spans in versions.values() for name, _, _ in spans))
    canvas, rows = Canvas(title, says=f"{title}, µs."), list[_Row]()
    for version, spans in versions.items():
        lanes: list[list[tuple[float, float, int, object]]] = []
        for name, start, end in spans:
            lane = next((lane for lane in lanes if lane[-1][1] <= start * 1e-6), [])  # the first that is free
            lanes += [] if lane else [lane]
            lane.append((start * 1e-6, end * 1e-6, kernels.index(name), kernels.index(name) + 1))
        rows.append((version, f"{max((end for _, _, end in spans), default=0.0):.1f} µs", []))
        rows += [("", "", lane) for lane in lanes]
        words = ", ".join(f"{name} from {start:.1f} to {end:.1f}" for name, start, end in spans)
        canvas.says.append(f"{version}: {words}.")
    y = _draw_rows(canvas, 40, MARGIN, WIDTH - MARGIN, rows)
    for number, name in enumerate(kernels):
        x, height = MARGIN + number % 2 * (WIDTH / 2 - MARGIN), y + 6 + number // 2 * 24
        canvas.badge(x, height, number)
        canvas.text(x + 34, height + 14, name, "text small", "start")
    return canvas.picture(y + (len(kernels) + 1) // 2 * 24 + 12)


def launch_lanes(versions: Mapping[str, tuple[Sequence[Span], Sequence[Span]]], title: str) -> Picture:
    """Draw what the host launches above what the device computes, for several ways to do the same work, on one scale.

    Args:
        versions: name → spans of the host, spans of the device. A span of the device has the colour of the launch in
            the same place; in a replay, all of them were launched at once.
    """
    canvas, rows = Canvas(title, says=f"{title}, µs."), list[_Row]()
    for version, (host, device) in versions.items():
        covered, until = 0.0, 0.0
        for _, start, end in device:  # kernels that overlap count once
            covered, until = covered + max(end - max(start, until), 0.0), max(until, end)
        busy = f"busy for {covered / (until or 1.0):.0%}"
        rows.append((version, f"{until:.0f} µs, the device {busy}", []))
        for lane, spans in (("host", host), ("device", device)):
            rows.append((lane, "", [(start * 1e-6, end * 1e-6, n, "") for n, (_, start, end) in enumerate(spans)]))
        canvas.says.append(f"{version}: {len(host)} launches, {len(device)} kernels, {until:.0f} µs, {busy}.")
    return canvas.picture(_draw_rows(canvas, 40, MARGIN + 64, WIDTH - MARGIN, rows))
