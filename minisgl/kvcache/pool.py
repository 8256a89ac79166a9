"""Pages of KV memory: the free pages, the page table, and the tensors that hold keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.errors import InvariantError
from minisgl.request import Int32Array


class PagePool:
    """Free list over page ids ``0 … num_pages − 1`` (paged attention: vLLM, Kwon et al. 2023)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self.is_free = np.ones(num_pages, dtype=bool)

    @property
    def num_free(self) -> int:
        return self._top

    def alloc(self, count: int) -> Int32Array:
        """Take ``count`` pages, int32[count], the last freed first. `InvariantError` if fewer are free."""
        if count > self._top:
            raise InvariantError(f"{count} pages wanted, {self._top} free: evict before allocating")
        pages = self._stack[self._top - count : self._top][::-1].copy()
        self._top -= count
        self.is_free[pages] = False
        return pages

    def free(self, pages: Int32Array) -> None:
        """Give pages back; raises `InvariantError`, and frees nothing, if one is free already or named twice."""
        if self.is_free[pages].any() or len(set(pages.tolist())) != len(pages):
            raise InvariantError(f"page freed twice among {pages.tolist()}")
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
        self.is_free[pages] = True

    def check(self) -> None:
        """Raise `InvariantError` unless the stack holds each free page exactly once."""
        stack = self._stack[: self._top]
        if len(np.unique(stack)) != self._top or not self.is_free[stack].all() or self.is_free.sum() != self._top:
            raise InvariantError("the free stack and the free flags disagree")


class PageTable:
    """Host page table with a log of its changes, so that a device copy can follow.

    Entry ``rows[slot, i]`` is the page of positions ``i × page_size … (i + 1) × page_size − 1``; entries past a
    request's pages are stale. The last row, beyond the slots, points to the dummy page, one past the pool's last:
    padded batch rows may read and write there.

    With a ``window_dummy`` there is a second table behind the first, for the layers with a sliding window of a model
    that has layers of both kinds: ``window_rows``, whose entries are window pages. Both have one log.
    """

    def __init__(
        self, max_running: int, max_seq_len: int, page_size: int, dummy_page: int, window_dummy: int | None = None
    ) -> None:
        self.page_size = page_size
        self.dummy_page = dummy_page
        self.window_dummy = window_dummy
        dummies = (dummy_page,) if window_dummy is None else (dummy_page, window_dummy)
        shape = (max_running + 1, table_width(max_seq_len, page_size))
        self._tables = np.stack([np.full(shape, dummy, dtype=np.int32) for dummy in dummies])
        self.rows: Int32Array = self._tables[0]
        self.window_rows: Int32Array = self._tables[-1]
        self._changed: list[Int32Array] = []

    def write(self, slot: int, start: int, pages: Int32Array) -> None:
        """Set entries ``start … start + len(pages)`` of one row."""
        self.rows[slot, start : start + len(pages)] = pages
        first = slot * self.rows.shape[1] + start
        self._changed.append(np.arange(first, first + len(pages), dtype=np.int32))

    def write_window(self, slot: int, start: int, window_pages: Int32Array) -> None:
        """Set entries ``start …`` of one row of the second table."""
        self.window_rows[slot, start : start + len(window_pages)] = window_pages
        first = self.rows.size + slot * self.rows.shape[1] + start
        self._changed.append(np.arange(first, first + len(window_pages), dtype=np.int32))

    def append(self, slots: Int32Array, columns: Int32Array, pages: Int32Array) -> None:
        """Set one entry in each of several rows: ``rows[slots[i], columns[i]] = pages[i]``."""
        self.rows[slots, columns] = pages
        self._changed.append(slots * np.int32(self.rows.shape[1]) + columns)

    def take_changes(self) -> tuple[Int32Array, Int32Array]:
        """Flat indices (int32[U], ascending) and current values of all entries written since the last call."""
        if not self._changed:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        index = np.sort(np.concatenate(self._changed))
        index = index[np.diff(index, prepend=-1) > 0]  # `np.unique` takes three times as long for thousands of entries
        self._changed.clear()
        return index, self._tables.reshape(-1)[index]


