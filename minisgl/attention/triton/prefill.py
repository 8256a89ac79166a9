"""Attention of prefill rows: many query tokens a row, each of which sees the keys up to its own.

Here arithmetic counts, not reading, so queries are taken in tiles that fill the tensor cores (FlashAttention-2, Dao
2023). Query heads that share a KV head are rows of one tile: a short chunk behind a long prefix then fills a tile with
a fraction of the tokens, and keys are loaded once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from minisgl.attention.triton.tiles import LOG2_E, LOWEST, attend_keys
from minisgl.batch import Batch, DeviceBatch, to_device
from minisgl.context import AttentionSpec

_LONG = 2048
"""Queries of a row from which on large tiles pay: they share more loads, but the last one is emptier."""


_UNALIGNED = ["tile_rows", "tile_begins", "seq_lens", "cu_seqlens_q", "slots"]
"""Pieces of packed copies. Triton would compile a kernel for each combination of those that happen to be aligned."""


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def prefill_kernel(
    queries,
    keys,
    values,
    out,
    tile_rows,
    tile_begins,
    seq_lens,
    cu_seqlens_q,
    slots,
    page_table,
    scale,
    token_stride,
    head_stride,
    table_width,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (h, t): the queries of tile t in all heads that share KV head h, over all keys that they see.

    Args:
        queries: [T, KV_HEADS × GROUP, HEAD_DIM], any strides but the last.
        keys, values: a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM].
        out: [T, KV_HEADS × GROUP, HEAD_DIM].
        tile_rows, tile_begins: int32[tiles] a tile is the queries ``begin … begin + BLOCK_M`` of this row, where query
            i is token i // GROUP of the row's tokens in head i % GROUP of the KV head's.
        seq_lens, slots: int32[R]. cu_seqlens_q: int32[R + 1]. page_table: int32[slots, table_width].
        scale: times log2(e).
        WINDOW: 0 is none. BLOCK_D: HEAD_DIM or more. BLOCK_N: keys a tile.
    """
    head = tl.program_id(0)
    row = tl.load(tile_rows + tl.program_id(1))
    begin = tl.load(tile_begins + tl.program_id(1))
    length = tl.load(seq_lens + row)
    row_begin = tl.load(cu_seqlens_q + row)
    fed = tl.load(cu_seqlens_q + row + 1) - row_begin
    page_row = page_table + tl.load(slots + row) * table_width

    index = begin + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = tl.minimum(index // GROUP, fed - 1)  # past the row's end, its last one again
    heads = head * GROUP + index % GROUP
    used = (index < fed * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = queries + (row_begin + token)[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(pointers, used, other=0.0)

    seen = length - fed + token + 1
    all_see = length - fed + begin // GROUP + 1
    end = length - fed + tl.minimum((begin + BLOCK_M - 1) // GROUP, fed - 1) + 1
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    if WINDOW > 0:
        start = tl.maximum(all_see - WINDOW, 0)
    else:
        start = all_see // BLOCK_N * BLOCK_N
        acc, total, peak = attend_keys(
            q, keys, values, page_row, head, 0, start, seen, scale, acc, total, peak,
            False, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, total, peak = attend_keys(
        q, keys, values, page_row, head, start, end, seen, scale, acc, total, peak,
        True, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    pointers = out + ((row_begin + token) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, (acc / total[:, None]).to(out.dtype.element_ty), used)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The prefill rows of a step, cut into tiles of queries.

    Args:
        rows, begins: int32[tiles] as in `prefill_kernel`.
        block_m, block_n: queries and keys a tile.
    """

    rows: torch.Tensor
    begins: torch.Tensor
    block_m: int
    block_n: int


def tile_shape(heads: torch.Tensor, longest: int) -> tuple[int, int]:
    """Queries and keys of a tile, measured on an H200.

    Args:
        heads: the queries, for their width and dtype.
        longest: queries of the row that has most.
    """
    if heads.dtype == torch.float32:  # no tensor cores; the multiplications are unrolled
        return 16, 32
    if heads.shape[-1] > 128:
        return 64, 32
    return (128, 128) if longest >= _LONG else (64, 64)


def query_tiles(batch: Batch, group: int, heads: torch.Tensor) -> QueryTiles:
    """Cut up the prefill rows of a step, the tiles with most keys first: they take longest, and should not end last.

    Args:
        batch: the step.
        group: query heads that share a KV head.
        heads: the queries, for their width, dtype and device.
    """
    queries = batch.q_lens[batch.num_decode :] * group
    block_m, block_n = tile_shape(heads, int(queries.max()))
    counts = -(-queries // block_m)
    rows = np.repeat(np.arange(batch.num_decode, batch.num_rows, dtype=np.int32), counts)
    ordinal = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    begins = ordinal * block_m
    num_keys = (batch.seq_lens - batch.q_lens)[rows] + begins // group
    order = np.argsort(-num_keys, kind="stable")
    staged = to_device({"rows": rows[order], "begins": begins[order].astype(np.int32)}, heads.device)
    return QueryTiles(staged["rows"], staged["begins"], block_m, block_n)


def prefill(
    queries: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    tiles: QueryTiles,
) -> None:
    """Launch `prefill_kernel`.

    Args:
        queries, out: [T, num_heads, head_dim] of the whole step; ``out`` is contiguous, and written for prefill rows.
        keys, values: the layer's cache.
        inputs: of the step.
        tiles: its prefill rows.
    """
    page_size, kv_heads = keys.shape[1:3]
    block_d = max(16, triton.next_power_of_2(spec.head_dim))
    prefill_kernel[(kv_heads, len(tiles.rows))](
        queries,
        keys,
        values,
        out,
        tiles.rows,
        tiles.begins,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
        inputs.slots,
        inputs.page_table,
        spec.scale * LOG2_E,
        queries.stride(0),
        queries.stride(1),
        inputs.page_table.stride(0),
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
