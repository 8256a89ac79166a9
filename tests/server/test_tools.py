"""Tools over HTTP: what the template is told, what comes of the model's calls, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from minisgl.server.chat_request import ChatRequest
from tests.server.harness import MESSAGES, RunningServer, chat_checkpoint
from tests.server.templates import QWEN
from tests.tiny_text_model import Scripted

FUNCTION: dict[str, Any] = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model was told about tools; `say` makes it say something."""
    with RunningServer(chat_checkpoint(tmp_path_factory.mktemp("tools"), QWEN), num_pages=512) as running:
        yield running


def say(server: RunningServer, text: str) -> None:
    _, *tokens = server.core.tokenizer.encode(text)
    server.core.loop.executor = Scripted([*tokens, *server.core.tokenizer.eos_ids[:1]])


def ask(server: RunningServer, **fields: Any) -> Any:
    return server.chat(**{"tools": [TOOL], "max_tokens": 200, **fields})


def test_a_call_is_no_text_and_ends_the_answer(caller: RunningServer) -> None:
    say(caller, f"One moment.\n{CALL}")
    whole = ask(caller).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("One moment.", "tool_calls")
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    say(caller, CALL + CALL)
    whole = ask(caller, n=2)
    assert [choice.message.content for choice in whole.choices] == [None, None]
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls}) == 4


def test_a_stream_brings_text_and_calls_with_their_index(caller: RunningServer) -> None:
    say(caller, f"One moment.\n{CALL}{CALL}")
    chunks = [chunk.choices[0] for chunk in ask(caller, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "One moment."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert {call.function.name for call in calls} == {"weather"}
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_an_answer_that_is_cut_short_keeps_its_reason_and_its_text(caller: RunningServer) -> None:
    say(caller, CALL)
    cut = ask(caller, max_tokens=20).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls is None
    assert CALL.startswith(cut.message.content)
    assert cut.message.content


def test_without_tools_or_with_the_choice_none_nothing_is_cut_out(caller: RunningServer) -> None:
    say(caller, CALL)
    for fields in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = ask(caller, **fields).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_the_template_is_told_of_tools_calls_and_results(caller: RunningServer) -> None:
    say(caller, CALL)
    message = ask(caller).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    conversation = [*MESSAGES, message.model_dump(), result]
    (prompt,) = ChatRequest(model="m", messages=conversation, tools=[TOOL]).prompts
    text = caller.core.tokenizer.decode(caller.core.tokenizer.encode_chat(prompt.messages, tools=prompt.tools))
    assert json.dumps(FUNCTION["name"]) in text
    assert CALL in text
    assert "tool rain" in text
    assert ask(caller, messages=conversation).choices[0].finish_reason == "tool_calls"


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}]}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_is_refused_by_name(caller: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = {"model": caller.model, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 4, **fields}
    reply = caller.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert caller.idle()


@pytest.mark.parametrize("arguments", ["", "[1]", "{", '"x"'])
def test_arguments_of_earlier_calls_are_json_objects(caller: RunningServer, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = {"model": caller.model, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]}
    reply = caller.http.post("/v1/chat/completions", json=body)
    assert reply.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_model_that_was_not_told_of_tools_refuses_them(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
        ask(server)
    assert caught.value.param == "tools"
