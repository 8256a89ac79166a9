"""The engine as the event loop sees it: the seam between HTTP and the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import EngineDead
from minisgl.llm import LLM
from minisgl.server.answer import Answer
from minisgl.server.live.feed import LiveFeed
from minisgl.server.live.state import LiveState, Look
from minisgl.server.messages import (
    Abort,
    Accepted,
    Count,
    EngineStats,
    Prompt,
    Rejected,
    Reply,
    Submit,
    Told,
)
from minisgl.server.worker import EngineWorker

STOP_TIMEOUT = 30.0
"""Seconds that `AsyncEngine.stop` waits for the step in flight."""


class AsyncEngine:
    """Takes jobs from one event loop, runs them in the engine's thread, and brings the answers back.

    Args:
        llm: the engine. It belongs to the engine's thread from `start` on; only ``tokenizer.token_text``, which changes
            nothing, is called from elsewhere.
    """

    def __init__(self, llm: LLM) -> None:
        self.config = llm.config
        self.model = llm.config.model
        self.tokenizer = llm.tokenizer
        self.max_seq_len = llm.max_seq_len
        self.error: EngineDead | None = None
        """Why no job is taken any more; None while jobs are."""
        self.died = False
        """True once the engine's thread has ended with an error."""
        self._worker = EngineWorker(llm, self._send, self._on_death)
        self._feed = LiveFeed(lambda: self._worker.put(Look()))
        self._answers: dict[int, Answer] = {}
        self._questions: dict[int, asyncio.Future[EngineStats]] = {}
        self._jobs = itertools.count()

    def start(self) -> None:
        """Start the engine's thread. Call it inside the event loop that will wait for the answers."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        streaming: bool,
        user: str = "",
    ) -> Answer:
        """Have the engine check a job and put it in its queue. Cancelling this withdraws the job.

        Returns:
            The answer, whose choices are ``params.n`` for each prompt, in the order of the prompts.

        Raises:
            InvalidRequest: a prompt or a parameter is malformed, or cannot fit.
            QueueFull: too many requests are waiting.
            EngineDead: the engine died, or is shutting down.
        """
        if self.error is not None:
            raise self.error
        job = next(self._jobs)
        answer = Answer(job, len(prompts) * params.n, self._abort)
        self._answers[job] = answer
        self._worker.put(Submit(job, prompts, params, streaming, user))
        try:
            await answer.accepted
        except BaseException:
            answer.abort()
            raise
        return answer

    def watch(self) -> AsyncGenerator[LiveState, None]:
        """The engine's state, over and over, at most ten times a second. Costs the engine nothing if nobody watches.

        Raises:
            EngineDead: the engine died, or is shutting down.
        """
        return self._feed.states()

    async def stats(self) -> EngineStats:
        """How busy the engine is, told between two steps.

        Raises:
            EngineDead: the engine died, or is shutting down.
        """
        if self.error is not None:
            raise self.error
        number = next(self._jobs)
        told: asyncio.Future[EngineStats] = self._loop.create_future()
        self._questions[number] = told
        self._worker.put(Count(number))
        try:
            return await told
        finally:
            del self._questions[number]

    async def stop(self) -> None:
        """Take no more jobs, end those in flight with `EngineDead`, and wait for the engine's thread."""
        self._end(EngineDead("the server is shutting down"))
        await asyncio.to_thread(self._worker.stop, STOP_TIMEOUT)

    def _abort(self, answer: Answer) -> None:
        if self._answers.pop(answer.job, None) is not None:
            self._worker.put(Abort(answer.job))

    # -- called in the engine's thread -------------------------------------------------------------------------

    def _send(self, replies: Sequence[Reply]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._deliver, replies)

    def _on_death(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._bury, error)

    # -- called in the event loop on its behalf ----------------------------------------------------------------

    def _deliver(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, LiveState):
                self._feed.put(reply)
                continue
            if isinstance(reply, Told):
                self._tell(reply)
                continue
            answer = self._answers.get(reply.job)
            if answer is None:
                continue
            if isinstance(reply, Accepted):
                answer.accept(reply.prompt_lens)
            elif isinstance(reply, Rejected):
                answer.fail(reply.error)
            else:
                answer.put(reply)
            if answer.finished:
                del self._answers[reply.job]

    def _tell(self, told: Told) -> None:
        question = self._questions.get(told.job)
        if question is not None and not question.done():  # whoever asked may have been cancelled a moment ago
            question.set_result(told.stats)

    def _bury(self, error: BaseException) -> None:
        self.died = True
        self._end(EngineDead(f"the engine died: {type(error).__name__}: {error}"))

    def _end(self, error: EngineDead) -> None:
        self.error = self.error or error
        self._feed.end(self.error)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.fail(error)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)
