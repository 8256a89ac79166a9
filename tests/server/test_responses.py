"""OpenAI's Responses API, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.harness import MESSAGES, PROMPT, RunningServer, ServerThread, chat_checkpoint
from tests.server.templates import QWEN

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": MESSAGES[0]["content"]}]}]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(chat_checkpoint(tmp_path_factory.mktemp("caller"), QWEN), num_pages=512) as running:
        yield running


def respond(server: ServerThread, **fields: Any) -> Any:
    defaults = {"model": server.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    return server.client.responses.create(**{**defaults, **fields})


def post(server: ServerThread, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/responses", json={"model": server.model, "input": PROMPT, **fields})


def check_stream(events: list[Any]) -> Response:
    """Hold a stream to its rules; returns the response at its end, which the events before must add up to."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    items: list[Any] = []
    text = arguments = ""
    for event in events[2:-1]:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                text = arguments = ""
            case "response.output_text.delta":
                text += event.delta
            case "response.output_text.done":
                assert event.text == text
            case "response.function_call_arguments.delta":
                arguments += event.delta
            case "response.function_call_arguments.done":
                assert event.arguments == arguments
            case "response.output_item.done":
                items.append(event.item)
    last: Response = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    assert last.output == items
    return last


def test_a_text_is_that_of_a_chat(either: ServerThread) -> None:
    response = respond(either)
    chat = either.chat()
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.store) == ("incomplete", "response", False)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.usage.output_tokens, response.usage.total_tokens) == (24, 24 + chat.usage.prompt_tokens)
    assert respond(either, input=MESSAGES[0]["content"]).output_text == response.output_text


def test_a_stream_adds_up_to_the_answer(either: ServerThread) -> None:
    events = list(respond(either, stream=True))
    last = check_stream(events)
    assert last.output_text == respond(either).output_text
    assert last.usage.output_tokens == 24
    assert sum(event.type == "response.output_text.delta" for event in events) > 3


def test_events_have_names_and_the_types_of_openai(server: RunningServer) -> None:
    with server.http.stream(
        "POST", "/v1/responses", json={"model": server.model, "input": PROMPT, "stream": True, "max_output_tokens": 3}
    ) as reply:
        blocks = reply.read().decode().split("\n\n")
    assert blocks.pop() == "", "and no [DONE]"
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def scenario() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            wanted: Any = {"model": server.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
            whole = await client.responses.create(**wanted)
            events = [event async for event in await client.responses.create(**wanted, stream=True)]
            return whole.output_text, check_stream(events).output_text

    whole, streamed = asyncio.run(scenario())
    assert whole == streamed != ""


def test_instructions_and_a_history(server: RunningServer) -> None:
    history = [
        {"role": "user", "content": "hello"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "well", "annotations": []}],
        },
        {"role": "user", "content": "and?"},
    ]
    response = respond(server, instructions="be brief", input=history)
    messages = [{"role": "system", "content": "be brief"}, *history]
    messages[2] = {"role": "assistant", "content": "well"}
    assert response.output_text == server.chat(messages=messages).choices[0].message.content
    assert response.instructions == "be brief"


class Reply(BaseModel):
    city: Literal["Rome", "Oslo"]
    degrees: Literal[1, 2]


def test_structured_output(server: RunningServer) -> None:
    wanted: Any = {"model": server.model, "input": QUESTION, "text_format": Reply, "max_output_tokens": 80}
    parsed = server.client.responses.parse(**wanted).output_parsed
    assert isinstance(parsed, Reply)
    with server.client.responses.stream(**wanted) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Reply)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(caller: RunningServer, stream: bool) -> None:
    choice = {"type": "function", "name": "weather"}
    for wanted in ("required", choice):
        fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": wanted, "max_output_tokens": 80}
        answer = respond(caller, **fields, stream=stream)
        response = check_stream(list(answer)) if stream else answer
        (call,) = response.output
        assert (call.type, call.name, call.status, response.status) == (
            "function_call",
            "weather",
            "completed",
            "completed",
        )
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = respond(caller, input=[*QUESTION, call.model_dump(exclude_none=True), result], tools=[WEATHER])
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    tool = {"type": "function", "function": {name: WEATHER[name] for name in WEATHER if name != "type"}}
    assert after.output_text == caller.chat(messages=messages, tools=[tool]).choices[0].message.content


def test_log_probabilities(server: RunningServer) -> None:
    response = respond(server, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    entries = response.output[0].content[0].logprobs
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(caller: RunningServer, fields: dict[str, Any], param: str) -> None:
    reply = post(caller, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_what_changes_nothing_is_taken_or_named(server: RunningServer) -> None:
    body = {"store": True, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "max_output_tokens": 1}
    reply = post(server, **body, include=["reasoning.encrypted_content"])
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "reasoning"
    assert reply.json()["metadata"] == {"a": "b"}


def test_a_failure_in_the_middle_is_an_event(own_server: RunningServer) -> None:
    own_server.gate.allowed = 3
    events = []
    for event in respond(own_server, stream=True):
        events.append(event)
        if event.type == "response.output_text.delta":
            own_server.gate.error = RuntimeError("out of luck")
    assert events[-1].type == "response.failed"
    assert "out of luck" in events[-1].response.error.message
