"""The engine in separate processes, as the API process sees it: starts them, talks to them, notices when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, EngineDead, MiniSGLError, QueueFull
from minisgl.models.hub import resolve_model
from minisgl.processes import ChildProcess, end_processes, wait_until_ready
from minisgl.server.async_engine import SHUTTING_DOWN, AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.messages import (
    Abort,
    Accepted,
    DetokenizerOptions,
    Rejected,
    Reply,
    SchedulerOptions,
    StatsRequest,
    Submit,
    TokenizerOptions,
    encode,
)
from minisgl.server.sockets import JOBS, STEPS, UNBOUNDED, Receiver, Sender, address
from minisgl.tokenizer import Tokenizer

_LONGEST_PATH = 107  # bytes that the path of a Unix socket may have


@dataclass(eq=False)
class TokenizerLink:
    """A tokenizer process, the socket to it, and the jobs that it has not passed on yet."""

    child: ChildProcess
    sender: Sender
    waiting: set[int] = field(default_factory=set)


class Topology:
    """Starts the processes, and is the API process's end of the sockets.

    The sockets are files in a new private directory; `ConfigError` if its path is too long. ``model`` is the
    checkpoint's directory, ``limit`` the most tokens of a request, if known.
    """

    def __init__(self, config: EngineConfig, server: ServerConfig, model: Path, limit: int | None) -> None:
        self.directory = _make_directory()
        self._context = zmq.Context()
        self._model = str(model)
        self._limit = limit
        self._allow_control_tokens = server.allow_control_tokens
        self._started = 0
        self._common: dict[str, Any] = {"directory": str(self.directory), "log_format": server.log_format}
        self._hang_timeout = config.hang_timeout
        self._stopping = threading.Lock()
        self.inbox = Receiver[list[Reply]](self._context, address(self.directory, "api"), list[Reply], STEPS)
        self.to_scheduler = self._sender("scheduler", UNBOUNDED)
        self.scheduler = ChildProcess(
            "minisgl.server.scheduler_worker",
            SchedulerOptions(
                name="scheduler",
                engine=config,
                trace=server.trace,
                kv_events=server.kv_events,
                kv_events_replay=server.kv_events_replay,
                kv_events_topic=server.kv_events_topic,
                **self._common,
            ),
            hang_timeout=config.hang_timeout,
            turn_timeout=max(config.distributed_timeout, config.hang_timeout or 0.0),
        )
        self.detokenizer = ChildProcess(
            "minisgl.server.detokenizer_worker",
            DetokenizerOptions(name="detokenizer", model=self._model, sweeps=True, **self._common),
            hang_timeout=config.hang_timeout,
        )
        self.tokenizers = [self._start_tokenizer() for _ in range(server.tokenizer_workers)]

    @property
    def children(self) -> list[ChildProcess]:
        return [self.scheduler, self.detokenizer, *(link.child for link in self.tokenizers)]

    def wait_until_ready(self, timeout: float) -> int:
        """Wait for all processes; returns the engine's ``max_seq_len``. Raises `EngineDead` and the model's errors."""
        wait_until_ready(self.children, timeout)
        return int(self.scheduler.ready.result().info["max_seq_len"])

    def submit(self, job: int, frame: bytes) -> None:
        """Send an encoded job to the tokenizer with the fewest waiting jobs. Raises `QueueFull` if it has too many."""
        link = min(self.tokenizers, key=lambda link: len(link.waiting))
        if not link.sender.offer(frame):
            raise QueueFull(f"{len(link.waiting)} requests wait for a tokenizer; try again later")
        link.waiting.add(job)

    def settle(self, job: int) -> None:
        """A job has left its tokenizer."""
        for link in self.tokenizers:
            link.waiting.discard(job)

    def replace(self, dead: TokenizerLink) -> TokenizerLink:
        """Start a new tokenizer in place of a dead one, whose jobs are lost."""
        dead.sender.close()
        link = self._start_tokenizer()
        self.tokenizers[self.tokenizers.index(dead)] = link
        return link

    def disconnect(self) -> None:
        """Close the sockets. Call it in the thread that uses them."""
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End all processes, and remove the sockets' directory. From any thread; a second call waits for the first."""
        with self._stopping:
            end_processes(self.children)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start_tokenizer(self) -> TokenizerLink:
        name = f"tokenizer-{self._started}"
        self._started += 1
        options = TokenizerOptions(
            name=name,
            model=self._model,
            limit=self._limit,
            allow_control_tokens=self._allow_control_tokens,
            **self._common,
        )
        child = ChildProcess("minisgl.server.tokenizer_worker", options, hang_timeout=self._hang_timeout)
        return TokenizerLink(child, self._sender(name, JOBS))

    def _sender(self, name: str, bound: int) -> Sender:
        return Sender(self._context, address(self.directory, name), bound)


def _make_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="minisgl-"))
    if len(bytes(directory)) + len("/tokenizer-999999") > _LONGEST_PATH:
        directory.rmdir()
        raise ConfigError(f"TMPDIR: {directory.parent} is too long a path for sockets; choose a shorter one")
    return directory


logger = logging.getLogger(__name__)


