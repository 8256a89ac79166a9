"""Keys, sizes, origins and ids: what a request meets before it reaches a route."""

from __future__ import annotations

import builtins
import hmac
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from minisgl.errors import ConfigError
from minisgl.server.app import KeyGuard, is_open
from minisgl.server.config import ServerConfig
from minisgl.server.launch import bind, warn_if_public
from tests.server.harness import MESSAGES, RunningServer, wait_until

KEY = "a-secret-key"
LIMIT = 2000
PAGE = "https://class.example.org"


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, ServerConfig(api_key=KEY, max_body_size=LIMIT, cors_origin=(PAGE,))) as running:
        yield running


@pytest.mark.parametrize("header", [None, "", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}"])
def test_who_does_not_know_the_key_stays_out(guarded: RunningServer, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nix")):
        reply = guarded.http.request(method, path, headers=headers)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert KEY not in reply.text
    assert guarded.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("header", "knows"),
    [
        (f"Bearer {KEY}".encode(), True),
        (f"bearer {KEY}".encode(), True),
        (f"Basic {KEY}".encode(), False),
        (b"", False),
        (b"Bearer", False),
        (b"Bearer a-secret-ke\xff", False),
    ],
)
def test_the_key_is_compared_in_a_time_that_tells_nothing(
    header: bytes, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    genuine = hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return genuine(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noting)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    assert KeyGuard(app, KEY)._knows_key({"headers": [(b"authorization", header)]}) is knows
    assert [set(pair) for pair in compared] == [{header.partition(b" ")[2], KEY.encode()}]


def test_who_knows_the_key_comes_in(guarded: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        guarded.chat()
    client = guarded.client.with_options(api_key=KEY)
    assert client.chat.completions.create(model=guarded.model, messages=MESSAGES, max_tokens=2).choices
    assert "security" in guarded.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()


def test_paths_that_need_no_key() -> None:
    assert all(map(is_open, ("/health", "/ui", "/ui/page.css")))
    assert not any(map(is_open, ("/ui/events", "/health/generate", "/metrics", "/v1/models", "/openapi.json", "/uix")))


def test_a_body_that_is_too_large_is_not_read(guarded: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1000

    for content in (b" " * (LIMIT + 1), endless()):
        try:
            reply = guarded.http.post("/v1/completions", content=content, headers=headers)
        except httpx.WriteError:  # the server has hung up before all of it was sent
            continue
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    reply = guarded.http.post("/tokenize", content=b'{"prompt": "x"}'.ljust(LIMIT), headers=headers)
    assert reply.status_code == 200


def test_pages_of_the_allowed_origin_alone_may_call(guarded: RunningServer, server: RunningServer) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for running, origin, allowed in (
        (guarded, PAGE, PAGE),
        (guarded, "https://evil.example", None),
        (server, PAGE, None),
    ):
        reply = running.http.options("/v1/chat/completions", headers={"Origin": origin, **asked})
        assert reply.headers.get("access-control-allow-origin") == allowed
        reply = running.http.get("/health", headers={"Origin": origin})
        assert reply.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("given", ["", "a" * 65, "two words", 'quote"', "new\\nline"])
def test_a_request_id_is_repeated_if_it_is_harmless(server: RunningServer, given: str) -> None:
    assert server.http.get("/health", headers={"x-request-id": "run-7.b_1"}).headers["x-request-id"] == "run-7.b_1"
    made_up = server.http.get("/nowhere", headers={"x-request-id": given}).headers["x-request-id"]
    assert made_up != given
    assert len(made_up) == 32


def test_the_key_is_in_no_text_of_the_configuration() -> None:
    assert KEY not in repr(ServerConfig(api_key=KEY))
    for key in ("", "new\nline", "schlüssel"):
        with pytest.raises(ConfigError, match=r"^api_key: ") as caught:
            ServerConfig(api_key=key)
        assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("127.0.0.1", None, False), ("0.0.0.0", KEY, False), ("0.0.0.0", None, True)]
)
def test_a_server_for_everybody_without_a_key_is_warned_of(
    host: str, key: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with bind(host, 0) as listener, caplog.at_level(logging.WARNING):
        warn_if_public(listener, ServerConfig(host=host, api_key=key))
    assert ("--api-key" in caplog.text) is warned


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 70000), ("max_body_size", 0), ("health_timeout", 0.0), ("tool_parser", "gpt"), ("log_format", "xml")],
)
def test_options_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        ServerConfig(**{field: value})


