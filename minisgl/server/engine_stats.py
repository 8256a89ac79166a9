"""How busy an engine is, as a message."""

from __future__ import annotations

import msgspec

STATS = "stats"
"""The topic under which an engine is asked for its `EngineStats`."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is, between two steps.

    Args:
        waiting, running: requests in the queue, and in the running table.
        pages: KV pages in all.
        free_pages: KV pages that hold nothing.
        cached_pages: KV pages that hold what no running request uses, for those that will have the same prefix.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    cached_pages: int

    @property
    def used_pages(self) -> int:
        """KV pages that running requests hold."""
        return self.pages - self.free_pages - self.cached_pages
