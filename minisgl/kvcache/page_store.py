"""Pages that the prefix cache evicts can be kept in a store, such as main memory, and copied back when wanted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash

from minisgl.kvcache.pool import KVCache
from minisgl.registry import Registry
from minisgl.request import Int32Array


class PageStore(Protocol):
    """Keeps the content of pages under names; built over the `KVCache` that it copies from and to.

    Both methods are called between two steps. On a GPU the copies belong in the current stream, after all steps
    launched so far and before the next, so that the host need not wait.
    """

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        """Keep the content of pages that are about to be reused; a full store may drop it.

        Equal names mean equal content. ``pages`` holds distinct ids, int32[len(names)].
        """
        ...

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        """Fill pages, int32[len(names)], up to the first missing name; return how many were filled. Counts as a use."""
        ...


class NoPageStore:
    """Keeps nothing: evicted pages are computed again."""

    def __init__(self, kv_cache: KVCache) -> None:
        pass

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        pass

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        return 0


# Each builds a store over the KV cache of a single rank.
PAGE_STORES: Registry[Callable[[KVCache], PageStore]] = {
    "none": NoPageStore,
    "host": "minisgl.kvcache.host_store:host_store",
    "disk": "minisgl.kvcache.disk_store:DiskStore",
}


class PageOffloader:
    """Names the prefix cache's pages and moves them to and from a `PageStore`.

    A name is a 128-bit hash of all tokens from the start of the prompt to the page's end: safe from collisions by
    chance, not from deliberate ones.
    """

    def __init__(self, store: PageStore, page_size: int) -> None:
        self.evicted = 0  # pages that were given to the store
        self.wanted = 0  # whole pages of prompts that the prefix cache did not have when their request was admitted
        self.restored = 0  # of these, pages that the store had
        self._store = store
        self._page_size = page_size
        self._names: dict[int, bytes] = {}  # by page, for all pages that the prefix cache owns
        self._unsettled: list[bytes] = []  # saved while a step ran that may fail, and may have written them
        self._renamed: dict[bytes, bytes] = {}  # names under which the store may have garbage

    @property
    def counts(self) -> dict[str, int]:
        """Pages so far, by what happened to them; restored over wanted is the store's hit rate."""
        return {"evicted": self.evicted, "wanted": self.wanted, "restored": self.restored}

    def note(self, tokens: Int32Array, pages: Int32Array) -> None:
        """Name pages of a prefix that are cached now. ``tokens`` is int32[len(pages) × page_size]."""
        known = len(pages)
        while known and int(pages[known - 1]) not in self._names:  # the others were named when they were cached
            known -= 1
        name = self._names[int(pages[known - 1])] if known else b""
        names = self._names_of(tokens[known * self._page_size :], name)
        self._names.update(zip(pages[known:].tolist(), names, strict=True))

    def extend(self, tokens: Int32Array, page: int, before: int | None) -> None:
        """Name one page more of a prefix, behind the page ``before``."""
        name = b"" if before is None else self._names[before]
        (self._names[page],) = self._names_of(tokens, name)

    def save(self, pages: Int32Array) -> None:
        """Save pages that the prefix cache has evicted."""
        self.evicted += len(pages)
        names = [self._names.pop(page) for page in pages.tolist()]
        self._unsettled += names
        self._store.save(names, pages)

    def settle(self) -> None:
        """Trust all pages saved so far: the steps that wrote them are complete."""
        self._unsettled.clear()

    def forget(self, pages: Int32Array) -> None:
        """Drop the names of evicted pages whose content cannot be trusted, and those of pages saved since `settle`."""
        for page in pages.tolist():
            del self._names[page]
        # A store need not be able to forget, so these prefixes get other names, and the old are never asked for again.
        self._renamed.update((name, xxhash.xxh3_128_digest(b"again" + name)) for name in self._unsettled)
        self._unsettled.clear()

    def restore(self, tokens: Int32Array, first: int, pages: Int32Array) -> int:
        """Fill ``pages`` with a prompt's whole pages from page ``first`` on, and return how many were filled."""
        names = list(self._names_of(tokens, b""))[first:]
        if not names:
            return 0
        restored = self._store.restore(names, pages[: len(names)])
        self.wanted += len(names)
        self.restored += restored
        return restored

    def _names_of(self, tokens: Int32Array, name: bytes) -> Iterator[bytes]:
        """Names of the whole pages of ``tokens``, which follow a page of this ``name``."""
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            page = np.ascontiguousarray(tokens[start : start + self._page_size])
            name = xxhash.xxh3_128_digest(name + page.tobytes())
            while name in self._renamed:
                name = self._renamed[name]
            yield name
