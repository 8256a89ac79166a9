"""Keys, sizes, origins and ids: what a request meets before it reaches a route."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig
from minisgl.server.guards import KeyGuard, is_open
from minisgl.server.launch import bind, warn_if_public
from tests.server.harness import MESSAGES, RunningServer

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
    [(f"Bearer {KEY}".encode(), True), (b"", False), (b"Bearer", False), (b"Bearer a-secret-ke\xff", False)],
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
    assert [set(pair) for pair in compared] == [{header, f"Bearer {KEY}".encode()}]


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
