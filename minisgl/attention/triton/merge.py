"""Merge attention that was computed over several sets of keys for the same query.

The softmax over two sets is the sum of both results, each weighted by its share of the sum of weights. Outputs can thus
be combined from their log-sum-exps alone (FlashDecoding, Dao et al. 2023; cascade attention, Ye et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.attention.triton.tiles import LOWEST
from minisgl.kernels.launch import PDL_LAUNCH_ARGS, tile_range

MAX_PREFIX_PARTS = 8


class Tuning(NamedTuple):
    """Launch settings of `decode_kernel` and `merge_kernel`."""

    block_r: int  # rows whose lengths a program reads, a power of two
    programs: int  # of `decode_kernel` on a multiprocessor
    num_warps: int
    num_stages: int
    columns: int  # of a program of `merge_kernel`: so many elements of heads
    parts: int  # that it reads at a time
    merge_warps: int


def tuning(num_rows: int, shared: bool) -> Tuning:
    """Return what was fastest with so many rows on an H200.

    With few rows latency counts: `decode_kernel` then has wider programs, and `merge_kernel` narrower ones with more
    loads in flight. With many, `decode_kernel` has more programs, and `merge_kernel` no more than fit on the GPU at
    once. With a ``shared`` prefix, all of them fit on the GPU beside `prefix_kernel`.
    """
    if num_rows <= 16:
        return Tuning(16, programs=2, num_warps=4, num_stages=5, columns=128, parts=8, merge_warps=2)
    block_r = 64 if num_rows <= 64 else max(256, triton.next_power_of_2(num_rows))
    programs = 2 if shared else 4
    return Tuning(block_r, programs, num_warps=2, num_stages=3, columns=512, parts=1, merge_warps=2)


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Attention of decode rows over the prefix that they share with other rows, one result for each part of it."""

    lens: torch.Tensor  # int32[R] tokens of the prefix; 0: no prefix
    parts: torch.Tensor  # int32[R] into how many parts the prefix was cut; unset where there is none
    out: torch.Tensor  # float32[R, MAX_PREFIX_PARTS, num_heads, head_dim] attention over each part
    lse: torch.Tensor  # float32[R, MAX_PREFIX_PARTS, num_heads] log2 of its sum of weights


@triton.jit
def add_parts(
    part_out_ptr,  # float32[…, NUM_HEADS, HEAD_DIM]
    part_lse_ptr,  # float32[…, NUM_HEADS]
    line,  # index of the first part, in the dimension before NUM_HEADS
    num_parts,
    heads,  # int32[H]
    acc,
    row_sum,
    row_max,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,  # parts a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM or more
):
    """Merge ``num_parts`` parts of one row, which lie one after the other, into the running values of ``heads``.

    ``acc``, [H, BLOCK_D], is the sum of the parts, each times its weight ``exp2(lse − row_max)``; ``row_sum``, [H], the
    sum of these weights; ``row_max``, [H], the largest lse.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in tile_range(0, num_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        exists = (parts < num_parts)[:, None] & (heads < NUM_HEADS)[None, :]
        lines = (line + parts)[:, None] * NUM_HEADS + heads[None, :]
        # Past the first-level cache: nothing here is read twice.
        lse = tl.load(part_lse_ptr + lines, exists, other=LOWEST, cache_modifier=".cg")
        pointers = part_out_ptr + lines[:, :, None] * HEAD_DIM + dims[None, None, :]
        out = tl.load(pointers, exists[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        weights = tl.exp2(lse - new_max[None, :])
        rescale = tl.exp2(row_max - new_max)
        acc = acc * rescale[:, None] + tl.sum(out * weights[:, :, None], 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["num_rows", "programs"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def merge_kernel(
    out_ptr,  # [R, NUM_HEADS, HEAD_DIM], written
    part_out_ptr,  # this and the next three as in `decode_kernel`
    part_lse_ptr,
    seq_lens_ptr,
    shared_lens_ptr,
    prefix_parts_ptr,  # this and the next two as in `PrefixParts`, if SHARED
    prefix_out_ptr,
    prefix_lse_ptr,
    num_rows,
    programs,  # of `decode_kernel`, for each KV head
    USE_PDL: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PREFIX_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # this and BLOCK_N as in `decode_kernel`
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (h, r): merge the parts of row r in the h-th BLOCK_H heads, if `decode_kernel` has left any.

    All heads of a row are cut in the same places. The programs are few enough to run all at once, and each finds out
    what it has to merge before `decode_kernel` has ended.
    """
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    row = tl.program_id(1)
    all_rows = tl.arange(0, BLOCK_R)
    exists = all_rows < num_rows
    lengths = tl.load(seq_lens_ptr + all_rows, exists, other=0)
    firsts = tl.zeros_like(lengths)
    if SHARED:
        firsts = tl.load(shared_lens_ptr + all_rows, exists, other=0)
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
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        row_sum = tl.zeros([BLOCK_H], tl.float32)
        row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
        line = row + first_program
        acc, row_sum, row_max = add_parts(
            part_out_ptr, part_lse_ptr, line, num_parts, heads, acc, row_sum, row_max,
            NUM_HEADS, HEAD_DIM, BLOCK_P, BLOCK_D,
        )  # fmt: skip
        if SHARED:
            num_parts = tl.load(prefix_parts_ptr + row, tl.load(shared_lens_ptr + row) > 0, other=0)
            line = row * PREFIX_PARTS
            acc, row_sum, row_max = add_parts(
                prefix_out_ptr, prefix_lse_ptr, line, num_parts, heads, acc, row_sum, row_max,
                NUM_HEADS, HEAD_DIM, BLOCK_P, BLOCK_D,
            )  # fmt: skip
        lines = row * NUM_HEADS + heads
        mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + lines[:, None] * HEAD_DIM + dims[None, :], result, mask)


def merge_parts(
    out: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    seq_lens: torch.Tensor,
    programs: int,
    tuned: Tuning,
    block_n: int,
    window: int,
    prefix: PrefixParts | None,
) -> None:
    """Launch `merge_kernel`; arguments as there."""
    num_rows, num_heads, head_dim = out.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(max(1, tuned.columns // block_d), triton.next_power_of_2(num_heads))
    merge_kernel[(triton.cdiv(num_heads, block_h), num_rows)](
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
        BLOCK_R=tuned.block_r,
        BLOCK_N=block_n,
        BLOCK_P=tuned.parts,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=tuned.merge_warps,
        **PDL_LAUNCH_ARGS,
    )
