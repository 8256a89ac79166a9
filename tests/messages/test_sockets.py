from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from minisgl.messages import Abort
from minisgl.messages.sockets import UNBOUNDED, Receiver, Sender, address

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def test_a_full_socket_refuses_and_nothing_that_it_took_is_lost(context: Context, directory: Path) -> None:
    where = address(directory, "inbox")
    sender, receiver = Sender(context, where, 5), Receiver[Abort](context, where, Abort, 5)
    taken = []
    number = 0
    while sender.offer(msgspec.msgpack.encode(Abort(number))):
        taken.append(number)
        number += 1
        assert number < 100_000
    received = [receiver.receive().job for _ in taken]
    assert received == taken


def test_a_sender_waits_until_there_is_room(context: Context, directory: Path) -> None:
    where = address(directory, "inbox")
    sender = Sender(context, where, 5)
    receiver = Receiver[Abort](context, where, Abort, 5)
    thread = threading.Thread(target=lambda: [sender.send(Abort(job)) for job in range(50_000)])
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive(), "it is held up by the bound"
    assert [receiver.receive().job for _ in range(50_000)] == list(range(50_000))
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_an_unbounded_sender_never_waits(context: Context, directory: Path) -> None:
    where = address(directory, "inbox")
    sender = Sender(context, where, UNBOUNDED)
    for job in range(20_000):
        sender.send(Abort(job))
    receiver = Receiver[Abort](context, where, Abort, 5)
    assert [receiver.receive().job for _ in range(20_000)] == list(range(20_000))
    assert receiver.receive_all(0.0) == []
