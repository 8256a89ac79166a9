"""The client against servers that do their duty and servers that do not, and its loops."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from minisgl.bench import client as client_module
from minisgl.bench.client import (
    Client,
    ClientMonitor,
    Outcome,
    RequestRecord,
    ServerAddress,
    address_of,
    closed_loop,
    monitor_client,
    open_loop,
)
from minisgl.bench.load import LoadError, PlannedRequest
from tests.bench.scripted import ERROR, Conversation, ask, chunk, event, planned, record, text, usage


async def good(server: Conversation) -> None:
    await server.begin_stream()
    for piece in (text("a"), text(" b"), text(" c", "length"), usage(3), "[DONE]"):
        await server.event(piece)
    await server.send(b"0\r\n\r\n")


def test_a_stream_is_timed_piece_by_piece() -> None:
    (record,) = ask(good, planned())
    assert (record.outcome, record.status, record.tokens) == (Outcome.FINISHED, 200, 3)
    assert record.answered
    assert len(record.token_times) == 3
    assert record.sent < record.token_times[0] < record.token_times[1] < record.token_times[2] < record.ended


def test_the_request_is_what_was_planned() -> None:
    seen: list[Conversation] = []

    async def script(server: Conversation) -> None:
        seen.append(server)
        await good(server)

    ask(script, planned(7, input_len=5))
    (server,) = seen
    assert server.head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Connection: close" in server.head
    body = json.loads(server.body)
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "a-model",
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_bytes_may_come_in_any_portions() -> None:
    events = b"".join(map(event, (text("a"), text("é\\n\r"), text("c", "length"), usage(3), "[DONE]")))
    everything = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(events[:100]) + chunk(events[100:])
    everything += b"0\r\n\r\n"

    async def byte_by_byte(server: Conversation) -> None:
        for index in range(len(everything)):
            server.writer.write(everything[index : index + 1])
            await server.writer.drain()
            await asyncio.sleep(0)

    async def at_once(server: Conversation) -> None:
        await server.send(everything)

    async def until_closed(server: Conversation) -> None:
        await server.send(b"HTTP/1.1 200 OK\r\n\r\n" + events)

    for script in (byte_by_byte, at_once, until_closed):
        (record,) = ask(script, planned())
        assert (record.outcome, record.tokens, len(record.token_times)) == (Outcome.FINISHED, 3, 3)


def test_a_whole_answer_is_one_piece() -> None:
    async def script(server: Conversation) -> None:
        assert json.loads(server.body)["stream"] is False
        await server.json(200, {**text("a b c", "length"), "usage": usage(3)["usage"]})

    (record,) = ask(script, planned(stream=False))
    assert (record.outcome, record.tokens, record.token_times) == (Outcome.FINISHED, 3, [record.ended])


def outcome(script: object, **fields: object) -> RequestRecord:
    (record,) = ask(script, planned(**fields))
    return record


def test_errors_before_and_in_the_middle_of_a_stream() -> None:
    async def body(server: Conversation) -> None:
        await server.json(503, ERROR)

    async def in_the_middle(server: Conversation) -> None:
        await server.begin_stream()
        await server.event(text("a"))
        await server.event(ERROR)
        await server.send(b"0\r\n\r\n")

    refused, failed = outcome(body), outcome(in_the_middle)
    assert (refused.outcome, refused.status, refused.message) == (Outcome.REFUSED, 503, "no luck")
    assert (failed.outcome, failed.status, failed.message) == (Outcome.FAILED, 200, "no luck")


def test_answers_that_are_none() -> None:
    async def nothing(server: Conversation) -> None:
        pass

    async def broken_stream(server: Conversation) -> None:
        await server.begin_stream()
        await server.event(text("a"))

    async def broken_body(server: Conversation) -> None:
        await server.send(b'HTTP/1.1 400 X\r\nContent-Length: 100\r\n\r\n{"error"')

    async def no_http(server: Conversation) -> None:
        await server.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    async def bad_chunk(server: Conversation) -> None:
        await server.begin_stream()
        await server.send(b"many\r\nbytes\r\n")

    async def html(server: Conversation) -> None:
        await server.send(b"HTTP/1.1 500 X\r\nContent-Length: 14\r\n\r\n<h1>Sorry</h1>")

    async def untyped(server: Conversation) -> None:
        await server.json(500, {"detail": "sorry"})

    async def no_end(server: Conversation) -> None:
        await server.begin_stream()
        await server.event(text("a", "length"))
        await server.send(b"0\r\n\r\n")

    async def unfinished(server: Conversation) -> None:
        await server.begin_stream()
        for piece in (text("a"), usage(3), "[DONE]"):
            await server.event(piece)
        await server.send(b"0\r\n\r\n")

    async def short(server: Conversation) -> None:
        await server.begin_stream()
        for piece in (text("a", "stop"), usage(1), "[DONE]"):
            await server.event(piece)
        await server.send(b"0\r\n\r\n")

    for script in (nothing, broken_stream, broken_body):
        assert outcome(script).outcome is Outcome.CLOSED, script
    for script in (no_http, bad_chunk, html, untyped, no_end, unfinished):
        assert outcome(script).outcome is Outcome.UNREADABLE, script
    record = outcome(short)
    assert (record.outcome, record.message) == (Outcome.WRONG_LENGTH, "1 tokens in place of 3")


@pytest.mark.parametrize("begun", [False, True])
def test_a_server_that_never_answers_is_given_up(begun: bool) -> None:
    left = []

    async def silent(server: Conversation) -> None:
        if begun:
            await server.begin_stream()
            await server.event(text("a"))
        try:
            left.append(await server.reader.read() == b"")
        except ConnectionResetError:
            left.append(True)

    (record,) = ask(silent, planned(), timeout=0.3)
    assert (record.outcome, record.status) == (Outcome.TIMEOUT, 200 if begun else 0)
    assert record.latency >= 0.3
    assert left == [True]


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_client_leaves_when_it_was_planned(pieces: int) -> None:
    sent: list[int] = []

    async def endless(server: Conversation) -> None:
        await server.begin_stream()
        for number in range(1000):
            sent.append(number)
            await server.event(text("a"))

    (record,) = ask(endless, planned(leave_after=pieces))
    assert (record.outcome, record.status) == (Outcome.LEFT, 200 if pieces else 0)
    assert record.answered
    assert len(sent) < 100


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    record = asyncio.run(Client(ServerAddress("127.0.0.1", port, "m", 10), 0, timeout=5.0).ask(planned()))
    assert record.outcome is Outcome.UNREACHABLE
    assert not record.answered


def test_many_streams_at_a_time_are_kept_apart() -> None:
    async def script(server: Conversation) -> None:
        tokens = json.loads(server.body)["max_tokens"]
        await server.begin_stream()
        for _ in range(tokens - 1):
            await server.event(text("a"))
        for piece in (text("b", "length"), usage(tokens), "[DONE]"):
            await server.event(piece)
        await server.send(b"0\r\n\r\n")

    records = ask(script, *(planned(index, output_len=1 + index % 7) for index in range(200)))
    assert [len(record.token_times) for record in records] == [1 + index % 7 for index in range(200)]
    assert {record.outcome for record in records} == {Outcome.FINISHED}


@pytest.mark.parametrize("url", ["https://example.org", "localhost:8000", "http://", "http://x:99999", "http://x/v1"])
def test_urls_that_cannot_be_loaded(url: str) -> None:
    assert address_of("http://127.0.0.1:1919/") == ("127.0.0.1", 1919)
    with pytest.raises(LoadError, match=r"^url: "):
        address_of(url)


class SlowClient(Client):
    """Answers every request after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(ServerAddress("127.0.0.1", 1, "m", 10), seed=0, timeout=1.0)
        self.seconds = seconds
        self.most = 0

    async def send(self, planned: PlannedRequest, due: float | None = None) -> asyncio.Task[RequestRecord]:
        sent = time.perf_counter()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await self.answer()
        self.in_flight -= 1
        answer = record(sent if due is None else due, time.perf_counter(), planned=planned, sent=sent)

        async def parsed() -> RequestRecord:
            return answer

        return asyncio.create_task(parsed())

    async def answer(self) -> None:
        await asyncio.sleep(self.seconds)


