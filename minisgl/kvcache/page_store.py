"""A second memory for pages: larger and slower than the first, it takes what a prefix cache gives up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minisgl.core.registry import Table
from minisgl.core.request import Int32Array
from minisgl.kvcache.kv_cache import KVCache


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


PAGE_STORES: Table[Callable[[KVCache], PageStore]] = {"none": NoPageStore}
