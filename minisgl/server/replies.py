"""The shapes of all answers, for ``/openapi.json``. Answers are written by hand, for speed; tests hold them to this."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Reply(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(Reply):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """The body of every answer that is an error."""

    error: ErrorBody


class CachedTokens(Reply):
    """Tokens of the prompt that the prefix cache had."""

    cached_tokens: int


class UsageReply(Reply):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class LikelyToken(Reply):
    """A token and its log-probability; ``bytes`` is null where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenReply(LikelyToken):
    """A token of the answer, and those that were likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Reply):
    """Log-probabilities of a choice."""

    content: list[TokenReply]


class FunctionReply(Reply):
    """A function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(Reply):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(Reply):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallReply] = []


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Generated(Reply):
    """What OpenAI's two answers share."""

    id: str
    created: int
    model: str
    usage: UsageReply


class ChatReply(Generated):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(Reply):
    """Log-probabilities of a choice; null for the first token of a prompt that is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionReply(Generated):
    """Answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelReply(Reply):
    """The model; ``max_model_len`` is the most tokens of a prompt and its continuation."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Reply):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelReply]


class MetaInfo(Reply):
    """Counts of a choice; ``finish_reason`` is null while it is generated."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerateReply(Reply):
    """Answer of ``/generate`` for one choice."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class TokenizeReply(Reply):
    """Answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(Reply):
    """Answer of ``/detokenize``: the text, by vLLM's name and by SGLang's."""

    prompt: str
    text: str


class HealthReply(Reply):
    """Answer of ``/health``."""

    status: Literal["ok"]
