"""What Ray Serve is told, and what a replica and the ingress do; Ray itself is not needed for that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from minisgl.config import EngineConfig
from minisgl.deploy.ray_app import (
    PREFIX_AFFINITY,
    Call,
    EngineReplica,
    Ingress,
    ReplicaConfig,
    application,
    parse_options,
    prompt_of,
)
from minisgl.errors import ConfigError, EngineDead
from minisgl.server.config import ServerConfig
from tests.server.harness import MESSAGES, TINY, chat_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("replica"))


def test_options_are_those_of_the_command_line() -> None:
    engine, server, replicas = parse_options(
        {"model": "m", "num_pages": 64, "fusions": ["norm", "rope"], "in_process": True, "max_replicas": "4"}
    )
    assert (engine.model, engine.num_pages, engine.fusions) == ("m", 64, ("norm", "rope"))
    assert server.in_process
    assert replicas == ReplicaConfig(max_replicas=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "m"}, "^modle: unknown option"),
        ({"max_replicas": "many"}, "max-replicas"),
        ({"page_size": "3"}, "^page_size: must be a power of two"),
        ({"max_replicas": 2, "min_replicas": 3}, "^max_replicas: must be at least 1 and min_replicas"),
        ({"max_replicas": 0, "min_replicas": 0}, "^max_replicas: must be at least 1"),
        ({"target_ongoing_requests": 0}, "^target_ongoing_requests: must be positive, got 0"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        application(options)


def test_the_gpus_of_a_replica_are_one_bundle() -> None:
    replicas = ReplicaConfig(min_replicas=0, max_replicas=3, target_ongoing_requests=8, cpus=2)
    options = replicas.deployment_options(EngineConfig(tensor_parallel_size=4), cluster_gpus=8)
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 4}]
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 4}
    assert options["autoscaling_config"] == {"min_replicas": 0, "max_replicas": 3, "target_ongoing_requests": 8}
    assert options["request_router_config"]["request_router_class"] == PREFIX_AFFINITY
    for engine, gpus in ((EngineConfig(device="cpu"), 8), (EngineConfig(), 0)):
        options = replicas.deployment_options(engine, gpus)
        assert (options["placement_group_bundles"], options["ray_actor_options"]) == ([{"CPU": 2}], {"num_cpus": 2})
    assert "request_router_config" not in ReplicaConfig(request_router="").deployment_options(EngineConfig(), 0)


def test_prompts_that_begin_alike_are_texts_that_begin_alike() -> None:
    def prompt(**fields: Any) -> str:
        return prompt_of(json.dumps({"model": "m", "max_tokens": 3, **fields}).encode())

    history = [*MESSAGES, {"role": "assistant", "content": "yes"}]
    longer = prompt(messages=[*history, {"role": "user", "content": "and now?"}])
    assert longer.startswith(prompt(messages=history)[:-2])
    assert prompt(prompt=[1, 2, 3, 4]).startswith(prompt(prompt=[1, 2, 3])[:-1])
    assert prompt(prompt="hello") == '"hello"'
    assert [prompt_of(body) for body in (b"", b"[1]", b"{", b"\xff", b"{}")] == [""] * 5


class Replicas:
    """Ray's handle, over a replica in this event loop or one that fails."""

    def __init__(self, answer: Callable[[Call], AsyncIterator[Any]]) -> None:
        self.calls: list[Call] = []
        self._answer = answer

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    @property
    def answer(self) -> Replicas:
        return self

    def remote(self, call: Call) -> AsyncIterator[Any]:
        self.calls.append(call)
        return self._answer(call)


async def ask(ingress: Ingress, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, bytes, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"mine")]
    call = Call(method, path, b"", headers, body, "")
    response = await ingress(Request(call.scope, receive))
    if isinstance(response, StreamingResponse):
        return response.status_code, b"".join([piece async for piece in response.body_iterator]), response.headers
    return response.status_code, response.body, response.headers


def with_replica(checkpoint: Path, scenario: Callable[[EngineReplica], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        replica = EngineReplica(EngineConfig(model=str(checkpoint), **TINY), ServerConfig(in_process=True))
        await scenario(replica)
        await replica._engine.stop()

    asyncio.run(run())


def test_answers_pass_whole_and_in_pieces(checkpoint: Path) -> None:
    fields = {"model": str(checkpoint), "messages": MESSAGES, "max_tokens": 9, "temperature": 0}

    async def scenario(replica: EngineReplica) -> None:
        replicas = Replicas(replica.answer)
        ingress = Ingress(replicas)
        replica.check_health()
        status, body, headers = await ask(ingress, "/v1/chat/completions", json.dumps(fields).encode())
        answer = json.loads(body)["choices"][0]
        assert (status, answer["finish_reason"]) == (200, "length")
        assert (headers["x-request-id"], int(headers["content-length"])) == ("mine", len(body))
        assert replicas.calls[0].prompt == json.dumps(MESSAGES)
        status, body, headers = await ask(
            ingress, "/v1/chat/completions", json.dumps({**fields, "stream": True}).encode()
        )
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        *events, done = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
        pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
        assert ("".join(pieces), done) == (answer["message"]["content"], "[DONE]")
        status, body, _ = await ask(ingress, "/v1/chat/completions", json.dumps({**fields, "max_tokens": -1}).encode())
        assert (status, json.loads(body)["error"]["param"]) == (400, "max_tokens")
        status, body, _ = await ask(ingress, "/v1/models", method="GET")
        assert (status, json.loads(body)["data"][0]["id"]) == (200, str(checkpoint))
        assert replicas.calls[-1].prompt == "/v1/models"

    with_replica(checkpoint, scenario)


def test_a_client_that_leaves_ends_its_request_and_a_dead_engine_is_no_health(checkpoint: Path) -> None:
    fields = {"model": str(checkpoint), "messages": MESSAGES, "max_tokens": 150, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    headers = [(b"content-type", b"application/json")]

    async def scenario(replica: EngineReplica) -> None:
        answer = replica.answer(Call("POST", "/v1/chat/completions", b"", headers, body, "x"))
        assert (await anext(answer))[0] == 200
        await anext(answer)
        assert replica._engine.busy
        await answer.aclose()
        assert not replica._engine.busy
        replica._engine.error = EngineDead("it died")
        with pytest.raises(EngineDead, match="it died"):
            replica.check_health()
        replica._engine.error = None

    with_replica(checkpoint, scenario)


def test_a_replica_that_dies_is_a_503() -> None:
    async def broken(call: Call) -> AsyncIterator[Any]:
        raise RuntimeError("the actor died")
        yield

    status, body, _ = asyncio.run(ask(Ingress(Replicas(broken)), "/generate", b"{}"))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "no_replica"
    assert "the actor died" in json.loads(body)["error"]["message"]
