"""Eviction policies in the radix tree, and how they are chosen. What any policy must do is in ``tests/contracts``."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.errors import ConfigError, InvariantError
from minisgl.kvcache.prefix import LeastRecentlyUsed, select_prefix_cache
from minisgl.kvcache.radix import RadixCache


class Observed:
    """Most recently used goes first, and every call is noted."""

    def __init__(self) -> None:
        self.used: list[tuple[int, int]] = []
        self.evicted: list[int] = []
        self.priority = 0

    def on_use(self, now: int, uses: int) -> int:
        self.used.append((now, uses))
        self.priority += 1
        return self.priority

    def on_evict(self, priority: int) -> None:
        self.evicted.append(priority)


class Falling(Observed):
    def on_use(self, now: int, uses: int) -> int:
        return -now


def insert(cache: RadixCache, *labels: int) -> None:
    tokens = np.array(labels, dtype=np.int32)
    cache.insert(tokens, 10 * tokens)


def test_every_run_of_a_prefix_is_used() -> None:
    policy = Observed()
    cache = RadixCache(1, policy)
    insert(cache, 1, 2)
    insert(cache, 1, 2, 3)
    assert policy.used == [(1, 1), (2, 2), (2, 1)]
    cache.match(np.array([1, 2, 3], dtype=np.int32))
    assert policy.used[3:] == [(3, 3), (3, 2)]


def test_both_halves_of_a_split_have_the_uses_of_the_whole() -> None:
    policy = Observed()
    cache = RadixCache(1, policy)
    insert(cache, 1, 2)
    insert(cache, 1, 2)
    insert(cache, 1)
    insert(cache, 1, 2)
    assert [uses for _, uses in policy.used] == [1, 2, 3, 4, 3]


def test_the_policy_hears_of_every_run_that_loses_pages() -> None:
    policy = Observed()
    cache = RadixCache(1, policy)
    insert(cache, 1, 2)
    insert(cache, 3)
    assert sorted(cache.evict(2)) == [10, 20]
    assert policy.evicted == [1]
    assert cache.evict(1).tolist() == [30]
    assert policy.evicted == [1, 2]


def test_the_policy_hears_of_a_run_that_loses_only_its_tail() -> None:
    policy = Observed()
    cache = RadixCache(1, policy)
    insert(cache, 1, 2, 3)
    assert cache.evict(1).tolist() == [30]
    assert policy.evicted == [1]
    assert cache.evict(9).tolist() == [10, 20]
    assert policy.evicted == [1, 1], "once for each time that pages were cut off, not once a page"


def test_a_priority_that_falls_is_noticed() -> None:
    cache = RadixCache(1, Falling())
    insert(cache, 1)
    cache.check()
    insert(cache, 1)
    with pytest.raises(InvariantError, match="a priority has fallen"):
        cache.check()


def test_a_cache_is_chosen_with_its_policy() -> None:
    observed = f"{__name__}:Observed"
    cache = select_prefix_cache("radix", observed)(2)
    assert isinstance(cache, RadixCache)
    assert cache.page_size == 2
    assert isinstance(cache._eviction, Observed)
    assert select_prefix_cache("radix", observed)(2)._eviction is not cache._eviction
    assert type(select_prefix_cache("radix")(2)._eviction) is LeastRecentlyUsed
    assert select_prefix_cache("block-hash", "lru")(4).page_size == 4


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("radix", "oldest"), "eviction_policy: unknown name 'oldest'; choose from lru, or give module:Class"),
        (("block-hash", f"{__name__}:Observed"), "eviction_policy: prefix_cache 'block-hash' takes none, got .*radix"),
        (("none", f"{__name__}:Observed"), "eviction_policy: prefix_cache 'none' takes none, got .*Observed"),
        (("rradix", "lru"), "prefix_cache: unknown name 'rradix'; choose from block-hash, none, radix"),
        (("radix,lru", "lru"), "prefix_cache: unknown name 'radix,lru'"),
    ],
)
def test_what_cannot_be_chosen(names: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_prefix_cache(*names)
