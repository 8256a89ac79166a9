"""Attention of decode rows over a prefix that they share: the queries of all rows become one matrix.

A row alone multiplies its one query with every key, which is bound by reading. The rows of a group read the same keys,
so their queries can be multiplied together, with the keys read once and the tensor cores at work (Hydragen, Juravsky et
al. 2024; cascade attention, Ye et al. 2024). The result is more parts for `merge_kernel`, beside those that
`decode_kernel` leaves of the keys behind the prefix.
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


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=["slots"])
def prefix_kernel(
    queries,
    keys,
    values,
    out,
    out_lse,
    num_parts,
    slots,
    page_table,
    members,
    group_ends,
    group_lens,
    scale,
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
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (h, p): all query heads of KV head h, over the p-th share of all groups' prefixes.

    The members of a group are cut into blocks that fill a tile of queries. For each block, the keys of the prefix are
    cut into tiles; those of all blocks of all groups, laid end to end, are shared out evenly as in `decode_kernel`.

    Args:
        queries: [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last.
        keys, values: a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM].
        out, out_lse, num_parts: ``out``, ``lse`` and ``parts`` of `PrefixParts`, written.
        slots: int32[R]. page_table: int32[slots, table_width].
        members: int32[R] rows, group after group; group_ends: int32[num_groups] where each group ends among them;
            group_lens: int32[num_groups] tokens of its prefix, 0 if there is no such group.
        scale: times log2(e).
        BLOCK_G, BLOCK_D: num_groups and HEAD_DIM or more. BLOCK_M: queries a tile, at least GROUP. BLOCK_N: keys a
            tile.
    """
    if USE_PDL:  # `decode_kernel` needs nothing of what is computed here
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = BLOCK_M // GROUP  # in a block
    head = tl.program_id(0)
    program = tl.program_id(1)
    groups = tl.arange(0, BLOCK_G)
    member_ends = tl.load(group_ends + groups, groups < num_groups, other=0)
    member_begins = tl.load(group_ends + groups - 1, (groups > 0) & (groups < num_groups), other=0)
    tiles_of_block = tl.cdiv(tl.load(group_lens + groups, groups < num_groups, other=0), BLOCK_N)
    ends = tl.cumsum(tl.cdiv(member_ends - member_begins, ROWS) * tiles_of_block, 0)
    num_tiles = tl.max(ends, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(1))
    # A prefix is in as many parts as there are shares that it touches.
    share = tl.maximum(share, tl.cdiv(tl.max(tiles_of_block, 0), MAX_PARTS - 1))
    tile = program * share
    stop = tl.minimum(tile + share, num_tiles)

    index = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + index % GROUP
    while tile < stop:
        before = ends <= tile
        group = tl.sum(before.to(tl.int32), 0)
        group_begin = tl.max(tl.where(before, ends, 0), 0)
        length = tl.load(group_lens + group)
        num_block_tiles = tl.cdiv(length, BLOCK_N)
        block = (tile - group_begin) // num_block_tiles
        block_begin = group_begin + block * num_block_tiles
        part_end = tl.minimum(block_begin + num_block_tiles, stop)
        first_member = tl.load(group_ends + group - 1, group > 0, other=0)
        page_row = page_table + tl.load(slots + tl.load(members + first_member)) * table_width
        member = first_member + block * ROWS + index // GROUP
        is_query = (member < tl.load(group_ends + group)) & (index < ROWS * GROUP)
        rows = tl.load(members + member, is_query, other=0)
        used = is_query[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(queries + (rows * token_stride + heads * head_stride)[:, None] + dims[None, :], used, other=0.0)

        begin = (tile - block_begin) * BLOCK_N
        end = tl.minimum((part_end - block_begin) * BLOCK_N, length)
        whole_tiles_end = end // BLOCK_N * BLOCK_N
        seen = tl.full([1], end, tl.int32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)
        acc, total, peak = attend_keys(
            q, keys, values, page_row, head, begin, whole_tiles_end, seen, scale, acc, total, peak,
            False, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, total, peak = attend_keys(
            q, keys, values, page_row, head, whole_tiles_end, end, seen, scale, acc, total, peak,
            True, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

        first_program = block_begin // share
        last_program = (block_begin + num_block_tiles - 1) // share
        line = (rows * MAX_PARTS + program - first_program) * (KV_HEADS * GROUP) + heads
        tl.store(out + line[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], used)
        tl.store(out_lse + line, peak + tl.log2(total), is_query)
        tl.store(num_parts + rows, tl.zeros_like(rows) + last_program - first_program + 1, is_query)
        tile = part_end


@dataclass(frozen=True, slots=True)
class PrefixTables:
    """`PrefixGroups` on the device, int32.

    Args:
        shared_lens, members: [R] as there.
        ends, lens: [most groups there can be] as there; past the last group, its end again and 0.
    """

    shared_lens: torch.Tensor
    members: torch.Tensor
    ends: torch.Tensor
    lens: torch.Tensor


def attend_prefixes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: DeviceBatch,
    spec: AttentionSpec,
    tables: PrefixTables,
    num_sms: int,
) -> PrefixParts:
    """Launch `prefix_kernel` on the decode rows of a step.

    Args:
        queries: [R, num_heads, head_dim].
        keys, values: the layer's cache.
        inputs: of the step.
        tables: groups of the rows.
        num_sms: multiprocessors of the GPU.
    """
    num_rows, num_heads, head_dim = queries.shape
    page_size, kv_heads = keys.shape[1:3]
    group = num_heads // kv_heads
    block_m, block_n, num_stages = 128, 64, 5
    if queries.dtype == torch.float32:  # no tensor cores; the multiplications are unrolled
        block_m, block_n, num_stages = 16, 32, 3
    elif head_dim > 128:
        block_m, block_n, num_stages = 64, 32, 3
    block_m = max(block_m, triton.next_power_of_2(group))
    lines = (num_rows, MAX_PREFIX_PARTS, num_heads)
    parts = torch.empty(num_rows, dtype=torch.int32, device=queries.device)
    out = torch.empty((*lines, head_dim), dtype=torch.float32, device=queries.device)
    lse = torch.empty(lines, dtype=torch.float32, device=queries.device)
    prefix_kernel[(kv_heads, max(1, num_sms // kv_heads))](
        queries,
        keys,
        values,
        out,
        lse,
        parts,
        inputs.slots,
        inputs.page_table,
        tables.members,
        tables.ends,
        tables.lens,
        spec.scale * LOG2_E,
        len(tables.lens),
        queries.stride(0),
        queries.stride(1),
        inputs.page_table.stride(0),
        MAX_PARTS=MAX_PREFIX_PARTS,
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_G=max(16, triton.next_power_of_2(len(tables.lens))),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=max(4, block_m // 16),
        num_stages=num_stages,
        **PDL_LAUNCH_ARGS,
    )
    return PrefixParts(tables.shared_lens, parts, out, lse)
