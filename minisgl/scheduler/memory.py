"""The page ledger: the page pool, the page table and the prefix cache, kept consistent.

A page is in exactly one of three states: *free* (in the pool), *private* (in the row of one running request) or
*cached* (owned by the prefix cache, and in the rows of any number of requests that have locked it).

Where all layers have a sliding window, a row lets go of pages that lie outside of it while its request runs. Where only
some have, it lets go of what these layers have there: see `minisgl.scheduler.mixed_memory`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl.kvcache.page_store import CacheListener, PageOffloader, PageStore
from minisgl.kvcache.prefix import Handle, InsertResult, MatchResult, PrefixCache
from minisgl.kvcache.sizing import Lengths, most_pages
from minisgl.request import Int32Array
from minisgl.scheduler.ledger import PageLedger
from minisgl.scheduler.policy import MemoryDemand
from minisgl.table import RunningTable

Extend = Callable[[Handle, Int32Array, int], Handle | None]


class KVMemory(PageLedger):
    """Allocates pages to the rows of the running table, and shares those that the prefix cache has.

    It keeps the table's ``kv_len`` and ``num_pages``, with the scheduler. ``store`` keeps pages that the cache evicts.
    """

    def __init__(
        self,
        num_pages: int,
        table: RunningTable,
        cache: PrefixCache,
        store: PageStore | None = None,
        window: int | None = None,
        num_draft_tokens: int = 0,
        num_window_pages: int | None = None,
    ) -> None:
        super().__init__(num_pages, table, cache, window, num_draft_tokens, num_window_pages)
        self.listeners: list[CacheListener] = []  # append one only while the cache is empty
        self.offload: PageOffloader | None = None
        if store is not None:
            self.offload_to(store)

    def offload_to(self, store: PageStore) -> None:
        """Keep evicted pages in this store from now on. Call it once, while the cache is empty."""
        self.offload = PageOffloader(store, self.page_size)
        self.listeners.append(self.offload)

    def match(self, tokens: Int32Array) -> MatchResult:
        """Find the longest cached prefix of ``tokens`` that a request can go on from."""
        return self.cache.match(tokens)

    # -- admission ---------------------------------------------------------------------------------------------

    def window_demands(self, num_tokens: int, max_len: int, cached_pages: int) -> list[MemoryDemand]:
        """What a request that asks to start demands besides pages, as `Admitter` asks the policy; here nothing."""
        return []

    def lock_prefix(self, tokens: Int32Array) -> MatchResult:
        """Lock the longest cached prefix of ``tokens`` without the last token, whose logits must be computed."""
        prefix = self.match(tokens[:-1])
        self.cache.lock(prefix.handle)
        return prefix

    def unlock_prefix(self, prefix: MatchResult) -> None:
        """Undo `lock_prefix`."""
        self.cache.unlock(prefix.handle)

    def attach(self, slot: int, prefix: MatchResult) -> None:
        """Fill the row of a newly admitted request: the locked pages, then new ones for the rest of its tokens.

        Pages of the rest that the store holds are copied into the new pages, and count as computed.
        """
        shared = prefix.pages
        new = self.alloc(self.pages_for(int(self.table.token_len[slot])) - len(shared))
        self.page_table.write(slot, 0, np.concatenate([shared, new]))
        self.table.num_pages[slot] = len(shared) + len(new)
        self._handles[slot] = prefix.handle
        self._published[slot] = self._locked[slot] = len(shared)
        if self.offload is not None:
            tokens = self.table.tokens[slot, : self.table.token_len[slot] - 1]
            restored = self.offload.restore(tokens, len(shared), new)
            self.table.kv_len[slot] += restored * self.page_size

    # -- growth ------------------------------------------------------------------------------------------------

    def alloc(self, count: int) -> Int32Array:
        """Take ``count`` pages, at most `available`; evict from the prefix cache if too few are free."""
        missing = count - self.pool.num_free
        if missing > 0:
            evicted = self.cache.evict(missing)
            for listener in self.listeners:
                listener.save(evicted)
            self._free_cached(evicted)
        return self.pool.alloc(count)

    def rows_to_grow(self, slots: Int32Array) -> Int32Array:
        """Select the ``slots`` whose next token needs a page that they do not have."""
        full = self.table.kv_len[slots] >= self.table.num_pages[slots] * self.page_size
        return slots[full]

    def can_grow(self, count: int) -> bool:
        """Whether so many rows can get a page each."""
        return count <= self.available

    def fit_chunk(self, slot: int, count: int) -> int:
        """How many of a row's next ``count`` tokens can be computed in this step: all, since `attach` makes room."""
        return count

    def grow(self, slots: Int32Array) -> None:
        """Append one page to each row of ``slots``."""
        if len(slots) == 0:
            return
        pages = self.alloc(len(slots))
        self.page_table.append(slots, self.table.num_pages[slots], pages)
        self.table.num_pages[slots] += 1

    def extend(self, slot: int, length: int) -> int:
        """Append pages to a row until it has room for ``length`` tokens, or none is left; return how many fit."""
        row_pages = int(self.table.num_pages[slot])
        count = min(self.pages_for(length) - row_pages, self.available)
        if count > 0:
            self.page_table.write(slot, row_pages, self.alloc(count))
            self.table.num_pages[slot] = row_pages = row_pages + count
        return row_pages * self.page_size

    # -- sharing -----------------------------------------------------------------------------------------------

    def rematch_prefix(self, slot: int) -> None:
        """Extend the row's cached prefix by what others have computed since, so that no two compute the same pages."""
        if self._given_back[slot]:
            return
        kv_len = int(self.table.kv_len[slot])
        tokens = self.table.tokens[slot, : self.table.token_len[slot] - 1]
        match = self.match(tokens)
        cached_len = len(match.pages) * self.page_size
        if cached_len <= kv_len:
            return
        self._move_lock(slot, match)
        self._repoint(slot, match.pages)
        self._published[slot] = len(match.pages)
        self.table.kv_len[slot] = cached_len

    def cache_chunk(self, slot: int, kv_len_before: int) -> None:
        """Offer the pages of a prefill chunk to the prefix cache as soon as the chunk is scheduled.

        Readers run in the same step, whose layers store before they attend, or later. ``kv_len_before`` is the row's
        ``kv_len`` before this step, which writes the pages from there on.
        """
        if self._given_back[slot]:  # the prefix is not whole any more
            return
        # Every request computes at least its last token, so the page of that token would be of no use in the cache.
        count = min(int(self.table.kv_len[slot]), int(self.table.token_len[slot]) - 1) // self.page_size
        insert = self._insert(slot, count)
        if len(insert.pages) == 0:
            return
        self._move_lock(slot, insert)
        # A duplicate that this step still writes must stay where it is; it is found again when the row is freed.
        settled = min(len(insert.pages), kv_len_before // self.page_size)
        self._repoint(slot, insert.pages[:settled])
        same = np.array_equal(self.row(slot)[: len(insert.pages)], insert.pages)
        self._published[slot] = len(insert.pages) if same else -1

    def cache_answers(self, slots: Int32Array) -> None:
        """Publish the pages that running answers have filled, so that a fork of a conversation finds them (vLLM).

        Only pages of complete steps: the last known token is not fed yet, or by a step in flight. A row whose tokens
        are cached in other pages publishes no more, since the pages below its own would be another request's, whose
        step may fail. Nor does one longer than the window, since what is locked in the cache can't be given back.
        """
        extend: Extend | None = getattr(self.cache, "extend", None)  # as in `ExtensiblePrefixCache`
        if extend is None:
            return
        filled, published = self.table.known_len[slots] - 1, self._published[slots]
        due = (published >= 0) & (filled >= (published + 1) * self.page_size)
        if self.window is not None:
            due &= filled < self.window
        ends = filled[due] // self.page_size
        for slot, begin, end in zip(slots[due].tolist(), published[due].tolist(), ends.tolist(), strict=True):
            for index in range(begin, end):
                if not self._cache_answer(slot, index, extend):
                    break

    def _cache_answer(self, slot: int, index: int, extend: Extend) -> bool:
        """Publish page ``index`` of the row; False if it cannot be."""
        tokens = self.table.tokens[slot, index * self.page_size : (index + 1) * self.page_size]
        page = int(self.page_table.rows[slot, index])
        handle = extend(self._handles[slot], tokens, page)
        self._published[slot] = -1 if handle is None else index + 1
        if handle is None:
            return False
        self._handles[slot] = handle
        self._locked[slot] = index + 1
        self.is_cached[page] = True
        for listener in self.listeners:
            listener.extend(tokens, page, int(self.page_table.rows[slot, index - 1]) if index else None)
        return True

    def _insert(self, slot: int, count: int) -> InsertResult:
        insert = self.cache.insert(self.table.tokens[slot, : count * self.page_size], self.row(slot)[:count].copy())
        self.is_cached[insert.pages] = True
        for listener in self.listeners:
            listener.note(self.table.tokens[slot, : len(insert.pages) * self.page_size], insert.pages)
        return insert

    def _repoint(self, slot: int, canonical: Int32Array) -> None:
        """Point the row's start to ``canonical`` pages, *then* free the private pages that it had there."""
        old = self.row(slot)[: len(canonical)].copy()
        changed = np.flatnonzero(old != canonical)
        if len(changed) == 0:
            return
        self.page_table.write(slot, int(changed[0]), canonical[changed[0] :])
        replaced = old[changed]
        self.pool.free(replaced[~self.is_cached[replaced]])

    def _move_lock(self, slot: int, prefix: MatchResult | InsertResult) -> None:
        self.cache.lock(prefix.handle)
        self._unlock(slot)
        self._handles[slot] = prefix.handle
        self._locked[slot] = len(prefix.pages)

    def _unlock(self, slot: int) -> None:
        if self._handles[slot] is not None:
            self.cache.unlock(self._handles[slot])
        self._handles[slot] = None
        self._published[slot] = -1
        self._locked[slot] = 0

    # -- sliding windows ---------------------------------------------------------------------------------------

    def most_pages(self, length: Lengths, max_len: Lengths) -> Lengths:
        """Most pages that a request with ``length`` tokens holds at a time until it has ``max_len``."""
        return most_pages(length, max_len, self.page_size, self.window, self.num_draft_tokens)

    def give_back(self, slots: Int32Array, computed: Int32Array) -> None:
        """Let go of pages that no query sees any more; each row's queries before position ``computed`` are complete.

        Private pages become free. A prefix of the cache is locked as a whole, so it stays until the window has passed
        all of it, and then belongs to the cache alone. The row publishes nothing from then on: its start is gone.
        """
        ends = self._first_seen(computed) // self.page_size
        due = (ends > self._given_back[slots]) & (ends >= self._locked[slots])
        for slot, end in zip(slots[due].tolist(), ends[due].tolist(), strict=True):
            begin = int(self._given_back[slot])
            pages = self.page_table.rows[slot, begin:end].copy()
            dummies = np.full(end - begin, self.page_table.dummy_page, dtype=np.int32)
            self.page_table.write(slot, begin, dummies)  # its content is finite, should a kernel read what it masks
            self._given_back[slot] = end
            self.pool.free(pages[~self.is_cached[pages]])
            self._unlock(slot)

    # -- the end -----------------------------------------------------------------------------------------------

    def free_row(self, slot: int, cache: bool) -> None:
        """Free the row's private pages and lock; with ``cache``, first offer computed pages to the prefix cache."""
        if cache and not self._given_back[slot]:
            self._insert_known(slot)
        pages = self.row(slot)
        self.pool.free(pages[~self.is_cached[pages]])
        self._unlock(slot)
        self._given_back[slot] = 0
        self.table.num_pages[slot] = 0

    def _insert_known(self, slot: int) -> InsertResult:
        known = min(int(self.table.kv_len[slot]), int(self.table.known_len[slot]))
        return self._insert(slot, min(known // self.page_size, int(self.table.num_pages[slot])))

    def settle(self) -> None:
        """Note that the oldest step in flight is complete, and with it all pages evicted so far."""
        for listener in self.listeners:
            listener.settle()

    def forget_unlocked(self) -> None:
        """Empty the prefix cache of everything that no request has locked."""
        forgotten = self.cache.evict(self.cache.num_evictable)
        for listener in self.listeners:
            listener.forget(forgotten)
        self._free_cached(forgotten)

    def flush(self) -> int:
        """Forget every prefix that no request has locked, and what the page store has; return the number of pages."""
        flushed = self.cache.num_evictable
        self.forget_unlocked()
        if self.offload is not None:
            self.offload.forget_all()
        return flushed

    def _free_cached(self, pages: Int32Array) -> None:
        self.is_cached[pages] = False
        self.pool.free(pages)
