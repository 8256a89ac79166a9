"""The API process: a socket, an engine, and uvicorn between them."""

from __future__ import annotations

import errno
import math
import signal
import socket
import sys
import time
from dataclasses import asdict
from types import FrameType

import uvicorn

from minisgl.core.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.messages.child import set_up_logging
from minisgl.server.app import create_app
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.process_engine import ProcessEngine

LAST_WORDS_TIMEOUT = 5
"""Seconds that clients have to read the end of their answers when the server stops."""


class Server(uvicorn.Server):
    """uvicorn, which drains the engine before it stops, and stops when the engine dies.

    The first SIGTERM or SIGINT begins to drain: no more requests are taken, and those in flight have ``drain_timeout``
    seconds to finish. A second one stops at once.

    Args:
        engine: to serve.
        drain_timeout: in seconds.
    """

    def __init__(self, engine: AsyncEngine, drain_timeout: float = 0.0) -> None:
        super().__init__(uvicorn.Config(create_app(engine), timeout_graceful_shutdown=LAST_WORDS_TIMEOUT))
        self.engine = engine
        self._drain_timeout = drain_timeout
        self._drained_by = math.inf
        self._impatient: int | None = None
        """The signal that has ended the draining."""

    @property
    def exit_code(self) -> int:
        """0 after draining, 1 if the engine died, and as a shell says it after a second signal."""
        return int(self.engine.died) if self._impatient is None else 128 + self._impatient

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(f"serving {self.engine.model} on http://{where}/v1", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if not self.engine.draining:
            self.engine.drain()
            self._drained_by = time.monotonic() + self._drain_timeout
        else:
            self._impatient = sig
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to stop."""
        drained = self.engine.draining and (not self.engine.busy or time.monotonic() >= self._drained_by)
        return await super().on_tick(counter) or self.engine.died or drained

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, then close the connections."""
        await self.engine.stop()
        await super().shutdown(sockets)


def serve(config: EngineConfig, server: ServerConfig, host: str, port: int) -> int:
    """Load the model and serve it until a signal ends that.

    Returns:
        The exit code, see `Server.exit_code`.

    Raises:
        ConfigError: the address cannot be used, or an option cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
        EngineDead: a process of the engine died while it was started, or took too long.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # while the model is loaded: an exception leaves nothing behind
        signal.signal(number, _leave)
    set_up_logging("api")
    listener = bind(host, port)
    running = Server(_engine(config, server), server.drain_timeout)
    running.run([listener])
    return running.exit_code


def _engine(config: EngineConfig, server: ServerConfig) -> AsyncEngine:
    if not server.in_process:
        return ProcessEngine(config, server)
    from minisgl.llm import LLM  # here, because else the API process needs nothing of the engine
    from minisgl.server.in_process import InProcessEngine

    return InProcessEngine(LLM(**asdict(config)))


def bind(host: str, port: int) -> socket.socket:
    """A socket for ``host`` and ``port`` that does not listen yet: clients are turned away until the model is loaded.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: must be from 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port: {port} is taken on {host}; choose another one with --port") from error
        raise ConfigError(f"host: cannot listen on {host}:{port} ({error})") from error
    return listener


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
