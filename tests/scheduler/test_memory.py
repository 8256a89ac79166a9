"""The ledger of pages: sharing, growth, re-pointing, freeing, and a check that notices every kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.kvcache import block_hash, radix
from minisgl.kvcache.prefix import select_prefix_cache
from minisgl.request import Int32Array, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.memory import KVMemory
from minisgl.table import RunningTable

assert radix  # imported, as the next one, for their registration
assert block_hash

CACHING = ["radix", "block-hash"]


class Rows:
    """A memory of 4-token pages and the requests in its rows, moved by hand."""

    def __init__(self, cache: str = "radix", num_pages: int = 16) -> None:
        self.table = RunningTable(4, 64)
        self.memory = KVMemory(num_pages, self.table, select_prefix_cache(cache)(4))
        self._next_uid = 0

    def admit(self, tokens: list[int]) -> int:
        """A new row; returns its slot."""
        prompt = np.array(tokens, dtype=np.int32)
        request = Request(uid=self._next_uid, prompt=prompt, params=SamplingParams(), max_len=64)
        self._next_uid += 1
        prefix = self.memory.lock_prefix(prompt)
        slot = self.table.admit(request, len(prefix.pages) * self.memory.page_size)
        self.memory.attach(slot, prefix)
        return slot

    def prefill(self, slot: int, upto: int | None = None) -> None:
        """A chunk of the row, up to a position or to the end of its tokens."""
        before = int(self.table.kv_len[slot])
        self.table.kv_len[slot] = self.table.token_len[slot] if upto is None else upto
        self.memory.cache_chunk(slot, before)

    def decode(self, slot: int, *tokens: int) -> None:
        """The sampled tokens, one a step; all but the last are fed."""
        table = self.table
        for i, token in enumerate(tokens):
            if i > 0:
                self.memory.grow(self.memory.rows_to_grow(np.array([slot], dtype=np.int32)))
                table.kv_len[slot] += 1
            table.tokens[slot, table.token_len[slot]] = token
            table.token_len[slot] += 1
            table.known_len[slot] += 1

    def free(self, slot: int) -> None:
        self.memory.free_row(slot, cache=True)
        self.table.deactivate(slot)
        self.table.release(slot)

    def pages(self, slot: int) -> list[int]:
        pages: list[int] = self.memory.row(slot).tolist()
        return pages


# -- admission -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (64, 16)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert Rows().memory.pages_for(tokens) == pages


@pytest.mark.parametrize("cache", CACHING)
def test_a_row_begins_with_the_cached_pages(cache: str) -> None:
    rows = Rows(cache)
    first = rows.admit([1] * 10)
    rows.prefill(first)
    second = rows.admit([1] * 9 + [2] * 4)
    assert rows.pages(second)[:2] == rows.pages(first)[:2]
    assert set(rows.pages(second)[2:]).isdisjoint(rows.pages(first))
    assert len(rows.pages(second)) == 4
    assert rows.table.kv_len[second] == 8
    rows.memory.check()


@pytest.mark.parametrize("cache", CACHING)
def test_the_last_token_is_never_locked(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 9)
    rows.prefill(slot)
    rows.free(slot)
    cached = [rows.memory.lock_prefix(np.full(n, 1, dtype=np.int32)) for n in (1, 4, 5, 8, 9, 12)]
    assert [len(prefix.pages) for prefix in cached] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("cache", CACHING)
def test_a_locked_prefix_is_protected_until_it_is_unlocked(cache: str) -> None:
    rows = Rows(cache, num_pages=4)
    slot = rows.admit([1] * 9)
    rows.prefill(slot)
    rows.free(slot)
    assert rows.memory.available == 4
    prefix = rows.memory.lock_prefix(np.full(9, 1, dtype=np.int32))
    assert rows.memory.available == 2
    with pytest.raises(InvariantError):
        rows.memory.alloc(3)
    rows.memory.unlock_prefix(prefix)
    assert rows.memory.available == 4
    rows.memory.check()


@pytest.mark.parametrize("cache", CACHING)
def test_allocation_evicts_no_more_than_is_missing(cache: str) -> None:
    rows = Rows(cache, num_pages=6)
    slot = rows.admit([1] * 17)
    rows.prefill(slot)
    rows.free(slot)
    assert (rows.memory.pool.num_free, rows.memory.cache.num_evictable) == (2, 4)
    pages = rows.memory.alloc(3)
    assert rows.memory.cache.num_pages == 3
    assert not rows.memory.is_cached[pages].any()
    rows.memory.pool.free(pages)
    rows.memory.check()


def row_that_left(rows: Rows, tokens: list[int]) -> list[int]:
    """Compute a row and let it go, without chunks; returns its pages that are cached from then on."""
    slot = rows.admit(tokens)
    rows.table.kv_len[slot] = len(tokens)
    pages = rows.pages(slot)[: len(tokens) // 4]
    rows.free(slot)
    return pages


@pytest.mark.parametrize("cache", CACHING)
def test_a_new_row_notes_what_of_it_came_from_the_cache(cache: str) -> None:
    rows = Rows(cache)
    memory, cached = rows.memory, row_that_left(rows, [1] * 9)
    slot = rows.admit([1] * 13)
    assert rows.pages(slot)[:2] == cached, "the cached pages come first"
    assert (len(rows.pages(slot)), rows.table.num_pages[slot]) == (4, 4), "13 tokens fill three pages and begin one"
    assert memory._published[slot] == 2, "the cache has two of its pages: the first that it may publish is the third"
    assert memory._locked[slot] == 2, "the two pages are locked, the new ones aren't in the cache"
    assert memory.cache.num_evictable == 0, "what a row reads can't be evicted"
    memory.check()
    rows.free(slot)
    assert memory.cache.num_evictable == memory.cache.num_pages, "the lock that was noted can be taken back"


@pytest.mark.parametrize("cache", CACHING)
def test_a_new_row_without_a_cached_beginning_has_published_nothing(cache: str) -> None:
    rows = Rows(cache)
    rows.memory._published[:] = rows.memory._locked[:] = 3  # left by the slots' last rows
    slot = rows.admit([1] * 8)
    assert (rows.memory._published[slot], rows.memory._locked[slot]) == (0, 0)
    assert len(rows.pages(slot)) == 2, "exactly full pages are enough for exactly as many tokens"


@pytest.mark.parametrize("cache", CACHING)
def test_the_last_token_of_a_prompt_that_is_cached_whole_must_be_fed(cache: str) -> None:
    rows = Rows(cache)
    cached = row_that_left(rows, [1] * 8)
    slot = rows.admit([1] * 8)
    assert rows.table.kv_len[slot] == 4, "its second page would hold the last token, whose logits are wanted"
    assert rows.pages(slot)[0] == cached[0]
    assert rows.pages(slot)[1] != cached[1]
    rows.memory.check()


class OnePageOnly:
    """A store that has the first of the pages that are wanted of it, and notes what these are."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, list[int]]] = []

    def restore(self, tokens: Int32Array, first: int, pages: Int32Array) -> int:
        self.asked.append((tokens.tolist(), first, pages.tolist()))
        return 1


