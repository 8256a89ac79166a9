"""What every eviction policy must fulfil, alone and inside a radix tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.kvcache.prefix import EVICTION_POLICIES, EvictionPolicy
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.registry import resolve
from tests.contracts.counting import count_operations
from tests.scheduler.harness import Harness

CONTRACTS = {"make_policy": (EVICTION_POLICIES, EvictionPolicy)}


@pytest.fixture
def make_policy(request: pytest.FixtureRequest) -> Callable[[], EvictionPolicy]:
    return resolve("--impl", request.param, EVICTION_POLICIES)


@pytest.fixture
def cache(make_policy: Callable[[], EvictionPolicy]) -> RadixCache:
    return RadixCache(2, make_policy())


def test_a_priority_never_falls(make_policy: Callable[[], EvictionPolicy]) -> None:
    """Uses, evictions and time go on in any order; the priorities of evictions are such as were given."""
    rng = np.random.default_rng(0)
    policy = make_policy()
    uses, priorities = dict.fromkeys(range(20), 0), {}
    for now in range(1, 2000):
        run = int(rng.integers(20))
        uses[run] += 1
        priority = policy.on_use(now, uses[run])
        assert run not in priorities or priority >= priorities[run]
        priorities[run] = priority
        if now % 7 == 0:
            lowest = min(priorities, key=lambda each: priorities[each])
            policy.on_evict(priorities.pop(lowest))
            uses[lowest] = 0


def test_policies_share_nothing(make_policy: Callable[[], EvictionPolicy]) -> None:
    busy, idle = make_policy(), make_policy()
    for now in range(1, 100):
        busy.on_evict(busy.on_use(now, now))
    assert idle.on_use(1, 1) == make_policy().on_use(1, 1)


def test_the_lowest_priority_goes_first(cache: RadixCache) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        label = int(rng.zipf(1.5)) % 50
        cache.insert(np.array([label, label], dtype=np.int32), np.array([label], dtype=np.int32))
    while cache.num_pages:
        priorities = {int(node.pages[0]): node.priority for node in cache.nodes()}
        (page,) = cache.evict(1).tolist()
        assert priorities[page] == min(priorities.values())


def test_the_tree_stays_sound(cache: RadixCache) -> None:
    """Random prefixes, locks and evictions; the tree is checked after every call."""
    rng = np.random.default_rng(2)
    locked: list[Node] = []
    page = 0
    for _ in range(600):
        tokens = np.repeat(rng.integers(0, 3, rng.integers(1, 6)), 2).astype(np.int32)
        if rng.random() < 0.5:
            pages = np.arange(page, page + len(tokens) // 2, dtype=np.int32)
            page += len(pages)
            handle = cache.insert(tokens, pages).handle
        else:
            handle = cache.match(tokens).handle
        if rng.random() < 0.3:
            cache.lock(handle)
            locked.append(handle)
        if locked and rng.random() < 0.3:
            cache.unlock(locked.pop(int(rng.integers(len(locked)))))
        if rng.random() < 0.3:
            wanted = int(rng.integers(1, 6))
            expected = min(wanted, cache.num_evictable)
            assert len(cache.evict(wanted)) == expected
        cache.check()


def test_an_engine_short_of_memory_answers_everybody(make_policy: Callable[[], EvictionPolicy]) -> None:
    harness = Harness(page_size=2, num_pages=14, max_running=4)
    harness.memory.cache = RadixCache(2, make_policy())
    rng = np.random.default_rng(3)
    added = [harness.add(rng.integers(0, 3, 1 + i % 9).tolist(), max_tokens=1 + i % 5) for i in range(60)]
    harness.run()
    for request in added:
        harness.assert_output(request)
    harness.assert_idle_and_clean()


def test_a_use_costs_the_same_however_much_is_cached(make_policy: Callable[[], EvictionPolicy]) -> None:
    policy = make_policy()
    costs = []
    for now in range(1, 1001):
        costs.append(count_operations(lambda now=now: policy.on_evict(policy.on_use(now, 1 + now % 3))))
    assert max(costs) < 200, f"{max(costs)} instructions for a use and an eviction; they are called at every step"
