"""Messages between the server's processes, and the sockets that carry them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams
from minisgl.server import sockets
from minisgl.server.messages import Abort, Conversation, Submit, TokenIds, encode, pack, submit
from minisgl.server.sockets import UNBOUNDED, Receiver, Sender, address

DECODER = msgspec.msgpack.Decoder(Submit)
GREEDY = SamplingParams(temperature=0)


def test_a_job_survives_the_way() -> None:
    params = SamplingParams(max_tokens=None, stop=["a", "b"], logit_bias={7: -3.0}, logprobs=2, seed=2**62)
    prompts = ["text 🦊", [1, 2, 299], Conversation([{"role": "user", "content": [{"type": "text", "text": "x"}]}])]
    received = DECODER.decode(encode(submit(3, prompts, params, True, "somebody")))
    assert (received.job, received.streaming, received.user) == (3, True, "somebody")
    assert received.prompts == ["text 🦊", TokenIds(np.array([1, 2, 299], np.int32).tobytes()), prompts[2]]
    assert SamplingParams(**received.params) == params


def test_only_what_is_not_default_travels() -> None:
    assert submit(0, ["x"], SamplingParams(), False, "").params == {}
    assert submit(0, ["x"], GREEDY, False, "").params == {"temperature": 0}


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1, 10**5000], ids=["above", "below", "huge"])
def test_a_token_id_beyond_32_bits_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match="outside of every vocabulary") as caught:
        pack([1, token_id])
    assert caught.value.field == "prompt"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompts": ["half a \ud800"]}, "prompt"),
        ({"prompts": [Conversation([{"role": "user", "content": "\ud800"}])]}, "prompt"),
        ({"prompts": [Conversation([{"role": "user", "content": 2**70}])]}, "prompt"),
        ({"user": "\udfff"}, "user"),
        ({"params": SamplingParams(stop="\ud800")}, "stop"),
    ],
)
def test_what_no_socket_can_carry_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"prompts": ["x"], "params": GREEDY, "streaming": False, "user": "", **fields}
    with pytest.raises(InvalidRequest) as caught:
        encode(submit(0, **given))
    assert caught.value.field == field


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
    assert len(taken) >= 5, "so many have room on the sender's side alone"
    received = [receiver.receive().job for _ in taken]
    assert received == taken


class FullSocket:
    """Has no room, and nothing to wait with."""

    sends = 0

    def send(self, frame: bytes, flags: int) -> None:
        assert flags & zmq.DONTWAIT, "an event loop that waits serves nobody"
        self.sends += 1
        raise zmq.Again


def test_a_refusal_takes_no_time(context: Context, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, full = Sender(context, address(directory, "inbox"), 5), FullSocket()
    own = sender._socket
    monkeypatch.setattr(sender, "_socket", full)
    assert sender.offer(b"frame") is False
    assert full.sends <= 2, "to try again and again is to wait, too"
    own.close()


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


class Waits(Exception):
    """Raised by the third heartbeat, to end what would wait for ever."""


@pytest.mark.timeout(30)
def test_what_waits_for_room_or_for_a_message_sends_heartbeats(
    context: Context, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats % 3 == 0:
            raise Waits

    monkeypatch.setattr(sockets, "beat", beat)
    monkeypatch.setattr(sockets, "_POLL_MS", 10)
    sender = Sender(context, address(directory, "absent"), 1)
    sender.send(Abort(0))
    with pytest.raises(Waits):
        sender.send(Abort(1))
    receiver = Receiver[Abort](context, address(directory, "inbox"), Abort, 1)
    with pytest.raises(Waits):
        receiver.receive()
    before = beats
    assert receiver.receive_all(0.0) == []
    assert beats == before + 1
