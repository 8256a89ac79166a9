"""Assignment lfu_eviction: the starter. README.md beside this file says what to do."""

from __future__ import annotations


class LFUWithAging:
    """Least frequently used goes first; every eviction makes what is left a little older."""

    def on_use(self, now: int, uses: int) -> tuple[int, int]:
        """See `minisgl.kvcache.prefix.EvictionPolicy`."""
        raise NotImplementedError("Assignment lfu_eviction: LFUWithAging.on_use")

    def on_evict(self, priority: tuple[int, int]) -> None:
        """See `minisgl.kvcache.prefix.EvictionPolicy`."""
        raise NotImplementedError("Assignment lfu_eviction: LFUWithAging.on_evict")