_ALIGNMENT = 32  # int32 entries: rows start on 128-byte boundaries


def table_width(max_seq_len: int, page_size: int) -> int:
    """Entries of a page-table row: pages of the longest sequence, rounded up to 32 entries (128 bytes)."""
    pages = -(-max_seq_len // page_size)
    return -(-pages // _ALIGNMENT) * _ALIGNMENT


class KVCache:
    """Keys and values of all layers, each [layers, num_pages + 1, page_size, num_kv_heads, head_dim].

    The last page is the dummy page. ``dtype`` is the model's, ``kv_dtype`` the stored one: None means ``dtype``.

    With ``num_window_pages``, the layers that ``windowed`` marks have so many pages instead, in ``window_k`` and
    ``window_v``, and a dummy page; ``k`` and ``v`` hold the others.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        windowed: Sequence[bool] = (),
        num_window_pages: int | None = None,
    ) -> None:
        self.dtype = dtype
        self.num_pages = num_pages
        self.num_window_pages = num_window_pages
        self.page_size = page_size

        def allocate(layers: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Not cleared: a position is always written before it is read. Eight-bit floats need no scale: they keep
            # three bits of mantissa at every magnitude from 2⁻⁶ to 448, and keys and values lie well within that range.
            shape = (layers, pages + 1, page_size, num_kv_heads, head_dim)
            k, v = (torch.empty(shape, dtype=kv_dtype or dtype, device=device) for _ in range(2))
            # Padded graph rows read the dummy page; masked-out garbage must at least be finite.
            k[:, pages].zero_()
            v[:, pages].zero_()
            return k, v

        own_pages = [num_window_pages is not None and each for each in windowed] or [False] * num_layers
        self.k, self.v = allocate(own_pages.count(False), num_pages)
        layers = list(zip(self.k, self.v, strict=True))
        if num_window_pages is not None:
            self.window_k, self.window_v = allocate(own_pages.count(True), num_window_pages)
            groups = iter(layers), iter(zip(self.window_k, self.window_v, strict=True))
            layers = [next(groups[own]) for own in own_pages]
        self._layers = layers

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [pages, page_size, num_kv_heads, head_dim] each, views."""
        return self._layers[layer]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, out_locs: torch.Tensor) -> None:
        """Write this step's keys and values into the memory of one layer.

        ``k`` and ``v`` are [T, num_kv_heads, head_dim]; ``out_locs`` is int32[T], page id × page_size + offset.
        """
        locs = out_locs.long()
        for memory, new in zip(self.layer(layer), (k, v), strict=True):
            byte_view(memory).flatten(0, 1).index_copy_(0, locs, byte_view(to_kv_dtype(new, memory.dtype)))

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Copy whole pages: [2, layers, n, page_size, num_kv_heads, head_dim], keys first, eight-bit floats as bytes.

        ``pages`` is int64[n]. Not for a cache with window pages, which are left out.
        """
        return torch.stack([byte_view(memory).index_select(1, pages) for memory in (self.k, self.v)])

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Put back what `read_pages` returned, into the same or other pages."""
        for memory, saved in zip((self.k, self.v), content, strict=True):
            byte_view(memory).index_copy_(1, pages, saved)


def to_kv_dtype(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Convert to the dtype of the KV memory. Values too large for eight bits become the largest eight-bit number."""
    if kv_dtype.itemsize == 1:  # PyTorch alone would make NaN of them
        largest = torch.finfo(kv_dtype).max
        x = x.clamp(-largest, largest)
    return x.to(kv_dtype)


def byte_view(x: torch.Tensor) -> torch.Tensor:
    """View eight-bit floats as bytes, which PyTorch can index on every device; other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
