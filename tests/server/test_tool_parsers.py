"""Calls in a model's text: found whole, at whatever place the stream cuts it, and nothing else touched."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.tool_parsers import FORCED, TOOL_PARSERS, CallReader, ToolCall, ToolSyntax, syntax_for
from tests.server.templates import LLAMA3, QWEN

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
