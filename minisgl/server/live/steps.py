"""What the engine's steps are made of, recorded while somebody watches."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from minisgl.core.batch import Batch, Executor, PendingStep, StepResult
from minisgl.core.request import Request, RequestState
from minisgl.core.table import RunningTable
from minisgl.server.live.state import MOST_FINISHED, MOST_RUNNING, MOST_SLICES, LiveSlice

ATTENTION_SPAN = 2.0
"""Seconds after a look at the engine for which its steps are recorded."""
SHORTEST_SLICE = 0.02
"""Seconds up to which steps are put together: fifty a second are more than anybody sees."""


class StepWatch:
    """Stands before an executor, and notes what passes while somebody watches. If nobody does, it passes.

    Args:
        executor: computes the steps.
        table: the running requests, to which a batch's slots refer.
    """

    def __init__(self, executor: Executor, table: RunningTable) -> None:
        self.slices: deque[LiveSlice] = deque(maxlen=MOST_SLICES)
        self._executor = executor
        self._table = table
        self._watched_until = 0.0
        self._steps = 0
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

    def launch(self, batch: Batch) -> PendingStep:
        """Launch a step, as `Executor.launch` does."""
        if time.perf_counter() > self._watched_until:
            return self._executor.launch(batch)
        step = self._note(batch)
        return _WatchedStep(self._executor.launch(batch), step, self)

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

    def end(self, step: LiveSlice) -> None:
        """The step's tokens have arrived, or it has failed."""
        step.end = time.perf_counter()
        step.start = max(step.start, self._last_end)  # it was launched behind the one before
        self._last_end = step.end
        if self.slices and step.end - self.slices[-1].start < SHORTEST_SLICE:
            self.slices[-1] = _joined(self.slices[-1], step)
        else:
            self.slices.append(step)


@dataclass(frozen=True, slots=True)
class _WatchedStep:
    pending: PendingStep
    step: LiveSlice
    watch: StepWatch

    def wait(self) -> StepResult:
        try:
            return self.pending.wait()
        finally:
            self.watch.end(self.step)


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
