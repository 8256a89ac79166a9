"""The bodies that the endpoints take. A field that is not named here is refused, never ignored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.messages import Conversation

_PASSED_ON = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs"}
"""Sampling parameters that have the same name and meaning in the API, so they are checked in one place only."""


class _Object(BaseModel):
    """A JSON object of the API: known fields only, and null is the same as not given."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_prompts(value: Any) -> list[str | list[int]]:
    if _is_prompt(value):
        return [value]
    if isinstance(value, list) and value and all(map(_is_prompt, value)):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids, none empty")


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(item) is int for item in value)
    return isinstance(value, str)


class StreamOptions(_Object):
    """What a stream has beside the text."""

    include_usage: StrictBool = False


class TextPart(_Object):
    """A piece of a message. Other kinds of parts are not supported."""

    type: Literal["text"]
    text: StrictStr


class ChatMessage(_Object):
    """A message of a conversation; a text is the same as one part."""

    role: StrictStr
    content: Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class GenerationRequest(_Object, ABC):
    """The fields that both endpoints share. Their meaning, limits and defaults are those of `SamplingParams`."""

    model: StrictStr
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    n: StrictInt = 1
    stop: Annotated[list[StrictStr] | None, BeforeValidator(_as_list, json_schema_input_type=str | list[str])] = None
    stop_token_ids: list[StrictInt] | None = None
    seed: StrictInt | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    logit_bias: dict[str, StrictFloat] | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None

    @property
    @abstractmethod
    def prompts(self) -> Sequence[str | list[int] | Conversation]:
        """What to continue."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """``logprobs`` of `SamplingParams`."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """``max_tokens`` of `SamplingParams`."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self) -> SamplingParams:
        """The engine's view of the parameters.

        Raises:
            InvalidRequest: naming the field, by the engine's name, and its limit.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is only allowed with stream: true")
        given = self.model_dump(include=_PASSED_ON, exclude_unset=True)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(**given, max_tokens=self.limit, logprobs=self.num_logprobs)

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """The error, naming the field as the client knows it."""
        return error


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = None

    @property
    def prompts(self) -> list[Conversation]:
        """One conversation, each message's parts joined."""
        messages = [{"role": m.role, "content": "".join(part.text for part in m.content)} for m in self.messages]
        return [Conversation(messages)]

    @property
    def num_logprobs(self) -> int | None:
        """The count is in ``top_logprobs``."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """By its new name or its old one; neither means the rest of the context."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens is not None:
            raise InvalidRequest("max_tokens", "means the same as max_completion_tokens; give one of them")
        return self.max_completion_tokens

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """Messages are the engine's prompt, and two more fields have other names."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return InvalidRequest(names.get(error.field, error.field), error.message)


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_as_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ]
    max_tokens: StrictInt = 16
    logprobs: StrictInt | None = None
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """As given."""
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        """The count itself."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """As given, 16 by default."""
        return self.max_tokens


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidRequest("logit_bias", f"must map token ids to numbers, got the token id {text!r}") from error
