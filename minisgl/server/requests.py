"""Request bodies: the fields that generating endpoints share, and the body of ``/v1/completions``.

Pydantic checks types and unknown fields; `SamplingParams` checks values, and has the better error messages.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from minisgl.server.errors import IGNORED_FIELDS, UNSUPPORTED
from minisgl.server.json_schema import plain_schema
from minisgl.server.messages import JobPrompt

# Sampling parameters with the same name and meaning in the API
_SAME_NAME = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs"}
_MIN_TIMEOUT, _MAX_TIMEOUT = 0.001, 86400.0  # seconds


def _document_nulls(schema: dict[str, Any]) -> None:
    """State in a JSON schema that null is accepted for every optional field."""
    schema["additionalProperties"] = True
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}


class ApiObject(BaseModel):
    """A JSON object of the API. Null, which clients often send, is the same as no field.

    Fields that are not known are noted in `IGNORED_FIELDS` and left out, or refused where that is None.
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra=_document_nulls)
    place: ClassVar[str] = ""
    """Where such an object is in a body, such as ``messages[]``; empty for the body itself."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        ignored = IGNORED_FIELDS.get()
        if ignored is None:
            return given
        unknown = given.keys() - {field.alias or name for name, field in cls.model_fields.items()} - UNSUPPORTED
        ignored |= {f"{cls.place}.{name}".removeprefix(".") for name in unknown}
        return {key: value for key, value in given.items() if key not in unknown}


def as_list(value: Any) -> Any:
    """Accept one text for a list of texts."""
    return [value] if isinstance(value, str) else value


def only_default(value: bool | int) -> Any:
    """Accept a field with its default ``value`` only."""

    def check(given: Any) -> Any:
        if type(given) is not type(value) or given != value:
            raise ValueError(f"only {json.dumps(value)} is supported, which is the default; leave it out")
        return given

    return PlainValidator(check, json_schema_input_type=Literal[value])


def documented(**limits: Any) -> Any:
    """Limits that are stated in ``/openapi.json`` and checked elsewhere."""
    return Field(json_schema_extra=limits)


MaxTokens = Annotated[StrictInt, documented(minimum=1, maximum=2**31 - 1)]
MinTokens = Annotated[StrictInt, documented(minimum=0, maximum=2**31 - 1)]
Seed = Annotated[
    StrictInt, documented(minimum=-1, maximum=2**63 - 1), AfterValidator(lambda seed: None if seed == -1 else seed)
]
Timeout = Annotated[StrictFloat, Field(ge=_MIN_TIMEOUT, le=_MAX_TIMEOUT)]
NumLogprobs = Annotated[StrictInt, documented(minimum=0, maximum=20)]
_TopP = Annotated[StrictFloat, documented(exclusiveMinimum=0, maximum=1)]
_Penalty = Annotated[StrictFloat, documented(minimum=-2, maximum=2)]
_Bias = Annotated[StrictFloat, documented(minimum=-100, maximum=100)]
_StopString = Annotated[StrictStr, documented(minLength=1, maxLength=MAX_STOP_LENGTH)]
_StopStrings = Annotated[list[_StopString], documented(maxItems=MAX_STOPS)]
_TokenId = Annotated[StrictInt, documented(minimum=0, maximum=2**31 - 1)]


UsageChunks = Literal["none", "last", "all"]


class StreamOptions(ApiObject):
    """Options of a stream: whether a last chunk counts tokens, and every other one those so far too (as in vLLM)."""

    place = "stream_options"
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class SamplingFields(ApiObject):
    """Fields of every generating endpoint, with the names and meanings of `SamplingParams`.

    As in other servers, a ``top_k`` of −1 keeps all tokens, and a seed of −1 is none.
    """

    temperature: Annotated[StrictFloat, documented(minimum=0, maximum=100)] | None = None
    top_p: _TopP | None = None
    min_p: Annotated[StrictFloat, documented(minimum=0, maximum=1)] | None = None
    top_k: (
        Annotated[StrictInt, documented(minimum=-1, maximum=2**31 - 1), AfterValidator(lambda k: 0 if k == -1 else k)]
        | None
    ) = None
    n: Annotated[StrictInt, documented(minimum=1, maximum=128)] = 1
    stop: Annotated[
        list[_StopString] | None, BeforeValidator(as_list, json_schema_input_type=_StopString | _StopStrings)
    ] = None
    stop_token_ids: list[_TokenId] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[StrictFloat, documented(exclusiveMinimum=0, maximum=10)] | None = None
    ignore_eos: StrictBool = False
    num_draft_tokens: Annotated[StrictInt, documented(minimum=0, maximum=64)] | None = None

    def given_fields(self) -> dict[str, Any]:
        """The fields that were given, as arguments of `SamplingParams`."""
        return self.model_dump(include=_SAME_NAME, exclude_unset=True)


_ANY_OBJECT = {"type": "object"}


class JsonSchema(ApiObject):
    """A schema and its name. It is always strict; ``strict``, name and description change nothing."""

    place = "response_format.json_schema"
    name: StrictStr
    description: StrictStr | None = None
    json_schema: dict[str, Any] = Field(_ANY_OBJECT, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(ApiObject):
    """``text``, ``json_object``, ``json_schema``, or the extension ``regex``."""

    place = "response_format"
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: StrictStr | None = None

    def constraint(self) -> dict[str, str]:
        """The fields of `SamplingParams` with the same meaning. Raises `InvalidRequest`."""
        for name in ("json_schema", "regex"):
            if (getattr(self, name) is None) is (self.type == name):
                only = "is required with" if self.type == name else "is only allowed with"
                raise InvalidRequest(f"response_format.{name}", f"{only} type {name}")
        if self.type == "text":
            return {}
        if self.type == "regex":
            return {"regex": str(self.regex)}
        schema = _ANY_OBJECT if self.json_schema is None else self.json_schema.json_schema
        return {"json_schema": json.dumps(plain_schema(schema, "response_format.json_schema.schema"))}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A body's request in the engine's terms."""

    prompts: Sequence[JobPrompt]
    params: SamplingParams
    streaming: bool
    user: str = ""  # for the scheduler; empty where the client does not say
    time_limit: float | None = None  # seconds after which the client gets an error instead
    prompt_only: bool = False  # the token that the engine must generate is not shown


