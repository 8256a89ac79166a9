"""A store for pages that the prefix cache evicts, and how they come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash

from minisgl.kvcache.pool import KVCache
from minisgl.registry import Registry
from minisgl.request import Int32Array


class PageStore(Protocol):
    """Keeps the content of pages under names. Attention never reads it: what is wanted again is copied back first.

    Built over the `KVCache` that it copies from and to. Both copies are asked for between two steps, in the thread that
    launches them. On a GPU they belong into the current stream, where they come after all steps launched before and
    ahead of the next; nobody has to wait for them then.
    """

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        """Pages are about to be given to somebody else. Keep their content, or not: a store may be full.

        Args:
            names: what is in each page: equal names, equal content.
            pages: int32[len(names)] ids, distinct.
        """
        ...

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        """Fill pages with the content of these names, up to the first name that is not there; counts as a use.

        Args:
            names: of pages that follow each other in a prompt.
            pages: int32[len(names)] ids of pages that may be written.

        Returns:
            How many were filled.
        """
        ...


class NoPageStore:
    """Keeps nothing: what is evicted is computed again."""

    def __init__(self, kv_cache: KVCache) -> None:
        pass

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        pass

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        return 0


PAGE_STORES: Registry[Callable[[KVCache], PageStore]] = {"none": NoPageStore}


class Offload:
    """The name of a page is a hash of all tokens from the beginning of the prompt to the page's end.

    128 bits, so that two prefixes never share a name by chance. (Somebody who wants them to needs a keyed hash.)

    Args:
        store: keeps what is evicted.
        page_size: tokens a page.
    """

    def __init__(self, store: PageStore, page_size: int) -> None:
        self._store = store
        self._page_size = page_size
        self._names: dict[int, bytes] = {}
        """By page, for pages that the prefix cache owns."""

    def note(self, tokens: Int32Array, pages: Int32Array) -> None:
        """These pages of a prefix are cached now. ``tokens``: int32[len(pages) × page_size]."""
        self._names.update(zip(pages.tolist(), self._names_of(tokens), strict=True))

    def save(self, pages: Int32Array) -> None:
        """The prefix cache has given these pages up."""
        self._store.save([self._names.pop(page) for page in pages.tolist()], pages)

    def forget(self, pages: Int32Array) -> None:
        """The same, and their content is not to be trusted."""
        for page in pages.tolist():
            del self._names[page]

    def restore(self, tokens: Int32Array, first: int, pages: Int32Array) -> int:
        """Fill pages with the KV of a prompt from its page ``first`` on.

        Args:
            tokens: whose KV is wanted, int32[any]; only whole pages of them are.
            first: pages that the prompt has already.
            pages: its own pages after those; there may be more than wanted.

        Returns:
            How many were filled.
        """
        names = list(self._names_of(tokens))[first:]
        return self._store.restore(names, pages[: len(names)]) if names else 0

    def _names_of(self, tokens: Int32Array) -> Iterator[bytes]:
        name = b""
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            page = np.ascontiguousarray(tokens[start : start + self._page_size])
            name = xxhash.xxh3_128_digest(name + page.tobytes())
            yield name
