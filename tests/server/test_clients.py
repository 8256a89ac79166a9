"""Bodies as common clients send them, recorded from these; benchmarks/notes.md tells how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.server.config import ServerConfig
from tests.server.harness import RunningServer, chat_checkpoint
from tests.server.templates import QWEN

BODIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("client_bodies.json").read_bytes())


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that ignores nothing."""
    path = chat_checkpoint(tmp_path_factory.mktemp("clients"), QWEN)
    with RunningServer(path, ServerConfig(strict=True, served_model_name="default"), num_pages=512) as running:
        yield running


def endpoint(body: dict[str, Any]) -> str:
    names = {"messages": "/v1/chat/completions", "input": "/v1/responses", "prompt": "/v1/completions"}
    return next((path for field, path in names.items() if field in body), "/generate")


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_strict_server_answers_what_clients_send(strict: RunningServer, body: dict[str, Any]) -> None:
    reply = strict.http.post(endpoint(body), json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        assert "error" not in reply.json() or reply.json()["error"] is None
        return
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    if endpoint(body) == "/v1/responses":
        assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete")
    else:
        assert events[-1] == "[DONE]"


def test_what_they_ask_for_is_what_they_get(strict: RunningServer) -> None:
    body = BODIES["guidellm text"]
    *chunks, last = [line for line in strict.http.post("/v1/completions", json=body).text.split("\n\n") if line]
    counts = [json.loads(chunk.removeprefix("data: "))["usage"]["completion_tokens"] for chunk in chunks]
    assert (last, counts[-1]) == ("data: [DONE]", body["max_tokens"])
    scored = strict.http.post("/v1/completions", json=BODIES["lm-eval, log-likelihood"]).json()["choices"][0][
        "logprobs"
    ]
    assert len(scored["token_logprobs"]) == len(BODIES["lm-eval, log-likelihood"]["prompt"][0]) + 1
    call = strict.http.post("/v1/responses", json=BODIES["openai-agents responses"]).json()["output"]
    assert all(item["type"] in ("function_call", "message") for item in call)
