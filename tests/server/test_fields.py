"""Fields that clients send beside those we know: ignored and named, or refused by a strict server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.server import json_body
from minisgl.server.config import ServerConfig
from tests.server.harness import MESSAGES, RunningServer, chat_checkpoint
from tests.server.templates import QWEN

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = chat_checkpoint(tmp_path_factory.mktemp("strict"))
    with RunningServer(path, ServerConfig(strict=True, served_model_name="tiny")) as running:
        yield running


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model was told about tools."""
    with RunningServer(chat_checkpoint(tmp_path_factory.mktemp("tools"), QWEN), num_pages=512) as running:
        yield running


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 2, "temperature": 0.0, **fields}
    return server.http.post("/v1/chat/completions", json=body)


def test_unknown_fields_are_ignored_and_named(server: RunningServer) -> None:
    plain = chat(server)
    assert "x-ignored-fields" not in plain.headers
    messages = [{**MESSAGES[0], "cache_control": {"type": "ephemeral"}, "mood": "", "annotations": []}]
    reply = chat(server, messages=messages, stream_options=None, temprature=1, priority=3)
    assert reply.status_code == 200
    names = "messages[].annotations, messages[].cache_control, messages[].mood, priority, temprature"
    assert reply.headers["x-ignored-fields"] == names
    assert reply.json()["choices"] == plain.json()["choices"]


def test_streams_and_other_endpoints_name_them_too(server: RunningServer) -> None:
    reply = chat(server, stream=True, stream_options={"include_usage": True, "chunks": 1})
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "stream_options.chunks")
    body = {"text": "the fox", "rid": "7", "sampling_params": {"max_new_tokens": 1, "no_stop_trim": False}}
    reply = server.http.post("/generate", json=body)
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "rid, sampling_params.no_stop_trim")


def test_a_name_cannot_break_the_header(server: RunningServer) -> None:
    reply = chat(server, **{"x\r\nset-cookie: a\u20ac": 1, "y" * 200: 1, **{f"z{index:03}": 1 for index in range(100)}})
    assert reply.status_code == 200
    names = reply.headers["x-ignored-fields"].split(", ")
    assert (names[0], names[1], len(names)) == ("x??set-cookie??a?", "y" * 80, 20)


def test_each_name_is_logged_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "_LOGGED", set())
    with caplog.at_level(logging.WARNING, logger=json_body.__name__):
        for _ in range(3):
            chat(server, temprature=1)
    assert [record.getMessage() for record in caplog.records if "temprature" in record.getMessage()] == [
        "the field temprature of a request is not known and was ignored; --strict refuses such requests"
    ]


@pytest.mark.parametrize("field", ["functions", "guided_json", "audio", "chat_template", "structured_outputs"])
def test_what_would_change_the_answer_is_refused(server: RunningServer, field: str) -> None:
    reply = chat(server, **{field: {}})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert field in reply.json()["error"]["message"]


@pytest.mark.parametrize(("fields", "param"), [({"temprature": 1}, "temprature"), ({"metadata": {}}, "metadata")])
def test_a_strict_server_refuses_them_by_name(strict: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, **fields}
    reply = strict.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert strict.http.post("/v1/chat/completions", json=body | dict.fromkeys(fields)).status_code == 200


def test_the_document_says_whether_unknown_fields_are_taken(server: RunningServer, strict: RunningServer) -> None:
    for running, others in ((server, True), (strict, {"type": "null"})):
        schemas = running.http.get("/openapi.json").json()["components"]["schemas"]
        for name in ("ChatRequest", "ChatMessage", "CompletionRequest", "GenerateRequest", "Tool"):
            assert schemas[name]["additionalProperties"] == others


def test_the_model_has_the_name_that_it_is_served_by(strict: RunningServer) -> None:
    assert [each["id"] for each in strict.http.get("/v1/models").json()["data"]] == ["tiny"]
    reply = strict.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
    assert reply.json()["model"] == "tiny"


