"""The processes behind the API process, and the sockets between them::

API process ──► tokenizer 0 … N−1 ──► scheduler ──► detokenizer ──► API process
     │                                  ▲   ▲            │
     └───────────── aborts ─────────────┘   └── stops ───┘
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from minisgl.core.config import EngineConfig
from minisgl.errors import ConfigError, QueueFull
from minisgl.messages.options import DetokenizerOptions, SchedulerOptions, TokenizerOptions
from minisgl.messages.replies import Reply
from minisgl.messages.sockets import JOBS, STEPS, UNBOUNDED, Receiver, Sender, address
from minisgl.processes import ChildProcess, end, wait_until_ready
from minisgl.server.config import ServerConfig

_LONGEST_PATH = 107
"""Bytes that the path of a Unix socket may have."""


@dataclass(eq=False)
class TokenizerLink:
    """A tokenizer, the way to it, and the jobs that have been sent to it and not been heard of since."""

    child: ChildProcess
    sender: Sender
    waiting: set[int] = field(default_factory=set)


class Topology:
    """Starts the processes, and is the API process's end of the sockets. Nobody else can reach these: they lie in a new
    directory with a random name that only its owner may enter.

    Args:
        config: of the engine.
        server: how many tokenizers there are, and what the processes record and log.
        model: directory of the checkpoint.
        limit: most tokens of a request, as far as it can be told before the engine is there.

    Raises:
        ConfigError: the directory for temporary files has a name that is too long for sockets.
    """

    def __init__(self, config: EngineConfig, server: ServerConfig, model: Path, limit: int | None) -> None:
        self.directory = _make_directory()
        self._context = zmq.Context()
        self._model = str(model)
        self._limit = limit
        self._started = 0
        self._log_format = server.log_format
        self._hang_timeout = config.hang_timeout
        self._stopping = threading.Lock()
        self.inbox = Receiver[list[Reply]](self._context, self._address("api"), list[Reply], STEPS)
        self.to_scheduler = self._sender("scheduler", UNBOUNDED)
        common: dict[str, Any] = {"directory": str(self.directory), "log_format": server.log_format}
        self.scheduler = ChildProcess(
            "minisgl.server.scheduler_worker",
            SchedulerOptions(name="scheduler", engine=config, trace=server.trace, **common),
            hang_timeout=config.hang_timeout,
            turn_timeout=max(config.distributed_timeout, config.hang_timeout or 0.0),
        )
        self.detokenizer = ChildProcess(
            "minisgl.messages.detokenizer_worker",
            DetokenizerOptions(name="detokenizer", model=self._model, sweeps=True, **common),
            hang_timeout=config.hang_timeout,
        )
        self.tokenizers = [self._start_tokenizer() for _ in range(server.tokenizer_workers)]

    @property
    def children(self) -> list[ChildProcess]:
        """All processes."""
        return [self.scheduler, self.detokenizer, *(link.child for link in self.tokenizers)]

    def wait_until_ready(self, timeout: float) -> int:
        """Wait for all processes; returns the engine's ``max_seq_len``. Raises as `wait_until_ready` does."""
        wait_until_ready(self.children, timeout)
        return int(self.scheduler.ready.result().info["max_seq_len"])

    def submit(self, job: int, frame: bytes) -> None:
        """Send an encoded job to the tokenizer that has least to do.

        Raises:
            QueueFull: even that one has too much.
        """
        link = min(self.tokenizers, key=lambda link: len(link.waiting))
        if not link.sender.offer(frame):
            raise QueueFull(f"{len(link.waiting)} requests wait for a tokenizer; try again later")
        link.waiting.add(job)

    def settle(self, job: int) -> None:
        """Take the news that a job has passed its tokenizer."""
        for link in self.tokenizers:
            link.waiting.discard(job)

    def replace(self, dead: TokenizerLink) -> TokenizerLink:
        """Start a new tokenizer in place of a dead one. What had been sent to that one is lost."""
        dead.sender.close()
        link = self._start_tokenizer()
        self.tokenizers[self.tokenizers.index(dead)] = link
        return link

    def disconnect(self) -> None:
        """Close the sockets, in the thread that has used them."""
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End all processes, and leave no file behind. From any thread; who comes second waits for the first."""
        with self._stopping:
            end(self.children)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start_tokenizer(self) -> TokenizerLink:
        name = f"tokenizer-{self._started}"
        self._started += 1
        options = TokenizerOptions(
            name=name,
            directory=str(self.directory),
            log_format=self._log_format,
            model=self._model,
            limit=self._limit,
        )
        child = ChildProcess("minisgl.messages.tokenizer_worker", options, hang_timeout=self._hang_timeout)
        return TokenizerLink(child, self._sender(name, JOBS))

    def _sender(self, name: str, bound: int) -> Sender:
        return Sender(self._context, self._address(name), bound)

    def _address(self, name: str) -> str:
        return address(self.directory, name)


def _make_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="minisgl-"))
    if len(bytes(directory)) + len("/tokenizer-999999") > _LONGEST_PATH:
        directory.rmdir()
        raise ConfigError(f"TMPDIR: {directory.parent} is too long a path for sockets; choose a shorter one")
    return directory
