"""``response_format`` and demanded calls, in the words of the sampler."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from minisgl import InvalidRequest
from minisgl.server.chat_request import ChatRequest
from tests.server.harness import RunningServer

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
    assert body.in_own_words(InvalidRequest("json_schema", "is bad")).field == "response_format"
    forced = body.model_copy(update={"tool_choice": "required"})
    assert forced.in_own_words(InvalidRequest("json_schema", "is bad")).field == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_random_weights_has_the_form_that_was_asked_for(server: RunningServer, stream: bool) -> None:
    form = {"type": "regex", "regex": "(yes|no), [0-9]{3}"}
    answer = server.chat(response_format=form, max_tokens=40, stream=stream, temperature=1.5, seed=3)
    chunks = list(answer) if stream else [answer]
    text = "".join((chunk.choices[0].delta if stream else chunk.choices[0].message).content or "" for chunk in chunks)
    assert re.fullmatch(form["regex"], text)
    assert chunks[-1].choices[0].finish_reason == "stop"
