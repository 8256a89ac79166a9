"""The FastAPI application: its routes, and the middleware that checks keys, limits bodies and logs requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import MiniSGLError
from minisgl.logs import FIELDS
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError, as_api_error
from minisgl.server.live.page import add_live_page
from minisgl.server.metrics import HttpRecord, ServerMetrics, monitoring_routes, record_of
from minisgl.server.native_routes import native_routes
from minisgl.server.openai_routes import TextService, openai_routes
from minisgl.server.openapi import describe_api
from minisgl.server.streaming import GenerateHandler
from minisgl.server.tools import syntax_for
from minisgl.server.worker_routes import worker_routes

logger = logging.getLogger("minisgl.request")

_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_CLIENT_CLOSED_REQUEST = 499  # what web servers log for a client that has left before its answer
_LONGEST_PATH = 80  # characters of an unknown path that are logged
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


def create_app(engine: AsyncEngine, config: ServerConfig | None = None) -> FastAPI:
    """Make an app that starts ``engine`` with its event loop and stops it at the end."""
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    # FastAPI's own documentation pages load scripts from other hosts; /openapi.json itself is enough.
    app = FastAPI(title="minisgl", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.strict = config.strict
    app.state.body_limits = config.max_body_fields, config.max_body_values
    app.state.stop_limits = config.max_stop_strings, config.max_stop_length
    engine.model = config.served_model_name or engine.model
    for kind in (MiniSGLError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    metrics = ServerMetrics(engine)
    handler = GenerateHandler(engine, metrics, config)
    texts = TextService(engine.tokenizer.path, config.max_tokenize_chars, config.allow_control_tokens)
    syntax = syntax_for(config.tool_parser, engine.tokenizer.chat_template)
    _include(app, openai_routes(engine, handler, texts, syntax))
    _include(app, native_routes(engine, handler, texts))
    _include(app, monitoring_routes(engine, metrics, config.health_timeout))
    _include(app, worker_routes(engine))
    describe_api(app, engine.model, with_key=config.api_key is not None)
    if config.live_page:
        add_live_page(app, engine)
    # The middleware added last sees a request first.
    app.add_middleware(BodyLimit, limit=config.max_body_size, timeout=config.body_timeout)
    if config.api_key is not None:
        app.add_middleware(KeyGuard, key=config.api_key)
    if config.cors_origin:  # browsers ask without a key whether they may send one
        app.add_middleware(CORSMiddleware, allow_origins=config.cors_origin, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, metrics=metrics)
    return app


def _include(app: FastAPI, router: APIRouter) -> None:
    """Include a router, and answer HEAD as GET at all of its paths (RFC 9110, section 9.3.2).

    Load balancers probe with HEAD, which FastAPI does not take by itself. uvicorn leaves out the body.
    """
    app.include_router(router)
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                response_model=route.response_model,
                response_class=route.response_class,
                include_in_schema=False,
            )


async def _on_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    record_of(request).code = answer.code
    return answer.response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


class KeyGuard:
    """Middleware that checks the API key before a body is read."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_open(scope["path"]) or self._knows_key(scope):
            await self._app(scope, receive, send)
        else:
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            await _refuse(ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE), scope, receive, send)

    def _knows_key(self, scope: Scope) -> bool:
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        same = hmac.compare_digest(key, self._expected)  # takes the same time however much of a guess is right
        return same and scheme.lower() == b"bearer"


def is_open(path: str) -> bool:
    """Whether a path needs no key, because it shows nothing about requests."""
    return path in ("/health", "/ping", "/ui") or (path.startswith("/ui/") and path != "/ui/events")


class BodyLimit:
    """Middleware that refuses bodies that come later than ``timeout`` seconds, or have more than ``limit`` bytes.

    The length is taken from the headers, and counted while the body is read.
    """

    def __init__(self, app: ASGIApp, limit: int, timeout: float) -> None:
        self._app = app
        self._limit = limit
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > self._limit:
            await _refuse(self._error(), scope, receive, send)
            return
        size, complete = 0, False
        due = asyncio.get_running_loop().time() + self._timeout

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                late = f"the body has not come within {self._timeout:g} s; send it faster, or raise --body-timeout"
                raise ApiError(408, late, code="timeout") from None
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._error()
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    def _error(self) -> ApiError:
        message = f"the body is larger than {self._limit} bytes; send less, or raise --max-body-size"
        return ApiError(413, message, code="body_too_large")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer from within the middleware: an error raised there would miss the headers that browsers ask for."""
    record_of(Request(scope)).code = error.code
    await error.response()(scope, receive, send)


class RequestLog:
    """Middleware that logs and counts every request, and turns unhandled errors into answers."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = HttpRecord(_request_id(scope))
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
            logger.info("request", extra={FIELDS: _log_fields(record, scope)})


def _request_id(scope: Scope) -> str:
    """The client's id if it is harmless to repeat and to log, else a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _log_fields(record: HttpRecord, scope: Scope) -> dict[str, Any]:
    path = record.endpoint if "route" in scope else scope["path"][:_LONGEST_PATH]
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "endpoint": f"{scope['method']} {path}",
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
