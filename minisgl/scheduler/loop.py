"""The step loop: schedule, run, process, again."""

from __future__ import annotations

from minisgl.core.batch import Executor
from minisgl.errors import EngineDead
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step import StepOutput


class EngineLoop:
    """Drives a scheduler and an executor, one step at a time. Knows nothing of text, clients or HTTP.

    Args:
        scheduler: decides.
        executor: computes.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def step(self) -> StepOutput:
        """Run one step, if there is one to run, and return everything that became known.

        A step that raises fails its own requests with the error's text; the others go on.

        Raises:
            EngineDead: the executor computes nothing any more.
        """
        batch = self.scheduler.schedule()
        if batch is not None:
            try:
                result = self.executor.launch(batch).wait()
            except Exception as error:
                self.scheduler.fail(batch, f"the step failed: {type(error).__name__}: {error}")
                if isinstance(error, EngineDead):
                    raise
            except BaseException:
                self.scheduler.fail(batch, "interrupted")
                raise
            else:
                self.scheduler.process(batch, result)
        return self.scheduler.take_output()
