"""Window pages: the KV of layers with a sliding window, in a model that has other layers too.

A page holds the KV of the layers that see all positions, for as long as its tokens matter. What the layers with a
window have of the same tokens lies in a *window page*, from a pool of its own, and only as long as a query may see it.
So a page has a window page or has none, and everything else in the engine goes on naming pages by their ids. (SGLang
maps slots of one pool to slots of another in the same way; vLLM's hybrid KV cache manager has a block table for each
group of layers, and one pool for all of them.)
"""

from __future__ import annotations

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.pool import PagePool
from minisgl.request import Int32Array

NOWHERE = -1


class WindowPages:
    """Which window page each page has, and how many rows still need it.

    A window page is *free*, *held* by at least one row, or *idle*: no row needs it, but the prefix cache has its page,
    and a later prompt may go on from there. Idle ones are taken back, those first that have been idle for longest, when
    free ones run out; the page stays in the cache without.

    ``is_cached`` tells of each page whether the prefix cache owns it, bool[num_pages], kept by the caller.
    """

    def __init__(self, num_pages: int, num_window_pages: int, is_cached: np.ndarray[tuple[int], np.dtype[np.bool_]]):
        self.pool = PagePool(num_window_pages)
        self.of_page = np.full(num_pages, NOWHERE, dtype=np.int32)
        self.page_of = np.full(num_window_pages, NOWHERE, dtype=np.int32)
        self.holders = np.zeros(num_window_pages, dtype=np.int32)
        self._idle: dict[int, None] = {}  # in the order in which they became idle
        self._is_cached = is_cached

    @property
    def available(self) -> int:
        """Window pages that could be taken now: free ones and idle ones."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_shared(self) -> int:
        """Window pages that there would be more, if none had several holders. Each may want one of its own later."""
        return int(self.holders.sum()) - (len(self.holders) - self.available)

    def hold(self, pages: Int32Array) -> Int32Array:
        """Give each of these pages a window page, unless it has one, and count one holder more; return them."""
        held = self.of_page[pages]
        for window_page in held[held != NOWHERE].tolist():
            self._idle.pop(window_page, None)
            self.holders[window_page] += 1
        missing = np.flatnonzero(held == NOWHERE)
        if len(missing):
            self._take_back(len(missing) - self.pool.num_free)
            new = self.pool.alloc(len(missing))
            self.of_page[pages[missing]] = held[missing] = new
            self.page_of[new] = pages[missing]
            self.holders[new] = 1
        return held

    def drop(self, window_pages: Int32Array) -> None:
        """Undo one `hold`. What nobody holds any more becomes idle where its page is cached, and free elsewhere."""
        self.holders[window_pages] -= 1
        unused = window_pages[self.holders[window_pages] == 0]
        cached = self._is_cached[self.page_of[unused]]
        self._idle.update(dict.fromkeys(unused[cached].tolist()))
        self._free(unused[~cached])

    def move(self, window_page: int, page: int) -> None:
        """Give a held window page to another page, which has none and holds the KV of the same tokens."""
        self.of_page[self.page_of[window_page]] = NOWHERE
        self.of_page[page], self.page_of[window_page] = window_page, page

    def forget(self, pages: Int32Array) -> None:
        """Free the window pages of pages that the prefix cache has evicted, and that no row has."""
        window_pages = self.of_page[pages]
        window_pages = window_pages[window_pages != NOWHERE]
        for window_page in window_pages.tolist():
            del self._idle[window_page]
        self._free(window_pages)

    def _take_back(self, count: int) -> None:
        if count > 0:
            oldest = np.fromiter(self._idle, dtype=np.int32, count=min(count, len(self._idle)))
            for window_page in oldest.tolist():
                del self._idle[window_page]
            self._free(oldest)

    def _free(self, window_pages: Int32Array) -> None:
        self.of_page[self.page_of[window_pages]] = NOWHERE
        self.page_of[window_pages] = NOWHERE
        self.pool.free(window_pages)

    def check(self) -> None:
        """Raise `InvariantError` unless each window page is free, held or idle, and both maps agree."""
        self.pool.check()
        used = np.flatnonzero(self.page_of != NOWHERE)
        if not np.array_equal(used, np.flatnonzero(~self.pool.is_free)):
            raise InvariantError("window pages of the pool and of pages do not add up: one has leaked")
        if not np.array_equal(self.of_page[self.page_of[used]], used) or (self.of_page != NOWHERE).sum() != len(used):
            raise InvariantError("a page and its window page disagree")
        idle = np.fromiter(self._idle, dtype=np.int32, count=len(self._idle))
        if not np.array_equal(np.sort(idle), used[self.holders[used] == 0]):
            raise InvariantError("the idle window pages are not those that no row holds")
        if not self._is_cached[self.page_of[idle]].all():
            raise InvariantError("an idle window page belongs to a page that is not cached")
