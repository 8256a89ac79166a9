"""OpenAI's endpoints: chat completions, completions with their echoes, and models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minisgl.errors import InvalidRequest, QueueFull, check_token_ids
from minisgl.request import TokenLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.server.async_engine import Answer, AsyncEngine
from minisgl.server.chat_request import ChatRequest
from minisgl.server.errors import ApiError
from minisgl.server.formats import LEAST_LOGPROB, ChatFormat, CompletionFormat, Echo, Usage
from minisgl.server.json_body import JsonRoute
from minisgl.server.messages import Conversation
from minisgl.server.openapi import (
    GENERATES,
    READS,
    ChatReply,
    CompletionReply,
    ModelList,
    ModelReply,
    ResponsesReply,
    error_responses,
    stream_responses,
)
from minisgl.server.requests import CompletionRequest
from minisgl.server.responses_format import ResponsesFormat
from minisgl.server.responses_request import ResponsesRequest
from minisgl.server.streaming import GenerateHandler
from minisgl.server.tools import ToolSyntax
from minisgl.tokenizer import Tokenizer

SCORES_AT_ONCE = 64  # beginnings of an echoed prompt that are in the engine's queue together, if it takes twice as many
_RETRY_INTERVAL = 0.02  # seconds between two attempts to score a token while the queue is full
_FORCING_BIAS = 100.0


def openai_routes(
    engine: AsyncEngine, handler: GenerateHandler, texts: TextService, syntax: ToolSyntax | None
) -> APIRouter:
    """``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses`` and ``/v1/models``.

    Without ``syntax``, no tools can be called.
    """
    router = APIRouter(prefix="/v1", route_class=JsonRoute)
    created = int(time.time())

    @router.post("/chat/completions", responses={**stream_responses(ChatReply), **error_responses(*GENERATES)})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        check_model(engine, body.model)
        make_reader = body.reader_maker(syntax)

        async def chat_format(usage: Usage) -> ChatFormat:
            return ChatFormat(engine.model, engine.tokenizer, usage, body.logprobs, body.usage_chunks, make_reader)

        return await handler.answer(body, request, chat_format)

    @router.post("/completions", responses={**stream_responses(CompletionReply), **error_responses(*GENERATES)})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        check_model(engine, body.model)

        async def completion_format(usage: Usage) -> CompletionFormat:
            echoes = [await _echo(engine, texts, prompt, body.logprobs) for prompt in body.prompts if body.echo]
            each_choice = [each for each in echoes for _ in range(body.n)]
            logprobs = body.logprobs is not None
            return CompletionFormat(engine.model, engine.tokenizer, usage, logprobs, body.usage_chunks, each_choice)

        return await handler.answer(body, request, completion_format)

    @router.post("/responses", responses={**stream_responses(ResponsesReply), **error_responses(*GENERATES)})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation, by OpenAI's newer API."""
        check_model(engine, body.model)
        chat = body.as_chat()
        try:
            make_reader = chat.reader_maker(syntax)
        except InvalidRequest as error:
            raise body.with_client_field(error) from error

        async def responses_format(usage: Usage) -> ResponsesFormat:
            return ResponsesFormat(body, engine.model, engine.tokenizer, usage, make_reader)

        return await handler.answer(body, request, responses_format)

    def described() -> dict[str, Any]:
        model = {"id": engine.model, "object": "model", "created": created, "owned_by": "minisgl"}
        return {**model, "root": engine.config.model, "max_model_len": engine.max_seq_len}

    @router.get("/models", response_model=ModelList, responses=error_responses(*READS))
    async def models() -> Any:
        """List the one model."""
        return {"object": "list", "data": [described()]}

    @router.get("/models/{model:path}", response_model=ModelReply, responses=error_responses(*READS, 404))
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


