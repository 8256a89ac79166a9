"""What the bytes of a response say: text in pieces, a count of tokens, or an error."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from minisgl.bench.serve.connection import End, Exchange
from minisgl.bench.serve.records import Outcome, Record

_DONE = b"[DONE]"


class _Choice(Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(Struct):
    completion_tokens: int


class _Error(Struct):
    message: str
    type: str


class _Message(Struct):
    """A body, or an event of a stream; fields that are not asked for are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Message).decode


def read_answer(record: Record, exchange: Exchange, end: End) -> None:
    """Fill in ``record`` from what came."""
    record.status, record.ended = exchange.status, exchange.ended
    if end is End.LEFT:
        record.outcome = Outcome.LEFT
        return
    if end is End.GARBLED:
        record.outcome, record.message = Outcome.UNREADABLE, end.value
        return
    try:
        if record.status == 200 and record.planned.stream:
            _read_stream(record, exchange, end)
        else:
            _read_body(record, exchange, end)
    except msgspec.MsgspecError as error:
        record.outcome, record.message = Outcome.UNREADABLE, f"{error}: {bytes(exchange.body[:80])!r}"


def _read_stream(record: Record, exchange: Exchange, end: End) -> None:
    finished = False
    for data, arrived in _events(exchange.body, exchange.lengths, exchange.times):
        if data == _DONE:
            record.outcome, record.message = _verdict(record, finished)
            return
        message = _decode(data)
        if message.error is not None:
            record.outcome, record.message = Outcome.FAILED, message.error.message
            return
        if message.usage is not None:
            record.tokens = message.usage.completion_tokens
        for choice in message.choices:
            finished |= choice.finish_reason is not None
            if choice.text or (finished and not record.token_times):
                record.token_times.append(arrived)
    if end is End.CLOSED:
        record.outcome, record.message = Outcome.CLOSED, end.value
    else:
        record.outcome, record.message = Outcome.UNREADABLE, "a stream without [DONE]"


def _read_body(record: Record, exchange: Exchange, end: End) -> None:
    if end is End.CLOSED:
        record.outcome, record.message = Outcome.CLOSED, end.value
        return
    message = _decode(exchange.body)
    if message.error is not None and record.status >= 400:
        record.outcome, record.message = Outcome.REFUSED, message.error.message
        return
    record.tokens = message.usage.completion_tokens if message.usage else 0
    record.token_times = [record.ended]
    finished = any(choice.finish_reason is not None for choice in message.choices)
    record.outcome, record.message = _verdict(record, finished and record.status == 200)


def _verdict(record: Record, finished: bool) -> tuple[Outcome, str]:
    """What an answer that has come to its end is worth."""
    wanted = record.planned.output_len
    if not finished:
        return Outcome.UNREADABLE, f"status {record.status}, and no finish_reason"
    if record.tokens != wanted:
        return Outcome.WRONG_LENGTH, f"{record.tokens} tokens in place of {wanted}"
    return Outcome.FINISHED, ""


def _events(body: bytearray, lengths: Sequence[int], times: Sequence[float]) -> Iterator[tuple[bytes, float]]:
    """The data of each event of a stream (HTML's server-sent events), and when its last byte came."""
    start = 0
    for line in body.splitlines(keepends=True):
        start += len(line)
        if line.startswith(b"data:") and line.endswith((b"\n", b"\r")):
            yield bytes(line[5:].strip()), times[bisect_left(lengths, start)]
