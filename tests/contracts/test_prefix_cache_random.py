"""Random sequences of calls against a model of a prefix cache that is a dictionary."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from minisgl.kvcache.prefix import PREFIX_CACHES, ExtensiblePrefixCache, Handle, PrefixCache
from minisgl.registry import resolve
from tests.contracts.test_prefix_cache import PAGE_SIZES, Client, MakeCache, tokens_of

CONTRACTS = {"make_cache": (PREFIX_CACHES, PrefixCache)}
NUM_PAGES = 24

Prefix = tuple[int, ...]

labels_lists = st.lists(st.integers(0, 2), max_size=6)


@pytest.fixture(scope="module")
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    return resolve("--impl", request.param, PREFIX_CACHES)


class PrefixCacheMachine(RuleBasedStateMachine):
    """``cached`` maps a prefix (the labels of its pages) to its last page; ``locks`` lists handles that are locked."""

    def __init__(self, make_cache: MakeCache, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.cache = make_cache(page_size)
        self.free = list(range(NUM_PAGES))
        self.cached: dict[Prefix, int] = {}
        self.locks: list[tuple[Prefix, Handle]] = []

    def pages_of(self, labels: list[int]) -> list[int]:
        """Pages of the longest cached prefix."""
        pages: list[int] = []
        for length in range(1, len(labels) + 1):
            if tuple(labels[:length]) not in self.cached:
                break
            pages.append(self.cached[tuple(labels[:length])])
        return pages

    def locked(self) -> set[Prefix]:
        return {prefix[:length] for prefix, _ in self.locks for length in range(1, len(prefix) + 1)}

    @rule(labels=labels_lists, use_match=st.booleans(), keep_locked=st.booleans())
    def insert(self, labels: list[int], use_match: bool, keep_locked: bool) -> None:
        """As a request does at its end: its row begins with what it matched, or it computed everything itself."""
        row = self.pages_of(labels) if use_match else []
        row += [self.free.pop() for _ in range(min(len(labels) - len(row), len(self.free)))]
        labels = labels[: len(row)]
        result = self.cache.insert(tokens_of(labels, self.page_size), np.array(row, dtype=np.int32))
        pages = result.pages.tolist()
        assert len(self.pages_of(labels)) <= len(pages) <= len(row), "insert keeps a prefix of what it is offered"
        for length, (page, offered) in enumerate(zip(pages, row, strict=False), start=1):
            canonical = self.cached.setdefault(tuple(labels[:length]), offered)
            assert page == canonical, "insert answers with the canonical pages"
        self.free += set(row) - set(self.cached.values())
        if keep_locked:
            self.cache.lock(result.handle)
            self.locks.append((tuple(labels[: len(pages)]), result.handle))

    @rule(labels=labels_lists, part=st.integers(0, 15), keep_locked=st.booleans())
    def match(self, labels: list[int], part: int, keep_locked: bool) -> None:
        """With some tokens of one page more."""
        partial_page = tokens_of([1], self.page_size)[: part % self.page_size]
        result = self.cache.match(np.concatenate([tokens_of(labels, self.page_size), partial_page]))
        pages = result.pages.tolist()
        assert pages == self.pages_of(labels), "match finds the longest cached prefix"
        if keep_locked:
            self.cache.lock(result.handle)
            self.locks.append((tuple(labels[: len(pages)]), result.handle))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def lock_again(self, data: st.DataObject) -> None:
        prefix, handle = data.draw(st.sampled_from(self.locks))
        self.cache.lock(handle)
        self.locks.append((prefix, handle))

    @precondition(lambda self: self.locks and self.free and isinstance(self.cache, ExtensiblePrefixCache))
    @rule(data=st.data(), label=st.integers(0, 2))
    def extend(self, data: st.DataObject, label: int) -> None:
        """As a request does while it writes its answer."""
        assert isinstance(self.cache, ExtensiblePrefixCache)
        number = data.draw(st.integers(0, len(self.locks) - 1))
        prefix, handle = self.locks[number]
        longer = (*prefix, label)
        extended = self.cache.extend(handle, tokens_of([label], self.page_size), self.free[-1])
        assert (extended is None) == (longer in self.cached), "extend refuses what is cached already"
        if extended is not None:
            self.cached[longer] = self.free.pop()
            self.locks[number] = (longer, extended)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        _, handle = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(handle)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        evictable = self.cache.num_evictable
        pages = self.cache.evict(count).tolist()
        assert len(pages) >= min(count, evictable), "evict returns as many as it can"
        assert len(set(pages)) == len(pages), "evict returns a page once"
        prefixes = {page: prefix for prefix, page in self.cached.items()}
        for page in pages:
            assert page in prefixes, "evict returns pages that the cache owns"
            assert prefixes[page] not in self.locked(), "evict leaves locked prefixes alone"
            del self.cached[prefixes[page]]
        self.free += pages

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.cache.check()
        held = self.cache.held_pages().tolist()
        assert sorted(held) == sorted(self.cached.values()), "the cache owns what it accepted"
        assert sorted(held + self.free) == list(range(NUM_PAGES)), "no page is lost or owned twice"
        assert self.cache.num_pages == len(held)
        assert self.cache.num_evictable == len(set(self.cached) - self.locked()), "num_evictable is what is unlocked"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_sequences_agree_with_the_model(make_cache: MakeCache, page_size: int) -> None:
    run_state_machine_as_test(
        lambda: PrefixCacheMachine(make_cache, page_size),
        settings=settings(max_examples=50, stateful_step_count=40, derandomize=True, database=None),
    )


@pytest.mark.not_for("none")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@given(uses=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12), data=st.data())
@settings(max_examples=60, derandomize=True, database=None)
def test_eviction_follows_last_use(
    make_cache: MakeCache, page_size: int, uses: list[list[int]], data: st.DataObject
) -> None:
    """Pages leave in the order of their last use, and of those used together the end of the prefix first."""
    client = Client(make_cache(page_size), page_size)
    last_use: dict[int, tuple[int, int]] = {}
    for time, labels in enumerate(uses):
        use = client.match(*labels) if data.draw(st.booleans()) else client.insert(*labels)[1]
        for depth, page in enumerate(use.pages.tolist()):
            last_use[page] = (time, -depth)
    while client.cache.num_evictable > 0:
        evicted = client.evict(data.draw(st.integers(1, 4)))
        assert set(evicted) == set(sorted(last_use, key=last_use.__getitem__)[: len(evicted)])
        for page in evicted:
            del last_use[page]
    assert not last_use