async def _echo(engine: AsyncEngine, texts: TextService, prompt: str | list[int], num_logprobs: int | None) -> Echo:
    """The prompt, with the log-probabilities of its tokens unless ``num_logprobs`` is None."""
    text = prompt if isinstance(prompt, str) else await texts.detokenize(prompt)
    if num_logprobs is None:
        return Echo(text)
    token_ids = await texts.tokenize(prompt) if isinstance(prompt, str) else prompt
    return Echo(text, token_ids, await prompt_logprobs(engine, token_ids, 1, num_logprobs))


async def prompt_logprobs(
    engine: AsyncEngine, token_ids: Sequence[int], first: int, num_logprobs: int
) -> list[TokenLogprobs]:
    """The log-probabilities of a prompt's tokens from index ``first`` on, which is at least 1.

    They leave half of a small queue to other clients. Where it's full, they wait, as their own answer may fill it.
    """
    logprobs: list[TokenLogprobs] = []
    at_once = min(SCORES_AT_ONCE, max(1, engine.config.max_queued_requests // 2))
    full = asyncio.Lock()
    for start in range(first, len(token_ids), at_once):
        lengths = range(start, min(start + at_once, len(token_ids)))
        scores = (_score(engine, token_ids[:length], token_ids[length], num_logprobs, full) for length in lengths)
        logprobs += await asyncio.gather(*scores)
    return logprobs


async def _score(
    engine: AsyncEngine, before: Sequence[int], token_id: int, num_logprobs: int, full: asyncio.Lock
) -> TokenLogprobs:
    """The log-probability of ``token_id`` after ``before``, and of the likeliest tokens there.

    A logit bias makes the engine choose ``token_id``; its log-probabilities are those without the bias. Of those that
    the queue has refused, the one that holds ``full`` tries again.
    """
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logit_bias={token_id: _FORCING_BIAS}, logprobs=num_logprobs, ignore_eos=True
    )
    try:
        answer = await engine.submit([before], params, streaming=False)
    except QueueFull:
        async with full:
            answer = await _submit_once_there_is_room(engine, before, params)
    try:
        (update,) = [update async for update in answer.updates()]
    finally:
        answer.abort()
    (entry,) = update.logprobs
    # A token that does not win in spite of the bias is as good as impossible.
    return entry if entry.token_id == token_id else TokenLogprobs(token_id, LEAST_LOGPROB, entry.top)


async def _submit_once_there_is_room(engine: AsyncEngine, prompt: Sequence[int], params: SamplingParams) -> Answer:
    while True:
        await asyncio.sleep(_RETRY_INTERVAL)
        with suppress(QueueFull):
            return await engine.submit([prompt], params, streaming=False)


def _contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


class TextService:
    """Tokenizes and detokenizes in a thread, with a tokenizer that no other thread uses: they are not thread-safe."""

    def __init__(self, path: Path, max_chars: int, allow_control_tokens: bool = False) -> None:
        self._path = path
        self._max_chars = max_chars
        self._allow_control_tokens = allow_control_tokens
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minisgl-text")

    async def tokenize(self, prompt: str | Conversation, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with those that the template or, if asked to, the tokenizer adds. Raises `InvalidRequest`."""
        arguments = (prompt, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, *arguments)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Raises `InvalidRequest` if an id is outside of the vocabulary."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, token_ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._path, self._allow_control_tokens)

    def _encode(self, prompt: str | Conversation, add_special_tokens: bool) -> list[int]:
        field, texts = ("prompt", [prompt]) if isinstance(prompt, str) else ("messages", _contents(prompt))
        if (characters := sum(map(len, texts))) > self._max_chars:
            limit = f"must have at most {self._max_chars} characters, got {characters}"
            raise InvalidRequest(field, f"{limit}; split the text, or raise --max-tokenize-chars")
        if isinstance(prompt, Conversation):
            return self._tokenizer.encode_chat(prompt.messages, tools=prompt.tools, variables=prompt.variables)
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _decode(self, token_ids: Sequence[int]) -> str:
        check_token_ids("tokens", token_ids, self._tokenizer.vocab_size, limit=len(token_ids))
        return self._tokenizer.decode(token_ids)
