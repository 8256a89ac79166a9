"""Answers on their way out: server-sent events, and clients that leave before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from minisgl.errors import MiniSGLError
from minisgl.server.answer import Answer
from minisgl.server.errors import as_api_error, to_json
from minisgl.server.formats import Format, Usage

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it when the client leaves.

    Raises:
        ClientDisconnect: the client has left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """An answer as server-sent events. However the stream ends, what is left of the answer is aborted.

    Args:
        answer: from the engine.
        style: writes the chunks.
        usage: counts the tokens.
        include_usage: whether the last chunk shows them.
    """

    def __init__(self, answer: Answer, style: Format, usage: Usage, include_usage: bool) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(_events(answer, style, usage, include_usage), headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        try:
            await until_disconnect(receive, self.stream_response(send))
        except ClientDisconnect:
            pass  # the response has begun, so there is nobody left to tell and nothing to log
        finally:
            self._answer.abort()


async def _events(answer: Answer, style: Format, usage: Usage, include_usage: bool) -> AsyncIterator[bytes]:
    try:
        for chunk in style.opening(answer.num_choices):
            yield event(to_json(chunk))
        async for update in answer.updates():
            usage.add(update)
            visible = style.chunk(update)
            if visible is not None:
                yield event(to_json(visible))
        if include_usage:
            yield event(to_json(style.usage_chunk(usage)))
        yield event(b"[DONE]")
    except MiniSGLError as error:  # the status has left already: an event must tell, and no [DONE] follows
        yield event(to_json(as_api_error(error).body()))


def event(data: bytes) -> bytes:
    """One server-sent event; ``data`` has no line breaks."""
    return b"data: " + data + b"\n\n"
