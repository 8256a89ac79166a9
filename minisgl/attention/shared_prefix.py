"""Which running requests begin with the same pages, so that attention may read those once for all of them.

The radix tree gives every request that begins with a cached prefix the same pages, and re-points a request to the
tree's pages when it turns out to have computed a duplicate. So the tree's shared paths can be read off the page table:
equal page ids from column 0 on are a shared path, and their number is its length. That holds for every prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.core import Batch
from minisgl.core.request import Int32Array

_UNKNOWN = -1
"""In the mirror: an entry that no step has named yet. It equals nothing, not even itself."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Rows of a step that share a prefix, of which each row is in one group at most. int32 arrays.

    Args:
        shared_lens: [R] tokens of the prefix that the row shares with its group; 0 is no group.
        members: rows of the first group, then of the second …
        ends: [groups] where each group ends in ``members``.
        lens: [groups] tokens of the group's prefix.
    """

    shared_lens: Int32Array
    members: Int32Array
    ends: Int32Array
    lens: Int32Array

    def __len__(self) -> int:
        return len(self.lens)

    @property
    def saved(self) -> int:
        """Tokens whose keys and values need not be read again, over all groups."""
        return int(self.shared_lens.sum() - self.lens.sum())


class SharedPrefixes:
    """Finds the groups of each step's decode rows, from a mirror of the page table on the host.

    Told of every step, in order. Groups are looked for again only when the rows are others than before, or a page
    that was compared has changed; in a steady run of decode steps neither happens.

    Args:
        num_slots, width: shape of the page table.
        page_size: tokens a page.
        dummy_page: page that all entries of the last slot have.
        min_rows, min_tokens: smallest group, and shortest prefix, that count.
    """

    def __init__(
        self, num_slots: int, width: int, page_size: int, dummy_page: int, min_rows: int, min_tokens: int
    ) -> None:
        self.page_size = page_size
        self.min_rows = min_rows
        self.min_pages = -(-min_tokens // page_size)
        self._table = np.full((num_slots, width), _UNKNOWN, dtype=np.int32)
        self._table[-1] = dummy_page
        self._compared = np.zeros(num_slots, dtype=np.int32)
        """Leading columns of each slot that the current groups depend on."""
        self._changed = True
        self._slots: Int32Array = np.zeros(0, dtype=np.int32)
        self._groups = _no_groups(0)

    def update(self, batch: Batch) -> PrefixGroups:
        """Groups among the decode rows of the next step; the same object as long as they stay the same."""
        self._apply(batch.page_index, batch.page_value)
        if batch.num_decode == 0:
            return _no_groups(0)
        slots, seq_lens = batch.slots[: batch.num_decode], batch.seq_lens[: batch.num_decode]
        same_rows = np.array_equal(slots, self._slots) and bool((seq_lens > self._groups.shared_lens).all())
        if self._changed or not same_rows:
            # A row's own part is never empty: the page of the token that it feeds does not count.
            num_pages = (seq_lens - 1) // self.page_size
            table = self._table[slots, : num_pages.max(initial=0)]
            self._groups = find_groups(table, num_pages, self.page_size, self.min_rows, self.min_pages)
            self._slots = slots.copy()
            self._compared[:] = 0
            self._compared[slots] = num_pages
            self._changed = False
        return self._groups

    def _apply(self, index: Int32Array, value: Int32Array) -> None:
        """Follow the page table; see `Batch.page_index`."""
        slots, columns = np.divmod(index, self._table.shape[1])
        flat = self._table.reshape(-1)
        self._changed |= bool(((flat[index] != value) & (columns < self._compared[slots])).any())
        flat[index] = value


def find_groups(
    table: Int32Array, num_pages: Int32Array, page_size: int, min_rows: int, min_pages: int
) -> PrefixGroups:
    """Group rows by the prefix that saves most.

    Requests often share several prefixes of one another: all have the system prompt, some of them a document behind
    it. Each row joins the rows with which it saves most pages, (rows − 1) × shared pages; ties go to the longer prefix.
    Shared lengths are first looked for at ``min_pages``, twice that, four times …: rows that have the same page in a
    column share the whole path to it. The exact common length of each group follows.

    Args:
        table: [R, W] page-table rows.
        num_pages: [R] leading entries that may be shared.
        min_rows, min_pages: of a group.
    """
    num_rows = len(num_pages)
    most_saved = np.zeros(num_rows, dtype=np.int64)
    path = np.full(num_rows, _UNKNOWN, dtype=np.int64)  # the shared path that the row has chosen
    depth = max(min_pages, 1)
    while (num_pages >= depth).sum() >= min_rows:
        rows = np.flatnonzero((num_pages >= depth) & (table[:, depth - 1] != _UNKNOWN))
        ids = table[rows, depth - 1]
        _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        saved = np.where(counts >= min_rows, (counts - 1) * depth, -1)[inverse]
        better = (saved > 0) & (saved >= most_saved[rows])
        most_saved[rows[better]] = saved[better]
        path[rows[better]] = depth * 2**32 + ids[better].astype(np.int64)
        depth *= 2

    rows = np.flatnonzero(path != _UNKNOWN)
    rows = rows[np.argsort(path[rows], kind="stable")]
    _, begins, inverse, counts = np.unique(path[rows], return_index=True, return_inverse=True, return_counts=True)
    if len(rows) == 0:
        return _no_groups(num_rows)
    width = int(num_pages[rows].max())
    equal = table[rows, :width] == table[rows[begins][inverse], :width]
    common = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
    pages = np.minimum.reduceat(np.minimum(common, num_pages[rows]), begins)

    kept = (counts >= min_rows) & (pages >= min_pages)
    member_of_kept = kept[inverse]
    shared_lens = np.zeros(num_rows, dtype=np.int32)
    shared_lens[rows[member_of_kept]] = pages[inverse[member_of_kept]] * page_size
    return PrefixGroups(
        shared_lens,
        rows[member_of_kept].astype(np.int32),
        np.cumsum(counts[kept]).astype(np.int32),
        (pages[kept] * page_size).astype(np.int32),
    )


def _no_groups(num_rows: int) -> PrefixGroups:
    nothing = np.zeros(0, dtype=np.int32)
    return PrefixGroups(np.zeros(num_rows, dtype=np.int32), nothing, nothing, nothing)
