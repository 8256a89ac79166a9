"""Bodies that are no JSON, or JSON that two readers could understand differently."""

from __future__ import annotations

import json

import pytest

from minisgl.server.errors import ApiError
from minisgl.server.json_body import MAX_NESTING, read_json
from tests.server.harness import RunningServer

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
        (b"[" * 100_000, "inside of each other", None),
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
        '"unknown \\u0000": 1',
    ],
)
def test_strange_values_are_the_clients_fault(server: RunningServer, fields: str) -> None:
    prompt = "" if "prompt" in fields else '"prompt": "x",'
    body = f'{{"model": {json.dumps(server.model)}, {prompt} {fields}}}'
    reply = server.http.post("/v1/completions", content=body.encode(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
