"""The step loop: schedule, launch, wait, process, again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minisgl.batch import Batch, PendingStep, StepLauncher, StepObserver, StepPhase
from minisgl.errors import EngineDead
from minisgl.scheduler.scheduler import Scheduler, StepOutput


class EngineLoop:
    """Drives a scheduler and an executor; knows nothing of text, clients or HTTP.

    With ``depth=0`` each step is launched, waited for and processed before the next one is scheduled, and the device
    idles while the host works. With ``depth=1`` (SGLang's zero-overhead scheduler) we schedule and launch step N + 1
    while step N still runs, and only then wait for N's tokens::

        device           | step 1          | step 2          | step 3 …
        host    S1 L1 S2 L2 ··· wait 1 · P1 S3 L3 · wait 2 · P2 S4 …      S schedule, L launch, P process

    That is safe without having seen N's tokens: the device passes them on itself, and the scheduler counts them as
    present. A request that has ended is in step N + 1 once more, and that token is dropped. Rows with a constraint sit
    step N + 1 out (`Constraints`).
    """

    def __init__(self, scheduler: Scheduler, executor: StepLauncher, depth: int = 0) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self.depth = depth
        self.observers: list[StepObserver] = []  # may change between two calls of `step`
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()

    def step(self) -> StepOutput:
        """Launch the next step, account for those that are due, and return everything that became known.

        A step that raises fails only its own requests. With nothing to schedule, all steps in flight are accounted for.
        After `EngineDead` the executor computes nothing any more, and no step is in flight.
        """
        batch = self._schedule()
        if batch is not None:
            self._launch(batch)
        while len(self._in_flight) > (0 if batch is None else self.depth):
            self._finish_oldest()
        return self.take_output()

    def take_output(self) -> StepOutput:
        """Return everything that became known since the last call, without running a step."""
        output = self.scheduler.take_output()
        if output.finished:
            for observer in self.observers:
                observer.finish(output.finished)
        return output

    def _schedule(self) -> Batch | None:
        self._begin("schedule", None)
        batch = self.scheduler.schedule()
        self._end("schedule", batch)
        return batch

    def _launch(self, batch: Batch) -> None:
        self._begin("launch", batch)
        try:
            pending = self._executor.launch(batch)
        except BaseException as error:
            self._end("launch", batch)
            # The step before this one is sound and stays in flight, unless the engine is dead.
            before = self._take_in_flight() if isinstance(error, EngineDead) else []
            self._fail([*before, batch], error)
        else:
            self._end("launch", batch)
            self._in_flight.append((batch, pending))

    def _finish_oldest(self) -> None:
        batch, pending = self._in_flight.popleft()
        self._begin("wait", batch)
        try:
            result = pending.wait()
        except BaseException as error:
            self._end("wait", batch)
            # Steps launched after a failed one were fed tokens that were never sampled: they fail as well.
            self._fail([batch, *self._take_in_flight()], error)
        else:
            self._end("wait", batch)
            self._begin("process", batch)
            self.scheduler.process(batch, result)
            self._end("process", batch)

    def _take_in_flight(self) -> list[Batch]:
        batches = [batch for batch, _ in self._in_flight]
        self._in_flight.clear()
        return batches

    def _fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """End the requests of these steps. An interrupt or the executor's death is raised again."""
        interrupted = not isinstance(error, Exception)
        message = "interrupted" if interrupted else f"the step failed: {type(error).__name__}: {error}"
        for batch in batches:
            self._begin("fail", batch)
            self.scheduler.fail(batch, message)
            self._end("fail", batch)
        if interrupted or isinstance(error, EngineDead):
            raise error

    def _begin(self, phase: StepPhase, batch: Batch | None) -> None:
        for observer in self.observers:
            observer.begin(phase, batch)

    def _end(self, phase: StepPhase, batch: Batch | None) -> None:
        for observer in self.observers:
            observer.end(phase, batch)
