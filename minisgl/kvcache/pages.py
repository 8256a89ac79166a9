"""The page pool: which of the equally sized pieces of KV memory are free. Host only, one NumPy stack."""

from __future__ import annotations

import numpy as np

from minisgl.core.request import Int32Array
from minisgl.errors import InvariantError


class PagePool:
    """Free list over page ids ``0 … num_pages − 1`` (paged attention: vLLM, Kwon et al. 2023).

    The pool knows nothing of what a page holds or who uses it; it guarantees that no page is handed out twice.

    Args:
        num_pages: number of pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self.is_free = np.ones(num_pages, dtype=bool)

    @property
    def num_free(self) -> int:
        return self._top

    def alloc(self, count: int) -> Int32Array:
        """Take ``count`` pages, int32[count]; the most recently freed first, as they are likeliest in a cache.

        Raises:
            InvariantError: fewer pages are free. Callers look at `num_free` and evict first.
        """
        if count > self._top:
            raise InvariantError(f"{count} pages wanted, {self._top} free: evict before allocating")
        pages = self._stack[self._top - count : self._top][::-1].copy()
        self._top -= count
        self.is_free[pages] = False
        return pages

    def free(self, pages: Int32Array) -> None:
        """Give pages back.

        Raises:
            InvariantError: a page is free already, or is named twice; nothing is freed then.
        """
        if self.is_free[pages].any() or len(np.unique(pages)) != len(pages):
            raise InvariantError(f"page freed twice among {pages.tolist()}")
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
        self.is_free[pages] = True

    def check(self) -> None:
        """Raise `InvariantError` unless the stack holds each free page exactly once."""
        stack = self._stack[: self._top]
        if len(np.unique(stack)) != self._top or not self.is_free[stack].all() or self.is_free.sum() != self._top:
            raise InvariantError("the free stack and the free flags disagree")
