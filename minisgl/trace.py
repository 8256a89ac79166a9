"""Tracing: what host, device and requests did when, as events for timelines, Perfetto and summaries."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from minisgl.batch import Batch, StepObserver, StepPhase
from minisgl.engine.engine import Engine
from minisgl.request import Request
from minisgl.scheduler.loop import EngineLoop
from minisgl.table import RunningTable

_DeviceSpan = tuple[str, dict[str, Any], torch.cuda.Event, torch.cuda.Event]  # name, args, events at start and end
# The engine's thread; the device; admissions, preemptions and ends of requests.
HOST, DEVICE, REQUESTS = TRACKS = ("host", "device", "requests")


@dataclass(frozen=True, slots=True)
class Event:
    """A span or an instant on one of the `TRACKS`."""

    name: str  # such as "schedule"
    track: str
    start: float  # seconds of time.perf_counter
    duration: float | None = None  # seconds; None is an instant
    args: dict[str, Any] = field(default_factory=dict)  # details, ready for JSON

    @property
    def end(self) -> float:
        return self.start + (self.duration or 0.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """A trace in numbers. Host time is scheduling, launching and processing, without waiting and computing."""

    steps: int  # that were launched
    host_median: float  # seconds a step
    host_p95: float
    gpu_idle: float | None  # idle share between the ends of consecutive decode steps; None on a CPU or without such


class Trace:
    """Collects events: at most ``limit``, the newest ones. `LLM.trace` records every step of an engine in one.

    On CUDA, a device span is the time between two events in the stream; one more event, recorded while the device is
    idle, ties its clock to the host's. On an idle device, some 0.1 ms in which the host packs inputs count as busy.
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

    def device_mark(self) -> float | torch.cuda.Event:
        """Mark the present end of the device's work: an event in its stream on CUDA, else the time."""
        if not self.on_cuda:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def add_device_span(self, name: str, start: float | torch.cuda.Event, args: dict[str, Any]) -> None:
        """Record the device's work since `device_mark` returned ``start``."""
        end = self.device_mark()
        if isinstance(start, float):
            assert isinstance(end, float)
            self._events.append(Event(name, DEVICE, start, end - start, args))
        else:
            assert not isinstance(end, float)
            self._unresolved.append((name, args, start, end))

    def instant(self, name: str, track: str = REQUESTS, at: float | None = None, **args: Any) -> None:
        """Record an instant: ``at``, in seconds of ``time.perf_counter``, or now."""
        self._events.append(Event(name, track, time.perf_counter() if at is None else at, None, args))

    def add(self, event: Event) -> None:
        """Record an event that was measured elsewhere."""
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
        """Write Chrome's trace format, which https://ui.perfetto.dev opens. ``about`` goes into ``otherData``."""
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
        """Return a new trace of ``count`` steps, from the step ``first`` on."""
        events = [event for event in self.events if first <= event.args.get("step", -1) < first + count]
        return self._of(events, min((event.start for event in events), default=self.start), self.on_cuda)

    @classmethod
    def _of(cls, events: list[Event], start: float, on_cuda: bool) -> Trace:
        trace = cls()
        trace._events, trace.start, trace.on_cuda = deque(events), start, on_cuda
        return trace

    def _as_json(self, event: Event) -> dict[str, Any]:
        # Times are in microseconds since the trace began.
        kind = {"ph": "i", "s": "t"} if event.duration is None else {"ph": "X", "dur": event.duration * 1e6}
        place = {"pid": 0, "tid": TRACKS.index(event.track), "ts": (event.start - self.start) * 1e6}
        return {"name": event.name, **kind, **place, "args": event.args}

    def summary(self) -> Summary:
        """Compute the host's time a step, and how idle the GPU was."""
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


