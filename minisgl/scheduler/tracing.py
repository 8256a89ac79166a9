"""Records the steps of a loop, from outside: what is not traced costs nothing and shows no sign of it in its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from minisgl.core.batch import Batch, Executor, PendingStep, StepResult
from minisgl.engine.engine import Engine
from minisgl.engine.runner import ModelRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling_stages import HostSampling
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.overlap import OverlapLoop
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step import StepOutput
from minisgl.trace import Trace


@contextmanager
def recorded(trace: Trace, loop: EngineLoop | OverlapLoop, engine: Engine | None = None) -> Iterator[None]:
    """Record all that the loop does inside the ``with`` block.

    Every step has a number, ``step``, counted from 0 and found in the ``args`` of all its events:

    - on the track ``host``, the spans ``schedule``, ``launch``, ``wait`` and ``process`` (or ``fail``). ``launch`` says
      what was launched: ``rows``, ``tokens``, and in the order of the rows ``uids``, tokens ``fed``, and positions
      ``cached`` in the KV cache before them. The first ``decode`` rows are decode rows, the others prefill;
      ``constrained`` rows sample under a mask, which was made within ``schedule``;
    - on the track ``device``, if there is an engine, one span: ``decode``, ``prefill`` or ``mixed``;
    - on the track ``requests``, the instants ``admit``, ``preempt`` and ``finish``, with the ``uid``, and the last with
      the ``reason``.

    Args:
        trace: takes the events.
        loop: either one.
        engine: computes the loop's steps, and is asked when the device does.
    """
    scheduler, executor = loop.scheduler, loop.executor
    steps = _Steps(trace)
    loop.scheduler = cast(Scheduler, _RecordedScheduler(scheduler, steps))
    loop.executor = _RecordedExecutor(executor, scheduler, steps)
    if engine is not None:
        runner, engine.runner = engine.runner, cast(ModelRunner, _RecordedRunner(engine.runner, steps))
    try:
        yield
    finally:
        loop.scheduler, loop.executor = scheduler, executor
        if engine is not None:
            engine.runner = runner


class _Steps:
    """The trace, and the numbers of the steps that are not processed yet."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._numbers: dict[int, int] = {}
        self._next = 0

    def add(self, batch: Batch) -> int:
        self._numbers[id(batch)] = self._next
        self._next += 1
        return self._next - 1

    def args(self, batch: Batch) -> dict[str, Any]:
        """Empty for a step that was launched before the trace began."""
        number = self._numbers.get(id(batch))
        return {} if number is None else {"step": number}

    def remove(self, batch: Batch) -> None:
        self._numbers.pop(id(batch), None)


class _RecordedScheduler:
    """What a loop calls of a scheduler."""

    def __init__(self, scheduler: Scheduler, steps: _Steps) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._trace = steps.trace

    def schedule(self) -> Batch | None:
        table = self._scheduler.table
        running = [(request, request.preemptions) for request in map(table.request, table.slots.tolist())]
        with self._trace.span("schedule") as args:
            batch = self._scheduler.schedule()
            if batch is not None:
                args["step"] = self._steps.add(batch)
        for request, preemptions in running:
            if request.preemptions > preemptions:
                self._trace.instant("preempt", uid=request.uid)
        for admission in () if batch is None else batch.admissions:
            self._trace.instant("admit", uid=table.request(admission.slot).uid)
        return batch

    def process(self, batch: Batch, result: StepResult) -> None:
        with self._trace.span("process", **self._steps.args(batch)):
            self._scheduler.process(batch, result)
        self._steps.remove(batch)

    def fail(self, batch: Batch, error: str) -> None:
        with self._trace.span("fail", **self._steps.args(batch)):
            self._scheduler.fail(batch, error)
        self._steps.remove(batch)

    def take_output(self) -> StepOutput:
        output = self._scheduler.take_output()
        for request in output.finished:
            self._trace.instant("finish", at=request.times.finished, uid=request.uid, reason=request.finish_reason)
        return output


class _RecordedExecutor:
    """An executor whose launches and waits are recorded."""

    def __init__(self, executor: Executor, scheduler: Scheduler, steps: _Steps) -> None:
        self._executor = executor
        self._table = scheduler.table
        self._steps = steps

    def launch(self, batch: Batch) -> PendingStep:
        args = {
            **self._steps.args(batch),
            "rows": batch.num_rows,
            "tokens": batch.num_tokens,
            "decode": batch.num_decode,
            "uids": self._table.arrival[batch.slots].tolist(),
            "fed": batch.q_lens.tolist(),
            "cached": (batch.seq_lens - batch.q_lens).tolist(),
            "constrained": len(batch.mask_rows),
        }
        with self._steps.trace.span("launch", **args):
            pending = self._executor.launch(batch)
        return _RecordedStep(pending, self._steps.trace, self._steps.args(batch))


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    pending: PendingStep
    trace: Trace
    args: dict[str, Any]

    def wait(self) -> StepResult:
        with self.trace.span("wait", **self.args):
            return self.pending.wait()


class _RecordedRunner:
    """A runner whose work on the device is recorded."""

    def __init__(self, runner: ModelRunner, steps: _Steps) -> None:
        self._runner = runner
        self._steps = steps

    def run(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        kind = "mixed" if 0 < batch.num_decode < batch.num_rows else "decode" if batch.num_decode else "prefill"
        with self._steps.trace.device_span(kind, **self._steps.args(batch)):
            return self._runner.run(batch, sampling)
