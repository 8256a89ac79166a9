"""From a body to an answer: what all generating endpoints do, whatever they are called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from fastapi import Request
from fastapi.responses import Response

from minisgl.errors import InvalidRequest
from minisgl.messages import Update
from minisgl.server.answer import Answer
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.errors import ApiError, to_json
from minisgl.server.formats import Format, Usage
from minisgl.server.metrics import Metrics
from minisgl.server.records import RequestRecord, record_of
from minisgl.server.requests import EngineRequest, Generates
from minisgl.server.streaming import EventStream, TimeLimit, until_disconnect

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
