"""Attention in plain PyTorch: the reference that every other backend is compared with.

`grouped_query_attention` is attention itself, `DenseAttention` attends within one step, and `PagedAttention` stores
keys and values in the KV cache first: the base class of all backends over pages, of which `TorchAttention` is the
plainest.
"""

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
from minisgl.context import ATTENTION_FEATURES, AttentionSpec, PagedAttentionBackend
from minisgl.kvcache.pool import KVCache, byte_view
from minisgl.request import Int32Array

# All but cuDNN's, which fails on a mask whose rows are not aligned, as slices of a larger mask are not.
_SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_mask(
    q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Build an additive mask, [B, 1, Q, L]: 0 where a query sees a key, −∞ where it does not.

    Positions are [B, Q] and [B, L]; ``dtype`` is that of the queries. A query sees the last ``window`` positions up to
    its own; None: all.
    """
    q, k = q_positions[:, None, :, None], k_positions[:, None, None, :]
    visible = k <= q
    if window is not None:
        visible &= k > q - window
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap × tanh(x / cap)``: about x where it is small, and never beyond the cap (Gemma 2)."""
    return torch.tanh(x / cap) * cap


def grouped_query_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention in which several query heads share a KV head (GQA, Ainslie et al. 2023).

    Args:
        q: [B, Q, num_heads, head_dim], like the result.
        k, v: [B, L, num_kv_heads, head_dim].
        mask: [B, 1, Q, L], added to the scores; None hides nothing.
        scale: factor on q·k.
    """
    if q.shape[1] == 1:
        # A single query: the heads that share a KV head become the queries of one head, which reads its keys once.
        group = q.squeeze(1).unflatten(1, (k.shape[2], -1))
        return _sdpa(group, k, v, mask, scale).flatten(1, 2).unsqueeze(1)
    return _sdpa(q.transpose(1, 2), k, v, mask, scale).transpose(1, 2)


def attention_of_layer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """`grouped_query_attention`, with the soft cap and the sinks of the layer.

    PyTorch's kernel has no option for these, so they take steps: cap the scores, and add the sinks as a column of
    scores that has no value.
    """
    if spec.soft_cap is None and spec.sinks is None:
        return grouped_query_attention(q, k, v, mask, spec.scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.unflatten(2, (k.shape[2], -1))  # [B, Q, num_kv_heads, group, head_dim]
    scores = torch.einsum("bqhgd,blhd->bhgql", groups, k).to(wide) * spec.scale
    if spec.soft_cap is not None:
        scores = soft_cap(scores, spec.soft_cap)
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    if spec.sinks is not None:
        column = spec.sinks.to(wide).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    return torch.einsum("bhgql,blhd->bqhgd", weights.to(v.dtype), v).flatten(2, 3)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Call PyTorch's kernel. ``q`` and the result are [B, heads, Q, head_dim]."""
    with sdpa_kernel(_SDPA_BACKENDS) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=q.shape[1] > k.shape[2]
        )


class DenseAttention:
    """Attend to the tokens of this step alone, without a KV cache: right for whole prompts only."""

    capturable = False
    captures_prefill = False

    def __init__(self) -> None:
        self._bounds: list[int] = []

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        self._bounds = batch.cu_seqlens_q.tolist()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        out = torch.empty_like(q)
        for start, stop in zip(self._bounds, self._bounds[1:], strict=False):
            row = slice(start, stop)
            positions = torch.arange(stop - start, device=q.device)[None]
            mask = causal_mask(positions, positions, spec.sliding_window, q.dtype)
            out[row] = attention_of_layer(q[None, row], k[None, row], v[None, row], mask, spec)[0]
        return out


class PagedAttention(PagedAttentionBackend):
    """Base class of the backends over a `KVCache`: store a step's keys and values, then attend over pages.

    The cache may have a narrower dtype than the queries; what is read is converted. Only written positions are read.
    """

    kv_cache: KVCache
    capturable: bool = False
    captures_prefill: bool = False
    features: frozenset[str] = frozenset()

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self.inputs: DeviceBatch  # of the current step

    @abstractmethod
    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Prepare for a step, and set ``inputs``; as `AttentionBackend.plan`."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        # All rows are stored first: a row may read pages that another row of the step writes.
        self.kv_cache.store(spec.layer_id, k, v, self.inputs.locs_of(spec.sliding_window))
        return self.attend(q, spec)


