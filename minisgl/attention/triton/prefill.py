"""Prefill attention in Triton: many query tokens a row, each of which sees the keys up to its own.

Prefill is bound by arithmetic, so queries are taken in tiles that fill the tensor cores (FlashAttention-2, Dao 2023). A
tile holds all query heads that share a KV head: keys are loaded once, and short chunks fill a tile too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from minisgl.attention.triton.tiles import LOG2_E, attend_keys, running_values
from minisgl.batch import Batch, DeviceBatch, to_device
from minisgl.context import AttentionSpec

_LONG = 2048  # queries of a row from which on large tiles pay: they share more loads, but the last one is emptier

# Pieces of packed copies. Triton would compile a kernel for each combination of those that happen to be aligned.
_UNALIGNED = ["tile_rows_ptr", "tile_begins_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "slots_ptr"]


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def prefill_kernel(
    q_ptr,  # [T, KV_HEADS × GROUP, HEAD_DIM], any strides but the last
    k_cache_ptr,  # a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    out_ptr,  # [T, KV_HEADS × GROUP, HEAD_DIM]
    tile_rows_ptr,  # int32[tiles]
    tile_begins_ptr,  # int32[tiles]
    seq_lens_ptr,  # int32[R]
    cu_seqlens_q_ptr,  # int32[R + 1]
    slots_ptr,  # int32[R]
    page_table_ptr,  # int32[slots, table_width]
    sinks_ptr,  # [KV_HEADS × GROUP], if SINKS
    scale,  # × log2(e)
    token_stride,
    head_stride,
    table_width,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no sliding window
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries a tile
    BLOCK_N: tl.constexpr,  # keys a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM or more
):
    """Program (h, t): the queries of tile t in all heads that share KV head h, over all keys that they see.

    A tile is the queries ``begin … begin + BLOCK_M`` of a row. Query i is token i // GROUP of the row, in head i %
    GROUP of the KV head's group.
    """
    kv_head = tl.program_id(0)
    row = tl.load(tile_rows_ptr + tl.program_id(1))
    begin = tl.load(tile_begins_ptr + tl.program_id(1))
    seq_len = tl.load(seq_lens_ptr + row)
    row_begin = tl.load(cu_seqlens_q_ptr + row)
    q_len = tl.load(cu_seqlens_q_ptr + row + 1) - row_begin
    page_row = page_table_ptr + tl.load(slots_ptr + row) * table_width

    index = begin + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = tl.minimum(index // GROUP, q_len - 1)  # past the row's end, its last one again
    heads = kv_head * GROUP + index % GROUP
    mask = (index < q_len * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = q_ptr + (row_begin + token)[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(pointers, mask, other=0.0)

    visible_end = seq_len - q_len + token + 1
    seen_by_all = seq_len - q_len + begin // GROUP + 1
    end = seq_len - q_len + tl.minimum((begin + BLOCK_M - 1) // GROUP, q_len - 1) + 1
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum, row_max = running_values(sinks_ptr, heads, index < q_len * GROUP, True, SINKS, BLOCK_M)
    if WINDOW > 0:
        start = tl.maximum(seen_by_all - WINDOW, 0)
    else:
        start = seen_by_all // BLOCK_N * BLOCK_N
        acc, row_sum, row_max = attend_keys(
            q, k_cache_ptr, v_cache_ptr, page_row, kv_head, 0, start, visible_end,
            scale, acc, row_sum, row_max, False, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, row_sum, row_max = attend_keys(
        q, k_cache_ptr, v_cache_ptr, page_row, kv_head, start, end, visible_end,
        scale, acc, row_sum, row_max, True, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    pointers = out_ptr + ((row_begin + token) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The prefill rows of a step, cut into tiles of queries."""

    rows: torch.Tensor  # int32[tiles], as `tile_rows` of the kernel
    begins: torch.Tensor  # int32[tiles], as `tile_begins`
    block_m: int  # queries a tile
    block_n: int  # keys a tile


def tile_shape(q: torch.Tensor, longest: int) -> tuple[int, int]:
    """Queries and keys of a tile, as measured on an H200; ``longest`` is the largest number of queries of a row."""
    if q.dtype == torch.float32:  # no tensor cores; the multiplications are unrolled
        return 16, 32
    if q.shape[-1] > 128:
        return 64, 32
    return (128, 128) if longest >= _LONG else (64, 64)


def query_tiles(batch: Batch, group: int, q: torch.Tensor) -> QueryTiles:
    """Cut the prefill rows of a step into tiles of queries, those with most keys first, since they take longest.

    ``group`` is the number of query heads that share a KV head. Of ``q`` only width, dtype and device matter.
    """
    num_queries = batch.q_lens[batch.num_decode :] * group
    block_m, block_n = tile_shape(q, int(num_queries.max()))
    counts = -(-num_queries // block_m)
    rows = np.repeat(np.arange(batch.num_decode, batch.num_rows, dtype=np.int32), counts)
    ordinal = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    begins = ordinal * block_m
    num_keys = (batch.seq_lens - batch.q_lens)[rows] + begins // group
    order = np.argsort(-num_keys, kind="stable")
    staged = to_device({"rows": rows[order], "begins": begins[order].astype(np.int32)}, q.device)
    return QueryTiles(staged["rows"], staged["begins"], block_m, block_n)


def paged_prefill_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    tiles: QueryTiles,
) -> None:
    """Attend for the prefill rows of a step, cut into ``tiles``.

    ``q`` and ``out`` are [T, num_heads, head_dim] of the whole step; ``out`` is contiguous, its prefill rows written.
    """
    page_size, kv_heads = k_cache.shape[1:3]
    block_d = max(16, triton.next_power_of_2(spec.head_dim))
    page_table = inputs.table_of(spec.sliding_window)
    prefill_kernel[(kv_heads, len(tiles.rows))](
        q,
        k_cache,
        v_cache,
        out,
        tiles.rows,
        tiles.begins,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
        inputs.slots,
        page_table,
        spec.sinks,
        spec.scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        SINKS=spec.sinks is not None,
        WINDOW=spec.sliding_window or 0,
        PAGE_SIZE=page_size,
        GROUP=spec.num_heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=spec.head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        num_warps=max(4, tiles.block_m // 16),
        num_stages=3,
    )
