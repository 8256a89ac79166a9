"""One HTTP request on a connection of its own, as cheap as Python can make it.

A load generator must not be what it measures. A thousand streams bring tens of thousands of pieces a second, and a
client library for all of HTTP takes longer for each than the server does. This one knows what such a test needs
(HTTP/1.1, RFC 9112): a request, and a response in chunks, of a known length, or until the connection ends. When a piece
arrives it takes down the time and the bytes; what they mean is read after the end.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum


class End(Enum):
    """How an exchange ended."""

    COMPLETE = "the response is complete"
    CLOSED = "the connection closed before the end of the response"
    GARBLED = "the response is no HTTP"
    LEFT = "the client left"


class Exchange(asyncio.Protocol):
    """Writes a request as soon as it is connected, and reads the response.

    Args:
        request: all bytes of it; it must ask for ``Connection: close``.
        leave_after: pieces of the body after which to disconnect, None for never.
    """

    def __init__(self, request: bytes, leave_after: int | None = None) -> None:
        self.finished: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.status = 0
        """Of the response; 0 until it has begun."""
        self.body = bytearray()
        """What has come of it, without the framing."""
        self.times: list[float] = []
        """When each piece of the body came, by `time.perf_counter`."""
        self.lengths: list[int] = []
        """How long the body was then, in bytes."""
        self.ended = 0.0
        """When it was over."""
        self._request = request
        self._leave_after = leave_after
        self._unread = bytearray()
        self._remaining: int | None = None
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write the request (asyncio)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)
        if self._leave_after == 0:
            self._end(End.LEFT)

    def data_received(self, data: bytes) -> None:
        """Take down what has come (asyncio)."""
        now = time.perf_counter()
        if self.finished.done():
            return
        self._unread += data
        length = len(self.body)
        try:
            end = self._read()
        except ValueError:  # a status or a length that is no number
            end = End.GARBLED
        if len(self.body) > length:
            self.times.append(now)
            self.lengths.append(len(self.body))
            if end is None and len(self.times) == self._leave_after:
                end = End.LEFT
        if end is not None:
            self._end(end)

    def connection_lost(self, error: Exception | None) -> None:
        """The other end has closed, or this one has (asyncio)."""
        if not self.finished.done():
            until_closed = self.status and not self._chunked and self._remaining is None and error is None
            self._end(End.COMPLETE if until_closed else End.CLOSED)

    def abandon(self) -> None:
        """Drop the connection, and whatever was to be sent on it."""
        self._transport.abort()

    def _end(self, end: End) -> None:
        self.ended = time.perf_counter()
        self.finished.set_result(end)
        self._transport.close()

    def _read(self) -> End | None:
        if not self.status and not self._read_head():
            return None
        if self._chunked:
            return self._read_chunks()
        self.body += self._unread
        self._unread.clear()
        return End.COMPLETE if self._remaining is not None and len(self.body) >= self._remaining else None

    def _read_head(self) -> bool:
        """Status and headers; False while they are not complete."""
        end = self._unread.find(b"\r\n\r\n")
        if end < 0:
            return False
        status, *headers = bytes(self._unread[:end]).split(b"\r\n")
        del self._unread[: end + 4]
        version, code, *_ = status.split(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError("not HTTP")
        self.status = int(code)
        for header in headers:
            name, _, value = header.partition(b":")
            match name.lower():
                case b"content-length":
                    self._remaining = int(value)
                case b"transfer-encoding":
                    self._chunked = b"chunked" in value.lower()
        return True

    def _read_chunks(self) -> End | None:
        """All chunks that are complete."""
        unread, start = self._unread, 0
        while (line_end := unread.find(b"\r\n", start)) >= 0:
            size = int(unread[start:line_end].partition(b";")[0], 16)
            if size == 0:
                return End.COMPLETE
            after = line_end + 2 + size
            if len(unread) < after + 2:
                break
            self.body += unread[line_end + 2 : after]
            start = after + 2
        del unread[:start]
        return None
