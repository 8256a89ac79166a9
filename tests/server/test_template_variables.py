"""Variables that a client passes to the chat template: what it may say, and what the server says itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from minisgl.server.chat_request import MAX_TEMPLATE_VARIABLES, SET_BY_SERVER
from minisgl.server.config import ServerConfig
from tests.server.harness import MESSAGES, ProcessServer, RunningServer, ServerThread, chat_checkpoint
from tests.tiny_tokenizer import TEMPLATE

CALM = {"enable_thinking": False}
THINKS = TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}think {% endif %}"


@pytest.fixture(scope="module", params=["in process", "processes"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server whose model thinks unless it is told not to."""
    checkpoint = chat_checkpoint(tmp_path_factory.mktemp("thinker"), THINKS)
    alone = request.param == "in process"
    with RunningServer(checkpoint) if alone else ProcessServer(checkpoint, ServerConfig()) as running:
        yield running


def prompt(server: ServerThread, **fields: Any) -> str:
    tokens = server.http.post("/tokenize", json={"messages": MESSAGES, **fields}).json()["tokens"]
    return server.engine.tokenizer.spell(tokens)


def test_every_endpoint_with_messages_tells_the_template(thinker: ServerThread) -> None:
    assert prompt(thinker).endswith("assistant think ")
    assert prompt(thinker, chat_template_kwargs={"enable_thinking": True, "other": None}).endswith("think ")
    assert prompt(thinker, chat_template_kwargs=CALM).endswith("assistant ")
    tokens = [len(thinker.engine.tokenizer.encode(text)) - 1 for text in (prompt(thinker),)]
    calm = thinker.http.post("/tokenize", json={"messages": MESSAGES, "chat_template_kwargs": CALM}).json()["count"]
    for body, expected in (({}, tokens[0]), ({"chat_template_kwargs": CALM}, calm)):
        assert thinker.chat(max_tokens=1, extra_body=body).usage.prompt_tokens == expected
        newer = thinker.client.responses.create(
            model=thinker.model, input=MESSAGES, max_output_tokens=1, extra_body=body
        )
        assert newer.usage is not None
        assert newer.usage.input_tokens == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        *(({name: None}, "set by the server") for name in ("messages", "tools", "add_generation_prompt")),
        *(({name: ""}, "set by the server") for name in ("bos_token", "chat_template", "tokenize", "self")),
        ({"enable thinking": 1}, "no name"),
        ({"x": "y" * MAX_TEMPLATE_VARIABLES}, f"at most {MAX_TEMPLATE_VARIABLES}"),
        ({"x": 2**64}, "64 bits"),
        ([], "dictionary"),
    ],
)
def test_what_is_not_the_clients_to_say_is_refused(server: RunningServer, variables: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.chat(extra_body={"chat_template_kwargs": variables})
    assert caught.value.param == "chat_template_kwargs"
    for path, body in (("/v1/responses", {"model": server.model, "input": "x"}), ("/tokenize", {"messages": MESSAGES})):
        reply = server.http.post(path, json={**body, "chat_template_kwargs": variables})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_template_that_cannot_use_a_variable_ends_this_request_alone(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="template rejects"):
        server.chat(messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])
    assert server.chat(max_tokens=1, extra_body={"chat_template_kwargs": {"raise_exception": 1}}).choices


@pytest.mark.parametrize("function", [PreTrainedTokenizerBase.apply_chat_template, render_jinja_template])
def test_no_variable_can_be_mistaken_for_an_option_of_the_library(function: Any) -> None:
    names = {
        name for name, option in inspect.signature(function).parameters.items() if option.kind is not option.VAR_KEYWORD
    }
    assert names <= SET_BY_SERVER
