"""The page table: from a position in a sequence to the page that holds its keys and values."""

from __future__ import annotations

import numpy as np

from minisgl.core.request import Int32Array

_ALIGNMENT = 32  # int32 entries: rows start on 128-byte boundaries


def table_width(max_seq_len: int, page_size: int) -> int:
    """Entries of a row: pages of the longest sequence, rounded up to 32 entries (128 bytes)."""
    pages = -(-max_seq_len // page_size)
    return -(-pages // _ALIGNMENT) * _ALIGNMENT


class PageTable:
    """Host page table with a log of what changed, so that a device copy can follow.

    Entry ``rows[slot, i]`` is the page of positions ``i × page_size … (i + 1) × page_size − 1``. Entries past a
    request's pages are stale and never read. The extra last row points to the dummy page, whose id is one past the
    pool's last: a padded batch row may read and write there without harm.

    Args:
        max_running: number of slots; the table has one row more.
        max_seq_len: longest sequence, in tokens.
        page_size: tokens a page.
        dummy_page: page id of the padding.
    """

    def __init__(self, max_running: int, max_seq_len: int, page_size: int, dummy_page: int) -> None:
        self.page_size = page_size
        self.dummy_page = dummy_page
        self.rows = np.full((max_running + 1, table_width(max_seq_len, page_size)), dummy_page, dtype=np.int32)
        self._changed: list[Int32Array] = []

    def write(self, slot: int, start: int, pages: Int32Array) -> None:
        """Set entries ``start … start + len(pages)`` of one row."""
        self.rows[slot, start : start + len(pages)] = pages
        first = slot * self.rows.shape[1] + start
        self._changed.append(np.arange(first, first + len(pages), dtype=np.int32))

    def append(self, slots: Int32Array, columns: Int32Array, pages: Int32Array) -> None:
        """Set one entry in each of several rows: ``rows[slots[i], columns[i]] = pages[i]``."""
        self.rows[slots, columns] = pages
        self._changed.append(slots * np.int32(self.rows.shape[1]) + columns)

    def take_changes(self) -> tuple[Int32Array, Int32Array]:
        """Flat indices (int32[U], ascending) and current values of all entries written since the last call."""
        if not self._changed:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        index = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        return index, self.rows.reshape(-1)[index]
