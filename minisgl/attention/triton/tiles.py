"""What our Triton attention kernels have in common: the loop over tiles of paged keys, and the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, tile_range

LOG2_E = 1.4426950408889634


LOWEST = tl.constexpr(-3.0e38)
"""Where a running maximum starts: finite, so that subtracting it from −∞ (a masked score) is never NaN."""


@triton.jit
def load_tile(
    keys,
    values,
    page_row,
    head,
    positions,
    end,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys and values of one sequence at some positions, in one KV head, [N, BLOCK_D] each.

    Args:
        keys, values: pointers to a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM].
        page_row: pointer to the sequence's row of the page table.
        positions: int32[N].
        end: positions from here on are not loaded but zero. What was never written may be NaN, which not even a weight
            of 0 would silence.
        MASKED: False if all positions are before ``end``.
    """
    dims = tl.arange(0, BLOCK_D)
    valid = positions < end
    if MASKED:
        pages = tl.load(page_row + positions // PAGE_SIZE, valid, other=0)
    else:
        pages = tl.load(page_row + positions // PAGE_SIZE)
    locations = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
    offsets = (locations * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    if MASKED or BLOCK_D > HEAD_DIM:
        used = valid[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, used, other=0.0)
        v = tl.load(values + offsets, used, other=0.0)
    else:
        k = tl.load(keys + offsets)
        v = tl.load(values + offsets)
    return k, v


@triton.jit
def attend_keys(
    queries,
    keys,
    values,
    page_row,
    head,
    begin,
    end,
    seen,
    scale,
    acc,
    total,
    peak,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend over the keys ``begin … end`` of one sequence in one KV head, tile by tile.

    Args:
        queries: [M, BLOCK_D].
        keys, values, page_row: as in `load_tile`.
        seen: int32[M] or [1] each query sees the keys up to this position, exclusive, and of those the last WINDOW.
        scale: factor on q·k, not negative, times log2(e): a power of two is one instruction, one of e is two.
        acc, total, peak: [M, BLOCK_D], [M] and [M] of the keys before: the weighted sum of their values, the sum of
            their weights, and the largest score, relative to which the weights are.
        MASKED: False if all queries see all of these keys, which are whole tiles.
        WINDOW: 0 is none.

    Returns:
        ``acc``, ``total`` and ``peak`` with these keys.
    """
    for start in tile_range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        k, v = load_tile(keys, values, page_row, head, positions, end, MASKED, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D)
        visible = positions[None, :] < seen[:, None]
        if WINDOW > 0:
            visible &= positions[None, :] >= seen[:, None] - WINDOW
        acc, total, peak = softmax_step(queries, k, v, visible, scale, acc, total, peak, MASKED)
    return acc, total, peak


@triton.jit
def softmax_step(queries, keys, values, visible, scale, acc, total, peak, MASKED: tl.constexpr):
    """Attend over one more tile of keys (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).

    Args:
        queries, keys, values: [M, D], [N, D] and [N, D], the latter two in any dtype.
        visible: bool, broadcasts to [M, N], which query sees which key; looked at if ``MASKED``.
        scale, acc, total, peak: as in `attend_keys`.
    """
    if INTERPRETED:  # tl.dot of the interpreter does not know bfloat16
        queries = queries.to(tl.float32)
    elif keys.dtype == tl.float8e4nv and queries.dtype == tl.bfloat16:
        queries = queries.to(tl.float16)  # the GPU has instructions from eight bits to this, and none to bfloat16
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
    else:  # one multiplication a row in place of one a score; the other is part of a fused multiply-add
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, total, new_peak
