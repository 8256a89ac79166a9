"""The protocols of a prefix cache and of its eviction policy, and how both are selected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minisgl.errors import ConfigError
from minisgl.registry import Registry, resolve
from minisgl.request import Int32Array

Handle = Any
"""A cached prefix, as its cache names it: hold it to lock and unlock. Opaque to everybody else."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens.

    Args:
        pages: [n] int32 page ids of the prefix, in order.
        handle: names the prefix for `PrefixCache.lock`. Valid until the next `insert` or `evict`, unless locked.
    """

    pages: Int32Array
    handle: Handle


@dataclass(frozen=True, slots=True)
class Insert:
    """What became of an insertion.

    Args:
        pages: [m] int32 canonical page ids of the prefix that is cached now, m ≤ pages offered (a cache may keep
            fewer, ``none`` keeps nothing). Where ``pages[i]`` is the page that was offered, the cache owns it now.
            Where it is another, the same tokens were cached already and the offered page is a duplicate that its
            owner keeps: it must re-point its readers before it frees the page.
        handle: names that prefix.
    """

    pages: Int32Array
    handle: Handle


class PrefixCache(Protocol):
    """Remembers which pages hold the KV of which token prefixes.

    Prefixes are whole pages. The cache owns the pages it holds; it gives them back through `evict` only, and never
    while they are locked. Implementations take ``page_size`` as their only constructor argument.
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

    def match(self, tokens: Int32Array) -> Match:
        """Longest cached prefix of ``tokens`` (int32[any]), rounded down to whole pages; counts as a use of it."""
        ...

    def lock(self, handle: Handle) -> None:
        """Protect the prefix from eviction until as many calls of `unlock`."""
        ...

    def unlock(self, handle: Handle) -> None:
        """Undo one `lock`. Whether this counts as a use of the prefix is up to the cache."""
        ...

    def insert(self, tokens: Int32Array, pages: Int32Array) -> Insert:
        """Offer pages that hold (or, by steps launched already, will hold) the KV of ``tokens``.

        Args:
            tokens: int32[len(pages) × page_size].
            pages: int32[n], distinct.
        """
        ...

    def evict(self, count: int) -> Int32Array:
        """Forget least recently used unlocked prefixes until at least ``count`` pages are out, or no more can be.

        Returns:
            int32[m] the pages, which the caller owns now; m ≥ min(count, num_evictable).
        """
        ...

    def held_pages(self) -> Int32Array:
        """All pages the cache owns, int32[num_pages], in any order. For checks and pictures."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless structure, locks and counters agree."""
        ...


class NoPrefixCache:
    """Caches nothing: every prompt is computed from its first token."""

    num_pages = 0
    num_evictable = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def match(self, tokens: Int32Array) -> Match:
        return Match(np.zeros(0, dtype=np.int32), None)

    def lock(self, handle: Handle) -> None:
        pass

    def unlock(self, handle: Handle) -> None:
        pass

    def insert(self, tokens: Int32Array, pages: Int32Array) -> Insert:
        return Insert(np.zeros(0, dtype=np.int32), None)

    def evict(self, count: int) -> Int32Array:
        return np.zeros(0, dtype=np.int32)

    def held_pages(self) -> Int32Array:
        return np.zeros(0, dtype=np.int32)

    def check(self) -> None:
        pass


PREFIX_CACHES: Registry[Callable[[int], PrefixCache]] = {
    "radix": "minisgl.kvcache.radix:RadixCache",
    "block-hash": "minisgl.kvcache.block_hash:BlockHashCache",
    "none": NoPrefixCache,
}
"""What builds each from the page size."""


Rank = Any
"""Anything that can be ordered and is the same kind of thing for all runs: a number, or a tuple of numbers."""


class EvictionPolicy(Protocol):
    """Ranks runs of pages. Of those that may be evicted, the one of the lowest rank goes first.

    A policy is called in two places only, and has to be quick in both. A cache keeps the ranks itself, in a heap in
    which it cannot move entries; this works as long as a rank never falls, so that an entry never surfaces too late.
    """

    def on_use(self, now: int, uses: int) -> Rank:
        """A run of pages is inserted, matched, or inserted again.

        Args:
            now: logical time; no two uses by different calls of the cache have the same.
            uses: how often the run has been used, this time included; 1 when it is inserted.

        Returns:
            Its rank until it is used again: not lower than a rank given earlier to the same run.
        """
        ...

    def on_evict(self, rank: Rank) -> None:
        """Pages of a run with this rank have been evicted."""
        ...


class LeastRecentlyUsed:
    """What has not been used for the longest time goes first."""

    def on_use(self, now: int, uses: int) -> int:
        return now

    def on_evict(self, rank: int) -> None:
        pass


EVICTION_POLICIES: Registry[Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}


def select_prefix_cache(prefix_cache: str, eviction_policy: str = "lru") -> Callable[[int], PrefixCache]:
    """Return what builds the prefix cache that these options name, from a page size.

    Raises:
        ConfigError: a name is unknown, or the cache takes no eviction policy and another than ``"lru"`` is given.
    """
    make_cache: Callable[..., PrefixCache] = resolve("prefix_cache", prefix_cache, PREFIX_CACHES)
    make_policy = resolve("eviction_policy", eviction_policy, EVICTION_POLICIES)
    if "eviction" in inspect.signature(make_cache).parameters:
        return lambda page_size: make_cache(page_size, eviction=make_policy())
    if eviction_policy != "lru":
        raise ConfigError(
            f"eviction_policy: prefix_cache {prefix_cache!r} takes none, got {eviction_policy!r}; use prefix_cache "
            "'radix'"
        )
    return make_cache
