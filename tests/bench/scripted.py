"""Requests and records made by hand, and a server that answers by rote, whatever it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from minisgl.bench.client import Client, Outcome, RequestRecord, ServerAddress
from minisgl.bench.load import PlannedRequest


def planned(index: int = 0, **fields: Any) -> PlannedRequest:
    return PlannedRequest(**{"index": index, "input_len": 4, "output_len": 3, **fields})


def record(due: float, *token_times: float, tokens: int | None = None, **fields: Any) -> RequestRecord:
    """A request that finished with one token at each of these times, unless told otherwise."""
    defaults: dict[str, Any] = {
        "planned": planned(),
        "due": due,
        "sent": due,
        "ended": token_times[-1] if token_times else due,
        "outcome": Outcome.FINISHED,
        "status": 200,
        "token_times": list(token_times),
        "tokens": len(token_times) if tokens is None else tokens,
    }
    return RequestRecord(**{**defaults, **fields})


Script = Callable[["Conversation"], Awaitable[None]]


class Conversation:
    """One connection, after its request has been read.

    Args:
        head: of the request.
        body: of the request.
        writer: to the client.
    """

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """In one piece, that arrives before anything else is sent."""
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0.005)

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    async def event(self, data: dict[str, Any] | str) -> None:
        """An event in a chunk of its own."""
        await self.send(chunk(event(data)))

    async def json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        await self.send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))


def event(data: dict[str, Any] | str) -> bytes:
    return b"data: %b\n\n" % (data if isinstance(data, str) else json.dumps(data)).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(piece: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens}}


ERROR = {"error": {"message": "no luck", "type": "server_error", "param": None, "code": None}}


def ask(script: Script, *requests: PlannedRequest, timeout: float = 20.0) -> list[RequestRecord]:
    """What a client makes of a server that follows ``script`` for each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        try:
            await script(Conversation(head, await reader.readexactly(length), reader, writer))
        except ConnectionError:
            pass  # the client has left
        finally:
            writer.close()

    async def scenario() -> list[RequestRecord]:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            client = Client(ServerAddress("127.0.0.1", port, "a-model", 100), seed=0, timeout=timeout)
            records = list(await asyncio.gather(*(client.ask(planned) for planned in requests)))
            assert client.in_flight == 0
            assert client.streaming == 0
        return records

    return asyncio.run(scenario())
