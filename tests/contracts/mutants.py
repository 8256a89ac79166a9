"""Radix caches that are broken in one way each. They do not check themselves: the suite must notice from outside."""

from __future__ import annotations

from minisgl.core.request import Int32Array
from minisgl.kvcache.prefix import Insert
from minisgl.kvcache.radix import Node, RadixCache


class UncheckedCache(RadixCache):
    def check(self) -> None:
        pass


class LosesLocksOnSplit(UncheckedCache):
    """The upper half of a split edge starts without the locks that went through the whole."""

    def _split(self, node: Node, count: int) -> Node:
        upper = super()._split(node, count)
        upper.lock_count = 0
        return upper


class ClaimsDuplicates(UncheckedCache):
    """Answers that it took the offered pages where it kept others: the owner will not re-point its readers."""

    def insert(self, tokens: Int32Array, pages: Int32Array) -> Insert:
        return Insert(pages.copy(), super().insert(tokens, pages).handle)


class EvictsLocked(UncheckedCache):
    """Looks at no lock when it evicts. All its counters are right."""

    def evict(self, count: int) -> Int32Array:
        locks = {node: node.lock_count for node in self.nodes()}
        for node in locks:
            node.lock_count = 0
            self._queue_if_evictable(node)
        self.num_evictable = self.num_pages
        pages = super().evict(count)
        for node in self.nodes():
            node.lock_count = locks[node]
        self.num_evictable = sum(len(node.pages) for node in self.nodes() if node.lock_count == 0)
        return pages