class TraceObserver:
    """A `StepObserver` that records steps in a trace; ``args["step"]`` of an event is the step's number, from 0.

    - On the track ``host``: spans ``schedule``, ``launch``, ``wait`` and ``process`` (or ``fail``). ``launch`` has the
      numbers of ``rows``, ``tokens``, leading rows that ``decode`` (with drafts too) and ``constrained`` rows, and for
      each row its ``uids``, tokens ``fed`` and tokens ``cached`` before.
    - On the track ``device``, if the engine is observed too: a span ``decode``, ``prefill`` or ``mixed``.
    - On the track ``requests``: instants ``admit``, ``preempt`` and ``finish`` with ``uid``, the last with ``reason``.
    """

    def __init__(self, trace: Trace, table: RunningTable) -> None:
        self._trace = trace
        self._table = table
        self._start = 0.0
        self._device_start: float | torch.cuda.Event = 0.0
        # Requests that ran before the step being scheduled, and how often each had been preempted by then.
        self._running: list[tuple[Request, int]] = []
        self._numbers: dict[int, int] = {}  # of steps that are not processed yet, by the identity of their batches
        self._next = 0

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Note when the phase began."""
        if phase == "compute":
            self._device_start = self._trace.device_mark()
            return
        if phase == "schedule":
            requests = map(self._table.request, self._table.slots.tolist())
            self._running = [(request, request.preemptions) for request in requests]
        self._start = time.perf_counter()

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Record the phase."""
        if phase == "compute":
            assert batch is not None
            self._trace.add_device_span(_kind(batch), self._device_start, self._step(batch))
            return
        duration = time.perf_counter() - self._start
        if phase == "schedule" and batch is not None:
            self._numbers[id(batch)] = self._next
            self._next += 1
        args = {} if batch is None else self._step(batch)
        if phase == "launch" and batch is not None:
            args |= self._rows(batch)
        self._trace.add(Event(phase, HOST, self._start, duration, args))
        if phase == "schedule":
            self._note_requests(batch)
        elif phase in ("process", "fail"):
            self._numbers.pop(id(batch), None)

    def finish(self, requests: Sequence[Request]) -> None:
        """Record the ends of requests."""
        for request in requests:
            reason = request.finish_reason
            self._trace.instant("finish", at=request.times.finished, uid=request.uid, reason=reason)

    def _step(self, batch: Batch) -> dict[str, Any]:
        # Empty for a step that was launched before the trace began.
        number = self._numbers.get(id(batch))
        return {} if number is None else {"step": number}

    def _rows(self, batch: Batch) -> dict[str, Any]:
        return {
            "rows": batch.num_rows,
            "tokens": batch.num_tokens,
            "decode": batch.num_generating,
            "uids": self._table.arrival[batch.slots].tolist(),
            "fed": batch.q_lens.tolist(),
            "cached": (batch.seq_lens - batch.q_lens).tolist(),
            "constrained": len(batch.mask_rows),
        }

    def _note_requests(self, batch: Batch | None) -> None:
        for request, preemptions in self._running:
            if request.preemptions > preemptions:
                self._trace.instant("preempt", uid=request.uid)
        for new in () if batch is None else batch.new_requests:
            self._trace.instant("admit", uid=self._table.request(new.slot).uid)


@contextmanager
def observed(observer: StepObserver, *observers: list[StepObserver]) -> Iterator[None]:
    """Add ``observer`` to lists of observers, of loops and engines, inside the ``with`` block."""
    for each in observers:
        each.append(observer)
    try:
        yield
    finally:
        for each in observers:
            each.remove(observer)


@contextmanager
def recorded(trace: Trace, loop: EngineLoop, engine: Engine | None = None) -> Iterator[None]:
    """Record the steps of a loop inside the ``with`` block, and the device's work if its engine is given."""
    engines = [] if engine is None else [engine.observers]
    with observed(TraceObserver(trace, loop.scheduler.table), loop.observers, *engines):
        yield


def _kind(batch: Batch) -> str:
    generating = batch.num_generating
    return "mixed" if 0 < generating < batch.num_rows else "decode" if generating else "prefill"


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
