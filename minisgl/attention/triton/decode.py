"""Decode attention in Triton: one query token a row, split over the row's keys.

Decoding reads every key and value once and computes little, so it is fast when all multiprocessors read all the time.
FlashDecoding (Dao et al. 2023) splits the keys of a row among programs and merges their results; we split as stream-K
(Osama et al. 2023) and lean attention (Sanovar et al. 2024) do:

1. The keys of all rows, cut into tiles and laid end to end, are one long list.
2. Every program takes an equal share of the list: parts of a few rows, or a small part of one.
3. A second kernel merges the parts of rows that lie in several shares (`merge_kernel`).

Programs find their share from ``seq_lens`` on the device: the host plans nothing, one CUDA graph serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.attention.triton.merge import PrefixParts, merge_parts, tuning
from minisgl.attention.triton.tiles import LOG2_E, load_tile, running_values, softmax_step
from minisgl.batch import DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.kernels.launch import PDL_LAUNCH_ARGS, tile_range

_TILE_BYTES = 16384  # of a tile of keys in the queries' dtype; the values are as many again


@triton.jit
def key_range(seq_lens_ptr, shared_lens_ptr, row, exists, SHARED: tl.constexpr, WINDOW: tl.constexpr):
    """First and end of the keys that a row attends to here: behind the shared prefix, and inside the window."""
    end = tl.load(seq_lens_ptr + row, exists, other=0)
    first = end * 0
    if SHARED:
        first = tl.load(shared_lens_ptr + row, exists, other=0)
    if WINDOW > 0:
        first = tl.maximum(first, end - WINDOW)
    return first, end


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens_ptr", "slots_ptr"])
def decode_kernel(
    q_ptr,  # [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last
    k_cache_ptr,  # a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    out_ptr,  # [R, KV_HEADS × GROUP, HEAD_DIM]
    part_out_ptr,  # float32[R + programs, KV_HEADS × GROUP, HEAD_DIM]
    part_lse_ptr,  # float32[R + programs, KV_HEADS × GROUP]
    seq_lens_ptr,  # int32[R]
    shared_lens_ptr,  # int32[R] leading keys that are left out, if SHARED
    slots_ptr,  # int32[R]
    page_table_ptr,  # int32[slots, table_width]
    sinks_ptr,  # [KV_HEADS × GROUP], if SINKS
    scale,  # × log2(e)
    num_rows,
    token_stride,
    head_stride,
    table_width,
    USE_PDL: tl.constexpr,  # launched before the preceding kernel has ended, see `PDL_LAUNCH_ARGS`
    SHARED: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no sliding window
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,  # R or more
    BLOCK_M: tl.constexpr,  # GROUP or more
    BLOCK_N: tl.constexpr,  # keys a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM or more
):
    """Program (h, p): all query heads of KV head h, over the p-th share of all rows' keys.

    One loop over tiles runs across the ends of rows, so the next row's keys are already loading while a row ends.
    Results of rows that lie in one share go to ``out``. Those of other rows go to ``part_out`` and ``part_lse``:
    attention over the keys in one share, and log2 of its sum of weights. Share p of row r is in line p + r, which is
    unique, because from one part to the next either p or r grows.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    all_rows = tl.arange(0, BLOCK_R)
    all_firsts, all_ends = key_range(seq_lens_ptr, shared_lens_ptr, all_rows, all_rows < num_rows, SHARED, WINDOW)
    tile_ends = tl.cumsum(tl.cdiv(all_ends - all_firsts, BLOCK_N), 0)  # of each row in the list of all tiles
    num_tiles = tl.max(tile_ends, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = program * share
    stop = tl.minimum(begin + share, num_tiles)

    before = tile_ends <= begin
    row = tl.sum(before.to(tl.int32), 0)
    row_begin = tl.max(tl.where(before, tile_ends, 0), 0)
    first, end = key_range(seq_lens_ptr, shared_lens_ptr, row, row < num_rows, SHARED, WINDOW)
    slot = tl.load(slots_ptr + row, row < num_rows, other=0)
    group_index = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group_index
    mask = (group_index < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Of a row's parts, the one that begins the row has the sinks.
    row_sum, row_max = running_values(sinks_ptr, heads, group_index < GROUP, begin == row_begin, SINKS, BLOCK_M)
    new_sum, new_max = running_values(sinks_ptr, heads, group_index < GROUP, True, SINKS, BLOCK_M)
    if USE_PDL and not SHARED:  # what was read so far was written before the step's first layer
        tl.extra.cuda.gdc_wait()
    for tile in tile_range(begin, stop):
        positions = first + (tile - row_begin) * BLOCK_N + tl.arange(0, BLOCK_N)
        page_row = page_table_ptr + slot * table_width
        k, v = load_tile(
            k_cache_ptr, v_cache_ptr, page_row, kv_head, positions, end, True, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D
        )
        q = tl.load(q_ptr + row * token_stride + heads[:, None] * head_stride + dims[None, :], mask, other=0.0)
        visible = (positions < end)[None, :]
        acc, row_sum, row_max = softmax_step(q, k, v, visible, scale, acc, row_sum, row_max, True)

        row_end = row_begin + tl.cdiv(end - first, BLOCK_N)
        part_ends = tile + 1 == tl.minimum(row_end, stop)
        if part_ends:
            result = acc / row_sum[:, None]
            if not SHARED and row_begin >= begin and row_end <= stop:
                line = row * (KV_HEADS * GROUP) + heads
                tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result.to(out_ptr.dtype.element_ty), mask)
            else:
                line = (row + program) * (KV_HEADS * GROUP) + heads
                tl.store(part_out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask)
                tl.store(part_lse_ptr + line, row_max + tl.log2(row_sum), group_index < GROUP)
        acc = tl.where(part_ends, 0.0, acc)
        row_sum = tl.where(part_ends, new_sum, row_sum)
        row_max = tl.where(part_ends, new_max, row_max)
        row_ends = tile + 1 == row_end
        row += row_ends.to(tl.int32)
        row_begin = tl.where(row_ends, row_end, row_begin)
        first, end = key_range(seq_lens_ptr, shared_lens_ptr, row, row < num_rows, SHARED, WINDOW)
        slot = tl.load(slots_ptr + row, row < num_rows, other=0)
    if USE_PDL and SHARED:  # so that a kernel that waits for this one also waits for the one before
        tl.extra.cuda.gdc_wait()


def keys_per_tile(q: torch.Tensor, block_d: int) -> int:
    """Keys a tile of decode kernels: 16 KB in the queries' dtype, from 16 to 128 keys."""
    return min(128, max(16, _TILE_BYTES // (block_d * q.element_size())))


def paged_decode_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    num_sms: int,
    prefix: PrefixParts | None = None,
) -> None:
    """Attend for the first R rows of a step, which are decode rows: `decode_kernel`, then `merge_kernel`.

    Args:
        q, out: [R, num_heads, head_dim]; ``out`` is contiguous and written.
        k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim] of the layer.
        prefix: attention over shared prefixes, to be merged in; the rows then attend only to the keys behind them.
    """
    num_rows, num_heads, head_dim = out.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group = num_heads // kv_heads
    block_m, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    block_n = keys_per_tile(q, block_d)
    tuned = tuning(num_rows, shared=prefix is not None)
    programs = max(1, num_sms * tuned.programs // kv_heads)
    part_out = torch.empty((num_rows + programs, num_heads, head_dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((num_rows + programs, num_heads), dtype=torch.float32, device=out.device)
    window, page_table = spec.sliding_window or 0, inputs.table_of(spec.sliding_window)
    decode_kernel[(kv_heads, programs)](
        q,
        k_cache,
        v_cache,
        out,
        part_out,
        part_lse,
        inputs.seq_lens,
        None if prefix is None else prefix.lens,
        inputs.slots,
        page_table,
        spec.sinks,
        spec.scale * LOG2_E,
        num_rows,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        SHARED=prefix is not None,
        SINKS=spec.sinks is not None,
        WINDOW=window,
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=tuned.block_r,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=max(tuned.num_warps, block_m * block_d // 1024),
        num_stages=tuned.num_stages,
        **PDL_LAUNCH_ARGS,
    )
    merge_parts(out, part_out, part_lse, inputs.seq_lens, programs, tuned, block_n, window, prefix)