# Most queries of a prefill row that are attended in one call: bounds the mask and the work above the diagonal.
_QUERY_TILE = 256

# Most keys that several decode rows gather together: the copy is read while it is still in the processor's cache.
_GROUP_KEYS = 4096


class TorchAttention(PagedAttention):
    """Gather keys and values from pages, then attend with PyTorch: decode rows padded, prefill rows in tiles."""

    features = ATTENTION_FEATURES

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        self._batch: Batch
        self._layouts: dict[int | None, _StepLayout] = {}
        # Gathered keys and values. Fresh memory for every layer would cost more than the copy itself.
        self._scratch = torch.empty((2, 0, *kv_cache.k.shape[3:]), dtype=kv_cache.k.dtype, device=kv_cache.k.device)

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        # The first layer of each window makes the layout, and the others share it.
        self._batch, self.inputs = batch, inputs
        self._layouts.clear()

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        layout = self._layout(spec.sliding_window)
        if layout.order is not None:
            q = q.index_select(0, layout.order)
        parts: list[torch.Tensor] = []
        for group in layout.groups:
            keys, values = self._gather(group.locs, spec.layer_id)
            for tile in group.tiles:
                queries = q[tile.queries].view(len(keys), -1, *q.shape[1:])
                out = attention_of_layer(queries, keys[:, tile.keys], values[:, tile.keys], tile.mask, spec)
                parts.append(out.flatten(0, 1))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended if layout.inverse is None else attended.index_select(0, layout.inverse)

    def _gather(self, locs: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read keys and values at ``locs``, [B, L, num_kv_heads, head_dim] each, into memory that the next call reuses.

        If the cache is narrower than the computation, the results are converted copies.
        """
        cache, gathered = self.kv_cache, self._scratch[:, : locs.numel()]
        for memory, out in zip(cache.layer(layer), gathered, strict=True):
            torch.index_select(byte_view(memory).flatten(0, 1), 0, locs.flatten(), out=byte_view(out))
        keys, values = gathered.to(cache.dtype).unflatten(1, locs.shape)
        return keys, values

    def _layout(self, window: int | None) -> _StepLayout:
        if window not in self._layouts:
            layout = self._layouts[window] = self._make_layout(window)
            most = max(group.locs.numel() for group in layout.groups)
            if most > self._scratch.shape[1]:
                self._scratch = self._scratch.new_empty((2, most, *self._scratch.shape[2:]))
        return self._layouts[window]

    def _make_layout(self, window: int | None) -> _StepLayout:
        """Lay out decode rows by length, then prefill rows one by one."""
        batch = self._batch
        starts = np.zeros_like(batch.seq_lens)  # first position that any query of the row sees
        if window is not None:
            starts = np.maximum(batch.seq_lens - batch.q_lens + 1 - window, 0)
        groups: list[_RowGroup] = []
        order: list[int] = []
        for rows in _similar_lengths(batch.seq_lens[: batch.num_decode] - starts[: batch.num_decode]):
            groups.append(self._decode_group(rows, starts[rows], window, len(order)))
            order += rows
        band = self._causal_band(window) if batch.num_decode < batch.num_rows else None
        for row in range(batch.num_decode, batch.num_rows):
            assert band is not None
            groups.append(self._prefill_group(row, int(starts[row]), window, band))
        if order == sorted(order):
            return _StepLayout(tuple(groups), None, None)
        tokens = np.arange(batch.num_tokens, dtype=np.int32)
        tokens[: batch.num_decode] = order
        return _StepLayout(tuple(groups), self._tensor(tokens), self._tensor(np.argsort(tokens).astype(np.int32)))

    def _decode_group(self, rows: list[int], starts: Int32Array, window: int | None, first_query: int) -> _RowGroup:
        """One query a row, all in one tile; shorter rows are padded."""
        lengths = self._batch.seq_lens[rows] - starts
        locs = self._locs(rows, starts, int(lengths.max()), window)
        mask = None
        if lengths.min() < lengths.max():
            offsets = torch.arange(locs.shape[1], dtype=torch.int32, device=locs.device)
            k_positions = self._tensor(starts)[:, None] + offsets
            q_positions = self._tensor(self._batch.seq_lens[rows] - 1)[:, None]
            mask = causal_mask(q_positions, k_positions, window, self.kv_cache.dtype)
        tile = _QueryTile(slice(first_query, first_query + len(rows)), slice(None), mask)
        return _RowGroup(locs, (tile,))

    def _prefill_group(self, row: int, start: int, window: int | None, band: torch.Tensor) -> _RowGroup:
        """The consecutive queries of one row, cut into tiles; each tile sees the keys up to its last position."""
        seq_len, first = int(self._batch.seq_lens[row]), int(self._batch.cu_seqlens_q[row])
        stop = int(self._batch.cu_seqlens_q[row + 1])
        cached = seq_len - (stop - first)
        tiles: list[_QueryTile] = []
        for tile_first in range(first, stop, _QUERY_TILE):
            tile_stop = min(tile_first + _QUERY_TILE, stop)
            position = cached + tile_first - first
            first_key = start if window is None else max(position + 1 - window, start)
            stop_key = position + tile_stop - tile_first
            # In the band, the key at the position of the tile's first query is in column `shape[-1] - _QUERY_TILE`.
            shift = band.shape[-1] - _QUERY_TILE - position
            # A copy, because CUDA kernels want masks that begin on 16-byte boundaries.
            mask = band[:, :, : tile_stop - tile_first, first_key + shift : stop_key + shift].clone()
            tiles.append(_QueryTile(slice(tile_first, tile_stop), slice(first_key - start, stop_key - start), mask))
        return _RowGroup(self._locs([row], np.array([start], dtype=np.int32), seq_len - start, window), tuple(tiles))

    def _causal_band(self, window: int | None) -> torch.Tensor:
        """Build one mask to slice all prefill tiles' masks from, [1, 1, _QUERY_TILE, max_seq_len + _QUERY_TILE].

        Visibility depends only on the distance between query and key, so a later tile's mask is the same one, moved.
        """
        device, dtype = self.kv_cache.k.device, self.kv_cache.dtype
        columns = torch.arange(self._batch.max_seq_len + _QUERY_TILE, dtype=torch.int32, device=device)[None]
        return causal_mask(columns[:, -_QUERY_TILE:], columns, window, dtype)

    def _locs(self, rows: list[int], starts: Int32Array, count: int, window: int | None) -> torch.Tensor:
        """int32[B, count] locations of the positions ``starts …`` of each row; past its end, its last one again."""
        page_table, page_size = self.inputs.table_of(window), self.kv_cache.page_size
        slots = self._tensor(self._batch.slots[rows])[:, None]
        last = self._tensor(self._batch.seq_lens[rows] - 1)[:, None]
        offsets = torch.arange(count, dtype=torch.int32, device=page_table.device)
        positions = torch.minimum(self._tensor(starts)[:, None] + offsets, last)
        return page_table[slots, positions // page_size] * page_size + positions % page_size

    def _tensor(self, values: Int32Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.kv_cache.k.device)


def _similar_lengths(lengths: Int32Array) -> list[list[int]]:
    """Group rows, at most `_GROUP_KEYS` keys each; padding costs a row at most a third of its length, or 64 keys."""
    groups: list[list[int]] = []
    longest = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        if not groups or longest - length > max(64, length // 3) or longest * (len(groups[-1]) + 1) > _GROUP_KEYS:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Queries that are attended in one call."""

    queries: slice  # of the queries in layout order; a reshape makes them [B, Q]
    keys: slice  # of the group's keys that they may see
    mask: torch.Tensor | None  # as `causal_mask` returns; None if they see all of these keys


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows whose keys and values are gathered together: decode rows of similar length, or one prefill row."""

    locs: torch.Tensor  # int32[B, L] where the keys of each row are in the cache
    tiles: tuple[_QueryTile, ...]  # the rows' queries


@dataclass(frozen=True, slots=True)
class _StepLayout:
    """How a step is cut up, for all layers with the same window."""

    groups: tuple[_RowGroup, ...]
    order: torch.Tensor | None  # int32[T] flat token of each query in layout order; None if the orders are the same
    inverse: torch.Tensor | None  # int32[T] and back
