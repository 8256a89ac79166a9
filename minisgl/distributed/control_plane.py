"""How the driver tells its ranks what to do next. There are two ways, behind one protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from minisgl.child_process import beat
from minisgl.core.registry import Table
from minisgl.distributed.messages import Endpoint

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


CONTROL_PLANES: Table[PlaneFactory] = {
    "shared-memory": "minisgl.distributed.shared_memory:SharedMemoryPlane",
    "zmq": "minisgl.distributed.publish:PublishPlane",
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
