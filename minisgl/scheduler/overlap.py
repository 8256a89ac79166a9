"""Chapter 12: overlap scheduling, which hides the host behind the device (SGLang's zero-overhead scheduler)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minisgl.core.batch import Batch, Executor, PendingStep
from minisgl.errors import EngineDead
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step import StepOutput


class OverlapLoop:
    """Drives a scheduler and an executor as `EngineLoop` does, and keeps one step in flight between two calls.

    Step N + 1 is scheduled and launched while step N still runs; only then does the host wait for the tokens of N. So
    the device finds its next step waiting, as long as the host needs less time for a step than the device::

        device           | step 1          | step 2          | step 3 …
        host    S1 L1 S2 L2 ··· wait 1 · P1 S3 L3 · wait 2 · P2 S4 …      S schedule, L launch, P process

    The host plans step N + 1 without having seen what N sampled: the device passes those tokens on by itself, and the
    scheduler counts them as present. What N then brings to light is acted upon one step late: a request that has ended
    is in step N + 1 once more, for nothing, and the token that this step samples for it is dropped. Only what a
    constraint allows after step N cannot be known early: such rows sit step N + 1 out (`Constraints`).

    Args:
        scheduler: decides.
        executor: computes.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()

    def step(self) -> StepOutput:
        """Launch the next step, account for the one before, and return everything that became known.

        If nothing can be scheduled, the step in flight is accounted for and none is left: whoever calls this while
        `Scheduler.has_work` leaves nothing behind.

        Raises:
            EngineDead: the executor computes nothing any more. No step is in flight then.
        """
        batch = self.scheduler.schedule()
        if batch is not None:
            self._launch(batch)
        while len(self._in_flight) > (batch is not None):
            self._finish_oldest()
        return self.scheduler.take_output()

    def _launch(self, batch: Batch) -> None:
        """Put a step in flight. If that fails, the step before it is sound and stays there, unless all is over."""
        try:
            pending = self.executor.launch(batch)
        except EngineDead as error:
            self._fail([*self._take_in_flight(), batch], error)
        except BaseException as error:
            self._fail([batch], error)
        else:
            self._in_flight.append((batch, pending))

    def _finish_oldest(self) -> None:
        """Wait for the step that was launched first, and account for it.

        A step that was launched after a failed one cannot be trusted: it was fed tokens that were never sampled, and
        may have read KV that was never written. It fails as well, unheard.
        """
        batch, pending = self._in_flight.popleft()
        try:
            result = pending.wait()
        except BaseException as error:
            self._fail([batch, *self._take_in_flight()], error)
        else:
            self.scheduler.process(batch, result)

    def _take_in_flight(self) -> list[Batch]:
        batches = [batch for batch, _ in self._in_flight]
        self._in_flight.clear()
        return batches

    def _fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """End the requests of these steps. An interrupt, and the end of the executor, are raised again."""
        interrupted = not isinstance(error, Exception)
        message = "interrupted" if interrupted else f"the step failed: {type(error).__name__}: {error}"
        for batch in batches:
            self.scheduler.fail(batch, message)
        if interrupted or isinstance(error, EngineDead):
            raise error
