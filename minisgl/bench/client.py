"""A load generator's client: sends planned requests in an open or a closed loop, and records what comes back.

It must not be what it measures. A thousand streams bring tens of thousands of pieces a second, and a full HTTP library
takes longer for each than the server does. This client knows just the HTTP/1.1 that it needs (RFC 9112): one request a
connection, and a response in chunks, of a known length, or until its end. Answers are parsed after their last byte has
come, one at a time and a few events each turn of the event loop, and requests are prepared one each turn: a hundred
that end or begin together would otherwise keep all other streams waiting, and the server would seem to have paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from minisgl.bench.load import LoadError, PlannedRequest, completion_body, prompt_tokens
from minisgl.child_process import freeze_heap

_CLOSED = "the connection closed before the end of the response"
_TICK = 0.01  # seconds between two looks at the clock
_EVENTS_A_TURN = 16  # of an answer that are parsed before other streams get their turn, 40 µs


class ServerAddress(NamedTuple):
    """Where requests go, the name of the model there, and a bound below which the ids of prompts lie."""

    host: str
    port: int
    model: str
    vocab_size: int


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"  # with as many tokens as it asked for
    REFUSED = "error body"  # with an error in the shape of OpenAI's API in place of an answer
    FAILED = "error event"  # with such an error in the middle of its stream
    LEFT = "client left"  # as planned
    WRONG_LENGTH = "wrong length"  # with another number of tokens than it asked for
    UNREADABLE = "unreadable"  # with an answer, or an error, that is not what the API says
    CLOSED = "connection closed"  # before the end of the answer
    UNREACHABLE = "no connection"
    TIMEOUT = "timeout"


@dataclass(slots=True)
class RequestRecord:
    """One request and its answer, as its client saw it. Times are seconds of `time.perf_counter`."""

    planned: PlannedRequest  # what was sent
    due: float  # when it should have been sent: what a user waits counts from here
    sent: float  # when it was
    ended: float  # when its client knew the outcome
    outcome: Outcome  # how it ended
    status: int = 0  # of HTTP; 0 if none came
    message: str = ""  # of the error, if there was one
    token_times: list[float] = field(default_factory=list)  # when each piece of text arrived, one or more tokens each
    tokens: int = 0  # generated, as the server counts them; 0 if it did not say

    @property
    def answered(self) -> bool:
        """Whether the server answered as it should: tokens or a typed error, and 4xx for a body that is wrong."""
        if self.planned.malformed is not None:
            return self.outcome is Outcome.REFUSED and 400 <= self.status < 500
        return self.outcome in (Outcome.FINISHED, Outcome.REFUSED, Outcome.FAILED, Outcome.LEFT)

    @property
    def ttft(self) -> float:
        """Time to first token: seconds from when it was due to its first piece of text. Finished requests have one."""
        return self.token_times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None if there is one token only."""
        return None if self.tokens < 2 else (self.token_times[-1] - self.token_times[0]) / (self.tokens - 1)

    @property
    def latency(self) -> float:
        """Seconds from when it was due to its end."""
        return self.ended - self.due


