"""Events say at every moment what the prefix cache holds, whichever cache it is and whatever happens to requests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from minisgl.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEventLog
from tests.fake_executor import Fault
from tests.kv_index import KVIndex, cached_prefixes
from tests.scheduler.harness import DELAYS, Harness


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_batch_is_what_vllm_publishes() -> None:
    log = KVEventLog(2)
    log.note(pages(1, 2, 3, 4), pages(10, 11))
    log.extend(pages(5, 6), 12, 11)
    log.save(pages(12))
    log.save(pages(11, 10))
    encoded = msgspec.msgpack.encode(KVEventBatch(1.5, log.take()))
    ts, (first, stored, extended, removed, cleared), rank = msgspec.msgpack.decode(encoded)
    assert (ts, first, rank) == (1.5, {"type": "AllBlocksCleared"}, 0)
    a, b = stored["block_hashes"]
    place = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [a, b],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        **place,
    }
    (c,) = extended["block_hashes"]
    assert extended == {**stored, "block_hashes": [c], "parent_block_hash": b, "token_ids": [5, 6]}
    assert removed == {"type": "BlockRemoved", "block_hashes": [c], "medium": "GPU"}
    assert cleared == {"type": "AllBlocksCleared"}
    assert len({a, b, c}) == 3
    assert all(0 <= key < 2**64 for key in (a, b, c))
    assert log.take() == []
    assert [type(event) for event in msgspec.msgpack.decode(encoded, type=KVEventBatch).events] == [
        AllBlocksCleared,
        BlockStored,
        BlockStored,
        BlockRemoved,
        AllBlocksCleared,
    ]


def test_a_prefix_that_is_cached_again_is_no_news_and_an_eviction_of_nothing_neither() -> None:
    log = KVEventLog(2)
    log.note(pages(1, 2, 3, 4), pages(10, 11))
    log.take()
    log.note(pages(1, 2), pages(10))
    log.note(pages(1, 2, 3, 4), pages(10, 11))
    log.save(pages())
    log.settle()
    assert log.take() == []
    log.note(pages(1, 2, 7, 8), pages(10, 12))
    (branch,) = log.take()
    assert isinstance(branch, BlockStored)
    assert (branch.token_ids, len(branch.block_hashes)) == ([7, 8], 1)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("store_slots", [0, 12])
@pytest.mark.parametrize("prefix_cache", ["radix", "block-hash"])
def test_an_index_of_the_events_is_the_cache(prefix_cache: str, store_slots: int, delay: int) -> None:
    harness = Harness(prefix_cache=prefix_cache, num_pages=24, delay=delay, store_slots=store_slots, max_running=4)
    log, index = KVEventLog(harness.memory.page_size), KVIndex()
    harness.memory.listeners.append(log)
    rng = np.random.default_rng(7)
    starts = [rng.integers(0, 3, 24).tolist() for _ in range(5)]
    removed = 0
    for number in range(150):
        prompt = starts[int(rng.integers(5))] + rng.integers(0, 3, number % 7).tolist()
        request = harness.add(prompt, max_tokens=1 + number % 9)
        if number % 10 == 9:
            harness.faulty.fault = Fault(bool(number % 20 == 9), RuntimeError("broken"))
        if number % 40 == 39:
            harness.memory.flush()
        harness.step()
        if number % 5 == 4:
            harness.abort(request)
        events = log.take()
        removed += sum(isinstance(event, BlockRemoved) for event in events)
        index.apply(events)
        assert sorted(index.prefixes.values()) == cached_prefixes(harness.memory.cache)
    harness.run()
    assert removed > 20
    harness.memory.flush()
    events = log.take()
    assert isinstance(events[-1], AllBlocksCleared)
    index.apply(events)
    assert index.prefixes == {}
    harness.assert_idle_and_clean()