@pytest.fixture(scope="module")
def impatient(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, request_timeout=0.5) as running:
        yield running


def timed_out(error: openai.APIError) -> bool:
    return error.code == "timeout" and "time limit of 0." in error.message


def answers(impatient: RunningServer) -> bool:
    """False if that took too long as well, as it may on a busy machine."""
    try:
        return bool(impatient.chat(max_tokens=2).choices)
    except openai.APIStatusError as error:
        if not timed_out(error):
            raise
        return False


def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_its_pages(impatient: RunningServer) -> None:
    impatient.gate.allowed = 3
    with pytest.raises(openai.APIStatusError) as caught:
        impatient.chat(max_tokens=100)
    assert (caught.value.status_code, caught.value.type) == (408, "server_error")
    assert timed_out(caught.value)
    impatient.gate.allowed = 3
    with pytest.raises(openai.APIError) as late:
        list(impatient.chat(max_tokens=100, stream=True))
    assert timed_out(late.value)
    impatient.gate.allowed = None
    wait_until(impatient.idle)
    wait_until(lambda: answers(impatient))


def test_a_client_may_want_less_time_but_not_more(impatient: RunningServer) -> None:
    for wanted, limit in ((0.1, "0.1 s"), (50, "0.5 s")):
        impatient.gate.allowed = 0
        with pytest.raises(openai.APIStatusError, match=limit):
            impatient.chat(extra_body={"timeout": wanted})
        impatient.gate.allowed = None
        wait_until(impatient.idle)
    for wanted in (0, -1, 1e9, "1"):
        with pytest.raises(openai.BadRequestError, match=r"timeout: "):
            impatient.chat(extra_body={"timeout": wanted})


SECRET = "the content of a file"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all files that are opened."""
    names: list[str] = []
    for owner, name in ((builtins, "open"), (io, "open"), (os, "open"), (Path, "open")):
        genuine = getattr(owner, name)

        def noting(file: Any, *rest: Any, genuine: Any = genuine, **more: Any) -> Any:
            names.append(str(file))
            return genuine(file, *rest, **more)

        monkeypatch.setattr(owner, name, noting)
    return names


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"chat_template": "{{ messages }}"}, 400, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenizer_kwargs": {"x": "FILE"}}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "FILE"}}, 200, None),
        ({"lora_path": "FILE"}, 200, None),
        ({"tokenizer": "FILE"}, 200, None),
        ({"model": "FILE"}, 404, "model"),
        ({"model": "../FILE"}, 404, "model"),
        ({"content": [{"type": "image_url", "image_url": {"url": "file://FILE"}}]}, 400, "messages[0].content[0].type"),
        ({"content": [{"type": "file", "file": {"file_id": "FILE"}}]}, 400, "messages[0].content[0].type"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, 400, "messages[0].content[0].type"),
    ],
)
def test_no_path_or_template_of_a_request_is_ever_opened(
    server: RunningServer, tmp_path: Path, opened: list[str], fields: dict[str, Any], status: int, param: str
) -> None:
    file = tmp_path / "file"
    file.write_text(SECRET)
    opened.clear()
    content = fields.get("content")
    messages = MESSAGES if content is None else [{"role": "user", "content": content}]
    others = {name: value for name, value in fields.items() if name != "content"}
    body = json.dumps({"model": server.model, "messages": messages, **others}).replace("FILE", str(file))
    reply = server.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json().get("error", {}).get("param")) == (status, param), reply.text
    assert SECRET not in reply.text
    assert str(file) not in opened


def test_markup_in_a_message_is_text(server: RunningServer) -> None:
    plain = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}]}).json()
    text = server.http.post("/detokenize", json={"tokens": plain["tokens"]}).json()["text"]
    assert "{{ 7 * 7 }}" in text
