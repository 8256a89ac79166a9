"""KV events over ZeroMQ: from a server, in order, and once more for those who missed some."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from minisgl.config import EngineConfig
from minisgl.core import EngineCore
from minisgl.errors import ConfigError
from minisgl.kvcache.events import AllBlocksCleared, KVEventBatch
from minisgl.sampling_params import SamplingParams
from minisgl.server.config import ServerConfig
from minisgl.server.kv_events import publish_kv_events
from tests.kv_index import KVIndex, cached_prefixes
from tests.server.harness import PROMPT, TINY, ProcessServer, RunningServer, wait_until

BATCH = msgspec.msgpack.Decoder(KVEventBatch)
END = -1


class Subscriber:
    """A router's end of both sockets."""

    def __init__(self, events: str, replay: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.connect(events)
        self.socket.subscribe(b"kv@")
        self.replay = self._context.socket(zmq.DEALER)
        self.replay.connect(replay)
        self.numbers: list[int] = []
        self.index = KVIndex()

    def read(self) -> None:
        """Apply everything that has come, and first what was published before the subscription had arrived."""
        while self.socket.poll(0):
            topic, message, batch = self.socket.recv_multipart()
            assert topic == b"kv@tests"
            number = int.from_bytes(message, "big")
            if not self.numbers:
                for earlier, missed in self.ask_from(0):
                    if 0 <= earlier < number:
                        self.index.apply(BATCH.decode(missed).events)
            self.numbers.append(number)
            self.index.apply(BATCH.decode(batch).events)

    def ask(self, request: list[bytes]) -> list[tuple[int, bytes]]:
        """Replayed batches, and the end."""
        self.replay.send_multipart(request)
        replies: list[tuple[int, bytes]] = []
        while not replies or replies[-1][0] != END:
            assert self.replay.poll(10_000), "the replay has no end"
            empty, topic, number, batch = self.replay.recv_multipart()
            replies.append((int.from_bytes(number, "big", signed=True), batch))
            assert (empty, topic) == (b"", b"" if replies[-1][0] == END else b"kv@tests")
        return replies

    def ask_from(self, number: int) -> list[tuple[int, bytes]]:
        return self.ask([b"", number.to_bytes(8, "big")])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"kv_events": f"ipc://{tmp_path}/e", "kv_events_replay": f"ipc://{tmp_path}/r"}


@pytest.fixture
def subscriber(endpoints: dict[str, str]) -> Iterator[Subscriber]:
    made = Subscriber(*endpoints.values())
    yield made
    made.close()


def test_a_router_knows_what_is_cached_and_can_catch_up(
    checkpoint: Path, endpoints: dict[str, str], subscriber: Subscriber
) -> None:
    core = EngineCore(EngineConfig(model=str(checkpoint), **TINY))
    with core, publish_kv_events(core, *endpoints.values(), "kv@tests"):
        wait_until(lambda: subscriber.ask_from(0)[-1][0] == END)
        cache, processor = core.scheduler.memory.cache, core.input_processor

        def generate(first: int) -> None:
            tokens = [first, *range(3, 30)]
            for request in processor.process(tokens, SamplingParams(max_tokens=9, ignore_eos=True), False):
                core.add(request)
            while core.has_work:
                core.step()

        def known() -> bool:
            subscriber.read()
            return sorted(subscriber.index.prefixes.values()) == cached_prefixes(cache)

        for first in range(100, 200):  # until the subscription has arrived
            generate(first)
            if known():
                break
            time.sleep(0.05)
        generate(5)
        wait_until(known)
        assert len(subscriber.index.prefixes) > 5
        for first in range(6, 20):  # more than fit: pages are evicted
            generate(first)
        wait_until(known)
        assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))

        late = KVIndex()
        *batches, end = subscriber.ask_from(0)
        assert [number for number, _ in batches] == list(range(subscriber.numbers[-1] + 1))
        assert isinstance(BATCH.decode(batches[0][1]).events[0], AllBlocksCleared)
        for _, batch in batches:
            late.apply(BATCH.decode(batch).events)
        assert late.prefixes == subscriber.index.prefixes
        assert end == (END, b"")
        last = subscriber.numbers[-1]
        assert [number for number, _ in subscriber.ask_from(last)] == [last, END]
        assert [number for number, _ in subscriber.ask_from(last + 1)] == [END]
        for nonsense in ([b"hello"], [b"", b"12"], [b"x", bytes(8)], [b"", bytes(8), b""]):
            subscriber.replay.send_multipart(nonsense)  # is ignored
        assert [number for number, _ in subscriber.ask_from(last)] == [last, END]
    assert core.scheduler.memory.listeners == core.loop.observers == []


def test_a_server_in_processes_publishes_and_a_flush_is_told_while_the_engine_is_idle(
    checkpoint: Path, endpoints: dict[str, str], subscriber: Subscriber
) -> None:
    options = ServerConfig(kv_events_topic="kv@tests", **endpoints)
    with ProcessServer(checkpoint, options) as server:
        wait_until(lambda: subscriber.ask_from(0)[-1][0] == END)
        server.complete(prompt=PROMPT)
        index = KVIndex()
        for _, batch in subscriber.ask_from(0)[:-1]:
            index.apply(BATCH.decode(batch).events)
        assert len(index.prefixes) >= len(PROMPT) // TINY["page_size"] - 1
        subscriber.read()
        reply = server.http.post("/flush_cache")
        assert reply.json()["flushed_pages"] >= len(index.prefixes)

        def cleared() -> bool:
            subscriber.read()
            return subscriber.index.prefixes == {}

        wait_until(cleared)
        assert server.complete(prompt=PROMPT).usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("option", ["kv_events", "kv_events_replay"])
def test_an_endpoint_that_cannot_be_bound_is_named(checkpoint: Path, endpoints: dict[str, str], option: str) -> None:
    core = EngineCore(EngineConfig(model=str(checkpoint), **TINY))
    wrong = {**endpoints, option: "tcp://nowhere"}
    with pytest.raises(ConfigError, match=rf"^{option}: cannot publish at 'tcp://nowhere'"):
        publish_kv_events(core, *wrong.values(), "").__enter__()
    assert core.scheduler.memory.listeners == core.loop.observers == []


def test_without_a_prefix_cache_or_an_endpoint_there_is_nothing_to_publish(checkpoint: Path) -> None:
    core = EngineCore(EngineConfig(model=str(checkpoint), prefix_cache="none", **TINY))
    with pytest.raises(ConfigError, match="kv_events: there are none with prefix_cache 'none'"):
        publish_kv_events(core, "inproc://x", None, "").__enter__()
    with publish_kv_events(core, None, None, ""):
        assert core.scheduler.memory.listeners == core.loop.observers == []
    with pytest.raises(ConfigError, match="kv_events_replay: there is nothing to replay"):
        ServerConfig(kv_events_replay="tcp://*:5558")


def test_a_server_in_one_process_publishes_too(
    checkpoint: Path, endpoints: dict[str, str], subscriber: Subscriber, own_server: RunningServer
) -> None:
    core = own_server.core
    with publish_kv_events(core, *endpoints.values(), "kv@tests"):
        own_server.complete(prompt=PROMPT)
        wait_until(lambda: len(subscriber.ask_from(0)) > 2)
