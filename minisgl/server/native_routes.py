"""``/generate`` as SGLang has it, ``/tokenize`` and ``/detokenize``: their bodies and routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, PlainValidator, StrictBool, StrictInt, StrictStr

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.chat_request import ChatMessage, TemplateVariables
from minisgl.server.formats import Echo, GenerateFormat, ScoreFormat, Usage
from minisgl.server.json_body import JsonRoute
from minisgl.server.json_schema import plain_schema_text
from minisgl.server.messages import Conversation
from minisgl.server.openai_routes import TextService, check_model, prompt_logprobs
from minisgl.server.openapi import (
    GENERATES,
    TAKES_BODY,
    DetokenizeReply,
    GenerateReply,
    TokenizeReply,
    error_responses,
    stream_responses,
)
from minisgl.server.requests import (
    ApiObject,
    EngineRequest,
    IdLists,
    Ids,
    MinTokens,
    NumLogprobs,
    SamplingFields,
    Seed,
    Texts,
    documented,
    is_ids,
    only_default,
)
from minisgl.server.streaming import GenerateHandler

_NO_MODEL = "unknown"  # what smg writes if its client names no model
_CLIENT_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class GenerateParams(SamplingFields):
    """``sampling_params`` of ``POST /generate``, by SGLang's names."""

    place = "sampling_params"
    max_new_tokens: Annotated[StrictInt, documented(minimum=0, maximum=2**31 - 1)] = 128
    min_new_tokens: MinTokens = 0
    sampling_seed: Seed | None = None
    json_schema: StrictStr | None = None
    regex: StrictStr | None = None
    skip_special_tokens: Annotated[bool, only_default(True)] = True
    spaces_between_special_tokens: Annotated[bool, only_default(True)] = True

    def to_engine_params(self, logprobs: int | None, prompt_only: bool) -> SamplingParams:
        """The same by the engine's names; with ``prompt_only``, of a token that is not shown. `InvalidRequest`."""
        if prompt_only and self.min_new_tokens:
            raise InvalidRequest("min_tokens", "must be at most max_new_tokens, which is 0")
        form = self.model_dump(include={"json_schema", "regex"}, exclude_none=True)
        if self.json_schema is not None:
            form["json_schema"] = plain_schema_text(self.json_schema, "sampling_params.json_schema")
        lengths = {"max_tokens": 1 if prompt_only else self.max_new_tokens, "min_tokens": self.min_new_tokens}
        own = {**form, **lengths, "seed": self.sampling_seed, "logprobs": logprobs}
        return SamplingParams(**{**self.given_fields(), **own})


def _texts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        return value
    raise ValueError("must be a text or a list of texts, not empty")


def _ids(value: Any) -> Any:
    if is_ids(value) or (isinstance(value, list) and value and all(map(is_ids, value))):
        return value
    raise ValueError("must be a list of token ids or a list of such lists, none empty")


