"""What clients send: sampling fields, and the body of a completion."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
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
from minisgl.sampling_params import SamplingParams
from minisgl.server.messages import Conversation

_PASSED_ON = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs"}
"""Sampling parameters that have the same name and meaning in the API, so they are checked in one place only."""


Prompt = str | Sequence[int] | Conversation
"""Text, token ids, or what is to be written in the model's chat template."""


_MIN_TIMEOUT, _MAX_TIMEOUT = 0.001, 86400.0


def _show_nulls(schema: dict[str, Any]) -> None:
    """Let a model's JSON schema tell that null is taken for every field that may be left out, unknown ones included."""
    schema["additionalProperties"] = {"type": "null"}
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}


class ApiObject(BaseModel):
    """A JSON object of the API: known fields only, and null is the same as not given, in whatever field, since clients
    send back messages with all the fields that their own models have."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_show_nulls)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


def as_list(value: Any) -> Any:
    """One text is the same as a list of one."""
    return [value] if isinstance(value, str) else value


def only(value: bool | int) -> Any:
    """A field that is taken with one value alone: its default, which changes nothing."""

    def check(given: Any) -> Any:
        if type(given) is not type(value) or given != value:
            raise ValueError(f"only {json.dumps(value)} is supported, which is the default; leave it out")
        return given

    return PlainValidator(check, json_schema_input_type=Literal[value])


def shown(**limits: Any) -> Any:
    """Limits for ``/openapi.json`` alone: `SamplingParams` is what holds a field to them, and has the better errors."""
    return Field(json_schema_extra=limits)


Count = Annotated[StrictInt, shown(minimum=1, maximum=2**31 - 1)]
"""Of tokens that may be generated."""
Least = Annotated[StrictInt, shown(minimum=0, maximum=2**31 - 1)]
"""Of tokens that must be."""
Seed = Annotated[StrictInt, shown(minimum=0, maximum=2**63 - 1)]
NumLogprobs = Annotated[StrictInt, shown(minimum=0, maximum=20)]
_Share = Annotated[StrictFloat, shown(exclusiveMinimum=0, maximum=1)]
_Penalty = Annotated[StrictFloat, shown(minimum=-2, maximum=2)]
_Bias = Annotated[StrictFloat, shown(minimum=-100, maximum=100)]
_Text = Annotated[StrictStr, shown(minLength=1)]
_TokenId = Annotated[StrictInt, shown(minimum=0, maximum=2**31 - 1)]


class StreamOptions(ApiObject):
    """What a stream has beside the text."""

    include_usage: StrictBool = False


class SamplingFields(ApiObject):
    """Fields that every generating endpoint has, under the same name and with the meaning of `SamplingParams`."""

    temperature: Annotated[StrictFloat, shown(minimum=0, maximum=100)] | None = None
    top_p: _Share | None = None
    min_p: Annotated[StrictFloat, shown(minimum=0, maximum=1)] | None = None
    top_k: Annotated[StrictInt, shown(minimum=0, maximum=2**31 - 1)] | None = None
    n: Annotated[StrictInt, shown(minimum=1, maximum=128)] = 1
    stop: Annotated[list[_Text] | None, BeforeValidator(as_list, json_schema_input_type=_Text | list[_Text])] = None
    stop_token_ids: list[_TokenId] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[StrictFloat, shown(exclusiveMinimum=0, maximum=10)] | None = None
    ignore_eos: StrictBool = False

    def passed_on(self) -> dict[str, Any]:
        """Those that were given, for `SamplingParams`."""
        return self.model_dump(include=_PASSED_ON, exclude_unset=True)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a body asks of the engine.

    Args:
        prompts: what to continue.
        params: how.
        streaming: whether the answer is wanted while it is generated.
        user: that the scheduler is told of; empty for nobody in particular.
        time_limit: seconds after which the client wants an error rather than the answer.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    streaming: bool
    user: str = ""
    time_limit: float | None = None


class Generates(Protocol):
    """A body that asks for generations, whatever its fields are called."""

    def engine_request(self) -> EngineRequest:
        """The same for the engine. Raises `InvalidRequest`, naming a field by the engine's name or by its own."""

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """The error, naming the field as the client knows it."""


