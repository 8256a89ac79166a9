"""Sockets that carry typed messages one way: ZeroMQ's PUSH and PULL over files that only their owner can reach.

Nothing is dropped without a word and nobody waits in a circle:

- A socket holds a bounded number of messages (its high-water mark). At the bound, the sender *blocks*, tokenizer →
  scheduler → detokenizer → API process, so that a slow process slows down those before it; or the sender is *refused*,
  API process → tokenizer, so that the event loop never waits: the client hears 503.
- The API process always reads. So the chain of processes that may block ends at one that does not, and each gets on.
- Against the chain, to the scheduler, go stops from the detokenizer, and aborts and questions from the API process. If
  these senders blocked, the circle would be closed. They never do: their sockets have no bound of their own, and need
  none: a request is stopped and a job aborted at most once, and whoever asks waits for one answer at a time.
"""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq

from minisgl.child_process import BEAT_INTERVAL, beat

M = TypeVar("M")


STEPS = 64
"""High-water mark, in messages, of sockets that carry one message a step."""
JOBS = 1024
"""High-water mark of sockets that carry one message a job."""
UNBOUNDED = 0
_NAP = int(1000 * BEAT_INTERVAL)
"""Milliseconds of a wait, after which a child sends a heartbeat and waits again."""


def address(directory: Path, name: str) -> str:
    """Where the process ``name`` receives, for all that share ``directory``."""
    return f"ipc://{directory / name}"


class Sender:
    """The sending end. Whoever receives may come later: until then, messages wait here.

    Args:
        context: the process's.
        where: see `address`.
        bound: most messages that wait, or `UNBOUNDED`.
    """

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
            self._socket.poll(_NAP, zmq.POLLOUT)

    def offer(self, frame: bytes) -> bool:
        """Send an encoded message unless the bound is reached. Never blocks; returns whether it was sent."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Drop what has not left yet."""
        self._socket.close()


class Receiver(Generic[M]):
    """The receiving end.

    Args:
        context: the process's.
        where: see `address`.
        kind: type of the messages, or a union of types.
        bound: most messages that wait on this side.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], where: str, kind: type[M] | UnionType, bound: int
    ) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.linger = 0
        self.socket.rcvhwm = bound
        self.socket.bind(where)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(self, frame: bytes) -> M:
        """The message in ``frame``."""
        return cast(M, self._decoder.decode(frame))

    def receive(self) -> M:
        """The next message; blocks until there is one."""
        beat()
        while not self.socket.poll(_NAP):
            beat()
        return self.decode(self.socket.recv())

    def receive_all(self, patience: float) -> list[M]:
        """All messages that have come; if there are none, waits up to ``patience`` seconds for the first."""
        beat()
        messages: list[M] = []
        self.socket.poll(int(patience * 1000))
        while True:
            try:
                messages.append(self.decode(self.socket.recv(zmq.DONTWAIT)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Drop what has not been read, and remove the file."""
        self.socket.close()
