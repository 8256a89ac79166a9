"""Publishing the prefix cache's events over ZeroMQ, in vLLM's format, so that a router knows what is cached where.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), and a `KVEventBatch`. Whoever has
missed some asks the replay socket (a ROUTER; ask with a REQ or DEALER) with the first number wanted, and gets the same
three frames for each batch that is still kept, and a number of -1 with an empty batch at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import zmq

from minisgl.batch import Batch, StepPhase
from minisgl.core import EngineCore
from minisgl.errors import ConfigError
from minisgl.kvcache.events import KVEventBatch, KVEventLog
from minisgl.request import Request

logger = logging.getLogger(__name__)

KEPT_BATCHES = 10_000  # for replay, as vLLM keeps them; a batch is one step's
_MOST_UNSENT = 100_000  # batches; a subscriber that is further behind misses some, and can ask for them
_END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """A `StepObserver` that publishes each step's events. A thread sends them, and replays while the engine is idle.

    Raises `ConfigError` if an endpoint cannot be bound.
    """

    def __init__(self, log: KVEventLog, endpoint: str, replay: str | None, topic: str) -> None:
        self._log = log
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._context = zmq.Context()
        try:
            self._socket = self._bound(zmq.PUB, "kv_events", endpoint)
            self._replay = None if replay is None else self._bound(zmq.ROUTER, "kv_events_replay", replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        inbox = self._context.socket(zmq.PULL)
        inbox.bind("inproc://events")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.sndhwm = inbox.rcvhwm = 0
        self._outbox.connect("inproc://events")
        self._thread = threading.Thread(target=self._run, args=(inbox,), name="minisgl-kv-events", daemon=True)
        self._thread.start()
        self._publish()

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Nothing to do."""

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Publish at the end of a step, when the device has work or is done; of an idle engine, after scheduling."""
        if phase in ("process", "fail") or (phase == "schedule" and batch is None):
            self._publish()

    def finish(self, requests: Sequence[Request]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._publish()
        self._outbox.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)

    def _publish(self) -> None:
        if events := self._log.take():
            self._outbox.send(self._encoder.encode(KVEventBatch(time.time(), events)))

    def _bound(self, kind: int, option: str, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.sndhwm = _MOST_UNSENT
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{option}: cannot publish at {endpoint!r} ({error}); give an address of this machine and a free port, "
                "such as tcp://*:5557"
            ) from error
        return made

    # -- in the publisher's thread -----------------------------------------------------------------------------

    def _run(self, inbox: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if inbox in ready:
                batch = inbox.recv()
                if not batch:
                    return
                frames = (number.to_bytes(8, "big"), batch)
                number += 1
                self._kept.append(frames)  # before it is sent: whoever has seen a later number can ask for this one
                self._socket.send_multipart((self._topic, *frames))
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            logger.warning("a request for KV events must be an empty frame and a number of 8 bytes; ignored")
            return
        first = rest[1]  # big-endian numbers compare as their bytes do
        for number, batch in list(self._kept):
            if number >= first:
                replay.send_multipart((client, b"", self._topic, number, batch))
        replay.send_multipart((client, b"", b"", _END, b""))


@contextmanager
def publish_kv_events(core: EngineCore, endpoint: str | None, replay: str | None, topic: str) -> Iterator[None]:
    """Publish the events of an engine that has run nothing yet, as long as the ``with`` block lasts.

    Without an endpoint, do nothing. Raises `ConfigError` if one cannot be bound, or there is no prefix cache.
    """
    if endpoint is None:
        yield
        return
    if core.config.prefix_cache == "none":
        raise ConfigError("kv_events: there are none with prefix_cache 'none'; choose 'radix' or 'block-hash'")
    memory = core.scheduler.memory
    log = KVEventLog(memory.page_size)
    publisher = KVEventPublisher(log, endpoint, replay, topic)
    memory.listeners.append(log)
    try:
        with core.observe(publisher):
            yield
    finally:
        memory.listeners.remove(log)
        publisher.close()
