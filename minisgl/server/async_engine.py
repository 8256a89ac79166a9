"""The engine as the server's event loop sees it, in a thread or in processes: each job has an `Answer` to be read."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

import msgspec

from minisgl.config import EngineConfig
from minisgl.errors import EngineDead, InvalidRequest, MiniSGLError
from minisgl.sampling_params import SamplingParams
from minisgl.server.config import ServerConfig
from minisgl.server.grammar_check import GrammarCheck
from minisgl.server.live.state import LIVE, LiveFeed, LiveState
from minisgl.server.messages import (
    FLUSH,
    STATS,
    Abort,
    Accepted,
    EngineStats,
    JobPrompt,
    Reply,
    StatsReply,
    StatsRequest,
    Submit,
    Update,
    submit,
)
from minisgl.tokenizer import Tokenizer


class Answer:
    """The answer to one job, to be read while it comes in. Belongs to one event loop and one reader.

    Unread updates are merged, so a slow reader costs at most its own answer; `unread` says how much of it.
    """

    def __init__(self, job: int, num_choices: int, abort: Callable[[Answer], None]) -> None:
        self.job = job
        self.num_choices = num_choices
        # Tokens of each prompt, once the engine has accepted the job
        self.accepted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        # Called when there is something to `take`, once for all updates of a step
        self.listener: Callable[[], None] | None = None
        self.taken = False  # whether the engine has accepted the job; only then may it be aborted there
        self._unfinished = num_choices
        self._pending: dict[int, Update] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._abort = abort

    @property
    def finished(self) -> bool:
        """True once no more updates will come."""
        return self._unfinished == 0 or self._error is not None

    @property
    def unread(self) -> int:
        """Tokens that wait to be taken, and the log-probabilities beside them."""
        pending = self._pending.values()
        return sum(len(each.token_ids) + sum(len(entry.top) for entry in each.logprobs) for each in pending)

    def accept(self, prompt_lens: list[int]) -> None:
        """The job is in the engine's queue."""
        self.taken = True
        if not self.accepted.done():  # the waiting task may have been cancelled a moment ago
            self.accepted.set_result(prompt_lens)

    def put(self, update: Update) -> None:
        """Add an update from the engine."""
        pending = self._pending.setdefault(update.choice, update)
        if pending is not update:
            pending.merge(update)
        self._unfinished -= update.finish_reason is not None
        self._news.set()

    def fail(self, error: Exception) -> None:
        """No more updates will come: raise ``error`` where the answer is awaited."""
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._news.set()
        self.tell()

    def tell(self) -> None:
        """Call the listener, if there is one."""
        if self.listener is not None:
            self.listener()

    def abort(self) -> None:
        """Stop the choices that still run, if any."""
        self._abort(self)

    def take(self) -> Iterator[Update]:
        """Yield what has not been read, one update a choice. Raises `GenerationFailed` or `EngineDead` after that."""
        pending, self._pending = self._pending, {}
        for update in pending.values():
            if update.finish_reason == "error":
                raise GenerationFailed(update.error)
            yield update
        if self._error is not None:
            raise self._error

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until every choice is finished. Raises `GenerationFailed` or `EngineDead`."""
        while self._pending or self._error is not None or not self.finished:
            await self._news.wait()
            self._news.clear()
            for update in self.take():
                yield update


class GenerationFailed(MiniSGLError):
    """The engine could not finish an accepted request; the message is the engine's."""


SHUTTING_DOWN = "the server is shutting down"
ANSWER_TIMEOUT = 10.0  # seconds that `AsyncEngine.ask` waits; the engine answers between two steps


