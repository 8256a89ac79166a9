"""The control plane of mini-sglang: steps are published through ZeroMQ, and every rank subscribes to them."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from minisgl.distributed.control_plane import arrives, wait_until
from minisgl.distributed.messages import Endpoint
from minisgl.errors import EngineDead

_HIGH_WATER_MARK = 1000
_NUMBER = struct.Struct("<q")
"""Before each message: its number, from 0."""


class PublishPlane:
    """One publisher, whose messages ZeroMQ sends on to every subscriber.

    Publishers usually drop what a subscriber is too slow for, and what was sent before it came. Neither may happen to a
    step: this one waits for all subscriptions before the first message, and refuses to send while a subscriber is full
    (``XPUB_NODROP``). Should a message be lost all the same, its successor has the wrong number.

    The socket is a file in a directory that only its owner may enter. Both are removed as soon as the ranks have
    connected: connections do not need them.

    Args:
        num_ranks: that listen.
        check: raises once there is no use in waiting for them.

    Raises:
        OSError: the system has no socket left.
    """

    def __init__(self, num_ranks: int, check: Callable[[], None]) -> None:
        self._num_ranks = num_ranks
        self._check = check
        self._sent = 0
        self._directory = Path(tempfile.mkdtemp(prefix="minisgl-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.XPUB)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # hear of every subscription, not of the first one alone
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(f"ipc://{self._directory}/steps")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error

    def endpoint(self, rank: int) -> Endpoint:
        """See `ControlPlane.endpoint`."""
        return Endpoint(f"ipc://{self._directory}/steps")

    def connect(self, timeout: float) -> None:
        """See `ControlPlane.connect`."""
        for _ in range(self._num_ranks):
            wait_until(lambda: bool(self._socket.poll(0)), timeout, self._check, "ranks to subscribe")
            self._socket.recv()
        shutil.rmtree(self._directory, ignore_errors=True)

    def send(self, message: bytes, timeout: float) -> None:
        """See `ControlPlane.send`."""
        numbered = _NUMBER.pack(self._sent) + message
        wait_until(lambda: self._try_send(numbered), timeout, self._check, "a slow rank")
        self._sent += 1

    def _try_send(self, message: bytes) -> bool:
        try:
            self._socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """See `ControlPlane.close`."""
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    @staticmethod
    def receiver(endpoint: Endpoint) -> PublishReceiver:
        """See `ControlPlane.receiver`."""
        return PublishReceiver(endpoint)


class PublishReceiver:
    """A rank's end of a `PublishPlane`. ZeroMQ does not say when the driver is gone; a rank has other ways to know.

    Args:
        endpoint: of this rank.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._expected = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint.address)

    def receive(self, timeout: float | None = None) -> bytes | None:
        """See `StepReceiver.receive`."""
        if not arrives(lambda: bool(self._socket.poll(0)), self._sleep, timeout):
            return None
        numbered = self._socket.recv()
        (number,) = _NUMBER.unpack_from(numbered)
        if number != self._expected:
            raise EngineDead(f"control_plane: step {number} came where {self._expected} was due")
        self._expected += 1
        return numbered[_NUMBER.size :]

    def _sleep(self, timeout: float | None) -> None:
        self._socket.poll(None if timeout is None else int(1e3 * timeout) + 1)

    def close(self) -> None:
        """See `StepReceiver.close`."""
        self._context.destroy(linger=0)