CLIENTS: dict[str, dict[str, Any]] = {
    "vllm-router": {
        "no_stop_trim": False,
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "include_reasoning": True,
    },
    "guidellm": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "openai": {
        "metadata": {"a": "b"},
        "reasoning_effort": "low",
        "prompt_cache_key": "k",
        "store": True,
        "verbosity": "low",
    },
    "no seed and all tokens": {"seed": -1, "top_k": -1},
    "no tools": {"tools": []},
    "no tools to choose from": {"tools": [], "tool_choice": "auto"},
    "aiperf": {"max_tokens": None, "max_completion_tokens": 3, "min_tokens": 3, "ignore_eos": True},
    "Open WebUI": {"features": {}, "chat_id": "1", "options": {}, "keep_alive": "5m"},
    "strict tools that the model may call": {"tools": [TOOL], "tool_choice": "auto"},
    "calls of before": {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": "",
                "tool_calls": [
                    {"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        ],
    },
    "a user with a name": {"messages": [{**MESSAGES[0], "name": "ada"}]},
    "an answer of before": {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": "well", "reasoning_content": "hm", "refusal": None, "annotations": []},
            *MESSAGES,
        ]
    },
}


@pytest.mark.parametrize("fields", CLIENTS.values(), ids=CLIENTS)
def test_what_common_clients_send_is_answered(caller: RunningServer, fields: dict[str, Any]) -> None:
    reply = chat(caller, **fields)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("name", CLIENTS["vllm-router"])
def test_only_the_defaults_of_what_would_change_the_answer(strict: RunningServer, name: str) -> None:
    default = CLIENTS["vllm-router"][name]
    assert chat(strict, model="tiny", **{name: default}).status_code == 200
    other = chat(strict, model="tiny", **{name: not default})
    assert other.status_code == (200 if "reasoning" in name else 400)
    if other.status_code == 400:
        assert other.json()["error"]["param"] == name


def test_every_chunk_can_count_the_tokens(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for call in (server.chat, server.complete):
        chunks = list(call(stream=True, max_tokens=6, n=2, temperature=1, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == 12 or counts[-1] < 12, "some answers end earlier"
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
        assert len(set(counts)) > 3
        last_only = list(call(stream=True, max_tokens=2, stream_options={"include_usage": True}))
        assert [chunk.usage is None for chunk in last_only] == [True] * (len(last_only) - 1) + [False]


def test_a_prompt_can_be_scored_without_a_continuation(server: RunningServer) -> None:
    prompts = [[5, 6, 7, 8], [9, 10]]
    longer = server.complete(prompt=prompts, max_tokens=1, logprobs=2, echo=True)
    scored = server.complete(prompt=prompts, max_tokens=0, logprobs=2, echo=True)
    assert scored.usage.completion_tokens == 0
    for prompt, choice, more in zip(prompts, scored.choices, longer.choices, strict=True):
        assert choice.finish_reason == "length"
        assert more.text.startswith(choice.text)
        assert len(choice.logprobs.token_logprobs) == len(prompt)
        assert choice.logprobs.token_logprobs == more.logprobs.token_logprobs[:-1]
        assert choice.logprobs.text_offset == more.logprobs.text_offset[:-1]
    chunks = list(server.complete(prompt=prompts, max_tokens=0, echo=True, stream=True))
    texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) for index in (0, 1)]
    assert texts == [choice.text for choice in scored.choices]


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"echo": True, "min_tokens": 1}])
def test_nothing_is_only_generated_where_a_prompt_comes_back(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {"model": server.model, "prompt": "x", "max_tokens": 0, **fields}
    reply = server.http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (
        400,
        list(fields)[-1] if "min_tokens" in fields else "max_tokens",
    )


FORM = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"$ref": "#/$defs/n", "$defs": {"n": {"enum": [12, 34]}}}},
}


def test_an_answer_of_a_form_or_a_call(caller: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"const": {"a": 1}}}}
    seen = set()
    for seed in range(40):
        reply = chat(caller, tools=[tool], response_format=FORM, max_tokens=80, temperature=2, seed=seed)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        if choice["message"].get("tool_calls"):
            (call,) = choice["message"]["tool_calls"]
            assert (call["function"]["name"], choice["finish_reason"]) == ("weather", "tool_calls")
            assert json.loads(call["function"]["arguments"]) == {"a": 1}
            seen.add("call")
        else:
            assert json.loads(choice["message"]["content"]) in (12, 34)
            seen.add("answer")
    assert seen == {"call", "answer"}
    reply = chat(caller, tools=[tool], response_format=FORM, max_tokens=80, tool_choice="required")
    assert reply.json()["choices"][0]["message"]["tool_calls"]
    reply = chat(caller, tools=[tool], response_format={"type": "regex", "regex": "a"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")


def test_what_an_answer_of_before_held(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content or '' }}:{{ m.content }}]{% endfor %}"
    with RunningServer(chat_checkpoint(tmp_path, template)) as running:
        before = {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "hm"}
        reply = chat(running, messages=[before, {**MESSAGES[0], "reasoning_content": "mine"}], logprobs=True)
        prompt = f"[assistant:hm:no][user::{MESSAGES[0]['content']}]"
        (same,) = running.complete(prompt=prompt, max_tokens=2, logprobs=0).choices
        assert reply.json()["choices"][0]["message"]["content"] == same.text
        assert reply.json()["usage"]["prompt_tokens"] == len(running.core.tokenizer.encode(prompt)) - 1


def test_the_version_and_the_ping_of_load_balancers(server: RunningServer) -> None:
    assert server.http.get("/version").json()["version"].count(".") >= 1
    assert server.http.get("/ping").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "path",
    ["/health", "/ping", "/health/generate", "/version", "/v1/models", "/v1/models/{}", "/v1/loads", "/openapi.json"],
)
def test_head_is_get_without_the_body(server: RunningServer, path: str) -> None:
    path = path.format(server.model)
    full, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (full.status_code, b"") == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == full.headers[name]


def test_head_is_refused_where_get_is(server: RunningServer, tmp_path: Path) -> None:
    assert server.http.head("/v1/completions").status_code == 405
    assert server.http.head("/v1/models/other").status_code == 404
    documented = server.http.get("/openapi.json").json()["paths"].values()
    assert not any("head" in methods for methods in documented)
    with RunningServer(chat_checkpoint(tmp_path), ServerConfig(api_key="k")) as guarded:
        assert [guarded.http.head(path).status_code for path in ("/health", "/version")] == [200, 401]


@pytest.mark.parametrize(("headers", "size", "status"), [({}, 10, 401), ({"authorization": "bearer k"}, 9000, 413)])
def test_refusals_of_the_middleware_can_be_read_by_pages(
    tmp_path: Path, headers: dict[str, str], size: int, status: int
) -> None:
    config = ServerConfig(api_key="k", max_body_size=4000, cors_origin=("https://page.example",))
    with RunningServer(chat_checkpoint(tmp_path), config) as running:
        all_headers = {**headers, "origin": "https://page.example", "content-type": "application/json"}
        reply = running.http.post("/v1/completions", content=b" " * size, headers=all_headers)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "https://page.example"
