"""One answer on its way to a client: collected or streamed, and ended when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from minisgl.errors import InvalidRequest, MiniSGLError
from minisgl.server.async_engine import Answer, AsyncEngine
from minisgl.server.errors import ApiError, as_api_error, to_json
from minisgl.server.formats import Format, Usage
from minisgl.server.messages import Update
from minisgl.server.metrics import Metrics, RequestRecord, record_of
from minisgl.server.requests import EngineRequest, Generates

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


MakeFormat = Callable[[Sequence[int]], Awaitable[Format]]
"""Makes what writes an answer, once the tokens of each prompt are known."""


class Generator:
    """Answers the requests that ask for generations.

    Args:
        engine: generates.
        metrics: counts.
    """

    def __init__(self, engine: AsyncEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def answer(self, body: Generates, request: Request, make_format: MakeFormat) -> Response:
        """The answer to one request, whole or as a stream.

        Raises:
            InvalidRequest, QueueFull, EngineDead, GenerationFailed: from the engine.
            ApiError: 408; there was a time limit, and it has passed.
            ClientDisconnect: the client has left.
        """
        record = record_of(request)
        try:
            asked = body.engine_request()
            limit = TimeLimit(_shorter(asked.time_limit, self._engine.config.request_timeout))
            work = self._begin(asked, make_format)
            answer, written = await limit.keep(until_disconnect(request.receive, work))
        except InvalidRequest as error:
            raise body.in_own_words(error) from error
        usage = record.usage = Usage(answer.accepted.result(), asked.params.n)
        record.choices, record.streamed = answer.num_choices, asked.streaming
        note = partial(self._note, record, usage)
        if asked.streaming:
            return EventStream(answer, written, usage, limit, note)
        try:
            updates = await until_disconnect(request.receive, _collect(answer, limit))
        finally:
            answer.abort()
        for update in updates:
            note(update)
        return Response(to_json(written.whole(updates, usage)), media_type="application/json")

    async def _begin(self, asked: EngineRequest, make_format: MakeFormat) -> tuple[Answer, Format]:
        answer = await self._engine.submit(asked.prompts, asked.params, asked.streaming, asked.user)
        try:
            return answer, await make_format(answer.accepted.result())
        except BaseException:
            answer.abort()
            raise

    def _note(self, record: RequestRecord, usage: Usage, news: Update | ApiError) -> None:
        if isinstance(news, ApiError):
            record.code = news.code
            return
        usage.add(news)
        gap = record.note(news)
        if gap is not None:
            self._metrics.observe_gap(gap)


async def _collect(answer: Answer, limit: TimeLimit) -> list[Update]:
    """One update a choice, in the order of the choices."""
    updates = [update async for update in limit.updates(answer)]
    return sorted(updates, key=lambda update: update.choice)


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
