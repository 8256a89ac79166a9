"""A prefix cache as a trie with one page a node. It is wrong in two ways; README.md beside this file says more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.prefix import InsertResult, MatchResult
from minisgl.request import Int32Array


@dataclass(eq=False, slots=True)
class PageNode:
    """One cached page: the tokens in it are the key under which its parent knows it."""

    page: int
    key: bytes
    parent: PageNode | None
    locks: int = 0
    last_access: int = 0
    children: dict[bytes, PageNode] = field(default_factory=dict)


class PageTrie:
    """Prefix cache whose handles are nodes. Simpler than a radix tree: there are no edges to split.

    Args:
        page_size: tokens a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = PageNode(-1, b"", None)
        self._clock = 0
        self._row = np.zeros(16, dtype=np.int32)  # pages of a match, so that a look-up allocates nothing but its answer

    @property
    def num_pages(self) -> int:
        """Pages in the trie."""
        return sum(1 for _ in self._nodes())

    @property
    def num_evictable(self) -> int:
        """Pages that are in no locked prefix."""
        return sum(node.locks == 0 for node in self._nodes())

    def match(self, tokens: Int32Array) -> MatchResult:
        """See `PrefixCache.match`."""
        self._clock += 1
        node, count = self.root, 0
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None or count == len(self._row):
                break
            self._row[count] = child.page
            child.last_access = self._clock
            node, count = child, count + 1
        return MatchResult(self._row[:count].copy(), node)

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        """See `PrefixCache.insert`."""
        self._clock += 1
        node = self.root
        for key, page in zip(self._keys(tokens), pages.tolist(), strict=True):
            node = self._child(node, key, page)
            node.last_access = self._clock
        return InsertResult(np.array(pages, dtype=np.int32), node)

    def lock(self, handle: PageNode) -> None:
        """See `PrefixCache.lock`."""
        for node in self._path(handle):
            node.locks += 1

    def unlock(self, handle: PageNode) -> None:
        """See `PrefixCache.unlock`."""
        for node in self._path(handle):
            node.locks -= 1

    def evict(self, count: int) -> Int32Array:
        """See `PrefixCache.evict`."""
        pages: list[int] = []
        while len(pages) < count:
            leaves = [node for node in self._nodes() if not node.children and node.locks == 0]
            if not leaves:
                break
            oldest = min(leaves, key=lambda node: node.last_access)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.key]
            pages.append(oldest.page)
        return np.array(pages, dtype=np.int32)

    def held_pages(self) -> Int32Array:
        """See `PrefixCache.held_pages`."""
        return np.array([node.page for node in self._nodes()], dtype=np.int32)

    def check(self) -> None:
        """Raise `InvariantError` unless every page is there once, and locks reach up to the root."""
        held = self.held_pages()
        if len(np.unique(held)) != len(held):
            raise InvariantError("a page is in the trie twice")
        for node in self._nodes():
            if node.locks < sum(child.locks for child in node.children.values()):
                raise InvariantError(f"page {node.page} has fewer locks than what follows it")

    def _keys(self, tokens: Int32Array) -> Iterator[bytes]:
        """The tokens of each whole page, as bytes."""
        tokens = np.asarray(tokens, dtype=np.int32)
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            yield tokens[start : start + self.page_size].tobytes()

    def _child(self, node: PageNode, key: bytes, page: int) -> PageNode:
        """The child for these tokens; a new one with this page where there is none."""
        return node.children.setdefault(key, PageNode(page, key, node))

    def _path(self, node: PageNode) -> Iterator[PageNode]:
        while node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[PageNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
