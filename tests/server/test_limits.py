"""Time limits, and what a request can never make the server do."""

from __future__ import annotations

import builtins
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import MESSAGES, RunningServer, wait_until


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
        ({"chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs"),
        ({"lora_path": "FILE"}, 400, "lora_path"),
        ({"tokenizer": "FILE"}, 400, "tokenizer"),
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
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert SECRET not in reply.text
    assert str(file) not in opened


def test_markup_in_a_message_is_text(server: RunningServer) -> None:
    plain = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}]}).json()
    text = server.http.post("/detokenize", json={"tokens": plain["tokens"]}).json()["text"]
    assert "{{ 7 * 7 }}" in text
