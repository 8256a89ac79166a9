"""How the driver tells its ranks what to do next. There are two ways, behind one protocol."""

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

SPIN_SECONDS = 50e-6
"""How long a rank polls for the next step before it goes to sleep. Waking up takes about as long."""


class StepReceiver(Protocol):
    """A rank's end."""

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message, in the order in which they were sent.

        Args:
            timeout: seconds to wait for it; None waits until it comes.

        Returns:
            The message; None if the time is over.

        Raises:
            EOFError: the driver has closed its end, or is gone.
            EngineDead: a message was lost.
        """
        ...

    def close(self) -> None:
        """Let go of this end."""
        ...


class ControlPlane(Protocol):
    """The driver's end: it sends the same messages to all ranks, and none is lost on the way.

    Built with the number of ranks, and with a function that raises once there is no use in waiting for them any longer.
    """

    def endpoint(self, rank: int) -> Endpoint:
        """What a rank needs to find its end."""
        ...

    def connect(self, timeout: float) -> None:
        """Called once all ranks have been started: wait until whatever is sent from now on reaches every one of them.

        Raises:
            TimeoutError: a rank has not come within ``timeout`` seconds.
        """
        ...

    def send(self, message: bytes, timeout: float) -> None:
        """Send to all ranks, without waiting for them as long as they keep up.

        Raises:
            TimeoutError: a rank has not made room within ``timeout`` seconds.
            OSError: a rank is gone.
        """
        ...

    def close(self) -> None:
        """Let go of this end, and leave nothing behind: no file, no port, no memory. May be called twice."""
        ...

    @staticmethod
    def receiver(endpoint: Endpoint) -> StepReceiver:
        """A rank's end, in its own process."""
        ...


class PlaneFactory(Protocol):
    """The class of a `ControlPlane`, which also makes the ranks' ends."""

    def __call__(self, num_ranks: int, check: Callable[[], None]) -> ControlPlane: ...

    @staticmethod
    def receiver(endpoint: Endpoint) -> StepReceiver:
        """See `ControlPlane.receiver`."""
        ...


CONTROL_PLANES: Registry[PlaneFactory] = {
    "shared-memory": "minisgl.distributed.shared_memory:SharedMemoryPlane",
    "zmq": "minisgl.distributed.control_plane:PublishPlane",
}


def arrives(arrived: Callable[[], bool], sleep: Callable[[float | None], object], timeout: float | None) -> bool:
    """Wait for a message, first awake and then asleep.

    Args:
        arrived: whether there is one.
        sleep: waits for one, up to so many seconds; None has no limit. It may wake up too early.
        timeout: seconds to wait in all; None has no limit.
    """
    start = time.monotonic()
    while not arrived():
        waited = time.monotonic() - start
        if timeout is not None and waited >= timeout:
            return False
        if waited >= SPIN_SECONDS:
            sleep(None if timeout is None else timeout - waited)
    return True


def wait_until(condition: Callable[[], bool], timeout: float, check: Callable[[], None], what: str) -> None:
    """Sleep until the condition holds.

    Args:
        condition: that is waited for.
        timeout: seconds.
        check: raises if there is no use in waiting.
        what: the wait is for, for the error.

    Raises:
        TimeoutError: it does not hold in time.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        check()
        beat()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(0.0005)


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
        import zmq

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
        import zmq

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
