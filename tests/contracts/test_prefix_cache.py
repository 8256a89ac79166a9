"""What every prefix cache guarantees, one documented behaviour a test. Random sequences: `test_prefix_cache_random`.

A *label* stands for the tokens of one page. Labels 2k and 2k + 1 differ in the last token of the page only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.kvcache.prefix import PREFIX_CACHES, Handle, InsertResult, MatchResult, PrefixCache
from minisgl.registry import resolve
from minisgl.request import Int32Array

CONTRACTS = {"make_cache": (PREFIX_CACHES, PrefixCache)}
PAGE_SIZES = [1, 4, 16]

MakeCache = Callable[[int], PrefixCache]


def tokens_of(labels: list[int], page_size: int) -> Int32Array:
    pages = [[label // 2] * (page_size - 1) + [label] for label in labels]
    return np.array(pages, dtype=np.int32).reshape(-1)


class Client:
    """Speaks to a cache in labels, and offers pages with ids that never repeat."""

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self.cache = cache
        self.page_size = page_size
        self.offered = 0

    def new_pages(self, count: int) -> list[int]:
        ids = [(37 * number + 5) % 4096 for number in range(self.offered, self.offered + count)]
        self.offered += count
        return ids

    def insert(self, *labels: int) -> tuple[list[int], InsertResult]:
        """Offer new pages for all labels. Returns them, and what the cache answered."""
        offered = self.new_pages(len(labels))
        result = self.cache.insert(tokens_of([*labels], self.page_size), np.array(offered, dtype=np.int32))
        self.cache.check()
        return offered, result

    def match(self, *labels: int) -> MatchResult:
        result = self.cache.match(tokens_of([*labels], self.page_size))
        self.cache.check()
        return result

    def matched(self, *labels: int) -> list[int]:
        return list(self.match(*labels).pages.tolist())

    def lock(self, *labels: int) -> Handle:
        handle = self.match(*labels).handle
        self.cache.lock(handle)
        self.cache.check()
        return handle

    def unlock(self, handle: Handle) -> None:
        self.cache.unlock(handle)
        self.cache.check()

    def evict(self, count: int) -> list[int]:
        pages = self.cache.evict(count)
        self.cache.check()
        return list(pages.tolist())


@pytest.fixture(scope="module")
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    return resolve("--impl", request.param, PREFIX_CACHES)


@pytest.fixture(params=PAGE_SIZES)
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def client(make_cache: MakeCache, page_size: int) -> Client:
    return Client(make_cache(page_size), page_size)


class TestWhateverIsRemembered:
    """Holds for a cache that keeps as much or as little as it likes of what it is offered."""

    def test_starts_empty(self, client: Client) -> None:
        assert (client.cache.page_size, client.cache.num_pages, client.cache.num_evictable) == (client.page_size, 0, 0)
        assert client.matched(1, 2) == []
        assert client.evict(3) == []
        assert client.cache.held_pages().tolist() == []

    def test_no_tokens_are_an_empty_prefix(self, client: Client) -> None:
        client.insert(1, 2)
        _, inserted = client.insert()
        for empty in (client.match(), inserted):
            assert empty.pages.tolist() == []
            client.cache.lock(empty.handle)
            assert client.cache.num_evictable == client.cache.num_pages
            client.cache.unlock(empty.handle)
            client.cache.check()

    def test_page_ids_are_int32(self, client: Client) -> None:
        for _ in range(2):  # empty, then not
            assert client.match(1, 2).pages.dtype == np.int32
            assert client.cache.held_pages().dtype == np.int32
            assert client.cache.evict(1).dtype == np.int32
            assert client.insert(1, 2)[1].pages.dtype == np.int32

    def test_insert_accepts_a_prefix_of_new_pages(self, client: Client) -> None:
        offered, result = client.insert(1, 2, 3)
        kept = result.pages.tolist()
        assert kept == offered[: len(kept)]
        assert sorted(client.cache.held_pages().tolist()) == sorted(kept)
        assert client.cache.num_pages == client.cache.num_evictable == len(kept)

    def test_match_finds_what_insert_accepted(self, client: Client) -> None:
        _, result = client.insert(1, 2, 3)
        assert client.matched(1, 2, 3) == result.pages.tolist()
        assert client.matched(1, 2, 3, 4) == result.pages.tolist()

    def test_eviction_gives_every_page_back_once(self, client: Client) -> None:
        kept = client.insert(1, 2, 3)[1].pages.tolist()
        kept += [page for page in client.insert(1, 2, 5)[1].pages.tolist() if page not in kept]
        assert sorted(client.evict(1000)) == sorted(kept)
        assert client.cache.num_pages == 0
        assert client.matched(1, 2, 3) == []


@pytest.mark.not_for("none")  # keeps nothing, on purpose
class TestRemembers:
    """Holds for a cache that keeps all it is offered."""

    def test_longest_whole_page_prefix(self, client: Client) -> None:
        pages, _ = client.insert(0, 1, 2)
        assert client.matched(0, 1, 2) == pages
        assert client.matched(0, 1) == pages[:2]
        assert client.matched(0, 1, 2, 3) == pages
        assert client.matched(0, 1, 3, 2) == pages[:2]
        assert client.matched(1) == []
        assert client.matched(2) == []

    def test_a_page_that_is_not_full_does_not_count(self, client: Client) -> None:
        pages, _ = client.insert(0, 1)
        tokens = tokens_of([0, 1], client.page_size)
        for length in range(len(tokens) + 1):
            assert client.cache.match(tokens[:length]).pages.tolist() == pages[: length // client.page_size]

    def test_the_same_page_after_another_prefix_is_another_page(self, client: Client) -> None:
        first, _ = client.insert(0, 7, 7)
        second, _ = client.insert(1, 7, 7)
        assert client.matched(0, 7, 7) == first
        assert client.matched(1, 7, 7) == second
        assert client.matched(7) == []

    def test_insert_owns_what_is_new(self, client: Client) -> None:
        offered, result = client.insert(0, 1)
        assert result.pages.tolist() == offered
        assert client.cache.num_pages == 2

    def test_duplicates_are_answered_with_the_canonical_pages(self, client: Client) -> None:
        first, _ = client.insert(0, 1, 2)
        _, again = client.insert(0, 1, 2)
        assert again.pages.tolist() == first
        assert sorted(client.cache.held_pages().tolist()) == sorted(first)
        assert client.matched(0, 1, 2) == first

    def test_insert_of_a_prefix(self, client: Client) -> None:
        first, _ = client.insert(0, 1, 2)
        _, prefix = client.insert(0, 1)
        assert prefix.pages.tolist() == first[:2]
        assert client.matched(0, 1, 2) == first

    def test_insert_of_an_extension(self, client: Client) -> None:
        first, _ = client.insert(0, 1)
        offered, longer = client.insert(0, 1, 2, 3)
        assert longer.pages.tolist() == first + offered[2:]
        assert client.matched(0, 1, 2, 3) == first + offered[2:]
        assert client.cache.num_pages == 4

    def test_insert_of_a_branch(self, client: Client) -> None:
        first, _ = client.insert(0, 1, 2, 3)
        offered, branch = client.insert(0, 1, 3, 3)
        assert branch.pages.tolist() == first[:2] + offered[2:]
        assert client.matched(0, 1, 2, 3) == first
        assert client.matched(0, 1, 3, 3) == first[:2] + offered[2:]

    def test_insert_of_pages_that_were_matched(self, client: Client) -> None:
        first, _ = client.insert(0, 1)
        pages = np.array(first + client.new_pages(1), dtype=np.int32)
        result = client.cache.insert(tokens_of([0, 1, 2], client.page_size), pages)
        assert result.pages.tolist() == pages.tolist()
        assert client.cache.num_pages == 3
        client.cache.check()

    def test_the_callers_arrays_are_not_kept(self, client: Client) -> None:
        tokens, pages = tokens_of([0, 1], client.page_size), np.array([11, 12], dtype=np.int32)
        client.cache.insert(tokens, pages)
        tokens[:], pages[:] = -1, -1
        assert client.matched(0, 1) == [11, 12]

    def test_lock_protects_the_whole_prefix(self, client: Client) -> None:
        pages, _ = client.insert(0, 1, 2)
        handle = client.lock(0, 1, 2)
        assert client.cache.num_evictable == 0
        assert client.evict(10) == []
        assert client.matched(0, 1, 2) == pages
        client.unlock(handle)
        assert client.cache.num_evictable == 3
        assert sorted(client.evict(10)) == sorted(pages)

    def test_lock_protects_what_several_inserts_have_built(self, client: Client) -> None:
        first, _ = client.insert(0, 1)
        offered, _ = client.insert(0, 1, 2)
        handle = client.lock(0, 1, 2)
        sibling, _ = client.insert(0, 1, 3)
        assert client.cache.num_evictable == 1
        assert client.evict(10) == sibling[2:]
        assert client.matched(0, 1, 2) == first + offered[2:]
        client.unlock(handle)
        assert client.cache.num_evictable == 3
        assert sorted(client.evict(10)) == sorted(first + offered[2:])

    def test_lock_protects_nothing_beyond_the_prefix(self, client: Client) -> None:
        pages, _ = client.insert(0, 1, 2)
        client.lock(0, 1)
        assert client.cache.num_evictable == 1
        assert client.evict(10) == [pages[2]]
        assert client.matched(0, 1, 2) == pages[:2]

    def test_locks_nest(self, client: Client) -> None:
        pages, _ = client.insert(0, 1)
        handle = client.lock(0, 1)
        client.cache.lock(handle)
        client.unlock(handle)
        assert client.evict(10) == []
        client.unlock(handle)
        assert sorted(client.evict(10)) == sorted(pages)

    def test_locks_of_overlapping_prefixes_are_independent(self, client: Client) -> None:
        pages, _ = client.insert(0, 1, 2)
        longer, shorter = client.lock(0, 1, 2), client.lock(0)
        client.unlock(longer)
        assert sorted(client.evict(10)) == sorted(pages[1:])
        client.unlock(shorter)
        assert client.evict(10) == pages[:1]

    def test_insert_hands_out_a_handle_of_the_same_prefix(self, client: Client) -> None:
        client.insert(0, 1, 2)
        _, known = client.insert(0, 1)
        client.cache.lock(known.handle)
        assert len(client.evict(10)) == 1
        _, extended = client.insert(0, 1, 3)
        client.cache.lock(extended.handle)
        assert client.cache.num_evictable == 0
        assert client.evict(10) == []

    @pytest.mark.parametrize("divide", ["by a match", "by a branch", "by a prefix"])
    def test_lock_survives_the_division_of_its_prefix(self, client: Client, divide: str) -> None:
        pages, _ = client.insert(0, 1, 2, 3)
        handle = client.lock(0, 1, 2, 3)
        if divide == "by a match":
            client.match(0, 1, 5)
        elif divide == "by a branch":
            client.insert(0, 1, 5)
        else:
            client.insert(0, 1)
        client.evict(10)
        assert client.matched(0, 1, 2, 3) == pages
        client.unlock(handle)
        assert sorted(client.evict(10)) == sorted(pages)
        assert (client.cache.num_pages, client.cache.num_evictable) == (0, 0)

    def test_lock_survives_what_is_added_below(self, client: Client) -> None:
        pages, _ = client.insert(0, 1)
        handle = client.lock(0, 1)
        offered, _ = client.insert(0, 1, 2)
        assert client.cache.num_evictable == 1
        assert client.evict(10) == offered[2:]
        client.unlock(handle)
        assert sorted(client.evict(10)) == sorted(pages)

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 6, 7, 100])
    def test_evict_returns_enough(self, client: Client, count: int) -> None:
        held = client.insert(0, 1, 2)[0] + client.insert(3, 1, 2)[0]
        evicted = client.evict(count)
        assert len(evicted) >= min(count, 6)
        assert len(set(evicted)) == len(evicted)
        assert set(evicted) <= set(held)
        assert set(client.cache.held_pages().tolist()) == set(held) - set(evicted)
        assert client.cache.num_pages == client.cache.num_evictable == 6 - len(evicted)

    def test_what_is_left_is_still_found(self, client: Client) -> None:
        pages, _ = client.insert(0, 1, 2, 3)
        evicted = client.evict(2)
        assert client.matched(0, 1, 2, 3) == [page for page in pages if page not in evicted]

    def test_evicted_tokens_can_be_inserted_again(self, client: Client) -> None:
        client.insert(0, 1)
        client.evict(10)
        offered, result = client.insert(0, 1)
        assert result.pages.tolist() == offered
        assert client.matched(0, 1) == offered

    def test_least_recently_inserted_goes_first(self, client: Client) -> None:
        old, new = client.insert(0)[0], client.insert(2)[0]
        assert client.evict(1) == old
        assert client.evict(1) == new

    def test_match_is_a_use(self, client: Client) -> None:
        old, new = client.insert(0)[0], client.insert(2)[0]
        client.match(0)
        assert client.evict(1) == new
        assert client.evict(1) == old

    def test_insert_of_what_is_cached_is_a_use(self, client: Client) -> None:
        old, new = client.insert(0)[0], client.insert(2)[0]
        client.insert(0)
        assert client.evict(1) == new
        assert client.evict(1) == old

    def test_a_shared_prefix_outlives_its_branches(self, client: Client) -> None:
        first, _ = client.insert(0, 1, 2)
        second, _ = client.insert(0, 1, 3)
        unrelated, _ = client.insert(6)
        assert client.evict(1) == first[2:]
        assert client.evict(1) == second[2:]
        assert sorted(client.evict(2)) == sorted(first[:2])
        assert client.evict(1) == unrelated

    def test_check_notices_a_page_under_two_prefixes(self, client: Client) -> None:
        def insert_and_check(label: int) -> None:
            client.cache.insert(tokens_of([label], client.page_size), np.array([9], dtype=np.int32))
            client.cache.check()

        insert_and_check(0)
        with pytest.raises(InvariantError):
            insert_and_check(2)
