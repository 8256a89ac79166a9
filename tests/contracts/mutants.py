"""Radix caches that are broken in one way each. They do not check themselves: the suite must notice from outside."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from minisgl.core.request import Int32Array
from minisgl.kvcache.prefix import Insert
from minisgl.kvcache.radix import Node, RadixCache


class UncheckedCache(RadixCache):
    def check(self) -> None:
        pass


class LosesLocksOnSplit(UncheckedCache):
    """The upper half of a split edge starts without the locks of the lower."""

    def _split(self, node: Node, count: int) -> Node:
        upper = super()._split(node, count)
        if upper.lock_count > 0:
            self.num_evictable += len(upper.pages)
        upper.lock_count = 0
        return upper

    def _path(self, node: Node) -> Iterator[Node]:
        return (step for step in super()._path(node) if step.lock_count > 0 or not step.children)


class ClaimsDuplicates(UncheckedCache):
    """Tells the owner of duplicate pages that the cache has taken them, as if its readers need not be re-pointed."""

    def insert(self, tokens: Int32Array, pages: Int32Array) -> Insert:
        result = super().insert(tokens, pages)
        return Insert(np.array(pages, dtype=np.int32), result.handle)


class EvictsLocked(UncheckedCache):
    """Evicts the least recently used leaf whether or not it is locked."""

    def _queue_if_evictable(self, node: Node) -> None:
        locks, node.lock_count = node.lock_count, 0
        super()._queue_if_evictable(node)
        node.lock_count = locks

    def _pop_least_recent_leaf(self) -> Node:
        leaves = [entry for entry in self._heap if not entry[2].children]
        oldest = min(leaves, key=lambda entry: entry[2].last_access)
        self._heap.remove(oldest)
        heapq.heapify(self._heap)
        oldest[2].queued = False
        return oldest[2]
