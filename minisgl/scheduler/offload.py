"""Gives names to cached pages, and passes them between a prefix cache and a page store."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from minisgl.core.request import Int32Array
from minisgl.kvcache.page_store import PageStore


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
