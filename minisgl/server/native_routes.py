"""The endpoints that OpenAI's API has not: SGLang's ``/generate``, and the tokenizer's two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minisgl.server.async_engine import AsyncEngine
from minisgl.server.generate_format import GenerateFormat
from minisgl.server.generating import Generator
from minisgl.server.json_body import JsonRoute
from minisgl.server.native_requests import DetokenizeRequest, GenerateRequest, TokenizeRequest
from minisgl.server.openai_routes import check_model
from minisgl.server.openapi import GENERATES, TAKES_BODY, errors, streams
from minisgl.server.replies import DetokenizeReply, GenerateReply, TokenizeReply
from minisgl.server.text_service import TextService


def native_routes(engine: AsyncEngine, generator: Generator, texts: TextService) -> APIRouter:
    """Generate, tokenize and detokenize.

    Args:
        engine: has the model.
        generator: answers.
        texts: tokenizes.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/generate", responses={**streams(GenerateReply | list[GenerateReply]), **errors(*set(GENERATES) - {404})}
    )
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue texts or token ids."""

        async def generate_format(prompt_lens: Sequence[int]) -> GenerateFormat:
            return GenerateFormat(prompt_lens, body.sampling_params.n, body.several)

        return await generator.answer(body, request, generate_format)

    @router.post("/tokenize", response_model=TokenizeReply, responses=errors(*TAKES_BODY))
    async def tokenize(body: TokenizeRequest) -> Any:
        """Token ids of a text or a conversation."""
        check_model(engine, body.model)
        tokens = await texts.tokenize(body.text)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_seq_len}

    @router.post("/detokenize", response_model=DetokenizeReply, responses=errors(*TAKES_BODY))
    async def detokenize(body: DetokenizeRequest) -> Any:
        """Text of token ids."""
        check_model(engine, body.model)
        text = await texts.detokenize(body.tokens)
        return {"prompt": text, "text": text}

    return router