def test_what_a_store_fills_counts_as_computed_and_not_as_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, store = Rows(), OnePageOnly()
    row_that_left(rows, [1] * 9)
    monkeypatch.setattr(rows.memory, "offload", store)
    slot = rows.admit([1] * 14)
    assert store.asked == [([1] * 13, 2, rows.pages(slot)[2:])], "the last token is fed in any case"
    assert rows.table.kv_len[slot] == 8 + 4, "two pages were cached, and a third was kept by the store"
    assert (rows.memory._published[slot], rows.memory._locked[slot]) == (2, 2)


# -- growth --------------------------------------------------------------------------------------------------------


def test_a_row_grows_exactly_when_its_pages_are_full() -> None:
    rows = Rows()
    slot = rows.admit([1] * 6)
    needs = []
    for kv_len in (6, 7, 8, 9):
        rows.table.kv_len[slot] = kv_len
        needs.append(rows.memory.rows_to_grow(np.array([slot], dtype=np.int32)).tolist() == [slot])
    assert needs == [False, False, True, True]


def test_growth_gives_one_page_to_each_row() -> None:
    rows = Rows()
    slots = [rows.admit([i] * (3 + 4 * i)) for i in range(3)]
    before = [rows.pages(slot) for slot in slots]
    rows.memory.grow(np.array(slots[1:], dtype=np.int32))
    after = [rows.pages(slot) for slot in slots]
    assert [len(new) - len(old) for old, new in zip(before, after, strict=True)] == [0, 1, 1]
    assert all(new[: len(old)] == old for old, new in zip(before, after, strict=True))
    assert len({page for row in after for page in row}) == 1 + 3 + 4
    rows.memory.check()


