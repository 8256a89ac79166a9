"""Server-sent events as bytes, and work that ends when nobody waits for it; without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message

from minisgl.chat import NoAnswer
from minisgl.chat import _events as read_events
from minisgl.errors import EngineDead
from minisgl.request import TokenLogprobs
from minisgl.server.async_engine import Answer
from minisgl.server.errors import ApiError, to_json
from minisgl.server.formats import ChatFormat, CompletionFormat, Usage
from minisgl.server.messages import Update
from minisgl.server.streaming import EventStream, TimeLimit, event, until_disconnect

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


class Connection:
    """A client's end: takes what is sent, or makes the sender wait while it takes nothing."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.takes = asyncio.Event()
        self.takes.set()

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    @property
    def texts(self) -> list[list[str]]:
        """The texts of each write's events."""
        events = [write.decode().split("\n\n")[:-1] for write in self.sent]
        chunks = [[json.loads(event[6:]) for event in write if event != "data: [DONE]"] for write in events]
        return [[chunk["choices"][0]["text"] for chunk in write] for write in chunks if write]


def streamed(
    story: Callable[[Answer, Connection], Awaitable[None]],
    num_choices: int = 1,
    note: Callable[[Update | ApiError], object] = lambda news: None,
    abort: Callable[[Answer], object] = lambda answer: None,
    max_unread: int = 4096,
) -> Connection:
    """What a client gets of an answer that has the ``story``."""

    async def scenario() -> Connection:
        connection, answer = Connection(), Answer(0, num_choices, abort)
        style = CompletionFormat("model", Words(), Usage([3], num_choices), False, "none", [])
        stream = EventStream(answer, style, TimeLimit(None), note, max_unread)
        responding = asyncio.ensure_future(stream({"type": "http"}, Client().receive, connection.send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await story(answer, connection)
        await asyncio.wait_for(responding, 5)
        assert len(asyncio.all_tasks()) == 1
        return connection

    return asyncio.run(scenario())


class Words:
    def token_text(self, token_id: int) -> str:
        return str(token_id)


def put(answer: Answer, *updates: Update) -> None:
    """Bring the updates of one step."""
    for update in updates:
        answer.put(update)
    answer.tell()


def test_a_step_is_written_at_once_and_its_choices_together() -> None:
    async def story(answer: Answer, connection: Connection) -> None:
        put(answer, Update(0, 0, "a", [1]), Update(0, 1, "b", [2]))
        assert connection.texts == [["a", "b"]], "without a turn of the event loop"
        put(answer, Update(0, 0, "c", [3], finish_reason="stop"), Update(0, 1, "", [4]))
        put(answer, Update(0, 1, "d", [5], finish_reason="stop"))

    connection = streamed(story, num_choices=2)
    assert connection.texts == [["a", "b"], ["c"], ["d"]]
    assert connection.sent[-2:] == [b"data: [DONE]\n\n", b""]


def test_what_comes_while_a_client_takes_nothing_is_one_event() -> None:
    async def story(answer: Answer, connection: Connection) -> None:
        put(answer, Update(0, 0, "a", [1]))
        connection.takes.clear()
        for number in range(100):
            put(answer, Update(0, 0, f" {number}", [number]))
            await asyncio.sleep(0)
        assert len(answer._pending) == 1
        assert len(asyncio.all_tasks()) <= 5, "one waits for the client, however many updates there are"
        put(answer, Update(0, 0, "!", [5], finish_reason="stop"))
        connection.takes.set()

    after_the_first = "".join(f" {number}" for number in range(1, 100)) + "!"
    assert streamed(story).texts == [["a"], [" 0"], [after_the_first]]


@pytest.mark.parametrize("logprobs", [0, 20])
def test_too_much_that_is_unread_ends_the_stream(logprobs: int) -> None:
    most, noted, aborted = 210 // (1 + logprobs), [], []
    entries = [TokenLogprobs(5, -1.0, [(5, -1.0)] * logprobs)] if logprobs else []

    async def story(answer: Answer, connection: Connection) -> None:
        connection.takes.clear()
        put(answer, Update(0, 0, "a", [1]))
        for number in range(most + 9):
            put(answer, Update(0, 0, "x", [5], list(entries)))
            assert bool(aborted) == (number >= most)
        connection.takes.set()

    sent = streamed(story, note=noted.append, abort=aborted.append, max_unread=210).sent
    assert [b'"text":"a"' in sent[1], b"does not read its answer" in sent[-2]] == [True, True]
    assert noted[-1].code == "slow_client"
    assert f"{(most + 1) * (1 + logprobs)} tokens and log-probabilities wait, and at most 210 may" in noted[-1].detail
    assert "raise --max-unread" in noted[-1].detail


def test_a_backlog_is_never_written_at_once_and_not_at_all_for_a_client_that_has_left() -> None:
    most, written = 64, []

    class Counting(CompletionFormat):
        def encoded(self, update: Update) -> list[bytes]:
            written.append(len(update.token_ids))
            return super().encoded(update)

    async def scenario(backlog: int) -> None:
        aborted: list[Answer] = []
        connection, client, answer = Connection(), Client(), Answer(0, 1, aborted.append)
        style = Counting("model", Words(), Usage([3], 1), False, "none", [])
        stream = EventStream(answer, style, TimeLimit(None), lambda news: None, most)
        responding = asyncio.ensure_future(stream({"type": "http"}, client.receive, connection.send))
        await asyncio.sleep(0.01)
        connection.takes.clear()
        put(answer, Update(0, 0, "a", [1]))
        for _ in range(backlog):
            if not aborted:  # an engine sends no more then
                put(answer, Update(0, 0, "x", [5]))
        assert answer.unread <= most + 1
        client.left.set()
        await responding
        connection.takes.set()
        await asyncio.sleep(0.01)
        assert written == [1], "what waited for a client that has left is not written"
        assert len(asyncio.all_tasks()) == 1

    for backlog in (most, 38_000):
        written.clear()
        asyncio.run(scenario(backlog))


def test_a_client_that_reads_again_has_its_backlog_in_one_bounded_write() -> None:
    most, sizes = 64, []

    async def story(answer: Answer, connection: Connection) -> None:
        put(answer, Update(0, 0, "a", [1]))
        connection.takes.clear()
        for _ in range(most + 1):
            put(answer, Update(0, 0, "x", [5]))
        connection.takes.set()
        await asyncio.sleep(0.01)
        put(answer, Update(0, 0, "!", [6], finish_reason="stop"))

    def note(news: Update | ApiError) -> None:
        assert isinstance(news, Update)
        sizes.append(len(news.token_ids))

    streamed(story, note=note, max_unread=most)
    assert sizes == [1, 1, most, 1]


def test_a_stream_that_cannot_be_written_ends_alone() -> None:
    class Broken(CompletionFormat):
        def encoded(self, update: Update) -> list[bytes]:
            raise ZeroDivisionError

    async def scenario() -> None:
        connection, answer = Connection(), Answer(0, 1, abort=lambda answer: None)
        style = Broken("model", Words(), Usage([3], 1), False, "none", [])
        stream = EventStream(answer, style, TimeLimit(None), lambda news: None, 4096)
        responding = asyncio.ensure_future(stream({"type": "http"}, Client().receive, connection.send))
        await asyncio.sleep(0.01)
        put(answer, Update(0, 0, "a", [1]))  # raises nothing where other answers are delivered
        with pytest.raises(ZeroDivisionError):
            await responding

    asyncio.run(scenario())


def test_an_error_comes_after_what_was_written_before() -> None:
    async def story(answer: Answer, connection: Connection) -> None:
        connection.takes.clear()
        put(answer, Update(0, 0, "a", [1]))
        answer.fail(EngineDead("the engine died"))
        await asyncio.sleep(0.01)
        assert connection.sent == [b""]
        connection.takes.set()

    sent = streamed(story).sent
    assert [b'"text":"a"' in sent[1], b"the engine died" in sent[2], sent[3]] == [True, True, b""]


def test_an_end_does_not_overtake_a_write_that_waited() -> None:
    async def story(answer: Answer, connection: Connection) -> None:
        connection.takes.clear()
        put(answer, Update(0, 0, "a", [1]), Update(0, 1, error="no luck", finish_reason="error"))
        connection.takes.set()

    sent = streamed(story, num_choices=2).sent
    assert [b'"text":"a"' in sent[1], b"no luck" in sent[2], sent[3]] == [True, True, b""]


@given(st.text(max_size=20), st.sampled_from([None, "stop"]))
def test_a_chunk_is_the_same_in_pieces(text: str, reason: str | None) -> None:
    for style in (
        CompletionFormat('a "model"', Words(), Usage([3], 1), False, "none", []),
        ChatFormat("m", Words(), Usage([3], 1), False, "last", None),
    ):
        for choice in (0, 1, 0):
            update = Update(0, choice, text, [1], finish_reason=reason)
            assert [json.loads(written) for written in style.encoded(update)] == style.chunks(update)


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
