"""Clients that leave, full queues, failing steps, dying engines: everybody gets an answer or is forgotten."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from minisgl.request import TokenLogprobs
from minisgl.server.async_engine import Answer, GenerationFailed
from minisgl.server.config import ServerConfig
from minisgl.server.messages import Update
from tests.server.harness import MESSAGES, RunningServer, ServerThread, in_background, wait_until


def send(server: ServerThread, **fields: Any) -> socket.socket:
    """Post a chat on a raw connection and return it, unread."""
    body = json.dumps({"model": server.model, "messages": MESSAGES, "max_tokens": 100, "ignore_eos": True, **fields})
    headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(server.address)
    connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_client_that_leaves_frees_its_pages(
    own_server: RunningServer, stream: bool, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = own_server.core.scheduler
    own_server.gate.allowed = steps
    connection = send(own_server, stream=stream, n=2)
    wait_until(lambda: len(scheduler.requests) == 2 and own_server.gate.allowed == 0)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    assert len(scheduler.table) == (1 if steps else 0)
    connection.close()
    wait_until(own_server.idle)
    scheduler.check()
    own_server.gate.allowed = None
    assert own_server.chat().choices[0].finish_reason == "length"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_scheduler_is_told_which_client_asks(server: RunningServer) -> None:
    server.gate.allowed = 0
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 2}
    asked = [
        in_background(partial(server.http.post, "/v1/chat/completions", json=body, headers=headers))
        for headers in ({}, {"x-forwarded-for": "192.0.2.7"})  # as a proxy on this host sends it
    ]
    wait_until(lambda: len(server.core.scheduler.requests) == 2)
    assert {each.client for each in server.core.scheduler.requests.values()} == {"127.0.0.1", "192.0.2.7"}
    server.gate.allowed = None
    assert [answer().status_code for answer in asked] == [200, 200]


def test_a_client_may_leave_before_the_engine_has_seen_its_request(own_server: RunningServer) -> None:
    answers = own_server.engine._answers
    own_server.gate.allowed = 0
    with send(own_server):
        wait_until(lambda: [answer.taken for answer in answers.values()] == [True])
        with own_server.gate.lock:
            connection = send(own_server)
            wait_until(lambda: len(answers) == 2)
            connection.close()
            wait_until(lambda: len(answers) == 1)
        wait_until(lambda: own_server.core.input_processor.next_uid == 2)
        wait_until(lambda: len(own_server.core.scheduler.requests) == 1)
        assert len(answers) == 1


def test_a_full_queue_is_a_503_with_retry_after(own_server: RunningServer) -> None:
    own_server.gate.allowed = 0
    first = in_background(lambda: own_server.chat(n=2).choices[1].finish_reason)
    wait_until(lambda: len(own_server.core.scheduler.requests) == 2)
    for fields in ({}, {"stream": True}):
        with pytest.raises(openai.InternalServerError) as caught:
            own_server.chat(**fields)
        assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
        assert int(caught.value.response.headers["Retry-After"]) > 0
    own_server.gate.allowed = None
    assert first() == "length"
    assert own_server.idle(), "a job is enqueued as a whole or not at all"
    with pytest.raises(openai.BadRequestError, match="n: asks for 3 answers, and max_queued_requests is 2"):
        own_server.chat(n=3)
    with pytest.raises(openai.BadRequestError, match="prompt: asks for 200000 answers"):
        own_server.complete(prompt=["x"] * 200_000)


def test_a_step_that_fails_fails_its_requests_alone(own_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(batch: object) -> object:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(own_server.core.engine, "launch", launch)
        with pytest.raises(openai.InternalServerError, match="no luck") as caught:
            own_server.chat()
        assert caught.value.status_code == 500
        with pytest.raises(openai.APIError, match="no luck"):
            list(own_server.chat(stream=True))
    assert own_server.chat().choices[0].finish_reason == "length"
    assert own_server.http.get("/health").status_code == 200


def test_everybody_hears_of_the_engines_death(own_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(own_server.server), "on_tick", lambda server, counter: asyncio.sleep(0, False))
    own_server.gate.allowed = 0
    waiting = [in_background(own_server.chat), in_background(lambda: list(own_server.chat(stream=True)))]
    wait_until(lambda: len(own_server.core.scheduler.requests) == 2)
    own_server.gate.error = RuntimeError("struck by lightning")
    for result in waiting:
        error = result()
        assert isinstance(error, openai.APIError)
        assert "struck by lightning" in str(error)
    with pytest.raises(openai.InternalServerError, match="struck by lightning") as caught:
        own_server.chat()
    assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
    assert own_server.http.get("/health").status_code == 503
    monkeypatch.undo()


def test_a_server_whose_engine_dies_stops(own_server: RunningServer) -> None:
    own_server.gate.error = RuntimeError("struck by lightning")
    with pytest.raises(openai.InternalServerError):
        own_server.chat()
    wait_until(lambda: not own_server.server.servers[0].is_serving())
    assert own_server.engine.died


def test_an_engine_whose_thread_hangs_is_noticed_and_one_at_rest_or_at_work_is_not(checkpoint: Path) -> None:
    with RunningServer(checkpoint, hang_timeout=1.0, distributed_timeout=1.0) as server:
        time.sleep(3.2)
        server.gate.allowed = 0  # steps that take no time, and do nothing
        asked = in_background(lambda: server.chat().choices[0].finish_reason)
        time.sleep(3.2)
        server.gate.allowed = None
        assert asked() == "length"
        with server.gate.lock:
            with pytest.raises(openai.APIError, match="the engine has made no progress for 2 s; its thread hangs"):
                server.chat()
            assert server.engine.died
        wait_until(lambda: not server.server.servers[0].is_serving())
        assert server.server.exit_code == 1


def test_draining_lets_running_requests_finish(own_server: RunningServer) -> None:
    own_server.gate.allowed = 3
    running = in_background(lambda: list(own_server.chat(stream=True, max_tokens=20)))
    wait_until(lambda: own_server.gate.allowed == 0)
    own_server.server.handle_exit(signal.SIGTERM, None)
    assert own_server.http.get("/health").status_code == 503
    with pytest.raises(openai.InternalServerError, match="takes no more requests") as caught:
        own_server.chat()
    assert caught.value.status_code == 503
    own_server.gate.allowed = None
    chunks: Any = running()
    assert chunks[-1].choices[0].finish_reason == "length"
    wait_until(lambda: not own_server.server.servers[0].is_serving())
    assert own_server.server.exit_code == 0


def test_draining_comes_to_an_end(checkpoint: Path) -> None:
    with RunningServer(checkpoint, ServerConfig(drain_timeout=0.0)) as server:
        server.gate.allowed = 3
        running = in_background(lambda: list(server.chat(stream=True)))
        wait_until(lambda: server.gate.allowed == 0)
        server.server.handle_exit(signal.SIGTERM, None)
        assert "shutting down" in str(running())
        assert server.server.exit_code == 0


def test_a_second_signal_stops_at_once(own_server: RunningServer) -> None:
    own_server.gate.allowed = 3
    running = in_background(lambda: list(own_server.chat(stream=True)))
    wait_until(lambda: own_server.gate.allowed == 0)
    own_server.server.handle_exit(signal.SIGTERM, None)
    own_server.server.handle_exit(signal.SIGINT, None)
    assert isinstance(running(), Exception)
    assert own_server.server.exit_code == 128 + signal.SIGINT


def test_stopping_ends_what_is_running(own_server: RunningServer) -> None:
    own_server.gate.allowed = 3
    waiting = in_background(lambda: list(own_server.chat(stream=True)))
    wait_until(lambda: own_server.gate.allowed == 0)
    own_server.server.should_exit = True
    assert "shutting down" in str(waiting())
    assert not own_server.engine.died


def test_a_slow_reader_finds_one_update_a_choice() -> None:
    async def scenario() -> None:
        answer = Answer(0, 2, abort=lambda answer: None)
        for number in range(1000):
            entry = TokenLogprobs(number, -1.0)
            answer.put(Update(0, number % 2, "ab"[number % 2], [number], [entry]))
        answer.put(Update(0, 0, "!", [], finish_reason="stop", cached_tokens=3))
        answer.put(Update(0, 1, "!", [], finish_reason="length"))
        assert len(answer._pending) == 2
        assert answer.finished
        first, second = [update async for update in answer.updates()]
        assert (first.text, second.text) == ("a" * 500 + "!", "b" * 500 + "!")
        assert first.token_ids == [entry.token_id for entry in first.logprobs] == list(range(0, 1000, 2))
        assert (first.finish_reason, first.cached_tokens, second.finish_reason) == ("stop", 3, "length")

    asyncio.run(scenario())


def test_an_answer_wakes_its_reader_and_ends_with_an_error() -> None:
    async def scenario() -> None:
        answer = Answer(0, 1, abort=lambda answer: None)
        updates = answer.updates()
        reading = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        assert not reading.done()
        answer.put(Update(0, 0, "text"))
        assert (await reading).text == "text"
        answer.put(Update(0, 0, error="no luck", finish_reason="error"))
        with pytest.raises(GenerationFailed, match="no luck"):
            await anext(updates)

    asyncio.run(scenario())