class ProcessEngine(AsyncEngine):
    """Runs the engine in processes. When one dies, its requests fail at once, and it is restarted if so configured.

    Raises `ConfigError` or `ModelLoadError` if the engine cannot start, `EngineDead` if a process died or was late.
    """

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        path = resolve_model(config.model)
        self._server = server
        self._launch = partial(Topology, config, server, path, _longest(config, path))
        self._topology = self._launch()
        try:
            tokenizer = Tokenizer(path)
            max_seq_len = self._topology.wait_until_ready(server.start_timeout)
        except BaseException:
            self._topology.disconnect()
            self._topology.stop()
            raise
        super().__init__(config, tokenizer, max_seq_len, server)
        self._stopping = False
        self._restarting = False
        self._repairs: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to receive from the processes, and to watch them."""
        self._loop = asyncio.get_running_loop()
        self._attach(self._topology)

    async def stop(self) -> None:
        """Fail all jobs in flight, and end all processes."""
        self._stopping = True
        self._end(EngineDead(SHUTTING_DOWN))
        await _cancel(*self._repairs)
        await self._grammars.close()
        await self._detach()
        self.died |= (self._topology.scheduler.exit_code or 0) > 0  # it could not write its trace

    def end_processes(self) -> None:
        """End all processes if `stop` has not; from any thread."""
        self._stopping = True
        self._topology.stop()

    # -- to the processes --------------------------------------------------------------------------------------

    def _put(self, message: Submit) -> None:
        self._topology.submit(message.job, encode(message))

    def _send_to_scheduler(self, message: Abort | StatsRequest) -> None:
        self._topology.to_scheduler.send(message)  # never blocks: the socket is unbounded

    # -- from the processes ------------------------------------------------------------------------------------

    def _attach(self, topology: Topology) -> None:
        self._reader = self._loop.create_task(self._read(topology))
        for child in topology.children:
            self._watch(topology, child)

    async def _detach(self) -> None:
        await _cancel(self._reader)
        self._topology.disconnect()
        await asyncio.to_thread(self._topology.stop)

    async def _read(self, topology: Topology) -> None:
        inbox = zmq.asyncio.Socket.from_socket(topology.inbox.socket)
        try:
            while True:
                self._deliver(topology.inbox.decode(await inbox.recv()))
        except Exception as error:  # of any kind: the waiting clients must get an answer
            logger.exception("cannot read the processes' messages")
            self._mark_dead(EngineDead(f"the server cannot read the engine's messages: {error}"))
        finally:
            inbox.close()

    def _deliver(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, (Accepted, Rejected)):
                self._topology.settle(reply.job)
        super()._deliver(replies)

    # -- the supervisor ----------------------------------------------------------------------------------------

    def _watch(self, topology: Topology, child: ChildProcess) -> None:
        def on_exit(exited: Future[EngineDead]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has closed
                self._loop.call_soon_threadsafe(self._on_exit, topology, child, exited.result())

        child.exited.add_done_callback(on_exit)

    def _on_exit(self, topology: Topology, child: ChildProcess, error: EngineDead) -> None:
        if self._stopping or self._restarting or self.died or topology is not self._topology:
            return
        logger.error("%s", error)
        link = next((link for link in topology.tokenizers if link.child is child), None)
        if self._server.restart and link is not None and child.ready.exception() is None:
            self._repair(self._replace(topology, link, error))
        else:
            self._mark_dead(error)

    def _mark_dead(self, error: EngineDead) -> None:
        """Fail all requests, and restart the processes or give up."""
        self._end(error)
        if self._server.restart:
            self._restarting = True
            self._repair(self._restart())
        else:
            self.died = True

    def _repair(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    async def _replace(self, topology: Topology, dead: TokenizerLink, error: EngineDead) -> None:
        """Start another tokenizer. The dead one's jobs are lost; those that it had passed on go on."""
        self._fail(sorted(dead.waiting), error)
        child = topology.replace(dead).child
        self._watch(topology, child)
        try:
            await asyncio.to_thread(wait_until_ready, [child], self._server.start_timeout)
        except MiniSGLError as failure:
            if topology is self._topology and not self._restarting:
                self._mark_dead(EngineDead(f"a tokenizer could not be restarted: {failure}"))

    async def _restart(self) -> None:
        """End the remaining processes, and start all of them again."""
        await self._detach()
        try:
            self._topology = self._launch()
            await asyncio.to_thread(self._topology.wait_until_ready, self._server.start_timeout)
        except Exception as error:
            logger.exception("the engine could not be restarted")
            self.error = EngineDead(f"the engine could not be restarted: {error}")
            self.died = True
            return
        self._attach(self._topology)
        self._restarting = False
        self.error = None
        if self.draining:
            self.drain()
        logger.info("the engine has been restarted")


def _longest(config: EngineConfig, path: Path) -> int | None:
    """Most tokens of a request, as far as the checkpoint's files say: the engine has not started yet."""
    if config.max_seq_len is not None:
        return config.max_seq_len
    try:
        positions = json.loads((path / "config.json").read_bytes()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # the engine's loader says what is wrong with the file
        return None
    return positions if isinstance(positions, int) else None


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
