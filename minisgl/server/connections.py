"""Connections: how many there may be, and how long a client may take to send a request or to read its answer."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.server.config import ServerConfig
from minisgl.server.errors import RETRY_AFTER, ApiError, to_json

logger = logging.getLogger(__name__)

BACKLOG = 1024  # connections that the kernel keeps until they are accepted; it costs them nothing, so no option
_OTHER_FILES = 256  # that this process needs beside connections
_LOG_INTERVAL = 60.0  # seconds between two log lines about the same trouble


class _Http(h11.Connection):
    """HTTP as h11 speaks it, without its checks of each chunk: a quarter of what a streamed token costs this process.

    They find nothing, as the headers of the response are out and its end is not.
    """

    _is_chunked = False  # whether the response under way is

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if type(event) is h11.Data and event.data and self._is_chunked and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        written = super().send(event)
        if type(event) is h11.Response and written is not None:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in written.lower()
        return written


class Connection(H11Protocol):
    """A client's connection, closed when it is one too many, or when the client lets us wait for too long."""

    most: int  # connections at a time
    header_timeout: float  # seconds, as is the next
    stall_timeout: float

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = _Http(h11.SERVER)  # its limit of the size of headers is h11's, as uvicorn's is

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._headers_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            _log_rarely("%d connections are open, which is the most; see --max-connections", self.most)
            transport.write(_refusal(self.most))
            self._close()
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timers()
        elif self._headers_due is None and not self.transport.is_closing():
            self._await_headers()  # of the next request, or the rest of a body that nobody reads any more

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stall_timeout, self._end_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    def _await_headers(self) -> None:
        self._headers_due = self.loop.call_later(self.header_timeout, self._close)

    def _cancel_timers(self) -> None:
        for timer in (self._headers_due, self._stalled):
            if timer is not None:
                timer.cancel()
        self._headers_due = None

    def _close(self) -> None:
        """Close once everything is written, or when the client does not read it."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.stall_timeout, self.transport.abort)

    def _end_stalled(self) -> None:
        seconds = self.stall_timeout
        logger.warning("closed a connection: its client has read nothing for %g s; see --stall-timeout", seconds)
        self.transport.abort()


def connection_class(config: ServerConfig) -> type[Connection]:
    """Make the class of a server's connections; fewer may be open if the process may not open as many files."""
    most = config.max_connections
    wanted = most + BACKLOG + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            most = max(1, min(most, soft - _OTHER_FILES))
            logger.warning("takes %d connections at most: this process may open %d files (see ulimit -n)", most, soft)
    timeouts = {"header_timeout": config.header_timeout, "stall_timeout": config.stall_timeout}
    return type("LimitedConnection", (Connection,), {"most": most, **timeouts})


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop; the one that it repeats for want of files once in a while only."""
    if "out of system resource" in context.get("message", ""):
        _log_rarely("cannot accept connections: %s", context.get("exception"))
    else:
        loop.default_exception_handler(context)


_logged: dict[str, float] = {}  # when a message was logged last


def _log_rarely(message: str, *values: object) -> None:
    now = time.monotonic()
    if now - _logged.get(message, -_LOG_INTERVAL) >= _LOG_INTERVAL:
        _logged[message] = now
        logger.error(message, *values)


def _refusal(most: int) -> bytes:
    message = f"{most} connections are open, which is the most; try again later"
    body = to_json(ApiError(503, message, code="too_many_connections").body())
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: {RETRY_AFTER}\r\n"
    return b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n" + head.encode() + b"\r\n" + body
