"""The way back: each rank writes to the driver through a pipe of its own."""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable

from minisgl.child_process import BEAT_INTERVAL, beat
from minisgl.distributed.messages import Stepped, decode_report, encode_report

_SIZE = struct.Struct("<I")


def send_report(fd: int, report: Stepped) -> None:
    """Write a message to the driver."""
    message = encode_report(report)
    rest = memoryview(_SIZE.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(fd, rest) :]


class ReportReader:
    """The driver's end of one rank's pipe.

    Args:
        fd: to read from; closed by `close`.
        alarm: another file, which becomes readable when there is no use in waiting any longer.
        check: called when it does; raises why.
    """

    def __init__(self, fd: int, alarm: int, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(alarm, select.POLLIN)
        os.set_blocking(fd, False)

    def read(self, timeout: float) -> Stepped:
        """The rank's next message.

        Raises:
            TimeoutError: there is none within ``timeout`` seconds.
            EngineDead: a rank has ended.
        """
        deadline = time.monotonic() + timeout
        while (report := self.take()) is None:
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {timeout:g} s")
            beat()  # the driver may be a child, which waits and does not hang
            self._poll.poll(1e3 * min(left, BEAT_INTERVAL))
        return report

    def take(self) -> Stepped | None:
        """The rank's next message if it is there."""
        while True:
            if len(self._received) >= _SIZE.size:
                end = _SIZE.size + _SIZE.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    message = bytes(self._received[_SIZE.size : end])
                    del self._received[:end]
                    return decode_report(message)
            try:
                chunk = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return None
            if not chunk:
                return None
            self._received += chunk

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._fd)
