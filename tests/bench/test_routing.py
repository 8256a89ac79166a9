"""Routers choose as they say, and an index that is fed by events is what the caches hold."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.bench.routing import (
    PAGE_SIZE,
    ROUTERS,
    CacheAware,
    KVAware,
    LeastLoaded,
    PrefixHash,
    PrefixIndex,
    RoundRobin,
    cheapest,
    page_names,
)
from minisgl.bench.simulation import ReportingCache
from minisgl.request import Int32Array

IDLE = np.zeros(4, dtype=np.int64)


def prompt(*parts: int) -> Int32Array:
    """A page of each of these tokens."""
    return np.repeat(np.array(parts, dtype=np.int32), PAGE_SIZE)


def load(*requests: int) -> np.ndarray:
    return np.array(requests, dtype=np.int64)


def test_a_name_tells_all_tokens_from_the_start() -> None:
    first, second = page_names(prompt(7, 8, 9)), page_names(prompt(7, 5, 9))
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, False]
    assert page_names(prompt(7, 8, 9)[:-1]) == first[:2], "a page that is not full has no name"


def test_round_robin_takes_turns_and_least_loaded_the_idlest() -> None:
    turns, least = RoundRobin(3), LeastLoaded(3)
    assert [turns.choose([], load(9, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    assert least.choose([], load(2, 3, 1)) == 2
    assert {least.choose([], load(1, 1, 1)) for _ in range(3)} == {0, 1, 2}, "ties go round"


def test_a_prefix_hash_keeps_together_what_begins_alike() -> None:
    router = PrefixHash(8)
    chosen = {router.choose(page_names(prompt(5, other)), IDLE) for other in range(20)}
    assert len(chosen) == 1
    assert len({router.choose(page_names(prompt(each)), IDLE) for each in range(60)}) == 8, "and spreads the others"
    assert 0 <= router.choose([], IDLE) < 8, "a prompt of less than a page has no name"


def test_a_new_replica_takes_only_its_share() -> None:
    prompts = [page_names(prompt(each)) for each in range(400)]
    before, after = ([PrefixHash(count).choose(names, IDLE) for names in prompts] for count in (7, 8))
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {7}, "all that moves, moves to the new one"
    assert 25 < len(moved) < 80


def test_the_index_counts_pages_from_the_start_without_a_gap() -> None:
    index, names = PrefixIndex(), page_names(prompt(1, 2, 3))
    index.add(0, names[:1])
    index.add(1, names)
    index.add(2, names[1:])
    assert index.held(names, 4).tolist() == [1, 3, 0, 0]
    index.remove(1, names[1:2])
    assert index.held(names, 4).tolist() == [1, 1, 0, 0], "the third page is of no use without the second"
    assert index.held([], 4).tolist() == [0, 0, 0, 0]


def test_what_nobody_holds_is_forgotten() -> None:
    index, names = PrefixIndex(), page_names(prompt(1, 2, 3))
    for replica in (0, 700):
        index.add(replica, names)
    index.remove(0, names)
    index.remove(0, names)
    assert index.held(names, 701).tolist() == [0] * 700 + [3]
    index.remove(700, names)
    assert len(index) == 0
    index.remove(700, names)  # an event that comes twice, or late, is no error


def test_the_cheapest_weighs_pages_against_requests() -> None:
    names, held = list(range(10)), load(8, 0, 0)
    assert cheapest(names, held, load(2, 1, 1), 4.0) == 0, "2 pages and 2 × 4 are less than 10 and 1 × 4"
    assert cheapest(names, held, load(4, 1, 2), 4.0) == 1
    assert cheapest(names, held, load(9, 0, 0), 0.0) == 0, "without a toll, load does not matter"
    assert cheapest(names, load(0, 0, 0), load(2, 1, 1), 0.0) == 1, "of equals, the idler"


def test_cache_aware_goes_back_to_where_it_went() -> None:
    router = CacheAware(4, load_weight=1.0)
    first = router.choose(page_names(prompt(1, 2, 3, 4)), load(1, 1, 0, 1))
    assert first == 2
    assert router.choose(page_names(prompt(1, 2, 3, 5)), load(0, 0, 2, 0)) == 2, "3 pages are worth 2 requests"
    assert router.choose(page_names(prompt(1, 2, 3, 6)), load(0, 0, 4, 0)) != 2, "and not 4"


def test_cache_aware_forgets_what_it_sent_long_ago() -> None:
    router = CacheAware(1, capacity=3)
    old, new = page_names(prompt(1, 2)), page_names(prompt(7, 8))
    for names in (old, new):
        router.choose(names, load(0))
    assert router.index.held(old, 1).tolist() == [1], "the end goes before the beginning"
    assert router.index.held(new, 1).tolist() == [2]


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_takes_prompts_of_any_length(name: str) -> None:
    router = ROUTERS[name](4)
    for parts in ((), (1,), (1, 2, 3)):
        assert router.choose(page_names(prompt(*parts)), IDLE) in range(4)


def test_an_index_fed_by_events_is_what_the_cache_holds() -> None:
    rng, router, cache = np.random.default_rng(0), KVAware(3), ReportingCache(PAGE_SIZE)
    free = list(range(40))
    for _ in range(300):
        tokens = prompt(*rng.integers(1, 4, size=rng.integers(1, 6)).tolist())
        known = cache.match(tokens).pages
        missing = len(tokens) // PAGE_SIZE - len(known)
        if missing > len(free):
            free += cache.evict(int(rng.integers(1, 20))).tolist()
        if missing <= len(free):
            new = [free.pop() for _ in range(missing)]
            handle = cache.insert(tokens, np.array([*known, *new], dtype=np.int32)).handle
            if free and rng.random() < 0.5:
                cache.lock(handle)
                page = free.pop()
                longer = cache.extend(handle, prompt(9), page)
                cache.unlock(handle if longer is None else longer)
                free += [page] if longer is None else []
        for kind, names in cache.events:
            getattr(router, kind)(1, names)
        cache.events.clear()
        held = len(cache.match(tokens).pages)
        assert router.index.held(page_names(tokens), 3).tolist() == [0, held, 0]
        assert len(router.index) == cache.num_pages
    assert cache.num_pages > 10