class GenerateRequest(ApiObject):
    """Body of ``POST /generate``: one of ``text`` and ``input_ids``, a prompt or a list of prompts.

    With ``return_logprob``, ``meta_info`` has the log-probabilities of the output, and those of the prompt's tokens
    behind the one with the index ``logprob_start_len``, unless that is −1; ``max_new_tokens`` may be 0 then.
    """

    text: Annotated[str | list[str] | None, PlainValidator(_texts, json_schema_input_type=str | Texts)] = None
    input_ids: Annotated[
        list[int] | list[list[int]] | None,
        PlainValidator(_ids, json_schema_input_type=Ids | IdLists),
    ] = None
    sampling_params: GenerateParams = GenerateParams()
    stream: StrictBool = False
    return_logprob: StrictBool = False
    logprob_start_len: Annotated[
        StrictInt, Field(ge=-1)
    ] = -1  # this and the next two count with `return_logprob` alone
    top_logprobs_num: NumLogprobs = 0
    return_text_in_logprobs: StrictBool = False
    model: StrictStr | None = None  # this and the rest are what the router smg sends, whatever its client has sent
    log_metrics: StrictBool = True
    no_logs: StrictBool = False
    background: Annotated[bool, only_default(False)] = False
    return_bytes: Annotated[bool, only_default(False)] = False
    return_entropy: Annotated[bool, only_default(False)] = False

    @property
    def _given(self) -> Any:
        if (self.text is None) is (self.input_ids is None):
            raise InvalidRequest("text", "give either text or input_ids")
        return self.input_ids if self.text is None else self.text

    @property
    def several(self) -> bool:
        """Whether the answer is a list: there are several prompts, or several choices of one."""
        return self.sampling_params.n > 1 or not (isinstance(self._given, str) or is_ids(self._given))

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """``text`` or ``input_ids`` as a list."""
        given = self._given
        return [given] if isinstance(given, str) or is_ids(given) else given

    def engine_request(self) -> EngineRequest:
        """The request for the engine. Raises `InvalidRequest`."""
        logprobs = self.top_logprobs_num if self.return_logprob else None
        prompt_only = self.return_logprob and self.sampling_params.max_new_tokens == 0
        params = self.sampling_params.to_engine_params(logprobs, prompt_only)
        return EngineRequest(self.prompts, params, self.stream, prompt_only=prompt_only)

    async def score_format(
        self, engine: AsyncEngine, texts: TextService, prompt_lens: Sequence[int]
    ) -> ScoreFormat | None:
        """How to write log-probabilities, with those of the prompts; None without. Raises `InvalidRequest`."""
        if not self.return_logprob:
            return None
        start, shortest = self.logprob_start_len, min(prompt_lens)
        if start > shortest:
            raise InvalidRequest("logprob_start_len", f"must be at most the prompt's length, which is {shortest}")
        echoes = []
        for prompt in self.prompts:
            token_ids: Sequence[int] = ()
            if start >= 0:
                token_ids = await texts.tokenize(prompt) if isinstance(prompt, str) else prompt
            scores = await prompt_logprobs(engine, token_ids, start + 1, self.top_logprobs_num)
            echoes.append(Echo("", token_ids[max(start, 0) :], scores))
        text = engine.tokenizer.token_text if self.return_text_in_logprobs else lambda token_id: None
        return ScoreFormat(echoes, self.top_logprobs_num > 0, text)

    def with_client_field(self, error: InvalidRequest) -> InvalidRequest:
        """The same error with SGLang's name of the field."""
        if error.field in ("text", "input_ids", "logprob_start_len"):
            return error
        prompt = "text" if self.input_ids is None else "input_ids"
        names = {"prompt": prompt, "logprobs": "top_logprobs_num"}
        name = names.get(error.field) or f"sampling_params.{_CLIENT_NAMES.get(error.field, error.field)}"
        return type(error)(name, error.message)


class TokenizeRequest(ApiObject):
    """Body of ``POST /tokenize``: one of ``prompt`` and ``messages``.

    ``add_special_tokens`` is about a prompt; a chat template writes its own.
    """

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: Annotated[bool, only_default(True)] = True
    continue_final_message: Annotated[bool, only_default(False)] = False

    @property
    def text(self) -> str | Conversation:
        """``prompt`` or ``messages``. Raises `InvalidRequest` unless one of them is given."""
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequest("prompt", "give either prompt or messages")
        if self.messages is None:
            return str(self.prompt)
        messages = [each.for_template(f"messages[{index}]") for index, each in enumerate(self.messages)]
        return Conversation(messages, variables=self.chat_template_kwargs)


class DetokenizeRequest(ApiObject):
    """Body of ``POST /detokenize``; special tokens have no text."""

    model: StrictStr | None = None
    tokens: list[Annotated[StrictInt, documented(minimum=0)]]
    skip_special_tokens: Annotated[bool, only_default(True)] = True


def native_routes(engine: AsyncEngine, handler: GenerateHandler, texts: TextService) -> APIRouter:
    """``/generate``, ``/tokenize`` and ``/detokenize``."""
    router = APIRouter(route_class=JsonRoute)
    replies = stream_responses(GenerateReply | list[GenerateReply])

    @router.post("/generate", responses={**replies, **error_responses(*GENERATES)})
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue texts or token ids."""
        if body.model != _NO_MODEL:
            check_model(engine, body.model)

        async def generate_format(usage: Usage) -> GenerateFormat:
            scores = await body.score_format(engine, texts, usage.prompt_lens)
            return GenerateFormat(usage, body.sampling_params.n, body.several, scores)

        return await handler.answer(body, request, generate_format)

    @router.post("/tokenize", response_model=TokenizeReply, responses=error_responses(*TAKES_BODY))
    async def tokenize(body: TokenizeRequest) -> Any:
        """Token ids of a text or a conversation."""
        check_model(engine, body.model)
        tokens = await texts.tokenize(body.text, body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_seq_len}

    @router.post("/detokenize", response_model=DetokenizeReply, responses=error_responses(*TAKES_BODY))
    async def detokenize(body: DetokenizeRequest) -> Any:
        """Text of token ids."""
        check_model(engine, body.model)
        text = await texts.detokenize(body.tokens)
        return {"prompt": text, "text": text}

    return router
