"""The event loop's end of a job: what the engine has sent and the client has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from minisgl.errors import MiniSGLError
from minisgl.messages import Update


class GenerationFailed(MiniSGLError):
    """The engine could not finish an accepted request; the message is the engine's."""


class Answer:
    """The answer to one job, to be read while it comes in. Belongs to one event loop and one reader.

    Updates that are not read are merged, one a choice. So a slow reader costs at most the text of its own answer,
    which ``max_tokens`` bounds, and finds all of it in one piece when it comes back.

    Args:
        job: number of the job.
        num_choices: how many choices it has.
        abort: tells the engine that nobody waits for the job any more.
    """

    def __init__(self, job: int, num_choices: int, abort: Callable[[Answer], None]) -> None:
        self.job = job
        self.num_choices = num_choices
        self.accepted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        """Tokens of each prompt, once the engine has taken the job."""
        self.taken = False
        """Whether the engine has accepted the job, so that it can be aborted there."""
        self._unfinished = num_choices
        self._pending: dict[int, Update] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._abort = abort

    @property
    def finished(self) -> bool:
        """True once the engine has nothing more to say."""
        return self._unfinished == 0 or self._error is not None

    def accept(self, prompt_lens: list[int]) -> None:
        """Take the news that the job is in the engine's queue."""
        self.taken = True
        if not self.accepted.done():  # whoever waited may have been cancelled a moment ago
            self.accepted.set_result(prompt_lens)

    def put(self, update: Update) -> None:
        """Take an update from the engine."""
        pending = self._pending.setdefault(update.choice, update)
        if pending is not update:
            pending.merge(update)
        self._unfinished -= update.finish_reason is not None
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Take the news that no more updates will come: raised where the answer is awaited."""
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._news.set()

    def abort(self) -> None:
        """Stop what is still running of the job. Harmless if it is finished."""
        self._abort(self)

    async def updates(self) -> AsyncIterator[Update]:
        """All updates, merged where they came faster than they were read, until every choice is finished.

        Raises:
            GenerationFailed: the engine gave up a choice.
            EngineDead: the engine died, or is shutting down.
        """
        while self._pending or not self.finished:
            await self._news.wait()
            self._news.clear()
            pending, self._pending = self._pending, {}
            for update in pending.values():
                if update.finish_reason == "error":
                    raise GenerationFailed(update.error)
                yield update
        if self._error is not None:
            raise self._error
