"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, StrictBool

from minisgl.server.requests import Count, GenerationRequest, NumLogprobs, only, shown
from minisgl.server.response_format import ResponseFormat


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
