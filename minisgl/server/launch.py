"""Launching the server: a listening socket, an engine, and uvicorn between them."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from types import FrameType

import uvicorn

from minisgl.child_process import freeze_heap
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.server.app import create_app
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.connections import BACKLOG, connection_class, on_loop_error
from minisgl.server.process_engine import ProcessEngine

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5  # seconds that clients have to read the end of their answers when the server stops


class Server(uvicorn.Server):
    """A uvicorn server that drains the engine before it stops, and stops when the engine dies.

    After the first SIGTERM or SIGINT, requests in flight have ``drain_timeout`` seconds. A second signal stops at once.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig | None = None) -> None:
        config = config or ServerConfig()
        app = create_app(engine, config)
        # The app logs each request, and the caller configures the logs.
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(config),
                backlog=BACKLOG,
                timeout_graceful_shutdown=CLOSE_TIMEOUT,
                access_log=False,
                log_config=None,
            )
        )
        self.engine = engine
        self._drain_timeout = config.drain_timeout
        self._drained_by = math.inf
        self._second_signal: int | None = None

    @property
    def exit_code(self) -> int:
        """0 after draining, 1 if the engine died, 128 + its number after a second signal, as shells have it."""
        return int(self.engine.died) if self._second_signal is None else 128 + self._second_signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print where."""
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        for listener in sockets or []:  # connections inherit it, and would keep the port from the next server
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(f"serving {self.engine.model} on http://{where}/v1", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal, stop at the second."""
        if not self.engine.draining:
            self.engine.drain()
            self._drained_by = time.monotonic() + self._drain_timeout
        else:
            self._second_signal = sig
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to stop."""
        drained = self.engine.draining and (not self.engine.busy or time.monotonic() >= self._drained_by)
        return await super().on_tick(counter) or self.engine.died or drained

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fail the answers in flight, then close the connections."""
        await self.engine.stop()
        await super().shutdown(sockets)


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Load the model and serve it until a signal comes; returns `Server.exit_code`.

    Raises:
        ConfigError: the address cannot be used, or an option cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
        EngineDead: a process of the engine died while it was started, or took too long.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # while the model is loaded: an exception cleans up
        signal.signal(number, lambda *_: sys.exit(0))
    listener = bind(config.host, config.port)
    warn_if_public(listener, config)
    if config.allow_control_tokens:
        logger.warning("any text of a user can end its message and go on as the system: --allow-control-tokens is set")
    with open_engine(engine_config, config) as engine:
        running = Server(engine, config)
        freeze_heap()
        try:
            running.run([listener])
        finally:
            gc.unfreeze()
        return running.exit_code


@contextmanager
def open_engine(engine_config: EngineConfig, config: ServerConfig) -> Iterator[AsyncEngine]:
    """Load the model and start the engine's processes, or take a thread; raises as `serve` does.

    Call the engine's ``start`` in the event loop that will use it. Requests that run when the ``with`` block ends get
    an answer only if ``stop`` was awaited before.
    """
    if not config.in_process:
        engine = ProcessEngine(engine_config, config)
        try:
            yield engine
        finally:
            engine.end_processes()
        return
    from minisgl.core import EngineCore
    from minisgl.server.in_process import InProcessEngine
    from minisgl.server.kv_events import publish_kv_events
    from minisgl.server.scheduler_worker import engine_views, record_trace

    with (
        EngineCore(engine_config) as core,
        record_trace(core, config.trace),
        publish_kv_events(core, config.kv_events, config.kv_events_replay, config.kv_events_topic),
    ):
        yield InProcessEngine(core, engine_views(core), config)


def warn_if_public(listener: socket.socket, config: ServerConfig) -> None:
    """Log a warning if other machines can use the server without a key."""
    address = listener.getsockname()[0]
    if config.api_key is None and not ip_address(address.partition("%")[0]).is_loopback:
        logger.warning("everyone who can reach %s can use this server: it has no API key; see --api-key", address)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket without listening yet, so that clients are turned away until the model is loaded.

    Raises `ConfigError` if the port is taken, or the address is not one of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: must be from 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # From now on, the port is ours: with this option, a second server would find out only when both have loaded.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port: {port} is taken on {host}; choose another one with --port") from error
        raise ConfigError(f"host: cannot listen on {host}:{port} ({error})") from error
    return listener
