"""``/openapi.json``: endpoints, schemas of answers, statuses. Answers are written by hand; tests compare the two."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

_MEANINGS = {
    400: "The request is malformed, or asks for what this model or server cannot do; param names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The time limit passed before the answer was finished.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    500: "The engine could not finish the request.",
    503: "The queue is full, and Retry-After says when to come again; or the engine is dead or shutting down.",
}
# Error statuses of an endpoint that only reads, one that asks the engine, one that takes a body, one that generates
READS = (401,)
ASKS = (401, 503)
TAKES_BODY = (400, 401, 404, 413, 415, 503)
GENERATES = (*TAKES_BODY, 408, 500)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` for error statuses."""
    return {status: {"model": ErrorReply, "description": _MEANINGS[status]} for status in sorted(set(statuses))}


def stream_responses(reply: Any) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` for an answer of type ``reply``, or a stream of chunks if the client wants one."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    text = "The answer; of a stream, each event is a chunk, and the last is [DONE] or an error."
    return {200: {"model": reply, "description": text, "content": {"text/event-stream": {"itemSchema": event}}}}


def describe_api(app: FastAPI, model: str, with_key: bool) -> None:
    """Make ``app.openapi`` name this server's model, and its API key if it needs one. Call it after adding routes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, model, with_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, model: str, with_key: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = {"enum": [model]}
            operation["responses"].pop("422", None)  # FastAPI's own; here a malformed body is a 400
            if not with_key:
                operation["responses"].pop("401", None)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, schema in schemas.items():
        if app.state.strict and schema.get("additionalProperties") is True:
            schema["additionalProperties"] = {"type": "null"}
        if "stop" in schema.get("properties", ()):
            text, texts = schema["properties"]["stop"]["anyOf"][0]["anyOf"]
            texts["maxItems"], longest = app.state.stop_limits
            text["maxLength"] = texts["items"]["maxLength"] = longest
        if name.endswith("Request") and "model" in schema["properties"]:
            required = "model" in schema.get("required", ())
            schema["properties"]["model"] = {"enum": [model] if required else [model, None], "title": "Model"}
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


ApiFinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class ApiReply(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(ApiReply):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorReply(ApiReply):
    """The body of every answer that is an error."""

    error: ErrorBody


class CachedTokens(ApiReply):
    """Tokens of the prompt that the prefix cache had."""

    cached_tokens: int


class PredictionTokens(ApiReply):
    """Tokens that a drafter guessed: those that became output, and those that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(ApiReply):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens


class LikelyToken(ApiReply):
    """A token and its log-probability; ``bytes`` is null where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenReply(LikelyToken):
    """A token of the answer, and those that were likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(ApiReply):
    """Log-probabilities of a choice."""

    content: list[TokenReply]


class FunctionReply(ApiReply):
    """A function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(ApiReply):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(ApiReply):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallReply] = []


class ChatChoice(ApiReply):
    """One answer."""

    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason


class Generated(ApiReply):
    """What OpenAI's two answers share."""

    id: str
    created: int
    model: str
    usage: UsageReply


class ChatReply(Generated):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(ApiReply):
    """Log-probabilities of a choice; null for the first token of a prompt that is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ApiReply):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ApiFinishReason


class CompletionReply(Generated):
    """Answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponsesReply(BaseModel):
    """Answer of ``/v1/responses``; what it repeats of the request is not listed."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ModelReply(ApiReply):
    """The model; ``root`` is its path or name, ``max_model_len`` the most tokens of a prompt and its continuation."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ApiReply):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelReply]


class MetaInfo(ApiReply):
    """Counts of a choice; ``finish_reason`` is null while it is generated.

    The last four come with ``return_logprob``. A log-probability is a list of the number, token id and text; the number
    of the prompt's first token is null, and so is a text that was not asked for.
    """

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[list[Any]] | None = None
    output_token_logprobs: list[list[Any]] | None = None
    input_top_logprobs: list[list[list[Any]] | None] | None = None
    output_top_logprobs: list[list[list[Any]]] | None = None


class GenerateReply(ApiReply):
    """Answer of ``/generate`` for one choice."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class TokenizeReply(ApiReply):
    """Answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(ApiReply):
    """Answer of ``/detokenize``: the text, by vLLM's name and by SGLang's."""

    prompt: str
    text: str


class VersionReply(ApiReply):
    """The version of the server's package."""

    version: str


class RankLoad(ApiReply):
    """How busy an engine is; cached pages that no request uses count as free."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    max_running_requests: int


class LoadsReply(ApiReply):
    """Answer of ``/v1/loads``."""

    timestamp: str
    dp_rank_count: int
    loads: list[RankLoad]


class LoadReply(ApiReply):
    """Answer of ``/get_load``: requests that run or wait."""

    load: int


class ServerInfoReply(ApiReply):
    """Answer of ``/server_info``."""

    model_path: str
    served_model_name: str
    version: str
    tp_size: int
    dp_size: int
    page_size: int
    context_length: int
    max_total_tokens: int
    max_running_requests: int


class ModelInfoReply(ApiReply):
    """Answer of ``/model_info``."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    model_type: str | None
    architectures: list[str] | None


class FlushReply(ApiReply):
    """Answer of ``/flush_cache``: KV pages that hold no prefix any more."""

    flushed_pages: int


class HealthReply(ApiReply):
    """Answer of ``/health``."""

    status: Literal["ok"]
