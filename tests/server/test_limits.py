"""Limits of what a client may ask for: options of the server. Refusals name the field, the limit and the flag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig
from tests.server.harness import MESSAGES, PROMPT, RunningServer, chat_checkpoint
from tests.server.templates import QWEN
from tests.server.test_grammar_check import SLOW, form

LIMITS: dict[str, Any] = {
    "max_body_size": 20_000,
    "max_body_fields": 100,
    "max_body_values": 500,
    "max_stop_strings": 2,
    "max_stop_length": 3,
    "max_tokenize_chars": 50,
    "grammar_timeout": 0.2,
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = chat_checkpoint(tmp_path_factory.mktemp("limited"), QWEN)
    with RunningServer(path, ServerConfig(served_model_name="m", **LIMITS)) as running:
        yield running


COMPLETION, CHAT, GENERATE, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"


@pytest.mark.parametrize(
    ("path", "fields", "param", "message", "flag"),
    [
        (COMPLETION, {"stop": ["a", "b", "c"]}, "stop", "at most 2 strings, got 3", "max-stop-strings"),
        (CHAT, {"stop": ["abc", "abcd"]}, "stop", "1 to 3 characters, got 4", "max-stop-length"),
        (
            GENERATE,
            {"sampling_params": {"stop": "abcd"}},
            "sampling_params.stop",
            "1 to 3 characters, got 4",
            "max-stop-length",
        ),
        (TOKENIZE, {"prompt": "x" * 51}, "prompt", "at most 50 characters, got 51", "max-tokenize-chars"),
        (CHAT, {"response_format": form(SLOW)}, "response_format", "more than 0.2 s to compile", "grammar-timeout"),
        (
            COMPLETION,
            {"logit_bias": {f"{n}": 0 for n in range(100)}},
            None,
            "103 fields; at most 100",
            "max-body-fields",
        ),
        (COMPLETION, {"prompt": [{}] * 100}, None, "102 objects and lists; at most 100", "max-body-fields"),
        (COMPLETION, {"prompt": [1] * 500}, None, "501 values; at most 500", "max-body-values"),
        (COMPLETION, {"prompt": "x" * 20_000}, None, "larger than 20000 bytes", "max-body-size"),
    ],
)
def test_a_refusal_names_field_limit_and_flag(
    limited: RunningServer, path: str, fields: dict[str, Any], param: str | None, message: str, flag: str
) -> None:
    needed: dict[str, dict[str, Any]] = {
        COMPLETION: {"model": "m", "prompt": PROMPT},
        CHAT: {"model": "m", "messages": MESSAGES},
        GENERATE: {"text": PROMPT},
        TOKENIZE: {},
    }
    reply = limited.http.post(path, json={**needed[path], **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (413 if flag == "max-body-size" else 400, param), error
    assert message in error["message"]
    assert f"--{flag}" in error["message"]


def test_what_is_within_the_limits_is_answered(limited: RunningServer) -> None:
    body = {"model": "m", "prompt": [[1] * 40] * 12, "max_tokens": 1, "stop": ["abc", "b"]}
    assert limited.http.post(COMPLETION, json=body).status_code == 200
    assert limited.http.post(TOKENIZE, json={"prompt": "x" * 50}).status_code == 200


def test_the_document_has_the_servers_own_limits(limited: RunningServer, server: RunningServer) -> None:
    for running, most, longest in ((limited, 2, 3), (server, 64, 256)):
        schemas = running.http.get("/openapi.json").json()["components"]["schemas"]
        for name in ("ChatRequest", "CompletionRequest", "GenerateParams"):
            text, texts = schemas[name]["properties"]["stop"]["anyOf"][0]["anyOf"]
            assert (texts["maxItems"], text["maxLength"], texts["items"]["maxLength"]) == (most, longest, longest)


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        ServerConfig(**{name: 0})


@pytest.mark.parametrize(("name", "most"), [("max_stop_strings", 64), ("max_stop_length", 256)])
def test_a_server_cannot_allow_more_stop_strings_than_its_engine(name: str, most: int) -> None:
    ServerConfig(**{name: most})
    with pytest.raises(ConfigError, match=f"{name}: must be at most {most}, the engine's own limit"):
        ServerConfig(**{name: most + 1})
