"""Assignment cpu_offload: the starter. README.md beside this file says what to do."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array


class HostStore:
    """Keeps evicted pages in the host's memory.

    Args:
        kv_cache: to copy from and to.
        max_pages: that it keeps at most.
    """

    def __init__(self, kv_cache: KVCache, max_pages: int = 1024) -> None:
        self.kv_cache = kv_cache
        self.max_pages = max_pages

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        """See `minisgl.kvcache.page_store.PageStore`."""
        raise NotImplementedError("Assignment cpu_offload: HostStore.save")

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        """See `minisgl.kvcache.page_store.PageStore`."""
        raise NotImplementedError("Assignment cpu_offload: HostStore.restore")
