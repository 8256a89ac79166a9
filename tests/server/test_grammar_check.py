"""Grammars that would stall the engine: refused by name, tried elsewhere, and never in the way of others."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams
from minisgl.server.config import ServerConfig
from minisgl.server.grammar_check import GrammarCheck
from tests.server.harness import MESSAGES, RunningServer, ServerThread, in_background, wait_until
from tests.server.test_life import send

SLOW = {"type": "integer", "multipleOf": 10_000_019}
LARGE = {"type": "string", "allOf": [{"pattern": f"^.*{number}.*$"} for number in range(300)]}
DEEP = '{"properties": {"a": ' * 20 + "{}" + "}}" * 20


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}


def chat(server: ServerThread, schema: Any, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 8, "response_format": form(schema), **fields}
    return server.http.post("/v1/chat/completions", json=body)


def tried(*params: SamplingParams, seconds: float = 2.0, memory: int = 512 * 2**20) -> list[str]:
    """What is wrong with each."""

    async def scenario() -> list[str]:
        check, reasons = GrammarCheck(seconds, memory), []
        for each in params:
            try:
                await check.check(each)
                reasons.append("")
            except InvalidRequest as error:
                reasons.append(str(error))
        await check.close()
        return reasons

    return asyncio.run(scenario())


@pytest.mark.parametrize("schema", [SLOW, LARGE], ids=["slow", "large"])
def test_a_schema_that_takes_too_long_is_refused_by_name(either: ServerThread, schema: Any) -> None:
    reply = chat(either, schema)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
    assert "takes more than 2 s to compile; simplify it, or raise --grammar-timeout" in reply.json()["error"]["message"]
    assert chat(either, {"enum": [1, 2]}).status_code == 200
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    body = {"model": either.model, "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    assert either.http.post("/v1/chat/completions", json=body).status_code == 400


def test_what_takes_too_much_memory_ends_the_child_alone() -> None:
    fine, large = (SamplingParams(json_schema=json.dumps(each)) for each in ({"enum": [1]}, LARGE))
    message = "json_schema: takes more than 16 MiB to compile; simplify it, or raise --grammar-memory"
    assert tried(fine, large, fine, SamplingParams(regex="a|b"), seconds=60.0, memory=2**24) == ["", message, "", ""]


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": json.dumps({"enum": [f"value {number}" for number in range(3000)]})},
        {"json_schema": '{"type": "string", "minLength": 1000000000}'},
        {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000000}'},
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": DEEP},
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "(.*a.{200}){30}"},
        {"regex": "(x+x+)+y"},
        {"regex": "(" * 2000 + "a" + ")?" * 2000},
        {"regex": 'a\n"\u2028'},
    ],
)
def test_others_are_compiled_or_refused_for_what_they_say(params: dict[str, str]) -> None:
    (reason,) = tried(SamplingParams(**params))
    assert "takes more than" not in reason
    assert reason == "" or reason.startswith(next(iter(params)))


def test_a_verdict_is_remembered() -> None:
    async def scenario() -> None:
        check = GrammarCheck(2.0, 512 * 2**20)
        bad = SamplingParams(regex="(")
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="unclosed group"):
                await check.check(bad)
            await check.close()
        assert check._child is None, "it was not started again"

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_the_trial(checkpoint: Path) -> None:
    with RunningServer(checkpoint, ServerConfig(grammar_timeout=600.0)) as server:
        connection = send(server, response_format=form(SLOW), ignore_eos=False)
        check = server.engine._grammars
        wait_until(lambda: check._child is not None)
        child = check._child
        assert child is not None
        connection.close()
        wait_until(lambda: child.returncode is not None)
        assert server.chat().choices[0].finish_reason == "length"


def test_the_steps_of_others_do_not_wait_for_a_grammar(own_server: RunningServer) -> None:
    grammars, compiling, ready = own_server.core.input_processor.grammars, threading.Event(), threading.Event()
    compile_grammar = grammars.compile

    def held_back(params: SamplingParams) -> None:
        compiling.set()
        assert ready.wait(60)
        compile_grammar(params)

    grammars.compile = held_back
    with_grammar = in_background(lambda: chat(own_server, {"enum": [1, 2]}).json()["choices"][0]["message"]["content"])
    assert compiling.wait(60)
    assert own_server.chat().choices[0].finish_reason == "length"
    ready.set()
    assert with_grammar() in ("1", "2")
    assert own_server.idle()


def test_a_grammar_that_the_vocabulary_cannot_spell_is_refused_by_the_engine(own_server: RunningServer) -> None:
    def refuse(params: SamplingParams) -> None:
        raise InvalidRequest("json_schema", "no output fits it")

    own_server.core.input_processor.grammars.compile = refuse
    reply = chat(own_server, {"enum": [1, 2]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
    assert own_server.idle()
