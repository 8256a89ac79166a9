"""Merging attention over several sets of keys of the same query.

A softmax over two sets of keys is the sum of the two results, each weighted by its share of the sum of weights. So what
different programs, or different kernels, have computed over different keys is put together without another look at them
(FlashDecoding, Dao et al. 2023; cascade attention, Ye et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.attention.triton.tiles import LOWEST
from minisgl.kernels.launch import PDL_LAUNCH_ARGS, tile_range

MAX_PREFIX_PARTS = 8


FEW_ROWS = 16
"""Up to here latency counts. `decode_kernel` has wider programs then, and `merge_kernel` narrower ones, each with more
on the way; beyond, `decode_kernel` has more programs, and `merge_kernel` no more than there is room for at once."""


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Attention of decode rows over the prefix that they share with others.

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


@triton.jit
def add_parts(
    part_out,
    part_lse,
    line,
    num_parts,
    columns,
    acc,
    total,
    peak,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge in parts that lie one after the other, of some columns of one row.

    Args:
        part_out: pointer to float32[…, NUM_HEADS, HEAD_DIM]; part_lse: to float32[…, NUM_HEADS].
        line: where the first part is, in the dimension before NUM_HEADS.
        columns: int32[W] of the last two dimensions taken together.
        acc, total, peak: float32[W] so far: the sum of the parts, each times its weight; the sum of the weights; and
            the largest part_lse, relative to which the weights are. Each element for itself.
        BLOCK_P: parts at a time.
    """
    for start in tile_range(0, num_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        exists = (parts < num_parts)[:, None] & (columns < NUM_HEADS * HEAD_DIM)[None, :]
        lines = (line + parts)[:, None] * NUM_HEADS
        # Past the first-level cache: nothing here is read twice.
        lse = tl.load(part_lse + lines + columns[None, :] // HEAD_DIM, exists, other=LOWEST, cache_modifier=".cg")
        out = tl.load(part_out + lines * HEAD_DIM + columns[None, :], exists, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay + tl.sum(out * weights, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=["num_rows", "programs"], do_not_specialize_on_alignment=["seq_lens"])
def merge_kernel(
    out,
    part_out,
    part_lse,
    seq_lens,
    shared_lens,
    prefix_parts,
    prefix_out,
    prefix_lse,
    num_rows,
    programs,
    USE_PDL: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PREFIX_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (c, r): merge the parts of row r in the c-th BLOCK_W columns, if `decode_kernel` has left any.

    All heads of a row are cut in the same places, so columns may be of several heads. The programs are few enough to be
    on the multiprocessors all at once, where each finds out what it has to do before `decode_kernel` has ended.

    Args:
        out: [R, NUM_HEADS, HEAD_DIM] written.
        part_out, part_lse, seq_lens, shared_lens: as in `decode_kernel`.
        prefix_parts, prefix_out, prefix_lse: as in `PrefixParts`, if SHARED.
        programs: of `decode_kernel`, a head.
        WINDOW, BLOCK_R, BLOCK_N: of `decode_kernel`. BLOCK_P: as in `add_parts`.
    """
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    columns = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.program_id(1)
    all_rows = tl.arange(0, BLOCK_R)
    exists = all_rows < num_rows
    lengths = tl.load(seq_lens + all_rows, exists, other=0)
    firsts = tl.zeros_like(lengths)
    if SHARED:
        firsts = tl.load(shared_lens + all_rows, exists, other=0)
    if WINDOW > 0:
        firsts = tl.maximum(firsts, lengths - WINDOW)
    tiles = tl.cdiv(lengths - firsts, BLOCK_N)
    share = tl.cdiv(tl.sum(tiles, 0), programs)
    row_begin = tl.sum(tl.where(all_rows < row, tiles, 0), 0)
    row_end = tl.sum(tl.where(all_rows <= row, tiles, 0), 0)
    first_program = row_begin // share
    num_parts = (row_end - 1) // share - first_program + 1
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    if SHARED or num_parts > 1:
        acc = tl.zeros([BLOCK_W], tl.float32)
        total = tl.zeros([BLOCK_W], tl.float32)
        peak = tl.full([BLOCK_W], LOWEST, tl.float32)
        line = row + first_program
        acc, total, peak = add_parts(
            part_out, part_lse, line, num_parts, columns, acc, total, peak, NUM_HEADS, HEAD_DIM, BLOCK_P
        )
        if SHARED:
            num_parts = tl.load(prefix_parts + row, tl.load(shared_lens + row) > 0, other=0)
            line = row * PREFIX_PARTS
            acc, total, peak = add_parts(
                prefix_out, prefix_lse, line, num_parts, columns, acc, total, peak, NUM_HEADS, HEAD_DIM, BLOCK_P
            )
        tl.store(out + row * WIDTH + columns, (acc / total).to(out.dtype.element_ty), columns < WIDTH)


def merge(
    out: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    seq_lens: torch.Tensor,
    programs: int,
    block_r: int,
    block_n: int,
    window: int,
    prefix: PrefixParts | None,
) -> None:
    """Launch `merge_kernel`. Arguments as there."""
    num_rows, num_heads, head_dim = out.shape
    # One row is in many parts, many rows are in one or two.
    few = num_rows <= FEW_ROWS
    width = num_heads * head_dim
    block_w = min(256 if few else 1024, triton.next_power_of_2(width))
    merge_kernel[(triton.cdiv(width, block_w), num_rows)](
        out,
        part_out,
        part_lse,
        seq_lens,
        None if prefix is None else prefix.lens,
        None if prefix is None else prefix.parts,
        None if prefix is None else prefix.out,
        None if prefix is None else prefix.lse,
        num_rows,
        programs,
        SHARED=prefix is not None,
        WINDOW=window,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PREFIX_PARTS=MAX_PREFIX_PARTS,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        BLOCK_P=8 if few else 2,
        BLOCK_W=block_w,
        num_warps=4,
        **PDL_LAUNCH_ARGS,
    )
