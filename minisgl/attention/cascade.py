"""Cascade attention: decode rows that share a prefix read its keys and values once for all of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention.triton.backend import TritonAttention
from minisgl.attention.triton.merge import PrefixParts
from minisgl.attention.triton.prefix import DevicePrefixGroups, shared_prefix_attention
from minisgl.batch import Batch, DeviceBatch, to_device
from minisgl.context import AttentionSpec
from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array


class CascadeAttention(TritonAttention):
    """Attend in two stages: the rows of a group together over their shared prefix, then each row to its other keys.

    Groups are looked for at every step; their tensors keep their addresses, for CUDA graphs. Layers with a sliding
    window, and captured steps with prefill rows, attend row by row. A group has at least ``min_rows`` rows and
    ``min_tokens`` shared tokens, and the groups of a step must save ``min_saved`` tokens together, to pay for one
    launch more.
    """

    def __init__(self, kv_cache: KVCache, min_rows: int = 4, min_tokens: int = 256, min_saved: int = 8192) -> None:
        super().__init__(kv_cache)
        self.min_rows = min_rows
        self.min_tokens = min_tokens
        self.min_saved = min_saved
        self._tracker: PrefixGroupTracker | None = None
        self._device_groups: dict[int, DevicePrefixGroups] = {}
        self._uploaded: dict[int, PrefixGroups] = {}
        self._shared = False

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Find the groups; return ``"shared"`` if they save enough, as one more kernel is launched then."""
        key = super().plan(batch, inputs)
        if self._tracker is None:
            cache, (num_slots, width) = self.kv_cache, inputs.page_table.shape
            self._tracker = PrefixGroupTracker(
                num_slots, width, cache.page_size, cache.num_pages, self.min_rows, self.min_tokens
            )
        groups = self._tracker.update(batch)  # at every step: it follows the page table
        self._shared = not inputs.padded and len(groups) > 0 and groups.saved_tokens >= self.min_saved
        if not self._shared:
            return key
        if self._uploaded.get(batch.num_decode) is not groups:
            self._upload(groups)
        return "shared"

    def _upload(self, groups: PrefixGroups) -> None:
        # One copy, in stream order: earlier steps may still be running.
        num_rows, device = len(groups.shared_lens), self.kv_cache.k.device
        most = max(1, num_rows // self.min_rows)
        last = groups.ends[-1]
        arrays = {
            "shared_lens": groups.shared_lens,
            "members": np.pad(groups.members, (0, num_rows - len(groups.members))),
            "ends": np.pad(groups.ends, (0, most - len(groups)), constant_values=last),
            "lens": np.pad(groups.lens, (0, most - len(groups))),
        }
        if num_rows not in self._device_groups:
            empty = {name: torch.empty(len(a), dtype=torch.int32, device=device) for name, a in arrays.items()}
            self._device_groups[num_rows] = DevicePrefixGroups(**empty)
        for name, tensor in to_device(arrays, device).items():
            getattr(self._device_groups[num_rows], name).copy_(tensor)
        self._uploaded[num_rows] = groups

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        if self._shared and spec.sliding_window is None:
            tables = self._device_groups[len(q)]
            prefix = shared_prefix_attention(q, *self._layer(spec), self.inputs, spec, tables, self._num_sms)
        super()._decode(q, out, spec, prefix)


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of decode rows with a shared prefix: group g is ``members[ends[g − 1] : ends[g]]``. int32 arrays."""

    shared_lens: Int32Array  # [R] tokens of the prefix that the row shares with its group; 0: no group
    members: Int32Array  # rows of the first group, then of the second …
    ends: Int32Array  # [groups] where each group ends in `members`
    lens: Int32Array  # [groups] tokens of the group's prefix

    def __len__(self) -> int:
        return len(self.lens)

    @property
    def saved_tokens(self) -> int:
        """Tokens whose keys and values are not read again, over all groups."""
        return int(self.shared_lens.sum() - self.lens.sum())


class PrefixGroupTracker:
    """Finds the groups of each step from a host mirror of the page table. It must see every step in order.

    It searches again only if the rows or a page that was compared have changed, which is rare in a run of decode steps.
    """

    def __init__(
        self, num_slots: int, width: int, page_size: int, dummy_page: int, min_rows: int, min_tokens: int
    ) -> None:
        self.page_size = page_size
        self.min_rows = min_rows
        self.min_pages = -(-min_tokens // page_size)
        self._table = np.full((num_slots, width), _UNKNOWN, dtype=np.int32)
        self._dummy_page = dummy_page
        self._table[-1] = dummy_page  # the slot of padded rows
        # Leading columns of each slot that the current groups depend on.
        self._compared = np.zeros(num_slots, dtype=np.int32)
        self._changed = True
        self._slots: Int32Array = np.zeros(0, dtype=np.int32)
        self._groups = _no_groups(0)

    def update(self, batch: Batch) -> PrefixGroups:
        """Find the groups among the next step's decode rows; the same object as long as they stay the same."""
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
        # Follow the page table, and note whether an entry that was compared has changed.
        ours = index < self._table.size  # behind it is the table of layers with a window, which share nothing
        index, value = index[ours], value[ours]
        slots, columns = np.divmod(index, self._table.shape[1])
        flat = self._table.reshape(-1)
        # Two rows that gave pages back share nothing; the last slot is that of padding.
        gave_back = (value == self._dummy_page) & (slots < len(self._table) - 1)
        value = np.where(gave_back, _UNKNOWN, value)
        self._changed |= bool(((flat[index] != value) & (columns < self._compared[slots])).any())
        flat[index] = value


# In the mirror: an entry that no step has named yet. It counts as equal to nothing.
_UNKNOWN = -1


def find_groups(
    table: Int32Array, num_pages: Int32Array, page_size: int, min_rows: int, min_pages: int
) -> PrefixGroups:
    """Group each row with those that share the prefix that saves most: (rows − 1) × shared pages, then the longer one.

    ``table``: [R, W] page-table rows, of which the first ``num_pages``, [R], may be shared. A group has at least
    ``min_rows`` rows and ``min_pages`` pages. We compare columns ``min_pages``, twice that, four times …, since rows
    with the same page in a column share the whole path to it, and then take each group's exact common length.
    """
    num_rows = len(num_pages)
    most_saved = np.zeros(num_rows, dtype=np.int64)
    path = np.full(num_rows, _UNKNOWN, dtype=np.int64)  # the shared path that the row has chosen
    depth = max(min_pages, 1)
    while (num_pages >= depth).sum() >= min_rows:
        rows = np.flatnonzero((num_pages >= depth) & (table[:, depth - 1] != _UNKNOWN))
        ids = table[rows, depth - 1]
        _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        saved_tokens = np.where(counts >= min_rows, (counts - 1) * depth, -1)[inverse]
        better = (saved_tokens > 0) & (saved_tokens >= most_saved[rows])
        most_saved[rows[better]] = saved_tokens[better]
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
