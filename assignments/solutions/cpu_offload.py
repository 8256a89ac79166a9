"""Reference solution of ``cpu_offload``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import torch

from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array


class HostStore:
    """Keeps evicted pages in one block of the host's memory, and forgets what was not used for longest.

    Copies to the host wait for the device: simple, and paid only by steps that evict.

    Args:
        kv_cache: to copy from and to.
        max_pages: that it keeps at most.
    """

    def __init__(self, kv_cache: KVCache, max_pages: int = 1024) -> None:
        self.kv_cache = kv_cache
        self.max_pages = max_pages
        page = kv_cache.read_pages(self._on_device([0]))
        self._memory = page.new_empty((*page.shape[:2], max_pages, *page.shape[3:]), device="cpu")
        self._places: OrderedDict[bytes, int] = OrderedDict()
        """Where each page is, the least recently used first."""
        self._free = list(range(max_pages))

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        """See `minisgl.kvcache.page_store.PageStore`."""
        new: dict[bytes, int] = {}
        for name, page in zip(names, pages.tolist(), strict=True):
            if name in self._places:
                self._places.move_to_end(name)
            else:
                new[name] = page
        kept = dict(list(new.items())[: self.max_pages])
        if not kept:
            return
        while len(self._free) < len(kept):
            self._free.append(self._places.popitem(last=False)[1])
        places = [self._free.pop() for _ in kept]
        content = self.kv_cache.read_pages(self._on_device([*kept.values()]))
        self._memory.index_copy_(2, torch.tensor(places), content.cpu())
        self._places.update(zip(kept, places, strict=True))

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        """See `minisgl.kvcache.page_store.PageStore`."""
        found = list(takewhile(self._places.__contains__, names))
        if not found:
            return 0
        for name in found:
            self._places.move_to_end(name)
        places = torch.tensor([self._places[name] for name in found])
        target = self._on_device(pages[: len(found)].tolist())
        self.kv_cache.write_pages(target, self._memory.index_select(2, places).to(target.device))
        return len(found)

    def _on_device(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self.kv_cache.k.device)
