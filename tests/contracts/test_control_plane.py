"""What every control plane must fulfil: each rank gets each message, whole and in order, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from minisgl.distributed.control_plane import CONTROL_PLANES, ControlPlane, StepReceiver
from minisgl.distributed.messages import Endpoint
from minisgl.errors import EngineDead
from minisgl.registry import resolve

CONTRACTS = {"make_plane": (CONTROL_PLANES, ControlPlane)}

RANKS = 3


@pytest.fixture(scope="module")
def make_plane(request: pytest.FixtureRequest) -> type[ControlPlane]:
    return resolve("--impl", request.param, CONTROL_PLANES)


def never() -> None:
    """Ranks that do not die."""


def connect(make_plane: type[ControlPlane], plane: ControlPlane, rank: int) -> StepReceiver:
    """A rank's end in this process, where it must not share open files with the driver's."""
    endpoint = plane.endpoint(rank)
    return make_plane.receiver(Endpoint(endpoint.address, [os.dup(fd) for fd in endpoint.fds]))


def send_far_too_much(plane: ControlPlane, timeout: float) -> None:
    """More than can be on its way while nobody reads."""
    for _ in range(5000):
        plane.send(bytes(10_000), timeout)


def all_arrive(plane: ControlPlane, receivers: list[StepReceiver], messages: list[bytes], pause: float = 0.0) -> bool:
    """Send while all ranks read, and now and then pause, each longer than the one before. Nobody waits for messages
    that could not be sent."""
    failed = threading.Event()

    def receive(receiver: StepReceiver) -> bytes | None:
        message, tries = None, 100
        while message is None and tries > 0 and not failed.is_set():
            message, tries = receiver.receive(0.2), tries - 1
        return message

    def read(place: int) -> bool:
        for number, message in enumerate(messages):
            if number % 500 == 0:
                time.sleep(pause * place)
            if receive(receivers[place]) != message:
                return False
        return True

    with ThreadPoolExecutor(RANKS) as pool:
        reading = [pool.submit(read, place) for place in range(RANKS)]
        try:
            for message in messages:
                plane.send(message, 20.0)
        except BaseException:
            failed.set()
            raise
        return all(future.result(60) for future in reading)


@pytest.fixture
def ends(make_plane: type[ControlPlane]) -> Iterator[tuple[ControlPlane, list[StepReceiver]]]:
    plane = make_plane(RANKS, never)
    receivers = [connect(make_plane, plane, rank) for rank in range(RANKS)]
    plane.connect(10.0)
    yield plane, receivers
    plane.close()
    for receiver in receivers:
        receiver.close()


def test_every_rank_gets_every_message_in_order(ends: tuple[ControlPlane, list[StepReceiver]]) -> None:
    plane, receivers = ends
    messages = [bytes([number % 251]) * (number % 700) + b"end" for number in range(300)]
    for message in messages:
        plane.send(message, 10.0)
    for receiver in receivers:
        assert [receiver.receive(10.0) for _ in messages] == messages
        assert receiver.receive(0.0) is None


def test_a_message_of_any_size_arrives_whole(ends: tuple[ControlPlane, list[StepReceiver]]) -> None:
    plane, receivers = ends
    rng = np.random.default_rng(0)
    messages = [rng.bytes(size) for size in (1, 4096, 300_000, 1 << 20, 5_000_001)]

    assert all_arrive(plane, receivers, messages)


def test_many_messages_while_ranks_read_at_their_own_pace(ends: tuple[ControlPlane, list[StepReceiver]]) -> None:
    """More than fit into any buffer: the driver waits for the slowest rank, and nothing is dropped."""
    plane, receivers = ends
    messages = [np.full(2000, number, dtype=np.int32).tobytes() for number in range(3000)]

    assert all_arrive(plane, receivers, messages, pause=0.02)


def test_a_rank_that_stops_reading_is_noticed(ends: tuple[ControlPlane, list[StepReceiver]]) -> None:
    plane, _ = ends
    with pytest.raises(TimeoutError, match="slow rank"):
        send_far_too_much(plane, 0.2)


def test_waiting_ends_when_there_is_no_use_in_it(make_plane: type[ControlPlane]) -> None:
    dead = threading.Event()

    def check() -> None:
        if dead.is_set():
            raise EngineDead("rank 1 was killed")

    plane = make_plane(RANKS, check)
    receivers = [connect(make_plane, plane, rank) for rank in range(RANKS)]
    plane.connect(10.0)
    threading.Timer(0.3, dead.set).start()
    with pytest.raises(EngineDead, match="rank 1"):
        send_far_too_much(plane, 60.0)
    plane.close()
    for receiver in receivers:
        receiver.close()


def test_a_rank_waits_asleep_for_as_long_as_it_is_told(ends: tuple[ControlPlane, list[StepReceiver]]) -> None:
    plane, receivers = ends
    before, start = time.thread_time(), time.monotonic()
    assert receivers[0].receive(0.5) is None
    assert time.monotonic() - start >= 0.5
    assert time.thread_time() - before < 0.25, "it was awake"
    sending = threading.Timer(0.2, plane.send, (b"step", 1.0))
    sending.start()
    assert receivers[0].receive(None) == b"step"
    sending.join(10.0)


def test_nothing_is_left_behind(
    make_plane: type[ControlPlane], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither files nor memory with a name, even while it runs; and no open files after it was closed, twice."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def named() -> set[Path]:
        folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
        return {path for folder in folders if folder.is_dir() for path in folder.glob("*minisgl*")}

    make_plane(1, never).close()  # what a library opens once and for all is open now
    gc.collect()  # else this may close files of other tests meanwhile
    before, files = named(), psutil.Process().num_fds()
    plane = make_plane(RANKS, never)
    receivers = [connect(make_plane, plane, rank) for rank in range(RANKS)]
    plane.connect(10.0)
    plane.send(b"step", 1.0)
    assert [receiver.receive(10.0) for receiver in receivers] == [b"step"] * RANKS
    assert named() <= before
    for receiver in receivers:
        receiver.close()
    plane.close()
    plane.close()
    assert named() <= before
    assert psutil.Process().num_fds() <= files