class _Exchange:
    """The response to a request that asks for ``Connection: close``."""

    def __init__(self) -> None:
        self.status = 0  # of HTTP; 0 until the response has begun
        self.body = bytearray()  # without the framing
        self.pieces: list[tuple[int, float]] = []  # bytes of the body after each piece, and when it came

    async def read(self, reader: asyncio.StreamReader, leave_after: int | None) -> Outcome:
        """Read to the end, or to the piece after which the client leaves: finished, left, closed or unreadable."""
        if leave_after == 0:
            return Outcome.LEFT
        try:
            async for piece in self._pieces(reader):
                self.body += piece
                self.pieces.append((len(self.body), time.perf_counter()))
                if len(self.pieces) == leave_after:
                    return Outcome.LEFT
        except (asyncio.IncompleteReadError, ConnectionError):
            return Outcome.CLOSED
        except (asyncio.LimitOverrunError, ValueError):  # no HTTP, or a length that is no number
            return Outcome.UNREADABLE
        return Outcome.FINISHED

    async def _pieces(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        version, code, *_ = status.split(b" ")
        if not version.startswith(b"http/1."):
            raise ValueError("not HTTP")
        self.status = int(code)
        headers = {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif b"content-length" in headers:
            yield await reader.readexactly(int(headers[b"content-length"]))
        else:
            while piece := await reader.read(2**16):
                yield piece


class _Choice(Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(Struct):
    completion_tokens: int


class _Error(Struct):
    message: str
    type: str


class _Message(Struct):
    """A body, or an event of a stream; fields that are not listed are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Message).decode


async def _read_answer(record: RequestRecord, exchange: _Exchange, end: Outcome) -> tuple[Outcome, str]:
    """The outcome and its message. Fills in the tokens of ``record`` from the bytes of the response."""
    streamed, wanted = record.status == 200 and record.planned.stream, record.planned.output_len
    if end in (Outcome.LEFT, Outcome.UNREACHABLE, Outcome.TIMEOUT):
        return end, record.message
    if end is Outcome.UNREADABLE:
        return end, "the response is no HTTP"
    if end is Outcome.CLOSED and not streamed:
        return end, _CLOSED
    finished, complete = False, not streamed
    events = _events(exchange) if streamed else [(bytes(exchange.body), record.ended)]
    try:
        for number, (data, arrived) in enumerate(events):
            if number % _EVENTS_A_TURN == 0:
                await asyncio.sleep(0)
            if data == b"[DONE]":
                complete = True
                break
            message = _decode(data)
            if message.error is not None and (streamed or record.status >= 400):
                return Outcome.FAILED if streamed else Outcome.REFUSED, message.error.message
            if message.usage is not None:
                record.tokens = message.usage.completion_tokens
            for choice in message.choices:
                finished |= choice.finish_reason is not None and record.status == 200
                if choice.text or (finished and not record.token_times):
                    record.token_times.append(arrived)
    except msgspec.MsgspecError as error:
        return Outcome.UNREADABLE, f"{error}: {bytes(exchange.body[:80])!r}"
    if not complete:
        return (end, _CLOSED) if end is Outcome.CLOSED else (Outcome.UNREADABLE, "a stream without [DONE]")
    if not finished:
        return Outcome.UNREADABLE, f"status {record.status}, and no finish_reason"
    if record.tokens != wanted:
        return Outcome.WRONG_LENGTH, f"{record.tokens} tokens in place of {wanted}"
    return Outcome.FINISHED, ""


def _events(exchange: _Exchange) -> Iterator[tuple[bytes, float]]:
    """The data of each event of a stream (HTML's server-sent events), and when its last byte came."""
    start = 0
    for line in exchange.body.splitlines(keepends=True):
        start += len(line)
        if line.startswith(b"data:") and line.endswith((b"\n", b"\r")):
            _, arrived = exchange.pieces[bisect_left(exchange.pieces, (start, 0.0))]
            yield bytes(line[5:].strip()), arrived


def address_of(url: str) -> tuple[str, int]:
    """Host and port of ``http://host:port``; raises `LoadError` for anything else."""
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):  # of a port that is none
        if parts.scheme == "http" and parts.hostname and parts.path in ("", "/"):
            return parts.hostname, parts.port or 80
    raise LoadError(f"url: must be http://HOST:PORT, got {url!r}")


class Client:
    """Any number of users, with a connection for each request, which is given up after ``timeout`` seconds."""

    def __init__(self, address: ServerAddress, seed: int, timeout: float) -> None:
        self.address = address
        self._seed = seed
        self._timeout = timeout
        self._unfinished: set[_Exchange] = set()
        self._preparing, self._parsing = asyncio.Lock(), asyncio.Lock()
        self.in_flight = 0  # requests that were sent and not answered yet
        self.pieces = 0  # of answers that have been read, in all

    @property
    def streaming(self) -> int:
        """Requests in flight whose answer has begun."""
        return sum(bool(exchange.pieces) for exchange in self._unfinished)

    async def ask(self, planned: PlannedRequest, due: float | None = None) -> RequestRecord:
        """Send a request now, or late if it was ``due`` before, and wait for its end. No error is raised."""
        return await (await self.send(planned, due))

    async def send(self, planned: PlannedRequest, due: float | None = None) -> asyncio.Task[RequestRecord]:
        """The same, but return the task that parses the answer, as soon as that has come."""
        address, seed = self.address, self._seed
        async with self._preparing:
            await asyncio.sleep(0)
            prompt = prompt_tokens(planned.index, planned.input_len, planned.blocks, address.vocab_size, seed)
            body = completion_body(address.model, prompt, planned.output_len, planned.stream, planned.malformed)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        exchange, sent = _Exchange(), time.perf_counter()
        record = RequestRecord(planned, sent if due is None else due, sent, sent, Outcome.TIMEOUT)
        self.in_flight += 1
        self._unfinished.add(exchange)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(head.encode() + body)
                end = await exchange.read(reader, planned.leave_after)
            writer.close()
        except TimeoutError:
            end, record.message = Outcome.TIMEOUT, f"no end after {self._timeout:g} s"
            if writer is not None:
                writer.transport.abort()  # without sending the rest
        except OSError as error:
            end, record.message = Outcome.UNREACHABLE, str(error)
        finally:
            record.ended, record.status = time.perf_counter(), exchange.status
            self.in_flight -= 1
            self._unfinished.discard(exchange)
            self.pieces += len(exchange.pieces)
        return asyncio.create_task(self._parse(record, exchange, end))

    async def _parse(self, record: RequestRecord, exchange: _Exchange, end: Outcome) -> RequestRecord:
        async with self._parsing:
            record.outcome, record.message = await _read_answer(record, exchange, end)
        return record


async def open_loop(client: Client, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
    """Send each request when it is due, and wait for the end of all. If the server falls behind, requests pile up."""
    begin = time.perf_counter()
    asked: list[asyncio.Task[RequestRecord]] = []
    for planned in requests:
        due = begin + planned.due
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asked.append(asyncio.create_task(client.ask(planned, due)))
    return await asyncio.gather(*asked)


async def closed_loop(client: Client, requests: Sequence[PlannedRequest], users: int) -> list[RequestRecord]:
    """Have ``users`` send all requests, each waiting for an answer before the next: a slow server is asked less."""
    parsing: list[asyncio.Task[RequestRecord]] = []
    remaining = iter(requests)

    async def user() -> None:
        for planned in remaining:
            parsing.append(await client.send(planned))

    await asyncio.gather(*(user() for _ in range(users)))
    return await asyncio.gather(*parsing)


@dataclass(slots=True)
class ClientMonitor:
    """Whether the client kept up during a run. No recorded time is later than the truth by more than ``delays``."""

    delays: list[float] = field(default_factory=list)  # seconds by which the event loop woke up late
    in_flight: float = 0.0  # requests that were under way, integrated over time: request-seconds
    seconds: float = 0.0  # of the run
    cpu: float = 0.0  # seconds of processor time that this process used


@contextlib.asynccontextmanager
async def monitor_client(client: Client) -> AsyncIterator[ClientMonitor]:
    """Watch the client's event loop inside the block, in which nothing is collected that was there before.

    A full collection of what PyTorch has loaded would stop the client, and all of its streams, for a tenth of a second.
    """
    freeze_heap()
    monitor = ClientMonitor()
    begin, cpu = time.perf_counter(), time.process_time()

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            elapsed = time.perf_counter() - before
            monitor.delays.append(max(0.0, elapsed - _TICK))
            monitor.in_flight += client.in_flight * elapsed

    watching = asyncio.create_task(watch())
    try:
        yield monitor
    finally:
        watching.cancel()
        gc.unfreeze()
        monitor.seconds, monitor.cpu = time.perf_counter() - begin, time.process_time() - cpu
