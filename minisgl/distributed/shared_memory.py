"""The control plane over shared memory, as in nano-vllm: a ring of steps, and an event that wakes the ranks."""

from __future__ import annotations

import mmap
import os
import select
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from minisgl.distributed.control_plane import wait_for_message, wait_until
from minisgl.distributed.messages import Endpoint

CAPACITY = 1 << 20  # bytes of the ring; a decode step of 256 rows has 10 KB, a prefill step of 8,192 tokens 136 KB
_CACHE_LINE = 64
_HEADER = 8  # bytes before each record: its size, and that of the message's rest in later records, int32 each


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring buffer that the driver writes and every rank reads. Positions count all bytes ever written or read."""

    memory: memoryview
    positions: npt.NDArray[np.int64]  # [ranks] how far each rank has read; each on its own cache line, before the ring

    @classmethod
    def map(cls, fd: int, num_ranks: int) -> _Ring:
        memory = memoryview(mmap.mmap(fd, num_ranks * _CACHE_LINE + CAPACITY))
        lines = np.frombuffer(memory[: num_ranks * _CACHE_LINE], dtype=np.int64)
        return cls(memory[num_ranks * _CACHE_LINE :], lines[:: _CACHE_LINE // 8])

    def write(self, position: int, data: bytes | memoryview) -> None:
        start = position % CAPACITY
        first = min(len(data), CAPACITY - start)
        self.memory[start : start + first] = data[:first]
        self.memory[: len(data) - first] = data[first:]

    def read(self, position: int, size: int) -> bytes:
        start = position % CAPACITY
        first = min(size, CAPACITY - start)
        return bytes(self.memory[start : start + first]) + bytes(self.memory[: size - first])


class SharedMemoryPlane:
    """A ring buffer in shared memory, and a pipe to each rank, in which one byte announces one record.

    The byte wakes a sleeping rank and is a memory barrier: who has read it sees the record. The pipe ends when the
    driver dies. Nothing has a name, so the system frees it with the last process.
    """

    def __init__(self, num_ranks: int, check: Callable[[], None]) -> None:
        self._check = check
        self._written = 0
        self._memory_fd = _anonymous_file(num_ranks * _CACHE_LINE + CAPACITY)
        self._ring = _Ring.map(self._memory_fd, num_ranks)
        pipes = [os.pipe() for _ in range(num_ranks)]
        self._bells = [bell for _, bell in pipes]
        self._rank_ends = [rank_end for rank_end, _ in pipes]
        for bell in self._bells:
            os.set_blocking(bell, False)

    def endpoint(self, rank: int) -> Endpoint:
        return Endpoint(f"{rank} of {len(self._bells)}", [self._memory_fd, self._rank_ends[rank]])

    def connect(self, timeout: float) -> None:
        # The ranks have inherited these by now.
        for fd in (self._memory_fd, *self._rank_ends):
            os.close(fd)
        self._memory_fd, self._rank_ends = -1, []

    def send(self, message: bytes, timeout: float) -> None:
        # A message larger than a quarter of the ring goes in several records.
        rest = memoryview(message)
        while True:
            record, rest = rest[: CAPACITY // 4], rest[CAPACITY // 4 :]
            self._send_record(record, len(rest), timeout)
            if not rest:
                return

    def _send_record(self, record: memoryview, more: int, timeout: float) -> None:
        end = self._written + _HEADER + len(record)
        wait_until(lambda: end - int(self._ring.positions.min()) <= CAPACITY, timeout, self._check, "a slow rank")
        self._ring.write(self._written, np.array([len(record), more], dtype=np.int32).tobytes())
        self._ring.write(self._written + _HEADER, record)
        self._written = end
        for bell in self._bells:
            wait_until(partial(_ring_bell, bell), timeout, self._check, "a slow rank")

    def close(self) -> None:
        for fd in (*self._bells, *self._rank_ends, *([self._memory_fd] if self._memory_fd >= 0 else [])):
            os.close(fd)
        self._bells, self._rank_ends, self._memory_fd = [], [], -1
        vars(self).pop("_ring", None)  # the memory goes with the last reference to it

    @staticmethod
    def receiver(endpoint: Endpoint) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(endpoint)


class SharedMemoryReceiver:
    """A rank's end of a `SharedMemoryPlane`."""

    def __init__(self, endpoint: Endpoint) -> None:
        rank, num_ranks = map(int, endpoint.address.split(" of "))
        memory_fd, self._bell = endpoint.fds
        ring = _Ring.map(memory_fd, num_ranks)
        os.close(memory_fd)
        os.set_blocking(self._bell, False)
        self._ring = ring
        self._position = ring.positions[rank : rank + 1]
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def receive(self, timeout: float | None = None) -> bytes | None:
        if not self._wait_for_record(timeout):
            return None
        message, more = self._read_record()
        while more:  # the driver is writing the rest
            self._wait_for_record(None)
            record, more = self._read_record()
            message += record
        return message

    def _wait_for_record(self, timeout: float | None) -> bool:
        return wait_for_message(self._bell_rang, self._sleep, timeout)

    def _sleep(self, timeout: float | None) -> None:
        self._poll.poll(None if timeout is None else 1e3 * timeout)

    def _bell_rang(self) -> bool:
        try:
            byte = os.read(self._bell, 1)
        except BlockingIOError:
            return False
        if not byte:
            raise EOFError("the driver has ended")
        return True

    def _read_record(self) -> tuple[bytes, int]:
        position = int(self._position[0])
        size, more = np.frombuffer(self._ring.read(position, _HEADER), dtype=np.int32).tolist()
        record = self._ring.read(position + _HEADER, size)
        self._position[0] = position + _HEADER + size
        return record, more

    def close(self) -> None:
        os.close(self._bell)
        vars(self).pop("_ring", None)
        vars(self).pop("_position", None)


def _ring_bell(bell: int) -> bool:
    """Put a byte into a pipe; False if the pipe is full."""
    try:
        return os.write(bell, b"\0") == 1
    except BlockingIOError:
        return False


def _anonymous_file(size: int) -> int:
    """A file that lives while a process has it open: memory on Linux, elsewhere a deleted file."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minisgl-steps")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
