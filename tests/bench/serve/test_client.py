"""The client against servers that do their duty, and servers that do not."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from minisgl.bench.serve.client import Client, Target, address_of
from minisgl.bench.serve.errors import LoadError
from minisgl.bench.serve.records import Outcome, Record
from tests.bench.serve.records import planned
from tests.bench.serve.scripted import ERROR, Conversation, ask, chunk, event, text, usage


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


def outcome(script: object, **fields: object) -> Record:
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
    record = asyncio.run(Client(Target("127.0.0.1", port, "m", 10), 0, timeout=5.0).ask(planned()))
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
