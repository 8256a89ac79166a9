"""Paged attention in plain PyTorch: the reference that every other backend is compared with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec, PagedAttentionBackend
from minisgl.kvcache.pool import KVCache, byte_view
from minisgl.request import Int32Array

# All but cuDNN's, which fails on a mask whose rows are not aligned, as slices of a larger mask are not.
_CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_mask(
    q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask: 0 where the key is visible, −∞ where it is not.

    Args:
        q_positions: [B, Q] positions of the queries.
        k_positions: [B, L] positions of the keys.
        window: number of most recent positions a query sees, its own included; None sees all before.
        dtype: of the queries.

    Returns:
        [B, 1, Q, L].
    """
    q, k = q_positions[:, None, :, None], k_positions[:, None, None, :]
    visible = k <= q
    if window is not None:
        visible &= k > q - window
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def grouped_query_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention in which several query heads share a KV head (GQA, Ainslie et al. 2023).

    Args:
        q: [B, Q, num_heads, head_dim].
        k, v: [B, L, num_kv_heads, head_dim].
        mask: [B, 1, Q, L] added to the scores; None hides nothing.
        scale: factor on q·k.

    Returns:
        [B, Q, num_heads, head_dim].
    """
    if q.shape[1] == 1:
        # A single query: the heads that share a KV head become the queries of one head, which reads its keys once.
        group = q.squeeze(1).unflatten(1, (k.shape[2], -1))
        return _sdpa(group, k, v, mask, scale).flatten(1, 2).unsqueeze(1)
    return _sdpa(q.transpose(1, 2), k, v, mask, scale).transpose(1, 2)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """PyTorch's kernel. ``q`` and the result are [B, heads, Q, head_dim]; the rest as above."""
    with sdpa_kernel(_CUDA_KERNELS) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=q.shape[1] > k.shape[2]
        )


class DenseAttention:
    """An `AttentionBackend` in which every row attends to this step's own tokens and to nothing before.

    Right for whole prompts only; a step that continues a sequence would have to remember its keys and values.
    """

    capturable = False

    def __init__(self) -> None:
        self._bounds: list[int] = []

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        """Note where each row begins and ends."""
        self._bounds = batch.cu_seqlens_q.tolist()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attend row by row; see `AttentionBackend.forward`."""
        out = torch.empty_like(q)
        for start, stop in zip(self._bounds, self._bounds[1:], strict=False):
            row = slice(start, stop)
            positions = torch.arange(stop - start, device=q.device)[None]
            mask = causal_mask(positions, positions, spec.sliding_window, q.dtype)
            out[row] = grouped_query_attention(q[None, row], k[None, row], v[None, row], mask, spec.scale)[0]
        return out


class PagedAttention(PagedAttentionBackend):
    """An `AttentionBackend` over a `KVCache`. Only positions that were written are ever read. What is read is converted
    to the dtype of the queries, which the cache may be narrower than.

    Args:
        kv_cache: where keys and values live.
    """

    kv_cache: KVCache
    capturable: bool = False

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self.inputs: DeviceBatch
        """Of the current step."""

    @abstractmethod
    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """See `AttentionBackend.plan`. Sets ``inputs``."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Store all rows' keys and values first: a row may read pages that another row of the step writes."""
        self.kv_cache.store(spec.layer_id, k, v, self.inputs.out_locs)
        return self.attend(q, spec)


_QUERY_TILE = 256
"""Most queries of a prefill row that are attended in one call: bounds the mask and the work above the diagonal."""


