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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.attention.triton_tiles import LOG2_E, LOWEST, add_parts, attend_keys
from minisgl.core import AttentionSpec, DeviceBatch

_TILE_BYTES = 16384
"""Of a tile of keys; the values are as many again."""

_FEW_ROWS = 16
"""Up to here latency counts: wider programs, each with more tiles on the way. Beyond, more programs."""


@triton.jit
def first_key(length, shared, WINDOW: tl.constexpr):
    """First key that a decode row attends to here: behind the shared prefix, and inside of the window."""
    first = shared
    if WINDOW > 0:
        first = tl.maximum(first, length - WINDOW)
    return first


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens", "slots"])
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
    shared_lens,
    shared_parts,
    shared_out,
    shared_lse,
    scale,
    num_rows,
    token_stride,
    head_stride,
    table_width,
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
        shared_lens, shared_parts, shared_out, shared_lse: as in `PrefixParts`; looked at if SHARED.
        scale: times log2(e).
        WINDOW: 0 is none. BLOCK_R, BLOCK_M, BLOCK_D: R, GROUP and HEAD_DIM or more. BLOCK_N: keys a tile.
    """
    head = tl.program_id(0)
    program = tl.program_id(1)
    all_rows = tl.arange(0, BLOCK_R)
    lengths = tl.load(seq_lens + all_rows, all_rows < num_rows, other=0)
    prefixes = tl.zeros([BLOCK_R], tl.int32)
    if SHARED:
        prefixes = tl.load(shared_lens + all_rows, all_rows < num_rows, other=0)
    tiles = tl.cdiv(lengths - first_key(lengths, prefixes, WINDOW), BLOCK_N)
    ends = tl.cumsum(tiles, 0)  # of each row in the list of all tiles
    num_tiles = tl.sum(tiles, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(1))
    tile = program * share
    stop = tl.minimum(tile + share, num_tiles)

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + members
    is_head = members < GROUP
    used = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    while tile < stop:
        before = ends <= tile
        row = tl.sum(before.to(tl.int32), 0)
        row_begin = tl.max(tl.where(before, ends, 0), 0)
        length = tl.load(seq_lens + row)
        prefix = 0
        if SHARED:
            prefix = tl.load(shared_lens + row)
        first = first_key(length, prefix, WINDOW)
        row_end = row_begin + tl.cdiv(length - first, BLOCK_N)
        part_end = tl.minimum(row_end, stop)
        begin = first + (tile - row_begin) * BLOCK_N
        end = tl.minimum(first + (part_end - row_begin) * BLOCK_N, length)
        page_row = page_table + tl.load(slots + row) * table_width
        q = tl.load(queries + row * token_stride + heads[:, None] * head_stride + dims[None, :], used, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)
        acc, total, peak = attend_keys(
            q, keys, values, page_row, head, begin, end, tl.full([1], end, tl.int32), scale, acc, total, peak,
            True, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

        first_program = row_begin // share
        last_program = (row_end - 1) // share
        complete = first_program == last_program
        if first_program < last_program:
            line = (row + program) * (KV_HEADS * GROUP) + heads
            tl.store(part_out + line[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], used)
            tl.store(part_lse + line, peak + tl.log2(total), is_head)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + row * KV_HEADS + head
            complete = tl.atomic_add(counter, 1) == last_program - first_program
            if complete:
                tl.store(counter, 0)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                peak = tl.full([BLOCK_M], LOWEST, tl.float32)
                first_line = (row + first_program) * (KV_HEADS * GROUP) + heads
                acc, total, peak = add_parts(
                    part_out, part_lse, first_line, last_program - first_program + 1, is_head, acc, total, peak,
                    KV_HEADS * GROUP, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
        if complete:
            if SHARED:
                num_parts = tl.load(shared_parts + row, prefix > 0, other=0)
                first_line = row * MAX_PREFIX_PARTS * (KV_HEADS * GROUP) + heads
                acc, total, peak = add_parts(
                    shared_out, shared_lse, first_line, num_parts, is_head, acc, total, peak,
                    KV_HEADS * GROUP, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
            out_pointers = out + (row * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_pointers, (acc / total[:, None]).to(out.dtype.element_ty), used)
        tile = part_end


MAX_PREFIX_PARTS = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Attention of decode rows over the prefix that they share with others, computed before.

    Args:
        lens: int32[R] tokens of the prefix; 0 is none.
        parts: int32[R] how many parts the prefix was cut into; only of rows that have one.
        out: float32[R, MAX_PREFIX_PARTS, num_heads, head_dim] attention over each part.
        lse: float32[R, MAX_PREFIX_PARTS, num_heads] log2 of its sum of weights.
    """

    lens: torch.Tensor
    parts: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def decode(
    queries: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    arrived: torch.Tensor,
    num_sms: int,
    prefix: PrefixParts | None = None,
) -> None:
    """Launch `decode_kernel` on the leading rows of a step.

    Args:
        queries, out: [R, num_heads, head_dim] of the rows; ``out`` is contiguous and written.
        keys, values: the layer's cache.
        inputs: of the step, whose first R rows these are.
        arrived: as in `decode_kernel`.
        num_sms: multiprocessors of the GPU.
        prefix: what is merged in; the rows then attend to the keys behind it.
    """
    num_rows, num_heads, head_dim = out.shape
    page_size, kv_heads = keys.shape[1:3]
    group = num_heads // kv_heads
    block_m, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    few = num_rows <= _FEW_ROWS
    programs = max(1, num_sms * (2 if few else 4) // kv_heads)
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
        None if prefix is None else prefix.lens,
        None if prefix is None else prefix.parts,
        None if prefix is None else prefix.out,
        None if prefix is None else prefix.lse,
        spec.scale * LOG2_E,
        num_rows,
        queries.stride(0),
        queries.stride(1),
        inputs.page_table.stride(0),
        SHARED=prefix is not None,
        WINDOW=spec.sliding_window or 0,
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=_FEW_ROWS if few else max(256, triton.next_power_of_2(num_rows)),
        BLOCK_M=block_m,
        BLOCK_N=min(128, max(16, _TILE_BYTES // (block_d * keys.element_size()))),
        BLOCK_D=block_d,
        num_warps=max(4 if few else 2, block_m * block_d // 1024),
        num_stages=5 if few else 3,
    )
