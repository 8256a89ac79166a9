"""One answer on its way to a client: collected or streamed, and ended when the client disconnects."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import Address
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from minisgl.errors import InvalidRequest, MiniSGLError
from minisgl.server.async_engine import Answer, AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError, as_api_error, to_json
from minisgl.server.formats import Format, Usage
from minisgl.server.messages import Update
from minisgl.server.metrics import HttpRecord, ServerMetrics, record_of
from minisgl.server.requests import EngineRequest, GenerationBody

T = TypeVar("T")
LONG = 1024  # tokens of an answer that takes some milliseconds to write as a whole
MakeFormat = Callable[[Usage], Awaitable[Format]]


class GenerateHandler:
    """Answers the requests that ask for generations."""

    def __init__(self, engine: AsyncEngine, metrics: ServerMetrics, config: ServerConfig) -> None:
        self._engine = engine
        self._metrics = metrics
        self._config = config

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
            self._check_stop(asked.params.stop)
            limit = TimeLimit(_shorter(asked.time_limit, self._engine.config.request_timeout))
            work = self._begin(asked, make_format, record.request_id, request.client)
            answer, usage, style = await limit.keep(until_disconnect(request.receive, work))
        except InvalidRequest as error:
            raise body.with_client_field(error) from error
        record.usage, record.choices, record.streamed = usage, answer.num_choices, asked.streaming
        note = partial(self._note, record, usage, asked.prompt_only)
        if asked.streaming:
            return EventStream(answer, style, limit, note, self._config.max_unread)
        try:
            updates = await limit.keep(until_disconnect(request.receive, _collect(answer)))
        finally:
            answer.abort()
        for update in updates:
            note(update)
        size = sum(len(update.token_ids) for update in updates)
        # In a thread if it is long: other streams are written in the meantime.
        whole = partial(_whole, style, updates)
        return Response(whole() if size < LONG else await asyncio.to_thread(whole), media_type="application/json")

    def _check_stop(self, strings: Iterable[str]) -> None:
        most, longest = self._config.max_stop_strings, self._config.max_stop_length
        if (number := len(tuple(strings))) > most:
            raise InvalidRequest("stop", f"must be at most {most} strings, got {number}; see --max-stop-strings")
        if (length := max(map(len, strings), default=0)) > longest:
            limit = f"must be texts of 1 to {longest} characters, got {length}"
            raise InvalidRequest("stop", f"{limit}; see --max-stop-length")

    async def _begin(
        self, asked: EngineRequest, make_format: MakeFormat, request_id: str, sender: Address | None
    ) -> tuple[Answer, Usage, Format]:
        # Addresses tell clients apart, since all have one API key. Behind a proxy of this host, it's the forwarded one.
        client = "" if sender is None else sender.host
        job = (asked.prompts, asked.params, asked.streaming, asked.user, request_id, client)
        answer = await self._engine.submit(*job)
        try:
            usage = Usage(answer.accepted.result(), asked.params.n)
            return answer, usage, await make_format(usage)
        except BaseException:
            answer.abort()
            raise

    def _note(self, record: HttpRecord, usage: Usage, prompt_only: bool, news: Update | ApiError) -> None:
        if isinstance(news, ApiError):
            record.code = news.code
            return
        if prompt_only:
            news.text, news.token_ids, news.logprobs = "", [], []
            news.finish_reason = news.finish_reason and "length"
        usage.add(news)
        gap = record.note(news)
        if gap is not None:
            self._metrics.observe_gap(gap)


def _whole(style: Format, updates: Sequence[Update]) -> bytes:
    return to_json(style.whole(updates))


async def _collect(answer: Answer) -> list[Update]:
    """One update for each choice, in order."""
    updates = [update async for update in answer.updates()]
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

    async def keep(self, work: Awaitable[T]) -> T:
        """Await ``work``; when the time is over, cancel it and raise `ApiError` 408."""
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError as error:
            message = f"the answer was not finished within the time limit of {self._seconds:g} s"
            raise ApiError(408, message, code="timeout") from error


class EventStream(StreamingResponse):
    """An answer as server-sent events. However the stream ends, the rest of the answer is aborted.

    Events are written where the engine's updates are delivered, so that no task is woken for a token; all of a step for
    this client are one write. While the connection takes no more, updates are merged in the `Answer`, up to
    ``max_unread`` tokens and log-probabilities, beside what sockets hold; more of them end the stream. ``note`` is
    called with every update before it is sent, and with the error that ends the stream, if any.
    """

    def __init__(
        self,
        answer: Answer,
        style: Format,
        limit: TimeLimit,
        note: Callable[[Update | ApiError], None],
        max_unread: int,
    ) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        self._answer = answer
        self._style = style
        self._limit = limit
        self._note = note
        self._max_unread = max_unread
        self._written = asyncio.get_running_loop().create_future()  # all updates, or the error that ends the stream
        self._blocked: asyncio.Task[None] | None = None  # a write that waits for the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        try:
            await until_disconnect(receive, self.stream_response(send))
        except ClientDisconnect:
            pass  # the response has begun: no status can be sent any more
        finally:
            if self._blocked is not None:
                self._blocked.cancel()
            self._answer.abort()

    async def stream_response(self, send: Send) -> None:
        """Send all events; `_write` sends those of the updates."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(self._body(map(to_json, self._style.opening(self._answer.num_choices))))
        self._send, self._answer.listener = send, self._write
        try:
            self._write()  # what has come before there was a listener
            await self._limit.keep(self._written)
            last = [*map(to_json, self._style.closing()), *([] if self._style.typed_events else [b"[DONE]"])]
        except (MiniSGLError, ApiError) as error:  # the status has been sent: an event reports it, without [DONE]
            failure = as_api_error(error)
            self._note(failure)
            last = [to_json(self._style.failed(failure))]
        finally:
            self._answer.listener = None
        if self._blocked is not None:
            await self._blocked
        await send(self._body(last))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _write(self) -> None:
        """Write what is unread, unless the client is still to take what was written before."""
        if self._written.done():
            return
        if self._blocked is not None:
            if (unread := self._answer.unread) > self._max_unread:
                self._answer.abort()
                message = (
                    f"the client does not read its answer as fast as it is generated: {unread} tokens and "
                    f"log-probabilities wait, and at most {self._max_unread} may; read faster, or raise --max-unread"
                )
                self._written.set_exception(ApiError(408, message, code="slow_client"))
            return
        events: list[bytes] = []
        failure: Exception | None = None
        try:
            for update in self._answer.take():
                self._note(update)
                events += self._style.encoded(update)
        except Exception as error:  # of this stream alone: others are written from the same call
            failure = error
        if events and (rest := run_until_wait(self._send(self._body(events)))) is not None:
            self._blocked = asyncio.ensure_future(rest)
            self._blocked.add_done_callback(self._unblock)
        if failure is not None:
            self._written.set_exception(failure)
        elif self._answer.finished:
            self._written.set_result(None)

    def _body(self, data: Iterable[bytes]) -> Message:
        events = map(typed_event if self._style.typed_events else event, data)
        return {"type": "http.response.body", "body": b"".join(events), "more_body": True}

    def _unblock(self, write: asyncio.Task[None]) -> None:
        self._blocked = None
        if not write.cancelled():
            self._write()


def run_until_wait(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run ``work`` at once, without a task, until it waits for the first time. Returns the rest, or None at its end."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration:
        return None
    return _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, None], waits_for: object) -> Generator[Any, Any, None]:
    try:
        yield waits_for  # to the task that takes over: it waits for the same future
    except BaseException:
        steps.close()
        raise
    yield from steps


def event(data: bytes) -> bytes:
    """One server-sent event; ``data`` has no line breaks."""
    return b"data: " + data + b"\n\n"


def typed_event(data: bytes) -> bytes:
    """The same for an object whose first field is its ``type``, which is the event's name too."""
    return b"event: " + data.split(b'"', 4)[3] + b"\n" + event(data)
