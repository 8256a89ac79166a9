"""A prefix cache as a radix tree over pages of tokens (RadixAttention in SGLang, Zheng et al. 2024)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.prefix import EvictionPolicy, EvictionPriority, InsertResult, LeastRecentlyUsed, MatchResult
from minisgl.request import Int32Array

_EMPTY: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class Node:
    """A node and the compressed edge that leads to it. The path from the root to a node spells a prefix."""

    uid: int  # order of creation; 0 is the root
    tokens: Int32Array  # label of the edge from the parent, [n × page_size]; empty at the root only
    pages: Int32Array  # where the KV of these tokens is, [n]
    parent: Node | None  # None at the root, and after eviction
    lock_count: int = 0  # locks on prefixes that run through this node; at least the sum over the children
    last_access: int = 0  # logical time of the last match or insert through this node
    uses: int = 0
    priority: EvictionPriority = 0  # set by the eviction policy at each use
    children: dict[bytes, Node] = field(default_factory=dict)  # by the bytes of the first page of their edge
    queued: bool = False  # whether the node has an entry in the eviction heap


class RadixCache:
    """Prefix cache as a radix tree: edges are runs of whole pages, and a handle is the `Node` where a prefix ends.

    ``eviction`` decides which leaf goes first; None means the least recently used, by a logical clock.
    """

    def __init__(self, page_size: int, eviction: EvictionPolicy | None = None) -> None:
        self.page_size = page_size
        self._eviction = eviction or LeastRecentlyUsed()
        self.root = Node(0, _EMPTY, _EMPTY, None)
        self.num_pages = 0
        self.num_evictable = 0
        self._clock = 0
        self._uids = itertools.count(1)
        # (priority, uid, node) of each node when it became an unlocked leaf; a node has at most one entry
        self._heap: list[tuple[EvictionPriority, int, Node]] = []

    def match(self, tokens: Int32Array) -> MatchResult:
        """Find the longest cached prefix of ``tokens`` (int32[any]); an edge is split if the prefix ends within it."""
        node, pages = self._walk(np.asarray(tokens, dtype=np.int32))
        return MatchResult(pages, node)

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        """Add the part that is not cached yet as one leaf; the tokens must fill the pages exactly. Both are copied."""
        if len(tokens) != len(pages) * self.page_size:
            raise InvariantError(f"{len(pages)} pages of {self.page_size} tokens cannot hold {len(tokens)} tokens")
        node, cached = self._walk(np.asarray(tokens, dtype=np.int32))
        fresh = np.array(pages[len(cached) :], dtype=np.int32)
        if len(fresh) > 0:
            node = self._add_leaf(node, np.array(tokens[len(cached) * self.page_size :], dtype=np.int32), fresh)
        return InsertResult(np.concatenate([cached, fresh]), node)

    def extend(self, handle: Node, tokens: Int32Array, page: int) -> Node | None:
        """Add a page behind a locked prefix: to its last edge if no other request has locked that, else as a leaf."""
        if handle.children and self._key(tokens) in handle.children:
            return None
        self.num_pages += 1
        if handle.lock_count == 1 and not handle.children:
            handle.tokens = np.concatenate((handle.tokens, tokens))
            handle.pages = np.concatenate((handle.pages, (page,)), dtype=np.int32)
            return handle
        # As recently used as its parent, which may not be older than a child; the request's end is the next use.
        leaf = Node(next(self._uids), tokens.copy(), np.array([page], dtype=np.int32), handle, lock_count=1)
        leaf.last_access, leaf.uses = handle.last_access, 1
        leaf.priority = self._eviction.on_use(leaf.last_access, 1)
        handle.children[self._key(tokens)] = leaf
        return leaf

    def lock(self, handle: Node) -> None:
        """Protect the prefix from eviction: count a lock on every node from its last one up to the root."""
        for node in self._path(handle):
            if node.lock_count == 0:
                self.num_evictable -= len(node.pages)
            node.lock_count += 1

    def unlock(self, handle: Node) -> None:
        """Undo one `lock`; raises `InvariantError` if there was none."""
        for node in self._path(handle):
            if node.lock_count == 0:
                raise InvariantError(f"node {node.uid} is unlocked more often than it was locked")
            node.lock_count -= 1
            if node.lock_count == 0:
                self.num_evictable += len(node.pages)
                self._queue_if_evictable(node)

    def evict(self, count: int) -> Int32Array:
        """Evict ``min(count, num_evictable)`` pages, int32, from the leaves of the lowest priority upwards.

        The last leaf loses only as much of its tail as is still wanted, since its rest remains useful.
        """
        wanted = min(count, self.num_evictable)
        evicted = [_EMPTY]
        while wanted > 0:
            leaf = self._pop_least_recent_leaf()
            pages = self._cut_tail(leaf, min(wanted, len(leaf.pages)))
            self._eviction.on_evict(leaf.priority)
            evicted.append(pages)
            wanted -= len(pages)
        return np.concatenate(evicted)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def held_pages(self) -> Int32Array:
        """All pages in the tree, int32[num_pages]."""
        return np.concatenate([_EMPTY, *(node.pages for node in self.nodes())])

    def check(self) -> None:
        """Raise `InvariantError` unless the tree, its locks, its counters and the eviction heap agree."""
        nodes = list(self.nodes())
        for node in nodes:
            self._check_node(node)
        for node in [self.root, *nodes]:
            for key, child in node.children.items():
                if child.parent is not node or key != self._key(child.tokens):
                    raise InvariantError(f"node {child.uid} does not match its place under node {node.uid}")
        held = self.held_pages()
        unlocked = sum(len(node.pages) for node in nodes if node.lock_count == 0)
        if len(np.unique(held)) != len(held):
            raise InvariantError("a page is in the tree twice")
        if (self.num_pages, self.num_evictable) != (len(held), unlocked):
            raise InvariantError(
                f"{len(held)} pages, {unlocked} of them evictable, counted as {self.num_pages} and {self.num_evictable}"
            )
        if sorted(uid for _, uid, _ in self._heap) != sorted(node.uid for node in nodes if node.queued):
            raise InvariantError("the eviction heap does not hold each queued node once")
        if any(queued_at > node.priority for queued_at, _, node in self._heap):
            raise InvariantError("a node has a lower priority than its heap entry: a priority has fallen")

    def _check_node(self, node: Node) -> None:
        children = node.children.values()
        if len(node.pages) == 0 or len(node.tokens) != len(node.pages) * self.page_size:
            raise InvariantError(f"node {node.uid} has {len(node.tokens)} tokens in {len(node.pages)} pages")
        if node.lock_count < sum(child.lock_count for child in children):
            raise InvariantError(f"node {node.uid} has fewer locks than its children")
        if node.last_access > self._clock or any(child.last_access > node.last_access for child in children):
            raise InvariantError(f"node {node.uid} was accessed before its children, or in the future")
        if not node.children and node.lock_count == 0 and not node.queued:
            raise InvariantError(f"node {node.uid} can be evicted and is not in the eviction heap")

    def _walk(self, tokens: Int32Array) -> tuple[Node, Int32Array]:
        """Follow ``tokens`` from the root as far as whole pages agree, and mark the nodes on the way as used.

        Returns the node where the common prefix ends, and the prefix's pages. An edge that agrees in part is split.
        """
        self._clock += 1
        node, pages = self.root, [self.root.pages]
        while len(tokens) >= self.page_size:
            child = node.children.get(self._key(tokens))
            if child is None:
                break
            shared = self._shared_pages(child.tokens, tokens)
            node = child if shared == len(child.pages) else self._split(child, shared)
            self._use(node)
            pages.append(node.pages)
            tokens = tokens[shared * self.page_size :]
        return node, np.concatenate(pages)

    def _use(self, node: Node) -> None:
        node.last_access = self._clock
        node.uses += 1
        node.priority = self._eviction.on_use(self._clock, node.uses)

    def _split(self, node: Node, count: int) -> Node:
        """Put a new node in the edge of ``node`` after ``count`` pages, and return it.

        ``node`` stays the lower end, so handles to it stay valid; the new node gets the same locks and uses.
        """
        assert node.parent is not None
        cut = count * self.page_size
        upper = Node(
            uid=next(self._uids),
            tokens=node.tokens[:cut],
            pages=node.pages[:count],
            parent=node.parent,
            lock_count=node.lock_count,
            last_access=node.last_access,
            uses=node.uses,
            priority=node.priority,
        )
        node.parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[count:], upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _add_leaf(self, parent: Node, tokens: Int32Array, pages: Int32Array) -> Node:
        leaf = Node(next(self._uids), tokens, pages, parent)
        self._use(leaf)
        parent.children[self._key(tokens)] = leaf
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        self._queue_if_evictable(leaf)
        return leaf

    def _cut_tail(self, leaf: Node, count: int) -> Int32Array:
        """Take the last ``count`` pages of an unlocked leaf; an emptied leaf is removed, and may bare its parent."""
        assert leaf.parent is not None
        keep = len(leaf.pages) - count
        pages = leaf.pages[keep:]
        self.num_pages -= count
        self.num_evictable -= count
        if keep > 0:
            leaf.tokens, leaf.pages = leaf.tokens[: keep * self.page_size], leaf.pages[:keep]
            self._queue_if_evictable(leaf)
        else:
            del leaf.parent.children[self._key(leaf.tokens)]
            self._queue_if_evictable(leaf.parent)
            leaf.parent = None
        return pages

    def _queue_if_evictable(self, node: Node) -> None:
        if not (node.queued or node.children or node.lock_count or node is self.root):
            heapq.heappush(self._heap, (node.priority, node.uid, node))
            node.queued = True

    def _pop_least_recent_leaf(self) -> Node:
        """Take the unlocked leaf of the lowest priority from the heap: by default, the least recently used one.

        Using, locking or extending a node leaves its heap entry as it was, so entries are checked when they surface.
        Since priorities only rise, none surfaces too late.
        """
        while True:
            queued_at, _, node = heapq.heappop(self._heap)
            node.queued = False
            if queued_at == node.priority and not node.children and node.lock_count == 0:
                return node
            self._queue_if_evictable(node)

    def _path(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:  # the root is left out
            yield node
            node = node.parent
        if node is not self.root:
            raise InvariantError("the handle's prefix has been evicted: lock a handle before the next insert or evict")

    def _key(self, tokens: Int32Array) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _shared_pages(self, a: Int32Array, b: Int32Array) -> int:
        """Whole pages in which two token arrays agree from the start."""
        length = min(len(a), len(b))
        differs = a[:length] != b[:length]
        first = int(differs.argmax())
        return (first if differs[first] else length) // self.page_size
