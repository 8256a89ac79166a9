"""The routes: OpenAI's API over an `AsyncEngine`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minisgl.errors import InvalidRequest, MiniSGLError
from minisgl.messages import Update
from minisgl.server.answer import Answer
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.errors import ApiError, as_api_error, to_json
from minisgl.server.formats import ChatFormat, CompletionFormat, Format, Usage
from minisgl.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from minisgl.server.streaming import EventStream, until_disconnect

_CLIENT_CLOSED_REQUEST = 499
"""What web servers log for a client that left; nobody receives it."""


def create_app(engine: AsyncEngine) -> FastAPI:
    """An app that starts ``engine`` with its event loop and stops it at the end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(title="minisgl", lifespan=lifespan)
    created = int(time.time())
    for kind in (ApiError, MiniSGLError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _generate(engine, body, ChatFormat, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _generate(engine, body, CompletionFormat, request)

    @app.get("/v1/models")
    async def models() -> Any:
        model = {"id": engine.model, "object": "model", "created": created, "owned_by": "minisgl"}
        return {"object": "list", "data": [{**model, "max_model_len": engine.max_seq_len}]}

    @app.get("/health")
    async def health() -> Any:
        if engine.error is not None:
            raise engine.error
        return {"status": "ok"}

    return app


async def _generate(engine: AsyncEngine, body: GenerationRequest, style: type[Format], request: Request) -> Response:
    if body.model != engine.model:
        message = f"the model {body.model!r} does not exist; this server has {engine.model!r}"
        raise ApiError(404, message, "model", "model_not_found")
    try:
        params = body.sampling_params()
        submission = engine.submit(body.prompts, params, body.stream, body.user or "")
        answer = await until_disconnect(request.receive, submission)
    except InvalidRequest as error:
        raise body.in_own_words(error) from error
    usage = Usage(answer.accepted.result(), params.n)
    written = style(engine.model, engine.tokenizer, params.logprobs is not None, body.stream and body.include_usage)
    if body.stream:
        return EventStream(answer, written, usage, body.include_usage)
    try:
        updates = await until_disconnect(request.receive, _collect(answer))
    finally:
        answer.abort()
    for update in updates:
        usage.add(update)
    return Response(to_json(written.whole(updates, usage)), media_type="application/json")


async def _collect(answer: Answer) -> list[Update]:
    return [update async for update in answer.updates()]


async def _on_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