# -- sharing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHING)
@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_the_page_of_the_last_token_stays_private(cache: str, length: int, cached: int) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * length)
    rows.prefill(slot)
    assert rows.memory.cache.num_pages == cached
    assert rows.memory.is_cached[rows.pages(slot)].tolist() == [i < cached for i in range(len(rows.pages(slot)))]
    assert rows.memory.cache.num_evictable == 0, "the running request holds them"
    rows.memory.check()


@pytest.mark.parametrize("cache", CACHING)
def test_a_chunk_caches_the_pages_that_it_completes(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 14)
    cached = []
    for upto in (3, 7, 8, 14):
        rows.prefill(slot, upto)
        cached.append(rows.memory.cache.num_pages)
        rows.memory.check()
    assert cached == [0, 1, 2, 3]


@pytest.mark.parametrize("cache", CACHING)
def test_a_row_is_repointed_before_its_duplicates_are_freed(cache: str) -> None:
    rows = Rows(cache)
    early, late = rows.admit([1] * 14), rows.admit([1] * 14)
    own = rows.pages(early)
    rows.table.kv_len[early] = 8  # computed, but somebody else is first to cache it
    rows.prefill(late)
    rows.table.kv_len[early] = 14
    rows.memory.cache_chunk(early, kv_len_before=8)
    assert rows.pages(early)[:2] == rows.pages(late)[:2]
    assert rows.memory.pool.is_free[own[:2]].all()
    assert not rows.memory.pool.is_free[rows.pages(early)].any()
    # The third page is being written by this very step: it stays, although it is a duplicate.
    assert rows.pages(early)[2:] == own[2:]
    index, value = rows.memory.page_table.take_changes()
    changes = dict(zip(index.tolist(), value.tolist(), strict=True))
    width = rows.memory.page_table.rows.shape[1]
    assert [changes[early * width + i] for i in range(4)] == rows.pages(early)
    rows.memory.check()
    rows.free(early)
    rows.free(late)
    rows.memory.check()
    assert rows.memory.available == rows.memory.num_pages


@pytest.mark.parametrize("cache", CACHING)
def test_a_chunk_notes_how_many_of_its_pages_the_cache_has(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 14)
    published = []
    for upto in (3, 7, 9, 14):
        rows.prefill(slot, upto)
        published.append(int(rows.memory._published[slot]))
    assert published == [0, 1, 2, 3], "the step still writes some of them, which doesn't matter: they're the cache's"


@pytest.mark.parametrize("cache", CACHING)
def test_a_row_with_duplicates_publishes_again_once_they_are_replaced(cache: str) -> None:
    rows = Rows(cache)
    early, late = rows.admit([1] * 14), rows.admit([1] * 14)
    rows.prefill(early)
    rows.prefill(late, 10)
    assert rows.memory._published[late] == -1, "its first two pages are duplicates, which this step writes"
    rows.prefill(late, 14)
    assert rows.pages(late)[:2] == rows.pages(early)[:2]
    assert rows.memory._published[late] == -1, "its third page is a duplicate: it was half full before this step"
    rows.memory.cache_chunk(late, kv_len_before=14)  # as if one more token were fed
    assert rows.pages(late)[:3] == rows.pages(early)[:3]
    assert rows.memory._published[late] == 3, "all three are the cache's pages now, so no duplicate is left"
    rows.memory.check()


class OneKey(block_hash.BlockHashCache):
    """Every block has the same key, so that it keeps the first alone."""

    @staticmethod
    def hash_block(parent_key: int, tokens: bytes) -> int:
        return 1


def test_pages_that_the_cache_refuses_are_not_noted_as_its_own() -> None:
    rows = Rows()
    rows.memory.cache = OneKey(4)
    slot = rows.admit([1] * 14)
    rows.prefill(slot)
    assert rows.memory._published[slot] == 1, "it has accepted one of the three pages"
    assert rows.memory.is_cached[rows.pages(slot)].tolist() == [True, False, False, False]