class GenerationRequest(SamplingFields, ABC):
    """The fields that OpenAI's two endpoints share. Meaning, limits and defaults are those of `SamplingParams`.

    ``timeout`` is this server's own; ``store`` and ``service_tier`` are taken at their defaults only.
    """

    model: StrictStr
    seed: Seed | None = None
    logit_bias: Annotated[dict[str, _Bias], shown(propertyNames={"pattern": "^[0-9]{1,9}$"})] | None = None
    min_tokens: Least | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    timeout: Annotated[StrictFloat, Field(ge=_MIN_TIMEOUT, le=_MAX_TIMEOUT)] | None = None
    store: Annotated[bool, only(False)] = False
    service_tier: Literal["auto", "default"] = "auto"

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """What to continue. Raises `InvalidRequest`."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """``logprobs`` of `SamplingParams`."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """``max_tokens`` of `SamplingParams`."""

    @property
    def shows_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def engine_request(self) -> EngineRequest:
        """See `Generates`."""
        return EngineRequest(self.prompts, self.engine_params(), self.stream, self.user or "", self.timeout)

    def engine_params(self) -> SamplingParams:
        """What was given, and nothing else."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is only allowed with stream: true")
        given = {**self.passed_on(), **self.constraint()}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(**given, max_tokens=self.limit, logprobs=self.num_logprobs)

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """Most fields have the engine's names."""
        return error

    @abstractmethod
    def constraint(self) -> dict[str, str]:
        """The fields of `SamplingParams` that hold the output to a form."""


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidRequest("logit_bias", f"must map token ids to numbers, got the token id {text!r}") from error


_ANY_OBJECT = {"type": "object"}


class JsonSchema(ApiObject):
    """A schema and its name. It holds strictly, whatever ``strict`` says; name and description are for people."""

    name: StrictStr
    description: StrictStr | None = None
    json_schema: dict[str, Any] = Field(_ANY_OBJECT, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(ApiObject):
    """``text``, ``json_object``, ``json_schema``, or this server's own ``regex``."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: StrictStr | None = None

    def constraint(self) -> dict[str, str]:
        """The fields of `SamplingParams` that say the same.

        Raises:
            InvalidRequest: a field is missing, or belongs to another type.
        """
        for name in ("json_schema", "regex"):
            if (getattr(self, name) is None) is (self.type == name):
                only = "is required with" if self.type == name else "is only allowed with"
                raise InvalidRequest(f"response_format.{name}", f"{only} type {name}")
        if self.type == "text":
            return {}
        if self.type == "regex":
            return {"regex": str(self.regex)}
        schema = _ANY_OBJECT if self.json_schema is None else self.json_schema.json_schema
        return {"json_schema": json.dumps(schema)}


def is_ids(value: Any) -> bool:
    """Whether ``value`` is a list of token ids, as far as can be told without a vocabulary."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _as_prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) or is_ids(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids, none empty")


Ids = Annotated[list[Annotated[int, shown(minimum=0)]], shown(minItems=1)]
Texts = Annotated[list[str], shown(minItems=1)]
IdLists = Annotated[list[Ids], shown(minItems=1)]


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_as_prompts, json_schema_input_type=str | Ids | Texts | IdLists),
]
"""One prompt or several, as a list."""


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``. ``response_format`` is an extension; ``best_of`` is taken at its default."""

    prompt: Prompts
    max_tokens: Count = 16
    logprobs: NumLogprobs | None = None
    echo: StrictBool = False
    best_of: Annotated[int, only(1)] = 1
    response_format: ResponseFormat | None = None

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

    def constraint(self) -> dict[str, str]:
        """Of ``response_format``."""
        return {} if self.response_format is None else self.response_format.constraint()
