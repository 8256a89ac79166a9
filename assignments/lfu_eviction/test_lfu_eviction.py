"""What distinguishes least frequently used with aging from other eviction policies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.kvcache.prefix import EVICTION_POLICIES, EvictionPolicy, LeastRecentlyUsed
from minisgl.kvcache.radix import RadixCache
from minisgl.registry import resolve

CONTRACTS = {"make_policy": (EVICTION_POLICIES, EvictionPolicy)}


@pytest.fixture
def make_policy(request: pytest.FixtureRequest) -> Callable[[], EvictionPolicy]:
    return resolve("--impl", request.param, EVICTION_POLICIES)


class Prompts:
    """A cache of prompts that are one page each and have nothing in common; each is named by a number."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.cache = RadixCache(1, policy)

    def use(self, *prompts: int) -> None:
        for prompt in prompts:
            self.cache.insert(np.array([prompt], dtype=np.int32), np.array([prompt], dtype=np.int32))

    def evict(self, count: int) -> list[int]:
        pages: list[int] = self.cache.evict(count).tolist()
        return pages

    def must_evict(self, *wanted: int) -> None:
        evicted = self.evict(len(wanted))
        assert evicted == list(wanted), f"{list(wanted)} should be evicted, in this order, and {evicted} were"


@pytest.fixture
def prompts(make_policy: Callable[[], EvictionPolicy]) -> Prompts:
    return Prompts(make_policy())


class TestFrequency:
    def test_the_least_frequently_used_goes_first(self, prompts: Prompts) -> None:
        prompts.use(1, 1, 1, 2, 2, 3)
        prompts.must_evict(3, 2, 1)

    def test_a_recent_use_does_not_outweigh_many(self, prompts: Prompts) -> None:
        prompts.use(1, 1, 1, 2, 2, 3)
        prompts.must_evict(3)

    def test_among_equals_the_least_recently_used_goes_first(self, prompts: Prompts) -> None:
        prompts.use(3, 1, 2, 1, 2, 3)
        prompts.must_evict(1, 2, 3)

    def test_matches_count_as_inserts_do(self, prompts: Prompts) -> None:
        prompts.use(1, 2, 2)
        for _ in range(2):
            prompts.cache.match(np.array([1], dtype=np.int32))
        prompts.must_evict(2)

    def test_what_comes_back_starts_from_nothing(self, prompts: Prompts) -> None:
        prompts.use(*[1] * 9)
        prompts.must_evict(1)
        prompts.use(1, 2, 2)
        prompts.must_evict(1)


class TestAging:
    def test_an_eviction_lends_its_frequency_to_all_that_comes(self, prompts: Prompts) -> None:
        prompts.use(*[1] * 5, *[2] * 3)
        prompts.must_evict(2)
        prompts.use(3, 3, 3)  # 3 + 3 uses, against 5
        prompts.must_evict(1)

    @pytest.mark.parametrize("uses", [10, 40])
    def test_what_was_popular_once_leaves_in_the_end(self, prompts: Prompts, uses: int) -> None:
        prompts.use(*[1] * uses)
        evicted: list[int] = []
        for prompt in range(2, 2 + 2 * uses):
            prompts.use(prompt)
            if prompt > 2:
                evicted += prompts.evict(1)
        assert 1 in evicted, f"{2 * uses} others came, and what had {uses} uses once is still there"
        turn = evicted.index(1)
        assert turn >= uses // 2, f"what had {uses} uses went after {turn} others; it was popular, after all"

    def test_the_age_never_falls(self, prompts: Prompts) -> None:
        """A run that a request held, and that is evicted late, is less frequent than what went before."""
        prompts.use(1)
        handle = prompts.cache.match(np.array([1], dtype=np.int32)).handle
        prompts.cache.lock(handle)
        prompts.use(*[2] * 3, *[4] * 6)
        prompts.must_evict(2)  # its age is 3 now
        prompts.cache.unlock(handle)
        prompts.must_evict(1)  # with two uses; the age stays
        prompts.use(3, 3, 3)  # 3 + 3, against 6 that were counted earlier
        prompts.must_evict(4)

    def test_against_a_simulation(self, prompts: Prompts) -> None:
        """The definition in the handout, with a search where the engine has a heap."""
        rng = np.random.default_rng(0)
        priorities: dict[int, tuple[int, int]] = {}
        uses: dict[int, int] = {}
        age = 0
        for now in range(1500):
            prompt = int(rng.zipf(1.3)) % 200
            prompts.use(prompt)
            uses[prompt] = uses.get(prompt, 0) + 1
            priorities[prompt] = (age + uses[prompt], now)
            if len(priorities) > 40:
                victim = min(priorities, key=lambda each: priorities[each])
                prompts.must_evict(victim)
                age = max(age, priorities.pop(victim)[0])
                del uses[victim]


def hits(policy: EvictionPolicy) -> int:
    """How often a prompt is found, if room is for 30 and every popular one is followed by one that never returns."""
    rng = np.random.default_rng(1)
    prompts, found = Prompts(policy), 0
    for step in range(2000):
        for prompt in (int(rng.zipf(1.2)) % 60, 1000 + step):
            found += len(prompts.cache.match(np.array([prompt], dtype=np.int32)).pages)
            prompts.use(prompt)
            if prompts.cache.num_pages > 30:
                prompts.evict(1)
    return found


def test_more_hits_than_least_recently_used_under_a_scan(make_policy: Callable[[], EvictionPolicy]) -> None:
    yours, recent = hits(make_policy()), hits(LeastRecentlyUsed())
    assert yours > 1.1 * recent, f"{yours} hits, where least recently used has {recent}: more by a tenth are expected"
