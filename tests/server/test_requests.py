"""Request bodies on their own: every field that is taken reaches the engine, and no other is taken."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minisgl import InvalidRequest, SamplingParams
from minisgl.server.chat_request import ChatRequest
from minisgl.server.completion_request import CompletionRequest
from minisgl.server.requests import GenerationRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
BODIES = [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)]
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "n": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [5, 6],
    "seed": 11,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "ignore_eos": True,
    "max_tokens": 40,
}


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_every_sampling_field_is_passed_on(kind: type[GenerationRequest], body: dict[str, Any]) -> None:
    given = kind(**body, **SAMPLING, logit_bias={"7": -3}).engine_params()
    assert given == SamplingParams(**SAMPLING, logit_bias={7: -3.0})


def test_defaults_are_those_of_the_api() -> None:
    assert ChatRequest(**CHAT).engine_params() == SamplingParams(max_tokens=None)
    assert CompletionRequest(**COMPLETION).engine_params() == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_null_is_the_same_as_not_given(kind: type[GenerationRequest], body: dict[str, Any]) -> None:
    nulls = dict.fromkeys([*SAMPLING, "stream", "stream_options", "user", "logprobs", "tools"])
    assert kind(**body, **nulls) == kind(**body)


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize("field", ["suffix", "functions", "chat_template", "prediction", "temprature", "priority"])
def test_unknown_fields_are_refused(kind: type[GenerationRequest], body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**body, **{field: 1})
    assert caught.value.errors()[0]["loc"] == (field,)


def test_logprobs_of_the_two_endpoints() -> None:
    assert CompletionRequest(**COMPLETION, logprobs=4).engine_params().logprobs == 4
    assert ChatRequest(**CHAT, logprobs=True).engine_params().logprobs == 0
    assert ChatRequest(**CHAT, logprobs=True, top_logprobs=4).engine_params().logprobs == 4
    assert ChatRequest(**CHAT, logprobs=False).engine_params().logprobs is None
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        ChatRequest(**CHAT, top_logprobs=4).engine_params()


def test_only_one_name_for_the_length() -> None:
    assert ChatRequest(**CHAT, max_completion_tokens=9).engine_params().max_tokens == 9
    with pytest.raises(InvalidRequest, match="max_completion_tokens"):
        ChatRequest(**CHAT, max_completion_tokens=9, max_tokens=9).engine_params()
