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
from minisgl.server.metrics import HttpRecord, ServerMetrics, record_of
from minisgl.server.requests import EngineRequest, GenerationBody

T = TypeVar("T")
MakeFormat = Callable[[Sequence[int]], Awaitable[Format]]  # from the number of tokens of each prompt


class GenerateHandler:
    """Answers the requests that ask for generations."""

    def __init__(self, engine: AsyncEngine, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def answer(self, body: GenerationBody, request: Request, make_format: MakeFormat) -> Response:
        """Answer one request, whole or as a stream.

        Raises:
            InvalidRequest, QueueFull, EngineDead, GenerationFailed: from the engine.
            ApiError: 408; the time limit has passed.
            ClientDisconnect: the client has left.
        """
        record = record_of(request)
        try:
            asked = body.engine_request()
            limit = TimeLimit(_shorter(asked.time_limit, self._engine.config.request_timeout))
            work = self._begin(asked, make_format)
            answer, written = await limit.keep(until_disconnect(request.receive, work))
        except InvalidRequest as error:
            raise body.with_client_field(error) from error
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

    def _note(self, record: HttpRecord, usage: Usage, news: Update | ApiError) -> None:
        if isinstance(news, ApiError):
            record.code = news.code
            return
        usage.add(news)
        gap = record.note(news)
        if gap is not None:
            self._metrics.observe_gap(gap)


async def _collect(answer: Answer, limit: TimeLimit) -> list[Update]:
    """One update for each choice, in order."""
    updates = [update async for update in limit.updates(answer)]
    return sorted(updates, key=lambda update: update.choice)


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; when the client leaves, cancel it and raise `ClientDisconnect`."""
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
    """The time by which a request must be answered: ``seconds`` from now, or None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``; when the time is over, cancel it and raise `ApiError` 408."""
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError as error:
            message = f"the answer was not finished within the time limit of {self._seconds:g} s"
            raise ApiError(408, message, code="timeout") from error

    async def updates(self, answer: Answer) -> AsyncIterator[Update]:
        """Yield the updates of ``answer``. Raises `ApiError` 408 when the time is over."""
        updates = answer.updates()
        if self._end is None:  # without a timeout, each token takes the shorter way
            async for update in updates:
                yield update
            return
        while (following := await self.keep(_next(updates))) is not None:
            yield following


async def _next(updates: AsyncIterator[Update]) -> Update | None:
    return await anext(updates, None)


class EventStream(StreamingResponse):
    """An answer as server-sent events. However the stream ends, the rest of the answer is aborted.

    ``note`` is called with every update before it is sent, and with the error that ends the stream, if any.
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
            pass  # the response has begun: no status can be sent any more
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
    except (MiniSGLError, ApiError) as error:  # the status has been sent: an event reports it, and no [DONE] follows
        failure = as_api_error(error)
        note(failure)
        yield event(to_json(failure.body()))


def event(data: bytes) -> bytes:
    """One server-sent event; ``data`` has no line breaks."""
    return b"data: " + data + b"\n\n"