def run_open(client: Client, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
    return asyncio.run(open_loop(client, requests))


def test_an_open_loop_waits_for_nobody() -> None:
    class Reluctant(SlowClient):
        """Answers nobody before all have asked."""

        async def answer(self) -> None:
            if self.in_flight == 10:
                all_have_asked.set()
            await asyncio.wait_for(all_have_asked.wait(), 60.0)

    client, all_have_asked = Reluctant(0.0), asyncio.Event()
    requests = [planned(index, due=0.01 * index) for index in range(10)]
    records = run_open(client, requests)
    assert client.most == 10
    assert [each.planned for each in records] == requests
    first = records[0].due
    for number, each in enumerate(records):
        assert abs(each.due - first - 0.01 * number) < 1e-6
        assert each.sent >= each.due


def test_what_a_late_client_does_to_a_request_counts() -> None:
    class Busy(SlowClient):
        async def ask(self, planned: PlannedRequest, due: float | None = None) -> RequestRecord:
            time.sleep(0.05)
            return await super().ask(planned, due)

    records = run_open(Busy(0.0), [planned(index) for index in range(3)])
    assert all(each.sent - each.due >= 0.05 * number for number, each in enumerate(records, start=1))
    assert all(each.ttft >= 0.05 * number for number, each in enumerate(records, start=1))


def test_a_closed_loop_keeps_its_users_busy_and_asks_everything_once() -> None:
    client = SlowClient(0.01)
    requests = [planned(index) for index in range(23)]
    records = asyncio.run(closed_loop(client, requests, users=4))
    assert client.most == 4
    assert sorted(each.planned.index for each in records) == list(range(23))


def test_requests_that_begin_or_end_together_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, parsed, decode = 0, Counter[int](), client_module._decode
    prepared, prompt_tokens = Counter[int](), client_module.prompt_tokens

    def noted(data: bytes) -> Any:
        parsed[turn] += 1
        return decode(data)

    def noted_prompt(*args: Any) -> Any:
        if not counting:
            counting.append(asyncio.create_task(count_turns()))
        prepared[turn] += 1
        return prompt_tokens(*args)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def at_once(server: Conversation) -> None:
        await server.begin_stream()
        events = [event(text("a"))] * 99 + [event(text("b", "length")), event(usage(100)), event("[DONE]")]
        server.writer.write(chunk(b"".join(events)) + b"0\r\n\r\n")

    counting: list[asyncio.Task[None]] = []
    monkeypatch.setattr(client_module, "_decode", noted)
    monkeypatch.setattr(client_module, "prompt_tokens", noted_prompt)
    records = ask(at_once, *(planned(index, output_len=100) for index in range(5)))
    assert [(each.outcome, each.tokens) for each in records] == [(Outcome.FINISHED, 100)] * 5
    assert parsed.total() == 5 * 101
    assert max(parsed.values()) <= 16
    assert sorted(prepared.values()) == [1] * 5


def test_a_heartbeat_sees_a_client_that_is_held_up() -> None:
    client = SlowClient(0.0)
    client.in_flight = 5

    async def scenario() -> ClientMonitor:
        async with monitor_client(client) as monitor:
            await asyncio.sleep(0.05)
            time.sleep(0.1)
            await asyncio.sleep(0.05)
        return monitor

    monitor = asyncio.run(scenario())
    assert max(monitor.delays) >= 0.05
    assert 0.0 < monitor.in_flight <= 5 * monitor.seconds
    assert monitor.seconds >= 0.2


def test_a_full_collection_of_what_was_there_before_does_not_hold_up_the_client() -> None:
    async def scenario() -> tuple[int, int]:
        async with monitor_client(SlowClient(0.0)):
            return gc.get_freeze_count(), len(gc.get_objects())

    gc.unfreeze()  # what other tests have left
    before = len(gc.get_objects())
    frozen, looked_at = asyncio.run(scenario())
    assert frozen > 0.9 * before
    assert looked_at < before / 10
    assert gc.get_freeze_count() == 0, "behind it, they are collected as ever"
