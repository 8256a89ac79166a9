"""``/openapi.json``: the document tells what the server takes and answers, and no more."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from pydantic import TypeAdapter, ValidationError
from schemathesis.generation import GenerationMode

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams
from minisgl.server.chat_request import ChatRequest
from minisgl.server.native_routes import GenerateRequest
from minisgl.server.openapi import ChatReply, CompletionReply, ErrorReply, GenerateReply, ModelList
from minisgl.server.requests import CompletionRequest
from tests.server.harness import MESSAGES, RunningServer, chat_checkpoint
from tests.server.templates import QWEN

CHECKED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
POSTS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(chat_checkpoint(tmp_path_factory.mktemp("small"), QWEN), max_seq_len=40) as running:
        yield running


def test_every_answer_has_the_documented_shape(server: RunningServer) -> None:
    chat: dict[str, Any] = {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 2,
        "model": server.model,
        "max_tokens": 3,
    }
    text: dict[str, Any] = {"prompt": "x", "logprobs": 2, "echo": True, "model": server.model, "max_tokens": 3}
    for path, body, shape in (
        ("/v1/chat/completions", chat, ChatReply),
        ("/v1/completions", text, CompletionReply),
        ("/generate", {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 2}}, list[GenerateReply]),
        ("/v1/completions", {}, ErrorReply),
        ("/v1/chat/completions", {**chat, "model": "x"}, ErrorReply),
    ):
        TypeAdapter(shape).validate_json(server.http.post(path, json=body).content)
    ModelList.model_validate_json(server.http.get("/v1/models").content)
    assert server.http.get(f"/v1/models/{server.model}").json() == server.http.get("/v1/models").json()["data"][0]


def test_nothing_of_fastapis_own_is_left(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            statuses = set(operation["responses"])
            assert "422" not in statuses
            assert "401" not in statuses, "this server has no key"
            assert statuses >= ({"200", "400", "413", "415", "503"} if path in POSTS else {"200"})
    schemas = document["components"]["schemas"]
    assert not {"HTTPValidationError", "ValidationError"} & schemas.keys()
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [server.model]
    for path in ("/docs", "/redoc"):
        assert server.http.get(path).status_code == 404


LIMITED = [
    (kind, name)
    for kind in (ChatRequest, CompletionRequest)
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "max_tokens",
    )
]


@pytest.mark.parametrize(("kind", "name"), LIMITED)
def test_the_limits_in_the_document_are_those_of_the_engine(kind: type[Any], name: str) -> None:
    schema = kind.model_json_schema()["properties"][name]
    limits = next(part for part in schema["anyOf"] if part != {"type": "null"})
    step = 1 if limits["type"] == "integer" else 1e-6
    low = limits.get("minimum", limits.get("exclusiveMinimum"))
    if name in ("top_k", "seed"):  # there −1 means that there is none
        low += 1
    if (kind.__name__, name) == ("CompletionRequest", "max_tokens"):  # there 0 asks for the prompt alone
        low += 1
    others = {"max_tokens": None} if name == "min_tokens" else {}
    taken = low if "minimum" in limits else low + step
    SamplingParams(**others, **{name: taken})
    SamplingParams(**others, **{name: limits["maximum"]})
    for beyond in (low - step if "minimum" in limits else low, limits["maximum"] + step):
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**others, **{name: beyond})


def test_null_is_documented_wherever_a_field_may_be_left_out() -> None:
    for kind in (ChatRequest, CompletionRequest, GenerateRequest):
        schema = kind.model_json_schema()
        for name, field in schema["properties"].items():
            assert ({"type": "null"} in field.get("anyOf", ())) is (name not in schema.get("required", ())), name


@pytest.mark.parametrize("given_value", [0, 0.0, True, 1.0, "false", 2])
def test_a_default_is_taken_as_it_is_or_not_at_all(given_value: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest(model="m", prompt="x", best_of=given_value)


def test_defaults_that_clients_send_are_taken(server: RunningServer) -> None:
    chat = {
        "n": 1,
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "top_logprobs": 0,
        "logprobs": False,
        "stop": None,
        "response_format": {"type": "text"},
        "tools": None,
        "metadata": None,
        "seed": None,
        "user": "x",
        "logit_bias": {},
        "presence_penalty": 0,
    }
    assert server.chat(max_tokens=1, extra_body=chat).choices
    text = {"best_of": 1, "echo": False, "suffix": None, "n": 1, "logprobs": None}
    assert server.complete(max_tokens=1, extra_body=text).choices


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_made_up_requests_get_documented_answers(small: RunningServer, path: str, mode: GenerationMode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_dict(small.http.get("/openapi.json").json())
        cases = schema[path]["POST"].as_strategy(generation_mode=mode)
    answers: list[int] = []

    @settings(max_examples=30, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case: Any) -> None:
        try:
            reply = case.call(base_url=small.url)
        except (httpx.InvalidURL, UnicodeEncodeError):
            return
        answers.append(reply.status_code)
        assert reply.status_code < 500, reply.text
        case.validate_response(reply, checks=list(map(schemathesis.checks.CHECKS.get_one, CHECKED)))

    ask()
    assert len(answers) >= 20
    if mode is GenerationMode.NEGATIVE:
        assert set(answers) <= {400, 404, 408, 415}
