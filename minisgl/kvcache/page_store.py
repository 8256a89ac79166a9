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


PAGE_STORES: Registry[Callable[[KVCache], PageStore]] = {"none": NoPageStore}


class PageOffloader:
    """Names the prefix cache's pages and moves them to and from a `PageStore`.

    A name is a 128-bit hash of all tokens from the start of the prompt to the page's end: safe from collisions by
    chance, not from deliberate ones.
    """

    def __init__(self, store: PageStore, page_size: int) -> None:
        self._store = store
        self._page_size = page_size
        self._names: dict[int, bytes] = {}  # by page, for all pages that the prefix cache owns

    def note(self, tokens: Int32Array, pages: Int32Array) -> None:
        """Name pages of a prefix that are cached now. ``tokens`` is int32[len(pages) × page_size]."""
        self._names.update(zip(pages.tolist(), self._names_of(tokens), strict=True))

    def save(self, pages: Int32Array) -> None:
        """Save pages that the prefix cache has evicted."""
        self._store.save([self._names.pop(page) for page in pages.tolist()], pages)

    def forget(self, pages: Int32Array) -> None:
        """Drop the names of evicted pages whose content cannot be trusted."""
        for page in pages.tolist():
            del self._names[page]

    def restore(self, tokens: Int32Array, first: int, pages: Int32Array) -> int:
        """Fill ``pages`` with a prompt's whole pages from page ``first`` on, and return how many were filled."""
        names = list(self._names_of(tokens))[first:]
        return self._store.restore(names, pages[: len(names)]) if names else 0

    def _names_of(self, tokens: Int32Array) -> Iterator[bytes]:
        name = b""
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            page = np.ascontiguousarray(tokens[start : start + self._page_size])
            name = xxhash.xxh3_128_digest(name + page.tobytes())
            yield name
