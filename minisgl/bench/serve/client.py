"""Sends planned requests to a server and records what comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from minisgl.bench.serve.answers import read_answer
from minisgl.bench.serve.bodies import completion_body
from minisgl.bench.serve.connection import Exchange
from minisgl.bench.serve.errors import LoadError
from minisgl.bench.serve.prompts import prompt_tokens
from minisgl.bench.serve.records import Outcome, Record
from minisgl.bench.serve.workload import Planned


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Args:
        host, port: of the server.
        model: that it serves, by the name that it has there.
        vocab_size: ids of prompts lie below this.
    """

    host: str
    port: int
    model: str
    vocab_size: int


def address_of(url: str) -> tuple[str, int]:
    """Host and port of ``http://host:port``.

    Raises:
        LoadError: it is something else.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError as error:
        raise LoadError(f"url: {error}, got {url!r}") from error
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise LoadError(f"url: must be http://HOST:PORT, got {url!r}")
    return parts.hostname, port


class Client:
    """As many users as you like, each with a connection of their own for each request.

    Args:
        target: where to send.
        seed: of the prompts.
        timeout: seconds from sending a request to giving it up.
    """

    def __init__(self, target: Target, seed: int, timeout: float) -> None:
        self._target = target
        self._seed = seed
        self._timeout = timeout
        self._unfinished: set[Exchange] = set()
        self.in_flight = 0
        """Requests that were sent and not answered yet."""
        self.pieces = 0
        """Pieces of answers that have been read, in all."""

    @property
    def streaming(self) -> int:
        """Requests in flight whose answer has begun."""
        return sum(bool(exchange.times) for exchange in self._unfinished)

    async def ask(self, planned: Planned, due: float | None = None) -> Record:
        """Send a request now and wait for its end. Whatever happens to it is in the record, nothing is raised.

        Args:
            planned: what to send.
            due: when it should have been sent, by `time.perf_counter`; None is now.
        """
        exchange = Exchange(self._request(planned), planned.leave_after)
        sent = time.perf_counter()
        record = Record(planned, sent if due is None else due, sent, sent, Outcome.TIMEOUT)
        self.in_flight += 1
        self._unfinished.add(exchange)
        connected = False
        try:
            async with asyncio.timeout(self._timeout):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: exchange, self._target.host, self._target.port)
                connected = True
                end = await exchange.finished
            read_answer(record, exchange, end)
        except TimeoutError:
            record.ended, record.status = time.perf_counter(), exchange.status
            record.message = f"no end after {self._timeout:g} s"
            if connected:
                exchange.abandon()
        except OSError as error:
            record.ended, record.outcome, record.message = time.perf_counter(), Outcome.UNREACHABLE, str(error)
        finally:
            self.in_flight -= 1
            self._unfinished.discard(exchange)
            self.pieces += len(exchange.times)
        return record

    def _request(self, planned: Planned) -> bytes:
        target = self._target
        prompt = prompt_tokens(planned.index, planned.input_len, planned.blocks, target.vocab_size, self._seed)
        body = completion_body(target.model, prompt, planned.output_len, planned.stream, planned.malformed)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body