_GROUP_KEYS = 4096
"""Most keys that several decode rows gather together: the copy is read while it is still in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that are attended in one call.

    Args:
        queries: slice of the queries in layout order; a reshape makes them [B, Q].
        keys: slice of the group's keys that they may see.
        mask: as `causal_mask` returns; None if they see all of these keys.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows whose keys and values are gathered together: decode rows of similar length, or one prefill row.

    Args:
        locs: int32[B, L] where the keys of each row are in the cache.
        tiles: the rows' queries.
    """

    locs: torch.Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a step is cut up, for all layers with the same window.

    Args:
        groups: in layout order.
        order, inverse: int32[T] flat token of each query in layout order, and back; None if the orders are the same.
    """

    groups: tuple[_Group, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None


class TorchAttention(PagedAttention):
    """Gathers each row's pages, then attends with PyTorch's own kernel.

    Args:
        kv_cache: where keys and values live.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        self._batch: Batch
        self._layouts: dict[int | None, _Layout] = {}
        # Gathered keys and values. Fresh memory for every layer would cost more than the copy itself.
        self._scratch = torch.empty((2, 0, *kv_cache.k.shape[3:]), dtype=kv_cache.k.dtype, device=kv_cache.k.device)

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        """Start a step. Its layout is made by the first layer of each window, and shared by the others."""
        self._batch, self.inputs = batch, inputs
        self._layouts.clear()

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        layout = self._layout(spec.sliding_window)
        if layout.order is not None:
            q = q.index_select(0, layout.order)
        parts: list[torch.Tensor] = []
        for group in layout.groups:
            keys, values = self._gather(group.locs, spec.layer_id)
            for tile in group.tiles:
                queries = q[tile.queries].view(len(keys), -1, *q.shape[1:])
                out = grouped_query_attention(queries, keys[:, tile.keys], values[:, tile.keys], tile.mask, spec.scale)
                parts.append(out.flatten(0, 1))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended if layout.inverse is None else attended.index_select(0, layout.inverse)

    def _gather(self, locs: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``locs``, [B, L, num_kv_heads, head_dim] each, in memory that the next call reuses; or in
        memory of their own if the cache is narrower than what is computed in."""
        cache, gathered = self.kv_cache, self._scratch[:, : locs.numel()]
        for memory, out in zip((cache.k[layer], cache.v[layer]), gathered, strict=True):
            torch.index_select(byte_view(memory).flatten(0, 1), 0, locs.flatten(), out=byte_view(out))
        keys, values = gathered.to(cache.dtype).unflatten(1, locs.shape)
        return keys, values

    def _layout(self, window: int | None) -> _Layout:
        if window not in self._layouts:
            layout = self._layouts[window] = self._make_layout(window)
            most = max(group.locs.numel() for group in layout.groups)
            if most > self._scratch.shape[1]:
                self._scratch = self._scratch.new_empty((2, most, *self._scratch.shape[2:]))
        return self._layouts[window]

    def _make_layout(self, window: int | None) -> _Layout:
        """Decode rows by length, then prefill rows one by one."""
        batch = self._batch
        starts = np.zeros_like(batch.seq_lens)  # first position that any query of the row sees
        if window is not None:
            starts = np.maximum(batch.seq_lens - batch.q_lens + 1 - window, 0)
        groups: list[_Group] = []
        order: list[int] = []
        for rows in _similar_lengths(batch.seq_lens[: batch.num_decode] - starts[: batch.num_decode]):
            groups.append(self._decode_group(rows, starts[rows], window, len(order)))
            order += rows
        band = self._causal_band(window) if batch.num_decode < batch.num_rows else None
        for row in range(batch.num_decode, batch.num_rows):
            assert band is not None
            groups.append(self._prefill_group(row, int(starts[row]), window, band))
        if order == sorted(order):
            return _Layout(tuple(groups), None, None)
        tokens = np.arange(batch.num_tokens, dtype=np.int32)
        tokens[: batch.num_decode] = order
        return _Layout(tuple(groups), self._tensor(tokens), self._tensor(np.argsort(tokens).astype(np.int32)))

    def _decode_group(self, rows: list[int], starts: Int32Array, window: int | None, first_query: int) -> _Group:
        """One query a row, all in one tile; shorter rows are padded."""
        lengths = self._batch.seq_lens[rows] - starts
        locs = self._locs(rows, starts, int(lengths.max()))
        mask = None
        if lengths.min() < lengths.max():
            offsets = torch.arange(locs.shape[1], dtype=torch.int32, device=locs.device)
            k_positions = self._tensor(starts)[:, None] + offsets
            q_positions = self._tensor(self._batch.seq_lens[rows] - 1)[:, None]
            mask = causal_mask(q_positions, k_positions, window, self.kv_cache.dtype)
        tile = _Tile(slice(first_query, first_query + len(rows)), slice(None), mask)
        return _Group(locs, (tile,))

    def _prefill_group(self, row: int, start: int, window: int | None, band: torch.Tensor) -> _Group:
        """The consecutive queries of one row, cut into tiles; each tile sees the keys up to its last position."""
        seq_len, first = int(self._batch.seq_lens[row]), int(self._batch.cu_seqlens_q[row])
        stop = int(self._batch.cu_seqlens_q[row + 1])
        cached = seq_len - (stop - first)
        tiles: list[_Tile] = []
        for tile_first in range(first, stop, _QUERY_TILE):
            tile_stop = min(tile_first + _QUERY_TILE, stop)
            position = cached + tile_first - first
            first_key = start if window is None else max(position + 1 - window, start)
            stop_key = position + tile_stop - tile_first
            # In the band, the key at the position of the tile's first query is in column `shape[-1] - _QUERY_TILE`.
            shift = band.shape[-1] - _QUERY_TILE - position
            # A copy, because CUDA kernels want masks that begin on 16-byte boundaries.
            mask = band[:, :, : tile_stop - tile_first, first_key + shift : stop_key + shift].clone()
            tiles.append(_Tile(slice(tile_first, tile_stop), slice(first_key - start, stop_key - start), mask))
        return _Group(self._locs([row], np.array([start], dtype=np.int32), seq_len - start), tuple(tiles))

    def _causal_band(self, window: int | None) -> torch.Tensor:
        """One mask of which those of all prefill tiles are slices, [1, 1, _QUERY_TILE, max_seq_len + _QUERY_TILE].

        Whether a key is visible depends only on its distance to the query, so moving a tile along the sequence moves
        its mask along the columns.
        """
        device, dtype = self.kv_cache.k.device, self.kv_cache.dtype
        columns = torch.arange(self._batch.max_seq_len + _QUERY_TILE, dtype=torch.int32, device=device)[None]
        return causal_mask(columns[:, -_QUERY_TILE:], columns, window, dtype)

    def _locs(self, rows: list[int], starts: Int32Array, count: int) -> torch.Tensor:
        """int32[B, count] locations of the positions ``starts …`` of each row; past its end, its last one again."""
        page_table, page_size = self.inputs.page_table, self.kv_cache.page_size
        slots = self._tensor(self._batch.slots[rows])[:, None]
        last = self._tensor(self._batch.seq_lens[rows] - 1)[:, None]
        offsets = torch.arange(count, dtype=torch.int32, device=page_table.device)
        positions = torch.minimum(self._tensor(starts)[:, None] + offsets, last)
        return page_table[slots, positions // page_size] * page_size + positions % page_size

    def _tensor(self, values: Int32Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.kv_cache.k.device)


def _similar_lengths(lengths: Int32Array) -> list[list[int]]:
    """Groups of at most `_GROUP_KEYS` keys, in which padding costs a row at most a third of its length, or 64 keys."""
    groups: list[list[int]] = []
    longest = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        if not groups or longest - length > max(64, length // 3) or longest * (len(groups[-1]) + 1) > _GROUP_KEYS:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]
