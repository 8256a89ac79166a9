"""Attention of decode rows over a prefix that they share: the queries of all rows become one matrix.

A single row is bound by reading keys. Rows of a group read the same keys, so we read those once and multiply all
queries with them on the tensor cores (Hydragen, Juravsky et al. 2024; cascade attention, Ye et al. 2024).
`merge_kernel` adds the keys behind the prefix, from `decode_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.attention.triton.merge import MAX_PREFIX_PARTS, PrefixParts
from minisgl.attention.triton.tiles import LOG2_E, LOWEST, attend_keys
from minisgl.batch import DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.kernels.launch import PDL_LAUNCH_ARGS


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=["slots_ptr"])
def prefix_kernel(
    q_ptr,  # [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last
    k_cache_ptr,  # a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    out_ptr,  # `PrefixParts.out`, written as the next two, `lse` and `parts`
    out_lse_ptr,
    num_parts_ptr,
    slots_ptr,  # int32[R]
    page_table_ptr,  # int32[slots, table_width]
    members_ptr,  # int32[R] rows, group after group
    group_ends_ptr,  # int32[num_groups] where each group ends among the members
    group_lens_ptr,  # int32[num_groups] tokens of its prefix; 0: padding
    scale,  # × log2(e)
    num_groups,
    token_stride,
    head_stride,
    table_width,
    USE_PDL: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # num_groups or more
    BLOCK_M: tl.constexpr,  # queries a tile, at least GROUP
    BLOCK_N: tl.constexpr,  # keys a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM or more
):
    """Program (h, p): all query heads of KV head h, over the p-th share of all groups' prefixes.

    The members of a group are cut into blocks that fill a tile of queries, and for each block the keys of the prefix
    are cut into tiles. Those of all blocks of all groups, laid end to end, are shared out evenly as in `decode_kernel`.
    """
    if USE_PDL:  # `decode_kernel` needs nothing of what is computed here
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = BLOCK_M // GROUP  # in a block
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    groups = tl.arange(0, BLOCK_G)
    member_ends = tl.load(group_ends_ptr + groups, groups < num_groups, other=0)
    member_begins = tl.load(group_ends_ptr + groups - 1, (groups > 0) & (groups < num_groups), other=0)
    tiles_of_block = tl.cdiv(tl.load(group_lens_ptr + groups, groups < num_groups, other=0), BLOCK_N)
    ends = tl.cumsum(tl.cdiv(member_ends - member_begins, ROWS) * tiles_of_block, 0)
    num_tiles = tl.max(ends, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(1))
    # A prefix is in as many parts as there are shares that it touches.
    share = tl.maximum(share, tl.cdiv(tl.max(tiles_of_block, 0), MAX_PARTS - 1))
    tile = program * share
    stop = tl.minimum(tile + share, num_tiles)

    index = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + index % GROUP
    while tile < stop:
        before = ends <= tile
        group = tl.sum(before.to(tl.int32), 0)
        group_begin = tl.max(tl.where(before, ends, 0), 0)
        length = tl.load(group_lens_ptr + group)
        num_block_tiles = tl.cdiv(length, BLOCK_N)
        block = (tile - group_begin) // num_block_tiles
        block_begin = group_begin + block * num_block_tiles
        part_end = tl.minimum(block_begin + num_block_tiles, stop)
        first_member = tl.load(group_ends_ptr + group - 1, group > 0, other=0)
        page_row = page_table_ptr + tl.load(slots_ptr + tl.load(members_ptr + first_member)) * table_width
        member = first_member + block * ROWS + index // GROUP
        is_query = (member < tl.load(group_ends_ptr + group)) & (index < ROWS * GROUP)
        rows = tl.load(members_ptr + member, is_query, other=0)
        mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + (rows * token_stride + heads * head_stride)[:, None] + dims[None, :], mask, other=0.0)

        begin = (tile - block_begin) * BLOCK_N
        end = tl.minimum((part_end - block_begin) * BLOCK_N, length)
        whole_tiles_end = end // BLOCK_N * BLOCK_N
        visible_end = tl.full([1], end, tl.int32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        acc, row_sum, row_max = attend_keys(
            q, k_cache_ptr, v_cache_ptr, page_row, kv_head, begin, whole_tiles_end, visible_end,
            scale, acc, row_sum, row_max, False, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, row_sum, row_max = attend_keys(
            q, k_cache_ptr, v_cache_ptr, page_row, kv_head, whole_tiles_end, end, visible_end,
            scale, acc, row_sum, row_max, True, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

        first_program = block_begin // share
        last_program = (block_begin + num_block_tiles - 1) // share
        line = (rows * MAX_PARTS + program - first_program) * (KV_HEADS * GROUP) + heads
        tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], acc / row_sum[:, None], mask)
        tl.store(out_lse_ptr + line, row_max + tl.log2(row_sum), is_query)
        tl.store(num_parts_ptr + rows, tl.zeros_like(rows) + last_program - first_program + 1, is_query)
        tile = part_end


@dataclass(frozen=True, slots=True)
class DevicePrefixGroups:
    """`PrefixGroups` on the device, int32, padded to the largest number of groups that R rows can form."""

    shared_lens: torch.Tensor  # [R]
    members: torch.Tensor  # [R]
    ends: torch.Tensor  # [max_groups]; past the last group, its end again
    lens: torch.Tensor  # [max_groups]; past the last group, 0


def shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    groups: DevicePrefixGroups,
    num_sms: int,
) -> PrefixParts:
    """Attend for decode rows, [R, num_heads, head_dim], over the prefix of their group: launch `prefix_kernel`."""
    num_rows, num_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group = num_heads // kv_heads
    # Four warps a multiprocessor leave room for `decode_kernel`, which reads while this kernel computes.
    block_m, block_n, num_stages = (64, 64, 5) if group <= 2 else (128, 32, 6)
    if q.dtype == torch.float32:  # no tensor cores; the multiplications are unrolled
        block_m, block_n, num_stages = 16, 32, 3
    elif head_dim > 128:
        block_m, block_n, num_stages = 64, 32, 3
    block_m = max(block_m, triton.next_power_of_2(group))
    lines = (num_rows, MAX_PREFIX_PARTS, num_heads)
    parts = torch.empty(num_rows, dtype=torch.int32, device=q.device)
    out = torch.empty((*lines, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty(lines, dtype=torch.float32, device=q.device)
    prefix_kernel[(kv_heads, max(1, num_sms // kv_heads))](
        q,
        k_cache,
        v_cache,
        out,
        lse,
        parts,
        inputs.slots,
        inputs.page_table,
        groups.members,
        groups.ends,
        groups.lens,
        spec.scale * LOG2_E,
        len(groups.lens),
        q.stride(0),
        q.stride(1),
        inputs.page_table.stride(0),
        MAX_PARTS=MAX_PREFIX_PARTS,
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_G=max(16, triton.next_power_of_2(len(groups.lens))),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=max(4, block_m // 32),
        num_stages=num_stages,
        **PDL_LAUNCH_ARGS,
    )
    return PrefixParts(groups.shared_lens, parts, out, lse)
