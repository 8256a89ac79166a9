"""The server process: a socket, an engine in its thread, and uvicorn between them."""

from __future__ import annotations

import errno
import signal
import socket
import sys
from dataclasses import asdict
from types import FrameType

import uvicorn

from minisgl.core.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.server.app import create_app
from minisgl.server.async_engine import AsyncEngine

LAST_WORDS_TIMEOUT = 5
"""Seconds that clients have to read the end of their answers when the server stops."""


class Server(uvicorn.Server):
    """uvicorn, which stops the engine before it waits for the clients, and stops when the engine dies.

    Args:
        engine: to serve.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(uvicorn.Config(create_app(engine), timeout_graceful_shutdown=LAST_WORDS_TIMEOUT))
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


def serve(config: EngineConfig, host: str, port: int) -> int:
    """Load the model and serve it until SIGTERM or SIGINT, which end the process with exit code 0.

    Returns:
        1 if the engine died.

    Raises:
        ConfigError: the address cannot be used, or an option cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn passes on to these what it caught
        signal.signal(number, _leave)
    listener = bind(host, port)
    with LLM(**asdict(config)) as llm:
        engine = AsyncEngine(llm)
        Server(engine).run([listener])
    return int(engine.died)


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
