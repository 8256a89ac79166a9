"""What the bodies of all generating endpoints share. A field that is not named is refused, never ignored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.server.messages import Prompt

_PASSED_ON = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs"}
"""Sampling parameters that have the same name and meaning in the API, so they are checked in one place only."""

_MAX_TIMEOUT = 86400.0


class ApiObject(BaseModel):
    """A JSON object of the API: known fields only, and null is the same as not given."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def as_list(value: Any) -> Any:
    """One text is the same as a list of one."""
    return [value] if isinstance(value, str) else value


class StreamOptions(ApiObject):
    """What a stream has beside the text."""

    include_usage: StrictBool = False


class SamplingFields(ApiObject):
    """Fields that every generating endpoint has, under the same name and with the meaning of `SamplingParams`."""

    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    min_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    n: StrictInt = 1
    stop: Annotated[list[StrictStr] | None, BeforeValidator(as_list, json_schema_input_type=str | list[str])] = None
    stop_token_ids: list[StrictInt] | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    ignore_eos: StrictBool = False

    def passed_on(self) -> dict[str, Any]:
        """Those that were given, for `SamplingParams`."""
        return self.model_dump(include=_PASSED_ON, exclude_unset=True)


class Generates(Protocol):
    """A body that asks for generations, whatever its fields are called."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What to continue. Raises `InvalidRequest`."""

    def engine_params(self) -> SamplingParams:
        """The engine's view of the parameters. Raises `InvalidRequest`, naming the field by the engine's name."""

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """The error, naming the field as the client knows it."""

    @property
    def streams(self) -> bool:
        """Whether the answer is wanted while it is generated."""

    @property
    def time_limit(self) -> float | None:
        """Seconds after which the client wants an error rather than the answer."""

    @property
    def on_behalf_of(self) -> str:
        """The user that the scheduler is told of; empty for nobody in particular."""


class GenerationRequest(SamplingFields, ABC):
    """The fields that OpenAI's two endpoints share. Meaning, limits and defaults are those of `SamplingParams`.

    ``timeout`` is this server's own; ``store`` and ``service_tier`` are taken at their defaults only.
    """

    model: StrictStr
    seed: StrictInt | None = None
    logit_bias: dict[str, StrictFloat] | None = None
    min_tokens: StrictInt | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    timeout: Annotated[StrictFloat, Field(gt=0, le=_MAX_TIMEOUT)] | None = None
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """``logprobs`` of `SamplingParams`."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """``max_tokens`` of `SamplingParams`."""

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """See `Generates`, as for all that follow."""

    @property
    def streams(self) -> bool:
        """As the client says."""
        return self.stream

    @property
    def time_limit(self) -> float | None:
        """As the client says."""
        return self.timeout

    @property
    def on_behalf_of(self) -> str:
        """As the client says."""
        return self.user or ""

    @property
    def shows_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

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
