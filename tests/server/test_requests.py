"""Request bodies on their own: every field that is taken reaches the engine, and no other is taken."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams
from minisgl.server.chat_request import ChatRequest
from minisgl.server.requests import CompletionRequest, OpenAIRequest
from tests.server.harness import RunningServer

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
def test_every_sampling_field_is_passed_on(kind: type[OpenAIRequest], body: dict[str, Any]) -> None:
    given = kind(**body, **SAMPLING, logit_bias={"7": -3}).to_engine_params()
    assert given == SamplingParams(**SAMPLING, logit_bias={7: -3.0})


def test_defaults_are_those_of_the_api() -> None:
    assert ChatRequest(**CHAT).to_engine_params() == SamplingParams(max_tokens=None)
    assert CompletionRequest(**COMPLETION).to_engine_params() == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_null_is_the_same_as_not_given(kind: type[OpenAIRequest], body: dict[str, Any]) -> None:
    nulls = dict.fromkeys([*SAMPLING, "stream", "stream_options", "user", "logprobs", "tools"])
    assert kind(**body, **nulls) == kind(**body)


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize("field", ["suffix", "functions", "chat_template", "prediction", "temprature", "priority"])
def test_unknown_fields_are_refused(kind: type[OpenAIRequest], body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**body, **{field: 1})
    assert caught.value.errors()[0]["loc"] == (field,)


def test_logprobs_of_the_two_endpoints() -> None:
    assert CompletionRequest(**COMPLETION, logprobs=4).to_engine_params().logprobs == 4
    assert ChatRequest(**CHAT, logprobs=True).to_engine_params().logprobs == 0
    assert ChatRequest(**CHAT, logprobs=True, top_logprobs=4).to_engine_params().logprobs == 4
    assert ChatRequest(**CHAT, logprobs=False).to_engine_params().logprobs is None
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        ChatRequest(**CHAT, top_logprobs=4).to_engine_params()


def test_only_one_name_for_the_length() -> None:
    assert ChatRequest(**CHAT, max_completion_tokens=9).to_engine_params().max_tokens == 9
    with pytest.raises(InvalidRequest, match="max_completion_tokens"):
        ChatRequest(**CHAT, max_completion_tokens=9, max_tokens=9).to_engine_params()
    with pytest.raises(InvalidRequest, match="max_tokens"):
        ChatRequest(**CHAT, max_completion_tokens=0).to_engine_params()  # not the same as no limit


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
BARE = {"type": "function", "function": {"name": "time"}}


def constraint(**given: Any) -> dict[str, str]:
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], **given).constraint()


def test_every_format_in_the_samplers_words() -> None:
    assert constraint() == constraint(response_format={"type": "text"}) == {}
    given = constraint(response_format={"type": "json_object"})
    assert json.loads(given["json_schema"]) == {"type": "object"}
    form = {"name": "answer", "schema": SCHEMA, "strict": True, "description": "x"}
    given = constraint(response_format={"type": "json_schema", "json_schema": form})
    assert json.loads(given["json_schema"]) == SCHEMA
    assert constraint(response_format={"type": "regex", "regex": "a+"}) == {"regex": "a+"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["weather", "time"]), ({"type": "function", "function": {"name": "time"}}, ["time"])],
)
def test_a_demanded_call_is_a_form(choice: Any, names: list[str]) -> None:
    given = constraint(tools=[TOOL, BARE], tool_choice=choice, parallel_tool_calls=False)
    calls = json.loads(given["json_schema"])["anyOf"]
    assert [call["properties"]["name"]["const"] for call in calls] == names
    assert all(call["required"] == ["name", "arguments"] for call in calls)
    if "weather" in names:
        assert calls[0]["properties"]["arguments"] == SCHEMA


def test_references_inside_of_parameters_still_lead_there() -> None:
    parameters = {"$defs": {"city": {"enum": ["Paris"]}}, "properties": {"city": {"$ref": "#/$defs/city"}}}
    tool = {"type": "function", "function": {"name": "travel", "parameters": parameters}}
    given = constraint(tools=[BARE, tool], tool_choice="required")
    schema = json.loads(given["json_schema"])
    reference = schema["anyOf"][1]["properties"]["arguments"]["properties"]["city"]["$ref"]
    found = schema
    for step in reference.removeprefix("#/").split("/"):
        found = found[int(step) if isinstance(found, list) else step]
    assert found == {"enum": ["Paris"]}


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "regex"}, "response_format.regex"),
        ({"type": "text", "regex": "a"}, "response_format.regex"),
        ({"type": "json_object", "json_schema": {"name": "x"}}, "response_format.json_schema"),
    ],
)
def test_parts_must_fit_the_type(form: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(response_format=form)
    assert caught.value.field == field


def test_errors_of_the_sampler_are_told_in_the_clients_words() -> None:
    body = ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}])
    assert body.with_client_field(InvalidRequest("json_schema", "is bad")).field == "response_format"
    forced = body.model_copy(update={"tool_choice": "required"})
    assert forced.with_client_field(InvalidRequest("json_schema", "is bad")).field == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_random_weights_has_the_form_that_was_asked_for(server: RunningServer, stream: bool) -> None:
    form = {"type": "regex", "regex": "(yes|no), [0-9]{3}"}
    answer = server.chat(response_format=form, max_tokens=40, stream=stream, temperature=1.5, seed=3)
    chunks = list(answer) if stream else [answer]
    text = "".join((chunk.choices[0].delta if stream else chunk.choices[0].message).content or "" for chunk in chunks)
    assert re.fullmatch(form["regex"], text)
    assert chunks[-1].choices[0].finish_reason == "stop"
