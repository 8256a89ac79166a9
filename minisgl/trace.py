"""A recorder of what happened when: spans and instants on a few tracks, for timelines, Perfetto and summaries."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

_DeviceSpan = tuple[str, dict[str, Any], torch.cuda.Event, torch.cuda.Event]
"""Name, args, and the device's events at its two ends."""

HOST, DEVICE, REQUESTS = TRACKS = ("host", "device", "requests")
"""What the engine's thread does; what the device computes; what becomes of the requests."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Args:
        name: of the event, such as ``"schedule"``.
        track: one of `TRACKS`.
        start: seconds of ``time.perf_counter``.
        duration: seconds; None is an instant.
        args: details, ready for JSON.
    """

    name: str
    track: str
    start: float
    duration: float | None = None
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + (self.duration or 0.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace says in numbers.

    Args:
        steps: steps that were launched.
        host_median, host_p95: seconds that the host works on one step: to schedule, launch and process it. Waiting is
            not work, and neither is what a CPU computes as the device.
        gpu_idle: share of the time from the end of a decode step to the end of the next in which the GPU did nothing.
            None if no two decode steps follow each other, and on a CPU, which takes turns with the host by nature.
    """

    steps: int
    host_median: float
    host_p95: float
    gpu_idle: float | None


class Trace:
    """Collects events. `LLM.trace` makes one and has every step of the engine recorded in it.

    On CUDA a device span is measured by the device itself, between two events in its stream. One more event, recorded
    while the device is idle, ties its clock to the host's. A span begins when the device reaches the first event: if it
    has run dry by then, the time that the host needs to pack the step's inputs (some 0.1 ms) still looks busy.

    Args:
        device: whose clock measures device spans; None and the CPU are measured by the host's.
        limit: most events to keep, the newest ones; None keeps all.
    """

    def __init__(self, device: torch.device | None = None, limit: int | None = None) -> None:
        self.on_cuda = device is not None and device.type == "cuda"
        self.start = time.perf_counter()
        self._events: deque[Event] = deque(maxlen=limit)
        self._unresolved: deque[_DeviceSpan] = deque(maxlen=limit)
        if self.on_cuda:
            torch.cuda.synchronize(device)
            self._reference = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            self._reference.record()
            self._reference.synchronize()
            self._reference_time = (before + time.perf_counter()) / 2

    @contextmanager
    def span(self, name: str, track: str = HOST, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the time that the ``with`` block takes. Yields ``args``, to which the block may add."""
        start = time.perf_counter()
        try:
            yield args
        finally:
            self._events.append(Event(name, track, start, time.perf_counter() - start, args))

    @contextmanager
    def device_span(self, name: str, **args: Any) -> Iterator[None]:
        """Record the time that the device takes for what the ``with`` block launches."""
        if not self.on_cuda:
            with self.span(name, DEVICE, **args):
                yield
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._unresolved.append((name, args, start, end))

    def instant(self, name: str, track: str = REQUESTS, at: float | None = None, **args: Any) -> None:
        """Record a moment: ``at``, in seconds of ``time.perf_counter``, or now."""
        self._events.append(Event(name, track, time.perf_counter() if at is None else at, None, args))

    def add(self, event: Event) -> None:
        """Record what was measured elsewhere."""
        self._events.append(event)

    @property
    def events(self) -> list[Event]:
        """All events in order of their start. Waits for device spans that have not ended."""
        for name, args, start, end in self._unresolved:
            end.synchronize()
            offset, duration = self._reference.elapsed_time(start), start.elapsed_time(end)
            self._events.append(Event(name, DEVICE, self._reference_time + offset / 1e3, duration / 1e3, args))
        self._unresolved.clear()
        return sorted(self._events, key=lambda event: event.start)

    def export(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` open.

        Args:
            path: of the file.
            about: where the trace comes from, ready for JSON. It goes into ``otherData``.
        """
        tracks = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(TRACKS)
        ]
        events = [self._as_json(event) for event in self.events]
        other = {"on_cuda": self.on_cuda, **(about or {})}
        record = {"traceEvents": tracks + events, "displayTimeUnit": "ms", "otherData": other}
        Path(path).write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `export` has written. Times count from the beginning of that trace."""
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        events = [_from_json(entry) for entry in record["traceEvents"] if entry["ph"] != "M"]
        return cls._of(events, 0.0, record["otherData"]["on_cuda"])

    def excerpt(self, first: int, count: int) -> Trace:
        """The events of ``count`` steps from the step ``first`` on, as a trace of their own that begins with them."""
        events = [event for event in self.events if first <= event.args.get("step", -1) < first + count]
        return self._of(events, min((event.start for event in events), default=self.start), self.on_cuda)

    @classmethod
    def _of(cls, events: list[Event], start: float, on_cuda: bool) -> Trace:
        trace = cls()
        trace._events, trace.start, trace.on_cuda = deque(events), start, on_cuda
        return trace

    def _as_json(self, event: Event) -> dict[str, Any]:
        """One event; times are in microseconds since the trace began."""
        kind = {"ph": "i", "s": "t"} if event.duration is None else {"ph": "X", "dur": event.duration * 1e6}
        place = {"pid": 0, "tid": TRACKS.index(event.track), "ts": (event.start - self.start) * 1e6}
        return {"name": event.name, **kind, **place, "args": event.args}

    def summary(self) -> Summary:
        """Host time a step, and how idle the GPU was."""
        host: defaultdict[int, float] = defaultdict(float)
        on_device: list[Event] = []
        for event in self.events:
            step = event.args.get("step")
            if step is None or event.duration is None or event.name == "wait":
                continue
            if event.track == DEVICE:
                on_device.append(event)
                host[step] -= 0.0 if self.on_cuda else event.duration
            else:
                host[step] += event.duration
        times = list(host.values()) or [0.0]
        idle = _idle_share(on_device) if self.on_cuda else None
        return Summary(len(host), median(times), float(np.percentile(times, 95)), idle)


def _from_json(entry: dict[str, Any]) -> Event:
    duration = entry["dur"] / 1e6 if entry["ph"] == "X" else None
    return Event(entry["name"], TRACKS[entry["tid"]], entry["ts"] / 1e6, duration, entry["args"])


def _idle_share(steps: list[Event]) -> float | None:
    idle = total = 0.0
    for before, step in pairwise(steps):
        if before.name == step.name == "decode":
            idle += max(step.start - before.end, 0.0)
            total += step.end - before.end
    return idle / total if total else None
