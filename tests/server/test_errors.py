"""Every mistake gets a status, a message and the field's name, in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from minisgl.server.errors import ApiError, to_json
from minisgl.server.json_body import MAX_NESTING, read_json
from tests.server.harness import MESSAGES, RunningServer


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": -2}, "seed"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": [f"{number}" for number in range(10_000)]}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"max_tokens": 250}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "robot", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "the template refuses this"}]}, "messages"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user("dog " * 300), "messages"),
        (user("dog " * 1000), "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_chat_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and "stream" not in fields and "stream_options" not in fields:
        fields = {**fields, "stream": True}
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 4, **fields}
    reply = server.http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")
    assert server.idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["text", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [[1, 2], [1, -1]]}, "prompt"),
        ({"prompt": [5] * 257}, "prompt"),
        ({"prompt": "half a \ud800"}, "prompt"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_a_malformed_completion_is_refused_by_name(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": server.model, "prompt": "the fox", **fields})
    reply = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert server.idle()


def test_a_bad_prompt_in_a_list_refuses_all_of_them(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="KV cache of 256 tokens"):
        server.complete(prompt=[[5, 6, 7], [5] * 257], max_tokens=1)
    assert server.idle()


@pytest.mark.parametrize("fields", [{"model": None}, {"prompt": None}])
def test_missing_fields_are_named(server: RunningServer, fields: dict[str, Any]) -> None:
    reply = server.http.post("/v1/completions", json={"model": server.model, "prompt": "the fox", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b'"text"', b"\xff", b"[" * 100_000, b'{"odd \\ud800 name": 1}']
)
def test_a_body_that_is_no_json_object(server: RunningServer, body: bytes) -> None:
    reply = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_routes_and_methods(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.chat(model="gpt-5")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for method, path, status in (("GET", "/v2", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)):
        reply = server.http.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_json_is_compact_utf8_whatever_the_text() -> None:
    value = {"model": 'é\u2028"', "choices": [{"logprob": -9999.0, "text": None}]}
    assert json.loads(to_json(value)) == value
    assert b" " not in to_json(value)
    assert to_json({"model": "half \ud800"}) == b'{"model":"half ?"}'


def test_a_long_text_is_a_text_whatever_is_in_it() -> None:
    text = '{[:,"\\' * 400_000
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


DEEP = b"[" * MAX_NESTING + b"]" * MAX_NESTING


@pytest.mark.parametrize(
    "body", [b"3", b'{"a": [1, {"b": null}], "c": "\\u00e9"}', DEEP, b"[18446744073709551615]", b'["\\ud83e\\udd8a"]']
)
def test_what_json_can_say_is_read(body: bytes) -> None:
    assert read_json(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "not valid JSON", None),
        (b"{", "not valid JSON", None),
        (b"\xff", "not valid UTF-8", None),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8", None),
        (b'{"a": 1, "a": 2}', "'a' twice", None),
        (b'{"temperature": NaN}', "NaN", None),
        (b"[Infinity]", "Infinity", None),
        (b"[-Infinity]", "-Infinity", None),
        (b'{"seed": ' + b"9" * 5000 + b"}", "5000 digits", None),
        (b"[" + DEEP + b"]", "inside of each other", None),
        (b"[" * 40_000, "inside of each other", None),
        (b"[" * 100_000, "100000 objects and lists; at most 50000", None),
        (b"[" + b"{}," * 50_000 + b"1]", "50001 objects and lists; at most 50000", None),
        (b'{"a":0' + b',"b\\":":0' * 60_000 + b"}", "60001 fields; at most 50000", None),
        (b"[1" + b",1" * 2_000_000 + b"]", "2000001 values; at most 2000000", None),
        (b"{" + b",".join(b'"%06d":0' % n for n in range(20_000)) + b',"019999":0}', "'019999' twice", None),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, "inside of each other", None),
        (b'{"messages": [{"content": "half \\ud800"}]}', "lone surrogate at character 5", "messages[0].content"),
        (b'{"odd \\ud800 name": 1}', "lone surrogate", None),
    ],
)
def test_the_rest_is_refused(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_json(body)
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert message in caught.value.detail


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read_so_that_no_page_elsewhere_can_post(server: RunningServer, path: str, kind: str) -> None:
    reply = server.http.post(path, content=b"{}", headers={"Content-Type": kind})
    assert reply.status_code == 415
    assert "application/json" in reply.json()["error"]["message"]


def test_a_charset_beside_the_type_is_no_harm(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert server.http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        '"temperature": 1e400',
        '"temperature": 99999999999999999999',
        '"seed": 99999999999999999999',
        '"logit_bias": {"99999999999999999999": 1}',
        '"stop_token_ids": [99999999999999999999]',
        '"timeout": 1e400',
        '"prompt": [99999999999999999999]',
        '"user": "\\ud800"',
        '"stop": "\\udfff"',
        '"max_tokens": -99999999999999999999',
        '"n": 1.0e30',
    ],
)
def test_strange_values_are_the_clients_fault(server: RunningServer, fields: str) -> None:
    prompt = "" if "prompt" in fields else '"prompt": "x",'
    body = f'{{"model": {json.dumps(server.model)}, {prompt} {fields}}}'
    reply = server.http.post("/v1/completions", content=body.encode(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
