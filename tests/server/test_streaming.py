"""Server-sent events as bytes, and work that ends when nobody waits for it; without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message

from minisgl.chat import NoAnswer
from minisgl.chat import _events as read_events
from minisgl.server.errors import to_json
from minisgl.server.formats import Usage
from minisgl.server.messages import Update
from minisgl.server.streaming import event, until_disconnect

CHUNKS = [{"text": "So"}, {"text": " be it\u2028\n\ndata: x"}, {"text": "è"}]


def response_in_pieces(data: bytes, cuts: list[int]) -> httpx.Response:
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    def pieces() -> Iterator[bytes]:
        yield from (data[start:end] for start, end in pairwise(ends))

    return httpx.Response(200, content=pieces())


def test_an_event_is_one_line_and_a_blank_one() -> None:
    written = event(to_json(CHUNKS[1]))
    assert written.startswith(b"data: {")
    assert written.endswith(b"}\n\n")
    assert written.count(b"\n") == 2, "line breaks of the text are written as \\n"


@given(st.lists(st.integers(0, 120), max_size=8))
def test_events_are_read_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(event(to_json(chunk)) for chunk in CHUNKS) + event(b"[DONE]")
    assert list(read_events(response_in_pieces(stream, cuts))) == CHUNKS


def test_a_stream_without_an_end_is_an_error() -> None:
    events = read_events(response_in_pieces(event(to_json(CHUNKS[0])), []))
    assert next(events) == CHUNKS[0]
    with pytest.raises(NoAnswer, match="in the middle of the answer"):
        next(events)


class Client:
    """Sends its request and leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self._told: Iterator[Message] = iter([{"type": "http.request", "body": b"{}"}])

    async def receive(self) -> Message:
        for message in self._told:
            return message
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_work_that_is_done_is_given_back_and_nobody_listens_any_more() -> None:
    async def scenario() -> None:
        assert await until_disconnect(Client().receive, asyncio.sleep(0, "done")) == "done"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_work_is_cancelled_when_the_client_leaves() -> None:
    ends: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def scenario() -> None:
        client = Client()
        asyncio.get_running_loop().call_later(0.01, client.left.set)
        with pytest.raises(ClientDisconnect):
            await until_disconnect(client.receive, endless())
        assert ends == ["cancelled"], "before anybody hears that the client has left"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_an_error_of_the_work_is_nobody_elses() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await until_disconnect(Client().receive, fails())

    asyncio.run(scenario())


def test_tokens_are_counted_as_they_come() -> None:
    usage = Usage([7], n=1)
    usage.add(Update(0, 0, "a", [1]))
    usage.add(Update(0, 0, "", [2, 3]))
    usage.add(Update(0, 0, "b", [4], finish_reason="stop", cached_tokens=4))
    body = usage.body()
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (7, 4, 11)
    assert body["prompt_tokens_details"] == {"cached_tokens": 4}


def test_cached_tokens_are_counted_once_a_prompt() -> None:
    usage = Usage([7, 9], n=2)
    for choice, cached in ((0, 4), (1, 6), (2, 0), (3, 8)):
        usage.add(Update(0, choice, "", [1], cached_tokens=cached))
        usage.add(Update(0, choice, "", [1], finish_reason="length", cached_tokens=cached))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (16, 8, 4)
