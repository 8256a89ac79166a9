"""What goes first when memory is short: the ranking of cached runs of pages, exchangeable inside a prefix cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from minisgl.core.registry import Table, resolve
from minisgl.errors import ConfigError
from minisgl.kvcache.prefix import PREFIX_CACHES, PrefixCache

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


EVICTION_POLICIES: Table[Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}


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
