"""What the engine's steps are made of, recorded while somebody watches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from minisgl.core.batch import Batch, StepPhase
from minisgl.core.request import Request, RequestState
from minisgl.core.table import RunningTable
from minisgl.server.live.state import MOST_FINISHED, MOST_RUNNING, MOST_SLICES, LiveSlice

ATTENTION_SPAN = 2.0
"""Seconds after a look at the engine for which its steps are recorded."""
SHORTEST_SLICE = 0.02
"""Seconds up to which steps are put together: fifty a second are more than anybody sees."""


class StepWatch:
    """A `StepObserver` that records steps while the live page is open, and ignores them otherwise.

    Args:
        table: the running requests, to which a batch's slots refer.
    """

    def __init__(self, table: RunningTable) -> None:
        self.slices: deque[LiveSlice] = deque(maxlen=MOST_SLICES)
        self._table = table
        self._watched_until = 0.0
        self._steps = 0
        self._launched: dict[int, LiveSlice] = {}
        """Steps whose tokens have not arrived, by the identity of their batches."""
        self._last_end = 0.0
        self._previous: list[tuple[Request, int]] = []
        """Requests of the step before, and how often each had been preempted by then."""
        self._seen: dict[int, Request] = {}
        """Requests of recent steps by uid."""

    def look(self) -> None:
        """Begin to record, or go on."""
        self._watched_until = time.perf_counter() + ATTENTION_SPAN

    def finished(self) -> list[Request]:
        """The last `MOST_FINISHED` of the requests that ended while somebody watched, the last one last."""
        done = [request for request in self._seen.values() if request.state is RequestState.FINISHED]
        done.sort(key=lambda request: request.times.finished)
        for request in done[:-MOST_FINISHED]:
            del self._seen[request.uid]
        return done[-MOST_FINISHED:]

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Note a step that is launched. One that fails before its tokens are waited for is no slice."""
        if phase == "launch" and batch is not None and time.perf_counter() <= self._watched_until:
            self._launched[id(batch)] = self._note(batch)
        elif phase == "fail":
            self._launched.pop(id(batch), None)

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Record a step whose tokens have arrived, or that has failed instead."""
        if phase == "wait" and (step := self._launched.pop(id(batch), None)) is not None:
            self._record(step)

    def finish(self, requests: Sequence[Request]) -> None:
        """Nothing: `finished` looks at the requests of recent steps."""

    def _note(self, batch: Batch) -> LiveSlice:
        requests = [self._table.request(slot) for slot in batch.slots.tolist()]
        fed = batch.q_lens.tolist()
        decode = batch.num_decode
        rows = [
            (request.uid, 0 if row < decode else fed[row], int(row < decode))
            for row, request in enumerate(requests[:MOST_RUNNING])
        ]
        preempted = [request.uid for request, before in self._previous if request.preemptions > before]
        self._previous = [(request, request.preemptions) for request in requests]
        self._seen.update((request.uid, request) for request in requests)
        self._steps += 1
        return LiveSlice(
            number=self._steps,
            start=time.perf_counter(),
            end=0.0,
            steps=1,
            prefill=batch.num_tokens - decode,
            decode=decode,
            rows=rows,
            preempted=preempted,
        )

    def _record(self, step: LiveSlice) -> None:
        step.end = time.perf_counter()
        step.start = max(step.start, self._last_end)  # it was launched behind the one before
        self._last_end = step.end
        if self.slices and step.end - self.slices[-1].start < SHORTEST_SLICE:
            self.slices[-1] = _joined(self.slices[-1], step)
        else:
            self.slices.append(step)


def _joined(a: LiveSlice, b: LiveSlice) -> LiveSlice:
    """Two slices as one. A new object: the old one may be on its way to a watcher."""
    rows = {uid: (prefill, decode) for uid, prefill, decode in a.rows}
    for uid, prefill, decode in b.rows:
        before = rows.get(uid, (0, 0))
        rows[uid] = (before[0] + prefill, before[1] + decode)
    return LiveSlice(
        number=a.number,
        start=a.start,
        end=b.end,
        steps=a.steps + b.steps,
        prefill=a.prefill + b.prefill,
        decode=a.decode + b.decode,
        rows=[(uid, *tokens) for uid, tokens in list(rows.items())[:MOST_RUNNING]],
        preempted=a.preempted + b.preempted,
    )
