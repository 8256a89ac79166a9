"""The application: all routes over one engine, and the layers around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from minisgl.errors import MiniSGLError
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.errors import as_api_error
from minisgl.server.generating import Generator
from minisgl.server.guards import BodyLimit, KeyGuard
from minisgl.server.live.page import add_live_page
from minisgl.server.metrics import Metrics
from minisgl.server.native_routes import native_routes
from minisgl.server.openai_routes import openai_routes
from minisgl.server.openapi import describe
from minisgl.server.records import record_of
from minisgl.server.request_log import RequestLog
from minisgl.server.text_service import TextService
from minisgl.server.tool_parsers import syntax_for
from minisgl.server.watching import watching_routes

_CLIENT_CLOSED_REQUEST = 499
"""What web servers log for a client that left; nobody receives it."""


def create_app(engine: AsyncEngine, config: ServerConfig | None = None) -> FastAPI:
    """An app that starts ``engine`` with its event loop and stops it at the end."""
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    # The pages that FastAPI makes of the document load programs from elsewhere; the document itself is enough.
    app = FastAPI(title="minisgl", lifespan=lifespan, docs_url=None, redoc_url=None)
    for kind in (MiniSGLError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    metrics = Metrics(engine)
    generator = Generator(engine, metrics)
    texts = TextService(engine.tokenizer.path)
    syntax = syntax_for(config.tool_parser, engine.tokenizer.chat_template)
    app.include_router(openai_routes(engine, generator, texts, syntax))
    app.include_router(native_routes(engine, generator, texts))
    app.include_router(watching_routes(engine, metrics, config.health_timeout))
    describe(app, engine.model, with_key=config.api_key is not None)
    if config.live_page:
        add_live_page(app, engine)
    _add_layers(app, config, metrics)
    return app


def _add_layers(app: FastAPI, config: ServerConfig, metrics: Metrics) -> None:
    """What a request passes on its way to a route: the layer added last comes first."""
    app.add_middleware(BodyLimit, limit=config.max_body_size)
    if config.api_key is not None:
        app.add_middleware(KeyGuard, key=config.api_key)
    if config.cors_origin:  # browsers ask without a key whether they may send one
        app.add_middleware(CORSMiddleware, allow_origins=config.cors_origin, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, metrics=metrics)


async def _on_error(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    record_of(request).code = told.code
    return told.response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
