"""Control planes: how the driver sends steps to its ranks. Here are the protocol and the one over ZeroMQ."""

from __future__ import annotations

import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from minisgl.child_process import beat
from minisgl.distributed.messages import Endpoint
from minisgl.errors import EngineDead
from minisgl.registry import Registry

if TYPE_CHECKING:
    import zmq

SPIN_SECONDS = 50e-6  # that a rank polls for a step before it sleeps; waking up takes about as long


class StepReceiver(Protocol):
    """A rank's end."""

    def receive(self, timeout: float | None = None) -> bytes | None:
        """Return the next message, or None if there is none within ``timeout`` seconds (None: no limit).

        Raises `EOFError` if the driver has closed its end or died, `EngineDead` if a message was lost.
        """
        ...

    def close(self) -> None: ...


class ControlPlane(Protocol):
    """The driver's end. It sends every message to all ranks, and loses none.

    While it waits for ranks it calls ``check``, which may raise; after ``timeout`` seconds it raises `TimeoutError`.
    """

    def __init__(self, num_ranks: int, check: Callable[[], None]) -> None: ...

    def endpoint(self, rank: int) -> Endpoint:
        """What the rank's process needs to call `receiver`."""
        ...

    def connect(self, timeout: float) -> None:
        """Wait, after all ranks have started, until messages will reach all of them."""
        ...

    def send(self, message: bytes, timeout: float) -> None:
        """Send to all ranks. Waits only for a rank that is far behind. Raises `OSError` if a rank is gone."""
        ...

    def close(self) -> None:
        """Release all files, ports and memory. Calling it again does nothing."""
        ...

    @staticmethod
    def receiver(endpoint: Endpoint) -> StepReceiver:
        """Build the rank's end, in the rank's process."""
        ...


CONTROL_PLANES: Registry[type[ControlPlane]] = {
    "shared-memory": "minisgl.distributed.shared_memory:SharedMemoryPlane",
    "zmq": "minisgl.distributed.control_plane:ZmqPlane",
}


def wait_for_message(
    arrived: Callable[[], bool], sleep: Callable[[float | None], object], timeout: float | None
) -> bool:
    """Poll shortly, then sleep, until a message arrives; False after ``timeout`` seconds (None: no limit)."""
    start = time.monotonic()
    while not arrived():
        waited = time.monotonic() - start
        if timeout is not None and waited >= timeout:
            return False
        if waited >= SPIN_SECONDS:
            sleep(None if timeout is None else timeout - waited)
    return True


def wait_until(condition: Callable[[], bool], timeout: float, check: Callable[[], None], what: str) -> None:
    """Sleep until the condition holds. Raises `TimeoutError`, which names ``what``, after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        check()
        beat()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(0.0005)


_HIGH_WATER_MARK = 1000
_NUMBER = struct.Struct("<q")  # in front of each message: its number, from 0


class ZmqPlane:
    """A ZeroMQ publisher, with every rank as a subscriber, over a file in a private directory.

    A publisher usually drops messages for subscribers that are slow or missing. This one waits for all subscriptions
    first and does not send while a queue is full (``XPUB_NODROP``).
    """

    def __init__(self, num_ranks: int, check: Callable[[], None]) -> None:
        import zmq  # here and below, because only this plane needs the library

        self._num_ranks = num_ranks
        self._check = check
        self._sent = 0
        self._directory = Path(tempfile.mkdtemp(prefix="minisgl-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.XPUB)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # report every subscription, not only the first
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(f"ipc://{self._directory}/steps")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error

    def endpoint(self, rank: int) -> Endpoint:
        return Endpoint(f"ipc://{self._directory}/steps")

    def connect(self, timeout: float) -> None:
        for _ in range(self._num_ranks):
            wait_until(lambda: bool(self._socket.poll(0)), timeout, self._check, "ranks to subscribe")
            self._socket.recv()
        shutil.rmtree(self._directory, ignore_errors=True)

    def send(self, message: bytes, timeout: float) -> None:
        numbered = _NUMBER.pack(self._sent) + message
        wait_until(lambda: self._try_send(numbered), timeout, self._check, "a slow rank")
        self._sent += 1

    def _try_send(self, message: bytes) -> bool:
        import zmq

        try:
            self._socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    @staticmethod
    def receiver(endpoint: Endpoint) -> ZmqReceiver:
        return ZmqReceiver(endpoint)


class ZmqReceiver:
    """A rank's end of a `ZmqPlane`. ZeroMQ does not report that the driver died; `child_process` does."""

    def __init__(self, endpoint: Endpoint) -> None:
        import zmq

        self._expected = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint.address)

    def receive(self, timeout: float | None = None) -> bytes | None:
        if not wait_for_message(lambda: bool(self._socket.poll(0)), self._sleep, timeout):
            return None
        numbered = self._socket.recv()
        (number,) = _NUMBER.unpack_from(numbered)
        if number != self._expected:
            raise EngineDead(f"control_plane: received step {number} instead of {self._expected}; restart the engine")
        self._expected += 1
        return numbered[_NUMBER.size :]

    def _sleep(self, timeout: float | None) -> None:
        self._socket.poll(None if timeout is None else int(1e3 * timeout) + 1)

    def close(self) -> None:
        self._context.destroy(linger=0)
