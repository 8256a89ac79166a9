"""The protocols of a prefix cache and of its eviction policy, and how an engine selects both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minisgl.errors import ConfigError
from minisgl.registry import Registry, build, resolve
from minisgl.request import Int32Array

Handle = Any
"""A cached prefix, to lock and unlock it. Only the cache that returned it looks inside."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix: its pages, int32[n], and a handle to lock it before the next `insert` or `evict`."""

    pages: Int32Array
    handle: Handle


@dataclass(frozen=True, slots=True)
class InsertResult:
    """The prefix that is cached after an insertion: its pages, int32[m], and its handle.

    m is at most the number of pages offered. The cache now owns each offered page that is in ``pages``. Another page in
    its place means that the tokens were cached already: the owner of the duplicate keeps it, and must re-point its
    readers before freeing it.
    """

    pages: Int32Array
    handle: Handle


class PrefixCache(Protocol):
    """Remembers which pages hold the KV of which token prefixes, in whole pages.

    The cache owns its pages; only `evict` gives them back, and never while they are locked. Implementations take
    ``page_size`` as their only required constructor argument.
    """

    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages the cache owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could return now: those in no locked prefix."""
        ...

    def match(self, tokens: Int32Array) -> MatchResult:
        """Find the longest cached prefix of ``tokens`` (int32[any]) in whole pages; counts as a use of it."""
        ...

    def lock(self, handle: Handle) -> None:
        """Protect the prefix from eviction until as many calls of `unlock`."""
        ...

    def unlock(self, handle: Handle) -> None:
        """Undo one `lock`. Each cache decides whether this counts as a use."""
        ...

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        """Offer distinct pages, int32[n], that hold the KV of n × page_size tokens, now or after the steps launched."""
        ...

    def evict(self, count: int) -> Int32Array:
        """Forget unlocked prefixes; give the caller at least min(count, num_evictable) of their pages, int32[m]."""
        ...

    def held_pages(self) -> Int32Array:
        """All pages the cache owns, int32[num_pages], in any order. For checks and pictures."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless structure, locks and counters agree."""
        ...


@runtime_checkable
class ExtensiblePrefixCache(PrefixCache, Protocol):
    """A prefix cache that takes pages of an answer while it is written; others get them when it ends."""

    def extend(self, handle: Handle, tokens: Int32Array, page: int) -> Handle | None:
        """Add one page, for int32[page_size] tokens, behind a prefix that the caller has locked.

        The lock moves to the longer prefix, whose handle is returned. None, and no change, if something is cached there
        already. However long the prefix is, this takes no longer, and it counts as no use.
        """
        ...


class NoPrefixCache:
    """Caches nothing: every prompt is computed from its first token."""

    num_pages = 0
    num_evictable = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def match(self, tokens: Int32Array) -> MatchResult:
        return MatchResult(np.zeros(0, dtype=np.int32), None)

    def lock(self, handle: Handle) -> None:
        pass

    def unlock(self, handle: Handle) -> None:
        pass

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        return InsertResult(np.zeros(0, dtype=np.int32), None)

    def evict(self, count: int) -> Int32Array:
        return np.zeros(0, dtype=np.int32)

    def held_pages(self) -> Int32Array:
        return np.zeros(0, dtype=np.int32)

    def check(self) -> None:
        pass


# Each builds a cache from the page size.
PREFIX_CACHES: Registry[Callable[[int], PrefixCache]] = {
    "radix": "minisgl.kvcache.radix:RadixCache",
    "block-hash": "minisgl.kvcache.block_hash:BlockHashCache",
    "none": NoPrefixCache,
}

EvictionPriority = Any
"""A number, or a tuple of numbers. The nodes with the lowest priority are evicted first."""


class EvictionPolicy(Protocol):
    """Gives each node of a radix tree a priority; of the nodes that may be evicted, the lowest goes first.

    A node's priority must never fall, because entries of the tree's heap cannot be moved.
    """

    def on_use(self, now: int, uses: int) -> EvictionPriority:
        """Return the priority, until its next use, of a node that was inserted, matched, or inserted again.

        ``now`` is logical time: each `match` and each `insert` of the cache is one tick. ``uses`` includes this one;
        1 means inserted. A split of a node is no use: both halves keep the uses and the priority of the whole.
        """
        ...

    def on_evict(self, priority: EvictionPriority) -> None:
        """Called when a node with this priority has lost pages."""
        ...


class LeastRecentlyUsed:
    """Evict the node that has not been used for the longest time."""

    def on_use(self, now: int, uses: int) -> int:
        return now

    def on_evict(self, priority: int) -> None:
        pass


EVICTION_POLICIES: Registry[Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}


def select_prefix_cache(prefix_cache: str, eviction_policy: str = "lru") -> Callable[[int], PrefixCache]:
    """Return a function that builds the named prefix cache from a page size.

    Raises `ConfigError` for an unknown name, or an eviction policy other than ``"lru"`` that the cache cannot use; the
    function does for ``module:Class`` if it cannot be made.
    """
    make_cache: Callable[..., PrefixCache] = resolve("prefix_cache", prefix_cache, PREFIX_CACHES)
    resolve("eviction_policy", eviction_policy, EVICTION_POLICIES)
    build_cache = partial(build, "prefix_cache", prefix_cache, PREFIX_CACHES, PrefixCache)
    build_policy = partial(build, "eviction_policy", eviction_policy, EVICTION_POLICIES, EvictionPolicy)
    if "eviction" in inspect.signature(make_cache).parameters:
        return lambda page_size: build_cache(page_size, eviction=build_policy())
    if eviction_policy != "lru":
        raise ConfigError(
            f"eviction_policy: prefix_cache {prefix_cache!r} takes none, got {eviction_policy!r}; use prefix_cache "
            "'radix'"
        )
    return build_cache
