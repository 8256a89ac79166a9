"""The server process: a socket, an engine in its thread, and uvicorn between them."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict
from ipaddress import ip_address
from types import FrameType

import uvicorn

from minisgl.core.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.server.app import create_app
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.recording import recording

logger = logging.getLogger(__name__)

LAST_WORDS_TIMEOUT = 5
"""Seconds that clients have to read the end of their answers when the server stops."""


class Server(uvicorn.Server):
    """uvicorn, which stops the engine before it waits for the clients, and stops when the engine dies.

    Args:
        engine: to serve.
        config: how.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig | None = None) -> None:
        app = create_app(engine, config)
        # Every request leaves a line of the app's own, and whoever runs the server configures the logs.
        super().__init__(
            uvicorn.Config(app, timeout_graceful_shutdown=LAST_WORDS_TIMEOUT, access_log=False, log_config=None)
        )
        self.engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(f"serving {self.engine.model} on http://{where}/v1", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to stop."""
        return await super().on_tick(counter) or self.engine.died

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, then close the connections."""
        await self.engine.stop()
        await super().shutdown(sockets)


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Load the model and serve it until SIGTERM or SIGINT, which end the process with exit code 0.

    Returns:
        1 if the engine died.

    Raises:
        ConfigError: the address cannot be used, or an option cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn passes on to these what it caught
        signal.signal(number, _leave)
    listener = bind(config.host, config.port)
    warn_of_strangers(listener, config)
    with ExitStack() as until_stopped:
        llm = until_stopped.enter_context(LLM(**asdict(engine_config)))
        if config.trace is not None:
            until_stopped.enter_context(recording(llm, config.trace))
        engine = AsyncEngine(llm)
        Server(engine, config).run([listener])
    return int(engine.died)


def warn_of_strangers(listener: socket.socket, config: ServerConfig) -> None:
    """Log a warning if other machines can use the server without a key."""
    address = listener.getsockname()[0]
    if config.api_key is None and not ip_address(address.partition("%")[0]).is_loopback:
        logger.warning("whoever reaches %s can use this server, since it has no API key; see --api-key", address)


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
