"""Answers on their way out: server-sent events, clients that leave before the end, and time that runs out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from minisgl.errors import MiniSGLError
from minisgl.messages import Update
from minisgl.server.answer import Answer
from minisgl.server.errors import ApiError, as_api_error, to_json
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


class TimeLimit:
    """The time by which a request must be answered. Made in the event loop when the request begins.

    Args:
        seconds: from now on; None is no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, or cancel it when the time is over.

        Raises:
            ApiError: 408.
        """
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError as error:
            message = f"the answer was not finished within the time limit of {self._seconds:g} s"
            raise ApiError(408, message, code="timeout") from error

    async def updates(self, answer: Answer) -> AsyncIterator[Update]:
        """The updates of ``answer``, as long as there is time. Raises `ApiError` when it is over."""
        updates = answer.updates()
        if self._end is None:  # without a limit, the way of every token is the shorter one
            async for update in updates:
                yield update
            return
        while (following := await self.keep(_next(updates))) is not None:
            yield following


async def _next(updates: AsyncIterator[Update]) -> Update | None:
    return await anext(updates, None)


class EventStream(StreamingResponse):
    """An answer as server-sent events. However the stream ends, what is left of the answer is aborted.

    Args:
        answer: from the engine.
        style: writes the chunks.
        usage: what ``note`` has counted.
        limit: until when the client waits.
        note: told of every update before it leaves, and of the error that ends the stream if one does.
    """

    def __init__(
        self,
        answer: Answer,
        style: Format,
        usage: Usage,
        limit: TimeLimit,
        note: Callable[[Update | ApiError], None],
    ) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(_events(answer, style, usage, limit, note), headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        try:
            await until_disconnect(receive, self.stream_response(send))
        except ClientDisconnect:
            pass  # the response has begun, so there is nobody left to tell and nothing to log
        finally:
            self._answer.abort()


async def _events(
    answer: Answer, style: Format, usage: Usage, limit: TimeLimit, note: Callable[[Update | ApiError], None]
) -> AsyncIterator[bytes]:
    try:
        for chunk in style.opening(answer.num_choices):
            yield event(to_json(chunk))
        async for update in limit.updates(answer):
            note(update)
            visible = style.chunk(update)
            if visible is not None:
                yield event(to_json(visible))
        for chunk in style.closing(usage):
            yield event(to_json(chunk))
        yield event(b"[DONE]")
    except (MiniSGLError, ApiError) as error:  # the status has left: an event must tell, and no [DONE] follows
        told = as_api_error(error)
        note(told)
        yield event(to_json(told.body()))


def event(data: bytes) -> bytes:
    """One server-sent event; ``data`` has no line breaks."""
    return b"data: " + data + b"\n\n"
