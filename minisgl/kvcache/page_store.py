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


class PageNames:
    """Names the pages that the prefix cache owns.

    A name is a 128-bit hash of all tokens from the start of the prompt to the page's end: safe from collisions by
    chance, not from deliberate ones.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._names: dict[int, bytes] = {}  # by page
        self._root = b""  # the name of the prefix of no tokens
        self._renamed: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._names)

    def note(self, tokens: Int32Array, pages: Int32Array) -> list[bytes]:
        """Name pages of a prefix that are cached now; return the new names, which are those of its last pages.

        ``tokens`` is int32[len(pages) × page_size].
        """
        known = len(pages)
        while known and int(pages[known - 1]) not in self._names:  # the others were named when they were cached
            known -= 1
        name = self.of(int(pages[known - 1]) if known else None)
        names = list(self.names_of(tokens[known * self.page_size :], name))
        self._names.update(zip(pages[known:].tolist(), names, strict=True))
        return names

    def extend(self, tokens: Int32Array, page: int, before: int | None) -> bytes:
        """Name one page more of a prefix, behind the page ``before``, and return the name."""
        (self._names[page],) = self.names_of(tokens, self.of(before))
        return self._names[page]

    def of(self, page: int | None) -> bytes:
        """The name of a cached page, or of the start of a prompt."""
        return self._root if page is None else self._names[page]

    def drop(self, pages: Int32Array) -> list[bytes]:
        """Forget evicted pages, and return their names."""
        return [self._names.pop(page) for page in pages.tolist()]

    def rename(self, names: Sequence[bytes]) -> None:
        """Give the prefixes of these names other ones from now on."""
        self._renamed.update((name, xxhash.xxh3_128_digest(b"again" + name)) for name in names)

    def restart(self) -> None:
        """Give all prefixes other names from now on; pages that are cached keep theirs."""
        self._root = xxhash.xxh3_128_digest(b"again" + self._root)

    def names_of(self, tokens: Int32Array, name: bytes) -> Iterator[bytes]:
        """Names of the whole pages of ``tokens``, which follow a page of this ``name``."""
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = np.ascontiguousarray(tokens[start : start + self.page_size])
            name = xxhash.xxh3_128_digest(name + page.tobytes())
            while name in self._renamed:
                name = self._renamed[name]
            yield name


class CacheListener(Protocol):
    """Is told which pages the prefix cache holds, between two steps."""

    def note(self, tokens: Int32Array, pages: Int32Array) -> None:
        """A prefix is cached: its pages, some of them perhaps before. ``tokens`` is int32[len(pages) × page_size]."""
        ...

    def extend(self, tokens: Int32Array, page: int, before: int | None) -> None:
        """One page more of a prefix is cached, behind the page ``before``; None is the start of a prompt."""
        ...

    def save(self, pages: Int32Array) -> None:
        """The cache has evicted pages, whose content stays until the next step."""
        ...

    def forget(self, pages: Int32Array) -> None:
        """The cache has dropped pages whose content cannot be trusted, nor that of pages saved since `settle`."""
        ...

    def settle(self) -> None:
        """All steps that wrote the pages saved so far are complete."""
        ...


class PageOffloader:
    """A `CacheListener` that moves the prefix cache's pages to and from a `PageStore`."""

    def __init__(self, store: PageStore, page_size: int) -> None:
        self.evicted = 0  # pages that were given to the store
        self.wanted = 0  # whole pages of prompts that the prefix cache did not have when their request was admitted
        self.restored = 0  # of these, pages that the store had
        self._store = store
        self._names = PageNames(page_size)
        self._unsettled: list[bytes] = []  # saved while a step ran that may fail, and may have written them

    @property
    def counts(self) -> dict[str, int]:
        """Pages so far, by what happened to them; restored over wanted is the store's hit rate."""
        return {"evicted": self.evicted, "wanted": self.wanted, "restored": self.restored}

    def note(self, tokens: Int32Array, pages: Int32Array) -> None:
        """Name pages of a prefix that are cached now."""
        self._names.note(tokens, pages)

    def extend(self, tokens: Int32Array, page: int, before: int | None) -> None:
        """Name one page more of a prefix, behind the page ``before``."""
        self._names.extend(tokens, page, before)

    def save(self, pages: Int32Array) -> None:
        """Save pages that the prefix cache has evicted."""
        self.evicted += len(pages)
        names = self._names.drop(pages)
        self._unsettled += names
        self._store.save(names, pages)

    def settle(self) -> None:
        """Trust all pages saved so far: the steps that wrote them are complete."""
        self._unsettled.clear()

    def forget(self, pages: Int32Array) -> None:
        """Drop the names of evicted pages whose content cannot be trusted, and those of pages saved since `settle`."""
        self._names.drop(pages)
        # A store need not be able to forget, so these prefixes get other names, and the old are never asked for again.
        self._names.rename(self._unsettled)
        self._unsettled.clear()

    def forget_all(self) -> None:
        """Never again ask for what the store has now."""
        self._names.restart()

    def restore(self, tokens: Int32Array, first: int, pages: Int32Array) -> int:
        """Fill ``pages`` with a prompt's whole pages from page ``first`` on, and return how many were filled."""
        names = list(self._names.names_of(tokens, self._names.of(None)))[first:]
        if not names:
            return 0
        restored = self._store.restore(names, pages[: len(names)])
        self.wanted += len(names)
        self.restored += restored
        return restored
