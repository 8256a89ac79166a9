"""Which pages there are, what each is used for, and the check that nothing is lost."""

from __future__ import annotations

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.pool import PagePool, PageTable
from minisgl.kvcache.prefix import Handle, PrefixCache
from minisgl.kvcache.sizing import Lengths
from minisgl.request import Int32Array
from minisgl.table import RunningTable


class PageLedger:
    """The pool, the page table, the prefix cache, and what each row has of them; `KVMemory` changes it.

    No layer of the model sees more than ``window`` positions; None: some layer sees all. A model with layers of both
    kinds has ``num_window_pages`` too. A step verifies up to ``num_draft_tokens`` of a row.
    """

    def __init__(
        self,
        num_pages: int,
        table: RunningTable,
        cache: PrefixCache,
        window: int | None,
        num_draft_tokens: int,
        num_window_pages: int | None,
    ) -> None:
        self.page_size = cache.page_size
        self.window = window
        self.num_draft_tokens = num_draft_tokens
        self.table = table
        self.cache = cache
        self.pool = PagePool(num_pages)
        sizes = table.max_running, table.max_seq_len, self.page_size
        self.page_table = PageTable(*sizes, dummy_page=num_pages, window_dummy=num_window_pages)
        self.is_cached = np.zeros(num_pages, dtype=bool)
        self._handles: list[Handle | None] = [None] * table.max_running
        # Pages of each row that its lock covers; -1 if the row has other pages there, or its answer can't be published
        self._published = np.full(table.max_running, -1, dtype=np.int32)
        self._locked = np.zeros(table.max_running, dtype=np.int32)  # pages of the prefix that the row's handle locks
        self._given_back = np.zeros(table.max_running, dtype=np.int32)  # leading entries that name the dummy page

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def available(self) -> int:
        """Pages that could be allocated now: free ones, and those that the prefix cache can evict."""
        return self.pool.num_free + self.cache.num_evictable

    @property
    def gives_back(self) -> bool:
        """Whether rows give anything back while they run."""
        return self.window is not None or self.page_table.window_dummy is not None

    def pages_for(self, tokens: Lengths) -> Lengths:
        return -(-tokens // self.page_size)

    def row(self, slot: int) -> Int32Array:
        """Pages of a running request, int32[num_pages] less those that it has given back, a view."""
        return self.page_table.rows[slot, self._given_back[slot] : self.table.num_pages[slot]]

    def _first_seen(self, query: Int32Array) -> Int32Array:
        """The first position that is visible to queries at these positions."""
        assert self.window is not None
        return np.maximum(query + 1 - self.window, 0)

    def check(self) -> None:
        """Raise `InvariantError` unless every page is free, private to one row, or cached, and rows cover their KV."""
        self.pool.check()
        self.cache.check()
        held = self.cache.held_pages()
        if len(np.unique(held)) != len(held) or not np.array_equal(np.sort(held), np.flatnonzero(self.is_cached)):
            raise InvariantError("the prefix cache and the ledger disagree on which pages are cached")
        uses = np.zeros(self.num_pages, dtype=np.int32)
        for slot in np.flatnonzero(self.table.num_pages):
            row = self.row(int(slot))
            if len(np.unique(row)) != len(row) or self.pool.is_free[row].any():
                raise InvariantError(f"the row of slot {slot} maps a page twice, or a free page")
            if self.table.kv_len[slot] > self.table.num_pages[slot] * self.page_size:
                raise InvariantError(f"slot {slot} has KV beyond its pages")
            self._check_given_back(int(slot))
            if not self.is_cached[row[: max(self._published[slot], 0)]].all():
                raise InvariantError(f"slot {slot} has published a page that is not cached")
            uses[row] += 1
        if (uses[~self.is_cached] > 1).any():
            raise InvariantError("two requests map one private page")
        private = int((uses[~self.is_cached] == 1).sum())
        if self.pool.num_free + len(held) + private != self.num_pages:
            raise InvariantError("free, cached and private pages do not add up to the pool: a page has leaked")

    def _check_given_back(self, slot: int) -> None:
        count = int(self._given_back[slot])
        if count == 0:
            return
        if (self.page_table.rows[slot, :count] != self.page_table.dummy_page).any():
            raise InvariantError(f"slot {slot} still maps a page that it has given back")
        query = np.minimum(self.table.kv_len[slot], self.table.known_len[slot] - 1)
        if count * self.page_size > self._first_seen(query):
            raise InvariantError(f"slot {slot} has given back a page that it still reads")
