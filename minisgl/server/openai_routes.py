"""OpenAI's endpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minisgl.server.async_engine import AsyncEngine
from minisgl.server.chat_format import ChatFormat
from minisgl.server.chat_request import ChatRequest
from minisgl.server.completion_format import CompletionFormat
from minisgl.server.completion_request import CompletionRequest
from minisgl.server.echo import echo
from minisgl.server.errors import ApiError
from minisgl.server.generating import Generator
from minisgl.server.json_body import JsonRoute
from minisgl.server.openapi import GENERATES, READS, errors, streams
from minisgl.server.replies import ChatReply, CompletionReply, ModelList, ModelReply
from minisgl.server.text_service import TextService
from minisgl.server.tool_parsers import ToolSyntax


def openai_routes(
    engine: AsyncEngine, generator: Generator, texts: TextService, syntax: ToolSyntax | None
) -> APIRouter:
    """Chat, completions and models.

    Args:
        engine: has the model.
        generator: answers.
        texts: tokenizes prompts that are echoed.
        syntax: how the model calls tools; None if it cannot.
    """
    router = APIRouter(prefix="/v1", route_class=JsonRoute)
    created = int(time.time())

    @router.post("/chat/completions", responses={**streams(ChatReply), **errors(*GENERATES)})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        check_model(engine, body.model)
        make_reader = body.reader_maker(syntax)

        async def chat_format(prompt_lens: Sequence[int]) -> ChatFormat:
            return ChatFormat(engine.model, engine.tokenizer, body.logprobs, body.shows_usage, make_reader)

        return await generator.answer(body, request, chat_format)

    @router.post("/completions", responses={**streams(CompletionReply), **errors(*GENERATES)})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        check_model(engine, body.model)

        async def completion_format(prompt_lens: Sequence[int]) -> CompletionFormat:
            echoes = [await echo(engine, texts, prompt, body.logprobs) for prompt in body.prompts if body.echo]
            each_choice = [each for each in echoes for _ in range(body.n)]
            wants_logprobs = body.logprobs is not None
            return CompletionFormat(engine.model, engine.tokenizer, wants_logprobs, body.shows_usage, each_choice)

        return await generator.answer(body, request, completion_format)

    def described() -> dict[str, Any]:
        model = {"id": engine.model, "object": "model", "created": created, "owned_by": "minisgl"}
        return {**model, "max_model_len": engine.max_seq_len}

    @router.get("/models", response_model=ModelList, responses=errors(*READS))
    async def models() -> Any:
        """List the one model."""
        return {"object": "list", "data": [described()]}

    @router.get("/models/{model:path}", response_model=ModelReply, responses=errors(*READS, 404))
    async def one_model(model: str) -> Any:
        """Describe the one model."""
        check_model(engine, model)
        return described()

    return router


def check_model(engine: AsyncEngine, model: str | None) -> None:
    """Raise `ApiError` if the client wants another model. A name is compared, never opened."""
    if model is not None and model != engine.model:
        message = f"the model {model!r} does not exist; this server has {engine.model!r}"
        raise ApiError(404, message, "model", "model_not_found")