@pytest.mark.parametrize("cache", CACHING)
def test_a_row_that_has_given_pages_back_publishes_nothing(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 14)
    rows.memory._given_back[slot] = 1
    rows.prefill(slot)
    assert rows.memory.cache.num_pages == 0, "the beginning of its text is gone, and what follows is no prefix"


def test_pages_of_the_cache_are_replaced_and_not_freed() -> None:
    rows = Rows()
    slot, other = rows.admit([1] * 14), rows.admit([2] * 14)
    rows.prefill(slot, 10)  # the cache owns two of its pages
    own, canonical = rows.pages(slot), rows.pages(other)[:3]
    rows.memory._repoint(slot, np.array(canonical, dtype=np.int32))
    assert rows.pages(slot) == [*canonical, own[3]]
    assert rows.memory.pool.is_free[own].tolist() == [False, False, True, False]


def test_a_page_is_free_only_when_no_row_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    slot, other = rows.admit([1] * 9), rows.admit([2] * 9)
    own, canonical, seen = rows.pages(slot), rows.pages(other)[:2], []
    monkeypatch.setattr(rows.memory.pool, "free", lambda pages: seen.append((pages.tolist(), rows.pages(slot)[:2])))
    rows.memory._repoint(slot, np.array(canonical, dtype=np.int32))
    assert seen == [(own[:2], canonical)], "by the time its old pages are freed, the row has the others"


@pytest.mark.parametrize("cache", CACHING)
def test_a_prefill_skips_what_others_have_cached_since(cache: str) -> None:
    rows = Rows(cache)
    slow, fast = rows.admit([1] * 14), rows.admit([1] * 14)
    rows.prefill(slow, 2)
    own = rows.pages(slow)
    rows.prefill(fast)
    rows.memory.rematch_prefix(slow)
    assert rows.table.kv_len[slow] == 12
    assert rows.pages(slow)[:3] == rows.pages(fast)[:3]
    assert rows.memory.pool.is_free[own[:3]].all()
    assert rows.pages(slow)[3:] == own[3:]
    rows.memory.check()
    rows.free(fast)
    assert rows.memory.cache.num_evictable == 0, "the slow one holds the shared pages now"


@pytest.mark.parametrize("cache", CACHING)
def test_looking_again_never_goes_back(cache: str) -> None:
    rows = Rows(cache)
    first = rows.admit([1] * 6)
    rows.prefill(first)
    second = rows.admit([1] * 14)
    rows.table.kv_len[second] = 10
    before = rows.pages(second)
    rows.memory.rematch_prefix(second)
    assert rows.table.kv_len[second] == 10
    assert rows.pages(second) == before


# -- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHING)
def test_freeing_a_row_caches_full_pages_of_known_tokens(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 6)
    rows.prefill(slot)
    rows.decode(slot, 2, 3, 4, 5)  # nine positions are computed, of ten tokens
    rows.free(slot)
    assert rows.memory.cache.num_evictable == 2
    assert rows.memory.pool.num_free == 14
    tokens = np.array([1] * 6 + [2, 3, 4, 5], dtype=np.int32)
    assert len(rows.memory.cache.match(tokens).pages) == 2
    rows.memory.check()


@pytest.mark.parametrize("cache", CACHING)
def test_a_token_that_is_still_being_sampled_is_not_cached(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 7)
    rows.prefill(slot)
    rows.table.token_len[slot] = 9
    rows.table.kv_len[slot] = 8  # position 7 is being computed for a token that the host does not know yet
    rows.free(slot)
    assert rows.memory.cache.num_pages == 1
    rows.memory.check()


@pytest.mark.parametrize("cache", CACHING)
def test_retiring_a_duplicate_frees_its_own_pages(cache: str) -> None:
    rows = Rows(cache)
    slots = [rows.admit([1, 2]), rows.admit([1, 2])]
    for slot in slots:
        rows.prefill(slot)
        rows.decode(slot, *range(3, 12))
    for slot in slots:
        rows.free(slot)
        rows.memory.check()
    assert rows.memory.cache.num_pages == 2
    assert rows.memory.pool.num_free == 14


