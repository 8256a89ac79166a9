"""Reference solution of ``bug_hunt``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from assignments.bug_hunt.page_trie import PageTrie
from minisgl.kvcache.prefix import InsertResult, MatchResult, PrefixCache
from minisgl.request import Int32Array


class Repaired(PageTrie):
    """The trie with its two bugs repaired."""

    def match(self, tokens: Int32Array) -> MatchResult:
        """The row of a match had room for 16 pages, and what was cached beyond them was computed again."""
        if len(tokens) > len(self._row) * self.page_size:
            self._row = np.zeros(2 * len(tokens) // self.page_size, dtype=np.int32)
        return super().match(tokens)

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        """Answered with the pages that were offered, where others are cached: their owner took them for the cache's."""
        node = super().insert(tokens, pages).handle
        canonical = [each.page for each in self._path(node)][::-1]
        return InsertResult(np.array(canonical, dtype=np.int32), node)

    @staticmethod
    def reproduce(make_cache: Callable[[int], PrefixCache]) -> None:
        """A long prefix is found whole."""
        cache = make_cache(4)
        tokens = np.arange(4 * 100, dtype=np.int32)
        cache.insert(tokens, np.arange(100, dtype=np.int32))
        found = cache.match(tokens).pages.tolist()
        assert found == list(range(100)), f"found {len(found)} of 100 pages"