class AsyncEngine(ABC):
    """Takes jobs from one event loop and brings the answers back. How they travel is up to the subclass.

    Every job gets an answer: refused, rejected, or accepted and updated until all its choices have ended or failed with
    `EngineDead`. An abandoned job is aborted once accepted, so that no abort overtakes its job. The event loop uses
    ``tokenizer`` for small things only.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, max_seq_len: int, server: ServerConfig) -> None:
        self.config = config
        self.model = config.model
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.error: EngineDead | None = None  # why no jobs are taken at present
        self.draining = False  # no more jobs are taken, because the server will stop
        self.died = False  # the engine has ended with an error, for good
        self._answers: dict[int, Answer] = {}
        self._stats_requests: dict[int, asyncio.Future[StatsReply]] = {}
        self._numbers = itertools.count()
        self._feed = LiveFeed(self._look)
        self._grammars = GrammarCheck(server.grammar_timeout, server.grammar_memory)  # to be closed by the subclass

    # -- what a subclass provides ------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Start. Call it inside the event loop that will wait for the answers."""

    @abstractmethod
    async def stop(self) -> None:
        """Take no more jobs, end those in flight with `EngineDead`, and leave nothing running."""

    @abstractmethod
    def _put(self, message: Submit) -> None:
        """Send a job without waiting. Raises `QueueFull` and `InvalidRequest`."""

    @abstractmethod
    def _send_to_scheduler(self, message: Abort | StatsRequest) -> None:
        """Send without waiting."""

    # -- what the server uses ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a job has no complete answer yet."""
        return bool(self._answers)

    async def submit(
        self,
        prompts: Sequence[JobPrompt],
        params: SamplingParams,
        streaming: bool,
        user: str = "",
        request_id: str = "",
        client: str = "",
    ) -> Answer:
        """Wait until the engine has checked a job and queued it. Cancelling this withdraws the job.

        A grammar is tried first: see `GrammarCheck`. Returns the answer, with ``params.n`` choices for each prompt, in
        the order of the prompts.

        Raises:
            InvalidRequest: a prompt or a parameter is malformed, or cannot fit.
            QueueFull: too many requests are waiting.
            EngineDead: the engine died, or takes no more jobs.
        """
        if self.error is not None:
            raise self.error
        most, wanted = self.config.max_queued_requests, len(prompts) * params.n
        if wanted > most:
            field = "n" if len(prompts) == 1 else "prompt"
            raise InvalidRequest(field, f"asks for {wanted} answers, and max_queued_requests is {most}; ask for fewer")
        await self._grammars.check(params)
        job = next(self._numbers)
        message = submit(job, prompts, params, streaming, user, request_id, client)
        answer = Answer(job, len(prompts) * params.n, self._abort)
        self._answers[job] = answer
        try:
            self._put(message)
            await answer.accepted
        except BaseException:
            answer.abort()
            raise
        return answer

    async def ask(self, topic: str = "") -> StatsReply:
        """Ask the engine about its state between two steps. Raises `EngineDead`, also after `ANSWER_TIMEOUT`."""
        if self.error is not None and not self.draining:
            raise self.error
        number = next(self._numbers)
        self._stats_requests[number] = asyncio.get_running_loop().create_future()
        try:
            self._send_to_scheduler(StatsRequest(number, topic))
            reply = await asyncio.wait_for(self._stats_requests[number], ANSWER_TIMEOUT)
        except TimeoutError:
            raise EngineDead(f"the engine has not answered for {ANSWER_TIMEOUT:g} s") from None
        finally:
            del self._stats_requests[number]
        return StatsReply(number, reply.content, {**reply.states, "api": len(self._answers)})

    async def stats(self) -> EngineStats:
        """How busy the engine is. Raises `EngineDead`."""
        reply = await self.ask(STATS)
        return msgspec.msgpack.decode(reply.content, type=EngineStats)

    async def flush_cache(self) -> int:
        """Empty the prefix cache of what no request uses; returns how many pages that was. Raises `EngineDead`."""
        reply = await self.ask(FLUSH)
        return msgspec.msgpack.decode(reply.content, type=int)

    def watch(self) -> AsyncGenerator[LiveState, None]:
        """Yield the engine's state, at most ten times a second. Raises `EngineDead`."""
        return self._feed.states()

    async def _look(self) -> LiveState:
        reply = await self.ask(LIVE)
        return msgspec.msgpack.decode(reply.content, type=LiveState)

    def drain(self) -> None:
        """Take no more jobs. Those in flight go on until `busy` is false."""
        self.draining = True
        self.error = self.error or EngineDead(f"{SHUTTING_DOWN}, and takes no more requests")

    # -- what the engine replies, brought to the event loop by the subclass ------------------------------------

    def _deliver(self, replies: Sequence[Reply]) -> None:
        told: dict[int, Answer] = {}
        for reply in replies:
            if isinstance(reply, StatsReply):
                self._resolve(reply)
            elif (answer := self._answers.get(reply.job)) is None:
                if isinstance(reply, Accepted):  # abandoned before it was accepted
                    self._send_to_scheduler(Abort(reply.job))
            else:
                if isinstance(reply, Update):
                    answer.put(reply)
                    told[reply.job] = answer
                elif isinstance(reply, Accepted):
                    answer.accept(reply.prompt_lens)
                else:
                    answer.fail(reply.failure.error())
                if answer.finished:
                    del self._answers[answer.job]
        for answer in told.values():
            answer.tell()

    def _resolve(self, reply: StatsReply) -> None:
        future = self._stats_requests.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def _abort(self, answer: Answer) -> None:
        if self._answers.pop(answer.job, None) is not None and answer.taken:
            self._send_to_scheduler(Abort(answer.job))

    def _end(self, error: EngineDead) -> None:
        """Fail all jobs in flight, and take no more."""
        if not self.died:  # keep saying why the engine died, also while the server stops
            self.error = error
        self._fail(list(self._answers), error)
        for future in self._stats_requests.values():
            if not future.done():
                future.set_exception(error)

    def _fail(self, jobs: Sequence[int], error: EngineDead) -> None:
        for job in jobs:
            if (answer := self._answers.pop(job, None)) is not None:
                answer.fail(error)