@pytest.mark.parametrize("cache", [*CACHING, "none"])
def test_a_row_freed_without_caching_leaves_nothing_new_in_the_cache(cache: str) -> None:
    rows = Rows(cache)
    slot = rows.admit([1] * 6)
    rows.prefill(slot)
    rows.decode(slot, 2, 3, 4, 5)
    rows.memory.free_row(slot, cache=False)
    rows.memory.forget_unlocked()
    rows.table.deactivate(slot)
    rows.table.release(slot)
    rows.memory.check()
    assert rows.memory.pool.num_free == rows.memory.num_pages


@pytest.mark.parametrize("cache", CACHING)
def test_forgetting_spares_what_a_request_holds(cache: str) -> None:
    rows = Rows(cache)
    kept, gone = rows.admit([1] * 9), rows.admit([2] * 9)
    rows.prefill(kept)
    rows.prefill(gone)
    rows.free(gone)
    rows.memory.forget_unlocked()
    assert sorted(rows.memory.cache.held_pages().tolist()) == sorted(rows.pages(kept)[:2])
    rows.memory.check()


def test_without_a_prefix_cache_everything_is_freed() -> None:
    rows = Rows("none")
    slot = rows.admit([1] * 9)
    rows.prefill(slot)
    rows.free(slot)
    assert rows.memory.pool.num_free == rows.memory.num_pages
    assert len(rows.memory.lock_prefix(np.full(9, 1, dtype=np.int32)).pages) == 0


# -- the check itself ----------------------------------------------------------------------------------------------


def _free_a_mapped_page(rows: Rows) -> None:
    rows.memory.pool.free(rows.memory.row(0)[-1:].copy())


def _map_a_private_page_twice(rows: Rows) -> None:
    rows.memory.row(1)[-1] = rows.memory.row(0)[-1]


def _repeat_a_page(rows: Rows) -> None:
    rows.memory.row(0)[-1] = rows.memory.row(0)[0]


def _leak_a_page(rows: Rows) -> None:
    rows.memory.pool.alloc(1)


def _run_past_the_pages(rows: Rows) -> None:
    rows.table.kv_len[0] = 4 * rows.table.num_pages[0] + 1


def _forget_that_a_page_is_cached(rows: Rows) -> None:
    rows.memory.is_cached[rows.memory.row(0)[0]] = False


def _evict_behind_the_ledger(rows: Rows) -> None:
    rows.memory.cache.evict(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_free_a_mapped_page, "free page"),
        (_map_a_private_page_twice, "two requests map one private page"),
        (_repeat_a_page, "maps a page twice"),
        (_leak_a_page, "leaked"),
        (_run_past_the_pages, "beyond its pages"),
        (_forget_that_a_page_is_cached, "disagree"),
        (_evict_behind_the_ledger, "disagree"),
    ],
)
def test_check_notices(damage: Callable[[Rows], None], message: str) -> None:
    rows = Rows()
    for seed in (1, 2, 3):
        slot = rows.admit([seed] * 9)
        rows.prefill(slot)
    rows.free(slot)
    rows.memory.check()
    damage(rows)
    with pytest.raises(InvariantError, match=message):
        rows.memory.check()


# -- answers while they are written --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHING)
def test_a_row_with_pages_of_its_own_publishes_nothing_behind_them(cache: str) -> None:
    """Two rows compute one prompt in the same step: the cache has the pages of the first."""
    rows = Rows(cache)
    first, second = rows.admit([1] * 9), rows.admit([1] * 9)
    for slot in (first, second):
        rows.prefill(slot)
    assert rows.pages(first)[:2] != rows.pages(second)[:2]
    rows.decode(first, *[2] * 8)
    rows.decode(second, *[3] * 8)
    rows.memory.cache_answers(np.array([first, second], dtype=np.int32))
    rows.memory.check()
    tokens = [np.array([1] * 9 + [token] * 8, dtype=np.int32) for token in (2, 3)]
    assert [len(rows.memory.cache.match(each).pages) for each in tokens] == [4, 2]
    rows.free(second)
    assert len(rows.memory.cache.match(tokens[1]).pages) == 4
    rows.memory.check()
