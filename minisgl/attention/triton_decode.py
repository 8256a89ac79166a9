"""Attention of decode rows: one query token a row, split over the row's keys.

Decoding reads every key and value once and computes next to nothing, so all that counts is that all multiprocessors
read all the time, whatever the lengths of the rows: 256 rows of about a thousand tokens, or one row alone. The idea is
that of FlashDecoding (Dao et al. 2023), split the keys of a row among programs and merge their results; the splits are
those of stream-K (Osama et al. 2023) and lean attention (Sanovar et al. 2024):

1. The keys of all rows, cut into tiles and laid end to end, are one long list.
2. Every program takes an equal share of the list: parts of a few rows, or a small part of one.
3. A row whose keys lie in several shares is merged by the program that is the last to finish its part.

Each program finds its share from ``seq_lens`` on the device, so nothing is planned on the host, and one CUDA graph
serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.attention.triton_tiles import LOG2_E, LOWEST, add_part, load_tile, locate, softmax_step, tile_range
from minisgl.core import AttentionSpec, DeviceBatch

_TILE = 4096
"""Elements of a tile of keys: with as many values, 16 KB in half precision."""


@triton.jit
def first_key(length, shared, WINDOW: tl.constexpr):
    """First key that the last token of a sequence attends to: after the shared prefix, and inside of the window."""
    if WINDOW > 0:
        return tl.maximum(length - WINDOW, shared)
    return shared


@triton.jit
def decode_kernel(
    queries,
    keys,
    values,
    out,
    seq_lens,
    slots,
    page_table,
    part_out,
    part_lse,
    arrived,
    scale,
    num_rows,
    token_stride,
    head_stride,
    table_width,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (h, p): all query heads of KV head h, over the p-th share of all rows' keys.

    Three loops: over the rows in the share, over the tiles of a row in the share, and (for a row in several shares, by
    the last program that finishes) over its parts.

    Args:
        queries: [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last.
        keys, values: a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM].
        out: [R, KV_HEADS × GROUP, HEAD_DIM].
        seq_lens, slots: int32[R]. page_table: int32[slots, table_width].
        part_out: float32[R + programs, KV_HEADS × GROUP, HEAD_DIM] attention of a row over the keys in one share;
            part_lse: float32[R + programs, KV_HEADS × GROUP] log2 of its sum of weights. Part p of row r is in line
            p + r: from one part to the next either p or r grows, so no two have the same.
        arrived: int32[R, KV_HEADS] parts that are done; zeros before and after.
        scale: times log2(e).
        WINDOW: 0 is none. BLOCK_R, BLOCK_M, BLOCK_D: R, GROUP and HEAD_DIM or more. BLOCK_N: keys a tile.
    """
    head = tl.program_id(0)
    program = tl.program_id(1)
    all_rows = tl.arange(0, BLOCK_R)
    lengths = tl.load(seq_lens + all_rows, all_rows < num_rows, other=0)
    tiles = tl.cdiv(lengths - first_key(lengths, 0, WINDOW), BLOCK_N)
    ends = tl.cumsum(tiles, 0)  # of each row in the list of all tiles
    num_tiles = tl.sum(tiles, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(1))
    tile = program * share
    stop = tl.minimum(tile + share, num_tiles)

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + members
    used = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    while tile < stop:
        before = ends <= tile
        row = tl.sum(before.to(tl.int32), 0)
        row_begin = tl.max(tl.where(before, ends, 0), 0)
        length = tl.load(seq_lens + row)
        first = first_key(length, 0, WINDOW)
        row_end = row_begin + tl.cdiv(length - first, BLOCK_N)
        part_end = tl.minimum(row_end, stop)
        page_row = page_table + tl.load(slots + row) * table_width
        pointers = queries + row * token_stride + heads[:, None] * head_stride + dims[None, :]
        q = tl.load(pointers, used, other=0.0)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)
        for start in tile_range(first + (tile - row_begin) * BLOCK_N, first + (part_end - row_begin) * BLOCK_N, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            valid = positions < length
            locations = locate(page_row, positions, valid, PAGE_SIZE)
            k = load_tile(keys, locations, valid, head, KV_HEADS, HEAD_DIM, BLOCK_D)
            v = load_tile(values, locations, valid, head, KV_HEADS, HEAD_DIM, BLOCK_D)
            acc, total, peak = softmax_step(q, k, v, valid[None, :], scale, acc, total, peak, True)

        first_program = row_begin // share
        last_program = (row_end - 1) // share
        complete = True
        if first_program < last_program:
            line = (row + program) * (KV_HEADS * GROUP) + heads
            tl.store(part_out + line[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], used)
            tl.store(part_lse + line, peak + tl.log2(total), members < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + row * KV_HEADS + head
            complete = tl.atomic_add(counter, 1) == last_program - first_program
            if complete:
                tl.store(counter, 0)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                peak = tl.full([BLOCK_M], LOWEST, tl.float32)
                for other in tile_range(first_program, last_program + 1):
                    line = (row + other) * (KV_HEADS * GROUP) + heads
                    pointers = part_out + line[:, None] * HEAD_DIM + dims[None, :]
                    part = tl.load(pointers, used, other=0.0, cache_modifier=".cg")
                    lse = tl.load(part_lse + line, members < GROUP, other=0.0, cache_modifier=".cg")
                    acc, total, peak = add_part(part, lse, acc, total, peak)
        if complete:
            pointers = out + (row * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(pointers, (acc / total[:, None]).to(out.dtype.element_ty), used)
        tile = part_end


def decode(
    queries: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    arrived: torch.Tensor,
    programs: int,
) -> None:
    """Launch `decode_kernel` on the leading rows of a step.

    Args:
        queries, out: [R, num_heads, head_dim] of the rows; ``out`` is contiguous and written.
        keys, values: the layer's cache.
        inputs: of the step, whose first R rows these are.
        arrived: as in `decode_kernel`.
        programs: to be launched, for all KV heads together.
    """
    num_rows, num_heads, head_dim = out.shape
    page_size, kv_heads = keys.shape[1:3]
    group = num_heads // kv_heads
    block_m, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    programs = max(1, programs // kv_heads)
    part_out = torch.empty((num_rows + programs, num_heads, head_dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((num_rows + programs, num_heads), dtype=torch.float32, device=out.device)
    decode_kernel[(kv_heads, programs)](
        queries,
        keys,
        values,
        out,
        inputs.seq_lens,
        inputs.slots,
        inputs.page_table,
        part_out,
        part_lse,
        arrived,
        spec.scale * LOG2_E,
        num_rows,
        queries.stride(0),
        queries.stride(1),
        inputs.page_table.stride(0),
        WINDOW=spec.sliding_window or 0,
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=rows_block(num_rows),
        BLOCK_M=block_m,
        BLOCK_N=min(128, max(16, _TILE // block_d)),
        BLOCK_D=block_d,
        num_warps=max(1, block_m * block_d // 2048),
        num_stages=3,
    )


def rows_block(num_rows: int) -> int:
    """A power of two of at least ``num_rows``. Few different ones, since each is compiled on its own."""
    return 16 if num_rows <= 16 else max(256, triton.next_power_of_2(num_rows))
