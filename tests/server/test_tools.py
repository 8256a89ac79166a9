"""Tools over HTTP: what the template is told, what comes of the model's calls, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.chat_request import ChatRequest
from minisgl.server.tools import FORCED, TOOL_PARSERS, CallReader, ToolCall, ToolSyntax, syntax_for
from tests.server.harness import MESSAGES, RunningServer, chat_checkpoint
from tests.server.templates import LLAMA3, QWEN
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
    server.core.executor.launcher = Scripted([*tokens, *server.core.tokenizer.eos_ids[:1]])


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


@pytest.mark.parametrize("max_tokens", [300, len(CALL) + 30])  # to the end of the text, or in a later call
@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_an_answer_ends_with_its_first_call(
    caller: RunningServer, stream: bool, max_tokens: int
) -> None:
    say(caller, f"One moment.{CALL}{CALL} And then {CALL}")
    answer = ask(caller, parallel_tool_calls=False, stream=stream, max_tokens=max_tokens)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    messages = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(message.content or "" for message in messages) == "One moment."
    (call,) = [call for message in messages for call in message.tool_calls or []]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def test_the_newer_api_too_ends_with_the_first_of_no_parallel_calls(caller: RunningServer) -> None:
    say(caller, f"{CALL}{CALL}")
    tool = {"type": "function", "name": "weather"}
    for parallel, calls in ((True, 2), (False, 1)):
        answer = caller.client.responses.create(
            model=caller.model, input="hello", tools=[tool], parallel_tool_calls=parallel, max_output_tokens=200
        )
        assert [item.type for item in answer.output] == ["function_call"] * calls
        assert (answer.status, answer.parallel_tool_calls) == ("completed", parallel)


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
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
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


@pytest.mark.parametrize("arguments", ["[1]", "{", '"x"'])
def test_arguments_of_earlier_calls_are_json_objects(caller: RunningServer, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = {"model": caller.model, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]}
    reply = caller.http.post("/v1/chat/completions", json=body)
    assert reply.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_model_that_was_not_told_of_tools_refuses_them(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
        ask(server)
    assert caught.value.param == "tools"


Q, L = TOOL_PARSERS["qwen"], TOOL_PARSERS["llama3"]
F = ToolCall("f", "{}")
TRICKY = {"x": '}</tool_call>"\\{', "y": [{}, "<tool_call>"], "z": "你好 🦊"}
CASES: list[tuple[ToolSyntax, str, list[str | ToolCall]]] = [
    (Q, "no call at all \n", ["no call at all \n"]),
    (Q, "", []),
    (Q, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [F]),
    (Q, '<tool_call>{"name": "f"}</tool_call>', [F]),
    (Q, 'Let me see. \n\n<tool_call>{"name": "f"}</tool_call>\n', ["Let me see.", F]),
    (Q, '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>', [F, F]),
    (Q, '<tool_call>{"name": "f"}</tool_call> and then', [F, " and then"]),
    (Q, '<tool_call>{"name": "f"}', [F]),  # the end of the answer closes it
    (Q, '<tool_call>{"name": "f"}</tool', [F]),
    (Q, '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    (Q, '<tool_call>{"name": "unknown"}</tool_call>', ['<tool_call>{"name": "unknown"}</tool_call>']),
    (
        Q,
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": 3}</tool_call>'],
    ),
    (Q, "<tool_call>{name: f}</tool_call> x", ["<tool_call>{name: f}</tool_call> x"]),
    (
        Q,
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'],
    ),
    (Q, "a < b <tool_cal> c", ["a < b <tool_cal> c"]),
    (Q, '<tool_call> oops <tool_call>{"name": "f"}</tool_call>', ["<tool_call> oops", F]),
    (
        Q,
        f"<tool_call>{json.dumps({'name': 'f', 'arguments': TRICKY})}</tool_call>",
        [ToolCall("f", json.dumps(TRICKY, ensure_ascii=False))],
    ),
    (L, '{"name": "f", "parameters": {}}', [F]),
    (L, '\n{ "name" : "f", "parameters": {}}\n', [F]),
    (L, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [F]),
    (L, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', [F, F]),
    (L, '{"answer": {"name": 1}}', ['{"answer": {"name": 1}}']),
    (L, '{"name": "Ada", "age": 36} is she', ['{"name": "Ada", "age": 36} is she']),
    (L, 'So: {"name": "f", "parameters": {}}', ['So: {"name": "f", "parameters": {}}']),
    (L, '<|python_tag|>print("hello")', ['<|python_tag|>print("hello")']),
    (FORCED, '{"name": "f", "arguments": {"x": 1}}', [ToolCall("f", '{"x": 1}')]),
    (FORCED, '{"name": "f", "argum', ['{"name": "f", "argum']),
]


def read(syntax: ToolSyntax, pieces: list[str]) -> list[str | ToolCall]:
    """All that a reader finds, neighbouring texts joined."""
    reader = CallReader(syntax, {"f"})
    found: list[str | ToolCall] = []
    for piece in [part for text in pieces for part in reader.feed(text)] + reader.finish():
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize(("syntax", "text", "expected"), CASES)
def test_what_is_found_does_not_depend_on_where_the_stream_is_cut(
    syntax: ToolSyntax, text: str, expected: list[str | ToolCall]
) -> None:
    assert read(syntax, [text]) == expected
    assert read(syntax, list(text)) == expected
    for cut in range(len(text) + 1):
        assert read(syntax, [text[:cut], text[cut:]]) == expected


@settings(max_examples=300, derandomize=True)
@given(
    st.sampled_from([Q, L, FORCED]),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "f"',
                ', "arguments": {',
                "}",
                '"',
                "\\",
                ";",
                "<|python_tag|>",
                " ",
                "\n",
                "text",
                "{",
                '{"name":"f","parameters":{}}',
            ]
        )
    ),
)
def test_text_that_is_no_call_is_never_lost(syntax: ToolSyntax, pieces: list[str]) -> None:
    whole = read(syntax, ["".join(pieces)])
    assert read(syntax, pieces) == whole
    if not any(isinstance(piece, ToolCall) for piece in whole):
        assert "".join(map(str, whole)) == "".join(pieces)


def test_a_text_begins_a_call_or_none_or_it_is_too_early_to_say() -> None:
    assert [Q.begins(text) for text in ('<tool_call>\n{"name"', "\n<tool_", "<tools>")] == [True, None, False]
    assert [L.begins(text) for text in ('{ "name" : 3', '{"na', "{}")] == [True, None, False]
    assert [L.begins(text) for text in ('; <|python_tag|>{"type": "function"', "<|py", "<py")] == [True, None, False]


def test_only_what_may_begin_a_call_is_held_back() -> None:
    reader = CallReader(Q, {"f"})
    assert reader.feed("one < two") == ["one < two"]
    reader = CallReader(Q, {"f"})
    assert "".join(map(str, reader.feed("one <tool"))) == "one"
    assert "".join(map(str, reader.feed("s> two"))) == " <tools> two"
    reader = CallReader(L, {"f"})
    assert reader.feed('{"na') == []
    assert "".join(map(str, reader.feed('tion": "x", '))) == '{"nation": "x", '
    assert reader.feed('{"name": "f"}') == ['{"name": "f"}']


def test_the_syntax_is_told_by_the_template_or_by_the_option() -> None:
    assert syntax_for("auto", QWEN) is syntax_for("qwen", LLAMA3) is Q
    assert syntax_for("auto", LLAMA3) is syntax_for("llama3", QWEN) is L
    for option, template in (("none", QWEN), ("auto", None), ("qwen", "{{ messages }}"), ("auto", "{{ tools }}")):
        assert syntax_for(option, template) is None
