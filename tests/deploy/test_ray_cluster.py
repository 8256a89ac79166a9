"""Under a real Ray: handles in one process; two replicas, streams, a conversation on one replica, a dead replica."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.requests import Request

from minisgl.deploy.ray_app import Call, application
from tests.server.harness import MESSAGES, chat_checkpoint, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ray"), pytest.mark.timeout(600)]

URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("ray")
    path = chat_checkpoint(directory)
    options = ["served_model_name=tiny", "device=cpu", "num_pages=200", "min_replicas=2", "max_replicas=2", "cpus=0.5"]
    serve = str(Path(sys.executable).with_name("serve"))
    command = [serve, "run", "minisgl.deploy.ray_app:application", f"model={path}", "in_process=true", *options]
    with (directory / "log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    client = httpx.Client(base_url=URL, timeout=120)

    def ready() -> bool:
        assert process.poll() is None, (directory / "log").read_text()[-5000:]
        try:
            return client.get("/v1/models").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(ready, timeout=300)
        yield client
    finally:
        client.close()
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_rays_handles_stream_from_a_replica_to_the_ingress(tmp_path: Path) -> None:
    """Without a cluster, as Ray's testing mode does it."""
    from ray import serve

    options = {"model": chat_checkpoint(tmp_path), "in_process": True, "served_model_name": "tiny", "device": "cpu"}
    handle = serve.run(application({**options, "num_pages": 200}), _local_testing_mode=True)
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "stream": True}
    call = Call("POST", "/v1/chat/completions", b"", [(b"content-type", b"application/json")], b"", "")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}

    async def ask() -> list[bytes]:
        response = await handle.remote(Request(call.scope, receive))
        return [piece async for piece in response.body_iterator]

    pieces = asyncio.run(ask())
    assert len(pieces) > 2
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_answers_pass_whole_and_in_pieces_and_errors_too(served: httpx.Client) -> None:
    whole = chat(served).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    *events, done = [line for line in chat(served, stream=True).text.split("\n\n") if line]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"]
    assert done == "data: [DONE]"
    assert chat(served, max_tokens=-1).json()["error"]["param"] == "max_tokens"
    assert chat(served, model="other").status_code == 404


def test_a_conversation_stays_with_the_replica_that_knows_it(served: httpx.Client) -> None:
    users = [
        [{"role": "user", "content": f"{number} is the number of this user, {number}. " * 4}] for number in range(4)
    ]
    cached = []
    for turn in range(3):
        for history in users:
            reply = chat(served, messages=history, max_tokens=4).json()
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] / reply["usage"]["prompt_tokens"])
            history.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
            history.append({"role": "user", "content": f"question {turn}"})
    assert all(share > 0.5 for share in cached[4:]), cached


def test_a_replica_that_is_killed_is_replaced(served: httpx.Client) -> None:
    replicas = [each for each in psutil.process_iter() if "ray::ServeReplica" in each.name() + " ".join(each.cmdline())]
    engines = [each for each in replicas if "EngineReplica" in each.name() + " ".join(each.cmdline())]
    assert len(engines) == 2
    engines[0].kill()
    assert any(chat(served).status_code == 200 for _ in range(5))

    def replaced() -> bool:
        alive = [each for each in psutil.process_iter() if "EngineReplica" in " ".join(each.cmdline())]
        return len({each.pid for each in alive} - {engines[0].pid}) == 2

    wait_until(replaced, timeout=200)
    wait_until(lambda: chat(served).status_code == 200, timeout=60)
