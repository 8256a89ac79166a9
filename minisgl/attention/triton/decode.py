"""Attention of decode rows: one query token a row, split over the row's keys.

Decoding reads every key and value once and computes next to nothing, so all that counts is that all multiprocessors
read all the time, whatever the lengths of the rows: 256 rows of about a thousand tokens, or one row alone. The idea is
that of FlashDecoding (Dao et al. 2023), split the keys of a row among programs and merge their results; the splits are
those of stream-K (Osama et al. 2023) and lean attention (Sanovar et al. 2024):

1. The keys of all rows, cut into tiles and laid end to end, are one long list.
2. Every program takes an equal share of the list: parts of a few rows, or a small part of one.
3. A second kernel merges the parts of rows that lie in several shares (`triton_merge`).

Each program finds its share from ``seq_lens`` on the device, so nothing is planned on the host, and one CUDA graph
serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.attention.triton.merge import FEW_ROWS, PrefixParts, merge
from minisgl.attention.triton.tiles import LOG2_E, LOWEST, load_tile, softmax_step
from minisgl.batch import DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.kernels.launch import PDL_LAUNCH_ARGS, tile_range

_TILE_BYTES = 16384
"""Of a tile of keys in the queries' dtype; the values are as many again."""


@triton.jit
def key_range(seq_lens, shared_lens, row, exists, SHARED: tl.constexpr, WINDOW: tl.constexpr):
    """First and end of the keys that a row attends to here: behind the shared prefix, and inside of the window."""
    end = tl.load(seq_lens + row, exists, other=0)
    first = end * 0
    if SHARED:
        first = tl.load(shared_lens + row, exists, other=0)
    if WINDOW > 0:
        first = tl.maximum(first, end - WINDOW)
    return first, end


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens", "slots"])
def decode_kernel(
    queries,
    keys,
    values,
    out,
    part_out,
    part_lse,
    seq_lens,
    shared_lens,
    slots,
    page_table,
    scale,
    num_rows,
    token_stride,
    head_stride,
    table_width,
    USE_PDL: tl.constexpr,
    SHARED: tl.constexpr,
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

    One loop over tiles, across the ends of rows: so the next row's keys are on their way while a row ends.

    Args:
        queries: [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last.
        keys, values: a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM].
        out: [R, KV_HEADS × GROUP, HEAD_DIM] written for rows that lie in one share, and have no shared prefix.
        part_out, part_lse: float32[R + programs, KV_HEADS × GROUP, HEAD_DIM] and without the last dimension, written
            for the others: attention over the keys in one share, and log2 of its sum of weights. What share p has of
            row r is in line p + r: from one part to the next either p or r grows, so no two have the same.
        seq_lens, slots: int32[R]. page_table: int32[slots, table_width].
        shared_lens: int32[R] leading keys that are left out, if SHARED.
        scale: times log2(e).
        USE_PDL: whether this is launched before the kernel before it has ended, see `launch.PDL_LAUNCH_ARGS`.
        WINDOW: 0 is none. BLOCK_R, BLOCK_M, BLOCK_D: R, GROUP and HEAD_DIM or more. BLOCK_N: keys a tile.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    program = tl.program_id(1)
    all_rows = tl.arange(0, BLOCK_R)
    all_firsts, all_ends = key_range(seq_lens, shared_lens, all_rows, all_rows < num_rows, SHARED, WINDOW)
    tile_ends = tl.cumsum(tl.cdiv(all_ends - all_firsts, BLOCK_N), 0)  # of each row in the list of all tiles
    num_tiles = tl.max(tile_ends, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = program * share
    stop = tl.minimum(begin + share, num_tiles)

    before = tile_ends <= begin
    row = tl.sum(before.to(tl.int32), 0)
    row_begin = tl.max(tl.where(before, tile_ends, 0), 0)
    first, end = key_range(seq_lens, shared_lens, row, row < num_rows, SHARED, WINDOW)
    slot = tl.load(slots + row, row < num_rows, other=0)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + members
    used = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    if USE_PDL and not SHARED:  # what was read so far was written before the step's first layer
        tl.extra.cuda.gdc_wait()
    for tile in tile_range(begin, stop):
        positions = first + (tile - row_begin) * BLOCK_N + tl.arange(0, BLOCK_N)
        page_row = page_table + slot * table_width
        k, v = load_tile(keys, values, page_row, head, positions, end, True, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D)
        q = tl.load(queries + row * token_stride + heads[:, None] * head_stride + dims[None, :], used, other=0.0)
        visible = (positions < end)[None, :]
        acc, total, peak = softmax_step(q, k, v, visible, scale, acc, total, peak, True)

        row_end = row_begin + tl.cdiv(end - first, BLOCK_N)
        part_ends = tile + 1 == tl.minimum(row_end, stop)
        if part_ends:
            result = acc / total[:, None]
            if not SHARED and row_begin >= begin and row_end <= stop:
                line = row * (KV_HEADS * GROUP) + heads
                tl.store(out + line[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), used)
            else:
                line = (row + program) * (KV_HEADS * GROUP) + heads
                tl.store(part_out + line[:, None] * HEAD_DIM + dims[None, :], result, used)
                tl.store(part_lse + line, peak + tl.log2(total), members < GROUP)
        acc = tl.where(part_ends, 0.0, acc)
        total = tl.where(part_ends, 0.0, total)
        peak = tl.where(part_ends, LOWEST, peak)
        row_ends = tile + 1 == row_end
        row += row_ends.to(tl.int32)
        row_begin = tl.where(row_ends, row_end, row_begin)
        first, end = key_range(seq_lens, shared_lens, row, row < num_rows, SHARED, WINDOW)
        slot = tl.load(slots + row, row < num_rows, other=0)
    if USE_PDL and SHARED:  # so that whoever waits for this kernel also waits for the one before it
        tl.extra.cuda.gdc_wait()


def decode(
    queries: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    num_sms: int,
    prefix: PrefixParts | None = None,
) -> None:
    """Launch `decode_kernel` and `merge_kernel` on the leading rows of a step.

    Args:
        queries, out: [R, num_heads, head_dim] of the rows; ``out`` is contiguous and written.
        keys, values: the layer's cache.
        inputs: of the step, whose first R rows these are.
        num_sms: multiprocessors of the GPU.
        prefix: what is merged in; the rows then attend to the keys behind it.
    """
    num_rows, num_heads, head_dim = out.shape
    page_size, kv_heads = keys.shape[1:3]
    group = num_heads // kv_heads
    block_m, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    block_n = min(128, max(16, _TILE_BYTES // (block_d * queries.element_size())))
    few = num_rows <= FEW_ROWS
    block_r = FEW_ROWS if few else max(256, triton.next_power_of_2(num_rows))
    programs = max(1, num_sms * (2 if few else 4) // kv_heads)
    part_out = torch.empty((num_rows + programs, num_heads, head_dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((num_rows + programs, num_heads), dtype=torch.float32, device=out.device)
    window = spec.sliding_window or 0
    decode_kernel[(kv_heads, programs)](
        queries,
        keys,
        values,
        out,
        part_out,
        part_lse,
        inputs.seq_lens,
        None if prefix is None else prefix.lens,
        inputs.slots,
        inputs.page_table,
        spec.scale * LOG2_E,
        num_rows,
        queries.stride(0),
        queries.stride(1),
        inputs.page_table.stride(0),
        SHARED=prefix is not None,
        WINDOW=window,
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=max(4 if few else 2, block_m * block_d // 1024),
        num_stages=5 if few else 3,
        **PDL_LAUNCH_ARGS,
    )
    merge(out, part_out, part_lse, inputs.seq_lens, programs, block_r, block_n, window, prefix)
