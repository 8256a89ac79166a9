"""The engine in a thread of the API process, for notebooks and laptops: the same stages, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from minisgl.core import EngineCore
from minisgl.errors import EngineDead, QueueFull
from minisgl.server.async_engine import SHUTTING_DOWN, AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.detokenizer_worker import DetokenizerStage
from minisgl.server.messages import Abort, Rejected, Reply, StatsRequest, Stop, Submit
from minisgl.server.scheduler_worker import IDLE_SECONDS, EngineStage, Views
from minisgl.server.sockets import JOBS
from minisgl.server.tokenizer_worker import TokenizerStage
from minisgl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
STOP_TIMEOUT = 30.0  # seconds that `InProcessEngine.stop` waits for the step in flight


class InProcessEngine(AsyncEngine):
    """Runs one `EngineCore` in a thread, which owns the core from `start` on, except for ``tokenizer.token_text``.

    Of ``server``, it reads the limits of grammars, and whether messages may spell control tokens.
    """

    def __init__(self, core: EngineCore, views: Views | None = None, server: ServerConfig | None = None) -> None:
        server = server or ServerConfig()
        super().__init__(core.config, core.tokenizer, core.max_seq_len, server)
        self._core = core
        self._inbox: queue.SimpleQueue[Submit | Abort | StatsRequest | None] = queue.SimpleQueue()
        tokenizer = Tokenizer(core.tokenizer.path, True) if server.allow_control_tokens else core.tokenizer
        self._tokenizing = TokenizerStage(tokenizer, core.max_seq_len)
        self._engine = EngineStage(core, views)
        self._detokenizing = DetokenizerStage(core.tokenizer)
        self._turns = 0  # of the thread's loop: the heartbeat that `_watch` looks at
        self._thread = threading.Thread(target=self._run, name="minisgl-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, once, and watch it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watching = self._loop.create_task(self._watch())

    async def stop(self) -> None:
        """Fail all jobs in flight, and end the thread after its current step."""
        self._watching.cancel()
        self._end(EngineDead(SHUTTING_DOWN))
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)
        await self._grammars.close()

    def _put(self, message: Submit) -> None:
        if self._inbox.qsize() >= JOBS:
            raise QueueFull(f"{JOBS} requests wait to be tokenized; try again later")
        self._inbox.put(message)

    def _send_to_scheduler(self, message: Abort | StatsRequest) -> None:
        self._inbox.put(message)

    # -- in the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._tokenize()
                replies, stopped = self._detokenizing.handle(self._engine.step())
                if stopped:
                    self._engine.take(Stop(stopped))
                if replies:
                    self._send(replies)
        except BaseException as error:  # of any kind: the waiting clients must get an answer
            logger.exception("the engine's thread died")
            self._to_loop(self._mark_dead, EngineDead(f"the engine died: {type(error).__name__}: {error}"))

    def _read_inbox(self) -> bool:
        """Handle all messages, and sleep while there is nothing else to do. False when it is time to stop."""
        self._turns += 1
        while not self._inbox.empty() or not (self._engine.has_work or self._tokenizing.has_work):
            message = self._next_message()
            if message is None:
                return False
            if isinstance(message, Submit):
                self._tokenizing.take(message)
            else:
                self._engine.take(message)
        return True

    def _tokenize(self) -> None:
        if self._tokenizing.has_work and (outcome := self._tokenizing.step()) is not None:
            _, message = outcome
            if isinstance(message, Rejected):
                self._send([message])
            else:
                self._engine.take(message)

    def _next_message(self) -> Submit | Abort | StatsRequest | None:
        """Sleep until there is one, and check now and then that the engine is alive."""
        while True:
            self._turns += 1
            try:
                return self._inbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._core.check()

    def _send(self, replies: Sequence[Reply]) -> None:
        self._to_loop(self._deliver, replies)

    def _to_loop(self, call: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(call, argument)

    # -- in the event loop -------------------------------------------------------------------------------------

    def _mark_dead(self, error: EngineDead) -> None:
        self._watching.cancel()
        self._end(error)
        self.died = True

    async def _watch(self) -> None:
        """Mark the engine as dead if its thread has made no turn for as long as a rank's main loop may make none."""
        config = self._core.config
        if config.hang_timeout is None:
            return
        timeout = config.distributed_timeout + config.hang_timeout
        turns, silent = -1, 0
        while silent < 2:  # halves: one may pass while this whole process is stopped
            await asyncio.sleep(timeout / 2)
            silent = silent + 1 if turns == self._turns else 0
            turns = self._turns
        self._mark_dead(EngineDead(f"the engine has made no progress for {timeout:g} s; its thread hangs"))
