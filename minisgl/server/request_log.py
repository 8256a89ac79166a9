"""The outermost layer: every request gets an id and a record, and leaves a line in the log. Plain ASGI."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.logs import FIELDS
from minisgl.server.errors import as_api_error
from minisgl.server.metrics import Metrics
from minisgl.server.records import RequestRecord

logger = logging.getLogger("minisgl.request")

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """Keeps a `RequestRecord` of every request. An error that nobody has turned into an answer becomes one here.

    Args:
        app: answers the requests.
        metrics: told of every request that has ended.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        record.attach(scope)
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            answer = as_api_error(error)
            record.code = answer.code
            if not started:
                await answer.response()(scope, receive, noting)
        finally:
            record.endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.observe(record)
            logger.info("request", extra={FIELDS: _line(record, scope["method"])})


def _request_id(scope: Scope) -> str:
    """The client's id if it is harmless to repeat and to log, else a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _line(record: RequestRecord, method: str) -> dict[str, Any]:
    """The record for the log; times in seconds."""
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "endpoint": f"{method} {record.endpoint}",
        "status": record.status,
        "seconds": round(time.perf_counter() - record.arrived, 6),
    }
    if record.code is not None:
        line["code"] = record.code
    if record.usage is not None:
        line |= {
            "stream": record.streamed,
            "prompt_tokens": record.usage.prompt_tokens,
            "cached_tokens": record.usage.cached_tokens,
            "completion_tokens": record.usage.completion_tokens,
            "queue_seconds": round(record.queue_time, 6),
            "finish_reason": record.finish_reasons + ["abort"] * record.unfinished,
        }
    if record.first_token is not None:
        line["first_token_seconds"] = round(record.first_token - record.arrived, 6)
    return line
