"""What goes first when memory is short: the ranking of cached runs of pages, exchangeable inside a prefix cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from minisgl.core.registry import Registry
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


EVICTION_POLICIES: Registry[Callable[[], EvictionPolicy]] = Registry("eviction_policy")


@EVICTION_POLICIES.register("lru")
class LeastRecentlyUsed:
    """What has not been used for the longest time goes first."""

    def on_use(self, now: int, uses: int) -> int:
        return now

    def on_evict(self, rank: int) -> None:
        pass


def choose_cache(spec: str) -> Callable[[int], PrefixCache]:
    """What builds the prefix cache that ``spec`` names: ``"radix"``, or ``"radix,lru"`` with an eviction policy.

    Raises:
        ConfigError: an unknown name, or a cache that takes no policy.
    """
    name, _, policy = (part.strip() for part in spec.partition(","))
    make_cache: Callable[..., PrefixCache] = PREFIX_CACHES.get(name)
    if not policy:
        return make_cache
    make_policy = EVICTION_POLICIES.get(policy)
    if "eviction" not in inspect.signature(make_cache).parameters:
        raise ConfigError(f"prefix_cache: {name!r} takes no eviction policy; leave out {policy!r}, or use 'radix'")
    return lambda page_size: make_cache(page_size, eviction=make_policy())