class GenerationBody(Protocol):
    """A body of any endpoint that generates."""

    def engine_request(self) -> EngineRequest:
        """The request for the engine. Raises `InvalidRequest`."""

    def with_client_field(self, error: InvalidRequest) -> InvalidRequest:
        """The same error with the client's name of the field instead of the engine's."""


class OpenAIRequest(SamplingFields, ABC):
    """The fields that OpenAI's two endpoints share. Meaning, limits and defaults are those of `SamplingParams`.

    ``timeout`` is an extension; ``store`` and ``service_tier`` change nothing.
    """

    model: StrictStr
    seed: Seed | None = None
    logit_bias: Annotated[dict[str, _Bias], documented(propertyNames={"pattern": "^[0-9]{1,9}$"})] | None = None
    min_tokens: MinTokens | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    response_format: ResponseFormat | None = None
    timeout: Timeout | None = None
    store: StrictBool = False
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] = "auto"

    @property
    @abstractmethod
    def prompts(self) -> Sequence[JobPrompt]:
        """The prompts for the engine. Raises `InvalidRequest`."""

    @abstractmethod
    def own_params(self) -> dict[str, Any]:
        """``max_tokens`` and ``logprobs`` of `SamplingParams`. Raises `InvalidRequest`."""

    def constraint(self) -> dict[str, str]:
        """The fields of `SamplingParams` that constrain the output's form. Raises `InvalidRequest`."""
        return {} if self.response_format is None else self.response_format.constraint()

    @property
    def usage_chunks(self) -> UsageChunks:
        """Which chunks of a stream count tokens."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "all" if self.stream_options.continuous_usage_stats else "last"

    def engine_request(self) -> EngineRequest:
        """The request for the engine. Raises `InvalidRequest`."""
        user, params = self.user or "", self.to_engine_params()
        return EngineRequest(self.prompts, params, self.stream, user, self.timeout, self.prompt_only)

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is to be generated."""
        return False

    def to_engine_params(self) -> SamplingParams:
        """The same by the engine's names. Raises `InvalidRequest`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is only allowed with stream: true")
        given = {**self.given_fields(), **self.constraint()}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(**given, **self.own_params())

    def with_client_field(self, error: InvalidRequest) -> InvalidRequest:
        """The error itself: the fields have the engine's names."""
        return error


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidRequest("logit_bias", f"must map token ids to numbers, got the token id {text!r}") from error


def is_ids(value: Any) -> bool:
    """Whether ``value`` is a list of token ids; none is checked against a vocabulary."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def _as_prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) or is_ids(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids, none empty")


Ids = Annotated[list[Annotated[int, documented(minimum=0)]], documented(minItems=1)]
Texts = Annotated[list[str], documented(minItems=1)]
IdLists = Annotated[list[Ids], documented(minItems=1)]


class CompletionRequest(OpenAIRequest):
    """Body of ``POST /v1/completions``. ``response_format`` is an extension; ``best_of`` must be 1.

    With ``echo``, ``max_tokens`` may be 0: the answer is the prompt, and what the model thinks of it.
    """

    prompt: Annotated[
        list[str | list[int]], PlainValidator(_as_prompts, json_schema_input_type=str | Ids | Texts | IdLists)
    ]
    max_tokens: Annotated[StrictInt, documented(minimum=0, maximum=2**31 - 1)] = 16
    logprobs: NumLogprobs | None = None
    echo: StrictBool = False
    best_of: Annotated[int, only_default(1)] = 1

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt

    def own_params(self) -> dict[str, Any]:
        if self.prompt_only and self.min_tokens:
            raise InvalidRequest("min_tokens", "must be at most max_tokens, which is 0")
        return {"max_tokens": 1 if self.prompt_only else self.max_tokens, "logprobs": self.logprobs}

    @property
    def prompt_only(self) -> bool:
        return self.echo and self.max_tokens == 0
