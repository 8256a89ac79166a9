"""Sockets that carry typed messages one way: ZeroMQ's PUSH and PULL over files that only their owner can reach.

No message is dropped silently, and the processes cannot deadlock:

- A socket holds a bounded number of messages (its high-water mark). At the bound, the sender *blocks* (tokenizer →
  scheduler → detokenizer → API process), which slows down those before it, or is *refused* (API process → tokenizer),
  so that the event loop never waits and the client gets a 503.
- The API process always reads, so the chain of processes that may block ends there.
- Stops from the detokenizer, and aborts and stats requests from the API process, go against the chain. If they could
  block, the circle would be closed, so these sockets are unbounded. That is safe: a request is stopped and a job
  aborted at most once, and a stats request waits for the answer to the one before.
"""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq

from minisgl.child_process import BEAT_INTERVAL, beat

M = TypeVar("M")
STEPS = 64  # high-water mark, in messages, of sockets that carry one message a step
JOBS = 1024  # high-water mark of sockets that carry one message a job
UNBOUNDED = 0
_POLL_MS = int(1000 * BEAT_INTERVAL)  # longest wait; then a child sends a heartbeat and waits again


def address(directory: Path, name: str) -> str:
    """Where the process ``name`` receives messages from processes that share ``directory``."""
    return f"ipc://{directory / name}"


class Sender:
    """The sending end. Up to ``bound`` messages wait here; the receiver may be started later."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], where: str, bound: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.sndhwm = bound
        self._socket.connect(where)

    def send(self, message: object) -> None:
        """Send, and block as long as the bound is reached."""
        frame = msgspec.msgpack.encode(message)
        while not self.offer(frame):
            beat()
            self._socket.poll(_POLL_MS, zmq.POLLOUT)

    def offer(self, frame: bytes) -> bool:
        """Send an encoded message unless the bound is reached, without blocking; returns whether it was sent."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close, and drop unsent messages."""
        self._socket.close()


class Receiver(Generic[M]):
    """The receiving end: decodes messages of type ``kind``, which may be a union. Up to ``bound`` wait on this side."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], where: str, kind: type[M] | UnionType, bound: int
    ) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.linger = 0
        self.socket.rcvhwm = bound
        self.socket.bind(where)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(self, frame: bytes) -> M:
        """Decode one message."""
        return cast(M, self._decoder.decode(frame))

    def receive(self) -> M:
        """The next message; blocks until there is one."""
        beat()
        while not self.socket.poll(_POLL_MS):
            beat()
        return self.decode(self.socket.recv())

    def receive_all(self, timeout: float) -> list[M]:
        """All messages that have come; if there are none, wait up to ``timeout`` seconds for the first."""
        beat()
        messages: list[M] = []
        self.socket.poll(int(timeout * 1000))
        while True:
            try:
                messages.append(self.decode(self.socket.recv(zmq.DONTWAIT)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Close, drop unread messages, and remove the file."""
        self.socket.close()
